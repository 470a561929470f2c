// Query rows of steps over sequences with gaps, on a GPU: turns copies of them for the keys before gaps, and joins the results.
// docs/shift.md. Only CUDA builds include this.
#pragma once

#include "kernels/cuda/any/rotary/rotary.h"
#include "src/attend/call.h"
#include "src/attend/cuda/constants.h"
#include "src/attend/step.h"
#include "src/device/cuda/memory.h"

namespace ta {

class CudaTurned {
  public:
    CudaTurned(const Pool& pool, CudaDevice& device)
        : pool_(pool), device_(device), tables_(device), q_(device), results_(device) {}

    // Sends the tables that a step's calls need.
    Status begin(const Step& step, cudaStream_t stream);
    // See StepBackend.
    Result<TensorView> turn(const Step& step, const CudaConstants& constants, uint32_t layer, const TensorView& q,
                            cudaStream_t stream);
    Status hold(const Step& step, const AttendCall& call, TensorView& out, float*& lse);
    Status join(const TensorView& out, const float* lse, const AttendCall& call, cudaStream_t stream);

  private:
    const cuda::TurnedRow* turned() const { return reinterpret_cast<const cuda::TurnedRow*>(tables_.data()); }
    const JoinedRow* joined() const { return reinterpret_cast<const JoinedRow*>(tables_.data() + joined_at_); }

    const Pool& pool_;
    CudaDevice& device_;
    DeviceBuffer tables_;  // TurnedRow [turned], then JoinedRow [given rows]
    size_t joined_at_ = 0;
    PinnedBuffer pinned_[4];
    uint64_t uploads_ = 0;
    DeviceBuffer q_, results_;  // results_: O, then LSE
};

}  // namespace ta
