// One rank of a group: its peers, whether they live, and the messages between them. A communication thread takes in all messages;
// callers only enqueue. The first fault of any rank ends the group everywhere.
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

inline constexpr size_t kMostFinished = FinishedTickets::kMost;  // tickets that are known after their end

enum class GroupState : int32_t { kConnecting = 1, kReady = 2, kEnded = 3 };

struct GroupSettings {
    uint32_t rank = 0, ranks = 1;
    uint64_t generation = 0;
    std::chrono::milliseconds connect{30000};    // until all peers have answered
    std::chrono::milliseconds silence{10000};    // of a peer, or of a message that others overtook: then it is lost
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
        // TA_OK, or why the message cannot be one of a healthy peer: then the group ends.
        virtual Status on_message(const Message& message) = 0;
        // Ends what is over its time; when it wants to be called next.
        virtual Time on_time(Time now) = 0;
        // The group has ended. No message comes any more; called once, from any thread.
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
    // Until it does not connect any more, or so many nanoseconds have passed (< 0: no limit).
    GroupState wait_connected(int64_t nanoseconds) const;
    // OK while it connects and when it is ready; else why it has ended.
    Status health() const;
    // TA_E_STATE while it connects; else as health().
    Status check_ready() const;
    // Ends the group here and at all peers.
    void end(const Status& why);

    // Enqueues a message. Where the group has ended nothing is sent: the services know.
    void send(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload);
    // The communication thread looks at the services' times again.
    void wake() { transport_->wake(); }

    // ---- what callers wait for

    // Readable while tickets are finished that nobody has taken, or since the state changed; -1: the system had none.
    int descriptor() const { return finished_.descriptor(); }
    FinishedTickets& finished() { return finished_; }

  private:
    struct Peer {
        uint64_t sent = 0;      // numbers
        uint64_t received = 0;  // all up to this one
        bool greeted = false, welcomed = false;
        Time heard{};                       // from it, last
        std::map<uint64_t, Message> early;  // that overtook others
        uint64_t announced = 0;             // the last number that it says to have sent
        Time missing_since{};               // a number up to that; of no meaning while there is none missing
        bool missing = false;
    };

    void run();
    void send_locked(uint32_t to, MessageType type, uint64_t channel, std::span<const uint8_t> payload);
    Status take_in(const Transport::Received& received);
    Status dispatch(uint32_t from, const Message& message);
    Status check_peers(Time now, bool heard_all);
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

    std::mutex sending_;       // numbers go out in their order
    std::vector<Peer> peers_;  // `sent` guarded by sending_, the rest the communication thread's
    Time next_heartbeat_{}, next_look_{};
    std::atomic<bool> stopping_{false};
    std::thread thread_;
};

}  // namespace ta::share
