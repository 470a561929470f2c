// A sequence whose blocks are spread over the ranks of a group.
#pragma once

#include <cstdint>
#include <memory>

#include "include/turboattention.h"
#include "src/kv/share/exchange.h"

namespace ta {

// One rank's side of it. Every rank quantizes all tokens. A block that is another rank's goes once there is one behind it: the last
// one says how the next begins.
struct Partition {
    std::shared_ptr<share::Exchange> exchange;  // which knows the tag; nullptr: it does not yet
    uint64_t tag = 0;                           // of the sequence, the same at all ranks
    uint32_t first_rank = 0;                    // that has block 0
    ta_partition_output output = TA_OUTPUT_ALL;
    uint32_t output_rank = 0;

    Partition() = default;
    Partition(const Partition&) = delete;
    Partition& operator=(const Partition&) = delete;
    ~Partition() {
        if (exchange) exchange->remove_tag(tag);
    }

    uint32_t rank_of(int64_t block) const { return uint32_t((uint64_t(first_rank) + uint64_t(block)) % exchange->ranks()); }
    // The first block that is this rank's.
    int32_t first_own() const {
        const uint32_t n = exchange->ranks();
        return int32_t((exchange->rank() + n - first_rank) % n);
    }
    bool owns(int64_t block) const { return rank_of(block) == exchange->rank(); }
};

}  // namespace ta
