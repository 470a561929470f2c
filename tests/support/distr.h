// DistrAttention's queries in float: with each channel replaced by the one that stands for its group, exact attention gives what the
// variant must. Written from docs/numerics.md, apart from the library's code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "support/exact_attention.h"

namespace ta::testing {

// The channels of a block of rows [rows, stride] in the order of their hashes.
inline std::vector<int> distr_order(const float* q, int64_t rows, int64_t stride, int d) {
    const auto subtracts = [](int n, int64_t r) {
        const uint64_t bit = uint64_t(n) * 128 + uint64_t(r);
        uint64_t z = 16 + (bit / 64 + 1) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return ((z ^ (z >> 31)) >> (bit % 64) & 1) != 0;
    };
    std::vector<int> place(size_t(d), 0), order(size_t(d), 0);
    for (int c = 0; c < d; ++c) {
        bool above = false;  // a Gray code is read from its highest bit: each bit flips those below
        for (int n = 15; n >= 0; --n) {
            float sum = 0.0f;
            for (int64_t r = 0; r < rows; ++r) sum = subtracts(n, r) ? sum - q[r * stride + c] : sum + q[r * stride + c];
            above ^= sum > 0.0f;
            place[size_t(c)] |= int(above) << n;
        }
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return place[size_t(a)] < place[size_t(b)]; });
    return order;
}

// q [n_query, q_heads, head_dim] of one sequence.
inline std::vector<float> distr_queries(const AttentionShape& s, const float* q, int group_size) {
    const int d = int(s.head_dim);
    const int64_t row = s.q_heads * d;
    std::vector<float> of_groups(size_t(s.n_query * row));
    for (int64_t first = 0; first < s.n_query; first += 128) {
        const int64_t rows = std::min<int64_t>(128, s.n_query - first);
        for (int64_t h = 0; h < s.q_heads; ++h) {
            const float* block = q + first * row + h * d;
            const std::vector<int> order = distr_order(block, rows, row, d);
            for (int c = 0; c < d; ++c) {
                const int begin = c / group_size * group_size, size = std::min(group_size, d - begin);
                const int stands = order[size_t(begin + (size - 1) / 2)];
                for (int64_t r = 0; r < rows; ++r)
                    of_groups[size_t((first + r) * row + h * d + order[size_t(c)])] = block[r * row + stands];
            }
        }
    }
    return of_groups;
}

}  // namespace ta::testing
