// Which blocks leave a tier first. A policy sees sequences and how they were used. Which blocks may leave at all, and where they
// go, is the pool's to say.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace ta {

enum class Eviction : uint8_t { kLru, kPriority };

// A sequence whose blocks [first, end) may leave, as far as they are where room is wanted.
struct BlockOwner {
    uint64_t last_used = 0;  // grows with every use by a plan
    int32_t priority = 0;    // the lower leaves first
    uint32_t first = 0, end = 0;
};

class EvictionView {
  public:
    virtual ~EvictionView() = default;
    virtual std::span<const BlockOwner> owners() const = 0;
    // What a tier gains when the block leaves it; 0 where the block stays.
    virtual uint64_t bytes(size_t owner, uint32_t block) const = 0;
};

struct Victim {
    uint32_t owner, block;
    bool operator==(const Victim&) const = default;
};

// Without state: the same view gives the same victims.
class EvictionPolicy {
  public:
    virtual ~EvictionPolicy() = default;
    // Blocks of at least so many bytes, or all that may leave, the coldest first.
    virtual std::vector<Victim> choose(const EvictionView& view, uint64_t bytes) const = 0;
};

std::unique_ptr<EvictionPolicy> make_lru_policy();
// Sequences of lower priority first, among equals the one that was not used for longest.
std::unique_ptr<EvictionPolicy> make_priority_policy();

}  // namespace ta
