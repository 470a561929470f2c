// Scripts that run on a pool while something fails. Each is also run on a pool without tiers, which gives the expected results.
#pragma once

#include <span>

#include "faults/world.h"

namespace ta::testing {

struct Scenario {
    const char* name;
    PoolShape shape;
    void (*prepare)(World&);  // without faults
    void (*script)(World&);
};

std::span<const Scenario> scenarios();

}  // namespace ta::testing
