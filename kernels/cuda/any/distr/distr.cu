// The launches that prepare K, V and q.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/distr/keys.cuh"
#include "kernels/cuda/any/distr/rows.cuh"

namespace ta::cuda {

int launch_distr(const void* kernel, int64_t ctas, int threads, int shared_bytes, const DistrArgs& args, CUstream_st* stream) {
    if (!kernel || ctas > INT32_MAX) return cudaErrorInvalidValue;
    if (ctas == 0) return cudaSuccess;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        e != cudaSuccess)
        return e;
    DistrArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(kernel, dim3(unsigned(ctas)), dim3(unsigned(threads)), parameters, size_t(shared_bytes), stream);
}

namespace {

// call<head_dim, type>() for a tensor of this type.
template <class Call>
int for_type(DType type, int d, const Call& call) {
    const auto of_type = [&]<int D>() -> int {
        return type == DType::kF16    ? call.template operator()<D, DType::kF16>()
               : type == DType::kBf16 ? call.template operator()<D, DType::kBf16>()
                                      : call.template operator()<D, DType::kF32>();
    };
    return d == 32    ? of_type.template operator()<32>()
           : d == 64  ? of_type.template operator()<64>()
           : d == 128 ? of_type.template operator()<128>()
                      : int(cudaErrorInvalidValue);
}

}  // namespace

int launch_distr_keys(const DistrArgs& args, CUstream_st* stream) {
    const int64_t ctas = int64_t(args.n_tiles) * args.attend.kv_heads;
    const auto of = [&]<bool kOfK>() {
        return for_type(kOfK ? args.k.dtype : args.v.dtype, args.attend.head_dim, [&]<int D, DType kType>() {
            return launch_distr(reinterpret_cast<const void*>(&distr_keys_kernel<D, kType, kOfK>), ctas, distr_keys_threads(D),
                                0, args, stream);
        });
    };
    const int e = of.template operator()<true>();
    return e != cudaSuccess ? e : of.template operator()<false>();
}

int launch_distr_rows(const DistrArgs& args, CUstream_st* stream) {
    return for_type(args.attend.q.dtype, args.attend.head_dim, [&]<int D, DType kType>() {
        return launch_distr(reinterpret_cast<const void*>(&distr_rows_kernel<D, kType>),
                            int64_t(args.n_blocks) * args.attend.kv_heads * args.attend.group, kDistrRowsThreads,
                            int(sizeof(DistrRowsMemory<D, kType>)), args, stream);
    });
}

}  // namespace ta::cuda
