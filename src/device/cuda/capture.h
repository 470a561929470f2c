// Calls that become part of a graph. Only CUDA builds include this.
#pragma once

#include "src/device/cuda/device.h"

namespace ta {

// TA_E_STATE if the stream cannot be used because of another's capture.
Status is_captured(const CudaDevice& device, cudaStream_t stream, bool* yes);

// TA_E_STATE for a captured call that lacks what only a call outside of a capture gets.
Status needs_a_run(const char* what);

// A call that enqueues work on a stream which may be being captured. Until the scope ends, its thread knows whether it is:
// captured() tells, and buffers refuse to grow (memory.h).
class CaptureScope {
  public:
    CaptureScope() = default;
    ~CaptureScope() { captured_here = outer_; }
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;

    Status enter(const CudaDevice& device, cudaStream_t stream) { return is_captured(device, stream, &captured_here); }
    // Of this thread's innermost scope; false outside of any.
    static bool captured() { return captured_here; }

  private:
    static thread_local bool captured_here;
    const bool outer_ = captured_here;
};

}  // namespace ta
