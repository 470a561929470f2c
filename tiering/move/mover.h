// Moves full blocks between tiers: copies their bytes, checks them against their hashes where they arrive, and publishes the
// new place. Moves are asked for with tickets and done in parts by threads of the mover, some for each lane, or at once by the
// caller; each has several parts on their way.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "src/io/finished_tickets.h"
#include "tiering/move/mover_part.h"

namespace ta {

// A block that a ticket asks for. The ticket does not own it: a block that has no owner by the time its turn comes is skipped,
// and its room has been free since it had none.
struct MoveRequest {
    explicit MoveRequest(uint64_t i) : index(i) {}  // of a block that is not full, which stays
    MoveRequest(const BlockPtr& b, uint64_t i, std::chrono::steady_clock::time_point used = {})
        : block(b), index(i), last_used_at(used), from(b->tier()), kind(b->kind()), full(true) {}

    std::weak_ptr<Block> block;
    uint64_t index;                                           // in its sequence
    std::chrono::steady_clock::time_point last_used_at = {};  // as in MoveItem
    TierKind from = TierKind::kDevice;                        // when it was asked for, as `kind`
    PageKind kind = PageKind::kToken;
    bool full = false;
    bool prefetched = false;  // the ticket asked the block's PrefetchMark
};

class Mover {
  public:
    // Tickets count from `first_ticket` on: one of another pool names nothing here.
    Mover(MoveHost pool, uint64_t first_ticket);
    // Starts the threads; measures which way between a device and the host is the faster one for which blocks, unless `route`
    // says which is taken. TA_E_LIMIT.
    Status start(MoveRoute route = MoveRoute::kCalibrated);
    ~Mover();
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    // A ticket, never 0. Its blocks go by the lanes of the tiers between which they are to move; within a lane the order is
    // that of the calls. Of what is asked for the caller starts the first part, where that waits for nobody.
    Result<uint64_t> submit(std::vector<MoveRequest> requests, TierKind to, MoveReason reason);
    Result<uint64_t> submit(std::span<const MoveItem> items, TierKind to, MoveReason reason);
    // The same at once, for a step that waits until then. Where there is no room in `to`, others make room for needed blocks.
    MoveProgress run(std::span<const MoveItem> items, TierKind to, MoveReason reason, Deadline until = kNoDeadline);

    // TA_E_STALE for a ticket that was never given out, or finished long ago.
    Result<MoveProgress> query(uint64_t ticket) const;
    // Until it is finished or `nanoseconds` have passed, < 0: for ever; then as query().
    Result<MoveProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    // Blocks that have not moved stay where they are, those that a disk works on included. A ticket of which nothing is on its
    // way is finished then.
    Status cancel(uint64_t ticket);

    MoveCounters counters() const;
    // Readable while tickets that callers asked for have finished and nobody has taken them; from the first call on. TA_E_LIMIT.
    Result<int> finished_descriptor();
    // How many it took. TA_E_STATE: nobody asked for the descriptor.
    Result<uint64_t> take_finished(std::span<uint64_t> out);
    // A ticket of the pool that is not the mover's has finished.
    void tell_finished(uint64_t ticket) noexcept { told_.add(ticket); }
    uint64_t queued() const;  // tickets that are not finished
    bool busy() const { return sharing_.parts.load() > 0 || queued() > 0; }
    MoveRoute route() const { return sharing_.route; }
    void cancel_all();
    // Cancels what is queued and waits for what is moving.
    void stop();

  private:
    // Each has a queue and threads of its own: a disk holds up nothing that moves between the device and the host, and what
    // goes to the device overtakes what is moved out for it. A block that has come to lie elsewhere stays in the lane of its
    // request.
    enum Lane : size_t { kPromote, kDemote, kFromDisk, kToDisk, kLanes };
    struct Leg {                   // what of a ticket goes by a lane
        size_t next = 0, end = 0;  // requests that no thread has taken yet
        uint64_t taken = 0;        // bytes of those before
        bool queued = false;
    };
    struct Ticket {
        uint64_t id = 0;
        std::vector<MoveRequest> requests;  // by their legs
        TierKind to = TierKind::kDevice;
        MoveReason reason = MoveReason::kAsked;
        Leg legs[kLanes];
        int queued = 0;        // of its legs
        uint64_t left = 0;     // bytes in parts on their way
        int parts = 0;         // on their way
        bool landing = false;  // soon over
        MoveProgress progress;
        std::atomic<bool> finished{false};
        DiskWork disk_work;
    };
    struct Flight {  // a part of a ticket on its way
        std::shared_ptr<Ticket> ticket;
        std::span<const MoveRequest> requests;
        std::vector<MoveItem> items;     // the same with an owner of those that still have one
        std::unique_ptr<MovePart> part;  // nullptr: there was no memory for it
        uint64_t bytes = 0;              // of the requests
        enum class Stage : uint8_t { kTaken, kPrepared, kStarted } stage = Stage::kTaken;
    };
    using Queue = std::deque<std::shared_ptr<Ticket>>;

    void enqueue(const std::shared_ptr<Ticket>& ticket, Lane lane, size_t first, size_t end);
    void unqueue(const std::shared_ptr<Ticket>& ticket);
    void cancel(const std::shared_ptr<Ticket>& ticket);
    static void end_prefetches(std::span<const MoveRequest> requests);
    void end_part(Ticket& ticket, std::vector<MoveRequest>& freed);
    void start_here(const Ticket& ticket, Lane lane, std::unique_lock<std::mutex>& lock);
    void serve(Lane lane, std::vector<Flight>& flights);
    bool take_part(Lane lane, Flight& flight);
    bool take_flight(Lane lane, Flight& flight);
    void look_ahead(Ticket& ticket);
    bool prepare(Flight& flight);
    void start(Flight& flight);
    void land(Flight& flight);
    void land_all(std::vector<Flight>& flights);
    struct Cut {
        size_t items = 0;
        uint64_t bytes = 0;
    };
    template <class Item>
    Cut cut_part(std::span<const Item> items, TierKind to, uint64_t before) const;

    mutable MoveSharing sharing_;
    const bool copies_beside_;  // the device copies while the caller goes on
    mutable std::mutex mutex_;
    std::condition_variable wake_[kLanes];      // the threads of a lane
    mutable std::condition_variable finished_;  // who waits
    bool stopping_ = false;
    uint64_t tickets_;  // the last
    Queue queues_[kLanes];
    std::vector<Flight> handed_[kLanes];  // by who submitted them
    size_t handing_[kLanes] = {};         // of their places taken
    std::unordered_map<uint64_t, std::shared_ptr<Ticket>> known_;
    std::deque<uint64_t> done_;  // finished tickets in known_, oldest first
    FinishedTickets told_;
    std::vector<std::thread> threads_;
};

}  // namespace ta
