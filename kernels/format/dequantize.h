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

// Token t of K or of V of a token page, or at 8 bits of a channel page; out: [head_dim].
template <class Place>
TA_HD inline void dequantize_token_half(const uint8_t* codes, const uint8_t* scales, int d, int t, Place place, float* out) {
    const float scale = load_scale(scales + size_t(t) * sizeof(float));
    for (int c = 0; c < d; ++c) out[c] = float(int8_t(codes[place(d, 8, t, c).byte])) * scale;
}

// Token t of a kv head's piece of a token page; k, v: [head_dim].
TA_HD inline void dequantize_token(const uint8_t* piece, const TokenLayout& layout, int t, float* k, float* v) {
    dequantize_token_half(piece + layout.k_codes(), piece + layout.k_scale(), layout.d, t, k_place, k);
    dequantize_token_half(piece + layout.v_codes(), piece + layout.v_scale(), layout.d, t, v_place, v);
}

// A code of 4 or 2 bits times its step, plus the zero point: in eighths of a unit, of which the page's scale is one.
TA_HD inline int channel_eighths(const uint8_t* codes, CodePlace place, uint8_t step_byte, uint8_t zero_byte, int bits) {
    const int code = codes[place.byte] >> place.shift & ((1 << bits) - 1);
    const int zero8 = 8 * int8_t(zero_byte) + fraction_eighths_of(step_byte, bits);
    return 8 * code * step_of(step_byte, bits) + zero8;
}

// Token t of K or of V at 4 or 2 bits.
template <class Place>
TA_HD inline void dequantize_channel_half(const uint8_t* codes, const uint8_t* steps, int d, int bits, int t, Place place,
                                          float scale, float* out) {
    for (int c = 0; c < d; ++c)
        out[c] = float(channel_eighths(codes, place(d, bits, t, c), steps[c], steps[d + c], bits)) * 0.125f * scale;
}

// Token t of a kv head's piece of a channel page; k, v: [head_dim].
TA_HD inline void dequantize_token(const uint8_t* piece, const ChannelLayout& layout, int t, float* k, float* v) {
    const uint8_t *k_codes = piece + layout.k_codes(), *k_parameters = piece + layout.k_parameters();
    const uint8_t *v_codes = piece + layout.v_codes(), *v_parameters = piece + layout.v_parameters();
    if (layout.k_bits == 8) {
        dequantize_token_half(k_codes, k_parameters, layout.d, t, k_place, k);
    } else {
        const float scale = load_scale(piece + layout.k_scale());
        dequantize_channel_half(k_codes, k_parameters, layout.d, layout.k_bits, t, k_place, scale, k);
    }
    if (layout.v_bits == 8) {
        dequantize_token_half(v_codes, v_parameters, layout.d, t, v_place, v);
    } else {
        const int exponent = piece[layout.v_exponents() + size_t(t) / 2] >> (t % 2 * 4) & 15;
        const float scale = times_pow2(load_scale(piece + layout.v_scale()), -exponent);
        dequantize_channel_half(v_codes, v_parameters, layout.d, layout.v_bits, t, v_place, scale, v);
    }
}

}  // namespace ta
