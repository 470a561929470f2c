#include "src/attend/merge.h"

#include <array>
#include <cstdio>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

using Parts = std::array<TensorView, kMaxMergeParts>;

Status read_parts(uint32_t n, const ta_tensor* parts, const float* const* lses, Parts& o) {
    for (uint32_t i = 0; i < n; ++i) {
        char name[24];
        std::snprintf(name, sizeof name, "parts[%u]", i);
        if (i == 0) TA_RETURN_IF_ERROR(check_aligned(parts, name, 2));
        Result<const ta_tensor*> part = element_of(parts, i, name, 2);
        if (!part.ok()) return std::move(part).status();
        Result<TensorView> view = read_tensor(part.value(), name, 2);
        if (!view.ok()) return std::move(view).status();
        o[i] = view.value();
        if (o[i].head_dim > kMaxMergeHeadDim) {
            return fail(TA_E_UNSUPPORTED, "%s.head_dim is %lld; it takes 1..%d", name, (long long)o[i].head_dim,
                        kMaxMergeHeadDim)
                .argument(2);
        }
        if (Status s = check_tensor_shape(o[i], name, o[0].tokens, o[0].heads, o[0].head_dim); !s.ok()) {
            return std::move(s).argument(2);
        }
        if (!lses[i] && o[i].tokens > 0) return fail(TA_E_INVALID, "lses[%u] is null", i).argument(3);
        std::snprintf(name, sizeof name, "lses[%u]", i);
        TA_RETURN_IF_ERROR(check_aligned(lses[i], name, 3));
    }
    return {};
}

bool same_place(const TensorView& a, const TensorView& b) {
    return a.data == b.data && a.dtype == b.dtype && a.stride_token == b.stride_token && a.stride_head == b.stride_head;
}

// An output must not overlap any input, or must take the place of one: out that of a part, lse that of a part's LSEs.
Status check_places(uint32_t n, const Parts& parts, const float* const* lses, const TensorView& out, float* lse) {
    TA_RETURN_IF_ERROR(check_outputs({}, out, lse, 4));
    const TensorView to = view_of_floats(lse, out.tokens, out.heads);
    for (uint32_t i = 0; i < n; ++i) {
        const TensorView from = view_of_floats(lses[i], out.tokens, out.heads);
        if (may_overlap(parts[i], out) && !same_place(parts[i], out)) {
            return fail(TA_E_INVALID, "out overlaps parts[%u], but is not the same view of the same type", i).argument(4);
        }
        if (may_overlap(from, out)) return fail(TA_E_INVALID, "out overlaps lses[%u]", i).argument(4);
        if (may_overlap(parts[i], to)) return fail(TA_E_INVALID, "lse overlaps parts[%u]", i).argument(5);
        if (may_overlap(from, to) && !same_place(from, to)) {
            return fail(TA_E_INVALID, "lse overlaps lses[%u], but does not begin where that does", i).argument(5);
        }
    }
    return {};
}

}  // namespace

extern "C" {

ta_status ta_merge_states(ta_context* context, uint32_t n, const ta_tensor* parts, const float* const* lses,
                          const ta_tensor* out, float* lse, ta_stream stream, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        if (n < 1 || n > uint32_t(kMaxMergeParts)) {
            return fail(TA_E_INVALID, "n is %u; it takes 1..%d", n, kMaxMergeParts).argument(1);
        }
        TA_RETURN_IF_ERROR(check_pointer(parts, "parts", 2));
        TA_RETURN_IF_ERROR(check_pointer(lses, "lses", 3));
        Parts given;
        TA_RETURN_IF_ERROR(read_parts(n, parts, lses, given));
        const TensorView& shape = given[0];
        Result<TensorView> to = read_tensor(out, "out", 4);
        if (!to.ok()) return std::move(to).status();
        if (Status s = check_tensor_shape(to.value(), "out", shape.tokens, shape.heads, shape.head_dim); !s.ok()) {
            return std::move(s).argument(4);
        }
        TA_RETURN_IF_ERROR(check_aligned(lse, "lse", 5));
        TA_RETURN_IF_ERROR(check_places(n, given, lses, to.value(), lse));
        if (!context->impl->device() && stream) {
            return fail(TA_E_UNSUPPORTED, "stream is not null; a CPU context has no streams").argument(6);
        }
        MergeArgs args{};
        args.n = int32_t(n);
        args.head_dim = int32_t(shape.head_dim);
        args.tokens = shape.tokens;
        args.heads = shape.heads;
        args.out = merge_state(to.value(), lse);
        for (uint32_t i = 0; i < n; ++i) args.parts[i] = merge_state(given[i], lses[i]);
        return merge_states(*context->impl, args, stream);
    });
}

}  // extern "C"
