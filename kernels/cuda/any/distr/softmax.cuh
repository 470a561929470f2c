// A block of query rows as the kernels of DistrAttention see it, and the rules of their softmax.
//
// A row's O and l are kept times 2^-m. The unit of V of the keys is part of m, and P is up to 2^kLargestP, so that small weights
// keep their bits in F16: p = 2^(s + v_log2 - m), O = sum p v and l = sum p 2^-v_log2. m is raised to where the row's largest P is
// 2^kHighestP, and stays until one would be above 2^kLargestP: so O is rarely multiplied.
#pragma once

#include "kernels/cuda/any/decode/output.cuh"
#include "kernels/cuda/any/distr/distr.h"
#include "kernels/cuda/common/half2.cuh"
#include "kernels/cuda/common/scores.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda::distr {

#define TA_DEVICE __device__ __forceinline__

inline constexpr float kHighestP = 9.0f;       // log2
inline constexpr float kFineScores = 0x1p20f;  // log2 units: of larger ones m has no room for what is added to it
inline constexpr float kLargestP = 15.0f;      // log2 of F16's

// A block of rows of one query head.
struct Block {
    int64_t item;  // of what is prepared for rows
    int q_head, kv_head, rows;
    int sequence_row, first_tile, n_keys;
    int position;            // of the first row among the keys
    int key_begin, key_end;  // keys that some row sees

    TA_DEVICE explicit Block(const DistrArgs& args) {
        const AttendArgs& a = args.attend;
        const int block = int(blockIdx.x) % args.n_blocks;
        q_head = int(blockIdx.x) / args.n_blocks;
        kv_head = q_head / a.group;
        item = int64_t(block) * (a.kv_heads * a.group) + q_head;
        const DistrRows at = args.blocks[block];
        const SequenceArgs s = a.sequences[at.sequence];
        rows = min(s.n_query - at.first_row, kDistrRows);
        sequence_row = s.row + at.first_row;
        first_tile = s.first_entry;
        n_keys = s.n_keys;
        position = s.n_keys - s.n_query + at.first_row;
        // Both ends of what a row sees grow with its position.
        key_begin = keys_of(a, 0).begin;
        key_end = keys_of(a, rows - 1).end;
    }
    TA_DEVICE KeyRange keys_of(const AttendArgs& a, int row) const {
        return visible_keys(a.causal, a.window, n_keys, position + row);
    }
    // The index of tile n of the sequence in what is prepared for keys.
    TA_DEVICE int64_t tile(const AttendArgs& a, int n) const { return int64_t(first_tile + n) * a.kv_heads + kv_head; }
    // The factor of a row's scores, but for K's unit.
    TA_DEVICE float scale_of(const DistrArgs& args, int row) const {
        const AttendArgs& a = args.attend;
        return args.q_unit[item * kDistrRows + row] * (a.softcap > 0.0f ? a.scale : a.scale * kLog2e);
    }
};

// m of a row after scores up to `top` have come, in log2 units.
TA_DEVICE float raised(float m, float top, float v_log2) {
    const float to = top + (v_log2 - kHighestP);
    return to > m + (kLargestP - kHighestP) ? to : m;
}

// Sums of two chunks of 8 halves.
TA_DEVICE uint4 add_chunks(const uint4& a, const uint4& b) {
    const auto add = [](uint32_t x, uint32_t y) { return bits_of(__hadd2(half2_of(x), half2_of(y))); };
    return make_uint4(add(a.x, b.x), add(a.y, b.y), add(a.z, b.z), add(a.w, b.w));
}

// Sums K's channels over groups: 64 keys at a time, a row of 128 bytes for each channel and for each group. Thread n of 128 has chunk
// n % 8 of groups n / 8, n / 8 + 16, ....
template <int D, int G>
struct Fusion {
    static constexpr int kStored = distr_stored_groups(D, G), kPasses = kStored / 16;
    static constexpr bool kSomeMissing = kStored * G != D;

    uint32_t channels[kPasses];  // of its groups, a byte each; D where there is none

    TA_DEVICE Fusion(const uint8_t* order, int thread) {
#pragma unroll
        for (int n = 0; n < kPasses; ++n) {
            channels[n] = 0;
#pragma unroll
            for (int c = 0; c < G; ++c) {
                const int at = (thread / 8 + 16 * n) * G + c;
                channels[n] |= uint32_t(at < D ? order[at] : D) << 8 * c;
            }
        }
    }
    // Rows of `to` are swizzled: chunk c of group g lies at c ^ (g & 7). The sums are rounded in pairs, then pairs of pairs.
    TA_DEVICE void operator()(const uint8_t* k, uint8_t* to, int thread) const {
        const int chunk = thread % 8, group = thread / 8;
        const auto load = [&](uint32_t w, int c) {
            const uint32_t channel = w >> 8 * c & 0xff;
            if (kSomeMissing && channel == D) return make_uint4(0, 0, 0, 0);
            return *reinterpret_cast<const uint4*>(k + channel * 128 + 16 * chunk);
        };
#pragma unroll
        for (int n = 0; n < kPasses; ++n) {
            uint4 sum = add_chunks(load(channels[n], 0), load(channels[n], 1));
            if (G == 3) sum = add_chunks(sum, load(channels[n], 2));
            if (G == 4) sum = add_chunks(sum, add_chunks(load(channels[n], 2), load(channels[n], 3)));
            *reinterpret_cast<uint4*>(to + (group + 16 * n) * 128 + 16 * (chunk ^ (group & 7))) = sum;
        }
    }
};

}  // namespace ta::cuda::distr
