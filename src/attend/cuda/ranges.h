// Attention of a pool with batch_invariant on a GPU: each query on its own, by ranges of its keys (kernels/cuda/any/ranges). It reads
// the blocks before its own as later steps find them, and its own at stage 1, if the step touches it. Pages in the peer and the host
// tier are read in place. Only CUDA builds include this.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/any/ranges/ranges.h"
#include "src/attend/call.h"
#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/tables.h"

namespace ta {

class CudaRanges {
  public:
    explicit CudaRanges(CudaDevice& device) : device_(device), workspace_(device), parts_(device) {}

    // A step.
    void begin() { used_ = 0; }
    // `args`: of the call, as decode has them. If memory is lacking, this fails before the first launch.
    Status attend(const Step& step, const CudaTables& tables, const cuda::AttendArgs& args, const AttendCall& call,
                  cudaStream_t stream);

  private:
    // Queries whose parts have room beside each other.
    struct Launch {
        int32_t first = 0, queries = 0, parts = 0, pages = 0;
    };
    // The step's queries under one window, in launches of so many parts; a query's are in one launch, however many it has.
    struct Cut {
        explicit Cut(CudaDevice& device) : queries(device) {}
        int32_t window = 0, most_parts = 0, parts = 0;  // parts: of the launch that has most
        std::vector<Launch> launches;
        DeviceBuffer queries;  // cuda::RangeQuery
        PinnedBuffer pinned[4];
        uint64_t uploads = 0;
    };
    // Offsets of a launch's arrays in parts_.
    struct PartsLayout {
        size_t o, sums, sequences, pages_before, positions, bytes;
        PartsLayout(int32_t parts, const AttendCall& call);
    };

    Result<Cut*> find(const Step& step, const CudaTables& tables, int32_t window, int32_t most_parts, cudaStream_t stream);
    Status send(const Step& step, const CudaTables& tables, Cut& cut, cudaStream_t stream);
    Status launch(const Cut& cut, const Launch& l, const AttendWork& work, const AttendCall& call, cudaStream_t stream) const;

    CudaDevice& device_;
    std::vector<std::unique_ptr<Cut>> cuts_;
    size_t used_ = 0;         // of these, in this step
    DeviceBuffer workspace_;  // the decode kernel's
    DeviceBuffer parts_;
};

}  // namespace ta
