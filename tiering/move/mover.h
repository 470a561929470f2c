// Moves full blocks between tiers: copies their bytes, checks them against their hashes where they arrive, and tells readers
// the new place. A ticket asks for moves, which the mover's threads do in parts; each lane has threads of its own. run() moves
// at once, on the caller's thread. Every thread keeps several parts on their way.
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

// A block that a ticket asks for. The ticket does not own it: a block that has lost its last owner before its turn is skipped.
// Its room was freed when it lost that owner.
struct MoveRequest {
    explicit MoveRequest(uint64_t i) : index(i) {}  // of a block that is not full and therefore stays
    MoveRequest(const BlockPtr& b, uint64_t i, std::chrono::steady_clock::time_point used = {})
        : block(b), index(i), last_used_at(used), from(b->tier()), kind(b->kind()), full(true) {}

    std::weak_ptr<Block> block;
    uint64_t index;                                           // in its sequence
    std::chrono::steady_clock::time_point last_used_at = {};  // as in MoveItem
    TierKind from = TierKind::kDevice;                        // its tier when it was asked for, and in `kind` its kind then
    PageKind kind = PageKind::kToken;
    bool full = false;
    bool prefetched = false;  // the ticket asked the block's PrefetchMark
};

class Mover {
  public:
    // Tickets count from `first_ticket` on, so that a ticket of another pool is none of this one.
    Mover(MoveHost pool, uint64_t first_ticket);
    // Starts the threads. Unless `route` names one, measures for which sizes of blocks the copy engine or a kernel is faster
    // between device and host. TA_E_LIMIT.
    Status start(MoveRoute route = MoveRoute::kCalibrated);
    ~Mover();
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    // Returns a ticket, never 0. Its blocks go by the lanes of the tiers between which they move; a lane keeps the order of the
    // calls. If the device copies while the caller goes on, the caller starts the first parts of an asked-for move itself, as
    // long as they start without waiting.
    Result<uint64_t> submit(std::vector<MoveRequest> requests, TierKind to, MoveReason reason);
    Result<uint64_t> submit(std::span<const MoveItem> items, TierKind to, MoveReason reason);
    // Moves at once, on the caller's thread, for a step that waits for it. If `to` has no room, every move but a prefetch makes
    // some there.
    MoveProgress run(std::span<const MoveItem> items, TierKind to, MoveReason reason, Deadline until = kNoDeadline);

    // TA_E_STALE for a ticket that was never given out, or finished long ago.
    Result<MoveProgress> query(uint64_t ticket) const;
    // Waits until the ticket is finished or `nanoseconds` have passed, < 0: for ever. Returns what query() does.
    Result<MoveProgress> wait(uint64_t ticket, int64_t nanoseconds) const;
    // Blocks that have not moved yet stay where they are, also those that a disk works on. The ticket finishes at once if no
    // part of it is on its way.
    Status cancel(uint64_t ticket);

    MoveCounters counters() const;
    // A descriptor that is readable while tickets of callers have finished and nobody has taken them; counts from the first
    // call on. TA_E_LIMIT.
    Result<int> finished_descriptor();
    // Takes finished tickets; returns how many. TA_E_STATE: nobody has asked for the descriptor.
    Result<uint64_t> take_finished(std::span<uint64_t> out);
    // Reports a ticket of the pool that is not the mover's as finished.
    void tell_finished(uint64_t ticket) noexcept { told_.add(ticket); }
    uint64_t queued() const;  // tickets that are not finished
    bool busy() const { return sharing_.parts.load() > 0 || queued() > 0; }
    MoveRoute route() const { return sharing_.route; }
    void cancel_all();
    // Cancels what is queued and waits for what is moving.
    void stop();

  private:
    // Each lane has a queue and threads of its own. So a disk delays nothing that moves between device and host, and promotions
    // overtake the demotions that make room for them. If a block has changed its tier since the request, it stays in the lane
    // of the request.
    enum Lane : size_t { kToDevice, kToMemory, kFromDisk, kToDisk, kLanes };
    struct Leg {                   // the requests of a ticket that go by one lane
        size_t next = 0, end = 0;  // requests that no thread has taken yet
        uint64_t taken = 0;        // bytes of the requests before `next`
        bool queued = false;
    };
    struct Ticket {
        uint64_t id = 0;
        std::vector<MoveRequest> requests;  // sorted by leg
        TierKind to = TierKind::kDevice;
        MoveReason reason = MoveReason::kAsked;
        Leg legs[kLanes];
        int queued = 0;        // legs that are in queues
        uint64_t left = 0;     // bytes in parts on their way
        int parts = 0;         // parts on their way
        bool landing = false;  // it finishes soon: its waiters are awake
        MoveProgress progress;
        std::atomic<bool> finished{false};
        DiskWork disk_work;
    };
    struct Flight {  // a part of a ticket on its way
        std::shared_ptr<Ticket> ticket;
        std::span<const MoveRequest> requests;
        std::vector<MoveItem> items;     // the blocks of `requests`, with owners; nullptr where a block has none left
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
    const bool copies_beside_;  // the device copies while its caller goes on
    mutable std::mutex mutex_;
    std::condition_variable wake_[kLanes];      // the threads of a lane
    mutable std::condition_variable finished_;  // who waits
    bool stopping_ = false;
    uint64_t tickets_;  // the last
    Queue queues_[kLanes];
    std::vector<Flight> handed_[kLanes];  // parts that submit() has started, for the lane's threads to finish
    size_t handing_[kLanes] = {};         // places of handed_ that submit() has taken and not filled yet
    std::unordered_map<uint64_t, std::shared_ptr<Ticket>> known_;
    std::deque<uint64_t> done_;  // finished tickets in known_, oldest first
    FinishedTickets told_;
    std::vector<std::thread> threads_;
};

}  // namespace ta
