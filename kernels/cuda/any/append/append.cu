#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/launch.h"
#include "kernels/cuda/common/generation.h"

namespace ta::cuda {
namespace {

AppendKernel kernel_for(int head_dim) {
    switch (head_dim) {
        case 64:
            return append_kernel_d64();
        case 96:
            return append_kernel_d96();
        case 128:
            return append_kernel_d128();
        case 256:
            return append_kernel_d256();
        default:
            return {nullptr, 0, nullptr};
    }
}

}  // namespace

int plan_append(int device, int head_dim, int kv_heads, int64_t max_tasks, AppendPlan* plan) {
    const AppendKernel k = kernel_for(head_dim);
    if (!k.kernel || kv_heads < 1 || max_tasks < 0 || max_tasks > INT32_MAX / kv_heads) return cudaErrorInvalidValue;
    int sms = 0, per_sm = 0, turning_per_sm = 0;
    if (cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device); e != cudaSuccess) return e;
    if (cudaError_t e = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, k.kernel, k.threads, 0); e != cudaSuccess)
        return e;
    if (const int e = prepare_turning(head_dim, &turning_per_sm); e != cudaSuccess) return e;
    const auto ctas = [&](int fit) { return int32_t(std::clamp<int64_t>(max_tasks * kv_heads, 1, int64_t(sms) * fit)); };
    int generation = 0;
    if (const int e = kernel_generation(&generation); e != cudaSuccess) return e;
    *plan = {ctas(per_sm), ctas(turning_per_sm), generation >= 9};
    return cudaSuccess;
}

int launch_append(const AppendPlan& plan, const AppendArgs& args, bool pages_turn, CUstream_st* stream) {
    const AppendKernel k = kernel_for(args.head_dim);
    if (!k.kernel) return cudaErrorInvalidValue;
    const bool searches = args.encode.k_turning && pages_turn;
    if (searches) {
        if (const int e = launch_turning(plan, args, stream); e != cudaSuccess) return e;
    }
    cudaLaunchAttribute overlap{};  // with the search
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(ctas_of(plan.ctas, args), layers_of(args));
    config.blockDim = dim3(unsigned(k.threads));
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = searches && plan.overlap ? 1 : 0;
    AppendArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernelExC(&config, k.kernel, parameters);
}

int launch_lower(const LowerArgs& args, CUstream_st* stream) {
    const AppendKernel k = kernel_for(args.head_dim);
    if (!k.kernel || args.blocks > LowerArgs::kMostBlocks) return cudaErrorInvalidValue;
    if (args.blocks == 0) return cudaSuccess;
    LowerArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(k.lower, dim3(unsigned(args.blocks * args.pieces)), dim3(unsigned(k.threads)), parameters, 0,
                            stream);
}

}  // namespace ta::cuda
