// The values that a page stands for: the definition, a token at a time. Kernels multiply codes instead. K is as it was rotated, and
// without turning pairs and offset (rotation.h, turning.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/format/codec.h"
#include "kernels/format/layout.h"

namespace ta {

TA_HD inline float load_scale(const uint8_t* at) {
    float x;
    memcpy(&x, at, sizeof x);
    return x;
}

// Token t of a kv head's piece of a token page; k, v: [head_dim].
TA_HD inline void dequantize_token(const uint8_t* piece, const TokenLayout& layout, int t, float* k, float* v) {
    const float k_scale = load_scale(piece + layout.k_scale() + size_t(t) * sizeof(float));
    const float v_scale = load_scale(piece + layout.v_scale() + size_t(t) * sizeof(float));
    for (int c = 0; c < layout.d; ++c) {
        k[c] = float(int8_t(piece[layout.k_codes() + k_place(layout.d, 8, t, c).byte])) * k_scale;
        v[c] = float(int8_t(piece[layout.v_codes() + v_place(layout.d, 8, t, c).byte])) * v_scale;
    }
}

// A code of a channel page times its step, plus the zero point: in eighths of a unit, of which the page's scale is one.
TA_HD inline int channel_eighths(const uint8_t* codes, CodePlace place, uint8_t step_byte, uint8_t zero_byte, int bits) {
    const int code = codes[place.byte] >> place.shift & ((1 << bits) - 1);
    const int zero8 = 8 * int8_t(zero_byte) + fraction_eighths_of(step_byte, bits);
    return 8 * code * step_of(step_byte, bits) + zero8;
}

// Token t of a kv head's piece of a channel page; k, v: [head_dim].
TA_HD inline void dequantize_token(const uint8_t* piece, const ChannelLayout& layout, int t, float* k, float* v) {
    const int exponent = piece[layout.v_exponents() + size_t(t) / 2] >> (t % 2 * 4) & 15;
    const float k_scale = load_scale(piece + layout.k_scale());
    const float v_scale = times_pow2(load_scale(piece + layout.v_scale()), -exponent);
    for (int c = 0; c < layout.d; ++c) {
        const int k8 = channel_eighths(piece + layout.k_codes(), k_place(layout.d, layout.k_bits, t, c),
                                       piece[layout.k_step() + size_t(c)], piece[layout.k_zero() + size_t(c)], layout.k_bits);
        const int v8 = channel_eighths(piece + layout.v_codes(), v_place(layout.d, layout.v_bits, t, c),
                                       piece[layout.v_step() + size_t(c)], piece[layout.v_zero() + size_t(c)], layout.v_bits);
        k[c] = float(k8) * 0.125f * k_scale;
        v[c] = float(v8) * 0.125f * v_scale;
    }
}

}  // namespace ta
