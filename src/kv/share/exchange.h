// Steps over partitioned sequences: ranks find out that they are in the same one, and give each other their parts of its results.
// docs/internals/sharing.md has the protocol.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <vector>

#include "tiering/share/group.h"

namespace ta::share {

class Exchange final : public Group::Service {
  public:
    // One call of a step: the values that it gives to other ranks, and those that it wants from them.
    struct Call {
        uint64_t number;     // of the call in its step, from 1
        uint64_t arguments;  // hash of those that must be the same at all ranks
        // [ranks] for each of them, in order; that of this rank is not looked at. They may be empty.
        std::vector<std::vector<float>> given;
        size_t wanted;  // values from each other rank; 0: nothing comes
    };
    // [ranks] what came from each; the own is empty.
    using Parts = std::vector<std::vector<float>>;

    explicit Exchange(Group& group) : group_(group), ranks_(group.settings().ranks), rank_(group.settings().rank) {}
    // The group may be gone then. After its stop().
    void stop();

    uint32_t ranks() const { return ranks_; }
    uint32_t rank() const { return rank_; }
    const Context& context() const { return context_; }
    std::chrono::milliseconds patience() const { return patience_; }  // with other ranks

    // A sequence of this rank gets the tag; TA_E_INVALID: another one has it.
    Status add_tag(uint64_t tag);
    void remove_tag(uint64_t tag) noexcept;

    // As a transport's; TA_E_...: the group has ended.
    Result<bool> all_reach();
    Result<bool> all_cpus();
    Result<Transport::Shared> share_memory(std::shared_ptr<uint8_t> memory);

    // A step of this rank, one at a time for each channel. `arguments`: hash of those that must be the same at all ranks. `area`:
    // shared memory for its parts, or none.
    Status begin(uint64_t channel, uint64_t arguments, const MemoryName& area);
    // For steps that exchange their parts without messages: all ranks have begun the step.
    struct Agreement {
        uint64_t identity;                            // of the step, at all ranks
        std::vector<std::shared_ptr<uint8_t>> areas;  // [ranks], the own one is nullptr
    };
    // Waits for that as exchange() does. Until end(), `*given_up` becomes the identity when the step cannot go on.
    Result<Agreement> agree(uint64_t channel, std::atomic<uint64_t>* given_up);
    // Why a step that was agreed upon cannot go on; TA_OK: no reason is known.
    Status check(uint64_t channel);
    // Waits for the other ranks' parts, at most the group's operation time. TA_E_MISMATCH: another rank's step or call has other
    // arguments, or it has begun another one. TA_E_CANCELLED: it gave the step up. TA_E_TIMEOUT, and what ended the group.
    Result<Parts> exchange(uint64_t channel, const Call& call);
    // `gave_up`: peers that are in the step fail. None joins it any more.
    void end(uint64_t channel, bool gave_up) noexcept;

    bool takes(MessageType type) const override { return type >= MessageType::kStep && type <= MessageType::kPart; }
    Status on_message(const Message& message) override;
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status& why) override;

  private:
    struct Part {
        uint64_t identity, number, arguments;
        std::vector<float> values;
    };
    // State of another rank in this channel.
    struct Peer {
        uint64_t nonce = 0;      // of the step that it began last; 0: none
        uint64_t arguments = 0;  // of that step
        MemoryName area;
        uint64_t used = 0;  // nonce of the last one that a step here was bound to, or that it left; may not have come yet
        uint64_t left = 0;  // nonce of one that it has left and that is used until the step here ends
        bool gone = false;  // it has no such sequence any more; the rest serves the step that this rank is in
        std::deque<Part> parts;
    };
    // A channel is named by a tag.
    struct Channel {
        std::vector<Peer> peers;  // [ranks]
        uint64_t nonce = 0;       // of the own step; 0: none
        uint64_t arguments = 0;
        uint64_t bound = 0;                      // identity of the step, once ranks agreed or a call has exchanged; 0: not yet
        std::vector<uint64_t> nonces;            // [ranks] of the last step that was bound; 0: there was none
        Status failed;                           // why the step cannot go on
        std::atomic<uint64_t>* tells = nullptr;  // of a step that was agreed upon
    };

    Channel& channel(uint64_t name);
    void erase_if_unknown(uint64_t name);
    uint64_t identity_of(const Channel& c) const;
    bool has_parts(Channel& c, uint64_t identity, const Call& call) const;
    Parts take_parts(Channel& c, const Call& call);
    void give(uint64_t name, uint64_t identity, const Call& call);
    void compare(uint64_t name, Channel& c, uint32_t peer);
    void fail_step(Channel& c, Status why);
    void leave(uint64_t name, Channel& c, bool ends);
    static void tell(Channel& c);
    static uint64_t identity_of(std::span<const uint64_t> nonces);
    void bind(Channel& c, std::span<const uint64_t> nonces);
    void bind_to_known(Channel& c);
    void check_peers(Channel& c);
    Status lacks(const Channel& c, uint64_t identity, const Call& call) const;

    Group& group_;  // not used once ended_ says so
    const uint32_t ranks_, rank_;
    const Context& context_ = group_.context();
    const std::chrono::milliseconds patience_ = group_.settings().operation;

    std::mutex mutex_;
    std::condition_variable changed_;
    Status ended_;
    uint64_t nonces_ = 0;
    std::set<uint64_t> tags_;  // of living sequences
    std::map<uint64_t, Channel> channels_;
};

// Of a call of this rank and one of that, which are each other's counterparts.
Status other_arguments(uint32_t rank);

}  // namespace ta::share
