#include "bench/ggml_attention.h"

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <ggml.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace ta::bench {
namespace {

template <class T>
T* need(T* made, const char* what) {
    if (made) return made;
    std::fprintf(stderr, "ggml: %s failed\n", what);
    std::exit(1);
}

ggml_type type_of(GgmlType type) {
    return type == GgmlType::kF16 ? GGML_TYPE_F16 : type == GgmlType::kQ8 ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
}

// Keys or values, converted to the tensor's type.
void store(ggml_tensor* to, const std::vector<float>& from) {
    std::vector<uint8_t> bytes(ggml_nbytes(to));
    const int64_t row = to->ne[0];
    if (to->type == GGML_TYPE_F16) {
        ggml_fp32_to_fp16_row(from.data(), reinterpret_cast<ggml_fp16_t*>(bytes.data()), int64_t(from.size()));
    } else {
        ggml_quantize_chunk(to->type, from.data(), bytes.data(), 0, int64_t(from.size()) / row, row, nullptr);
    }
    ggml_backend_tensor_set(to, bytes.data(), 0, bytes.size());
}

}  // namespace

struct GgmlAttention::Impl {
    ggml_context* context = nullptr;
    ggml_backend_t backend = nullptr;
    ggml_threadpool_t threads = nullptr;
    ggml_backend_buffer_t buffer = nullptr;
    ggml_tensor* q = nullptr;
    ggml_tensor* k = nullptr;          // of a layer
    std::vector<ggml_tensor*> outs;    // [layers]
    std::vector<ggml_cgraph*> graphs;  // [layers]

    ~Impl() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_free(backend);
        ggml_threadpool_free(threads);
        ggml_free(context);
    }
};

GgmlAttention::GgmlAttention(const Shape& shape, GgmlType type, int64_t n_query, const std::vector<float>& k,
                             const std::vector<float>& v, int threads)
    : impl_(std::make_unique<Impl>()) {
    Impl& g = *impl_;
    const size_t objects = 64 + size_t(shape.layers) * 16;
    const size_t graph_bytes = ggml_graph_overhead_custom(16, false) * size_t(shape.layers);
    g.context = need(ggml_init({objects * ggml_tensor_overhead() + graph_bytes, nullptr, true}), "ggml_init");
    g.backend = need(ggml_backend_cpu_init(), "ggml_backend_cpu_init");
    ggml_threadpool_params params = ggml_threadpool_params_default(threads);
    g.threads = need(ggml_threadpool_new(&params), "ggml_threadpool_new");
    ggml_backend_cpu_set_n_threads(g.backend, threads);
    ggml_backend_cpu_set_threadpool(g.backend, g.threads);

    const int64_t d = shape.head_dim, padded = (n_query + 63) / 64 * 64;
    g.q = ggml_new_tensor_3d(g.context, GGML_TYPE_F32, d, shape.q_heads, n_query);
    ggml_tensor* const mask = n_query > 1 ? ggml_new_tensor_2d(g.context, GGML_TYPE_F16, shape.tokens, padded) : nullptr;
    std::vector<ggml_tensor*> ks, vs;
    for (int layer = 0; layer < shape.layers; ++layer) {
        for (auto* of : {&ks, &vs})
            of->push_back(ggml_new_tensor_3d(g.context, type_of(type), d, shape.kv_heads, shape.tokens));
        const auto by_head = [&](ggml_tensor* x) { return ggml_permute(g.context, x, 0, 2, 1, 3); };
        ggml_tensor* const out = ggml_flash_attn_ext(g.context, by_head(g.q), by_head(ks.back()), by_head(vs.back()), mask,
                                                     1.0f / std::sqrt(float(d)), 0.0f, 0.0f);
        ggml_flash_attn_ext_set_prec(out, GGML_PREC_F32);
        g.outs.push_back(out);
        g.graphs.push_back(ggml_new_graph_custom(g.context, 16, false));
        ggml_build_forward_expand(g.graphs.back(), out);
    }
    g.k = ks.front();
    g.buffer = need(ggml_backend_alloc_ctx_tensors(g.context, g.backend), "ggml_backend_alloc_ctx_tensors");
    for (int layer = 0; layer < shape.layers; ++layer) {
        store(ks[size_t(layer)], k);
        store(vs[size_t(layer)], v);
    }
    if (mask) {
        std::vector<ggml_fp16_t> seen(size_t(shape.tokens * padded), ggml_fp32_to_fp16(-INFINITY));
        for (int64_t i = 0; i < n_query; ++i) {
            for (int64_t j = 0; j <= shape.tokens - n_query + i; ++j) seen[size_t(i * shape.tokens + j)] = ggml_fp32_to_fp16(0);
        }
        ggml_backend_tensor_set(mask, seen.data(), 0, seen.size() * sizeof(ggml_fp16_t));
    }
}

GgmlAttention::~GgmlAttention() = default;

void GgmlAttention::run(int layer, const float* q, float* out) {
    ggml_tensor* const to = impl_->outs[size_t(layer)];
    ggml_backend_tensor_set(impl_->q, q, 0, ggml_nbytes(impl_->q));
    if (ggml_backend_graph_compute(impl_->backend, impl_->graphs[size_t(layer)]) != GGML_STATUS_SUCCESS)
        need<void>(nullptr, "ggml_backend_graph_compute");
    ggml_backend_tensor_get(to, out, 0, ggml_nbytes(to));
}

uint64_t GgmlAttention::kv_bytes_per_layer() const {
    return 2 * ggml_nbytes(impl_->k);
}

}  // namespace ta::bench
