// Partial attention results to be merged, of random types and layouts, and what comes of them in float64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

struct MergeShape {
    uint32_t n;
    int64_t tokens, heads, head_dim;
};

inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

class MergeProblem {
  public:
    MergeProblem(const MergeShape& shape, uint64_t seed) : s(shape), random_(seed) {
        for (uint32_t i = 0; i < s.n; ++i) parts.push_back(random_tensor());
        lses.assign(s.n, std::vector<float>(size_t(rows())));
        for (int64_t row = 0; row < rows(); ++row) fill_row(row);
    }

    int64_t rows() const { return s.tokens * s.heads; }
    Tensor random_tensor() { return {s.tokens, s.heads, s.head_dim, kDtypes[random_.below(3)], kLayouts[random_.below(4)]}; }
    // The tensors and LSEs as they are passed.
    std::vector<ta_tensor> views() {
        std::vector<ta_tensor> v;
        for (Tensor& part : parts) v.push_back(*part.view());
        return v;
    }
    std::vector<const float*> lse_pointers() const {
        std::vector<const float*> p;
        for (const auto& lse : lses) p.push_back(lse.data());
        return p;
    }
    ta_status merge(const Context& context, Tensor& out, float* lse, ta_error* err) {
        return ta_merge_states(context.get(), s.n, views().data(), lse_pointers().data(), out.view(), lse, nullptr, err);
    }

    // `out` was of `dtype`. fp32 rounds each of n weights and sums.
    void check(const Tensor& out, ta_dtype dtype, const std::vector<float>& lse) const {
        const double rounding = (s.n + 8) * 0x1p-24, of_out = dtype == TA_DTYPE_F32   ? 0.0
                                                              : dtype == TA_DTYPE_F16 ? 0x1p-11
                                                                                      : 0x1p-8;
        for (int64_t row = 0; row < rows(); ++row) {
            double m = kMinusInf, sum = 0.0;
            for (const auto& l : lses) m = std::max(m, double(l[size_t(row)]));
            std::vector<double> weight;
            for (const auto& l : lses)
                weight.push_back(std::isinf(m) ? 0.0 : std::exp(l[size_t(row)] - m)), sum += weight.back();
            const double want_lse = m + std::log(std::max(sum, 1.0));
            if (std::isinf(m)) {
                ASSERT_EQ(lse[size_t(row)], kMinusInf) << row;
            } else {
                ASSERT_NEAR(lse[size_t(row)], want_lse, rounding + 0x1p-23 * std::abs(want_lse)) << row;
            }
            for (int64_t c = 0; c < s.head_dim; ++c) {
                double want = 0.0, magnitude = 0.0;
                for (uint32_t i = 0; i < s.n; ++i) {
                    if (weight[i] < 1e-38) continue;
                    const double x = weight[i] / sum * double(parts[i].get(row / s.heads, row % s.heads, c));
                    want += x, magnitude += std::abs(x);
                }
                ASSERT_NEAR(out.get(row / s.heads, row % s.heads, c), want,
                            rounding * magnitude + of_out * std::abs(want) + 1e-7)
                    << "row " << row << ", channel " << c;
            }
        }
    }

    const MergeShape s;
    std::vector<Tensor> parts;
    std::vector<std::vector<float>> lses;  // [n][tokens, heads]

  private:
    // Of some rows LSEs lie close together, of others 10^4 apart, and some see nothing in some parts or all. O of what adds nothing
    // is NaN.
    void fill_row(int64_t row) {
        const float spread = random_.chance(50) ? 1.0f : random_.chance(50) ? 20.0f : 1e4f;
        const int nothing = random_.chance(50) ? 0 : random_.chance(80) ? 50 : 100;
        float m = kMinusInf;
        for (auto& lse : lses) {
            lse[size_t(row)] = random_.chance(nothing) ? kMinusInf : spread * random_.normal();
            m = std::max(m, lse[size_t(row)]);
        }
        for (uint32_t i = 0; i < s.n; ++i) {
            const float lse = lses[i][size_t(row)];
            const bool counts = lse > kMinusInf && m - lse < 87.4f;
            for (int64_t c = 0; c < s.head_dim; ++c)
                parts[i].set(row / s.heads, row % s.heads, c, counts ? random_.normal() : kNan);
        }
    }

    Random random_;
};

// Rows fill words of 8 channels or not, tiles of 32 rows or not, and an output may be in the place of a part.
inline const MergeShape kMergeShapes[] = {
    {1, 5, 3, 64}, {2, 1, 32, 128}, {2, 64, 4, 96}, {3, 63, 2, 256}, {8, 65, 2, 64}, {64, 3, 5, 128},
    {5, 33, 1, 8}, {4, 7, 3, 80},   {3, 2, 3, 1},   {2, 4, 2, 1024}, {7, 9, 1, 100}, {2, 0, 4, 128},
};

}  // namespace ta::testing
