// A device whose steps run late and whose copies run at any time that the calls allow: a copy that is not told to stand behind
// steps overtakes them. Whoever forgets an ordering gets wrong bytes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "src/core/device.h"

namespace ta::testing {

class LateDevice final : public Device {
  public:
    LateDevice() : steps_([this] { run(steps_queue_, kStepDelay); }), copies_([this] { run(copies_queue_, {}); }) {}
    ~LateDevice() override {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        steps_.join();
        copies_.join();
    }

    // Enqueues a step's work on the device, a good while after this.
    void enqueue_step(std::function<void()> work) {
        std::lock_guard lock(mutex_);
        steps_queue_.waiting.push_back({std::move(work), 0});
        ++steps_queue_.enqueued;
        changed_.notify_all();
    }
    Status wait_for_steps() override {
        std::unique_lock lock(mutex_);
        const uint64_t all = steps_queue_.enqueued;
        changed_.wait(lock, [&] { return steps_queue_.done >= all; });
        return {};
    }
    Status copy(std::span<const DeviceCopy> copies, bool to_host) override {
        return start_copy(copies, {.to_host = to_host}).value()->wait();
    }
    Result<std::unique_ptr<DeviceTransfer>> start_copy(std::span<const DeviceCopy> copies,
                                                       const CopyOptions& options) override {
        std::lock_guard lock(mutex_);
        const std::vector<DeviceCopy> list(copies.begin(), copies.end());
        const auto work = [list] {
            for (const DeviceCopy& c : list) std::memcpy(c.to, c.from, c.bytes);
        };
        uint64_t bytes = 0;
        for (const DeviceCopy& c : copies) bytes += c.bytes;
        calls_.push_back({std::this_thread::get_id(), bytes});
        copies_queue_.waiting.push_back({work, options.behind_steps ? steps_queue_.enqueued : 0});
        changed_.notify_all();
        return std::unique_ptr<DeviceTransfer>(std::make_unique<Transfer>(*this, ++copies_queue_.enqueued));
    }

    bool copies_beside() const override { return true; }
    struct CopyCall {
        std::thread::id caller;
        uint64_t bytes;
    };
    // Since it was asked last.
    std::vector<CopyCall> take_calls() {
        std::lock_guard lock(mutex_);
        return std::exchange(calls_, {});
    }

    int ordinal() const override { return 0; }
    const char* name() const override { return "late"; }
    int compute_capability() const override { return 0; }
    uint8_t* allocate(size_t bytes) override {
        return static_cast<uint8_t*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
    }
    void deallocate(uint8_t* p, size_t) override { std::free(p); }
    Status read(void* to, const uint8_t* from, size_t bytes) override {
        TA_RETURN_IF_ERROR(wait_for_steps());
        std::memcpy(to, from, bytes);
        return {};
    }
    Status read_rows(void*, const uint8_t*, size_t, size_t, size_t) override { return fail(TA_E_UNSUPPORTED, "not simulated"); }
    Status write(uint8_t* to, const void* from, size_t bytes) override {
        std::memcpy(to, from, bytes);
        return {};
    }
    Status health() const override { return {}; }
    Status register_host(uint8_t*, size_t) override { return {}; }
    void unregister_host(uint8_t*) override {}
    int numa_node() const override { return -1; }
    uint32_t* allocate_counters(size_t n) override { return static_cast<uint32_t*>(std::calloc(n, sizeof(uint32_t))); }
    void deallocate_counters(uint32_t* counters) override { std::free(counters); }
    uint64_t bytes_in_use() const override { return 0; }
    uint64_t bytes_peak() const override { return 0; }

  private:
    static constexpr std::chrono::milliseconds kStepDelay{30};
    struct Queue {
        struct Entry {
            std::function<void()> work;
            uint64_t behind;  // so many steps
        };
        std::deque<Entry> waiting;
        uint64_t enqueued = 0, done = 0;
    };
    class Transfer final : public DeviceTransfer {
      public:
        Transfer(LateDevice& device, uint64_t number) : device_(device), number_(number) {}
        ~Transfer() override { (void)wait(); }
        Status wait() override {
            std::unique_lock lock(device_.mutex_);
            device_.changed_.wait(lock, [&] { return device_.copies_queue_.done >= number_; });
            return {};
        }
        MoveRoute route() const override { return MoveRoute::kCopyEngine; }

      private:
        LateDevice& device_;
        const uint64_t number_;
    };
    void run(Queue& queue, std::chrono::milliseconds delay) {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] {
                return (stopping_ && queue.waiting.empty()) ||
                       (!queue.waiting.empty() && queue.waiting.front().behind <= steps_queue_.done);
            });
            if (queue.waiting.empty()) return;
            const auto work = std::move(queue.waiting.front().work);
            queue.waiting.pop_front();
            lock.unlock();
            std::this_thread::sleep_for(delay);
            work();
            lock.lock();
            ++queue.done;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool stopping_ = false;
    Queue steps_queue_, copies_queue_;
    std::vector<CopyCall> calls_;
    std::thread steps_, copies_;  // last: they use the rest
};

}  // namespace ta::testing
