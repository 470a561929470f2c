// A device in host memory whose copy engine is late and unordered: the bytes of a copy move at some moment between the call and
// its return, those of calls that overlap mixed with one another. Steps run on the CPU. It fails as it is told, at its k-th
// operation (each block of a copy is one), once or from then on. Allocates nothing while it works, so that tests may let memory
// run out around it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "src/core/device.h"

namespace ta::testing {

enum class DeviceFault {
    kNone,
    kFails,  // TA_E_DEVICE or no memory; of a copy of several blocks some have arrived
    kWrong,  // a copy says that it is done, and one bit is wrong
    kLate,   // it takes 30 ms
};
inline const char* name_of(DeviceFault f) {
    constexpr const char* kNames[] = {"none", "copy fails", "copy wrong", "copy late"};
    return kNames[int(f)];
}

class SimulatedDevice : public Device {
  public:
    explicit SimulatedDevice(uint64_t seed, int ordinal = 0)
        : ordinal_(ordinal), random_(seed * 2 + 1), engine_([this] { run(); }) {}
    ~SimulatedDevice() override {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        engine_.join();
        if (in_use_ != 0) std::abort();  // the library has leaked device memory
    }

    // Faults from the operation after the next `skip` ones.
    void break_now(DeviceFault fault, bool forever, uint64_t skip = 0) {
        std::lock_guard lock(mutex_);
        fault_ = fault;
        at_ = operations_ + skip;
        forever_ = forever;
    }
    void heal() { break_now(DeviceFault::kNone, false); }
    uint64_t operations() const { return operations_.load(); }

    // It runs nothing any more.
    void lose() { lost_ = true; }

    int ordinal() const override { return ordinal_; }
    Result<bool> reach(std::span<const int> ordinals) override {
        return std::set<int>(ordinals.begin(), ordinals.end()).size() == ordinals.size();
    }
    const char* name() const override { return "simulated"; }
    int compute_capability() const override { return 0; }
    uint8_t* allocate(size_t bytes) override {
        void* p = nullptr;
        if (hit() == DeviceFault::kFails || posix_memalign(&p, 4096, bytes) != 0) return nullptr;
        std::memset(p, 0xff, bytes);
        in_use_ += bytes;
        return static_cast<uint8_t*>(p);
    }
    void deallocate(uint8_t* p, size_t bytes) override {
        if (!p) return;
        in_use_ -= bytes;
        std::free(p);
    }
    Status read(void* to, const uint8_t* from, size_t bytes) override { return move(to, from, bytes); }
    Status read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) override {
        for (size_t r = 0; r < rows; ++r)
            TA_RETURN_IF_ERROR(move(static_cast<uint8_t*>(to) + r * row_bytes, from + r * pitch, row_bytes));
        return {};
    }
    Status write(uint8_t* to, const void* from, size_t bytes) override { return move(to, from, bytes); }
    Status health() const override { return lost_ ? fail(TA_E_DEVICE_LOST, "the simulated device is lost") : Status(); }
    Status may_read() override { return hit() == DeviceFault::kFails ? fail(TA_E_DEVICE, "simulated") : Status(); }
    Status copy(std::span<const DeviceCopy> copies, bool) override {
        if (copies.empty()) return {};
        Job job{copies};
        for (size_t i = 0; i < copies.size(); ++i) {
            const DeviceFault fault = hit();
            if (fault == DeviceFault::kNone || job.fault != DeviceFault::kNone) continue;
            job.fault = fault;
            job.bad = i;
        }
        std::unique_lock lock(mutex_);
        job.stride = 1 + random() % copies.size();
        while (std::gcd(job.stride, copies.size()) != 1) ++job.stride;
        job.left = job.fault == DeviceFault::kFails ? job.bad : copies.size();
        job.next = first_;
        first_ = &job;
        ++jobs_;
        wake_.notify_all();
        done_.wait(lock, [&] { return job.done; });
        return job.fault == DeviceFault::kFails ? fail(TA_E_DEVICE, "the simulated copy engine fails") : Status();
    }
    // They are done when start_copy returns; so that those who ask for moves start them here, too, and meet every fault.
    bool copies_beside() const override { return true; }
    Status wait_for_steps() override { return hit() == DeviceFault::kFails ? fail(TA_E_DEVICE, "simulated") : Status(); }
    Status register_host(uint8_t*, size_t) override {
        return hit() == DeviceFault::kFails ? fail(TA_E_DEVICE, "the memory cannot be registered") : Status();
    }
    void unregister_host(uint8_t*) override {}
    int numa_node() const override { return -1; }
    uint32_t* allocate_counters(size_t n) override {
        return hit() == DeviceFault::kFails ? nullptr : static_cast<uint32_t*>(std::calloc(n, sizeof(uint32_t)));
    }
    void deallocate_counters(uint32_t* counters) override { std::free(counters); }
    uint64_t bytes_in_use() const override { return in_use_; }
    uint64_t bytes_peak() const override { return in_use_; }

  private:
    struct Job {  // on the stack of the call
        std::span<const DeviceCopy> copies;
        DeviceFault fault = DeviceFault::kNone;
        size_t bad = 0, stride = 1, at = 0, left = 0;
        bool done = false;
        Job* next = nullptr;
    };
    DeviceFault hit() {
        std::lock_guard lock(mutex_);
        const uint64_t n = operations_++;
        return fault_ == DeviceFault::kNone || n < at_ || (n > at_ && !forever_) ? DeviceFault::kNone : fault_;
    }
    Status move(void* to, const void* from, size_t bytes) {
        if (hit() == DeviceFault::kFails) return fail(TA_E_DEVICE, "the simulated device does not answer");
        std::memcpy(to, from, bytes);
        return {};
    }
    uint64_t random() { return (random_ = random_ * 6364136223846793005u + 1442695040888963407u) >> 33; }

    // The copy engine.
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return stopping_ || first_; });
            if (!first_) return;
            Job** link = &first_;
            for (size_t skip = random() % jobs_; skip > 0; --skip) link = &(*link)->next;
            Job& job = **link;
            // Calls that overlap are mixed with this one only if it takes a moment.
            const auto delay = std::chrono::microseconds(job.fault == DeviceFault::kLate && job.at == job.bad ? 30000
                                                         : random() % 16 == 0                                 ? 50
                                                                                                              : 0);
            if (delay.count() > 0) {
                lock.unlock();
                std::this_thread::sleep_for(delay);
                lock.lock();
                for (link = &first_; *link != &job;) link = &(*link)->next;
            }
            if (job.at < job.left) {
                const bool bad = job.at == job.bad;
                const DeviceCopy& c = job.copies[job.at++ * job.stride % job.copies.size()];
                std::memcpy(c.to, c.from, c.bytes);
                if (bad && job.fault == DeviceFault::kWrong) c.to[random() % c.bytes] ^= uint8_t(1 << random() % 8);
            }
            if (job.at < job.left) continue;
            *link = job.next;
            --jobs_;
            job.done = true;
            done_.notify_all();
        }
    }

    const int ordinal_;
    std::atomic<bool> lost_{false};
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    bool stopping_ = false;
    Job* first_ = nullptr;
    size_t jobs_ = 0;
    uint64_t random_;
    DeviceFault fault_ = DeviceFault::kNone;
    uint64_t at_ = 0;
    bool forever_ = false;
    std::atomic<uint64_t> operations_{0}, in_use_{0};
    std::thread engine_;  // last: it uses the rest
};

}  // namespace ta::testing
