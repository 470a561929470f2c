#include "src/device/cuda/capture.h"

namespace ta {

thread_local bool CaptureScope::captured_here = false;

Status is_captured(const CudaDevice& device, cudaStream_t stream, bool* yes) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error == cudaErrorStreamCaptureImplicit) {
        return fail(TA_E_STATE,
                    "a stream that synchronizes with the legacy default stream is being captured; that cannot be "
                    "used until the capture ends");
    }
    TA_RETURN_IF_ERROR(device.check(error, "asking whether the stream is captured"));
    *yes = status != cudaStreamCaptureStatusNone;
    return {};
}

Status needs_a_run(const char* what) {
    return fail(TA_E_STATE, "%s must have been used by this plan in a step before the one that is captured", what);
}

}  // namespace ta
