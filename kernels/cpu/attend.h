// The CPU attention kernels behind one function type. Each instruction set has its own folder; scalar/ is the reference. All of
// them follow the arithmetic below to the letter, so that they agree bit for bit, integers and floats.
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"
#include "kernels/format/tree.h"
#include "kernels/format/types.h"

namespace ta::cpu {

// One page of the kv head that the task works on.
struct PageRef {
    const uint8_t* piece;  // the head's piece, 128-byte aligned; nullptr: a page that is gone, whose keys nobody sees
    PageKind kind;         // a low page is a channel page here: a task's have all the same bits
};

// The new tokens of a token tree.
struct TreeKeys {
    const uint64_t* seen;   // [rows] the new tokens that a row sees, window included
    int64_t first;          // key of the first of them
    const TreeRow* tokens;  // [n_keys - first]
};

// Attention of some query rows of one kv head over pages [page_begin, page_end) of one sequence, into a partial result.
//
// K and V of a page have 8, 4 or 2 bits each; a token page has 8 for both. Per page, for each row, with j = 64 page + t:
//  1. Integer scores. K at 4 or 2 bits: S_t = sum_d q_d (8 step_d c_td + zero8_d), zero8 = 8 z + fraction. At 8:
//     S_t = sum_d q_d k_td, or with q_rest sum_d (128 q_d + q_rest_d) k_td. Exact in int32.
//  2. x_t = float(S_t) * c. 4 or 2 bits: c = fl(q_scale * fl(k_scale / 8)); 8: c_t = fl(q_scale * k_scale_t), with q_rest
//     a 128th of that.
//     q_float != null: x = fma(q_float[first], value of the first channel at t, x), then the second's, for each turning pair of
//     the page in its order (kernels/format/turning.h).
//     bias != null: x += bias[row]. softcap > 0: x = fl(softcap_log2 * tanh(fl(x * softcap_inv))) (tanh: math.h).
//     slope != null: x = fma(slope[row], float(j - position[row]), x); of a tree's token its position takes the place of j.
//     j outside [key_begin[row], key_end[row]), or a tree's token that the row does not see: x = -inf, by selection: unread slots
//     may hold anything.
//  3. m' = max(m, max_t x_t); a row with m' = -inf skips the page. alpha = exp2_exact(m - m'), 0 if m = -inf.
//     p_t = E(fl(m' - x_t)), E by `exp` (math.h); 0 where masked.
//  4. l = fma(l, alpha, sum p), where sum p adds lanes t, t+16, t+32, t+48 in that order, then lane k + lane k+8, +4, +2, +1.
//  5. w_t = fl(p_t * r_t). V at 4 or 2 bits: r_t = 2^-e_t, vfac = v_scale. At 8: r_t = fl(v_scale_t / vmax), vfac = vmax = the
//     largest v_scale_t with j < n_keys (r_t = 0 beyond; vmax = 0: r_t = 0).
//  6. a = p_running ? 1 : max_t w_t. If a < 2^-60 or vfac = 0: O_d = fl(O_d * alpha) and the page is done. Otherwise
//     P_t = min(RNE(fl(w_t * fl(p_levels / a))), p_levels), an integer of 8 or 16 bits, and
//     U_d = sum_t P_t (step_d c_td + z_d) (4, 2 bits) or sum_t P_t v_td (8), F_d = fraction8_d * sum_t P_t (0 at 8).
//     g = fl(fl(a / p_levels) * vfac); O_d = fma(fma(float(F_d), 0.125, float(U_d)), g, fl(O_d * alpha)).
// Half-INT8 (v_float != null): steps 5 and 6 become O_d = fl(O_d * alpha), then O_d = fma(p_t, v_td, O_d) for t = 0..63 with
// p_t > 0, in order.
struct AttendTask {
    int head_dim;
    int k_bits, v_bits;    // of channel pages
    const PageRef* pages;  // indexed by page number; those of [page_begin, page_end) are there
    int64_t page_begin, page_end;
    int64_t n_keys;  // slots from here on are never read as values

    int rows;                  // query rows, any number; row = query token * group + query head within the group
    const int8_t* q;           // [rows, head_dim] stage-1 codes, within +-127; 64-byte aligned
    const int8_t* q_rest;      // [rows, head_dim] what they leave, in 128ths, within +-64; 64-byte aligned, or nullptr
    const float* q_scale;      // [rows] stage-1 scale * softmax scale (* log2 e, unless softcap is on)
    const float* q_float;      // [rows, head_dim] the queries, not rotated, in the unit of scores; nullptr: no turning pairs
    const int64_t* key_begin;  // [rows] visible keys are [key_begin, key_end)
    const int64_t* key_end;    // [rows] at most n_keys
    const int64_t* position;   // [rows] for slope; may be nullptr without it
    const float* slope;        // [rows] ALiBi slope * log2 e, or nullptr
    const TreeKeys* tree;      // of pages that hold a tree's new tokens, else nullptr
    const float* bias;         // [rows] added to every score, in the unit of q_scale, or nullptr
    float softcap_log2;        // softcap * log2 e; 0: off
    float softcap_inv;         // 1 / softcap

