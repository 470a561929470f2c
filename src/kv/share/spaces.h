// Namespaces that ranks of a group share: which rank has joined one, what each of them has published, and where a block is
// nearest. All of it are hints, which are never trusted: blocks are checked when they come. docs/internals/sharing.md has the
// protocol.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/kv/pool.h"
#include "tiering/share/group.h"
#include "tiering/share/lane.h"

namespace ta::share {

// Of a namespace in its group: a hash under its salt, that tells nothing of it.
using SpaceName = std::array<uint8_t, 16>;

struct PrefixPlace {
    enum class Answer : int32_t { kUnknown = 0, kNo, kYes };
    Answer answer = Answer::kUnknown;
    uint32_t rank = 0;
    TierKind tier = TierKind::kDevice;
};

class SharedSpaces final : public Group::Service {
  public:
    explicit SharedSpaces(Group& group) : group_(group) {}
    ~SharedSpaces() override { stop(); }
    // After the group's stop(), and before other services go: the teller may end the group.
    void stop();

    // TA_E_INVALID: this rank has joined it already; TA_E_LIMIT: no thread.
    Status join(const std::shared_ptr<Pool>& pool, Tenant space);
    // TA_E_STATE: it has not joined.
    Status leave(Pool& pool, Tenant space);
    // [n] where the block of each key is nearest. Waits for ranks that have not told yet, so many nanoseconds, < 0: no limit.
    Result<std::vector<PrefixPlace>> lookup(const Pool& pool, Tenant space, std::span<const uint8_t> keys,
                                            int64_t nanoseconds) const;

    // TA_E_STATE: it has not joined.
    Result<SpaceName> name_of(const Pool& pool, Tenant space) const;
    struct Joined {
        std::shared_ptr<Pool> pool;
        Tenant space;
    };
    // The pool and namespace that this rank has under the name, for a peer that has proved that it knows the salt.
    std::optional<Joined> find(const SpaceName& name, uint32_t peer) const;
    // The hashed keys [n, 32] of blocks that this rank has or others may have, up to the first that is nowhere.
    Result<std::vector<BlockKey>> hash_findable(const Pool& pool, Tenant space, std::span<const uint8_t> keys) const;
    // Blocks to ask one rank for.
    struct Leg {
        uint32_t rank;
        std::vector<uint64_t> indices;  // of the keys, ascending
    };
    // From the first block on that is missing, as many as are nowhere nearer than at that rank. `in_vain`: [ranks] not to be
    // asked. Nothing: no rank is known to have the first.
    std::optional<Leg> nearest(const SpaceName& name, std::span<const BlockKey> keys, std::span<const BlockPtr> present,
                               const std::vector<bool>& in_vain) const;

    bool takes(MessageType type) const override { return type >= MessageType::kSpaceJoin && type <= MessageType::kHints; }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    using Proof = BlockKey;
    struct HashKey {
        size_t operator()(const BlockKey& key) const {
            size_t hash;
            std::memcpy(&hash, key.data() + sizeof hash, sizeof hash);  // its first bytes are the same in all of a namespace
            return hash;
        }
    };
    // Another rank in a namespace.
    struct Peer {
        enum class State : uint8_t { kAsked, kAbsent, kProven };
        State state = State::kAsked;
        bool complete = false;     // its table is there
        bool partial = false;      // but for what was too much
        bool wants_table = false;  // of this rank
        bool told = false;         // this rank's table; events follow
        std::unordered_map<BlockKey, TierKind, HashKey> table;
    };
    struct Space {
        SpaceName name;
        std::weak_ptr<Pool> pool;
        const Pool* which;  // only compared
        Tenant id;
        std::shared_ptr<PrefixFeed> feed;
        std::vector<Proof> own, expected;  // [ranks] for each peer, of each peer
        std::vector<Peer> peers;           // [ranks], guarded by mutex_
    };
    using Ptr = std::shared_ptr<Space>;

    static constexpr uint8_t kNowhere = kTiers + 1,
                             kMayHave = kTiers;  // beside tiers: nearness() of who lacks it, or has not told
    static uint8_t nearness(const Peer& peer, const BlockKey& key);
    Status look_up(const Pool& pool, Tenant space, std::span<const uint8_t> keys, uint64_t first, Time until,
                   std::vector<BlockKey>& hashed, std::span<PrefixPlace> places) const;
    Ptr find_locked(const SpaceName& name) const;
    Ptr find_locked(const Pool& pool, Tenant space) const;
    Status start_teller();
    void ring();
    void run();
    bool tell(const Ptr& space);
    void send_hints(const Space& space, std::span<const uint32_t> to, std::span<const PrefixEvent> events, bool all);
    void end_space(const Ptr& space);
    void leave_if_over(const SpaceName& name);
    void send_all(MessageType type, const SpaceName& name);
    Status on_join(const Message& m);
    Status on_hints(const Message& m);

    Group& group_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;  // a rank has told
    std::map<SpaceName, Ptr> spaces_;
    std::atomic<bool> ended_{false};

    // Tells other ranks what becomes of this rank's entries.
    std::mutex bell_mutex_;
    std::condition_variable bell_;
    bool rung_ = false, stopping_ = false;
    std::thread teller_;
};

}  // namespace ta::share
