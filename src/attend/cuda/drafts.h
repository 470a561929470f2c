// Drafts of a step: keeps K and V of its new tokens as given, and appends the kept ones again at the end. Only CUDA builds
// include this.
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

    // Takes all memory that the step needs for drafts, also for its end.
    Status begin(const Step& step);
    // Makes an append of one layer keep its `tokens` rows.
    void keep(uint32_t layer, int64_t tokens, cuda::AppendArgs& append);

    // The blocks to which the kept tokens are appended again.
    struct Redone {
        const int32_t* n_tasks;
        const cuda::AppendTask* tasks;
        size_t blocks;
        const cuda::AppendLayer* layers;  // [layers]
    };
    // Counts the kept tokens, and moves their rows together. `layers`: [layers], of the appends. After a failure the next call
    // continues where this one stopped.
    Result<Redone> close_up(const Step& step, const CudaTables& tables, std::span<const cuda::AppendLayer> layers,
                            cudaStream_t stream);
    // Where a layer's K or V are kept, one row after the other.
    cuda::TensorArgs rows(uint32_t layer, bool v) const;

    // Adds to `kind` what captured appends depend on.
    void add_kind(KindOfStep& kind) const;

  private:
    // Offsets in the tables that an end sends.
    struct EndTables {
        size_t paths, types, layers, redone, bytes;
        EndTables(const Step& step, size_t n_types);
    };
    Status send_tables(const Step& step, const CudaTables& tables, std::span<const cuda::AppendLayer> layers,
                       cudaStream_t stream);

    Pool& pool_;
    CudaDevice& device_;
    DeviceBuffer rows_;           // [layers, 2, total_new]
    std::vector<uint8_t> types_;  // [layers, 2]: types of the last appends
    size_t bytes_ = 0;            // of a layer's K or V
    DeviceBuffer end_tables_;
    PinnedBuffer uploads_[4];
    uint64_t ended_ = 0;         // steps whose ends have sent tables
    uint8_t* staged_ = nullptr;  // this step's tables, in its upload buffer
    bool sent_ = false;          // this step's tables
    size_t redone_ = 0;          // blocks in this step's tables
    uint32_t closed_up_ = 0;     // layers whose rows are together, or enqueued to be
};

}  // namespace ta
