#include "src/attend/merge.h"

#include <cstdio>

#include "kernels/cuda/any/merge/merge_states.h"
#include "src/attend/cuda/attend.h"
#include "src/device/cuda/capture.h"

namespace ta {

Status merge_states_on_gpu(const CudaDevice& device, const MergeArgs& args, ta_stream stream) {
    const CudaScope scope(device.ordinal());
    TA_RETURN_IF_ERROR(device.health());
    if (args.tokens == 0) return {};
    char name[24];
    for (int i = 0; i < args.n; ++i) {
        const MergeState& part = args.parts[i];
        std::snprintf(name, sizeof name, "parts[%d]", i);
        if (Status s = check_device_memory(device, part.o, name); !s.ok()) return std::move(s).argument(2);
        std::snprintf(name, sizeof name, "lses[%d]", i);
        if (Status s = check_device_memory(device, part.lse, name); !s.ok()) return std::move(s).argument(3);
    }
    if (Status s = check_device_memory(device, args.out.o, "out"); !s.ok()) return std::move(s).argument(4);
    if (Status s = check_device_memory(device, args.out.lse, "lse"); !s.ok()) return std::move(s).argument(5);
    bool captured = false;
    if (Status s = is_captured(device, stream, &captured); !s.ok()) return std::move(s).argument(6);
    return device.check(cudaError_t(cuda::launch_merge_states(args, stream)), "merging partial results");
}

}  // namespace ta
