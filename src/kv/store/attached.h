// A store attached to a namespace. Its thread brings blocks for loads and puts published blocks. After the store has failed it
// pauses before it asks again. While it waits for the store it holds no block and no lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "src/kv/store/calls.h"
#include "src/kv/store/tickets.h"
#include "src/kv/store/value.h"

namespace ta::store {

struct Settings {
    std::chrono::milliseconds timeout{2000};
    bool write_through = true, authenticate = true;
    uint64_t batch_bytes = uint64_t{32} << 20;
};

using Stats = ta_store_stats;  // without struct_size

class Attached {
  public:
    Attached(Pool& pool, Tenant space, const Settings& settings, Tickets& tickets)
        : pool_(pool), source_{pool, space, settings.authenticate}, settings_(settings), tickets_(tickets) {}
    // TA_E_LIMIT: the system has no thread; TA_E_STALE, TA_E_CLOSED.
    Status start(CallbackSet<ta_block_store>&& set);
    ~Attached() { stop({}); }
    Attached(const Attached&) = delete;
    Attached& operator=(const Attached&) = delete;

    // Ends the threads. Unfinished loads fail with `why`.
    void stop(Status why);
    // False: stop() was called.
    bool load(const std::shared_ptr<Load>& load);
    // Waits so many nanoseconds at most. Returns how many published blocks are then not known to be in the store.
    Result<uint64_t> flush(int64_t nanoseconds);
    Stats stats() const;

  private:
    using Clock = std::chrono::steady_clock;
    using Function = Calls::Function;
    using Published = PrefixStore::EntryKey;
    struct Flush {
        bool done = false;  // guarded by mutex_, like `missing` once callers know of this
        uint64_t missing = 0;
        std::deque<Published> left;  // used by the thread only
        bool begun = false;
    };

    // attached.cpp
    void run();
    void run_one(std::unique_lock<std::mutex>& lock);
    void end_all();
    bool may_ask() const { return Clock::now() >= paused_until_; }
    std::shared_ptr<Batch> make_batch(size_t n, size_t value_bytes) const;
    enum class Answer : uint8_t {
        kGood,
        kFailed,  // with an error, or too late
        kNone,    // not called: the previous call still runs, or stop() was called
    };
    Answer call(Function function, const std::shared_ptr<Batch>& batch);
    void pause();
    void note_failed(const char* what);
    template <class Change>
    void count(Change&& change) {
        const std::lock_guard lock(mutex_);
        change(stats_);
    }

    // attached_load.cpp
    Status bring(Load& load);
    void end_cancelled();
    Status check_load(const Load& load);
    struct Value;
    struct Arrivals;
    std::vector<uint64_t> choose_wanted(Load& load, std::span<const std::optional<TierKind>> chain, size_t most);
    Result<std::vector<Value>> check_values(const Batch& batch, std::span<const uint64_t> indices);
    Status take_in(Load& load, std::span<const Value> values, Arrivals& arrivals);
    void refuse(const BlockKey& key, const Status& why);

    // attached_put.cpp
    bool take_events();  // true: there may be more events
    void put_some();
    void flush_some();
    void end_flush();
    // Counts in `stored` the blocks that the store has now; the others failed. False: the store itself failed.
    bool put(std::span<const Published> blocks, uint64_t& stored);
    bool put_values(std::span<const Published> blocks, std::span<const BlockKey> keys, uint64_t& stored);

    Pool& pool_;  // outlives this
    const Source source_;
    const Settings settings_;
    Tickets& tickets_;
    std::unique_ptr<Calls> calls_;
    std::shared_ptr<PrefixFeed> feed_;  // nullptr: no write_through

    // Used by the thread only.
    Clock::time_point paused_until_{};
    std::chrono::milliseconds pause_{0};  // the last pause; 0: the store's last call succeeded
    std::deque<Published> pending_;
    bool behind_ = false;  // blocks were published that are neither pending nor known to be in the store

    mutable std::mutex mutex_;
    std::condition_variable wake_, flushed_;
    bool stopping_ = false, rung_ = false;
    Status why_;
    std::list<std::shared_ptr<Load>> loads_;  // waiting
    std::shared_ptr<Flush> flush_, next_flush_;
    Stats stats_{};
    std::thread thread_;
};

}  // namespace ta::store
