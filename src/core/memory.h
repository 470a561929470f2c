// Memory from the embedder's allocator, with accounting.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "include/turboattention.h"
#include "src/core/callback_set.h"

namespace ta {

// The seam to the allocator hooks. As thread-safe as the hooks, which the ABI requires to be thread-safe.
class Allocator {
  public:
    // If the functions of `hooks` are null, memory comes from the C library.
    explicit Allocator(CallbackSet<ta_allocator> hooks) : hooks_(std::move(hooks)) {}
    explicit Allocator(const ta_allocator& hooks) : hooks_(hooks) {}
    Allocator(const Allocator&) = delete;
    Allocator& operator=(const Allocator&) = delete;

    // nullptr if there is no memory. `alignment`: a power of two up to 4096.
    void* allocate(size_t bytes, size_t alignment);
    void deallocate(void* ptr, size_t bytes, size_t alignment);
    // The same for memory that may still hold data of somebody's tokens: hooks get it back zeroed.
    void deallocate_used(void* ptr, size_t bytes, size_t alignment);

    // If false, callers may take memory straight from the system, and count it with the functions below.
    bool has_hooks() const { return hooks_->allocate != nullptr; }
    void count_allocated(size_t bytes);
    void count_freed(size_t bytes) { in_use_.fetch_sub(bytes, std::memory_order_relaxed); }

    uint64_t bytes_in_use() const { return in_use_.load(std::memory_order_relaxed); }
    uint64_t bytes_peak() const { return peak_.load(std::memory_order_relaxed); }

  private:
    CallbackSet<ta_allocator> hooks_;
    std::atomic<uint64_t> in_use_{0}, peak_{0};
};

// The memory of the machine, or this process's limit of address space (RLIMIT_AS) if that is less.
uint64_t machine_memory();

// A workspace: an aligned array that grows, and loses its content when it does.
class Buffer {
  public:
    explicit Buffer(Allocator& allocator) : allocator_(&allocator) {}
    Buffer(Buffer&& other) noexcept
        : allocator_(other.allocator_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() { release(); }

    // False if there is no memory; the old array is then kept.
    bool reserve(size_t bytes);
    // Frees the array if it is larger than `most`: too large to keep from step to step.
    void trim(size_t most = kKeptBytes) {
        if (bytes_ > most) release();
    }
    uint8_t* data() { return data_; }
    const uint8_t* data() const { return data_; }

  private:
    static constexpr size_t kAlignment = 128;
    static constexpr size_t kKeptBytes = size_t{16} << 20;
    void release();
    Allocator* allocator_;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

}  // namespace ta
