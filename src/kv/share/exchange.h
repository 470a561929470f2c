// Steps over partitioned sequences: ranks find out that they are in the same step, and exchange their parts of its results.
// docs/internals/sharing.md has the protocol.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tiering/share/group.h"

namespace ta::share {

class Exchange final : public Group::Service {
  public:
    // One call of a step: the values for other ranks, and the number of values wanted from them.
    struct Call {
        uint64_t number;     // of the call in its step, from 1
        uint64_t arguments;  // hash of the arguments that must be the same on all ranks
        // [ranks]: values for each rank, in order. The own entry is not used. Entries may be empty.
        std::vector<std::vector<float>> given;
        size_t wanted;  // values from each other rank; 0: none
    };
    // [ranks]: the values from each rank; the own entry is empty.
    using Parts = std::vector<std::vector<float>>;

    explicit Exchange(Group& group)
        : group_(group),
          ranks_(group.settings().ranks),
          rank_(group.settings().rank),
          begun_(group.settings().ranks),
          kept_(begun_.size()) {}
    // Waits for calls that use the group. After the group's stop(); the group may go afterwards.
    void stop();

    uint32_t ranks() const { return ranks_; }
    uint32_t rank() const { return rank_; }
    const Context& context() const { return context_; }
    std::chrono::milliseconds patience() const { return patience_; }  // how long calls wait for other ranks

    // Gives a tag to a sequence of this rank. Returns the tag's history: a hash of how the sequences went that had the tag here
    // before this one. TA_E_INVALID: another sequence has the tag.
    Result<uint64_t> add_tag(uint64_t tag);
    // Takes the tag from its sequence. `last_met`: identity of the last step in which the ranks met, else add_tag()'s result.
    // `given_up`: steps without queries since then that this rank has begun and not ended.
    void remove_tag(uint64_t tag, uint64_t last_met, uint64_t given_up) noexcept;

    // Like the transport's. Errors: the group has ended.
    Result<bool> all_reach();
    Result<bool> all_cpus();
    Result<Transport::Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes);

    // Begins a step of this rank; each channel has one at a time. `arguments`: hash of those that must be the same on all
    // ranks. `without_queries`: the hash by which ranks report the same step if they ended it without queries. `area`: shared
    // memory for this rank's parts, or none.
    Status begin(uint64_t channel, uint64_t arguments, uint64_t without_queries, const MemoryName& area);
    // Reports a step without queries as ended. This rank has waited for nobody in it.
    void end_idle(uint64_t channel, uint64_t without_queries) noexcept;
    // The result of agree(), for steps that exchange parts without messages: all ranks have begun the step.
    struct Agreement {
        uint64_t identity;                            // of the step, the same on all ranks
        std::vector<std::shared_ptr<uint8_t>> areas;  // [ranks]; nullptr for this rank
    };
    // Waits until all ranks have begun the step, as exchange() waits. Until end(), `*given_up` becomes the identity if the step
    // cannot go on. TA_E_CORRUPT: another rank's area has less than `area_bytes`.
    Result<Agreement> agree(uint64_t channel, uint64_t area_bytes, std::atomic<uint64_t>* given_up);
    // Why a step after agree() cannot go on; TA_OK: no reason is known.
    Status check(uint64_t channel);
    // Waits for the other ranks' parts, at most the group's operation time. TA_E_MISMATCH: another rank's step or call has
    // other arguments, or it has begun another step. TA_E_CANCELLED: another rank gave the step up. TA_E_TIMEOUT. Also the
    // error that ended the group.
    Result<Parts> exchange(uint64_t channel, const Call& call);
    // Ends the step of this rank; no rank joins it afterwards. `gave_up`: it fails on peers that are in it. Returns the step's
    // identity, the same on all ranks; 0: the ranks never met in it.
    uint64_t end(uint64_t channel, bool gave_up) noexcept;

