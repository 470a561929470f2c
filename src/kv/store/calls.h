// Calls the functions of a caller's store on a thread of their own. A function that does not return in time holds up nobody: it
// keeps that thread, and the memory that it was given.
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

// The arguments of one call. `items` point into the other two.
struct Batch {
    std::vector<BlockKey> keys;
    std::vector<ta_store_item> items;
    std::unique_ptr<uint8_t[]> memory;  // for values, if the function needs it
};

// One thread at a time may call(); another one may stop().
class Calls {
  public:
    enum class Function { kExists, kGet, kPut, kRemove };
    enum class End {
        kReturned,
        kLate,     // not in time
        kBusy,     // not called: the previous function still runs
        kStopped,  // stop() was called
    };

    // Owns the set from then on, even if this fails. TA_E_LIMIT: the system has no thread.
    static Result<std::unique_ptr<Calls>> start(CallbackSet<ta_block_store>&& set);
    ~Calls();
    Calls(const Calls&) = delete;
    Calls& operator=(const Calls&) = delete;

    // Sets the items' keys and results, and calls the function. `returned` gets its result. After kLate the batch belongs to
    // the thread: do not look at it.
    End call(Function function, const std::shared_ptr<Batch>& batch, std::chrono::milliseconds timeout, int32_t& returned);
    // Makes a waiting call() return. No function is called from then on.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;
    // Shared with the thread. Outlives this object if a function does not return.
    struct State {
        std::mutex mutex;
        std::condition_variable asked, answered;
        CallbackSet<ta_block_store> set;
        std::shared_ptr<Batch> batch;  // of the next call, or of the running function
        Function function{};
        Clock::time_point deadline{};
        bool running = false, stopping = false, ended = false;
        uint64_t calls = 0;  // number of calls; below: the number of the last one that returned, and its result
        uint64_t returned = 0;
        int32_t result = 0;
    };
    Calls() = default;
    static void run(State& state);

    const std::shared_ptr<State> state_ = std::make_shared<State>();
    std::thread thread_;
};

}  // namespace ta::store
