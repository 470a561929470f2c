// The exponentials, one float at a time: the definition that vector versions reproduce lane by lane. docs/numerics.md gives
// the sources and errors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/attend.h"

namespace ta::cpu {

inline constexpr float kLog2e = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;
inline constexpr float kMinusInf = -__builtin_inff();
inline constexpr float kExpCutoff = 126.0f;  // 2^-u with u above is taken as 0

// 2^-f on [0, 1): `poly` is exact at both ends (docs/numerics.md); the other is a minimax polynomial within 1 ulp or so.
inline constexpr float kPolyCoeff[4] = {1.0f, -0.691422412f, 0.230557799f, -0.039135387f};
// SAS (TurboAttention, eq. 13-15): e^-y = kSasTable[int y] * cubic(frac y) up to y = 6.
inline constexpr float kSasCoeff[4] = {0.9996f, -0.9922f, 0.4626f, -0.1025f};
inline constexpr float kSasTable[7] = {1.0f,          0.367879441f,   0.135335283f,  0.0497870684f,
                                       0.0183156389f, 0.00673794700f, 0.00247875218f};
inline constexpr float kSasCutoff = 6.0f;

// x * 2^-n for x in [0.5, 1], n in 0..126 (integer): subtracts from the exponent field.
TA_HD inline float scale_down(float x, int n) {
    return std::bit_cast<float>(std::bit_cast<int32_t>(x) - (n << 23));
}

TA_HD inline float exp2_neg_poly(float u) {
    if (!(u < kExpCutoff)) return 0.0f;
    const float n = std::floor(u), f = u - n;
    float r = std::fma(kPolyCoeff[3], f, kPolyCoeff[2]);
    r = std::fma(r, f, kPolyCoeff[1]);
    r = std::fma(r, f, kPolyCoeff[0]);
    return scale_down(r, int(n));
}

// Minimax fit of 2^-f on [0, 1] with 1 at 0, degree 6: relative error in fp32 below 1.5e-7.
inline constexpr float kExactCoeff[7] = {1.0f,           -0.693147063f,   0.240224361f,   -0.0554907583f,
                                         0.00957917981f, -0.00127474836f, 0.000109023240f};
TA_HD inline float exp2_neg_exact(float u) {
    if (!(u < kExpCutoff)) return 0.0f;
    const float n = std::floor(u), f = u - n;
    float r = std::fma(kExactCoeff[6], f, kExactCoeff[5]);
    for (int k = 4; k >= 0; --k) r = std::fma(r, f, kExactCoeff[k]);
    return scale_down(r, int(n));
}

// u is in log2 units like the others; SAS works in natural ones.
TA_HD inline float exp2_neg_sas(float u) {
    const float y = u * kLn2;
    if (!(y <= kSasCutoff)) return 0.0f;
    const float n = std::floor(y), f = y - n;
    float r = std::fma(kSasCoeff[3], f, kSasCoeff[2]);
    r = std::fma(r, f, kSasCoeff[1]);
    r = std::fma(r, f, kSasCoeff[0]);
    return kSasTable[int(n)] * r;
}

TA_HD inline float exp2_neg(float u, ExpMode mode) {
    switch (mode) {
        case ExpMode::kExact:
            return exp2_neg_exact(u);
        case ExpMode::kSas:
            return exp2_neg_sas(u);
        default:
            return exp2_neg_poly(u);
    }
}

// tanh(y) = sign(y) * (1 - 2 e / (1 + e)), e = exp(-2|y|), by the exact exponential.
TA_HD inline float tanh_exact(float y) {
    const float e = exp2_neg_exact(std::fabs(y) * (2.0f * kLog2e));
    return std::copysign((1.0f - e) / (1.0f + e), y);
}

}  // namespace ta::cpu
