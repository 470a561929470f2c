// Yardstick of the integer prefill: tiled attention with an online softmax in FP32, for AVX-512. Same structure,
// same exponential and the same reductions as kernels/cpu/avx512/prefill.cpp, and a float K and V as dense arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ta::bench {

// Attention of some query rows of one kv head over keys [0, n_keys).
struct FloatAttendTask {
    int head_dim;    // 64, 128 or 256
    const float* k;  // [n_keys, head_dim], 64-byte aligned
    const float* v;  // [n_keys, head_dim], 64-byte aligned
    int64_t n_keys;  // a multiple of 64

    int rows;                // a multiple of 12
    const float* q;          // [rows, head_dim], scaled by softmax scale * log2 e
    const int64_t* key_end;  // [rows] a row sees keys [0, key_end)

    float* o;            // [rows, head_dim] accumulators, not yet divided by l; read and written; 64-byte aligned
    float* m;            // [rows] running maximum in log2 units, -inf at first
    float* l;            // [rows] running sum
    uint8_t* workspace;  // float_attend_workspace_bytes(), 64-byte aligned
};

constexpr int kFloatBlockRows = 96;  // rows between the two products
constexpr size_t float_attend_workspace_bytes(int head_dim) {
    return size_t(64) * head_dim * sizeof(float) + size_t(kFloatBlockRows) * 64 * sizeof(float) +
           kFloatBlockRows * sizeof(float);
}

void float_attend(const FloatAttendTask& task);

// The two products alone, on data of a task's shape, without exp, packing or masks: the rate that float_attend approaches.
void float_attend_products(const FloatAttendTask& task);

}  // namespace ta::bench
