// Scores of a page to P: u8 in units of 1/255 of the largest P of its row within the page, P being 2^(score + log2 of V's scale),
// in fp32. A page's product with V is exact in int32 and is added to O, in fp32 in units of 2^m, m a reference of the row's that
// hardly ever changes.
//
//   plain_weights    K's tokens have one scale, nothing is masked: five to six instructions for a score
//   general_weights  all else
#pragma once

#include "kernels/cuda/common/scores.cuh"
#include "kernels/cuda/sm80/prefill/pages.cuh"

namespace ta::cuda::prefill::sm80 {

// Products begin with these: the bits of a sum of kScoreZero and an integer below 2^22 are the float of their sum, and those of
// kValueZero and one below 2^21 a denormal that is not negative.
inline constexpr int32_t kScoreZero = 0x4B400000, kValueZero = 1 << 21;
inline constexpr float kScoreZeroFloat = 12582912.0f;
inline constexpr float kLog2Levels = 7.99435344f;  // log2 255
inline constexpr float kCoarsest = 0x1p-8f;        // of octaves that a score's unit may be for plain_weights
inline constexpr float kRaise = 16.0f;             // a page so many octaves above the reference becomes the reference
inline constexpr float kMostZero = 32.0f;          // O is settled before what it holds of kValueZero is more than so many pages
inline constexpr float kBeyond = -60.0f;           // like the next, which costs precision; not for one so many octaves lower
inline constexpr float kSasCut = 6.0f * kLog2e;

// A lane's state between pages beside O, of rows g and g + 8 of 16. The sums are those of its columns.
struct LaneRows {
    struct {
        float l[2];  // of P, times 255 kSumUnit kOutUnit / 2^reference
    } sums;
    float reference[2];  // O is times 255 kOutUnit / 2^reference
    float zero[2];       // what O holds of kValueZero
};

// Weights of a page and 16 rows.
struct Weights {
    uint32_t p[2][4];  // operand A of the product with V: [step]
    float sum[2];      // of 255 P before its rounding and without V's scales, of the lane's columns
    float top[2];      // log2 of the unit of the weights, of which 255 are 1; without V's scale
};

TA_DEVICE uint32_t pack_bytes(const float (&e)[4]) {
    uint32_t t[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) t[n] = __float_as_uint(e[n] + kInteger);
    return __byte_perm(__byte_perm(t[0], t[1], 0x0040), __byte_perm(t[2], t[3], 0x0040), 0x5410);
}

// A score's unit is scale[row] octaves, no more than kCoarsest. `added`: to all scores of the row. least[row]: scores below have no
// weight (kSas). kTokens: V's tokens have scales of their own.
template <bool kTokens, bool kSas, bool kChannels, int D>
TA_DEVICE void plain_weights(int32_t (&s)[8][4], const float (&scale)[2], const float (&added)[2], RowInfo* info,
                             const PageSlot<D>& slot, uint32_t flags, int i, Weights& out) {
    float y[2], factor[2], shift[2], least[2];
    // Scores, less what a product begins with or still with it, and the largest of the lane's.
    if (kTokens) {
        float top[2] = {kNever, kNever};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float2 v = v_log2_of<kChannels>(slot, flags, j, i);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float x = fmaf(__int_as_float(s[j][n]), scale[n / 2], n % 2 ? v.y : v.x);
                s[j][n] = __float_as_int(x);
                top[n / 2] = fmaxf(top[n / 2], x);
            }
        }
        y[0] = top[0], y[1] = top[1];
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            y[r] = __int_as_float(s[0][2 * r]);
#pragma unroll
            for (int n = 1; n < 16; ++n) y[r] = fmaxf(y[r], __int_as_float(s[n / 2][2 * r + n % 2]));
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float top = quad_max(y[r]);
        factor[r] = kTokens ? 1.0f : scale[r];
        // Rounded once. So the value y of the largest score may differ a little from log2 255; P's unit corrects that.
        shift[r] = fmaf(-top, factor[r], kLog2Levels);
        const float largest = fmaf(top, factor[r], shift[r]) - kLog2Levels;
        const float natural = kTokens ? fmaf(-kScoreZeroFloat, scale[r], top) : (top - kScoreZeroFloat) * scale[r];
        out.top[r] = natural - largest + added[r];
        if (kSas) {
            const float before = info[8 * r].natural, so_far = fmaxf(before, natural + added[r]);
            least[r] = so_far - kSasCut - out.top[r] + kLog2Levels;
            y[r] = so_far;
        }
        out.sum[r] = 0.0f;
    }
    if (kSas) {
        __syncwarp();  // all have read what was there
        info[0].natural = y[0], info[8].natural = y[1];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float e[2][2][4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            float2 inverse{1.0f, 1.0f};
            if (kTokens) {
                const float2 v = v_log2_of<kChannels>(slot, flags, 4 * h + b, i);
                inverse = {ex2(-v.x), ex2(-v.y)};
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int r = n / 2, c = n % 2;
                const float at = fmaf(__int_as_float(s[4 * h + b][n]), factor[r], shift[r]);
                float w = ex2(at);
                if (kSas && !(at >= least[r])) w = 0.0f;
                out.sum[r] = kTokens ? fmaf(w, c ? inverse.y : inverse.x, out.sum[r]) : out.sum[r] + w;
                e[c][r][b] = w;
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) out.p[n / 2][2 * h + n % 2] = pack_bytes(e[n / 2][n % 2]);
    }
}

