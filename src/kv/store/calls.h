// The functions of a store, which are the caller's, called on a thread of their own. One that does not return in time holds up
// nobody: the thread stays with it, and with the memory that it was given.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "src/core/callback_set.h"
#include "src/core/status.h"
#include "tiering/disk/request.h"

namespace ta::store {

// The arguments of one call of a store's function. `items` point into the other two.
struct Batch {
    std::vector<BlockKey> keys;
    std::vector<ta_store_item> items;
    std::unique_ptr<uint8_t[]> memory;  // of values; whoever needs it
};

// One thread at a time calls, another may stop.
class Calls {
  public:
    enum class Function { kExists, kGet, kPut, kRemove };
    enum class End {
        kReturned,
        kLate,     // it had no more time, or the one before it still runs
        kStopped,  // stop() was called
    };

    // Takes the set, whatever becomes of this. TA_E_LIMIT: the system has no thread.
    static Result<std::unique_ptr<Calls>> start(CallbackSet<ta_block_store>&& set);
    ~Calls();
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

    // Sets the items' keys and results, and calls. `returned` gets the function's number. After kLate nobody may look at the batch
    // any more.
    End call(Function function, const std::shared_ptr<Batch>& batch, std::chrono::milliseconds timeout, int32_t& returned);
    // Makes a call that waits return; no function is called from then on.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;
    // Of the thread, which outlives this where a function does not return.
    struct State {
        std::mutex mutex;
        std::condition_variable asked, answered;
        CallbackSet<ta_block_store> set;
        std::shared_ptr<Batch> batch;  // to be called with, or with which a function runs
        Function function{};
        Clock::time_point deadline{};
        bool running = false, stopping = false, ended = false;
        uint64_t calls = 0;  // that were asked for; the last one that returned, and what:
        uint64_t returned = 0;
        int32_t result = 0;
    };
    Calls() = default;
    static void run(State& state);

    const std::shared_ptr<State> state_ = std::make_shared<State>();
    std::thread thread_;
};

}  // namespace ta::store
