#include "tiering/policy/spread.h"

namespace ta {
namespace {

class Priority final : public EvictionPolicy {
  public:
    std::vector<Victim> choose(const EvictionView& view, uint64_t bytes, Loss loss) const override {
        return choose_owner_by_owner(view, bytes, loss, [](const BlockOwner& a, const BlockOwner& b) {
            return a.priority != b.priority ? a.priority < b.priority : a.last_used < b.last_used;
        });
    }
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_priority_policy() {
    return std::make_unique<Priority>();
}

}  // namespace ta