// Adds a page's turning pairs to scores x [8][4] of rows `row_in_tile` and 8 more. A call, on memory: rare.
template <int D>
__device__ __noinline__ void add_turning(const AttendArgs& args, const Tile& tile, int row_in_tile, const PageSlot<D>& slot,
                                         int i, float (*x)[4]) {
    const float unit = args.softcap > 0.0f ? args.scale : args.scale * kLog2e;
    const void* q[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowPlace at(args, tile, row_in_tile + 8 * r);
        const auto* data = static_cast<const uint8_t*>(args.q.data);
        q[r] = at.token < tile.rows.n_query ? data + at.offset(args.q, tile) * int64_t(dtype_bytes(args.q.dtype)) : nullptr;
    }
    const bool in_scales = slot.info.flags & PageInfo::kKBytes;
#pragma unroll 1
    for (int m = 0; m < kTurningPairs; ++m) {
        const uint64_t code = in_scales ? turning_of_scales(reinterpret_cast<const uint8_t*>(slot.k_scale), m)
                                        : turning_of_pairs(slot.tail.turning, m);
        if (code == 0) continue;
        const TurningPair pair = unpack_turning(code);
        float first[2], second[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            first[r] = query_value(args.q, q[r], pair.first, unit, args.saturate);
            second[r] = query_value(args.q, q[r], pair.second, unit, args.saturate);
        }
#pragma unroll 4
        for (int n = 0; n < 16; ++n) {
            const TurningValues at = turning_values_fast(pair, score_token(n / 2, i, n % 2));
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                float& to = x[n / 2][2 * r + n % 2];
                to = fmaf(second[r], at.second, fmaf(first[r], at.first, to));
            }
        }
    }
}

// The place of a page's keys, and its flags.
struct PageKeys {
    int key;         // the first, among those of the sequence's pages
    int place;       // of the first in the sequence
    uint32_t flags;  // of PageInfo
};

// The rows of a lane in 16 of a tile: row_in_tile and 8 more.
struct LaneTile {
    int row_in_tile;
    RowInfo* info;  // the first row's
    int i;          // of the lane's columns
};

// Scores from products: K's scales and fractions, the latter in units of a score.
template <bool kChannels, int D>
TA_DEVICE void scale_scores(const int32_t (&s)[8][4], const RowInfo (&rows)[2], const float (&fraction)[2],
                            const PageSlot<D>& slot, uint32_t flags, int i, float (&x)[8][4]) {
    const float page_scale = slot.info.k_scale;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 k{page_scale, page_scale};
        if (flags & PageInfo::kKTokens) k = *reinterpret_cast<const float2*>(slot.k_scale + 8 * j + 2 * i);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            float score = __int_as_float(s[j][n]) - kScoreZeroFloat;
            if (kChannels) score += fraction[n / 2];
            x[j][n] = score * (rows[n / 2].scale * (n % 2 ? k.y : k.x));
        }
    }
}

// Softcap, ALiBi and masks. `top`: the largest score of the lane's columns.
template <bool kOptions>
TA_DEVICE void apply_options(const AttendArgs& args, const RowInfo (&rows)[2], const PageKeys& at, int i, float (&x)[8][4],
                             float (&top)[2]) {
    top[0] = top[1] = kNever;
    const int first[2] = {rows[0].key_begin - at.key, rows[1].key_begin - at.key};
    const int stop[2] = {rows[0].key_end - at.key, rows[1].key_end - at.key};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int r = n / 2, token = score_token(j, i, n % 2);
            if (kOptions && args.softcap > 0.0f) x[j][n] = soft_capped(x[j][n] + rows[r].bias, args.softcap);
            if (kOptions && args.alibi_slope)
                x[j][n] = fmaf(rows[r].slope, float(at.place + token - rows[r].position), x[j][n]);
            if (token < first[r] || token >= stop[r]) x[j][n] = -INFINITY;
            top[r] = fmaxf(top[r], x[j][n]);
        }
    }
}

