#include "src/kv/tensor.h"

#include <algorithm>
#include <cstdlib>

#include "src/core/checked.h"

namespace ta {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 60;

// The byte range [low, high) that the elements span, relative to data. Nothing: it does not fit into 62 bits.
struct Extent {
    int64_t low, high;
};
std::optional<Extent> extent_of(const TensorView& v) {
    if (v.tokens == 0) return Extent{0, 0};
    Extent e{0, v.head_dim};
    const int64_t counts[] = {v.tokens, v.heads}, strides[] = {v.stride_token, v.stride_head};
    for (int i = 0; i < 2; ++i) {
        const std::optional<int64_t> reach = checked_mul(counts[i] - 1, strides[i]);
        if (!reach) return std::nullopt;
        const std::optional<int64_t> moved = checked_add(*reach < 0 ? e.low : e.high, *reach);
        if (!moved) return std::nullopt;
        (*reach < 0 ? e.low : e.high) = *moved;
    }
    if (e.low < -kMaxElements || e.high > kMaxElements) return std::nullopt;
    const int64_t size = int64_t(dtype_bytes(v.dtype));
    return Extent{e.low * size, e.high * size};
}

}  // namespace

Result<TensorView> view_tensor(const ta_tensor& t, const char* name) {
    if (t.dtype < TA_DTYPE_F16 || t.dtype > TA_DTYPE_F32) {
        return fail(TA_E_DTYPE, "%s.dtype is %d; it takes F16, BF16 or F32", name, t.dtype);
    }
    if (t.tokens < 0 || t.heads < 1 || t.head_dim < 1) {
        return fail(TA_E_SHAPE, "%s is [%lld, %lld, %lld]; tokens from 0, heads and head_dim from 1", name, (long long)t.tokens,
                    (long long)t.heads, (long long)t.head_dim);
    }
    TensorView v;
    v.data = static_cast<uint8_t*>(t.data);
    v.dtype = DType(t.dtype);
    v.tokens = t.tokens;
    v.heads = t.heads;
    v.head_dim = t.head_dim;
    const std::optional<int64_t> row = checked_mul(t.heads, t.head_dim);
    if (!row) return fail(TA_E_SHAPE, "%s: heads x head_dim does not fit 64 bits", name);
    const bool dense = t.stride_token == 0 && t.stride_head == 0;
    const auto is_broadcast = [&](int64_t stride, int64_t n) {
        return n > 1 && ((stride == 0 && !dense) || stride == TA_STRIDE_BROADCAST);
    };
    if (is_broadcast(t.stride_token, t.tokens) || is_broadcast(t.stride_head, t.heads)) {
        return fail(TA_E_SHAPE,
                    "%s has stride 0 over %lld %s, a broadcast view; copy its elements apart, or leave both strides 0 for a "
                    "dense tensor",
                    name, (long long)(is_broadcast(t.stride_token, t.tokens) ? t.tokens : t.heads),
                    is_broadcast(t.stride_token, t.tokens) ? "tokens" : "heads");
    }
    v.stride_token = t.tokens > 1 && !dense ? t.stride_token : *row;
    v.stride_head = t.heads > 1 && !dense ? t.stride_head : t.head_dim;
    if ((v.tokens > 1 && v.stride_token > -v.head_dim && v.stride_token < v.head_dim) ||
        (v.heads > 1 && v.stride_head > -v.head_dim && v.stride_head < v.head_dim)) {
        return fail(TA_E_SHAPE, "%s: a stride is shorter than head_dim %lld", name, (long long)t.head_dim);
    }
    const std::optional<int64_t> elements = checked_mul(t.tokens, *row);
    if (!elements || *elements > kMaxElements || !extent_of(v)) {
        return fail(TA_E_SHAPE, "%s: its elements or its extent do not fit 64 bits", name);
    }
    if (v.tokens == 0) return v;
    if (!v.data) return fail(TA_E_INVALID, "%s.data is null", name);
    if (reinterpret_cast<uintptr_t>(v.data) % dtype_bytes(v.dtype) != 0) {
        return fail(TA_E_ALIGNMENT, "%s.data is not aligned to its %zu-byte elements", name, dtype_bytes(v.dtype));
    }
    return v;
}

