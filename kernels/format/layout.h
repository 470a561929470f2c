// The byte layout of pages: where each code, scale and zero point of a kv head lies. Included by CPU and CUDA code alike;
// docs/FORMAT.md states the same in words. Nothing here computes values: that is codec.h.
#pragma once

#include <cstddef>
#include <cstdint>

// On the host always inlined: these functions are compiled with several instruction sets, and an out-of-line copy with the
// largest of them must never serve the others.
#if defined(__CUDACC__)
#define TA_HD __host__ __device__
#else
#define TA_HD [[gnu::always_inline]]
#endif

namespace ta {

inline constexpr int kPageTokens = 64;       // tokens of a page
inline constexpr int kPieceAlignment = 128;  // of a head's piece: bulk copies into shared memory take whole lines
inline constexpr int kMaxHeadDim = 256;
inline constexpr int kMaxGroup = 16;  // query heads per kv head

enum class PageKind : uint8_t {
    kToken = 0,    // INT8 codes, one fp32 scale per token for K and for V
    kChannel = 1,  // of closed blocks: K and V of each head in its bits, mostly 4 or 2 (ChannelLayout)
    kLow = 2,      // the same with 2 bits for all heads, below the bits of the pool: where precision falls on demotion
    // As kToken and kChannel, for passed blocks, which lack the pages of layers with a window. Pages that are there are as they
    // were, in the same places.
    kPassedToken = 3,
    kPassedChannel = 4,
};
inline constexpr int kPageKinds = 5;
TA_HD constexpr bool is_passed(PageKind kind) {
    return kind >= PageKind::kPassedToken;
}
// How pages of such a block look.
TA_HD constexpr PageKind page_format(PageKind kind) {
    return kind == PageKind::kPassedToken ? PageKind::kToken : kind == PageKind::kPassedChannel ? PageKind::kChannel : kind;
}
// The kind that a token or a channel block takes when windows have passed it.
TA_HD constexpr PageKind passed_kind(PageKind kind) {
    return kind == PageKind::kToken ? PageKind::kPassedToken : PageKind::kPassedChannel;
}

TA_HD constexpr bool is_supported_head_dim(int d) {
    return d == 64 || d == 96 || d == 128 || d == 256;
}

// Channels that V codes are stored for. A byte holds 8 / bits groups of 16 channels, so 6 groups at 2 bits are padded to 8.
TA_HD constexpr int v_stored_channels(int d, int bits) {
    // No division by the bits: GPU kernels ask this of each page.
    return bits == 2 ? (d + 63) / 64 * 64 : bits == 4 ? (d + 31) / 32 * 32 : d;
}

// One head of a token page: K codes, V codes, K scales [64] f32, whose lowest bytes are K's turning pairs (turning.h), V scales
// [64] f32.
struct TokenLayout {
    int d;
    TA_HD constexpr explicit TokenLayout(int head_dim) : d(head_dim) {}
    TA_HD constexpr size_t k_codes() const { return 0; }
    TA_HD constexpr size_t v_codes() const { return size_t(kPageTokens) * d; }
    TA_HD constexpr size_t k_scale() const { return 2 * size_t(kPageTokens) * d; }
    TA_HD constexpr size_t v_scale() const { return k_scale() + kPageTokens * sizeof(float); }
    TA_HD constexpr size_t bytes() const { return v_scale() + kPageTokens * sizeof(float); }  // a multiple of 128
};

// One head of a channel page: K codes, V codes, K's parameters, V's parameters, V token exponents [64] u4, K page scale f32, V page
// scale f32, K's turning pairs [8] u64 (turning.h), K's and V's largest own scales f32 under universal open scales, zero padding
// up to 128 bytes. K and V have 4, 2 or 8 bits each:
//  - 4 and 2 bits: parameters are step [d] u8, zero [d] s8;
//  - 8 bits: codes and scales are a token page's, parameters are its scales [64] f32. Exponents and page scale are 0, and so are
//    turning pairs: those are in K's scales.
struct ChannelLayout {
    int d, k_bits, v_bits;
    TA_HD constexpr ChannelLayout(int head_dim, int kb, int vb) : d(head_dim), k_bits(kb), v_bits(vb) {}
    TA_HD constexpr size_t k_codes() const { return 0; }
    TA_HD constexpr size_t v_codes() const { return size_t(kPageTokens) * d * k_bits / 8; }
    TA_HD constexpr size_t k_parameters() const {
        return v_codes() + size_t(kPageTokens) * v_stored_channels(d, v_bits) * v_bits / 8;
    }
    TA_HD constexpr size_t v_parameters() const { return k_parameters() + parameter_bytes(k_bits); }
    // At 4 and 2 bits.
    TA_HD constexpr size_t k_step() const { return k_parameters(); }
    TA_HD constexpr size_t k_zero() const { return k_step() + d; }
    TA_HD constexpr size_t v_step() const { return v_parameters(); }
    TA_HD constexpr size_t v_zero() const { return v_step() + d; }
    TA_HD constexpr size_t v_exponents() const { return v_parameters() + parameter_bytes(v_bits); }
    TA_HD constexpr size_t k_scale() const { return v_exponents() + kPageTokens / 2; }
    TA_HD constexpr size_t v_scale() const { return k_scale() + sizeof(float); }
    TA_HD constexpr size_t k_turning() const { return v_scale() + sizeof(float); }  // a multiple of 8
    TA_HD constexpr size_t own_scales() const { return k_turning() + kPageTokens; }
    TA_HD constexpr size_t bytes() const {
        return (own_scales() + 2 * sizeof(float) + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    }

  private:
    TA_HD constexpr size_t parameter_bytes(int bits) const { return bits == 8 ? kPageTokens * sizeof(float) : 2 * size_t(d); }
};

// The place of a code in its code array: byte, and the lowest bit in that byte. At 8 bits the shift is 0.
struct CodePlace {
    uint32_t byte;
    uint32_t shift;
};

// The order of a code array is that of the A fragments of mma.sync m16n8k32 with tokens (K) or channels (V) on M: a warp loads
// 512 bytes with one 16-byte load per lane, lane = 4 r + i, and word w, byte b of a lane belong to row r + 8 (w & 1) and
// column 4 (i + 4 (w >> 1)) + b of the fragment; which channel (K) or token (V) a column stands for is free, since the product
// sums over it, and chosen so that a lane's scales and outputs are contiguous. Below 8 bits a byte holds 8 / bits row tiles.

// K: token = 16 tile + r + 8 (w & 1), channel = (d/4) i + 8 step + 4 (w >> 1) + b. Loads are ordered [tile group][step].
TA_HD constexpr CodePlace k_place(int d, int bits, int token, int channel) {
    const int tile = token / 16, r = token % 8, w0 = token % 16 / 8;
    const int i = channel / (d / 4), in_lane = channel % (d / 4);
    const int step = in_lane / 8, w1 = in_lane % 8 / 4, b = in_lane % 4;
    const int per_byte = 8 / bits;
    const int load = tile / per_byte * (d / 32) + step;
    return {uint32_t(load * 512 + (4 * r + i) * 16 + (2 * w1 + w0) * 4 + b), uint32_t(tile % per_byte * bits)};
}

// V: channel = (d'/8) r + 2 tile + (w & 1) with d' = v_stored_channels, token = 32 (w >> 1) + 8 b + 2 i + step. Loads are
// ordered [tile group][step].
TA_HD constexpr CodePlace v_place(int d, int bits, int token, int channel) {
    const int stored = v_stored_channels(d, bits);
    const int r = channel / (stored / 8), tile = channel % (stored / 8) / 2, w0 = channel % 2;
    const int w1 = token / 32, b = token % 32 / 8, i = token % 8 / 2, step = token % 2;
    const int per_byte = 8 / bits;
    const int load = tile / per_byte * 2 + step;
    return {uint32_t(load * 512 + (4 * r + i) * 16 + (2 * w1 + w0) * 4 + b), uint32_t(tile % per_byte * bits)};
}

// Step byte: the integer step in the low bits, the fraction of the zero point above. The zero point in eighths of an INT8 step
// is 8 z + fraction: 3 fraction bits at 4 bits, 1 bit (worth 4/8) at 2 bits.
TA_HD constexpr int step_of(uint8_t byte, int bits) {
    return bits == 4 ? byte & 31 : byte & 127;
}
TA_HD constexpr int fraction_eighths_of(uint8_t byte, int bits) {
    return bits == 4 ? byte >> 5 : (byte >> 7) * 4;
}
TA_HD constexpr uint8_t step_byte(int step, int fraction_eighths, int bits) {
    return uint8_t(bits == 4 ? step | fraction_eighths << 5 : step | (fraction_eighths / 4) << 7);
}

static_assert(TokenLayout(128).bytes() == 16896);
static_assert(ChannelLayout(128, 4, 4).bytes() == 8832);
static_assert(ChannelLayout(128, 2, 2).bytes() == 4736);
static_assert(ChannelLayout(128, 8, 4).bytes() == 12928);
// With 8 bits of both a channel page's piece begins as a token page's.
static_assert(ChannelLayout(96, 8, 8).v_codes() == TokenLayout(96).v_codes());
static_assert(ChannelLayout(96, 8, 8).k_parameters() == TokenLayout(96).k_scale());
static_assert(ChannelLayout(96, 8, 8).v_parameters() == TokenLayout(96).v_scale());

}  // namespace ta
