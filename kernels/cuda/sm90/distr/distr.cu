// The kernel's launch.
#include "kernels/cuda/sm90/distr/distr.h"
#include "kernels/cuda/sm90/distr/launch.h"

namespace ta::cuda::distr::sm90 {

const char* refusal(const DistrArgs& args) {
    const AttendArgs& a = args.attend;
    if (a.head_dim != 64 && a.head_dim != 128) return "head_dim other than 64 and 128";
    if (a.softcap > 0.0f || a.alibi_slope) return "softcap and ALiBi";
    if (a.exp == ExpMode::kSas) return "SAS";
    return nullptr;
}

cudaError_t launch(const DistrArgs& args, cudaStream_t stream) {
    const AttendArgs& a = args.attend;
    const int64_t ctas = int64_t(args.n_blocks) * a.kv_heads * a.group;
    if (refusal(args) || args.group_size < 2 || args.group_size > 4) return cudaErrorInvalidValue;
    const Kernels kernels = a.head_dim == 64 ? kernels_d64() : kernels_d128();
    const int shared_bytes = kernels.shared_bytes[args.group_size - 2];
    const void* kernel = kernels.attend[args.group_size - 2];
    return cudaError_t(launch_distr(kernel, ctas, kernels.threads, shared_bytes, args, stream));
}

}  // namespace ta::cuda::distr::sm90
