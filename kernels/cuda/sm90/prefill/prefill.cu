// Prefill's launch.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/prefill/kernel.cuh"
#include "kernels/cuda/sm90/prefill/prefill.h"

namespace ta::cuda {
namespace {

// Loads the kernel and allows it its shared memory.
template <int D, bool kChannels, bool kOptions, bool kLong = false>
cudaError_t load() {
    constexpr size_t kBytes = sizeof(prefill::SharedMemory<D, kChannels>);
    static_assert(kBytes <= 227 * 1024, "what a CTA of Hopper may have");
    return cudaFuncSetAttribute(prefill::prefill_kernel<D, kChannels, kOptions, kLong>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize, int(kBytes));
}

bool has_options(const AttendArgs& args) {
    return args.softcap > 0.0f || args.alibi_slope || args.exp == ExpMode::kSas;
}

// The loop of its own that most blocks of long tiles have costs the others, and calls that do not take it, registers: 4%.
bool takes_long_kernel(const AttendArgs& args) {
    const bool other_options = args.softcap > 0.0f || args.alibi_slope;
    return args.long_tiles && !args.heads && !args.lse && !other_options;
}

template <int D, bool kChannels, bool kOptions, bool kLong = false>
cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream) {
    const auto kernel = prefill::prefill_kernel<D, kChannels, kOptions, kLong>;
    constexpr size_t kBytes = sizeof(prefill::SharedMemory<D, kChannels>);
    if (cudaError_t e = load<D, kChannels, kOptions, kLong>(); e != cudaSuccess) return e;
    return launch_kernel(kernel, unsigned(ctas), prefill::kThreads, kBytes, stream, args,
                         static_cast<PrefillSchedule*>(schedule), static_cast<uint8_t*>(workspace));
}

template <int D>
cudaError_t load(const AttendArgs& args) {
    const bool options = has_options(args);
    if (args.heads) return options ? load<D, true, true>() : load<D, true, false>();
    return options ? load<D, false, true>() : load<D, false, false>();
}

template <int D>
cudaError_t launch(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream) {
    const bool options = has_options(args);
    const auto kernel = args.heads                ? (options ? launch<D, true, true> : launch<D, true, false>)
                        : takes_long_kernel(args) ? (options ? launch<D, false, true, true> : launch<D, false, false, true>)
                                                  : (options ? launch<D, false, true> : launch<D, false, false>);
    return kernel(args, schedule, workspace, ctas, stream);
}

}  // namespace

const char* prefill_refusal(const AttendArgs& args) {
    if (args.head_dim != 128 && args.head_dim != 64) return "head_dim other than 64 and 128";
    if (args.p_levels > 255 || args.p_running) return "P of 16 bits, or in units of the running maximum";
    return nullptr;
}

cudaError_t load_prefill(const AttendArgs& args) {
    return args.head_dim == 128 ? load<128>(args) : load<64>(args);
}

cudaError_t launch_prefill(const AttendArgs& args, void* schedule, void* workspace, int ctas, cudaStream_t stream) {
    if (prefill_refusal(args)) return cudaErrorInvalidValue;
    return args.head_dim == 128 ? launch<128>(args, schedule, workspace, ctas, stream)
                                : launch<64>(args, schedule, workspace, ctas, stream);
}

}  // namespace ta::cuda
