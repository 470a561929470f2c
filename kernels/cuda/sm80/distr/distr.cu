// The kernel's launch.
#include "kernels/cuda/sm80/distr/distr.h"
#include "kernels/cuda/sm80/distr/launch.h"

namespace ta::cuda::distr::sm80 {

const char* refusal(const DistrArgs&) {
    return nullptr;
}

cudaError_t launch(const DistrArgs& args, cudaStream_t stream) {
    const AttendArgs& a = args.attend;
    const int64_t ctas = int64_t(args.n_blocks) * a.kv_heads * a.group;
    if (args.group_size < 2 || args.group_size > 4 || !is_distr_head_dim(a.head_dim)) return cudaErrorInvalidValue;
    const Kernels kernels = a.head_dim == 32 ? kernels_d32() : a.head_dim == 64 ? kernels_d64() : kernels_d128();
    const bool options = a.softcap > 0.0f || a.alibi_slope || a.exp == ExpMode::kSas;
    const int groups = args.group_size - 2, shared_bytes = kernels.shared_bytes[groups];
    const void* kernel = kernels.attend[groups][options];
    return cudaError_t(launch_distr(kernel, ctas, kernels.threads, shared_bytes, args, stream));
}

}  // namespace ta::cuda::distr::sm80
