#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

// Runs the body of a call on a plan; refuses while another call runs.
template <class Body>
ta_status call_on_any(ta_plan* plan, ta_error* err, Body&& body) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(plan, "plan", 0));
        TA_RETURN_IF_ERROR(check_process(plan->impl->pool().context()));
        const Use use(plan->use);
        TA_RETURN_IF_ERROR(use.status("plan"));
        return body(*plan->impl);
    });
}

// The same, if the plan's pool is open.
template <class Body>
ta_status call(ta_plan* plan, ta_error* err, Body&& body) {
    return call_on_any(plan, err, [&](Plan& p) -> Status {
        TA_RETURN_IF_ERROR(p.pool().check_open());
        return body(p);
    });
}

}  // namespace

extern "C" {

ta_status ta_plan_create(ta_kv_pool* pool, const void* options, ta_plan** out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        if (options) return fail(TA_E_INVALID, "options is reserved and must be null").argument(1);
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        TA_RETURN_IF_ERROR(pool->impl->check_open());
        *out = new ta_plan{std::make_unique<Plan>(pool->impl)};
        return {};
    });
}

ta_status ta_plan_set_stream(ta_plan* plan, ta_stream stream, ta_error* err) {
    return call(plan, err, [&](Plan& p) { return p.set_stream(stream); });
}

void ta_plan_destroy(ta_plan* plan) {
    destroy(plan, [](const ta_plan& p) -> const Context& { return p.impl->pool().context(); });
}

ta_status ta_plan_begin(ta_plan* plan, uint32_t n_seqs, const ta_seq* seqs, const int32_t* n_new, const int32_t* n_query,
                        const ta_step_options* options, ta_error* err) {
    return call(plan, err, [&](Plan& p) -> Status {
        if (n_seqs == 0) return fail(TA_E_INVALID, "n_seqs is 0").argument(1);
        TA_RETURN_IF_ERROR(check_pointer(seqs, "seqs", 2));
        TA_RETURN_IF_ERROR(check_aligned(n_new, "n_new", 3));
        TA_RETURN_IF_ERROR(check_aligned(n_query, "n_query", 4));
        ta_step_options known{};
        if (options) TA_RETURN_IF_ERROR(read_known(options, "options", 5, known));
        TA_RETURN_IF_ERROR(check_wait_ms(known.wait_ms, "options.wait_ms", 5));
        TA_RETURN_IF_ERROR(check_aligned(known.tree_parent, "options.tree_parent", 5));
        TA_RETURN_IF_ERROR(check_aligned(known.query_positions, "options.query_positions", 5));
        return p.begin({seqs, n_seqs}, n_new, n_query, known);
    });
}

ta_status ta_append(ta_plan* plan, uint32_t layer, const ta_tensor* k, const ta_tensor* v, ta_error* err) {
    return call(plan, err, [&](Plan& p) -> Status {
        Result<TensorView> k_view = read_tensor(k, "k", 2);
        if (!k_view.ok()) return std::move(k_view).status();
        Result<TensorView> v_view = read_tensor(v, "v", 3);
        if (!v_view.ok()) return std::move(v_view).status();
        return p.append(layer, k_view.value(), v_view.value());
    });
}

ta_status ta_attend(ta_plan* plan, uint32_t layer, const ta_tensor* q, const ta_tensor* out, float* lse,
                    const ta_attend_options* options, ta_error* err) {
    return call(plan, err, [&](Plan& p) -> Status {
        Result<TensorView> q_view = read_tensor(q, "q", 2);
        if (!q_view.ok()) return std::move(q_view).status();
        Result<TensorView> out_view = read_tensor(out, "out", 3);
        if (!out_view.ok()) return std::move(out_view).status();
        TA_RETURN_IF_ERROR(check_aligned(lse, "lse", 4));
        ta_attend_options storage;
        Result<const ta_attend_options*> known = read_attend_options(options, "options", 5, &storage);
        if (!known.ok()) return std::move(known).status();
        return p.attend(layer, q_view.value(), out_view.value(), lse, known.value());
    });
}

ta_status ta_plan_end(ta_plan* plan, const int32_t* keep, ta_error* err) {
    return call(plan, err, [&](Plan& p) -> Status {
        TA_RETURN_IF_ERROR(check_aligned(keep, "keep", 1));
        return p.end(keep);
    });
}

ta_status ta_plan_abort(ta_plan* plan, ta_error* err) {
    return call_on_any(plan, err, [&](Plan& p) { return p.abort(); });
}

}  // extern "C"
