// The bits of the heads of a test case.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/cuda/common/attend_args.h"

namespace ta::cuda::testing {

// The bits of a head under a case's setting, which is one for all heads, kCodes (4 and 2 in turn) or kAny (8, 4 and 2).
inline constexpr int kCodes = 0, kAny = -1;
inline uint8_t k_bits_of_head(int setting, int head) {
    constexpr uint8_t kMixed[] = {8, 4, 2, 8, 4};
    return uint8_t(setting == kAny ? kMixed[head % 5] : setting == kCodes ? head % 2 ? 2 : 4 : setting);
}
inline uint8_t v_bits_of_head(int setting, int head) {
    constexpr uint8_t kMixed[] = {4, 8, 8, 2, 2, 8};
    return uint8_t(setting == kAny ? kMixed[head % 6] : setting == kCodes ? head / 2 % 2 ? 4 : 2 : setting);
}

inline bool has_8_bits(const std::vector<HeadArgs>& heads) {
    return std::any_of(heads.begin(), heads.end(), [](const HeadArgs& h) { return h.k_bits == 8 || h.v_bits == 8; });
}

}  // namespace ta::cuda::testing
