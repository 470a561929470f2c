#include "kernels/format/check.h"

#include <bit>
#include <cstddef>
#include <cstring>

#include "kernels/format/codec.h"
#include "kernels/format/turning.h"

namespace ta {
namespace {

// Loops without a branch: the compiler makes vectors of them.

// `zero`: bits that a scale of 0 may have.
bool are_good_scales(const uint8_t* at, int n, uint32_t zero = 0) {
    constexpr uint32_t kLeast = 0x00800000, kMost = std::bit_cast<uint32_t>(kMaxScale);
    uint32_t bad = 0;
    for (int i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, at + sizeof bits * size_t(i), sizeof bits);
        bad |= uint32_t(bits - kLeast > kMost - kLeast) & uint32_t((bits & ~zero) != 0);
    }
    return bad == 0;
}

bool are_zeros(const uint8_t* at, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; ++i) any |= at[i];
    return any == 0;
}

bool are_good_token_codes(const uint8_t* codes, size_t n) {
    uint8_t largest = 0;
    for (size_t i = 0; i < n; ++i) {
        const auto above = uint8_t(codes[i] + kStage1Levels);
        largest = above > largest ? above : largest;
    }
    return largest <= 2 * kStage1Levels;
}

// One side of a channel piece: steps in range, and each code times step plus zero point an INT8. Only a channel whose largest
// possible code leaves INT8 has its codes looked at.
template <class PlaceOf>
bool are_good_channels(const uint8_t* codes, const uint8_t* steps, const uint8_t* zeros, int d, int bits, PlaceOf place_of) {
    const int most = bits == 4 ? 16 : 80, top = (1 << bits) - 1;
    int bad = 0, doubtful = 0;
    for (int c = 0; c < d; ++c) {
        const int step = bits == 4 ? steps[c] & 31 : steps[c] & 127;  // step_of()
        bad |= int(step < 1) | int(step > most);
        doubtful |= int(top * step + int8_t(zeros[c]) > INT8_MAX);
    }
    if (bad) return false;
    for (int c = 0; doubtful && c < d; ++c) {
        const int highest = (INT8_MAX - int8_t(zeros[c])) / step_of(steps[c], bits);
        for (int t = 0; highest < top && t < kPageTokens; ++t) {
            const CodePlace at = place_of(t, c);
            if ((codes[at.byte] >> at.shift & top) > highest) return false;
        }
    }
    return true;
}

// The codes of channels that do not exist: the last rows of each load (layout.h).
bool are_good_missing_channels(const uint8_t* codes, int d, int stored, int bits) {
    constexpr int kLoad = 512, kRows = 8;
    const int first = kLoad / kRows * (d / (stored / kRows));
    const int loads = kPageTokens * stored * bits / 8 / kLoad;
    for (int load = 0; first < kLoad && load < loads; ++load) {
        if (!are_zeros(codes + load * kLoad + first, size_t(kLoad - first))) return false;
    }
    return true;
}

bool is_good_turning(const TurningPairs& pairs, int d) {
    bool ended = false;
    for (const uint64_t code : pairs.code) {
        const TurningPair p = unpack_turning(code);
        const bool good =
            p.first < d && p.second < d && p.first != p.second && p.amplitude >= kLeastTurning && p.amplitude <= kMostTurning;
        if (code != 0 && (ended || !good)) return false;
        ended |= code == 0;
    }
    return true;
}

}  // namespace

bool is_good_scale(float scale) {
    uint8_t bytes[sizeof scale];
    std::memcpy(bytes, &scale, sizeof scale);
    return are_good_scales(bytes, 1);
}

bool is_good_token_piece(const uint8_t* piece, int d, bool k_turning) {
    const TokenLayout at(d);
    return are_good_scales(piece + at.k_scale(), kPageTokens, k_turning ? 255 : 0) &&
           are_good_scales(piece + at.v_scale(), kPageTokens) &&
           (!k_turning || is_good_turning(turning_of_tokens(piece, at), d)) &&
           are_good_token_codes(piece + at.k_codes(), 2 * size_t(kPageTokens) * size_t(d));
}

bool are_good_own_scales(const uint8_t* at, size_t n) {
    return are_good_scales(at, int(n));
}

bool is_good_channel_piece(const uint8_t* piece, const ChannelLayout& at, bool k_turning, bool own_scales) {
    const int d = at.d, k_bits = at.k_bits, v_bits = at.v_bits;
    const size_t codes_of_8 = size_t(kPageTokens) * size_t(d);
    const uint8_t *k_codes = piece + at.k_codes(), *v_codes = piece + at.v_codes();
    const bool pairs_apart = k_turning && k_bits != 8;
    const size_t pairs_end = at.k_turning() + (pairs_apart ? kTurningBytes : 0), own = at.own_scales(),
                 end = own + 2 * sizeof(float);
    const bool good_tail = are_zeros(piece + pairs_end, own - pairs_end) &&
                           (own_scales ? are_good_scales(piece + own, 2) : are_zeros(piece + own, end - own)) &&
                           are_zeros(piece + end, at.bytes() - end) &&
                           (!k_turning || is_good_turning(turning_of_channel(piece, at), d));
    if (!good_tail) return false;
    const bool good_k = k_bits == 8 ? are_good_token_codes(k_codes, codes_of_8) &&
                                          are_good_scales(piece + at.k_parameters(), kPageTokens, k_turning ? 255 : 0) &&
                                          are_zeros(piece + at.k_scale(), sizeof(float))
                                    : are_good_scales(piece + at.k_scale(), 1) &&
                                          are_good_channels(k_codes, piece + at.k_step(), piece + at.k_zero(), d, k_bits,
                                                            [&](int t, int c) { return k_place(d, k_bits, t, c); });
    if (!good_k) return false;
    return v_bits == 8
               ? are_good_token_codes(v_codes, codes_of_8) && are_good_scales(piece + at.v_parameters(), kPageTokens) &&
                     are_zeros(piece + at.v_exponents(), kPageTokens / 2) && are_zeros(piece + at.v_scale(), sizeof(float))
               : are_good_scales(piece + at.v_scale(), 1) &&
                     are_good_channels(v_codes, piece + at.v_step(), piece + at.v_zero(), d, v_bits,
                                       [&](int t, int c) { return v_place(d, v_bits, t, c); }) &&
                     are_good_missing_channels(v_codes, d, v_stored_channels(d, v_bits), v_bits);
}

}  // namespace ta
