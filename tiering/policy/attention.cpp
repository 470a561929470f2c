#include <bit>

#include "tiering/policy/spread.h"

namespace ta {
namespace {

class Attention final : public EvictionPolicy {
  public:
    explicit Attention(uint32_t half_life) : half_life_(half_life) {}

    std::vector<Victim> choose(const EvictionView& view, uint64_t bytes, Loss loss) const override {
        struct Candidate {
            // The share of attention in the upper half; a float's bits order like its value. Below it the last use, so that
            // blocks without attention leave as under LRU. The top bit: a recent block that would be dropped.
            uint64_t heat;
            uint32_t owner, key;
            bool operator<(const Candidate& other) const {
                return heat != other.heat ? heat < other.heat : owner != other.owner ? owner < other.owner : key < other.key;
            }
        };
        const std::span<const BlockOwner> owners = view.owners();
        Decay decay(half_life_, view.now());
        // The coldest blocks so far, and some more than are wanted. In a large pool few blocks get in here.
        std::vector<Candidate> coldest;
        uint64_t least = UINT64_MAX, limit = UINT64_MAX;
        size_t room = 0;
        const auto wanted = [&] { return size_t(std::min<uint64_t>(coldest.size(), bytes / least + 1)); };
        for (size_t owner = 0; owner < owners.size(); ++owner) {
            for (uint32_t b = owners[owner].first; b < owners[owner].end; ++b) {
                const uint64_t size = view.bytes(owner, b);
                if (size == 0) continue;
                least = std::min(least, size);
                const float share = decay.share(view.mass(owner, b), view.since(owner, b));
                const bool last = loss == Loss::kDropped && owners[owner].in_step && b + kRecentBlocks >= owners[owner].end;
                const uint64_t heat =
                    uint64_t{std::bit_cast<uint32_t>(share) | uint32_t(last) << 31} << 32 | uint32_t(owners[owner].last_used);
                if (heat > limit) continue;
                if (coldest.size() == room) {
                    const size_t n = wanted();
                    if (n < coldest.size() / 2) {
                        std::nth_element(coldest.begin(), coldest.begin() + ptrdiff_t(n), coldest.end());
                        limit = coldest[n].heat;
                        coldest.resize(n);
                    } else {
                        room = std::max<size_t>(1024, 2 * room);
                        coldest.reserve(room);
                    }
                }
                coldest.push_back({heat, uint32_t(owner), leave_key(b, loss)});
            }
        }
        const auto end = coldest.begin() + ptrdiff_t(wanted());
        std::nth_element(coldest.begin(), end, coldest.end());
        std::sort(coldest.begin(), end);
        std::vector<Victim> victims;
        uint64_t found = 0;
        for (auto c = coldest.begin(); c < end && found < bytes; ++c) {
            victims.push_back({c->owner, block_of_key(c->key, loss)});
            found += view.bytes(c->owner, victims.back().block);
        }
        return victims;
    }

  private:
    const uint32_t half_life_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> make_attention_policy(uint32_t half_life) {
    return std::make_unique<Attention>(half_life);
}

}  // namespace ta
