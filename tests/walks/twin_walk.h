// A random walk of two contexts that make the same calls: prompts, chunks over a prefix, decode, forks, truncates. They must store
// the same to the bit. Attention of the one under test, and of the other, a CPU's, is judged by a replay (replay.h) of the pages and
// codes that the CPU reads.
//
// TA_WALK_SECONDS is the time of all walks together, TA_WALK_SEED (1) where they begin; TA_WALK_VERBOSE=1 prints each setting.
// A failure prints the seed, the settings and the call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/handles.h"
#include "walks/replay.h"

namespace ta::testing {

// A host tensor where the context under test reads and writes it.
class Placed {
  public:
    virtual ~Placed() = default;
    virtual const ta_tensor* view() const = 0;
    virtual void fetch() const = 0;  // what was written, into the host tensor
};
class PlacedFloats {
  public:
    virtual ~PlacedFloats() = default;
    virtual float* data() const = 0;
    virtual void fetch() const = 0;
};

// The side under test.
class Device {
  public:
    virtual ~Device() = default;
    virtual const Context& context() const = 0;
    virtual std::unique_ptr<Placed> place(Tensor& host) = 0;
    virtual std::unique_ptr<PlacedFloats> place(std::vector<float>& host) = 0;
    virtual void start(const Plan&) {}  // a plan was made
    virtual void wait() {}              // for what was enqueued
    virtual KernelOf kernel_of() const = 0;
    virtual bool is_exact() const { return false; }  // results are the CPU's to the bit
    // For tests of this test: what came back from an attend may be spoilt.
    virtual void spoil(Tensor&, std::vector<float>&) {}
};

struct WalkLimits {
    int steps = 10;
    int64_t most_tokens = 2500;  // of a sequence
    double most_products = 4e8;  // of a call: query heads x queries x keys x channels
    double seconds = 20.0;       // unless TA_WALK_SECONDS is set
    uint64_t budget_bytes = uint64_t{96} << 20;
};

// One walk after the other until time is up. Returns what was wrong, or nothing. `cpu` is a make_recorded_context().
std::string run_walks(Device& device, const Context& cpu, const WalkLimits& limits);
std::string run_walk(Device& device, const Context& cpu, const WalkLimits& limits, uint64_t seed);

}  // namespace ta::testing
