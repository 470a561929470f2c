// The scales of a page, as a block's scores need them. Three of the producers' warps write them after their share of codes.
#pragma once

#include "kernels/cuda/sm90/prefill/shared.cuh"

namespace ta::cuda::prefill::sm90 {

// For numbers that are not negative: their bits are in the same order.
TA_DEVICE float warp_max(float x) {
    return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x)));
}
TA_DEVICE float warp_min(float x) {
    return __uint_as_float(__reduce_min_sync(~0u, __float_as_uint(x)));
}

TA_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TA_DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TA_DEVICE float power_of_2(int e) {
    return __int_as_float((127 + e) << 23);
}

// Destinations of the scales of page `half` of a block. A lane does two tokens, 32 apart. `weights` are V's rows for sums.
struct Scales {
    // Replacements of a V scale of 0. They are small, so that they do not take P's levels from other tokens, above all from the
    // token with the smallest scale. But they are within reach of other scales for 2^x, so that the keys count in l.
    static constexpr float kNoScale = 0x1p-60f, kNoTokenScale = 0x1p-30f, kReach = 0x1p-90f;

    BlockScales& out;
    uint8_t* weights;
    int half, lane;
    bool turning;  // pages can have turning pairs

    // For 8 bits. `from`: scales [64], of which tokens [0, valid) exist; null: there is no page, and all keys are masked. Stand-ins
    // for the scales of tokens that do not exist must be numbers. part 0: K's, 1: V's.
    TA_DEVICE void read_tokens(const uint8_t* from, int valid, int part, bool of_channel_page) const {
        float x[2] = {float(part), float(part)};
        if (valid > 0)
            x[0] = reinterpret_cast<const float*>(from)[lane], x[1] = reinterpret_cast<const float*>(from)[lane + 32];
        const float first = __shfl_sync(~0u, x[0], 0);
        bool turns = false;
        if (part == 0) {
            uint8_t byte[2] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (turning && valid > 0) byte[n] = uint8_t(__float_as_uint(x[n]));
                reinterpret_cast<uint8_t*>(out.turning[half])[lane + 32 * n] = byte[n];
            }
            turns = __any_sync(~0u, lane < 8 && byte[0] != 0);
        }
        if (lane >= valid) x[0] = first;
        if (lane + 32 >= valid) x[1] = first;
        const bool equal = __all_sync(~0u, x[0] == first && x[1] == first);
        if (part == 0) {
            const float largest = equal ? first : warp_max(fmaxf(x[0], x[1]));
            store_k(x[0], x[1]);
            store_k_page(equal ? first * kFine : INFINITY, largest, turns, of_channel_page);
            return;
        }
        const auto or_none = [](float scale) { return scale > 0.0f ? scale : kNoScale; };
        float high = or_none(first), low = high;
        if (!equal) {
            high = or_none(warp_max(fmaxf(x[0], x[1])));
            low = warp_min(fminf(x[0] > 0.0f ? x[0] : high, x[1] > 0.0f ? x[1] : high));
            if (__any_sync(~0u, fminf(x[0], x[1]) <= 0.0f)) {
                low = fminf(fmaxf(fmaxf(low * kNoTokenScale, high * kReach), kNoScale), low);
#pragma unroll
                for (int n = 0; n < 2; ++n) x[n] = x[n] > 0.0f ? x[n] : low;
            }
        } else {
            x[0] = x[1] = high;
        }
        float v[2], inverse[2];
        v[0] = log2_fast(x[0]), inverse[0] = kSumUnit * reciprocal_fast(x[0]);
        v[1] = equal ? v[0] : log2_fast(x[1]), inverse[1] = equal ? inverse[0] : kSumUnit * reciprocal_fast(x[1]);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            store_v(n, fmaf(v[n], float(kGrid), kTokenZero), __float2int_rn(fmaf(v[n], kFine, 32768.0f)), inverse[n]);
        if (equal) {
            store_digits();
        } else {
            const float unit = low * (65535.0f / kSumUnit);
#pragma unroll
            for (int n = 0; n < 2; ++n) store_weight(n, __float2uint_rn(unit * inverse[n]));
        }
        if (lane == 0) {
            const bool exists = valid > 0;
            const float log2_high = log2_fast(high), log2_low = log2_fast(low);
            store_v_page(!exists ? 0.0f
                         : equal ? inverse[0]
                                 : kSumUnit / 65535.0f * reciprocal_fast(low),
                         equal ? __float2int_rn(fmaf(log2_high, kFine, 32768.0f)) : kNoAddend, log2_high, log2_low);
            if (!exists) out.v_highest[half] = -kNoLog, out.v_lowest[half] = kNoLog;
        }
    }

    // For a channel page: at 4 and 2 bits one scale, and for V's tokens exponents below it.
    template <int D, bool kAnyBits>
    TA_DEVICE void read_channels(const uint8_t* raw, int k_bits, int v_bits, int part) const {
        if (!kAnyBits) assume_low_bits(k_bits, v_bits);
        const ChannelLayout layout(D, k_bits, v_bits);
        if (kAnyBits && (part ? v_bits : k_bits) == 8) {
            read_tokens(raw + (part ? layout.v_parameters() : layout.k_parameters()), kPageTokens, part, true);
            return;
        }
        const float scale = *reinterpret_cast<const float*>(raw + (part ? layout.v_scale() : layout.k_scale()));
        if (part == 0) {
            store_k(scale, scale);
            uint2 pair = {};
            if (turning && lane < kTurningPairs) pair = reinterpret_cast<const uint2*>(raw + layout.k_turning())[lane];
            if (lane < kTurningPairs) reinterpret_cast<uint2*>(out.turning[half])[lane] = pair;
            const bool turns = __any_sync(~0u, lane == 0 && (pair.x | pair.y) != 0);
            store_k_page(scale * kFine, scale, turns, true);
            return;
        }
        int e[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            e[n] = raw[layout.v_exponents() + lane / 2 + 16 * n] >> (lane % 2 * 4) & 15;
            e[n] = scale > 0.0f ? e[n] : 0;  // 2^-15 of kNoScale is beyond the reach
        }
        const int least = __reduce_min_sync(~0u, min(e[0], e[1])), most = __reduce_max_sync(~0u, max(e[0], e[1]));
        const bool equal = least == most;
        const float known = scale > 0.0f ? scale : kNoScale, log2 = log2_fast(known),
                    inverse = kSumUnit * reciprocal_fast(known);
        const int fine = __float2int_rn(fmaf(log2, kFine, 32768.0f));
        const float grid = fmaf(log2, float(kGrid), kTokenZero);
#pragma unroll
        for (int n = 0; n < 2; ++n)
            store_v(n, grid - float(kGrid * e[n]), fine - int(kFine) * e[n], inverse * power_of_2(e[n]));
        if (equal) {
            store_digits();
        } else {
#pragma unroll
            for (int n = 0; n < 2; ++n) store_weight(n, ((131070u >> (most - e[n])) + 1) >> 1);  // of 65535, rounded
        }
        if (lane == 0) {
            store_v_page(inverse * power_of_2(most) * (equal ? 1.0f : 1.0f / 65535.0f),
                         equal ? fine - int(kFine) * least : kNoAddend, log2 - float(least), log2 - float(most));
        }
    }

  private:
    // Columns 8 j + 2 i + e and 8 (j + 4) + 2 i + e.
    TA_DEVICE int i() const {
        return lane % 8 / 2;
    }
    TA_DEVICE int e() const {
        return lane % 2;
    }
    TA_DEVICE int j() const {
        return half * 8 + lane / 8;
    }
    TA_DEVICE TokenScales& token(int n) const {
        return out.token[score_word(j(), e()) + 4 * n][i()];
    }

    TA_DEVICE void store_k(float first, float second) const {
        token(0).k[score_half(j())] = first;
        token(1).k[score_half(j())] = second;
    }
    // `turns`: no bound of the scores follows from the queries' codes.
    TA_DEVICE void store_k_page(float fine, float largest, bool turns, bool is_channel) const {
        if (lane > 0) return;
        if (turns) fine = largest = INFINITY;
        out.k_page[half] = fine;
        out.k_largest[half] = largest;
        out.k_coarse[half] = fine > 0.0f ? largest * kCoarse : INFINITY;
        out.channel[half] = is_channel;
    }
    // Token n of the lane: log2 of its scale in steps and in fine ones, and the scale's inverse.
    TA_DEVICE void store_v(int n, float grid, int fine, float inverse) const {
        token(n).v[score_half(j())] = grid;
        out.v_token[j() / 2 + 2 * n][i()][e()][j() % 2] = fine;
        reinterpret_cast<float*>(&out.v_inverse[score_word(j(), e()) + 4 * n][i()])[score_half(j())] = inverse;
    }
    TA_DEVICE void store_v_page(float unit, int fine, float highest, float lowest) const {
        out.digit[2 * half] = 256.0f * unit;
        out.digit[2 * half + 1] = unit;
        out.v_page[half] = fine;
        out.v_highest[half] = highest;
        out.v_lowest[half] = lowest;
        out.v_room[half] = fmaf(fmaxf(highest, -lowest), -kFine, kHighest * 65536.0f);
    }
    // The rows for sums: of tokens that have one scale, or one token's weight.
    TA_DEVICE void store_digits() const {
        const int digit = lane / 4, row = sum_row(half, digit);
        const uint32_t x = digit * 0x01010101u;
        if (lane < 8)
            store_chunk(weights + row * kBlockTokens + ptx::swizzled_chunk<kBlockTokens>(row, 4 * half + lane % 4) * 16, x, x,
                        x, x);
    }
    TA_DEVICE void store_weight(int n, uint32_t weight) const {
        const int at = half * kPageTokens + lane + 32 * n, chunk = v_chunk(at), byte = v_byte(at);
#pragma unroll
        for (int digit = 0; digit < 2; ++digit) {
            const int row = sum_row(half, digit);
            weights[row * kBlockTokens + ptx::swizzled_chunk<kBlockTokens>(row, chunk) * 16 + byte] =
                uint8_t(digit ? weight : weight >> 8);
        }
    }
};

}  // namespace ta::cuda::prefill::sm90
