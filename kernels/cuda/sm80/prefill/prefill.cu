// Prefill's launch.
#include "kernels/cuda/sm80/prefill/launch.h"
#include "kernels/cuda/sm80/prefill/prefill.h"

namespace ta::cuda::prefill::sm80 {
namespace {

// A kernel and what its launch takes.
struct Chosen {
    const void* kernel;
    int depth, smem_bytes;
};

Kernels kernels_for(const AttendArgs& args) {
    switch (args.head_dim) {
        case 64:
            return args.heads ? kernels_d64_channels() : kernels_d64();
        case 96:
            return kernels_d96();
        case 128:
            return args.heads ? kernels_d128_channels() : kernels_d128();
        default:
            return args.heads ? kernels_d256_channels() : kernels_d256();
    }
}

// The deepest that the device has shared memory for. Loads the kernel and allows it that.
cudaError_t load(const AttendArgs& args, Chosen* chosen) {
    int device = 0, most = 0;
    if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
    if (const cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device); e != cudaSuccess)
        return e;
    const Kernels kernels = kernels_for(args);
    const int deeper = kernels.smem_bytes[1] <= most;
    const bool options = args.softcap > 0.0f || args.alibi_slope || args.exp == ExpMode::kSas;
    *chosen = {kernels.attend[options], 2 + deeper, kernels.smem_bytes[deeper]};
    return cudaFuncSetAttribute(chosen->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chosen->smem_bytes);
}

const char* general_refusal(const AttendArgs& args) {
    if (args.p_levels > 255) return "P of 16 bits";
    if (args.may_lack_pages) return "a table that may lack pages";
    return nullptr;
}

}  // namespace

const char* refusal(const AttendArgs& args) {
    if (args.head_dim != 64 && args.head_dim != 96 && args.head_dim != 128) return "head_dim other than 64, 96 and 128";
    // V of 2 bits is stored for 128 channels then, in another order than that of 8 bits.
    if (args.head_dim == 96 && args.heads) return "channel pages of head_dim 96";
    return general_refusal(args);
}
const char* wide_refusal(const AttendArgs& args) {
    if (args.head_dim != 256) return "head_dim other than 256";
    return general_refusal(args);
}

cudaError_t load(const AttendArgs& args) {
    Chosen chosen;
    return load(args, &chosen);
}

cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream) {
    if (refusal(args) && wide_refusal(args)) return cudaErrorInvalidValue;
    Chosen chosen;
    if (const cudaError_t e = load(args, &chosen); e != cudaSuccess) return e;
    AttendArgs copy = args;
    void* parameters[] = {&copy, &schedule, &workspace, &chosen.depth};
    return cudaLaunchKernel(chosen.kernel, dim3(unsigned(ctas)), dim3(256), parameters, size_t(chosen.smem_bytes), stream);
}

}  // namespace ta::cuda::prefill::sm80