Status check_tensor_shape(const TensorView& v, const char* name, int64_t tokens, int64_t heads, int64_t head_dim) {
    if (v.tokens == tokens && v.heads == heads && v.head_dim == head_dim) return {};
    return fail(TA_E_SHAPE, "%s is [%lld, %lld, %lld]; this call takes [%lld, %lld, %lld]", name, (long long)v.tokens,
                (long long)v.heads, (long long)v.head_dim, (long long)tokens, (long long)heads, (long long)head_dim);
}

Status check_finite(const cpu::PageCodec& codec, const TensorView& v, const char* name) {
    int64_t bad_token = -1, bad_head = 0, bad_channel = 0;
    if (v.contiguous()) {
        const int64_t n = v.tokens * v.heads * v.head_dim;
        const int64_t i = codec.find_nonfinite(v.data, v.dtype, n);
        if (i == n) return {};
        bad_token = i / (v.heads * v.head_dim);
        bad_head = i / v.head_dim % v.heads;
        bad_channel = i % v.head_dim;
    } else {
        for (int64_t t = 0; t < v.tokens && bad_token < 0; ++t) {
            for (int64_t h = 0; h < v.heads && bad_token < 0; ++h) {
                const int64_t i = codec.find_nonfinite(v.at(t, h), v.dtype, v.head_dim);
                if (i == v.head_dim) continue;
                bad_token = t;
                bad_head = h;
                bad_channel = i;
            }
        }
        if (bad_token < 0) return {};
    }
    return fail(TA_E_NONFINITE, "%s[%lld, %lld, %lld] is NaN, infinite or above 2^56 in magnitude", name, (long long)bad_token,
                (long long)bad_head, (long long)bad_channel)
        .token(bad_token)
        .head(bad_head);
}

bool may_overlap(const TensorView& a, const TensorView& b) {
    const Extent ea = *extent_of(a), eb = *extent_of(b);
    const auto begin = [](const TensorView& v, const Extent& e) { return intptr_t(v.data) + e.low; };
    const auto end = [](const TensorView& v, const Extent& e) { return intptr_t(v.data) + e.high; };
    return ea.high > ea.low && eb.high > eb.low && begin(a, ea) < end(b, eb) && begin(b, eb) < end(a, ea);
}

namespace {

// True unless the longer stride steps over everything that the shorter one reaches, which keeps rows apart.
bool rows_may_coincide(const TensorView& v) {
    if (v.tokens < 2 || v.heads < 2) return false;  // with one row each way, view_tensor has checked the stride
    const int64_t token = std::abs(v.stride_token), head = std::abs(v.stride_head);
    const int64_t reach = token < head ? (v.tokens - 1) * token : (v.heads - 1) * head;
    return std::max(token, head) < reach + v.head_dim;
}

}  // namespace

TensorView view_of_floats(const float* data, int64_t rows, int64_t n) {
    TensorView view;
    view.data = reinterpret_cast<uint8_t*>(const_cast<float*>(data));
    view.tokens = data ? rows : 0;
    view.heads = 1;
    view.head_dim = view.stride_token = view.stride_head = n;
    return view;
}

Status check_outputs(std::initializer_list<NamedView> inputs, const TensorView& out, const float* lse, int argument) {
    if (rows_may_coincide(out))
        return fail(TA_E_INVALID, "out overlaps itself: its strides let rows coincide").argument(argument);
    const TensorView l = view_of_floats(lse, out.tokens, out.heads);
    for (const NamedView& input : inputs) {
        if (may_overlap(input.view, out)) return fail(TA_E_INVALID, "out overlaps %s", input.name).argument(argument);
        if (may_overlap(input.view, l)) return fail(TA_E_INVALID, "lse overlaps %s", input.name).argument(argument + 1);
    }
    if (may_overlap(out, l)) return fail(TA_E_INVALID, "lse overlaps out").argument(argument + 1);
    return {};
}

}  // namespace ta
