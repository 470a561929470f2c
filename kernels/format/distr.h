// DistrAttention's groups of channels: which channels a block of query rows puts together. One definition for CPUs and GPUs, equal
// to the byte. docs/numerics.md, "DistrAttention".
#pragma once

#include <cstdint>

#include "kernels/format/rotation.h"

namespace ta {

inline constexpr int kDistrRows = 128;        // query tokens of a block, of one query head
inline constexpr int kDistrProjections = 16;  // N': bits of a channel's hash
inline constexpr int kMaxDistrHeadDim = 128;
inline constexpr uint64_t kDistrSeed = 16;

TA_HD constexpr bool is_distr_head_dim(int d) {
    return d == 32 || d == 64 || d == 128;
}
TA_HD constexpr int distr_groups(int d, int group_size) {
    return (d + group_size - 1) / group_size;
}
// Groups that a tensor core's steps of 16 take; those that are missing are zeros.
TA_HD constexpr int distr_stored_groups(int d, int group_size) {
    return (distr_groups(d, group_size) + 15) / 16 * 16;
}
// The channel of a group that stands for it, counted from the first, in a group of `size`.
TA_HD constexpr int distr_sampled(int size) {
    return (size - 1) / 2;
}

// Bit n: projection n subtracts row r of a block instead of adding it.
struct DistrSigns {
    uint16_t of_row[kDistrRows];
};
constexpr DistrSigns make_distr_signs() {
    DistrSigns signs{};
    for (int n = 0; n < kDistrProjections; ++n) {
        for (int r = 0; r < kDistrRows; ++r) {
            signs.of_row[r] = uint16_t(signs.of_row[r] | int(rotation_sign(kDistrSeed, n * kDistrRows + r)) << n);
        }
    }
    return signs;
}
inline constexpr DistrSigns kDistrSigns = make_distr_signs();

// The place of a code in the reflected Gray code: neighbours in hash differ in one bit of the code.
TA_HD constexpr uint32_t gray_position(uint32_t code) {
    code ^= code >> 8;
    code ^= code >> 4;
    code ^= code >> 2;
    return code ^ code >> 1;
}

// The key by which channels are sorted: no two are alike.
TA_HD constexpr uint32_t distr_key(uint32_t code, int channel) {
    return gray_position(code) << 8 | uint32_t(channel);
}

}  // namespace ta
