// ta bench tiers: how fast blocks move between tiers, and what decode and chunks of prompts cost while they are away.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {

// The names of the parts in the order that they run in, as text: "moves, disk, ...".
std::string bench_tiers_parts();

struct BenchTiersOptions {
    std::vector<std::string> parts;             // empty: all
    uint64_t memory_bytes = uint64_t{1} << 30;  // that a case may take, in each tier
    uint64_t disk_bytes = uint64_t{1} << 30;
    std::string disk_folder;  // empty: TMPDIR or /tmp
    uint32_t host_node = 0;   // 1 + NUMA node
    int repeats = 15;
};

// Rows of results as they come, each an object with a "part"; throws Failure.
void bench_tiers(Machine& machine, const BenchTiersOptions& options, const std::function<void(const nlohmann::json& row)>& row);

}  // namespace ta::tools
