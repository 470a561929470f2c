// The body of join_scalar and its sisters (attend.h), a plain loop over channels that the compiler vectorises.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/cpu/attend.h"
#include "kernels/cpu/math.h"

namespace ta::cpu {

TA_HD inline void join_rows(const JoinTask& t) {
    for (int64_t r = 0; r < t.rows; ++r) {
        if (t.part_m[r] == kMinusInf) continue;
        float* __restrict o = t.o + r * t.head_dim;
        const float* __restrict part = t.part_o + r * t.head_dim;
        if (t.m[r] == kMinusInf) {
            t.m[r] = t.part_m[r];
            t.l[r] = t.part_l[r];
            std::copy_n(part, t.head_dim, o);
            continue;
        }
        const float m = std::max(t.m[r], t.part_m[r]);
        const float alpha = exp2_neg_exact(m - t.m[r]);
        const float weight = exp2_neg_exact(m - t.part_m[r]);
        t.m[r] = m;
        t.l[r] = std::fma(weight, t.part_l[r], t.l[r] * alpha);
        for (int c = 0; c < t.head_dim; ++c) o[c] = std::fma(weight, part[c], o[c] * alpha);
    }
}

}  // namespace ta::cpu
