// The scalar reference: plain loops over the stored bytes, one code at a time. Slow on purpose; every other kernel is judged
// by it (tests/kernels/cpu/attend_test.cpp).
#include "kernels/cpu/attend.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/join.h"
#include "kernels/cpu/math.h"
#include "kernels/cpu/turning_terms.h"

namespace ta::cpu {
namespace {

float load_f32(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// One head's page with every value as an integer: K and V codes times step plus zero, and the fractions apart.
struct PageValues {
    int32_t* k8;  // [64, head_dim] in the task's workspace: in eighths on a channel page, in units on a token page
    int32_t* v;   // [64, head_dim] behind it
    int32_t v_fraction8[kMaxHeadDim];
    float k_scale[kPageTokens];  // what multiplies k8, per token
    float v_ratio[kPageTokens];
    float v_scale;
    PageTurning turning;
};

int code_at(const uint8_t* codes, CodePlace place, int bits) {
    return codes[place.byte] >> place.shift & ((1 << bits) - 1);
}

void read_channel_page(const AttendTask& t, const uint8_t* piece, PageValues& out) {
    const ChannelLayout layout(t.head_dim, t.k_bits, t.v_bits);
    for (int c = 0; c < t.head_dim; ++c) {
        const uint8_t k_byte = piece[layout.k_step() + c], v_byte = piece[layout.v_step() + c];
        const int k_zero8 = 8 * int8_t(piece[layout.k_zero() + c]) + fraction_eighths_of(k_byte, t.k_bits);
        out.v_fraction8[c] = fraction_eighths_of(v_byte, t.v_bits);
        for (int j = 0; j < kPageTokens; ++j) {
            const int k = code_at(piece + layout.k_codes(), k_place(t.head_dim, t.k_bits, j, c), t.k_bits);
            const int v = code_at(piece + layout.v_codes(), v_place(t.head_dim, t.v_bits, j, c), t.v_bits);
            out.k8[j * t.head_dim + c] = 8 * step_of(k_byte, t.k_bits) * k + k_zero8;
            out.v[j * t.head_dim + c] = step_of(v_byte, t.v_bits) * v + int8_t(piece[layout.v_zero() + c]);
        }
    }
    for (int j = 0; j < kPageTokens; ++j) {
        const int exponent = piece[layout.v_exponents() + j / 2] >> (j % 2 * 4) & 15;
        out.k_scale[j] = load_f32(piece + layout.k_scale()) * 0.125f;
        out.v_ratio[j] = 1.0f / float(1 << exponent);
    }
    out.v_scale = load_f32(piece + layout.v_scale());
}

void read_token_page(const AttendTask& t, const uint8_t* piece, int64_t valid, PageValues& out) {
    const TokenLayout layout(t.head_dim);
    float v_max = 0.0f;
    for (int j = 0; j < kPageTokens; ++j) {
        for (int c = 0; c < t.head_dim; ++c) {
            out.k8[j * t.head_dim + c] = int8_t(piece[layout.k_codes() + k_place(t.head_dim, 8, j, c).byte]);
            out.v[j * t.head_dim + c] = int8_t(piece[layout.v_codes() + v_place(t.head_dim, 8, j, c).byte]);
        }
        out.k_scale[j] = load_f32(piece + layout.k_scale() + j * sizeof(float));
        out.v_ratio[j] = j < valid ? load_f32(piece + layout.v_scale() + j * sizeof(float)) : 0.0f;
        v_max = std::max(v_max, out.v_ratio[j]);
    }
    for (int j = 0; j < kPageTokens; ++j) out.v_ratio[j] = v_max > 0.0f ? out.v_ratio[j] / v_max : 0.0f;
    std::fill_n(out.v_fraction8, t.head_dim, 0);
    out.v_scale = v_max;
}

// Step 2 of attend.h: the logits of one row in log2 units, -inf where the row does not see the key.
void logits_of_row(const AttendTask& t, int row, int64_t first_key, const PageValues& page, float x[kPageTokens]) {
    const int8_t* q = t.q + int64_t(row) * t.head_dim;
    for (int j = 0; j < kPageTokens; ++j) {
        const int64_t key = first_key + j;
        if (key < t.key_begin[row] || key >= t.key_end[row]) {
            x[j] = kMinusInf;
            continue;
        }
        int32_t s = 0;
        for (int c = 0; c < t.head_dim; ++c) s += int32_t(q[c]) * page.k8[j * t.head_dim + c];
        x[j] = float(s) * (t.q_scale[row] * page.k_scale[j]);
        for (int n = 0; n < page.turning.pairs; ++n) {
            for (int of = 0; of < 2; ++of) {
                x[j] = std::fma(t.q_float[int64_t(row) * t.head_dim + page.turning.channel[n][of]],
                                page.turning.value[n][of][j], x[j]);
            }
        }
        if (t.bias) x[j] = x[j] + t.bias[row];
        if (t.softcap_log2 > 0.0f) x[j] = t.softcap_log2 * tanh_exact(x[j] * t.softcap_inv);
        if (t.slope) x[j] = std::fma(t.slope[row], float(key - t.position[row]), x[j]);
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
        of_page[t.rows + row] = sum;
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
        if (t.pages[n].kind == PageKind::kChannel) {
            read_channel_page(t, t.pages[n].piece, page);
        } else {
            read_token_page(t, t.pages[n].piece, t.n_keys - first_key, page);
        }
        read_turning(t, t.pages[n], page.turning);
        for (int row = 0; row < t.rows; ++row) attend_row(t, row, first_key, page);
    }
}

void join_scalar(const JoinTask& task) {
    join_rows(task);
}

}  // namespace ta::cpu
