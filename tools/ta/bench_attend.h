// ta bench attend: how long one layer's attention over a compressed cache takes, and how far it is from exact attention.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {

// The names of the parts in the order in which they run.
std::vector<std::string> bench_attend_parts();

struct BenchAttendOptions {
    std::vector<std::string> parts;        // empty: all
    std::vector<int64_t> tokens = {8192};  // per sequence, including those of the step
    std::vector<uint32_t> bits = {8, 4, 2};
    uint32_t batch = 1, q_heads = 32, kv_heads = 8, head_dim = 128;
    int64_t chunk = 512;  // query tokens of a prefill step
    bool batch_invariant = false;
    int repeats = 15;
};

// Calls `row` for each result as it comes: an object with a "part". Throws Failure, also if a result is farther from exact
// attention than its bits explain.
void bench_attend(Machine& machine, const BenchAttendOptions& options,
                  const std::function<void(const nlohmann::json& row)>& row);

}  // namespace ta::tools