    bool takes(MessageType type) const override {
        return (type >= MessageType::kStep && type <= MessageType::kPart) || type == MessageType::kStepIdle;
    }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    struct Part {
        uint64_t identity, number, arguments;
        std::vector<float> values;
    };
    // What this rank knows of another one in the channel.
    struct Peer {
        uint64_t nonce = 0;      // of the last step that it began; 0: none
        uint64_t arguments = 0;  // of that step
        MemoryName area;
        uint64_t used = 0;  // nonce of its last step that no step here can use any more: one was bound to it, or the peer left
                            // it. Its begin may still be on its way
        // idle: the last step without queries that it ended, unless it has begun a step with queries since, or a step here
        // failed because of it; else 0. idles_before: how many steps without queries it had ended in the channel before that
        // one.
        uint64_t idle = 0, idles_before = 0;
        uint64_t left = 0;      // nonce of a step that it left, which counts as used once this rank's step ends
        bool gone = false;      // it has released its sequence; the rest of this state still serves this rank's step
        std::list<Part> parts;  // numbers ascend
    };
    // A channel's name is a tag.
    struct Channel {
        std::vector<Peer> peers;  // [ranks]
        uint64_t nonce = 0;       // of the own step; 0: none
        uint64_t arguments = 0, without_queries = 0;
        // Steps without queries that this rank has ended since the last bound step, or since the tag got its sequence. Ranks
        // that make the same calls have the same count. Failed begins and aborted steps do not count.
        uint64_t idles = 0;
        uint64_t bound = 0;                      // identity of the step, once the ranks have agreed or exchanged parts; 0: not
                                                 // yet
        std::vector<uint64_t> nonces;            // [ranks]: of the last bound step; 0: there was none
        Status failed;                           // why the step cannot go on
        std::atomic<uint64_t>* tells = nullptr;  // agree()'s `given_up`
        std::optional<uint32_t> keeper;          // no sequence here has the tag; this rank has said something of it
    };

    template <class Question>
    auto ask(std::unique_lock<std::mutex>& lock, Question&& question);
    Channel& channel(uint64_t name);
    void settle(uint64_t name) noexcept;
    // How many channels of tags that no sequence here has another rank may make this one keep.
    size_t most_kept() const;
    uint64_t identity_of(const Channel& c) const;
    bool has_parts(Channel& c, uint64_t identity, const Call& call) const;
    Parts take_parts(Channel& c, const Call& call);
    void give(uint64_t name, uint64_t identity, const Call& call);
    void compare(uint64_t name, Channel& c, uint32_t peer);
    static bool passed_without_queries(const Channel& c, const Peer& p);
    void fail_step(Channel& c, Status why);
    void leave(uint64_t name, Channel& c, bool ends);
    static void tell(Channel& c);
    static uint64_t identity_of(std::span<const uint64_t> nonces);
    void bind(Channel& c, std::span<const uint64_t> nonces);
    void bind_if_in(Channel& c, std::span<const uint64_t> nonces);
    void bind_to_known(Channel& c);
    void check_peers(Channel& c);
    Status find_areas(Transport& transport, std::span<const MemoryName> names, uint64_t bytes,
                      std::vector<std::shared_ptr<uint8_t>>& areas) const;
    Status lacks(const Channel& c, uint64_t identity, const Call& call) const;

    Group& group_;  // not used after ended_ is set
    const uint32_t ranks_, rank_;
    const Context& context_ = group_.context();
    const std::chrono::milliseconds patience_ = group_.settings().operation;

    std::mutex mutex_;
    std::condition_variable changed_;
    Status ended_;
    size_t asking_ = 0;  // calls that use the group without the lock
    uint64_t nonces_ = 0;
    // Tags and their histories (add_tag()): of living sequences; the last ones that were released; those released before them.
    std::map<uint64_t, uint64_t> tags_, released_, released_before_;
    std::map<uint64_t, Channel> channels_;
    std::vector<uint64_t> begun_;  // [ranks]: nonce of the last step, of any channel, whose begin has arrived
    std::vector<size_t> kept_;     // [ranks]: channels of which it is the keeper
};

// The error if a call of this rank and the matching call of `rank` differ in their arguments.
Status other_arguments(uint32_t rank);

}  // namespace ta::share
