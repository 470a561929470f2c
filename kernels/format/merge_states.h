// Partial attention results (O, LSE) of the same queries over different keys, merged into the result over all of them: for CPUs
// and GPUs alike, to the bit. Per (token, head) row, with m = the largest LSE:
//
//  1. w_i = exp2_exact(fl(fl(m - lse_i) * log2 e)), 0 where lse_i = -inf. s = the sum of w_i in the order of the list.
//  2. f = fl(1 / s), and O_c = fma(fl(w_i * f), O_ic, O_c) in that order, from 0. A part with w_i = 0 is left out: its O is not
//     looked at. It may be NaN.
//  3. lse = fl(m + log_exact(s)). A row without parts, all of whose LSEs are -inf: O = 0, lse = -inf.
//
// An LSE of NaN or +inf makes the row NaN, O and lse. Weights sum to 1, so no finite O overflows on the way. One part alone comes
// out as it went in (-0 as 0). FlashInfer calls this merging of attention states; it is the last step of FlashAttention's
// split-KV.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/format/exponential.h"
#include "kernels/format/types.h"

namespace ta {

inline constexpr int kMaxMergeParts = 64;  // so many fit the arguments of a kernel launch
inline constexpr int kMaxMergeHeadDim = 1024;

// [tokens, heads] rows: O of head_dim contiguous elements, and LSE. Strides in elements.
struct MergeState {
    void* o;
    int64_t stride_token, stride_head;
    DType dtype;
    float* lse;  // of the result: may be nullptr
    int64_t lse_stride_token, lse_stride_head;

    TA_HD uint8_t* row(int64_t token, int64_t head) const {
        return static_cast<uint8_t*>(o) + (token * stride_token + head * stride_head) * int64_t(dtype_bytes(dtype));
    }
    TA_HD float* lse_at(int64_t token, int64_t head) const { return lse + token * lse_stride_token + head * lse_stride_head; }
};

// The result may be one of the parts, in the same place with the same strides; else it overlaps none.
struct MergeArgs {
    int32_t n, head_dim;
    int64_t tokens, heads;
    MergeState out;
    MergeState parts[kMaxMergeParts];  // only read
};

TA_HD inline float larger_lse(float m, float lse) {
    return lse > m ? lse : m;
}

TA_HD inline float merge_weight(float lse, float m) {
    constexpr float kLog2e = 1.44269504f;
    if (!(lse < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
    return lse > -std::numeric_limits<float>::infinity() ? exp2_neg_exact(rounded_product(m - lse, kLog2e)) : 0.0f;
}

struct MergeEnd {
    float factor, lse;  // of the weights; of the row
};
TA_HD inline MergeEnd end_merge(float m, float sum) {
    if (sum == 0.0f) return {0.0f, -std::numeric_limits<float>::infinity()};
    return {1.0f / sum, sum > 0.0f ? m + log_exact(sum) : sum};
}

}  // namespace ta
