// Which query heads of a partitioned step's results each rank gets: for CPUs and GPUs alike.
#pragma once

#include <cstdint>

#include "kernels/format/types.h"

namespace ta {

struct OutputHeads {
    enum class Kind : int32_t { kAll, kHeads, kOne };  // as ta_partition_output
    struct Range {
        int64_t first, end;
    };

    Kind kind = Kind::kAll;
    uint32_t ranks = 1;
    uint32_t one = 0;  // the rank under kOne
    int64_t heads = 0;

    TA_HD Range of(uint32_t rank) const {
        if (kind == Kind::kHeads) return {heads * rank / ranks, heads * (rank + 1) / ranks};
        return {0, kind == Kind::kAll || rank == one ? heads : 0};
    }
};

}  // namespace ta
