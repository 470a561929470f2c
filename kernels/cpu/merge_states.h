// Merging partial attention results on the CPU, by the arithmetic of kernels/format/merge_states.h: a loop over channels that the
// compiler vectorises, compiled once for each instruction set.
#pragma once

#include "kernels/cpu/page_codec.h"
#include "kernels/format/merge_states.h"

namespace ta::cpu {

// Merges rows [first, last) of the tokens * heads.
using MergeFn = void (*)(const MergeArgs& args, int64_t first, int64_t last);

void merge_scalar(const MergeArgs& args, int64_t first, int64_t last);
void merge_avx2(const MergeArgs& args, int64_t first, int64_t last);
void merge_avx512(const MergeArgs& args, int64_t first, int64_t last);

// Their body.
TA_HD inline void merge_rows(const MergeArgs& a, const PageCodec& codec, int64_t first, int64_t last) {
    alignas(64) float sum[kMaxMergeHeadDim], wide[kMaxMergeHeadDim];
    float weight[kMaxMergeParts];
    for (int64_t row = first; row < last; ++row) {
        const int64_t token = row / a.heads, head = row % a.heads;
        float m = -std::numeric_limits<float>::infinity(), total = 0.0f;
        for (int i = 0; i < a.n; ++i) m = larger_lse(m, *a.parts[i].lse_at(token, head));
        for (int i = 0; i < a.n; ++i) {
            weight[i] = merge_weight(*a.parts[i].lse_at(token, head), m);
            total += weight[i];
        }
        const MergeEnd end = end_merge(m, total);
        for (int c = 0; c < a.head_dim; ++c) sum[c] = 0.0f;
        for (int i = 0; i < a.n; ++i) {
            if (weight[i] == 0.0f) continue;
            const MergeState& part = a.parts[i];
            const float w = weight[i] * end.factor;
            const void* o = part.row(token, head);
            if (part.dtype != DType::kF32) codec.to_float(o, part.dtype, a.head_dim, false, wide);
            const float* __restrict x = part.dtype == DType::kF32 ? static_cast<const float*>(o) : wide;
            for (int c = 0; c < a.head_dim; ++c) sum[c] = std::fma(w, x[c], sum[c]);
        }
        codec.from_float(sum, a.head_dim, a.out.dtype, a.out.row(token, head));
        if (a.out.lse) *a.out.lse_at(token, head) = end.lse;
    }
}

}  // namespace ta::cpu
