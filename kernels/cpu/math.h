// The exponentials, one float at a time: the definition that vector versions reproduce lane by lane. The exact one, which
// GPUs share, is in kernels/format/exponential.h. docs/numerics.md gives the sources and errors.
#pragma once

#include <cmath>

#include "kernels/cpu/attend.h"
#include "kernels/format/exponential.h"

namespace ta::cpu {

using ta::exp2_neg_exact;
inline constexpr float kLog2e = 1.44269504f;
inline constexpr float kLn2 = 0.693147181f;
inline constexpr float kMinusInf = -__builtin_inff();

// 2^-f on [0, 1): `poly` is exact at both ends (docs/numerics.md).
inline constexpr float kPolyCoeff[4] = {1.0f, -0.691422412f, 0.230557799f, -0.039135387f};
// SAS (TurboAttention, eq. 13-15): e^-y = kSasTable[int y] * cubic(frac y) up to y = 6.
inline constexpr float kSasCoeff[4] = {0.9996f, -0.9922f, 0.4626f, -0.1025f};
inline constexpr float kSasTable[7] = {1.0f,          0.367879441f,   0.135335283f,  0.0497870684f,
                                       0.0183156389f, 0.00673794700f, 0.00247875218f};
inline constexpr float kSasCutoff = 6.0f;

TA_HD inline float exp2_neg_poly(float u) {
    if (!(u < kExpCutoff)) return 0.0f;
    const float n = std::floor(u), f = u - n;
    float r = std::fma(kPolyCoeff[3], f, kPolyCoeff[2]);
    r = std::fma(r, f, kPolyCoeff[1]);
    r = std::fma(r, f, kPolyCoeff[0]);
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
