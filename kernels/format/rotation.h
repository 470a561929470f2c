// Randomized Hadamard rotation of a head vector: signs, then a fast Walsh-Hadamard transform, then 1/sqrt(d). Orthonormal, so
// q.k is unchanged when both are rotated; it spreads outlier channels over all of them. docs/numerics.md, "Rotation".
#pragma once

#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

TA_HD constexpr bool can_rotate(int d) {
    return d == 64 || d == 128 || d == 256;
}

TA_HD constexpr float rotation_norm(int d) {
    return d == 64 ? 0.125f : d == 128 ? 0.0883883476f : 0.0625f;
}

// The one of the seeds 1..16 with the flattest Walsh spectrum of its signs (the least peak over 64, 128 and 256 channels, then
// the least sum of the three peaks): a value that is the same in all channels, such as an offset of K, spreads evenly over the
// rotated channels.
inline constexpr uint64_t kDefaultRotationSeed = 11;

// True where channel c changes its sign: bit c % 64 of the (c / 64)th output of SplitMix64 seeded with `seed`.
TA_HD constexpr bool rotation_sign(uint64_t seed, int c) {
    uint64_t z = seed + uint64_t(c / 64 + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    return z >> (c % 64) & 1;
}

// Butterflies of distance 1, 2, 4, ... in this order, each one rounding; the norm is multiplied last.
TA_HD inline void hadamard_in_place(float* x, int d) {
    for (int h = 1; h < d; h *= 2) {
        for (int i = 0; i < d; i += 2 * h) {
            for (int j = i; j < i + h; ++j) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
        }
    }
    const float norm = rotation_norm(d);
    for (int j = 0; j < d; ++j) x[j] *= norm;
}

TA_HD inline void rotate(float* x, int d, uint64_t seed) {
    for (int c = 0; c < d; ++c) x[c] = rotation_sign(seed, c) ? -x[c] : x[c];
    hadamard_in_place(x, d);
}

TA_HD inline void rotate_back(float* x, int d, uint64_t seed) {
    hadamard_in_place(x, d);
    for (int c = 0; c < d; ++c) x[c] = rotation_sign(seed, c) ? -x[c] : x[c];
}

}  // namespace ta
