// Whether O and LSE of one sequence in a call are what they may be.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "turboattention.h"

namespace ta::testing {

// Everything that attention of one sequence depends on. `k` and `v` are what the call reads, [n_keys, kv_heads, head_dim].
struct JudgedCall {
    int64_t n_query = 0, n_keys = 0, kv_heads = 1, group = 1, head_dim = 64;
    bool causal = true;
    int64_t window = 0;
    double scale = 0.0, softcap = 0.0;
    const float *slopes = nullptr, *sinks = nullptr;  // [q_heads] or nullptr
    bool sas = false;
    bool by_prefill_kernel = false;
    bool with_lse = false;
    bool rotated = false;
    double p_levels = 65535.0;        // of the decode kernel
    bool v_has_token_scales = false;  // all of them; else pages may have one
    double v_most = 0.0;              // under universal open scales: of all V that the sequence ever had
    ta_dtype out_type = TA_DTYPE_F32;
    const float *k = nullptr, *v = nullptr;
    const float* q = nullptr;                                      // [n_query, q_heads, head_dim]
    const float* k_offset = nullptr;                               // [kv_heads, head_dim] or nullptr
    std::function<std::vector<float>(const float* q)> read_codes;  // queries like q as their INT8 codes say them
    // [n_query, q_heads, head_dim]: of the context under test; of a CPU with the same settings, or with P of 8 bits beside the
    // prefill kernel; of a CPU with P of 16 bits, which stands for the truth.
    const float *got = nullptr, *beside = nullptr, *truth = nullptr;
    const float *got_lse = nullptr, *truth_lse = nullptr;  // [n_query, q_heads]
};

// The largest shares of their bounds that were seen, and what only held by what is known of single rows.
struct Shares {
    double o_decode = 0.0, o_prefill = 0.0, lse_decode = 0.0, lse_prefill = 0.0, exact = 0.0;
    uint64_t o_sets = 0, o_excused = 0, lse_rows = 0, lse_excused = 0, exact_rows = 0, exact_excused = 0;
};

// What is wrong, or nothing.
std::string judge(const JudgedCall& call, Shares& shares);

// The CPU's truth beside attention in float64. For calls whose k and v are known exactly.
std::string judge_truth(const JudgedCall& call, Shares& shares);

}  // namespace ta::testing
