// A communicator of the communication thread, which another thread can abort while that one is stuck. The hang to break: a CUDA
// call waits for another thread's cudaFree, cudaFree for a round's kernel, and the kernel for its peer. If the peer is dead,
// only ncclCommAbort ends the kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "tiering/share/lane.h"
#include "tiering/share/nccl_library.h"
#include "tiering/share/transport.h"

namespace ta::share {

class NcclComm {
  public:
    static constexpr int kAborted = -1;  // not one of NCCL's results

    // Returns what make(&comm) returns.
    template <class Make>
    int make(Make&& make) {
        const std::lock_guard lock(mutex_);
        return make(&comm_);
    }
    // Returns what call(comm) returns; kAborted: there is no communicator. The call waits for no GPU. On a blocking
    // communicator of the caller it may wait for a peer.
    template <class Call>
    int use(Call&& call) {
        const std::lock_guard lock(mutex_);
        const nccl::Comm comm = std::atomic_ref(comm_).load();
        return comm ? call(comm) : kAborted;
    }
    void abort(const nccl::Library& lib) {
        const std::lock_guard lock(mutex_);
        abort_now(lib);
    }
    // Aborts while a call of another thread may be stuck: ncclCommAbort makes that call return.
    void abort_stuck(const nccl::Library& lib) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        abort_now(lib);
    }
    // Gives up the communicator: it is the caller's again.
    void release() { std::atomic_ref(comm_).store(nullptr); }

  private:
    void abort_now(const nccl::Library& lib) {
        if (const nccl::Comm comm = std::atomic_ref(comm_).exchange(nullptr)) lib.CommAbort(comm);
    }

    std::mutex mutex_;  // held during calls, so that none starts on a communicator that is being aborted
    nccl::Comm comm_ = nullptr;
};

// A thread that calls `on_stuck`, once, when a step takes longer than its limit.
class StepWatch {
  public:
    StepWatch() = default;
    ~StepWatch() { stop(); }
    StepWatch(const StepWatch&) = delete;
    StepWatch& operator=(const StepWatch&) = delete;

    // `limit`: the shortest limit of any step. TA_E_LIMIT: the system has no thread.
    Status start(std::chrono::milliseconds limit, std::function<void()> on_stuck) {
        period_ = std::max(limit / 4, std::chrono::milliseconds(1));
        return start_thread(thread_, [this, on_stuck = std::move(on_stuck)] { run(on_stuck); });
    }
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            wake_.notify_one();
        }
        if (thread_.joinable()) thread_.join();
    }
    // A step lasts as long as this object. One at a time.
    class Step {
      public:
        Step(StepWatch& watch, std::chrono::milliseconds limit) : ends_(watch.ends_) { ends_ = Clock::now() + limit; }
        ~Step() { ends_ = Time::max(); }
        Step(const Step&) = delete;
        Step& operator=(const Step&) = delete;

      private:
        std::atomic<Time>& ends_;
    };

  private:
    void run(const std::function<void()>& on_stuck) {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, period_, [this] { return stopping_; })) {
            if (Clock::now() < ends_.load()) continue;
            lock.unlock();
            return on_stuck();
        }
    }

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::chrono::milliseconds period_{};
    bool stopping_ = false;
    std::atomic<Time> ends_{Time::max()};  // when the current step is over its limit
};

}  // namespace ta::share
