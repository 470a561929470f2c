// One rank of a group: its peers, whether they live, and the messages between them. The communication thread receives all
// messages; callers only enqueue. The first fault of any rank ends the group on all ranks.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/core/context.h"
#include "src/io/finished_tickets.h"
#include "tiering/share/transport.h"

namespace ta::share {

inline constexpr size_t kMostFinished = FinishedTickets::kMost;  // finished tickets that are still known

enum class GroupState : int32_t { kConnecting = 1, kReady = 2, kEnded = 3 };

struct GroupSettings {
    uint32_t rank = 0, ranks = 1;
    uint64_t generation = 0;
    std::chrono::milliseconds connect{30000};    // until all peers have answered
    std::chrono::milliseconds silence{10000};    // of a peer, or of a message that later ones overtook; then the peer is lost
    std::chrono::milliseconds operation{30000};  // of a transfer, without progress
    uint64_t staging_bytes = uint64_t{64} << 20;
};

class Group {
  public:
    // A user of the group's messages. Called by the communication thread, one call at a time.
    class Service {
      public:
        virtual ~Service() = default;
        // True if messages of this type are for this service.
        virtual bool takes(MessageType type) const = 0;
        // An error means that no healthy peer sent the message: the group ends.
        virtual Status on_message(const Message& message) = 0;
        // Ends what is past its deadline. Returns when to be called next.
        virtual Time on_time(Time now) = 0;
        // The group has ended and delivers no more messages. Called once, from any thread.
        virtual void on_end(const Status& why) = 0;
    };

    Group(std::shared_ptr<Context> context, const GroupSettings& settings, std::unique_ptr<Transport> transport);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;
    // Says hello to all peers. The services outlive stop(). TA_E_LIMIT.
    Status start(std::vector<Service*> services);
    // Says goodbye and ends the thread.
    void stop();

    Context& context() const { return *context_; }
    const std::shared_ptr<Context>& shared_context() const { return context_; }
    const GroupSettings& settings() const { return settings_; }
    Transport& transport() { return *transport_; }
    const Transport& transport() const { return *transport_; }

    GroupState state() const { return state_.load(std::memory_order_acquire); }
    // Waits until the group has stopped connecting, or so many nanoseconds have passed (< 0: no limit).
    GroupState wait_connected(int64_t nanoseconds) const;
    // OK while the group connects and when it is ready; else why it ended.
    Status health() const;
    // TA_E_STATE while the group connects; else as health().
    Status check_ready() const;
    // Ends the group here and at all peers.
    void end(const Status& why) { end(why, Ending::of(why)); }

    // Enqueues a message. After the group's end sends nothing; the services have been told.
    void send(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload);
    // Makes the communication thread ask the services for their times again.
    void wake() { transport_->wake(); }

    // ---- what callers wait for

    // Readable if tickets have finished that nobody has taken, or if the state changed since; -1: the system had no descriptor.
    int descriptor() const { return finished_.descriptor(); }
    FinishedTickets& finished() { return finished_; }

  private:
    struct Peer {
        uint64_t sent = 0;      // the number of the last message
        uint64_t received = 0;  // all messages up to this number have come
        bool greeted = false, welcomed = false;
        Time heard{};                       // when its last message came
        std::map<uint64_t, Message> early;  // messages that overtook others, by number
        uint64_t early_bytes = 0;           // of their payloads
        uint64_t announced = 0;             // the last number that it claims to have sent
        Time missing_since{};               // since when a number up to that is missing; valid if `missing`
        bool missing = false;
    };

    void run();
    void end(const Status& why, const Ending& told);
    void tell_all(MessageType type, std::span<const uint8_t> payload) noexcept;
    void send_locked(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload);
    Status take_in(const Transport::Received& received);
    Status dispatch(uint32_t from, const Message& message);
    Status check_peers(Time now, bool heard_all);
    Status why_not_connected() const;
    std::chrono::milliseconds heartbeat_interval() const;
    Time next_time() const;
    void send_heartbeats(Time now);

    const std::shared_ptr<Context> context_;
    const GroupSettings settings_;
    const std::unique_ptr<Transport> transport_;
    std::vector<Service*> services_;
    const Time created_ = Clock::now();

    std::atomic<GroupState> state_{GroupState::kConnecting};
    mutable std::mutex state_mutex_;
    mutable std::condition_variable state_changed_;
    Status why_;
    FinishedTickets finished_;

    std::mutex sending_;                  // keeps numbers and their messages in order
    std::vector<Peer> peers_;             // `sent` is guarded by sending_, the rest belongs to the communication thread
    std::optional<Ending> heard_ending_;  // belongs to the communication thread
    Time next_heartbeat_{}, next_look_{};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace ta::share
