// A tier that passes everything on to another; tests change what they need.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tiering/tier.h"

namespace ta::testing {

class WrappedTier : public Tier {
  public:
    explicit WrappedTier(std::unique_ptr<Tier> tier) : tier_(std::move(tier)) {}
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override { return tier_->acquire(wanted); }
    void release(std::span<const Slot> slots) override { tier_->release(slots); }
    uint8_t* address(Slot slot) const override { return tier_->address(slot); }
    TierStats stats() const override { return tier_->stats(); }
    TierHealth health() const override { return tier_->health(); }
    std::span<const std::string> degraded() const override { return tier_->degraded(); }

  private:
    const std::unique_ptr<Tier> tier_;
};

}  // namespace ta::testing