    ExpMode exp;
    int p_levels;          // 255, 127, 119 (one byte) or 65535 (two bytes)
    bool p_running;        // P in units of the running maximum instead of the page's
    const float* v_float;  // [n_keys, head_dim] with stride v_float_stride, or nullptr: V from the pages
    int64_t v_float_stride;

    float* o;  // [rows, head_dim] accumulators, not yet divided by l; read and written; 64-byte aligned
    float* m;  // [rows] running maximum in log2 units, -inf at first
    float* l;  // [rows] running sum
    // [page_end - page_begin, 2, page_sums_rows] alpha of step 3 and the sum of P of step 4, or nullptr. What a page adds to l
    // in the end is its sum times the alphas of all later pages. Left alone where a row skips a page or sees nothing up to
    // there: the caller puts 1 and 0 there.
    float* page_sums;
    int page_sums_rows;  // at least `rows`
    uint8_t* workspace;  // workspace_bytes(head_dim, rows) bytes, 64-byte aligned, contents free
};

// Byte offsets of the parts of a piece: of a token page, or of a channel page with the task's bits.
struct PieceParts {
    int k_bits, v_bits;
    size_t k_codes, v_codes;
    size_t k_parameters, v_parameters;     // as ChannelLayout's: at 8 bits scales [64], else step [d], zero [d]
    size_t v_exponents, k_scale, v_scale;  // at 4 and 2 bits
};
[[gnu::always_inline]] inline PieceParts parts_of(const AttendTask& t, PageKind kind) {
    if (kind == PageKind::kToken) {
        const TokenLayout at(t.head_dim);
        return {8, 8, at.k_codes(), at.v_codes(), at.k_scale(), at.v_scale(), 0, 0, 0};
    }
    const ChannelLayout at(t.head_dim, t.k_bits, t.v_bits);
    return {t.k_bits,          t.v_bits,         at.k_codes(), at.v_codes(), at.k_parameters(),
            at.v_parameters(), at.v_exponents(), at.k_scale(), at.v_scale()};
}

// The sums of the page that begins with `first_key`.
[[gnu::always_inline]] inline float* page_sums_of(const AttendTask& t, int64_t first_key) {
    return t.page_sums + (first_key / kPageTokens - t.page_begin) * 2 * t.page_sums_rows;
}

// Keys that a row sees of the page that begins with `first_key`: [first, last) of its slots, empty if first >= last.
struct KeysInPage {
    int first, last;
};
[[gnu::always_inline]] inline KeysInPage keys_in_page(const AttendTask& t, int row, int64_t first_key) {
    const int64_t begin = t.key_begin[row] - first_key, end = t.key_end[row] - first_key;
    return {int(begin < 0             ? 0
                : begin > kPageTokens ? kPageTokens
                                      : begin),
            int(end < 0             ? 0
                : end > kPageTokens ? kPageTokens
                                    : end)};
}

// Bit j: slot j of the page that begins with `first_key` holds no tree's token, or one that the row sees.
[[gnu::always_inline]] inline uint64_t tree_slots(const TreeKeys& tree, int row, int64_t first_key) {
    const int64_t from = first_key - tree.first;
    const uint64_t seen = tree.seen[row];
    if (from >= kTreeTokens) return 0;
    return from >= 0 ? seen >> from : from <= -kPageTokens ? ~uint64_t{0} : seen << -from | ((uint64_t{1} << -from) - 1);
}

// The key's position for ALiBi.
inline int64_t key_position(const AttendTask& t, int64_t key) {
    return t.tree && key >= t.tree->first && key < t.n_keys ? t.tree->first + t.tree->tokens[key - t.tree->first].depth : key;
}

// Upper bound that every kernel keeps to.
constexpr size_t workspace_bytes(int head_dim, int rows) {
    const size_t r = size_t(rows + 15) / 16 * 16;
    return size_t(kPageTokens) * head_dim * 4 + r * (size_t(kPageTokens) * 8 + size_t(head_dim) * 8 + 256) + 65536;
}

// Joins a part of some rows, over later pages, to what came before. Per row, with m' = max(m, part_m):
// alpha = exp2_exact(m' - m); w = exp2_exact(m' - part_m); l = fma(w, part_l, fl(l * alpha)); O_d likewise.
// A part with part_m = -inf saw nothing: the row stays as it is. Where m = -inf the row becomes the part's.
struct JoinTask {
    int head_dim;
    int64_t rows;
    float* o;  // [rows, head_dim] and the others as in AttendTask; read and written
    float *m, *l;
    const float *part_o, *part_m, *part_l;
};

using AttendFn = void (*)(const AttendTask&);
using JoinFn = void (*)(const JoinTask&);

void attend_scalar(const AttendTask& task);
void attend_avx2(const AttendTask& task);
void attend_avxvnni(const AttendTask& task);
void attend_avx512(const AttendTask& task);
void attend_amx(const AttendTask& task);

void join_scalar(const JoinTask& task);
void join_avx2(const JoinTask& task);
void join_avx512(const JoinTask& task);

}  // namespace ta::cpu
