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

}  // namespace

PageNumbers read_piece(const uint8_t* piece, PageKind kind, int d, int k_bits, int v_bits, int valid) {
    PageNumbers n;
    n.k.resize(size_t(kPageTokens) * size_t(d));
    n.v.resize(n.k.size());
    const auto code = [](const uint8_t* codes, CodePlace at, int bits) {
        return codes[at.byte] >> at.shift & ((1 << bits) - 1);
    };
    const ChannelLayout channel(d, k_bits, v_bits);
    const TokenLayout token(d);
    for (int t = 0; t < kPageTokens; ++t) {
        for (int c = 0; c < d; ++c) {
            const size_t at = size_t(t) * size_t(d) + size_t(c);
            if (kind == PageKind::kToken) {
                n.k[at] = t < valid ? int8_t(piece[token.k_codes() + k_place(d, 8, t, c).byte]) : 0;
                n.v[at] = t < valid ? int8_t(piece[token.v_codes() + v_place(d, 8, t, c).byte]) : 0;
                continue;
            }
            const uint8_t ks = piece[channel.k_step() + size_t(c)], vs = piece[channel.v_step() + size_t(c)];
            const int kz = 8 * int8_t(piece[channel.k_zero() + size_t(c)]) + fraction_eighths_of(ks, k_bits);
            const int vz = 8 * int8_t(piece[channel.v_zero() + size_t(c)]) + fraction_eighths_of(vs, v_bits);
            n.k[at] = 8 * step_of(ks, k_bits) * code(piece + channel.k_codes(), k_place(d, k_bits, t, c), k_bits) + kz;
            n.v[at] = 8 * step_of(vs, v_bits) * code(piece + channel.v_codes(), v_place(d, v_bits, t, c), v_bits) + vz;
        }
        if (t >= valid) {
            n.k_scale[t] = n.v_scale[t] = 0.0;
        } else if (kind == PageKind::kToken) {
            n.k_scale[t] = load_f32(piece + token.k_scale() + 4 * size_t(t));
            n.v_scale[t] = load_f32(piece + token.v_scale() + 4 * size_t(t));
        } else {
            const int exponent = piece[channel.v_exponents() + size_t(t) / 2] >> (t % 2 * 4) & 15;
            n.k_scale[t] = load_f32(piece + channel.k_scale()) / 8.0;
            n.v_scale[t] = std::ldexp(load_f32(piece + channel.v_scale()) / 8.0, -exponent);
        }
    }
    n.v_unit = kind == PageKind::kToken ? *std::max_element(n.v_scale, n.v_scale + kPageTokens)
                                        : load_f32(piece + channel.v_scale()) / 8.0;
    return n;
}

}  // namespace ta::testing
