// Allocator hooks that check what they are asked for, count what is alive, hand out memory full of garbage, and fail on demand.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "turboattention.h"

namespace ta::testing {

class CountingAllocator {
  public:
    CountingAllocator() = default;
    CountingAllocator(const CountingAllocator&) = delete;
    CountingAllocator& operator=(const CountingAllocator&) = delete;
    ~CountingAllocator() {
        for (const auto& [p, block] : alive_) std::free(p);
    }

    ta_allocator hooks() {
        ta_allocator a{};
        a.struct_size = sizeof a;
        a.allocate = [](size_t bytes, size_t alignment, void* user) {
            return static_cast<CountingAllocator*>(user)->allocate(bytes, alignment);
        };
        a.deallocate = [](void* p, size_t bytes, size_t alignment, void* user) {
            static_cast<CountingAllocator*>(user)->deallocate(p, bytes, alignment);
        };
        a.user = this;
        a.release = [](void* user) { ++static_cast<CountingAllocator*>(user)->released_; };
        return a;
    }

    // Called first for each allocation: true lets it fail.
    bool (*fails)() = nullptr;
    // The value of all bytes of new memory. 0xff: every float is NaN.
    uint8_t fill = 0xff;

    uint64_t bytes_alive() const { return bytes_alive_.load(); }
    uint64_t blocks_alive() const {
        std::lock_guard lock(mutex_);
        return alive_.size();
    }
    uint64_t allocations() const { return allocations_.load(); }
    // Those that `fails` let fail.
    uint64_t refused() const { return refused_.load(); }
    // Memory that came back with something in it.
    uint64_t returned_dirty() const { return returned_dirty_.load(); }
    // How often a set of hooks was let go of.
    int released() const { return released_.load(); }
    // Requests that the ABI excludes: sizes and alignments, and blocks given back with others than they were asked for.
    uint64_t faults() const { return faults_.load(); }

  private:
    struct Block {
        size_t bytes, alignment;
    };
    // The list of what is alive must not come from operator new, which a test may let fail.
    template <class T>
    struct Malloc {
        using value_type = T;
        Malloc() = default;
        template <class U>
        Malloc(const Malloc<U>&) {}
        T* allocate(size_t n) { return static_cast<T*>(std::malloc(n * sizeof(T))); }
        void deallocate(T* p, size_t) { std::free(p); }
        bool operator==(const Malloc&) const { return true; }
    };

    void* allocate(size_t bytes, size_t alignment) {
        ++allocations_;
        if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment > 4096) ++faults_;
        if (fails && fails()) {
            ++refused_;
            return nullptr;
        }
        void* p = nullptr;
        if (posix_memalign(&p, alignment < sizeof(void*) ? sizeof(void*) : alignment, bytes ? bytes : 1) != 0) return nullptr;
        std::memset(p, fill, bytes);
        bytes_alive_ += bytes;
        std::lock_guard lock(mutex_);
        alive_[p] = {bytes, alignment};
        return p;
    }
    void deallocate(void* p, size_t bytes, size_t alignment) {
        {
            std::lock_guard lock(mutex_);
            const auto found = alive_.find(p);
            if (found == alive_.end() || found->second.bytes != bytes || found->second.alignment != alignment) {
                ++faults_;
                return;
            }
            alive_.erase(found);
        }
        bytes_alive_ -= bytes;
        const auto* b = static_cast<const uint8_t*>(p);
        if (std::any_of(b, b + bytes, [](uint8_t x) { return x != 0; })) ++returned_dirty_;
        std::memset(p, 0xdd, bytes);
        std::free(p);
    }

    std::atomic<uint64_t> bytes_alive_{0}, allocations_{0}, refused_{0}, faults_{0}, returned_dirty_{0};
    std::atomic<int> released_{0};
    mutable std::mutex mutex_;
    std::map<void*, Block, std::less<>, Malloc<std::pair<void* const, Block>>> alive_;
};

}  // namespace ta::testing
