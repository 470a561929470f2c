#include "support/page_numbers.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ta::testing {
namespace {

float load_f32(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Of K (v = false) or of V: values in units of a scale, and scales [64].
void read_half(const uint8_t* piece, PageKind kind, const ChannelLayout& channel, bool v, int valid, std::vector<int>& values,
               double (&scales)[kPageTokens], double* unit) {
    const int d = channel.d, bits = kind == PageKind::kToken ? 8 : v ? channel.v_bits : channel.k_bits;
    const TokenLayout token(d);
    const uint8_t* codes = piece + (kind == PageKind::kToken ? v ? token.v_codes() : token.k_codes()
                                    : v ? channel.v_codes()
                                                             : channel.k_codes());
    const uint8_t* parameters = piece + (kind == PageKind::kToken ? v ? token.v_scale() : token.k_scale()
                                         : v ? channel.v_parameters()
                                                                  : channel.k_parameters());
    values.assign(size_t(kPageTokens) * size_t(d), 0);
    const double page_scale = bits == 8 ? 0.0 : load_f32(piece + (v ? channel.v_scale() : channel.k_scale())) / 8.0;
    for (int t = 0; t < kPageTokens; ++t) {
        for (int c = 0; c < d; ++c) {
            int& value = values[size_t(t) * size_t(d) + size_t(c)];
            const CodePlace at = v ? v_place(d, bits, t, c) : k_place(d, bits, t, c);
            if (bits == 8) {
                value = t < valid ? int8_t(codes[at.byte]) : 0;
                continue;
            }
            const uint8_t step = parameters[c];
            value = 8 * step_of(step, bits) * (codes[at.byte] >> at.shift & ((1 << bits) - 1)) + 8 * int8_t(parameters[d + c]) +
                    fraction_eighths_of(step, bits);
        }
        const int exponent = v && bits != 8 ? piece[channel.v_exponents() + size_t(t) / 2] >> (t % 2 * 4) & 15 : 0;
        scales[t] = t >= valid ? 0.0 : bits == 8 ? load_f32(parameters + 4 * t) : std::ldexp(page_scale, -exponent);
    }
    *unit = bits == 8 ? *std::max_element(scales, scales + kPageTokens) : page_scale;
}

}  // namespace

PageNumbers read_piece(const uint8_t* piece, PageKind kind, int d, int k_bits, int v_bits, int valid) {
    PageNumbers n;
    const ChannelLayout channel(d, k_bits, v_bits);
    n.k_bytes = kind == PageKind::kToken || k_bits == 8;
    n.v_bytes = kind == PageKind::kToken || v_bits == 8;
    double k_unit;
    read_half(piece, kind, channel, false, valid, n.k, n.k_scale, &k_unit);
    read_half(piece, kind, channel, true, valid, n.v, n.v_scale, &n.v_unit);
    return n;
}

}  // namespace ta::testing
