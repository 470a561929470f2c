// Query rows of steps over sequences with gaps, on a CPU: turns copies of them for the keys before gaps, and joins the results.
// docs/shift.md.
#pragma once

#include <vector>

#include "kernels/format/joined_row.h"
#include "src/attend/call.h"
#include "src/attend/step.h"
#include "src/core/memory.h"

namespace ta {

class CpuTurned {
  public:
    explicit CpuTurned(Pool& pool)
        : pool_(pool), q_(pool.context().allocator()), o_(pool.context().allocator()), lse_(pool.context().allocator()) {}

    void begin(const Step& step);
    // See StepBackend.
    Result<TensorView> turn(const Step& step, uint32_t layer, const TensorView& q);
    Status hold(const Step& step, const AttendCall& call, TensorView& out, float*& lse);
    void join(const TensorView& out, const float* lse, const AttendCall& call) const;
    void trim();

  private:
    const cpu::PageCodec& codec() const { return *pool_.context().kernels().codec; }

    Pool& pool_;
    Buffer q_, o_, lse_;
    std::vector<JoinedRow> joined_;  // [query rows] of the step
};

}  // namespace ta
