#include "src/core/thread_pool.h"

#include <algorithm>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ta {
namespace {

constexpr int kSpinsBeforeYield = 2000;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

ThreadPool::~ThreadPool() {
    stop();
}

Status ThreadPool::start(int threads, std::chrono::microseconds poll) {
    poll_ = poll;
    try {
        workers_.reserve(size_t(threads - 1));
        for (int w = 1; w < threads; ++w) workers_.emplace_back([this, w] { work(w); });
    } catch (const std::system_error&) {
        const int started = int(workers_.size());
        stop();
        return fail(TA_E_LIMIT, "only %d of %d worker threads could be started", started, threads - 1);
    }
    return {};
}

void ThreadPool::stop() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
    workers_.clear();
}

void ThreadPool::take_indices(int worker) {
    for (;;) {
        const int64_t first = next_.fetch_add(grain_, std::memory_order_relaxed);
        if (first >= n_) return;
        const int64_t last = std::min(first + grain_, n_);
        for (int64_t i = first; i < last; ++i) call_(user_, i, worker);
    }
}

void ThreadPool::run(int64_t n, int64_t grain, Call call, const void* user) {
    if (n <= 0) return;
    if (workers_.empty() || n <= grain || !running_.try_lock()) {
        for (int64_t i = 0; i < n; ++i) call(user, i, 0);
        return;
    }
    std::lock_guard running(running_, std::adopt_lock);
    n_ = n;
    grain_ = grain;
    call_ = call;
    user_ = user;
    next_.store(0, std::memory_order_relaxed);
    gate_.fetch_and(~kClosed, std::memory_order_acq_rel);
    {
        std::lock_guard lock(mutex_);
        round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_indices(0);
    gate_.fetch_or(kClosed, std::memory_order_acq_rel);
    for (int spins = 0; gate_.load(std::memory_order_acquire) != kClosed; ++spins) {
        if (spins < kSpinsBeforeYield) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

void ThreadPool::work(int worker) {
    uint64_t seen = 0;
    for (;;) {
        const auto deadline = std::chrono::steady_clock::now() + poll_;
        while (round_.load(std::memory_order_acquire) == seen && std::chrono::steady_clock::now() < deadline) relax();
        if (round_.load(std::memory_order_acquire) == seen) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return stopping_ || round_.load(std::memory_order_acquire) != seen; });
            if (stopping_) return;
        }
        seen = round_.load(std::memory_order_acquire);
        if (!(gate_.fetch_add(1, std::memory_order_acq_rel) & kClosed)) take_indices(worker);
        gate_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace ta
