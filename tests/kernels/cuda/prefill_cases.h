// The calls on which the test of the CUDA prefill kernels tries them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "support/data.h"
#include "tests/kernels/cuda/prefill_support.h"

namespace ta::cuda::testing {

using ta::testing::DataKind;

struct Sequence {
    int32_t n_keys, n_query;
};

struct Case {
    std::string name;
    std::vector<Sequence> sequences{{1000, 1000}};
    Pages pages = Pages::kToken;
    int low = 0;  // percent of the full pages that have fallen to 2 bits instead
    int d = 128, kv_heads = 2, group = 4;
    int k_bits = 4, v_bits = 4;  // kCodes and kAny: of heads in turn
    DataKind data = DataKind::kNormal;
    bool causal = true, rotate = true, k_offset = false, alibi = false, sinks = false;
    int head_gap = 0, row_gap = 0;  // elements between heads; besides, between rows
    int window = 0;
    float softcap = 0.0f, q_factor = 1.0f;
    ExpMode exp = ExpMode::kPoly;
    int p_levels = 255;
    int ranks = 1;  // that have the blocks in turn: the kernel is to read one's alone
    DType q_type = DType::kF32, out_type = DType::kF32;
    double lse_tolerance = 5e-3;  // half a step of the grid of scores is 3.1e-3, what a factor rounds comes on top
    uint64_t seed = 0xcbf29ce484222325;
};

// `quick`: short ones, which compute-sanitizer gets through.
std::vector<Case> all_cases(bool quick);

}  // namespace ta::cuda::testing
