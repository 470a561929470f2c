// DistrAttention on CUDA: what is prepared for the kernels that attend (sm80/distr, sm90/distr), and the launches that prepare it. The
// host side; nothing here needs the CUDA language.
//
// Products are in F16, whose range is small: the values of a tile of K or V and of a row of q are stored times a power of two.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/attend_args.h"
#include "kernels/format/distr.h"

struct CUstream_st;

namespace ta::cuda {

inline constexpr int kDistrKeyTile = 128;  // keys of a tile, which its kernels take in halves
inline constexpr int kDistrHalfKeys = kDistrKeyTile / 2;

// Up to kDistrKeyTile keys of a sequence.
struct DistrKeys {
    int32_t row;  // of k and v: that of the first
    int32_t keys;
};
// Up to kDistrRows query tokens of a sequence.
struct DistrRows {
    int32_t sequence;
    int32_t first_row;  // of the sequence's n_query
};

struct DistrArgs {
    // Sequences (first_entry: their first tile of keys); tensors and options; one count in `nonfinite`, or nullptr. Fields for
    // pages are not read.
    AttendArgs attend;
    TensorArgs k, v;
    int32_t group_size, n_tiles, n_blocks;
    const DistrKeys* tiles;   // [n_tiles]
    const DistrRows* blocks;  // [n_blocks] in the order in which they are begun

    // Prepared, F16. A tile is two halves of 64 keys, zeros where there is none.
    uint8_t* k_tiles;  // [n_tiles, kv_heads, 2, head_dim, 64] a row for each channel
    uint8_t* v_tiles;  // [n_tiles, kv_heads, 2] pieces of 64 channels (or 32), each a row for each key: distr_v_chunk()
    float* k_unit;     // [n_tiles, kv_heads] what stored values are multiples of: a power of two
    float* v_log2;     // [n_tiles, kv_heads] log2 of V's
    uint8_t* order;    // [n_blocks, q_heads, head_dim] channels sorted by hash
    uint8_t* q_rows;   // [n_blocks, q_heads, 128, distr_stored_groups()] the channels that stand for groups
    float* q_unit;     // [n_blocks, q_heads, 128]
};

TA_HD constexpr int64_t distr_tile_bytes(int d) {
    return int64_t(2) * kDistrKeyTile * d;
}
// Channels of a piece of V.
TA_HD constexpr int distr_v_channels(int d) {
    return d < 64 ? d : 64;
}
// The place, in a piece's row of `key`, of its chunk of 8 channels: swizzled as wgmma and ldmatrix want it.
TA_HD constexpr int distr_v_chunk(int d, int key, int chunk) {
    return d < 64 ? chunk ^ (key >> 1 & 3) : chunk ^ (key & 7);
}

// Exponents of units. Values of magnitude up to `amax` become less than 2^13, so sums of four of them stay within F16's range.
// The least exponent keeps the differences between exponents of V within fp32's.
inline constexpr int kDistrLeastExponent = -50;
TA_HD constexpr int distr_exponent(uint32_t bits_of_amax) {
    const int e = int(bits_of_amax >> 23) - 127 - 12;
    return e < kDistrLeastExponent ? kDistrLeastExponent : e;
}

// Enqueues a kernel of DistrAttention, which takes DistrArgs; nothing where there are no CTAs. Returns a cudaError_t.
int launch_distr(const void* kernel, int64_t ctas, int threads, int shared_bytes, const DistrArgs& args, CUstream_st* stream);

// K, V and q's blocks. Returns a cudaError_t.
int launch_distr_keys(const DistrArgs& args, CUstream_st* stream);
int launch_distr_rows(const DistrArgs& args, CUstream_st* stream);

}  // namespace ta::cuda
