// Drafts of a step: K and V of its new tokens as they were given, and what its end makes of those that stay. Only CUDA builds include
// this.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "src/attend/cuda/schedules.h"
#include "src/attend/cuda/tables.h"

namespace ta {

class CudaDrafts {
  public:
    CudaDrafts(Pool& pool, CudaDevice& device);

    // All memory that the step takes for them, its end included.
    Status begin(const Step& step);
    // Has an append of one layer keep its `tokens` rows.
    void keep(uint32_t layer, int64_t tokens, cuda::AppendArgs& append);

    // The blocks to which the tokens that stay are appended once more.
    struct Redone {
        const int32_t* n_tasks;
        const cuda::AppendTask* tasks;
        size_t blocks;
        const cuda::AppendLayer* layers;  // [layers]
    };
    // Counts the tokens that stay, and brings their rows together. `layers`: [layers] of the appends.
    Result<Redone> close_up(const Step& step, const CudaTables& tables, std::span<const cuda::AppendLayer> layers,
                            cudaStream_t stream);
    // The place that keeps a layer's K or V, one row behind the other.
    cuda::TensorArgs rows(uint32_t layer, bool v) const;

    // Adds to `kind` all that captured appends depend on.
    void add_kind(KindOfStep& kind) const;

  private:
    // Offsets of the tables of an end.
    struct EndTables {
        size_t paths, types, layers, redone, bytes;
        EndTables(const Step& step, size_t n_types);
    };

    Pool& pool_;
    CudaDevice& device_;
    DeviceBuffer rows_;           // [layers, 2, total_new]
    std::vector<uint8_t> types_;  // [layers, 2] as they were last appended
    size_t bytes_ = 0;            // of a layer's K or V
    DeviceBuffer end_tables_;
    PinnedBuffer uploads_[4];
    uint64_t ended_ = 0;
};

}  // namespace ta
