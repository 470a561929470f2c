#include "tiering/store/slot_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "kernels/format/slot.h"
#include "src/core/checked.h"

namespace ta {
namespace {

constexpr size_t kHugePage = 2 << 20;
constexpr size_t kSmallestChunk = 2 * kHugePage, kLargestChunk = 64 * kHugePage;

// AddressSanitizer sees the use of a freed slot only if each slot is an allocation of its own.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kUseChunks = false;
#elif defined(__has_feature)
constexpr bool kUseChunks = !__has_feature(address_sanitizer);
#else
constexpr bool kUseChunks = true;
#endif

}  // namespace

// Zeroes the memory first: the driver gives it to any caller in the process.
SlotSlab::~SlotSlab() {
    if (!data_) return;
    const DeviceRange all{data_, bytes_};
    try {
        (void)device_.zero({&all, 1});  // if it fails, the device is lost
    } catch (const std::bad_alloc&) {
        // Nothing was ever zeroed, and there is no memory for the event that zeroing needs.
    }
    device_.deallocate(data_, bytes_);
}

bool SlotSlab::take(const size_t (&slots)[kPageKinds], const size_t (&strides)[kPageKinds]) {
    size_t smallest = SIZE_MAX, largest = 0, kinds = 0;
    for (int kind = 0; kind < kPageKinds; ++kind) {
        if (strides[kind] == 0) continue;
        // Regions are sized for the other kinds: passed blocks may be far smaller.
        if (!is_passed(PageKind(kind))) smallest = std::min(smallest, strides[kind]);
        largest = std::max(largest, strides[kind]);
        ++kinds;
    }
    const auto count_regions = [&](size_t region_bytes) {
        size_t regions = 0;
        for (int kind = 0; kind < kPageKinds; ++kind) {
            if (strides[kind] == 0) continue;
            const size_t most = region_bytes / strides[kind];
            regions = std::max(regions, (slots[kind] + most - 1) / most);
        }
        return regions + std::max<size_t>(kinds, 2);  // the last region of each kind may be only partly in use
    };
    // Chooses the size that wastes least. A region is rarely a multiple of every stride, and small regions have small
    // remainders.
    constexpr size_t kMostSlots = 64;  // of the smallest kind in a region
    size_t regions = 0;
    for (size_t n = (largest + smallest - 1) / smallest; n <= std::max(kMostSlots, largest / smallest + 1); ++n) {
        const size_t region_bytes = n * smallest, here = count_regions(region_bytes);
        if (here > UINT32_MAX || (regions > 0 && here * region_bytes >= regions * region_bytes_)) continue;
        regions = here;
        region_bytes_ = region_bytes;
    }
    if (regions == 0) return false;
    regions_.resize(regions);
    for (auto& open : open_) open.reserve(2 * regions);
    empty_.reserve(regions);
    for (size_t i = regions; i-- > 0;) empty_.push_back(uint32_t(i));
    bytes_ = regions * region_bytes_;
    data_ = device_.allocate(bytes_);
    return data_ != nullptr;
}

uint8_t* SlotSlab::cut(int kind, size_t stride) {
    auto& open = open_[kind];
    const size_t most = region_bytes_ / stride;
    while (!open.empty()) {
        Region& r = regions_[open.back()];
        if (r.kind == kind && r.used < most) break;
        open.pop_back();
    }
    if (open.empty()) {
        if (empty_.empty()) return nullptr;
        try {
            regions_[empty_.back()].free.reserve(most);  // so that give() never allocates
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
        open.push_back(empty_.back());
        empty_.pop_back();
        regions_[open.back()].kind = kind;
    }
    Region& r = regions_[open.back()];
    ++r.used;
    if (r.free.empty()) return data_ + open.back() * region_bytes_ + r.cut++ * stride;
    uint8_t* slot = r.free.back();
    r.free.pop_back();
    return slot;
}

void SlotSlab::give(int kind, uint8_t* slot) {
    const size_t index = region_of(slot);
    Region& r = regions_[index];
    const bool was_full = r.free.empty();
    r.free.push_back(slot);
    if (--r.used == 0) {
        r.free.clear();
        r.cut = 0;
        r.kind = -1;
        empty_.push_back(uint32_t(index));
        std::erase(open_[kind], uint32_t(index));
    } else if (was_full && std::find(open_[kind].begin(), open_[kind].end(), uint32_t(index)) == open_[kind].end()) {
        open_[kind].push_back(uint32_t(index));
    }
}

size_t SlotSlab::count_room(int kind, size_t stride, std::span<const size_t> kept) const {
    const size_t most = region_bytes_ / stride;
    size_t slots = 0;
    for (size_t r = 0; r < regions_.size(); ++r) {
        const size_t used = regions_[r].used - kept[r];
        if (used == 0 || regions_[r].kind == kind) slots += most - used;
    }
    return slots;
}

SlotMemory::SlotMemory(Allocator& allocator, SlotSlab* slab, int kind, size_t slot_bytes, uint64_t most)
    : allocator_(allocator),
      slab_(slab),
      kind_(kind),
      slot_bytes_(slot_bytes),
      // Only whole pages can be given back to the system.
      stride_(round_up(slot_bytes, std::max(kSlotAlignment, size_t(sysconf(_SC_PAGESIZE))))),
      most_(most) {}

SlotMemory::~SlotMemory() {
    for (const Chunk& chunk : chunks_) munmap(chunk.data, chunk.bytes);
}

uint8_t* SlotMemory::take() {
    if (slab_) return slab_->cut(kind_, stride_);
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
    if (slab_) return slab_->give(kind_, slot);
    if (!kUseChunks || allocator_.has_hooks()) return allocator_.deallocate(slot, slot_bytes_, kSlotAlignment);
    madvise(slot, stride_, MADV_DONTNEED);
    free_.push_back(slot);
    allocator_.count_freed(slot_bytes_);
}

// Chunks double, so that a small pool maps little and a large one has few chunks. Untouched pages of a chunk take no memory.
bool SlotMemory::add_chunk() {
    const uint64_t most =
        most_ / slot_bytes_ - std::min<uint64_t>(slots_, most_ / slot_bytes_);  // slots that the budget still allows
    const size_t wanted = round_up(std::clamp(slots_ * stride_, kSmallestChunk, kLargestChunk), stride_) / stride_;
    const size_t count = size_t(std::max<uint64_t>(1, std::min<uint64_t>(wanted, most)));
    const size_t bytes = count * stride_;
    const bool huge = bytes >= kSmallestChunk && !chunks_.empty();  // a small pool takes no huge page for a few slots
    const size_t alignment = huge ? kHugePage : size_t(kSlotAlignment);
    const size_t mapped = round_up(bytes, alignment);
    try {
        free_.reserve(slots_ + count);
        chunks_.reserve(chunks_.size() + 1);
    } catch (const std::bad_alloc&) {
        return false;
    }
    // Maps more than needed, to cut an aligned part out of it.
    const size_t slack = huge ? kHugePage : 0;
    void* map = mmap(nullptr, mapped + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return false;
    auto* start = static_cast<uint8_t*>(map);
    auto* data = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(start), alignment));
    const size_t before = size_t(data - start), after = slack - before;
    if (before) munmap(start, before);
    if (after) munmap(data + mapped, after);
    if (huge) madvise(data, mapped, MADV_HUGEPAGE);  // only advice: without it all works, slower
    chunks_.push_back({data, mapped});
    slots_ += count;
    for (size_t i = count; i-- > 0;) free_.push_back(data + i * stride_);
    return true;
}

}  // namespace ta
