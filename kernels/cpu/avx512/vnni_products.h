// Both products of a block of rows by vpdpbusd, see prefill_impl.h.
#pragma once

#include "kernels/cpu/avx512/prefill_impl.h"

namespace ta::cpu {
namespace {

// One pass of either product: sums of VECTORS times 16 rows with the 8 r of a row tile, over 8 `steps` units, as
// [r][vector][row]. `lanes` holds a vector for each unit, `unit_bytes` apart, and `dwords` as unpack.h has them. The highest
// of `planes` first. NOTES: what becomes of the sums is not done here, or GCC 12 wants more registers than there are and
// spills them at every unit.
template <int VECTORS, bool LANES_ARE_U8>
[[gnu::noinline]] void multiply_pass(const uint8_t* const* lanes, int unit_bytes, int planes, ptrdiff_t plane_bytes,
                                     const uint8_t* dwords, int steps, const int32_t* const* start, int32_t* out) {
    __m512i sum[VECTORS][kPass];
#pragma GCC unroll 3
    for (int v = 0; v < VECTORS; ++v) {
        const __m512i first = start ? load_i(start[v]) : _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int r = 0; r < kPass; ++r) sum[v][r] = first;
    }
    const uint8_t* vector[VECTORS];
    for (int plane = planes - 1;; --plane) {
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) vector[v] = lanes[v] + plane * plane_bytes;
        const uint8_t* dword = dwords;
        for (int step = 0; step < steps; ++step) {
            for (int u = 0; u < 8; ++u) {
                __m512i x[VECTORS];
#pragma GCC unroll 3
                for (int v = 0; v < VECTORS; ++v) {
                    x[v] = load_i(vector[v]);
                    vector[v] += unit_bytes;
                }
#pragma GCC unroll 8
                for (int r = 0; r < kPass; ++r) {
                    const __m512i y = broadcast_i32(dword + 64 * r);
#pragma GCC unroll 3
                    for (int v = 0; v < VECTORS; ++v) add_dot(sum[v][r], LANES_ARE_U8 ? x[v] : y, LANES_ARE_U8 ? y : x[v]);
                }
                dword += 8;
            }
            dword += kStepBytes - 64;
        }
        if (plane == 0) break;
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) {
#pragma GCC unroll 8
            for (int r = 0; r < kPass; ++r) sum[v][r] = _mm512_slli_epi32(sum[v][r], 8);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kPass; ++r) {
#pragma GCC unroll 3
        for (int v = 0; v < VECTORS; ++v) store_i(out + (r * VECTORS + v) * kLanes, sum[v][r]);
    }
}

struct VnniProducts {
    static void arrange(int, int, bool, Block&) {}

    // Scores of VECTORS times 16 rows with the 64 tokens of the page: 8 of one row tile and half (w) in a pass.
    template <int VECTORS>
    static void scores(int d, const uint8_t* const* q, const Lanes* lanes, Block& block) {
        const int32_t* start[VECTORS];
        for (int v = 0; v < VECTORS; ++v) start[v] = lanes[v].q_start;
        for (int pass = 0; pass < 2 * kPageTokens / 16; ++pass) {
            const uint8_t* key = block.k + pass / 2 * (d / 32) * kStepBytes + 4 * (pass % 2);
            multiply_pass<VECTORS, false>(q, 64, 1, 0, key, d / 32, start, block.scores + pass * kPass * VECTORS * kLanes);
        }
    }

    template <int VECTORS, int PLANES>
    static void values(int d, int stored, OOrder order, Block& block, float* o) {
        const uint8_t* p[VECTORS];
        for (int v = 0; v < VECTORS; ++v) p[v] = block.p[0] + 64 * v;
        const auto finish = finish_of<VECTORS, PLANES>(block);
        const int per_r = stored / 8;
        for (int pass = 0; pass < per_r; ++pass) {  // channels per_r r + pass
            const uint8_t* value = block.v + pass / 2 * 2 * kStepBytes + 4 * (pass % 2);
            const int held = (d - pass + per_r - 1) / per_r;  // 8, but for the padding of 2-bit codes at d = 96
            multiply_pass<VECTORS, true>(p, 64 * VECTORS, PLANES, sizeof block.p[0], value, 2, nullptr, block.sums[0]);
            finish(block.sums[0], block.update, held, block.v_fraction8 + pass, per_r, o + order.place(pass) * VECTORS * kLanes,
                   (order.natural ? per_r : 1) * VECTORS * kLanes);
        }
    }
};

}  // namespace
}  // namespace ta::cpu
