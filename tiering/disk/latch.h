// A client that waits for its requests to a disk tier.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include "tiering/disk/request.h"

namespace ta {

// For requests with the tags 0 ... n - 1.
class DiskLatch final : public DiskClient {
  public:
    explicit DiskLatch(size_t n) : completions_(n), missing_(n) {}
    void on_done(DiskCompletion completion) noexcept override {
        std::lock_guard lock(mutex_);
        completions_[completion.tag] = std::move(completion);
        if (--missing_ == 0) all_.notify_all();
    }
    // Waits until all are done. Completions by tag.
    std::vector<DiskCompletion>& wait() {
        std::unique_lock lock(mutex_);
        all_.wait(lock, [this] { return missing_ == 0; });
        return completions_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable all_;
    std::vector<DiskCompletion> completions_;
    size_t missing_;
};

}  // namespace ta
