// ta bench tiers: how fast blocks move between tiers, and what decode and chunks of prompts cost while they are away.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {

// The names of the parts in the order in which they run.
std::vector<std::string> bench_tiers_parts();

struct BenchTiersOptions {
    std::vector<std::string> parts;             // empty: all
    uint64_t memory_bytes = uint64_t{1} << 30;  // the most that a case may take in each tier
    uint64_t disk_bytes = uint64_t{1} << 30;
    std::string disk_folder;  // empty: TMPDIR or /tmp
    uint32_t host_node = 0;   // 1 + NUMA node
    int repeats = 15;
};

// Calls `row` for each result as it comes: an object with a "part". Throws Failure.
void bench_tiers(Machine& machine, const BenchTiersOptions& options, const std::function<void(const nlohmann::json& row)>& row);

}  // namespace ta::tools
