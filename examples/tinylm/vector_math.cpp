#include "vector_math.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

// One binary for every x86-64: the loader picks a clone, but too early for a sanitizer's runtime.
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12 && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TINYLM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define TINYLM_CLONES
#endif

namespace tinylm {
namespace {

// exp by range reduction to [-ln2/2, ln2/2] and Cephes' polynomial, without branches and calls: loops vectorise over it.
inline __attribute__((always_inline)) float fast_exp(float x) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low mantissa bits
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    const float shifted = x * 1.44269504f + kRound;
    const float n = shifted - kRound;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const uint32_t exponent = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
    return p * std::bit_cast<float>(exponent);
}

}  // namespace

TINYLM_CLONES float exp_minus_max(float* x, std::size_t n) {
    float max = x[0];
#pragma omp simd reduction(max : max)
    for (std::size_t i = 0; i < n; ++i) max = x[i] > max ? x[i] : max;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = 0; i < n; ++i) {
        const float e = fast_exp(x[i] - max);
        x[i] = e;
        sum += e;
    }
    return sum;
}

TINYLM_CLONES void silu_mul(float* gate, const float* up, std::size_t n) {
#pragma omp simd
    for (std::size_t i = 0; i < n; ++i) gate[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
}

TINYLM_CLONES void rms_norm(const float* x, const float* weight, std::size_t n, float eps, float* out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::size_t i = 0; i < n; ++i) sum += x[i] * x[i];
    const float inv = 1.0f / std::sqrt(sum / static_cast<float>(n) + eps);
#pragma omp simd
    for (std::size_t i = 0; i < n; ++i) out[i] = x[i] * inv * weight[i];
}

}  // namespace tinylm
