#include "src/core/memory.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace ta {

void* Allocator::allocate(size_t bytes, size_t alignment) {
    void* ptr = nullptr;
    if (hooks_->allocate) {
        ptr = hooks_->allocate(bytes, alignment, hooks_->user);
    } else if (posix_memalign(&ptr, alignment, bytes) != 0) {
        ptr = nullptr;
    }
    if (ptr) count_allocated(bytes);
    return ptr;
}

void Allocator::count_allocated(size_t bytes) {
    const uint64_t now = in_use_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    uint64_t peak = peak_.load(std::memory_order_relaxed);
    while (now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
    }
}

void Allocator::deallocate(void* ptr, size_t bytes, size_t alignment) {
    if (!ptr) return;
    count_freed(bytes);
    if (hooks_->allocate) {
        hooks_->deallocate(ptr, bytes, alignment, hooks_->user);
    } else {
        std::free(ptr);
    }
}

void Allocator::deallocate_used(void* ptr, size_t bytes, size_t alignment) {
    if (ptr && has_hooks()) std::memset(ptr, 0, bytes);
    deallocate(ptr, bytes, alignment);
}

uint64_t machine_memory() {
    const uint64_t memory = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
    rlimit space{};
    return getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY ? std::min<uint64_t>(memory, space.rlim_cur)
                                                                                : memory;
}

bool Buffer::reserve(size_t bytes) {
    if (bytes <= bytes_) return true;
    const size_t wanted = std::max(bytes, bytes_ + bytes_ / 2);
    void* fresh = allocator_->allocate(wanted, kAlignment);
    if (!fresh) return false;
    allocator_->deallocate_used(data_, bytes_, kAlignment);
    data_ = static_cast<uint8_t*>(fresh);
    bytes_ = wanted;
    return true;
}

void Buffer::release() {
    allocator_->deallocate_used(std::exchange(data_, nullptr), std::exchange(bytes_, 0), kAlignment);
}

}  // namespace ta
