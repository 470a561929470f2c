// The exact exponential and logarithm: one definition for CPUs and GPUs, in which every operation is rounded once, as written.
// nvcc contracts a product into the sum that it is part of; products here are factors or explicit fmas, or rounded_product's.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

inline constexpr float kExpCutoff = 126.0f;  // 2^-u with u above is taken as 0

// a * b, rounded whatever it is part of.
TA_HD inline float rounded_product(float a, float b) {
#ifdef __CUDA_ARCH__
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

// x * 2^-n for x in [0.5, 1], n in 0..126 (integer): subtracts from the exponent field.
TA_HD inline float scale_down(float x, int n) {
    return std::bit_cast<float>(std::bit_cast<int32_t>(x) - (n << 23));
}

// 2^-u of u >= 0. Minimax fit of 2^-f on [0, 1] with 1 at 0, degree 6: relative error in fp32 below 1.5e-7.
inline constexpr float kExactCoeff[7] = {1.0f,           -0.693147063f,   0.240224361f,   -0.0554907583f,
                                         0.00957917981f, -0.00127474836f, 0.000109023240f};
TA_HD inline float exp2_neg_exact(float u) {
    if (!(u < kExpCutoff)) return 0.0f;
    const float n = floorf(u), f = u - n;
    constexpr auto c = std::to_array(kExactCoeff);  // device code has no arrays of the host
    float r = c[6];
    for (int k = 5; k >= 0; --k) r = fmaf(r, f, c[k]);
    return scale_down(r, int(n));
}

// ln(x) of a normal x >= 1, by the series of ln(y) = 2 atanh(t), t = (y - 1) / (y + 1), with y = x 2^-e in [0.707, 1.415).
// Error below an ulp, or 1e-7 where that is more; 0 at 1.
TA_HD inline float log_exact(float x) {
    constexpr int32_t kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
    const int32_t bits = std::bit_cast<int32_t>(x), e = (bits - kRootHalf) >> 23;
    const float y = std::bit_cast<float>(bits - (e << 23)), t = (y - 1.0f) / (y + 1.0f), t2 = rounded_product(t, t);
    float r = fmaf(2.0f / 9.0f, t2, 2.0f / 7.0f);
    r = fmaf(r, t2, 2.0f / 5.0f);
    r = fmaf(r, t2, 2.0f / 3.0f);
    r = fmaf(rounded_product(t, t2), r, 2.0f * t);
    return fmaf(float(e), 0.693147181f, r);
}

}  // namespace ta
