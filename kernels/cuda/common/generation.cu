#include "kernels/cuda/common/generation.h"

namespace ta::cuda {
namespace {

__global__ void probe() {}

}  // namespace

cudaError_t kernel_generation(int* generation) {
    cudaFuncAttributes attributes{};
    const cudaError_t error = cudaFuncGetAttributes(&attributes, probe);
    *generation = attributes.ptxVersion / 10;
    return error;
}

}  // namespace ta::cuda
