// A communicator that the communication thread uses, and what ends it while that thread waits. A call of CUDA may wait for another
// thread's cudaFree, that for a round's kernel, and the kernel for its peer. If the peer is dead, only ncclCommAbort ends the kernel.
#pragma once

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
    static constexpr int kAborted = -1;  // none of NCCL's results

    // What make(&comm) returns. `owned`: abort() ends it.
    template <class Make>
    int make(Make&& make, bool owned = true) {
        const std::lock_guard lock(mutex_);
        owned_ = owned;
        return make(&comm_);
    }
    // What call(comm) returns; kAborted: there is no communicator. The call waits for no GPU.
    template <class Call>
    int use(Call&& call) {
        const std::lock_guard lock(mutex_);
        return comm_ ? call(comm_) : kAborted;
    }
    void abort(const nccl::Library& lib) {
        const std::lock_guard lock(mutex_);
        const nccl::Comm comm = std::exchange(comm_, nullptr);
        if (comm && owned_) lib.CommAbort(comm);
    }

  private:
    std::mutex mutex_;
    nccl::Comm comm_ = nullptr;
    bool owned_ = true;
};

// A thread that calls `on_stuck` when a step takes longer than a limit, once.
class StepWatch {
  public:
    StepWatch() = default;
    ~StepWatch() { stop(); }
    StepWatch(const StepWatch&) = delete;
    StepWatch& operator=(const StepWatch&) = delete;

    // TA_E_LIMIT: the system has no thread.
    Status start(std::chrono::milliseconds limit, std::function<void()> on_stuck) {
        limit_ = limit;
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
    // A step: as long as this lives. One at a time.
    class Step {
      public:
        explicit Step(StepWatch& watch) : began_(watch.began_) { began_ = Clock::now(); }
        ~Step() { began_ = Time(); }
        Step(const Step&) = delete;
        Step& operator=(const Step&) = delete;

      private:
        std::atomic<Time>& began_;
    };

  private:
    void run(const std::function<void()>& on_stuck) {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, limit_ / 4, [this] { return stopping_; })) {
            const Time began = began_;
            if (began == Time() || Clock::now() < began + limit_) continue;
            lock.unlock();
            return on_stuck();
        }
    }

    std::thread thread_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::chrono::milliseconds limit_{};
    bool stopping_ = false;
    std::atomic<Time> began_{Time()};
};

}  // namespace ta::share
