// ta bench share: how fast sequences move between ranks of a group, and what is gained by spreading one over the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {

// The names of the parts in the order in which they run.
std::vector<std::string> bench_share_parts();

struct BenchShareOptions {
    std::vector<std::string> parts;  // empty: all
    ta_group_kind kind = TA_GROUP_LOCAL;
    bool hosts_apart = false;                   // for TA_GROUP_NCCL
    uint64_t memory_bytes = uint64_t{4} << 30;  // the most that a case may take on each rank
    int repeats = 15;
};

// One rank for each machine, all in this process. Calls `row` for each result as it comes: an object with a "part". Throws
// Failure.
void bench_share(const std::vector<std::unique_ptr<Machine>>& machines, const BenchShareOptions& options,
                 const std::function<void(const nlohmann::json& row)>& row);

}  // namespace ta::tools
