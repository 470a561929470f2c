// Divisions without nvcc's branch for extreme exponents, across which it does not mix instructions.
#pragma once

#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {

// 1 / x, within an ulp, of 2^-125 <= x <= 2^125.
__device__ __forceinline__ float inverse_of(float x) {
    const float about = reciprocal(x);
    return fmaf(fmaf(-x, about, 1.0f), about, about);
}
// x / divisor, rounded to nearest as a division is. `inverse` is inverse_of(divisor); neither the quotient nor what is left of
// x may lie below the denormals.
__device__ __forceinline__ float divide(float x, float divisor, float inverse) {
    float q = __fmul_rn(x, inverse);
    q = fmaf(fmaf(-divisor, q, x), inverse, q);
    return fmaf(fmaf(-divisor, q, x), inverse, q);
}

}  // namespace ta::cuda
