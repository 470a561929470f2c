// Prefill's launch.
#include "kernels/cuda/sm90/prefill/launch.h"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda::prefill::sm90 {
namespace {

// A kernel and what its launch takes.
struct Chosen {
    const void* kernel;
    int threads, smem_bytes;
};

// The kernel for long tiles has one more loop, which costs registers: blocks and calls that do not take this loop are slower in
// it.
bool takes_long_kernel(const AttendArgs& args) {
    const bool other_options = args.softcap > 0.0f || args.alibi_slope;
    return args.long_tiles && !args.heads && !args.lse && !other_options;
}

Chosen choose(const AttendArgs& args, bool may_be_long) {
    const bool d64 = args.head_dim == 64;
    const Kernels kernels = args.heads && args.some_8_bits           ? (d64 ? kernels_d64_any_bits() : kernels_d128_any_bits())
                            : args.heads                             ? (d64 ? kernels_d64_channels() : kernels_d128_channels())
                            : args.resident                          ? (d64 ? kernels_d64_resident() : kernels_d128_resident())
                            : may_be_long && takes_long_kernel(args) ? (d64 ? kernels_d64_long() : kernels_d128_long())
                                                                     : (d64 ? kernels_d64() : kernels_d128());
    const bool options = args.softcap > 0.0f || args.alibi_slope || args.exp == ExpMode::kSas;
    return {kernels.attend[options], kernels.threads, kernels.smem_bytes};
}

// Loads the kernel and allows it its shared memory.
cudaError_t load(const Chosen& chosen) {
    return cudaFuncSetAttribute(chosen.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, chosen.smem_bytes);
}

}  // namespace

const char* refusal(const AttendArgs& args) {
    if (args.head_dim != 128 && args.head_dim != 64) return "head_dim other than 64 and 128";
    if (args.p_levels > 255) return "P of 16 bits";
    if (args.may_lack_pages) return "a table that may lack pages";
    return nullptr;
}

int resident_keys(const AttendArgs& args) {
    if (args.window > 0) return 0;
    return args.head_dim == 64 ? kResidentKeys<64> : kResidentKeys<128>;
}

cudaError_t load(const AttendArgs& args) {
    return load(choose(args, false));
}

cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream) {
    if (refusal(args)) return cudaErrorInvalidValue;
    const Chosen chosen = choose(args, true);
    if (const cudaError_t e = load(chosen); e != cudaSuccess) return e;
    AttendArgs copy = args;
    void* parameters[] = {&copy, &schedule, &workspace};
    return cudaLaunchKernel(chosen.kernel, dim3(unsigned(ctas)), dim3(unsigned(chosen.threads)), parameters,
                            size_t(chosen.smem_bytes), stream);
}

}  // namespace ta::cuda::prefill::sm90
