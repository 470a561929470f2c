#include "bench/float_attention.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

namespace ta::bench {
namespace {

constexpr int kKeys = 64;      // keys of a tile: four vectors
constexpr int kScoreRows = 6;  // x 4 vectors = 24 accumulators
constexpr int kValueRows = 3;  // x 8 vectors = 24 accumulators
constexpr int kRows = 192;     // rows of a task: their scores stay in the L2 cache

struct alignas(64) Tile {
    float rows[kKeys * 256];   // [kKeys, head_dim], rows a power of two apart in memory would fall on one another in the cache
    float k[256 * kKeys];      // [head_dim, kKeys]
    float v[kKeys * 256];      // [kKeys, head_dim]
    float p[kRows * kKeys];    // [rows, kKeys]
    float q[kRows * 256];      // [rows, head_dim], scaled to log2 units
    float o[kRows * 256];
    float m[kRows], l[kRows];
};

// 2^-u for u >= 0; the cubic of the library's default exponential.
__m512 exp2_neg(__m512 u) {
    const __m512 n = _mm512_roundscale_ps(u, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(u, n);
    __m512 r = _mm512_fmadd_ps(_mm512_set1_ps(-0.039135387f), f, _mm512_set1_ps(0.230557799f));
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(-0.691422412f));
    r = _mm512_fmadd_ps(r, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(r, _mm512_sub_ps(_mm512_setzero_ps(), n));
}

template <int ROWS>
void scores(const Tile& t, int d, int row, float* p) {
    __m512 acc[ROWS][4];
    for (auto& a : acc) a[0] = a[1] = a[2] = a[3] = _mm512_setzero_ps();
    const float* q = t.q + row * d;
    for (int c = 0; c < d; ++c) {
        const __m512 k0 = _mm512_load_ps(t.k + c * kKeys), k1 = _mm512_load_ps(t.k + c * kKeys + 16),
                     k2 = _mm512_load_ps(t.k + c * kKeys + 32), k3 = _mm512_load_ps(t.k + c * kKeys + 48);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512 x = _mm512_set1_ps(q[r * d + c]);
            acc[r][0] = _mm512_fmadd_ps(x, k0, acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(x, k1, acc[r][1]);
            acc[r][2] = _mm512_fmadd_ps(x, k2, acc[r][2]);
            acc[r][3] = _mm512_fmadd_ps(x, k3, acc[r][3]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        for (int i = 0; i < 4; ++i) _mm512_store_ps(p + r * kKeys + 16 * i, acc[r][i]);
    }
}

// Scores -> probabilities relative to the running maximum; rescales O.
void softmax_row(Tile& t, int d, int row, int visible) {
    float* p = t.p + row * kKeys;
    __m512 x[4];
    for (int i = 0; i < 4; ++i) {
        const int left = std::clamp(visible - 16 * i, 0, 16);
        x[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), __mmask16((1u << left) - 1), p + 16 * i);
    }
    const __m512 top = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
    const float m = std::max(t.m[row], _mm512_reduce_max_ps(top));
    const float alpha = std::exp2(t.m[row] - m);
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        const __m512 e = exp2_neg(_mm512_sub_ps(_mm512_set1_ps(m), x[i]));
        sum = _mm512_add_ps(sum, e);
        _mm512_store_ps(p + 16 * i, e);
    }
    t.l[row] = t.l[row] * alpha + _mm512_reduce_add_ps(sum);
    if (alpha != 1.0f) {
        float* o = t.o + row * d;
        for (int c = 0; c < d; c += 16) _mm512_store_ps(o + c, _mm512_mul_ps(_mm512_load_ps(o + c), _mm512_set1_ps(alpha)));
    }
    t.m[row] = m;
}

template <int ROWS>
void values(Tile& t, int d, int row, int keys, int first_channel) {
    constexpr int kVectors = 8;
    __m512 acc[ROWS][kVectors];
    float* o = t.o + row * d + first_channel;
    const int vectors = std::min(kVectors, (d - first_channel) / 16);
    if (vectors < kVectors) {  // head_dim 64 and 96
        for (int r = 0; r < ROWS; ++r) {
            for (int i = 0; i < vectors; ++i) {
                __m512 a = _mm512_load_ps(o + r * d + 16 * i);
                for (int j = 0; j < keys; ++j) {
                    const __m512 x = _mm512_set1_ps(t.p[(row + r) * kKeys + j]);
                    a = _mm512_fmadd_ps(x, _mm512_load_ps(t.v + j * d + first_channel + 16 * i), a);
                }
                _mm512_store_ps(o + r * d + 16 * i, a);
            }
        }
        return;
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) acc[r][i] = _mm512_load_ps(o + r * d + 16 * i);
    }
    const float* p = t.p + row * kKeys;
    for (int j = 0; j < keys; ++j) {
        const float* value = t.v + j * d + first_channel;
        __m512 x[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) x[r] = _mm512_set1_ps(p[r * kKeys + j]);
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) {
            const __m512 y = _mm512_load_ps(value + 16 * i);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; ++r) acc[r][i] = _mm512_fmadd_ps(x[r], y, acc[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) _mm512_store_ps(o + r * d + 16 * i, acc[r][i]);
    }
}

// The keys and values of a tile, close together, the keys transposed.
void load_tile(Tile& t, const float* k, const float* v, int64_t stride, int keys, int d) {
    for (int j = 0; j < keys; ++j) {
        std::copy_n(k + j * stride, d, t.rows + j * d);
        std::copy_n(v + j * stride, d, t.v + j * d);
    }
    std::fill(t.rows + keys * d, t.rows + kKeys * d, 0.0f);
    const __m512i rows = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                            _mm512_set1_epi32(d));
    for (int j = 0; j < kKeys; j += 16) {
        for (int c = 0; c < d; ++c) {
            _mm512_store_ps(t.k + c * kKeys + j, _mm512_i32gather_ps(rows, t.rows + j * d + c, 4));
        }
    }
}

}  // namespace

