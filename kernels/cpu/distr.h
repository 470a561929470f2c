// DistrAttention on a CPU, in fp32: the definition in docs/numerics.md, one operation for one rounding, the same bits for every
// instruction set. Compiled once for each (distr_impl.h); kernels.h picks one.
#pragma once

#include <cstdint>

#include "kernels/format/distr.h"
#include "kernels/format/types.h"

namespace ta::cpu {

inline constexpr int kDistrKeys = 64;  // of a tile

// A block's scores, sums and outputs; all arrays belong to the caller.
struct DistrBlock {
    int rows, d, group_size;
    const float* q;    // [rows, d]
    uint8_t* order;    // [d] channels sorted by hash
    float* sampled;    // [rows, groups]
    float *m, *l, *o;  // [rows], [rows], [rows, d]
};

// Options with defaults applied; units of log2 where `log2` is in the name.
struct DistrRules {
    float scale;       // in log2 units unless there is a softcap
    float softcap;     // 0: none
    float slope_log2;  // of this head's ALiBi
    bool causal;
    int64_t window, n_keys;
    int64_t first_position;  // of the block's first row among the keys
    ExpMode exp;
};

// 64 keys from `first` on; those that do not exist are zeros.
struct DistrTile {
    int64_t first;
    const float *k, *v;  // [d, 64], [64, d]
    float* fused;        // [groups, 64]
};

struct DistrKernel {
    // Finds the order of channels, samples the block's rows, and starts its sums.
    void (*start)(const DistrBlock& block);
    void (*attend)(const DistrBlock& block, const DistrRules& rules, const DistrTile& tile);
};

const DistrKernel& distr_kernel_scalar();
const DistrKernel& distr_kernel_avx2();
const DistrKernel& distr_kernel_avx512();

}  // namespace ta::cpu
