#include "tiering/store/slot_map.h"

#include <algorithm>
#include <bit>

#include "src/core/checked.h"

namespace ta {
namespace {

// Classes take whole regions from each other, so there should be many. Fewer only if the space is small, or if that loses less
// to rounding.
constexpr uint64_t kRegionsWanted = 64;
// A region has room for few of the largest slots if it has many of the smallest. So a far smaller class gets a larger stride
// than it needs.
constexpr uint64_t kLargestToSmallest = 16, kStrideUnit = 4096;

}  // namespace

bool SlotMap::Shape::valid() const {
    if (!checked_mul(region_bytes, regions) || regions > UINT32_MAX / kIndicesPerRegion) return false;
    uint64_t most = 0;
    for (int c = 0; c < kSlotClasses; ++c) {
        if (stride[c] == 0) continue;
        const uint64_t slots = region_bytes / stride[c];
        if (slots < 1 || slots > kIndicesPerRegion) return false;
        most = std::max(most, slots);
    }
    // fit() makes more indices only of regions that cannot be larger. An earlier version made up to twice as many regions.
    return most == kIndicesPerRegion || (most > 0 && regions <= 2 * kRegionsWanted);
}

SlotMap::Shape SlotMap::fit(uint64_t bytes, const uint64_t (&strides)[kSlotClasses]) {
    Shape shape;
    const uint64_t largest = std::ranges::max(strides);
    if (largest == 0) return shape;
    uint64_t smallest = UINT64_MAX;
    for (int c = 0; c < kSlotClasses; ++c) {
        if (strides[c] == 0) continue;
        shape.stride[c] = std::max(strides[c], round_up(largest / kLargestToSmallest, kStrideUnit));
        smallest = std::min(smallest, shape.stride[c]);
    }
    const uint64_t most = smallest * kIndicesPerRegion;
    // Among region sizes that one class fills exactly, takes the one that loses least: what slots of the worst-fitting class
    // cannot use, and one region for each other class, which may hold it for a single slot. For a large space only one size is
    // in question.
    const uint64_t least = std::clamp(bytes / kRegionsWanted, largest, most);
    const auto classes = uint64_t(std::ranges::count_if(shape.stride, [](uint64_t stride) { return stride > 0; }));
    uint64_t least_lost = UINT64_MAX;
    for (const uint64_t filled_by : shape.stride) {
        for (uint64_t n = 1; n <= kIndicesPerRegion; ++n) {
            const uint64_t region = n * filled_by;
            if (region < least || region > most) continue;
            const uint64_t regions = bytes / region;
            if (regions < std::min(classes, bytes / largest)) continue;  // so that every class can have a region
            uint64_t used = bytes;                                       // by the worst-fitting class
            for (const uint64_t stride : shape.stride) {
                if (stride > 0) used = std::min(used, regions * (region / stride) * stride);
            }
            const uint64_t lost = bytes - used + (classes - 1) * region;
            if (lost > least_lost || (lost == least_lost && region >= shape.region_bytes)) continue;
            least_lost = lost;
            shape.region_bytes = region;
        }
    }
    shape.regions = std::min<uint64_t>(bytes / shape.region_bytes, UINT32_MAX / kIndicesPerRegion);
    return shape;
}

SlotMap::SlotMap(const Shape& shape) : shape_(shape), regions_(shape.regions) {}

uint64_t SlotMap::all(int slot_class) const {
    const uint32_t n = shape_.per_region(slot_class);
    return n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

bool SlotMap::known(Slot slot) const {
    return slot.slot_class < kSlotClasses && slot.index < shape_.indices() &&
           slot.index % kIndicesPerRegion < shape_.per_region(slot.slot_class);
}

bool SlotMap::acquire(uint8_t slot_class, Slot& slot) {
    const uint64_t full = all(slot_class);
    if (full == 0) return false;
    // Prefers a region that already serves the class: an empty one stays good for all classes.
    size_t empty = regions_.size(), r = first_open_[slot_class];
    bool seen_room = false;
    for (; r < regions_.size(); ++r) {
        const Region& region = regions_[r];
        if (region.slot_class == int8_t(slot_class) && region.taken != full) break;
        if (region.slot_class == -1 && empty == regions_.size()) empty = r;
        if (!seen_room && region.slot_class != -1) first_open_[slot_class] = r + 1;
        if (region.slot_class == -1) seen_room = true;
    }
    if (r == regions_.size()) r = empty;
    if (r == regions_.size()) return false;
    Region& region = regions_[r];
    region.slot_class = int8_t(slot_class);
    const int bit = std::countr_one(region.taken);
    region.taken |= uint64_t{1} << bit;
    slot = {uint32_t(r * kIndicesPerRegion + size_t(bit)), slot_class};
    return true;
}

Result<std::vector<Slot>> SlotMap::acquire_all(std::span<const uint8_t> wanted, TierKind tier) {
    const char* const name = name_of(tier);
    std::vector<Slot> slots;
    slots.reserve(wanted.size());
    for (const uint8_t slot_class : wanted) {
        Slot slot;
        if (slot_class < kSlotClasses && acquire(slot_class, slot)) {
            slots.push_back(slot);
            continue;
        }
        for (const Slot s : slots) give(s);
        if (slot_class >= kSlotClasses || shape_.stride[slot_class] == 0)
            return fail(TA_E_INVALID, "the %s tier has no slots of class %u", name, slot_class);
        TierStats now;
        describe(now);
        uint64_t bytes = 0;
        for (const uint8_t w : wanted) bytes += w < kSlotClasses ? shape_.stride[w] : 0;
        // If enough bytes are free but not contiguous, one slot is lacking.
        const uint64_t free = shape_.bytes() - now.used;
        const uint64_t lacking = bytes > free ? bytes - free : shape_.stride[slot_class];
        return fail(TA_E_TIER_FULL, "the %s tier has no room for %zu more blocks: %llu of %llu bytes are in use", name,
                    wanted.size(), (unsigned long long)now.used, (unsigned long long)shape_.bytes())
            .tier(code_of(tier))
            .bytes(lacking);
    }
    return slots;
}

bool SlotMap::take(Slot slot) {
    Region& region = regions_[slot.index / kIndicesPerRegion];
    const uint64_t bit = uint64_t{1} << slot.index % kIndicesPerRegion;
    if ((region.slot_class != -1 && region.slot_class != int8_t(slot.slot_class)) || (region.taken & bit)) return false;
    region.slot_class = int8_t(slot.slot_class);
    region.taken |= bit;
    return true;
}

void SlotMap::give(Slot slot) {
    const size_t r = slot.index / kIndicesPerRegion;
    Region& region = regions_[r];
    region.taken &= ~(uint64_t{1} << slot.index % kIndicesPerRegion);
    if (region.taken == 0) region.slot_class = -1;
    for (size_t& first : first_open_) first = std::min(first, r);
}

bool SlotMap::taken(Slot slot) const {
    if (!known(slot)) return false;
    const Region& region = regions_[slot.index / kIndicesPerRegion];
    return region.slot_class == int8_t(slot.slot_class) && (region.taken >> slot.index % kIndicesPerRegion & 1);
}

void SlotMap::describe(TierStats& stats) const {
    stats.used = stats.room = stats.largest_free = 0;
    uint64_t empty = 0, run = 0, longest = 0;  // regions
    for (int c = 0; c < kSlotClasses; ++c) stats.slots_used[c] = stats.slots_free[c] = 0;
    for (const Region& region : regions_) {
        if (region.slot_class < 0) {
            ++empty;
            longest = std::max(longest, ++run);
            continue;
        }
        run = 0;
        const int c = region.slot_class;
        const auto used = uint64_t(std::popcount(region.taken)), left = shape_.per_region(c) - used;
        stats.slots_used[c] += used;
        stats.slots_free[c] += left;
        stats.used += used * shape_.stride[c];
        stats.room += left * shape_.stride[c];
        uint64_t free = ~region.taken & all(c), bits = 0;
        for (; free; free &= free << 1) ++bits;
        stats.largest_free = std::max(stats.largest_free, bits * shape_.stride[c]);
    }
    stats.room += empty * shape_.region_bytes;
    stats.regions_empty = empty;
    stats.free = shape_.bytes() - stats.used;
    stats.largest_free = std::max(stats.largest_free, longest * shape_.region_bytes);
    uint64_t least = stats.free;
    for (int c = 0; c < kSlotClasses; ++c) {
        if (shape_.stride[c] == 0) continue;
        stats.slots_per_region[c] = shape_.per_region(c);
        stats.slots_empty[c] = empty * shape_.per_region(c);
        stats.slots_free[c] += stats.slots_empty[c];
        least = std::min(least, stats.slots_free[c] * shape_.stride[c]);
    }
    stats.fragmentation = stats.free ? 1.0 - double(least) / double(stats.free) : 0;
}

}  // namespace ta
