// Memory from the embedder's allocator, with accounting.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "include/turboattention.h"
#include "src/core/callback_set.h"

namespace ta {

// The seam to the allocator hooks. Thread-safe as far as the hooks are, which the ABI asks for.
class Allocator {
  public:
    // `hooks` with null functions: the C library.
    explicit Allocator(CallbackSet<ta_allocator> hooks) : hooks_(std::move(hooks)) {}
    explicit Allocator(const ta_allocator& hooks) : hooks_(hooks) {}
    Allocator(const Allocator&) = delete;
    Allocator& operator=(const Allocator&) = delete;

    // nullptr when there is none. `alignment`: a power of two up to 4096.
    void* allocate(size_t bytes, size_t alignment);
    void deallocate(void* ptr, size_t bytes, size_t alignment);
    // The same of memory that somebody's tokens may have left something in: hooks get it back zeroed.
    void deallocate_used(void* ptr, size_t bytes, size_t alignment);

    // For memory that comes straight from the system where there are no hooks.
    bool has_hooks() const { return hooks_->allocate != nullptr; }
    void count_allocated(size_t bytes);
    void count_freed(size_t bytes) { in_use_.fetch_sub(bytes, std::memory_order_relaxed); }

    uint64_t bytes_in_use() const { return in_use_.load(std::memory_order_relaxed); }
    uint64_t bytes_peak() const { return peak_.load(std::memory_order_relaxed); }

  private:
    CallbackSet<ta_allocator> hooks_;
    std::atomic<uint64_t> in_use_{0}, peak_{0};
};

// The most that this process can have of the machine's memory, address space that it may not use left out.
uint64_t machine_memory();

// An aligned array that grows and loses its contents when it grows: a workspace.
class Buffer {
  public:
    explicit Buffer(Allocator& allocator) : allocator_(&allocator) {}
    Buffer(Buffer&& other) noexcept
        : allocator_(other.allocator_), data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Buffer& operator=(Buffer&&) = delete;
    ~Buffer() { release(); }

    // False when there is no memory; the old array is kept then.
    bool reserve(size_t bytes);
    // Gives the array back if it is larger than what is worth keeping from step to step.
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
