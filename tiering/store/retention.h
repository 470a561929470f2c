// How long callers want to keep blocks: lower priorities leave first, whatever the policy chooses.
#pragma once

#include <bit>
#include <chrono>
#include <cstdint>

namespace ta {

inline constexpr uint32_t kMostPriority = 63, kUsualPriority = 32;

// Milliseconds of the steady clock.
inline uint64_t retention_now() {
    using namespace std::chrono;
    return uint64_t(duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count());
}

// A priority, and when it ends. Before one is given, and after its end, a block has the usual priority.
class Retention {
  public:
    static constexpr uint64_t kForEver = (uint64_t{1} << 56) - 1;

    constexpr Retention() = default;
    constexpr Retention(uint32_t priority, uint64_t until) : packed_(uint64_t{priority} << 56 | until) {}

    bool given() const { return packed_ != 0; }
    uint32_t priority(uint64_t now) const { return given() && now < until() ? uint32_t(packed_ >> 56) : kUsualPriority; }
    uint64_t until() const { return packed_ & kForEver; }

  private:
    uint64_t packed_ = 0;
};

// The blocks of one priority: one pass of a choice looks at these.
struct RetentionLevel {
    uint32_t priority = kUsualPriority;
    uint64_t now = 0;
    bool all = true;  // all blocks have this priority: none was ever given another
    bool has(Retention r) const { return all || r.priority(now) == priority; }
};

// Calls `pass` for each priority that blocks may have, the lowest first, until it returns true: it has found enough. `given`: a
// bit for each priority that was ever given to a block.
template <class Pass>
void for_each_level(uint64_t given, Pass pass) {
    given |= uint64_t{1} << kUsualPriority;
    const bool all = std::has_single_bit(given);
    for (const uint64_t now = all ? 0 : retention_now(); given != 0; given &= given - 1) {
        if (pass(RetentionLevel{uint32_t(std::countr_zero(given)), now, all})) return;
    }
}

}  // namespace ta
