// Which blocks leave a tier first. A policy sees the sequences, how they were used, and the attention that their blocks got.
// The pool decides which blocks may leave at all, and where they go.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace ta {

enum class Eviction : uint8_t { kLru, kPriority, kAttention };

// A sequence whose blocks [first, end) may leave, if they are in the tier in which room is wanted.
struct BlockOwner {
    uint64_t last_used = 0;  // grows with every use
    int32_t priority = 0;    // the lower leaves first
    uint32_t first = 0, end = 0;
    bool in_step = false;  // it takes part in the step that wants room
};

// The last blocks of a step's own sequence are dropped only if no others are enough: the newest tokens get attention next, as
// in H2O and SnapKV.
inline constexpr uint32_t kRecentBlocks = 8;

// Attention that a block got: the sum of its weights, decayed to step `at`.
struct alignas(8) AttentionMass {  // its size: for less alignment clang calls libatomic
    float sum = 0.0f;
    uint32_t at = 0;
};

// Weights halve every half_life steps. Most blocks of a sequence last got attention in the same step, so the factor of the last
// step asked for is kept.
class Decay {
  public:
    explicit Decay(uint32_t half_life, uint32_t now) : per_step_(-1.0f / float(half_life)), now_(now), at_(now) {}
    uint32_t now() const { return now_; }
    float at_now(AttentionMass mass) {
        if (mass.at != at_) {
            at_ = mass.at;
            left_ = is_later(at_) ? 1.0f : std::exp2(float(now_ - at_) * per_step_);
        }
        return mass.sum * left_;
    }
    // The mass as a share of the most that a block can have that exists since step `since`: a weight of 1 in each step.
    float share(AttentionMass mass, uint32_t since) {
        if (since != since_ || most_ == 0.0f) {
            since_ = since;
            const float steps = is_later(since) ? 1.0f : float(now_ - since) + 1.0f;
            most_ = std::expm1(steps * per_step_ * kLn2) / std::expm1(per_step_ * kLn2);  // a geometric series
        }
        return at_now(mass) / most_;
    }

  private:
    static constexpr float kLn2 = 0.693147181f;
    // True if the step comes after `now_`: another plan may have begun it and left weights meanwhile. The count wraps around.
    bool is_later(uint32_t step) const { return step - now_ < 1 << 20; }

    const float per_step_;
    const uint32_t now_;
    uint32_t at_, since_ = 0;
    float left_ = 1.0f, most_ = 0.0f;
};

class EvictionView {
  public:
    virtual ~EvictionView() = default;
    virtual std::span<const BlockOwner> owners() const = 0;
    // Bytes that the tier gains when the block leaves it; 0 if the block stays.
    virtual uint64_t bytes(size_t owner, uint32_t block) const = 0;
    virtual AttentionMass mass(size_t owner, uint32_t block) const = 0;
    virtual uint32_t since(size_t owner, uint32_t block) const = 0;  // the first step in which it got attention
    virtual uint32_t now() const = 0;                                // the present step
};

struct Victim {
    uint32_t owner, block;
    bool operator==(const Victim&) const = default;
};

// What happens to the victims. Demoted blocks are promoted again: victims are spread over a sequence, so that reading them from
// below is spread over all tokens. Dropped blocks are lost: a sequence loses its oldest first.
enum class Loss : uint8_t { kMoved, kDropped };

// Without state: the same view gives the same victims.
class EvictionPolicy {
  public:
    virtual ~EvictionPolicy() = default;
    // Chooses blocks of at least so many bytes, or all that may leave; the coldest come first.
    virtual std::vector<Victim> choose(const EvictionView& view, uint64_t bytes, Loss loss) const = 0;
};

std::unique_ptr<EvictionPolicy> make_lru_policy();
// Sequences of lower priority first, among equals the one that was not used for longest.
std::unique_ptr<EvictionPolicy> make_priority_policy();
// Blocks with the least attention since it began, of whatever sequence. `half_life`: steps in which a weight halves.
std::unique_ptr<EvictionPolicy> make_attention_policy(uint32_t half_life);

}  // namespace ta
