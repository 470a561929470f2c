// Namespaces that ranks of a group share: which rank has joined one, what each of them has published, and where a block is
// nearest. All of this is hints: blocks are checked when they come. docs/internals/sharing.md has the protocol.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/kv/pool.h"
#include "tiering/share/group.h"
#include "tiering/share/lane.h"

namespace ta::share {

// Names a namespace in its group: a hash under its salt, which reveals nothing of the salt.
using SpaceName = std::array<uint8_t, 16>;

inline constexpr size_t kMostAsked = 16384;  // blocks that a fetch asks one rank for at a time

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
    // After the group's stop(), and before other services are destroyed: the teller may end the group.
    void stop();

    // TA_E_INVALID: this rank has joined the namespace already. TA_E_LIMIT: no thread.
    Status join(const std::shared_ptr<Pool>& pool, Tenant space);
    // TA_E_STATE: this rank has not joined the namespace.
    Status leave(Pool& pool, Tenant space);
    // [n]: where the block of each key is nearest. Waits at most so many nanoseconds for ranks that have not told yet; < 0: no
    // limit.
    Result<std::vector<PrefixPlace>> lookup(const Pool& pool, Tenant space, std::span<const uint8_t> keys,
                                            int64_t nanoseconds) const;

    // TA_E_STATE: this rank has not joined the namespace.
    Result<SpaceName> name_of(const Pool& pool, Tenant space) const;
    struct Joined {
        std::shared_ptr<Pool> pool;
        Tenant space;
    };
    // The pool and namespace that this rank has joined under the name, if the peer has proved that it knows the salt.
    std::optional<Joined> find(const SpaceName& name, uint32_t peer) const;
    // The hashed keys [n, 32], up to the first block that neither this rank has nor others may have.
    Result<std::vector<BlockKey>> hash_findable(const Pool& pool, Tenant space, std::span<const uint8_t> keys) const;
    // Blocks to ask one rank for.
    struct Leg {
        uint32_t rank;
        std::vector<uint64_t> indices;  // of the keys, ascending
    };
    // What a rank has answered that it does not have.
    struct Lacked {
        std::set<uint64_t> indices;  // of the keys
        uint32_t empty_answers = 0;  // after several of these the rank is asked no more
    };
    // The longest run of missing blocks, from the first one on, for which one rank is the nearest. `lacked`: [ranks]. Nothing:
    // no rank is known to have the first.
    std::optional<Leg> nearest(const SpaceName& name, std::span<const BlockKey> keys, std::span<const BlockPtr> present,
                               std::span<const Lacked> lacked) const;

    bool takes(MessageType type) const override { return type >= MessageType::kSpaceJoin && type <= MessageType::kHints; }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    using Proof = BlockKey;
    struct HashKey {
        size_t operator()(const BlockKey& key) const {
            size_t hash;
            std::memcpy(&hash, key.data() + sizeof hash, sizeof hash);  // skips the tag, which all keys of a namespace share
            return hash;
        }
    };
    // Another rank in a namespace.
    struct Peer {
        enum class State : uint8_t { kAsked, kAbsent, kProven };
        State state = State::kAsked;
        bool complete = false;     // all of its table has come
        bool partial = false;      // its table lacks entries that were too many
        bool wants_table = false;  // it wants this rank's table
        bool told = false;         // it has this rank's table, and gets events
        std::unordered_map<BlockKey, TierKind, HashKey> table;
    };
    struct Space {
        SpaceName name;
        std::weak_ptr<Pool> pool;
        const Pool* which;  // only compared, never followed
        Tenant id;
        std::shared_ptr<PrefixFeed> feed;
        std::vector<Proof> own, expected;  // [ranks]: proofs for each peer, and those expected from each
        std::vector<Peer> peers;           // [ranks], guarded by mutex_
    };
    using Ptr = std::shared_ptr<Space>;

    static constexpr uint8_t kNowhere = kTiers + 1,
                             kMayHave = kTiers;  // beside tiers, results of nearness(): the peer lacks the block, or has not
                                                 // told
    static uint8_t nearness(const Peer& peer, const BlockKey& key);
    Status look_up(const Pool& pool, Tenant space, std::span<const uint8_t> keys, uint64_t first, Time until,
                   std::vector<BlockKey>& hashed, std::span<PrefixPlace> places) const;
    Ptr find_locked(const SpaceName& name) const;
    Ptr find_locked(const Pool& pool, Tenant space) const;
    Status start_teller();
    void ring();
    void run();
    bool tell(const Ptr& space);
    void send_hints(const Ptr& space, std::span<const uint32_t> to, std::span<const PrefixEvent> events, bool all);
    void end_space(const Ptr& space);
    void leave_if_over(const SpaceName& name);
    void retire(const Ptr& space) noexcept;
    void tell_left();
    Status not_joined() const;
    Status on_join(const Message& m);
    Status on_hints(const Message& m);

    Group& group_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;  // notified when a rank has told
    std::map<SpaceName, Ptr> spaces_;
    std::map<SpaceName, Ptr> left_;  // left by this rank; not all other ranks know yet
    std::atomic<bool> ended_{false};

    // The teller tells other ranks of changes of this rank's entries.
    std::mutex bell_mutex_;
    std::condition_variable bell_;
    bool rung_ = false, stopping_ = false;
    std::thread teller_;
};

}  // namespace ta::share