bool float_attention_available() { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"); }

void float_attention(const float* q, int64_t n_query, const float* k, const float* v, int64_t n_keys, int q_heads, int kv_heads,
                     int d, int threads, float* out) {
    const int group = q_heads / kv_heads;
    const int64_t rows = n_query * group, tiles = (rows + kRows - 1) / kRows, stride = int64_t(kv_heads) * d;
    const float unit = 1.44269504f / std::sqrt(float(d));
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        const auto tile = std::make_unique<Tile>();
        Tile& t = *tile;
        for (int64_t task; (task = next.fetch_add(1)) < tiles * kv_heads;) {
            const int64_t head = task / tiles, first = task % tiles * kRows;
            const int n = int(std::min<int64_t>(kRows, rows - first));
            const auto at = [&](int r) { return ((first + r) / group * q_heads + head * group + (first + r) % group) * d; };
            const auto last_key = [&](int r) { return n_keys - n_query + (first + r) / group; };
            for (int r = 0; r < n; ++r) {
                for (int c = 0; c < d; ++c) t.q[r * d + c] = q[at(r) + c] * unit;
                t.m[r] = -INFINITY;
                t.l[r] = 0.0f;
            }
            std::fill_n(t.o, n * d, 0.0f);
            for (int64_t key = 0; key <= last_key(n - 1); key += kKeys) {
                const int keys = int(std::min<int64_t>(kKeys, n_keys - key));
                load_tile(t, k + key * stride + head * d, v + key * stride + head * d, stride, keys, d);
                int r = 0;
                for (; r + kScoreRows <= n; r += kScoreRows) scores<kScoreRows>(t, d, r, t.p + r * kKeys);
                for (; r < n; ++r) scores<1>(t, d, r, t.p + r * kKeys);
                for (r = 0; r < n; ++r) {
                    const int visible = int(std::clamp<int64_t>(last_key(r) + 1 - key, 0, keys));
                    if (visible > 0) softmax_row(t, d, r, visible);
                    if (visible == 0) std::fill_n(t.p + r * kKeys, kKeys, 0.0f);
                }
                for (int c = 0; c < d; c += 128) {
                    for (r = 0; r + kValueRows <= n; r += kValueRows) values<kValueRows>(t, d, r, keys, c);
                    for (; r < n; ++r) values<1>(t, d, r, keys, c);
                }
            }
            for (int r = 0; r < n; ++r) {
                for (int c = 0; c < d; ++c) out[at(r) + c] = t.o[r * d + c] / t.l[r];
            }
        }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
}

}  // namespace ta::bench
