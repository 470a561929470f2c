// Attention of a batch_invariant pool on a GPU: each query by itself, by ranges of its keys (kernels/cuda/any/ranges). It reads
// earlier blocks as later steps will, and its own block at stage 1 if the step touches it. Pages in the peer and host tiers are
// read in place. Only CUDA builds include this.
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

    // To be called when a step begins.
    void begin() { used_ = 0; }
    // `args`: of the call, as for decode. If memory runs out, this fails before the first launch.
    Status attend(const Step& step, const CudaTables& tables, const cuda::AttendArgs& args, const AttendCall& call,
                  cudaStream_t stream);

  private:
    // Queries whose parts fit into parts_ together.
    struct Launch {
        int32_t first = 0, queries = 0, parts = 0, pages = 0;
    };
    // The step's queries under one window, cut into launches of at most so many parts. All parts of a query are in one launch,
    // however many it has.
    struct Cut {
        explicit Cut(CudaDevice& device) : queries(device) {}
        int32_t window = 0, most_parts = 0, parts = 0;  // parts: of the largest launch
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
    size_t used_ = 0;         // elements of cuts_ used in this step
    DeviceBuffer workspace_;  // the decode kernel's
    DeviceBuffer parts_;
};

}  // namespace ta
