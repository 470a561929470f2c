// ta bench share: how fast sequences go from rank to rank of a group, and what it gains to spread one over its ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {

// The names of the parts in the order that they run in, as text.
std::string bench_share_parts();

struct BenchShareOptions {
    std::vector<std::string> parts;  // empty: all
    ta_group_kind kind = TA_GROUP_LOCAL;
    bool hosts_apart = false;                   // of TA_GROUP_NCCL
    uint64_t memory_bytes = uint64_t{4} << 30;  // that a case may take on each rank
    int repeats = 15;
};

// One rank for each machine, all in this process. Rows of results as they come, each an object with a "part"; throws Failure.
void bench_share(const std::vector<std::unique_ptr<Machine>>& machines, const BenchShareOptions& options,
                 const std::function<void(const nlohmann::json& row)>& row);

}  // namespace ta::tools
