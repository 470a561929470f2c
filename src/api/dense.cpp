#include "src/api/dense.h"

#include "kernels/format/distr.h"

using namespace ta;
using namespace ta::api;

namespace {

// Prefix sums given by the caller; if none are given, rows are split evenly.
Result<std::vector<int64_t>> read_offsets(const int64_t* given, uint32_t batch, int64_t rows, const char* name) {
    std::vector<int64_t> offsets(size_t(batch) + 1);
    if (!given) {
        if (rows % batch != 0)
            return fail(TA_E_INVALID, "%lld rows do not split into %u; give options.%s", (long long)rows, batch, name);
        for (uint32_t b = 0; b <= batch; ++b) offsets[b] = rows / batch * b;
        return offsets;
    }
    for (uint32_t b = 0; b <= batch; ++b) {
        offsets[b] = given[b];
        if (offsets[b] < 0 || offsets[b] > rows || (b > 0 && offsets[b] < offsets[b - 1])) {
            return fail(TA_E_INVALID, "options.%s[%u] is %lld; prefix sums grow from 0 to %lld", name, b, (long long)offsets[b],
                        (long long)rows);
        }
    }
    if (offsets.front() != 0 || offsets.back() != rows) {
        return fail(TA_E_INVALID, "options.%s runs from %lld to %lld; it must run from 0 to %lld", name,
                    (long long)offsets.front(), (long long)offsets.back(), (long long)rows);
    }
    return offsets;
}

Status check_dense_shapes(const DenseCall& c) {
    // Take head_dim from q. If q's is likely the wrong one, since k and v agree and out and q do not, take it from k.
    const bool from_k = c.k.head_dim == c.v.head_dim && c.out.head_dim != c.q.head_dim;
    const int64_t d = from_k ? c.k.head_dim : c.q.head_dim, kv_heads = c.k.heads;
    const bool distr = c.variant == TA_DENSE_DISTR;
    const int small_d = int(std::min<int64_t>(d, 1 << 20));
    if (distr ? !is_distr_head_dim(small_d) : !is_supported_head_dim(small_d)) {
        return fail(TA_E_UNSUPPORTED, "%s.head_dim is %lld; it takes %s", from_k ? "k" : "q", (long long)d,
                    distr ? "32, 64 or 128 with TA_DENSE_DISTR" : "64, 96, 128 or 256")
            .argument(from_k ? 2 : 1);
    }
    if (kv_heads > kMaxKvHeads) {
        return fail(TA_E_SHAPE, "k has %lld heads; it takes 1..%u", (long long)kv_heads, kMaxKvHeads).argument(2);
    }
    if (c.q.heads % kv_heads != 0 || c.q.heads / kv_heads > kMaxGroup) {
        return fail(TA_E_SHAPE, "q has %lld heads; it takes 1..%d times the %lld kv heads", (long long)c.q.heads, kMaxGroup,
                    (long long)kv_heads)
            .argument(1);
    }
    if (Status s = check_tensor_shape(c.q, "q", c.q.tokens, c.q.heads, d); !s.ok()) return std::move(s).argument(1);
    if (Status s = check_tensor_shape(c.k, "k", c.k.tokens, kv_heads, d); !s.ok()) return std::move(s).argument(2);
    if (Status s = check_tensor_shape(c.v, "v", c.k.tokens, kv_heads, d); !s.ok()) return std::move(s).argument(3);
    if (Status s = check_tensor_shape(c.out, "out", c.q.tokens, c.q.heads, d); !s.ok()) return std::move(s).argument(4);
    return {};
}

Status check_dense_outputs(const DenseCall& c, const ta_attend_options* attend) {
    const NamedView slopes{"options.attend.alibi_slopes",
                           view_of_floats(attend ? attend->alibi_slopes : nullptr, 1, c.q.heads)};
    const NamedView sinks{"options.attend.sinks", view_of_floats(attend ? attend->sinks : nullptr, 1, c.q.heads)};
    return check_outputs({{"q", c.q}, {"k", c.k}, {"v", c.v}, slopes, sinks}, c.out, c.lse, 4);
}

Status check_dense_options(const ta_dense_options& o) {
    if (o.variant < TA_DENSE_INT8_PAGE || o.variant > TA_DENSE_DISTR) {
        return fail(TA_E_INVALID, "options.variant is %d; it takes a ta_dense_variant", o.variant);
    }
    if (o.group_size != 0 && (o.variant != TA_DENSE_DISTR || o.group_size < 2 || o.group_size > 4)) {
        return fail(TA_E_INVALID, "options.group_size is %u; it takes 2, 3 or 4 with TA_DENSE_DISTR, else 0", o.group_size);
    }
    if (o.v_granularity < TA_GRANULARITY_DEFAULT || o.v_granularity > TA_GRANULARITY_TENSOR) {
        return fail(TA_E_INVALID, "options.v_granularity is %d; it takes a ta_granularity", o.v_granularity);
    }
    if (o.nonfinite < TA_NONFINITE_DEFAULT || o.nonfinite > TA_NONFINITE_SATURATE) {
        return fail(TA_E_INVALID, "options.nonfinite is %d; it takes a ta_nonfinite", o.nonfinite);
    }
    if (o.batch > (1u << 24)) return fail(TA_E_INVALID, "options.batch is %u; it takes up to 2^24", o.batch);
    return {};
}

}  // namespace

