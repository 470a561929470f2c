// The end of a row of attention: its denominator, with the learned sink.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cpu/math.h"

namespace ta::cpu {

struct RowEnd {
    float factor, lse;  // factor: what O is multiplied by; lse: natural log
};

// m in log2 units; -inf: the row saw nothing. l is relative to m. `sink` may be nullptr.
inline RowEnd end_row(float m, float l, const float* sink) {
    double denominator = l, top = m;  // the denominator is denominator * 2^top
    float weight = 1.0f;
    if (sink) {
        const double logit = double(*sink) * double(kLog2e);
        top = std::max(double(m), logit);
        weight = m == kMinusInf ? 0.0f : float(std::exp2(double(m) - top));
        denominator = double(l) * double(weight) + std::exp2(logit - top);
    }
    if (!(denominator > 0.0)) return {0.0f, kMinusInf};
    return {float(double(weight) / denominator), float((top + std::log2(denominator)) / double(kLog2e))};
}

}  // namespace ta::cpu