// P of scores x, which have V's scales in them, and its sums without these. The largest of x + shift is log2 255.
template <bool kChannels, int D>
TA_DEVICE void pack_weights(const float (&x)[8][4], const float (&shift)[2], const PageSlot<D>& slot, uint32_t flags, int i,
                            Weights& out) {
    out.sum[0] = out.sum[1] = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float e[2][2][4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
            float2 inverse{1.0f, 1.0f};
            if (flags & PageInfo::kVTokens) {
                const float2 v = v_log2_of<kChannels>(slot, flags, 4 * h + b, i);
                inverse = {ex2(-v.x), ex2(-v.y)};
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int r = n / 2, c = n % 2;
                const float w = ex2(x[4 * h + b][n] + shift[r]);
                out.sum[r] = fmaf(w, c ? inverse.y : inverse.x, out.sum[r]);
                e[c][r][b] = w;
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) out.p[n / 2][2 * h + n % 2] = pack_bytes(e[n / 2][n % 2]);
    }
}

// Every mask, scale and option. `fraction`: K's, in units of a score. kOptions: there may be softcap, ALiBi or SAS.
template <bool kOptions, bool kChannels, int D>
TA_DEVICE void general_weights(int32_t (&s)[8][4], const AttendArgs& args, const Tile& tile, const LaneTile& lane,
                               const float (&fraction)[2], const PageSlot<D>& slot, const PageKeys& at, Weights& out) {
    constexpr float kLeast = -1000.0f;  // octaves: no weight
    const uint32_t flags = at.flags;
    const int i = lane.i;
    const RowInfo rows[2] = {lane.info[0], lane.info[8]};
    float x[8][4];
    scale_scores<kChannels>(s, rows, fraction, slot, flags, i, x);
    if (flags & PageInfo::kTurning) {
        float copy[8][4];
#pragma unroll
        for (int n = 0; n < 32; ++n) copy[n / 4][n % 4] = x[n / 4][n % 4];
        add_turning(args, tile, lane.row_in_tile, slot, i, copy);
#pragma unroll
        for (int n = 0; n < 32; ++n) x[n / 4][n % 4] = copy[n / 4][n % 4];
    }
    float top[2];
    apply_options<kOptions>(args, rows, at, i, x, top);
    float least[2] = {-INFINITY, -INFINITY};
    const bool sas = kOptions && args.exp == ExpMode::kSas;
#pragma unroll
    for (int r = 0; r < 2; ++r) top[r] = quad_max(top[r]);
    if (sas) {
        float so_far[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) so_far[r] = fmaxf(rows[r].natural, top[r]), least[r] = so_far[r] - top[r] - kSasCut;
        __syncwarp();  // all have read what was there
        lane.info[0].natural = so_far[0], lane.info[8].natural = so_far[1];
    }
    // The largest score is subtracted before V's part is added: beside a score of millions that part would be rounded away.
    float above[2] = {kLeast, kLeast};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float2 v{0.0f, 0.0f};
        if (flags & PageInfo::kVTokens) v = v_log2_of<kChannels>(slot, flags, j, i);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const int r = n / 2;
            float y = x[j][n] - top[r];
            if (sas && !(y >= least[r])) y = -INFINITY;  // what SAS drops has no part in P's unit, whatever its V
            x[j][n] = y + (n % 2 ? v.y : v.x);
            above[r] = fmaxf(above[r], x[j][n]);
        }
    }
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        above[r] = quad_max(above[r]);
        shift[r] = kLog2Levels - above[r];
        out.top[r] = top[r] == kNever || above[r] == kLeast ? kNever : top[r] + above[r];
    }
    pack_weights<kChannels>(x, shift, slot, flags, i, out);
}

// The sum of P of a lane's columns in eighths to base 16, as bytes: the low digit for the byte f of V's fractions, the rest for
// the byte 16 f. The product with them adds up the quad's.
TA_DEVICE uint32_t digits_of_sum(const uint32_t (&p)[2][4], int r) {
    uint32_t sum = 4;
#pragma unroll
    for (int n = 0; n < 4; ++n) sum = __dp4a(p[n / 2][2 * (n % 2) + r], 0x01010101u, sum);
    const uint32_t eighths = sum >> 3;
    return (eighths & 15) | (eighths >> 4) << 8;
}

// Takes kValueZero out of O, and makes m[r] the reference of a row where it is far above that.
template <int N>
TA_DEVICE void settle(LaneRows& rows, const float (&m)[2], float (&o)[N]) {
    float factor[2], off[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float before = rows.reference[r], reference = m[r] > before + kRaise ? m[r] : before;
        factor[r] = ex2(before - reference);
        off[r] = -rows.zero[r] * factor[r];
        rows.sums.l[r] *= factor[r];
        rows.zero[r] = 0.0f;
        rows.reference[r] = reference;
    }
#pragma unroll
    for (int n = 0; n < N; ++n) o[n] = fmaf(o[n], factor[n / 2 % 2], off[n / 2 % 2]);
}

TA_DEVICE void add_term(int32_t product, float factor, float& o) {
    asm("fma.rn.f32 %0, %1, %2, %0;" : "+f"(o) : "f"(__int_as_float(product)), "f"(factor));
}

}  // namespace ta::cuda::prefill::sm80
