#include "support/tensor.h"

#include <cstdlib>
#include <cstring>

namespace ta::testing {

ta_tensor view_of(const float* data, int64_t tokens, int64_t heads, int64_t head_dim) {
    ta_tensor t{};
    t.struct_size = sizeof t;
    t.dtype = TA_DTYPE_F32;
    t.data = const_cast<float*>(data);
    t.tokens = tokens;
    t.heads = heads;
    t.head_dim = head_dim;
    return t;
}

Tensor::Tensor(int64_t tokens, int64_t heads, int64_t head_dim, ta_dtype dtype, Layout layout) {
    view_.struct_size = sizeof view_;
    view_.dtype = dtype;
    view_.tokens = tokens;
    view_.heads = heads;
    view_.head_dim = head_dim;
    stride_head_ = head_dim;
    stride_token_ = heads * head_dim;
    if (layout == Layout::kPadded) {
        stride_head_ = head_dim + 3;
        stride_token_ = heads * stride_head_ + 5;
    } else if (layout == Layout::kHeadMajor) {
        stride_token_ = head_dim;
        stride_head_ = std::max<int64_t>(tokens, 1) * head_dim;
    } else if (layout == Layout::kBackwards) {
        stride_head_ = -head_dim;
        stride_token_ = -heads * head_dim;
        first_ = size_t(std::max<int64_t>(tokens - 1, 0) * heads * head_dim + (heads - 1) * head_dim);
    }
    if (layout != Layout::kPlain) {
        view_.stride_token = stride_token_;
        view_.stride_head = stride_head_;
    }
    const int64_t elements = std::abs(stride_token_) * std::max<int64_t>(tokens, 1) + std::abs(stride_head_) * heads;
    bytes_.resize(size_t(elements) * dtype_bytes(dtype) + 8);
    for (size_t i = 0; i < bytes_.size() / dtype_bytes(dtype); ++i) store(i, kPoison);
}

Tensor::Tensor(std::span<const float> values, int64_t tokens, int64_t heads, int64_t head_dim, ta_dtype dtype, Layout layout)
    : Tensor(tokens, heads, head_dim, dtype, layout) {
    size_t i = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
            for (int64_t c = 0; c < head_dim; ++c) set(t, h, c, values[i++]);
        }
    }
}

const ta_tensor* Tensor::view() {
    view_.data = bytes_.data() + first_ * dtype_bytes(view_.dtype);
    return &view_;
}

size_t Tensor::place(int64_t token, int64_t head, int64_t channel) const {
    return size_t(int64_t(first_) + token * stride_token_ + head * stride_head_ + channel);
}

float Tensor::load(size_t place) const {
    if (view_.dtype == TA_DTYPE_F32) {
        float x;
        std::memcpy(&x, bytes_.data() + 4 * place, 4);
        return x;
    }
    uint16_t h;
    std::memcpy(&h, bytes_.data() + 2 * place, 2);
    return view_.dtype == TA_DTYPE_F16 ? f16_to_float(h) : bf16_to_float(h);
}

void Tensor::store(size_t place, float x) {
    if (view_.dtype == TA_DTYPE_F32) {
        std::memcpy(bytes_.data() + 4 * place, &x, 4);
        return;
    }
    const uint16_t h = view_.dtype == TA_DTYPE_F16 ? float_to_f16(x) : float_to_bf16(x);
    std::memcpy(bytes_.data() + 2 * place, &h, 2);
}

std::vector<float> Tensor::values() const {
    std::vector<float> x;
    x.reserve(size_t(view_.tokens * view_.heads * view_.head_dim));
    for (int64_t t = 0; t < view_.tokens; ++t) {
        for (int64_t h = 0; h < view_.heads; ++h) {
            for (int64_t c = 0; c < view_.head_dim; ++c) x.push_back(get(t, h, c));
        }
    }
    return x;
}

bool Tensor::all_poison() const {
    const float poison = round_to(view_.dtype, kPoison);
    for (size_t i = 0; i < bytes_.size() / dtype_bytes(view_.dtype); ++i) {
        if (load(i) != poison) return false;
    }
    return true;
}

bool Tensor::gaps_poison() const {
    Tensor gaps = *this;
    for (int64_t t = 0; t < view_.tokens; ++t) {
        for (int64_t h = 0; h < view_.heads; ++h) {
            for (int64_t c = 0; c < view_.head_dim; ++c) gaps.set(t, h, c, kPoison);
        }
    }
    return gaps.all_poison();
}

}  // namespace ta::testing