Status ta::api::read_dense(const Context& context, const ta_tensor* const (&tensors)[4], float* lse,
                           const ta_dense_options* options, DenseArguments& to) {
    DenseCall& call = to.call;
    TensorView* views[] = {&call.q, &call.k, &call.v, &call.out};
    const char* names[] = {"q", "k", "v", "out"};
    for (int i = 0; i < 4; ++i) {
        Result<TensorView> view = read_tensor(tensors[i], names[i], i + 1);
        if (!view.ok()) return std::move(view).status();
        *views[i] = view.value();
    }
    ta_dense_options o{};
    if (options) {
        Result<ta_dense_options> known = read_struct(options, "options", 6);
        if (!known.ok()) return std::move(known).status();
        o = known.value();
    }
    call.variant = o.variant;
    TA_RETURN_IF_ERROR(check_dense_shapes(call));
    TA_RETURN_IF_ERROR(check_aligned(lse, "lse", 5));
    if (Status s = check_dense_options(o); !s.ok()) return std::move(s).argument(6);
    TA_RETURN_IF_ERROR(check_aligned(o.q_offsets, "options.q_offsets", 6));
    TA_RETURN_IF_ERROR(check_aligned(o.k_offsets, "options.k_offsets", 6));
    const uint32_t batch = o.batch ? o.batch : 1;
    Result<std::vector<int64_t>> q_offsets = read_offsets(o.q_offsets, batch, call.q.tokens, "q_offsets");
    if (!q_offsets.ok()) return std::move(q_offsets).status().argument(6);
    Result<std::vector<int64_t>> k_offsets = read_offsets(o.k_offsets, batch, call.k.tokens, "k_offsets");
    if (!k_offsets.ok()) return std::move(k_offsets).status().argument(6);
    ta_attend_options storage;
    Result<const ta_attend_options*> attend = read_attend_options(o.attend, "options.attend", 6, &storage);
    if (!attend.ok()) return std::move(attend).status();
    call.lse = lse;
    TA_RETURN_IF_ERROR(check_dense_outputs(call, attend.value()));
    const bool on_cpu = !context.device();
    if (on_cpu && o.stream) {
        return fail(TA_E_UNSUPPORTED, "options.stream is not null; a CPU context has no streams").argument(6);
    }
    const bool page = o.variant == TA_DENSE_INT8_PAGE;
    Result<AttendSettings> settings =
        resolve_attend(attend.value(), call.q.heads, int(call.k.head_dim), page ? ExpMode::kPoly : ExpMode::kExact,
                       page ? TA_P_U8 : TA_P_S8_127, on_cpu, "options.attend");
    if (!settings.ok()) return std::move(settings).status().argument(6);
    to.q_offsets = q_offsets.take();
    to.k_offsets = k_offsets.take();
    call.q_offsets = to.q_offsets;
    call.k_offsets = to.k_offsets;
    call.v_granularity = o.v_granularity;
    call.group_size = o.group_size ? int(o.group_size) : 2;
    call.saturate = o.nonfinite == TA_NONFINITE_SATURATE;
    call.settings = settings.value();
    call.stream = o.stream;
    return {};
}

extern "C" {

ta_status ta_attend_dense(ta_context* context, const ta_tensor* q, const ta_tensor* k, const ta_tensor* v, const ta_tensor* out,
                          float* lse, const ta_dense_options* options, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        DenseArguments arguments;
        TA_RETURN_IF_ERROR(read_dense(*context->impl, {q, k, v, out}, lse, options, arguments));
        return attend_dense(*context->impl, arguments.call);
    });
}

}  // extern "C"
