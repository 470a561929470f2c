// The code of distr.h, included by one source file per instruction set. Loops over keys, channels and partial sums are what a
// compiler vectorises; no sum changes its order for it.
#pragma once

#include <cstring>

#include "kernels/cpu/distr.h"
#include "kernels/cpu/math.h"
#include "kernels/format/visible.h"

namespace ta::cpu {
namespace {

constexpr int kSums = 16;  // partial sums of P, by key % 16

int place_in_tile(int64_t key) {
    return key < 0 ? 0 : key > kDistrKeys ? kDistrKeys : int(key);
}

void sort_channels(const DistrBlock& b) {
    float sums[kDistrProjections][kMaxDistrHeadDim] = {};
    for (int r = 0; r < b.rows; ++r) {
        const float* q = b.q + r * b.d;
        for (int n = 0; n < kDistrProjections; ++n) {
            const float sign = kDistrSigns.of_row[r] >> n & 1 ? -1.0f : 1.0f;
            for (int c = 0; c < b.d; ++c) sums[n][c] += sign * q[c];
        }
    }
    uint32_t keys[kMaxDistrHeadDim];
    for (int c = 0; c < b.d; ++c) {
        uint32_t code = 0;
        for (int n = 0; n < kDistrProjections; ++n) code |= uint32_t(sums[n][c] > 0.0f) << n;
        keys[c] = distr_key(code, c);
    }
    for (int c = 0; c < b.d; ++c) {
        int rank = 0;
        for (int other = 0; other < b.d; ++other) rank += keys[other] < keys[c];
        b.order[rank] = uint8_t(c);
    }
}

void start_block(const DistrBlock& b) {
    sort_channels(b);
    const int groups = distr_groups(b.d, b.group_size);
    for (int r = 0; r < b.rows; ++r) {
        for (int g = 0; g < groups; ++g) {
            const int first = g * b.group_size, size = b.d - first < b.group_size ? b.d - first : b.group_size;
            b.sampled[r * groups + g] = b.q[r * b.d + b.order[first + distr_sampled(size)]];
        }
        b.m[r] = kMinusInf;
        b.l[r] = 0.0f;
    }
    std::memset(b.o, 0, sizeof(float) * size_t(b.rows) * size_t(b.d));
}

void fuse_keys(const DistrBlock& b, const DistrTile& tile) {
    const int groups = distr_groups(b.d, b.group_size);
    for (int g = 0; g < groups; ++g) {
        const int first = g * b.group_size, last = first + b.group_size < b.d ? first + b.group_size : b.d;
        float* to = tile.fused + g * kDistrKeys;
        std::memcpy(to, tile.k + b.order[first] * kDistrKeys, sizeof(float) * kDistrKeys);
        for (int n = first + 1; n < last; ++n) {
            const float* from = tile.k + b.order[n] * kDistrKeys;
            for (int j = 0; j < kDistrKeys; ++j) to[j] += from[j];
        }
    }
}

template <ExpMode kExp>
void weigh(const float* s, float top, float* p) {
    for (int j = 0; j < kDistrKeys; ++j) {
        const float u = top - s[j];
        p[j] = kExp == ExpMode::kExact ? exp2_neg_exact(u) : kExp == ExpMode::kSas ? exp2_neg_sas(u) : exp2_neg_poly(u);
    }
}

void attend_tile(const DistrBlock& b, const DistrRules& rules, const DistrTile& tile) {
    const int groups = distr_groups(b.d, b.group_size), d = b.d;
    fuse_keys(b, tile);
    alignas(64) float s[kDistrKeys], p[kDistrKeys];
    for (int r = 0; r < b.rows; ++r) {
        const int64_t position = rules.first_position + r;
        const auto seen = visible_keys<int64_t>(rules.causal, rules.window, rules.n_keys, position);
        const int begin = place_in_tile(seen.begin - tile.first), end = place_in_tile(seen.end - tile.first);
        if (begin >= end) continue;
        for (int j = 0; j < kDistrKeys; ++j) s[j] = 0.0f;
        const float* q = b.sampled + r * groups;
        for (int g = 0; g < groups; ++g) {
            const float* k = tile.fused + g * kDistrKeys;
            const float x = q[g];
            for (int j = 0; j < kDistrKeys; ++j) s[j] = __builtin_fmaf(x, k[j], s[j]);
        }
        for (int j = 0; j < kDistrKeys; ++j) s[j] *= rules.scale;
        if (rules.softcap > 0.0f) {
            for (int j = 0; j < kDistrKeys; ++j) s[j] = rules.softcap * tanh_exact(s[j] / rules.softcap) * kLog2e;
        }
        if (rules.slope_log2 != 0.0f) {
            for (int j = 0; j < kDistrKeys; ++j) {
                s[j] = __builtin_fmaf(rules.slope_log2, float(tile.first + j - position), s[j]);
            }
        }
        float top = b.m[r];
        for (int j = 0; j < kDistrKeys; ++j) {
            s[j] = j >= begin && j < end ? s[j] : kMinusInf;
            top = s[j] > top ? s[j] : top;
        }
        switch (rules.exp) {
            case ExpMode::kExact:
                weigh<ExpMode::kExact>(s, top, p);
                break;
            case ExpMode::kSas:
                weigh<ExpMode::kSas>(s, top, p);
                break;
            default:
                weigh<ExpMode::kPoly>(s, top, p);
        }
        float sums[kSums];
        for (int n = 0; n < kSums; ++n) sums[n] = p[n];
        for (int j = kSums; j < kDistrKeys; j += kSums) {
            for (int n = 0; n < kSums; ++n) sums[n] += p[j + n];
        }
        for (int n = kSums / 2; n > 0; n /= 2) {
            for (int i = 0; i < n; ++i) sums[i] += sums[i + n];
        }
        const float weight = exp2_neg_exact(top - b.m[r]);
        b.m[r] = top;
        b.l[r] = b.l[r] * weight + sums[0];
        float* o = b.o + r * d;
        for (int c = 0; c < d; ++c) o[c] *= weight;
        for (int j = begin; j < end; ++j) {
            const float w = p[j];
            const float* v = tile.v + j * d;
            for (int c = 0; c < d; ++c) o[c] = __builtin_fmaf(w, v[c], o[c]);
        }
    }
}

constexpr DistrKernel kDistrKernel{start_block, attend_tile};

}  // namespace
}  // namespace ta::cpu
