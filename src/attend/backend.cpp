#include "src/attend/backend.h"

namespace ta {

std::unique_ptr<StepBackend> make_step_backend(Pool& pool) {
#ifdef TA_HAVE_CUDA
    Device* device = pool.context().device();
    if (CudaDevice* cuda = device ? device->cuda() : nullptr) return make_cuda_step(pool, *cuda);
#endif
    return make_cpu_step(pool);
}

}  // namespace ta
