// Scores to P where 16 bits will not do: softcap, ALiBi, scores of hundreds of octaves, SAS beside scales per token, turning
// pairs. fp32 to the end.
#pragma once

#include "kernels/cuda/sm90/prefill/softmax.cuh"

namespace ta::cuda::prefill::sm90 {

TA_DEVICE float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2 of SAS's e^-y, -inf beyond its cutoff; u = y log2 e >= 0.
TA_DEVICE float log2_sas(float u) {
    const float y = u * 0.693147181f;
    if (!(y <= 6.0f)) return -INFINITY;
    const float n = floorf(y), f = y - n;
    float r = fmaf(-0.1025f, f, 0.4626f);
    r = fmaf(r, f, -0.9922f);
    r = fmaf(r, f, 0.9996f);
    return log2_approx(r) - n * 1.44269504f;
}

// Options of fp32 scores, the same for all rows of the call.
struct ScoreOptions {
    float softcap;  // in log2 units; 0: off
    float softcap_inverse;
    bool sas;
};

TA_DEVICE ScoreOptions score_options(const AttendArgs& args) {
    const bool capped = args.softcap > 0.0f;
    return {args.softcap * 1.44269504f, capped ? 1.0f / args.softcap : 0.0f, args.exp == ExpMode::kSas};
}

TA_DEVICE float soft_capped(float x, const ScoreOptions& o) {
    const float y = fabsf(x * o.softcap_inverse), e = exp2_approx(-2.0f * 1.44269504f * y);
    return copysignf(o.softcap * __fdividef(1.0f - e, 1.0f + e), x);
}

TA_DEVICE bool has_turning(const BlockScales& scales) {
    return (scales.turning[0][0] | scales.turning[1][0]) != 0;
}

// Adds the turning pairs of a block's pages to scores `x` [64], fp32 already, of rows `row_in_tile` and 8 more. A call, on memory:
// the main loop has no registers for it.
inline __device__ __noinline__ void add_turning(const AttendArgs& args, const Tile& tile, int row_in_tile,
                                                const BlockScales& scales, int i, float* x) {
    const float unit = args.softcap > 0.0f ? args.scale : args.scale * 1.44269504f;
    const void* q[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const RowPlace at(args, tile, row_in_tile + 8 * row);
        const auto* data = static_cast<const uint8_t*>(args.q.data);
        q[row] = at.token < tile.rows.n_query ? data + at.offset(args.q, tile) * int64_t(dtype_bytes(args.q.dtype)) : nullptr;
    }
#pragma unroll 1
    for (int m = 0; m < 2 * kTurningPairs; ++m) {
        const int page = m / kTurningPairs;
        const uint64_t code = scales.turning[page][m % kTurningPairs];
        if (code == 0) continue;
        const TurningPair pair = unpack_turning(code);
        float first[2], second[2];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            first[row] = query_value(args.q, q[row], pair.first, unit, args.saturate);
            second[row] = query_value(args.q, q[row], pair.second, unit, args.saturate);
        }
#pragma unroll 4
        for (int n = 0; n < 16; ++n) {  // columns j and e of the page
            const int j = 8 * page + n / 2, e = n % 2;
            const TurningValues at = turning_values_fast(pair, lane_token(i) + column_token(n / 2, e));
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float& to = x[4 * j + 2 * row + e];
                to = fmaf(second[row], at.second, fmaf(first[row], at.first, to));
            }
        }
    }
}

// A lane's part of a block whose integer scores are in `unit`.
struct LaneBlock {
    RowInfo* rows;    // the first one's
    RowInfo info[2];  // what is there
    float scale[2];
    int i;  // of its columns
    TA_DEVICE LaneBlock(RowInfo* rows, float unit, int i)
        : rows(rows), info{rows[0], rows[8]}, scale{info[0].scale * unit, info[1].scale * unit}, i(i) {}
};

// The integers become the bits of floats.
TA_DEVICE void scale_scores(int32_t (&s)[64], const LaneBlock& lane, const BlockScales& scales) {
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const int e = e_of_word(n), first = j_of_word(n);
        const TokenScales token = scales.token[n][lane.i];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int row = m / 2, h = m % 2, j = first + h;
            const float x = float(s[4 * j + 2 * row + e]) * (lane.scale[row] * token.k[h]);
            s[4 * j + 2 * row + e] = __float_as_int(x);
        }
    }
}
TA_DEVICE void add_turning(const AttendArgs& args, const Tile& tile, int row_in_tile, const BlockScales& scales, int i,
                           int32_t (&s)[64]) {
    float x[64];
#pragma unroll
    for (int n = 0; n < 64; ++n) x[n] = __int_as_float(s[n]);
    add_turning(args, tile, row_in_tile, scales, i, x);
#pragma unroll
    for (int n = 0; n < 64; ++n) s[n] = __float_as_int(x[n]);
}

