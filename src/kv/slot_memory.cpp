#include "src/kv/slot_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "kernels/format/slot.h"

namespace ta {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kSmallestChunk = 2 * kHugePage, kLargestChunk = 64 * kHugePage;

// AddressSanitizer finds the use of a freed slot only where each is an allocation of its own.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kUseChunks = false;
#else
constexpr bool kUseChunks = true;
#endif

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

}  // namespace

bool SlotSlab::take(size_t bytes) {
    data_ = device_.allocate(bytes);
    if (!data_) return false;
    bytes_ = bytes;
    return true;
}

uint8_t* SlotSlab::cut(size_t bytes) {
    if (bytes > bytes_ - used_) return nullptr;
    used_ += bytes;
    return data_ + (used_ - bytes);
}

SlotMemory::SlotMemory(Allocator& allocator, SlotSlab* slab, size_t slot_bytes, uint64_t most)
    : allocator_(allocator), slab_(slab), slot_bytes_(slot_bytes), stride_(round_up(slot_bytes, kSlotAlignment)), most_(most) {}

SlotMemory::~SlotMemory() {
    for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.bytes);
}

size_t SlotMemory::bytes_for(uint64_t most) const {
    return slot_bytes_ ? size_t(most / slot_bytes_ + 1) * stride_ : 0;
}

uint8_t* SlotMemory::take() {
    if (slab_) {
        if (free_.empty()) {
            try {
                if (free_.capacity() <= slots_) free_.reserve(2 * slots_ + 16);
            } catch (const std::bad_alloc&) {
                return nullptr;
            }
            uint8_t* slot = slab_->cut(stride_);
            if (slot) ++slots_;
            return slot;
        }
        uint8_t* slot = free_.back();
        free_.pop_back();
        return slot;
    }
    if (!kUseChunks || allocator_.has_hooks()) {
        return static_cast<uint8_t*>(allocator_.allocate(slot_bytes_, kSlotAlignment));
    }
    if (free_.empty() && !add_chunk()) return nullptr;
    uint8_t* slot = free_.back();
    free_.pop_back();
    allocator_.count_allocated(slot_bytes_);
    return slot;
}

void SlotMemory::give(uint8_t* slot) {
    if (slab_) return free_.push_back(slot);
    if (!kUseChunks || allocator_.has_hooks()) return allocator_.deallocate(slot, slot_bytes_, kSlotAlignment);
    madvise(slot, stride_, MADV_DONTNEED);
    free_.push_back(slot);
    allocator_.count_freed(slot_bytes_);
}

// Chunks double, so that a small pool maps little and a large one has few of them. Untouched pages of a chunk take no memory.
bool SlotMemory::add_chunk() {
    const uint64_t most =
        most_ / slot_bytes_ - std::min<uint64_t>(slots_, most_ / slot_bytes_);  // that the budget still allows
    const size_t wanted = round_up(std::clamp(slots_ * stride_, kSmallestChunk, kLargestChunk), stride_) / stride_;
    const size_t count = size_t(std::max<uint64_t>(1, std::min<uint64_t>(wanted, most)));
    const size_t bytes = count * stride_;
    const bool huge = bytes >= kSmallestChunk;
    const size_t alignment = huge ? kHugePage : size_t(kSlotAlignment);
    const size_t mapped = round_up(bytes, alignment);
    try {
        free_.reserve(slots_ + count);
        chunks_.reserve(chunks_.size() + 1);
    } catch (const std::bad_alloc&) {
        return false;
    }
    // Mapped with room to cut an aligned part out of it.
    const size_t slack = huge ? kHugePage : 0;
    void* map = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    auto* start = static_cast<uint8_t*>(map);
    auto* data = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(start), alignment));
    const size_t before = size_t(data - start), after = slack - before;
    if (before) munmap(start, before);
    if (after) munmap(data + mapped, after);
    if (huge) madvise(data, mapped, MADV_HUGEPAGE);  // advice: without it everything works, slower
    chunks_.push_back({data, mapped});
    slots_ += count;
    for (size_t i = count; i-- > 0;) free_.push_back(data + i * stride_);
    return true;
}

}  // namespace ta
