#include "src/core/blake2s.h"

#include <bit>
#include <cstring>

namespace ta {
namespace {

constexpr size_t kBlock = 64;
constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr uint8_t kSigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

void mix(uint32_t (&v)[16], int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] = v[a] + v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] = v[c] + v[d];
    v[b] = std::rotr(v[b] ^ v[c], 12);
    v[a] = v[a] + v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 8);
    v[c] = v[c] + v[d];
    v[b] = std::rotr(v[b] ^ v[c], 7);
}

// `counted`: bytes up to the end of this block.
void compress(uint32_t (&h)[8], const uint8_t* block, uint64_t counted, bool last) {
    uint32_t m[16], v[16];
    std::memcpy(m, block, sizeof m);  // little endian, as all hosts that this library runs on
    std::memcpy(v, h, sizeof h);
    std::memcpy(v + 8, kInitial, sizeof kInitial);
    v[12] ^= uint32_t(counted);
    v[13] ^= uint32_t(counted >> 32);
    if (last) v[14] = ~v[14];
    for (const auto& s : kSigma) {
        mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
        mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
        mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
        mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
        mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
        mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
        mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
        mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

Blake2sDigest blake2s(const uint8_t* key, size_t key_bytes, const void* data, size_t bytes) {
    uint32_t h[8];
    std::memcpy(h, kInitial, sizeof h);
    h[0] ^= 0x01010000 ^ uint32_t(key_bytes << 8) ^ uint32_t(sizeof(Blake2sDigest));
    uint64_t counted = 0;
    uint8_t block[kBlock] = {};
    if (key_bytes > 0) {
        std::memcpy(block, key, key_bytes);
        counted = kBlock;
        compress(h, block, counted, bytes == 0);
    }
    const auto* in = static_cast<const uint8_t*>(data);
    while (bytes > kBlock) {
        counted += kBlock;
        compress(h, in, counted, false);
        in += kBlock;
        bytes -= kBlock;
    }
    if (bytes > 0 || key_bytes == 0) {
        std::memset(block, 0, kBlock);
        if (bytes > 0) std::memcpy(block, in, bytes);
        compress(h, block, counted + bytes, true);
    }
    Blake2sDigest digest;
    std::memcpy(digest.data(), h, sizeof h);
    return digest;
}

}  // namespace ta
