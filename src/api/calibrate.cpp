#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

// Runs the body of a call on a calibrator; refuses while another call runs.
template <class Body>
ta_status call(const ta_calibrator* calibrator, ta_error* err, Body&& body) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(calibrator, "calibrator", 0));
        TA_RETURN_IF_ERROR(check_process(calibrator->impl->context()));
        const Use use(calibrator->use);
        TA_RETURN_IF_ERROR(use.status("calibrator"));
        return body(*calibrator->impl);
    });
}

Status make(const ta_context& context, GeometryOptions shape, ta_calibrator** out) {
    shape.bits = 8;  // any number will do; with 8 there are no channel pages to lay out
    Result<Geometry> geometry = Geometry::make(shape);
    if (!geometry.ok()) return std::move(geometry).status();
    *out = new ta_calibrator{std::make_unique<Calibrator>(context.impl, geometry.take())};
    return {};
}

}  // namespace

extern "C" {

ta_status ta_calibrator_create(ta_context* context, uint32_t layers, uint32_t kv_heads, uint32_t head_dim, ta_calibrator** out,
                               ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        TA_RETURN_IF_ERROR(check_shape(layers, kv_heads, head_dim));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        return make(*context, {.layers = layers, .kv_heads = kv_heads, .head_dim = head_dim}, out);
    });
}

ta_status ta_calibrator_create_for(ta_context* context, const ta_kv_pool_options* options, ta_calibrator** out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_pointer(options, "options", 1));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        Result<ta_kv_pool_options> read = read_struct(options, "options", 1);
        if (!read.ok()) return std::move(read).status();
        const ta_kv_pool_options& o = read.value();
        std::vector<ta_layer_group> groups;
        const auto make_one = [&]() -> Status {
            TA_RETURN_IF_ERROR(read_layer_groups(o, groups));
            return make(*context,
                        {.layers = o.layers,
                         .kv_heads = o.kv_heads,
                         .head_dim = o.head_dim,
                         .v_head_dim = o.v_head_dim,
                         .groups = groups},
                        out);
        };
        Status s = make_one();
        return s.ok() ? std::move(s) : std::move(s).argument(1);
    });
}

void ta_calibrator_destroy(ta_calibrator* calibrator) {
    destroy(calibrator, [](const ta_calibrator& c) -> const Context& { return c.impl->context(); });
}

ta_status ta_calibrator_observe(ta_calibrator* calibrator, uint32_t layer, const ta_tensor* k, const ta_tensor* v,
                                ta_error* err) {
    return call(calibrator, err, [&](Calibrator& c) -> Status {
        if (layer >= c.geometry().layers) {
            return fail(TA_E_INVALID, "layer is %u; the calibrator has %u", layer, c.geometry().layers).argument(1);
        }
        const LayerShape& shape = c.geometry().shape(layer);
        Result<TensorView> k_view = read_tensor(k, "k", 2);
        if (!k_view.ok()) return std::move(k_view).status();
        Result<TensorView> v_view = read_tensor(v, "v", 3);
        if (!v_view.ok()) return std::move(v_view).status();
        const TensorView &kt = k_view.value(), &vt = v_view.value();
        if (Status s = check_tensor_shape(kt, "k", kt.tokens, shape.kv_heads, shape.k_channels); !s.ok())
            return std::move(s).argument(2);
        if (Status s = check_tensor_shape(vt, "v", kt.tokens, shape.kv_heads, shape.v_channels); !s.ok())
            return std::move(s).argument(3);
        return c.observe(layer, kt, vt);
    });
}

ta_status ta_calibrator_finish(const ta_calibrator* calibrator, uint32_t n_low, uint8_t* k_bits, uint8_t* v_bits,
                               float* k_priority, float* v_priority, ta_error* err) {
    return call(calibrator, err, [&](const Calibrator& c) -> Status {
        TA_RETURN_IF_ERROR(check_pointer(k_bits, "k_bits", 2));
        TA_RETURN_IF_ERROR(check_pointer(v_bits, "v_bits", 3));
        TA_RETURN_IF_ERROR(check_aligned(k_priority, "k_priority", 4));
        TA_RETURN_IF_ERROR(check_aligned(v_priority, "v_priority", 5));
        return c.finish(n_low, k_bits, v_bits, k_priority, v_priority);
    });
}

ta_status ta_calibrator_choose(const ta_calibrator* calibrator, const float* k_cost, const float* v_cost, uint64_t block_bytes,
                               uint8_t* k_bits, uint8_t* v_bits, ta_error* err) {
    return call(calibrator, err, [&](const Calibrator& c) -> Status {
        TA_RETURN_IF_ERROR(check_pointer(k_cost, "k_cost", 1));
        TA_RETURN_IF_ERROR(check_pointer(v_cost, "v_cost", 2));
        TA_RETURN_IF_ERROR(check_pointer(k_bits, "k_bits", 4));
        TA_RETURN_IF_ERROR(check_pointer(v_bits, "v_bits", 5));
        return c.choose(k_cost, v_cost, block_bytes, k_bits, v_bits);
    });
}

}  // extern "C"
