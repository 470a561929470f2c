// Codes of channel pages to INT8: code * step + zero of four K channels in a word, exact.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/common/prefill/tile.cuh"

namespace ta::cuda::prefill {

TA_DEVICE half2 as_half2(uint32_t x) {
    return *reinterpret_cast<half2*>(&x);
}
TA_DEVICE uint32_t as_bits(half2 x) {
    return *reinterpret_cast<uint32_t*>(&x);
}
TA_DEVICE half2 both(float x) {
    return __float2half2_rn(x);
}

// A constant that the compiler does not know. LOP3 has room for one immediate, so (x & mask) | magic with two known constants
// would take two LOP3. Grids have one dimension.
TA_DEVICE uint32_t in_register(uint32_t x) {
    return x + (gridDim.y - 1);
}

// Four unsigned bytes as halves, plus 1024: bytes 0 and 2, bytes 1 and 3.
TA_DEVICE void halves_of_bytes(uint32_t x, half2& even, half2& odd) {
    even = as_half2(__byte_perm(x, 0x64646464, 0x4240));
    odd = as_half2(__byte_perm(x, 0x64646464, 0x4341));
}

// code * step + zero of four channels, exact: in fp16 on the integers around 1536, whose low bytes are the results.
struct KChannels {
    half2 step[2], zero[2];  // bytes 0 and 2, bytes 1 and 3

    template <int kBits>
    TA_DEVICE void set(uint32_t steps, uint32_t zeros) {
        constexpr float kBase = kBits == 4 ? 64.0f : 4.0f;  // unpack() adds it to a code
        half2 z[2];                                         // zero + 128 + 1024
        halves_of_bytes(steps, step[0], step[1]);
        halves_of_bytes(zeros ^ 0x80808080, z[0], z[1]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            step[n] = __hsub2(step[n], both(1024.0f));
            zero[n] = __hfma2(step[n], both(-kBase), __hadd2(z[n], both(1536.0f - 128.0f - 1024.0f)));
        }
    }
};

// The codes of one tile of four channels, as halves: 64 + code (4 bits), 4 + code (2 bits).
struct KCodes {
    uint32_t even, odd;

    // `tile` is which of the codes in a byte. Codes in a byte's upper bits lie where they are needed, or a byte above.
    template <int kBits>
    static TA_DEVICE KCodes unpack(uint32_t codes, int tile, uint32_t magic) {
        constexpr uint32_t kMask = kBits == 4 ? 0x00F000F0 : 0x03000300;
        constexpr int kAt = kBits == 4 ? 4 : 8;
        const int up = kAt - kBits * tile;  // of an even byte's; an odd byte's lie 8 higher
        return {((up >= 0 ? codes << up : codes >> -up) & kMask) | magic, ((codes >> (8 - up)) & kMask) | magic};
    }
};
template <int kBits>
TA_DEVICE uint32_t expand_four(const KChannels& channels, uint32_t codes, int tile, uint32_t magic) {
    const KCodes c = KCodes::unpack<kBits>(codes, tile, magic);
    const half2 a = __hfma2(as_half2(c.even), channels.step[0], channels.zero[0]);
    const half2 b = __hfma2(as_half2(c.odd), channels.step[1], channels.zero[1]);
    return __byte_perm(as_bits(a), as_bits(b), 0x6240);
}

}  // namespace ta::cuda::prefill
