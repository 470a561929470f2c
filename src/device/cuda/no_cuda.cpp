// Replaces device.cpp in a build without CUDA.
#include "src/core/device.h"

namespace ta {

Result<std::unique_ptr<Device>> open_cuda_device(int) {
    return fail(TA_E_UNSUPPORTED, "this build has no CUDA; configure it with TA_ENABLE_CUDA=ON");
}

}  // namespace ta
