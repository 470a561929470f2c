// The element-wise loops that matter for speed; vectorised by the compiler for the CPU it runs on.
#pragma once

#include <cstddef>

namespace tinylm {

// x[i] = exp(x[i] - max(x)); returns their sum. Relative error of exp below 2e-7.
float exp_minus_max(float* x, std::size_t n);

// gate[i] = silu(gate[i]) * up[i], silu(x) = x / (1 + exp(-x))
void silu_mul(float* gate, const float* up, std::size_t n);

// out = x / sqrt(mean(x^2) + eps) * weight
void rms_norm(const float* x, const float* weight, std::size_t n, float eps, float* out);

}  // namespace tinylm
