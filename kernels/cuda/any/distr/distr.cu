// The launches that prepare K, V and q.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/distr/keys.cuh"
#include "kernels/cuda/any/distr/rows.cuh"

namespace ta::cuda {
namespace {

using Kernel = void (*)(DistrArgs);

int launch(Kernel kernel, int64_t ctas, int threads, int shared_bytes, const DistrArgs& args, CUstream_st* stream) {
    if (!kernel || ctas > INT32_MAX) return cudaErrorInvalidValue;
    if (ctas == 0) return cudaSuccess;
    const void* entry = reinterpret_cast<const void*>(kernel);
    if (cudaError_t e = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        e != cudaSuccess)
        return e;
    DistrArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(entry, dim3(unsigned(ctas)), dim3(unsigned(threads)), parameters, size_t(shared_bytes), stream);
}

}  // namespace

int launch_distr_keys(const DistrArgs& args, CUstream_st* stream) {
    const int d = args.attend.head_dim;
    const Kernel kernel = d == 32    ? distr_keys_kernel<32>
                          : d == 64  ? distr_keys_kernel<64>
                          : d == 128 ? distr_keys_kernel<128>
                                     : Kernel(nullptr);
    return launch(kernel, 2 * int64_t(args.n_tiles) * args.attend.kv_heads, distr_keys_threads(d), 0, args, stream);
}

int launch_distr_rows(const DistrArgs& args, CUstream_st* stream) {
    const int d = args.attend.head_dim;
    const Kernel kernel = d == 32    ? distr_rows_kernel<32>
                          : d == 64  ? distr_rows_kernel<64>
                          : d == 128 ? distr_rows_kernel<128>
                                     : Kernel(nullptr);
    const size_t shared_bytes = d == 32   ? sizeof(DistrRowsMemory<32>)
                                : d == 64 ? sizeof(DistrRowsMemory<64>)
                                          : sizeof(DistrRowsMemory<128>);
    return launch(kernel, int64_t(args.n_blocks) * args.attend.kv_heads * args.attend.group, kDistrRowsThreads,
                  int(shared_bytes), args, stream);
}

}  // namespace ta::cuda
