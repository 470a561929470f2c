// A small pool of worker threads, owned by a context.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "src/core/status.h"

namespace ta {

// Runs loops over all workers and the calling thread. One loop runs at a time; a caller that finds the pool busy runs its loop
// alone, so that calls from many threads never wait for one another.
class ThreadPool {
  public:
    ThreadPool() = default;
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    // Starts threads - 1 workers. After a loop they poll for `poll` before they sleep. On failure no worker is left.
    Status start(int threads, std::chrono::microseconds poll = kPoll);
    int threads() const { return int(workers_.size()) + 1; }

    // Calls body(index, worker) for each index in [0, n), with worker in [0, threads()), and returns when all calls have. The
    // body must not throw. Indices are handed out in order, `grain` at a time.
    template <class Body>
    void parallel_for(int64_t n, int64_t grain, const Body& body) {
        run(
            n, grain, [](const void* user, int64_t index, int worker) { (*static_cast<const Body*>(user))(index, worker); },
            &body);
    }

  private:
    using Call = void (*)(const void* user, int64_t index, int worker);
    void run(int64_t n, int64_t grain, Call call, const void* user);
    void work(int worker);
    void take_indices(int worker);
    void stop();

    // The layers of a decode step follow one another closely.
    static constexpr std::chrono::microseconds kPoll{30};

    std::chrono::microseconds poll_ = kPoll;
    std::vector<std::thread> workers_;
    std::mutex running_;  // held by the caller whose loop the workers serve

    std::mutex mutex_;
    std::condition_variable wake_;
    bool stopping_ = false;

    // The current loop. `round_` tells sleeping workers that a new loop began. `gate_` counts the workers inside the loop, and
    // has kClosed set while there is no loop. When the indices have run out, the caller closes the gate and waits only for
    // workers inside, not for those that have not woken up yet.
    static constexpr int64_t kClosed = int64_t{1} << 32;
    std::atomic<uint64_t> round_{0};
    std::atomic<int64_t> gate_{kClosed};
    std::atomic<int64_t> next_{0};
    int64_t n_ = 0, grain_ = 1;
    Call call_ = nullptr;
    const void* user_ = nullptr;
};

}  // namespace ta