// Softcap and ALiBi. `key`: the block's first, among those of the sequence's pages.
TA_DEVICE void apply_options(int32_t (&s)[64], const LaneBlock& lane, const ScoreOptions& options, const BlockWalk& walk,
                             int key) {
    const int page = key / kPageTokens;
    const int first[2] = {walk.block(page) * kPageTokens, (walk.block(page + 1) - 1) * kPageTokens};  // less the columns before
#pragma unroll
    for (int n = 0; n < 64; ++n) {
        const int row = n / 2 % 2;
        float x = __int_as_float(s[n]);
        if (options.softcap > 0.0f) x = soft_capped(x + lane.info[row].bias, options);
        const int place = first[n / 32] + lane_token(lane.i) + column_token(n / 4, n % 2);
        s[n] = __float_as_int(fmaf(lane.info[row].slope, float(place - lane.info[row].position), x));
    }
}

// Masks.
TA_DEVICE void hide_scores(int32_t (&s)[64], const Seen& seen) {
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const uint32_t hidden = seen.hidden(n / 2, j, n % 2);
            if (hidden & 0xffff) s[4 * j + n] = __float_as_int(-INFINITY);
            if (hidden >> 16) s[4 * j + 4 + n] = __float_as_int(-INFINITY);
        }
    }
}

// The rest of the fp32 path: every mask and, with kOptions, SAS. Scores of `s`, floats, are replaced. l is summed from P
// before its rounding.
template <bool kOptions>
TA_DEVICE void general_scores(int32_t (&s)[64], const LaneBlock& lane, const BlockScales& scales, const ScoreOptions& options,
                              const BlockMask& mask, Scores& out, float (&sums)[2]) {
    constexpr float kFar = 1000.0f, kDropped = 8.66f;  // octaves; SAS's 6 are 8.656
    if (mask.masked) hide_scores(s, Seen(lane.rows, mask.key, mask.pass, lane.i));
    // The largest score is subtracted before V's part is added: beside a score of millions that part would be rounded away.
    float top[2], above[2] = {-kFar, -kFar};
    // [row][page]: from the block's largest score up to that of the range of pages so far, under SAS.
    float gap[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        float of_page[2] = {kNever, kNever};
#pragma unroll
        for (int n = 0; n < 64; ++n)
            if (n / 2 % 2 == row) of_page[n / 32] = fmaxf(of_page[n / 32], __int_as_float(s[n]));
        if (kOptions && options.sas) {
            const float tops[2] = {quad_max(of_page[0]), quad_max(of_page[1])};
            const float first = fmaxf(lane.info[row].natural, tops[0]), both = fmaxf(first, tops[1]);
            top[row] = fmaxf(tops[0], tops[1]);
            gap[row][0] = first - top[row], gap[row][1] = both - top[row];
            __syncwarp();                       // all have read what was there
            lane.rows[8 * row].natural = both;  // the quad's lanes write the same
        } else {
            top[row] = quad_max(fmaxf(of_page[0], of_page[1]));
        }
    }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const int e = e_of_word(n), first = j_of_word(n);
        const TokenScales token = scales.token[n][lane.i];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int row = m / 2, h = m % 2;
            float x = __int_as_float(s[4 * (first + h) + 2 * row + e]) - top[row];
            // A key that SAS drops has no part in P's unit, whatever its V.
            if (kOptions && x < gap[row][n / 8] - kDropped) x = -INFINITY;
            s[4 * (first + h) + 2 * row + e] = __float_as_int(x);
            above[row] = fmaxf(above[row], x + (token.v[h] - kTokenZero) * (1.0f / kGrid));
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        above[row] = quad_max(above[row]);
        out.m[row] = top[row] == kNever ? kNever : top[row] + above[row];
        out.offset[row][0] = out.offset[row][1] = twice(kLowestOne + 1023);
    }
    float l[2] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
        const int e = e_of_word(n), first = j_of_word(n);
        const TokenScales token = scales.token[n][lane.i];
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            uint32_t y[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float x = __int_as_float(s[4 * (first + h) + 2 * row + e]);
                if (kOptions && options.sas && x != -INFINITY) x = gap[row][n / 8] + log2_sas(gap[row][n / 8] - x);
                x -= above[row];
                l[row] += exp2_approx(x - 32.0f);
                const float steps = fmaf(x, float(kGrid), token.v[h] - kTokenZero) + kInteger;
                y[h] = __float_as_uint(fmaxf(steps, kInteger - 20000.0f));  // at most 0
            }
            out.y[row][n] = __byte_perm(y[0], y[1], 0x5410);
        }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sums[row] = l[row] * 255.0f;
}

}  // namespace ta::cuda::prefill::sm90
