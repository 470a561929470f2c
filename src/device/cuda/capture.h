// Calls that become part of a CUDA graph. Only CUDA builds include this.
#pragma once

#include "src/device/cuda/device.h"

namespace ta {

// Sets *yes if the stream is being captured. TA_E_STATE: another stream's capture makes this one unusable.
Status is_captured(const CudaDevice& device, cudaStream_t stream, bool* yes);

// TA_E_STATE for a captured call that needs `what`, which only a call outside a capture can set up.
Status needs_a_run(const char* what);

// The scope of a call that enqueues work on a stream which may be captured. Until it ends, captured() tells on this thread
// whether that is so, and buffers refuse to grow (memory.h).
class CaptureScope {
  public:
    CaptureScope() = default;
    ~CaptureScope() { captured_here = outer_; }
    CaptureScope(const CaptureScope&) = delete;
    CaptureScope& operator=(const CaptureScope&) = delete;

    Status enter(const CudaDevice& device, cudaStream_t stream) { return is_captured(device, stream, &captured_here); }
    // The answer of this thread's innermost scope; false outside any scope.
    static bool captured() { return captured_here; }

  private:
    static thread_local bool captured_here;
    const bool outer_ = captured_here;
};

}  // namespace ta
