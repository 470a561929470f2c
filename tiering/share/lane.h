// A thread that runs tasks one after the other. Tasks may wait for disks and room, so the thread that answers messages need
// not.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "src/core/status.h"

namespace ta::share {

// TA_E_LIMIT: the system has no thread.
template <class Run>
Status start_thread(std::thread& thread, Run&& run) {
    try {
        thread = std::thread(std::forward<Run>(run));
    } catch (const std::system_error& e) {
        return fail(TA_E_LIMIT, "a thread of the group could not be started: %s", e.what());
    }
    return {};
}

class Lane {
  public:
    Lane() = default;
    ~Lane() { stop(); }
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    // TA_E_LIMIT: the system has no thread.
    Status start() {
        return start_thread(thread_, [this] { run(); });
    }
    using Tasks = std::list<std::function<void()>>;
    // Tasks do not throw.
    void post(std::function<void()> task) {
        Tasks one;
        one.push_back(std::move(task));
        post(std::move(one));
    }
    // Posts tasks that the caller has already listed: takes no memory.
    void post(Tasks&& tasks) noexcept {
        const std::lock_guard lock(mutex_);
        tasks_.splice(tasks_.end(), tasks);
        wake_.notify_one();
    }
    // Waits for the running task; drops those after it.
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            wake_.notify_one();
        }
        if (thread_.joinable()) thread_.join();
        tasks_.clear();
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
            if (stopping_) return;
            Tasks now;
            now.splice(now.end(), tasks_, tasks_.begin());
            lock.unlock();
            now.front()();
            now.clear();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    Tasks tasks_;
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace ta::share
