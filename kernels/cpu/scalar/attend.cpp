// The scalar reference: plain loops over the stored bytes, one code at a time. Slow on purpose; every other kernel is judged
// by it (tests/kernels/cpu/attend_test.cpp).
#include "kernels/cpu/attend.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/join.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/turning_terms.h"
#include "kernels/format/query_rest.h"

namespace ta::cpu {
namespace {

float load_f32(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// One head's page with every value as an integer: K and V codes times step plus zero, and the fractions apart.
struct PageValues {
    int32_t* k8;  // [64, head_dim] in the task's workspace: in eighths at 4 and 2 bits, in units at 8
    int32_t* v;   // [64, head_dim] behind it
    int32_t v_fraction8[kMaxHeadDim];
    bool k_bytes;
    float k_scale[kPageTokens];  // what multiplies k8, per token
    float v_ratio[kPageTokens];
    float v_scale;
    PageTurning turning;
};

int code_at(const uint8_t* codes, CodePlace place, int bits) {
    return codes[place.byte] >> place.shift & ((1 << bits) - 1);
}

void read_k(const AttendTask& t, const uint8_t* piece, const PieceParts& at, PageValues& out) {
    const int d = t.head_dim, bits = at.k_bits;
    out.k_bytes = bits == 8;
    for (int c = 0; c < d; ++c) {
        for (int j = 0; j < kPageTokens; ++j) {
            const CodePlace place = k_place(d, bits, j, c);
            int32_t& k = out.k8[j * d + c];
            if (bits == 8) {
                k = int8_t(piece[at.k_codes + place.byte]);
                continue;
            }
            const uint8_t step = piece[at.k_parameters + c], zero = piece[at.k_parameters + d + c];
            k = 8 * step_of(step, bits) * code_at(piece + at.k_codes, place, bits) + 8 * int8_t(zero) +
                fraction_eighths_of(step, bits);
        }
    }
    for (int j = 0; j < kPageTokens; ++j)
        out.k_scale[j] =
            bits == 8 ? load_f32(piece + at.k_parameters + j * sizeof(float)) : load_f32(piece + at.k_scale) * 0.125f;
}

// `valid`: slots that hold tokens.
void read_v(const AttendTask& t, const uint8_t* piece, const PieceParts& at, int64_t valid, PageValues& out) {
    const int d = t.head_dim, bits = at.v_bits;
    for (int c = 0; c < d; ++c) {
        const uint8_t step = bits == 8 ? 0 : piece[at.v_parameters + c], zero = bits == 8 ? 0 : piece[at.v_parameters + d + c];
        out.v_fraction8[c] = bits == 8 ? 0 : fraction_eighths_of(step, bits);
        for (int j = 0; j < kPageTokens; ++j) {
            const CodePlace place = v_place(d, bits, j, c);
            out.v[j * d + c] = bits == 8 ? int8_t(piece[at.v_codes + place.byte])
                                         : step_of(step, bits) * code_at(piece + at.v_codes, place, bits) + int8_t(zero);
        }
    }
    if (bits != 8) {
        for (int j = 0; j < kPageTokens; ++j)
            out.v_ratio[j] = 1.0f / float(1 << (piece[at.v_exponents + j / 2] >> (j % 2 * 4) & 15));
        out.v_scale = load_f32(piece + at.v_scale);
        return;
    }
    out.v_scale = 0.0f;
    for (int j = 0; j < kPageTokens; ++j) {
        out.v_ratio[j] = j < valid ? load_f32(piece + at.v_parameters + j * sizeof(float)) : 0.0f;
        out.v_scale = std::max(out.v_scale, out.v_ratio[j]);
    }
    for (float& ratio : out.v_ratio) ratio = out.v_scale > 0.0f ? ratio / out.v_scale : 0.0f;
}

// Step 2 of attend.h: the logits of one row in log2 units, -inf where the row does not see the key.
void logits_of_row(const AttendTask& t, int row, int64_t first_key, const PageValues& page, float x[kPageTokens]) {
    const int8_t* q = t.q + int64_t(row) * t.head_dim;
    for (int j = 0; j < kPageTokens; ++j) {
        const int64_t key = first_key + j;
        const bool in_tree = !t.tree || (tree_slots(*t.tree, row, first_key) >> j & 1);
        if (key < t.key_begin[row] || key >= t.key_end[row] || !in_tree) {
            x[j] = kMinusInf;
            continue;
        }
        const bool rest = page.k_bytes && t.q_rest;
        int32_t s = 0;
        for (int c = 0; c < t.head_dim; ++c) {
            const int32_t code = rest ? kRestUnits * q[c] + t.q_rest[int64_t(row) * t.head_dim + c] : q[c];
            s += code * page.k8[j * t.head_dim + c];
        }
        const float c = t.q_scale[row] * page.k_scale[j];
        x[j] = float(s) * (rest ? c / float(kRestUnits) : c);
        for (int n = 0; n < page.turning.pairs; ++n) {
            for (int of = 0; of < 2; ++of) {
                x[j] = std::fma(t.q_float[int64_t(row) * t.head_dim + page.turning.channel[n][of]],
                                page.turning.value[n][of][j], x[j]);
            }
        }
        if (t.bias) x[j] = x[j] + t.bias[row];
        if (t.softcap_log2 > 0.0f) x[j] = t.softcap_log2 * tanh_exact(x[j] * t.softcap_inv);
        if (t.slope) x[j] = std::fma(t.slope[row], float(key_position(t, key) - t.position[row]), x[j]);
    }
}

float sum_in_lanes(const float p[kPageTokens]) {
    float lane[16];
    for (int k = 0; k < 16; ++k) lane[k] = ((p[k] + p[k + 16]) + p[k + 32]) + p[k + 48];
    for (int half = 8; half >= 1; half /= 2) {
        for (int k = 0; k < half; ++k) lane[k] = lane[k] + lane[k + half];
    }
    return lane[0];
}

// Step 6: P as integers times the integers of V.
void accumulate_codes(const AttendTask& t, const PageValues& page, const float p[kPageTokens], float alpha, float* o) {
    float w[kPageTokens], a = 0.0f;
    for (int j = 0; j < kPageTokens; ++j) {
        w[j] = p[j] * page.v_ratio[j];
        a = std::max(a, w[j]);
    }
    if (t.p_running) a = 1.0f;
    if (a < 0x1p-60f || page.v_scale == 0.0f) {
        for (int c = 0; c < t.head_dim; ++c) o[c] = o[c] * alpha;
        return;
    }
    const float levels = float(t.p_levels), to_code = levels / a, g = (a / levels) * page.v_scale;
    int32_t code[kPageTokens], code_sum = 0;
    for (int j = 0; j < kPageTokens; ++j) {
        code[j] = std::min(int32_t(std::nearbyint(w[j] * to_code)), t.p_levels);
        code_sum += code[j];
    }
    for (int c = 0; c < t.head_dim; ++c) {
        int32_t u = 0;
        for (int j = 0; j < kPageTokens; ++j) u += code[j] * page.v[j * t.head_dim + c];
        const int32_t f = page.v_fraction8[c] * code_sum;
        o[c] = std::fma(std::fma(float(f), 0.125f, float(u)), g, o[c] * alpha);
    }
}

void accumulate_floats(const AttendTask& t, int64_t first_key, const float p[kPageTokens], float alpha, float* o) {
    for (int c = 0; c < t.head_dim; ++c) o[c] = o[c] * alpha;
    for (int j = 0; j < kPageTokens; ++j) {
        if (p[j] <= 0.0f) continue;
        const float* v = t.v_float + (first_key + j) * t.v_float_stride;
        for (int c = 0; c < t.head_dim; ++c) o[c] = std::fma(p[j], v[c], o[c]);
    }
}

void attend_row(const AttendTask& t, int row, int64_t first_key, const PageValues& page) {
    float x[kPageTokens], p[kPageTokens];
    logits_of_row(t, row, first_key, page, x);
    float m_new = t.m[row];
    for (float v : x) m_new = std::max(m_new, v);
    if (m_new == kMinusInf) return;
    const float alpha = t.m[row] == kMinusInf ? 0.0f : exp2_neg_exact(m_new - t.m[row]);
    for (int j = 0; j < kPageTokens; ++j) p[j] = x[j] == kMinusInf ? 0.0f : exp2_neg(m_new - x[j], t.exp);
    t.m[row] = m_new;
    const float sum = sum_in_lanes(p);
    t.l[row] = std::fma(t.l[row], alpha, sum);
    if (t.page_sums) {
        float* of_page = page_sums_of(t, first_key);
        of_page[row] = alpha;
        of_page[t.page_sums_rows + row] = sum;
    }
    float* o = t.o + int64_t(row) * t.head_dim;
    if (t.v_float) {
        accumulate_floats(t, first_key, p, alpha, o);
    } else {
        accumulate_codes(t, page, p, alpha, o);
    }
}

}  // namespace

void attend_scalar(const AttendTask& t) {
    PageValues page;
    page.k8 = reinterpret_cast<int32_t*>(t.workspace);
    page.v = page.k8 + kPageTokens * t.head_dim;
    for (int64_t n = t.page_begin; n < t.page_end; ++n) {
        const int64_t first_key = n * kPageTokens;
        if (!t.pages[n].piece) continue;
        const PieceParts at = parts_of(t, t.pages[n].kind);
        read_k(t, t.pages[n].piece, at, page);
        read_v(t, t.pages[n].piece, at, t.n_keys - first_key, page);
        read_turning(t, t.pages[n], page.turning);
        for (int row = 0; row < t.rows; ++row) attend_row(t, row, first_key, page);
    }
}

void join_scalar(const JoinTask& task) {
    join_rows(task);
}

}  // namespace ta::cpu
