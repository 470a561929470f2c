#include "src/attend/merge.h"

#include <algorithm>

#include "src/core/context.h"
#include "src/core/profile.h"

namespace ta {
namespace {

// Elements of a thread's piece of work.
constexpr int64_t kElements = 1 << 15;

Status check_lse(const MergeArgs& args, int part) {
    for (int64_t token = 0; token < args.tokens; ++token) {
        for (int64_t head = 0; head < args.heads; ++head) {
            const float lse = *args.parts[part].lse_at(token, head);
            if (lse < std::numeric_limits<float>::infinity()) continue;
            return fail(TA_E_NONFINITE, "lses[%d] of token %lld, query head %lld is %g; it takes finite numbers and -inf", part,
                        (long long)token, (long long)head, double(lse))
                .argument(3)
                .token(token)
                .head(head);
        }
    }
    return {};
}

Status merge_states_on_cpu(Context& context, const MergeArgs& args) {
    for (int i = 0; i < args.n; ++i) TA_RETURN_IF_ERROR(check_lse(args, i));
    const int64_t rows = args.tokens * args.heads,
                  at_once = std::max<int64_t>(1, kElements / (int64_t(args.n) * args.head_dim));
    context.threads().parallel_for((rows + at_once - 1) / at_once, 1, [&](int64_t i, int) {
        context.kernels().merge(args, i * at_once, std::min(rows, (i + 1) * at_once));
    });
    return {};
}

}  // namespace

MergeState merge_state(const TensorView& o, const float* lse) {
    return {o.data, o.stride_token, o.stride_head, o.dtype, const_cast<float*>(lse), o.heads, 1};
}

Status merge_states(Context& context, const MergeArgs& args, ta_stream stream) {
    const ProfileRange range("ta_merge_states");
#ifdef TA_HAVE_CUDA
    Device* device = context.device();
    if (CudaDevice* cuda = device ? device->cuda() : nullptr) return merge_states_on_gpu(*cuda, args, stream);
#endif
    (void)stream;
    return merge_states_on_cpu(context, args);
}

}  // namespace ta
