// A fixed set of worker threads for short parallel sections.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace tinylm {

// Workers sleep between sections. OpenMP's and OpenBLAS's would spin and so take cores from the threads of the attention
// library.
class Workers {
  public:
    explicit Workers(int count) {
        for (int i = 1; i < count; ++i) threads_.emplace_back([this, i] { work(i); });
    }
    ~Workers() {
        stop_ = true;
        start();
        for (std::thread& t : threads_) t.join();
    }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    int count() const { return static_cast<int>(threads_.size()) + 1; }

    // Calls body(i) for i in [0, count()), each on its own thread, and returns when all are done. body must not throw.
    void run(const std::function<void(int)>& body) {
        body_ = &body;
        pending_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
        start();
        body(0);
        for (int left = pending_.load(); left != 0; left = pending_.load()) pending_.wait(left);
    }

  private:
    void start() {
        generation_.fetch_add(1);
        generation_.notify_all();
    }
    void work(int index) {
        for (unsigned seen = 0;;) {
            generation_.wait(seen);
            ++seen;
            if (stop_) return;
            (*body_)(index);
            if (pending_.fetch_sub(1) == 1) pending_.notify_one();
        }
    }

    std::vector<std::thread> threads_;
    std::atomic<unsigned> generation_{0};
    std::atomic<int> pending_{0};
    std::atomic<bool> stop_{false};
    const std::function<void(int)>* body_ = nullptr;
};

}  // namespace tinylm
