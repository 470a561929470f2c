// Shared by policies that choose among sequences: all blocks of a sequence, in the order in which they leave.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tiering/policy/policy.h"

namespace ta {

// Spreads any first n of 0, 1, 2, ... evenly: blocks that leave one after the other lie far apart.
inline uint32_t reversed_bits(uint32_t x) {
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
    return __builtin_bswap32(x);
}

// The order in which a sequence's blocks leave, as a number of each block, and back.
inline uint32_t leave_key(uint32_t block, Loss loss) {
    return loss == Loss::kDropped ? block : reversed_bits(block);
}
inline uint32_t block_of_key(uint32_t key, Loss loss) {
    return leave_key(key, loss);  // both are their own inverse
}

// Chooses from one owner after the other, in the order of `before`, until the bytes are reached.
template <class Before>
std::vector<Victim> choose_owner_by_owner(const EvictionView& view, uint64_t bytes, Loss loss, Before before) {
    const std::span<const BlockOwner> owners = view.owners();
    std::vector<uint32_t> heap(owners.size());
    for (size_t i = 0; i < heap.size(); ++i) heap[i] = uint32_t(i);
    // A heap, since mostly a few of many owners are needed. The largest is on top.
    const auto last = [&](uint32_t a, uint32_t b) { return before(owners[b], owners[a]); };
    std::make_heap(heap.begin(), heap.end(), last);
    std::vector<Victim> victims;
    std::vector<uint32_t> keys;  // of the blocks that may leave
    for (uint64_t found = 0; found < bytes && !heap.empty(); heap.pop_back()) {
        std::pop_heap(heap.begin(), heap.end(), last);
        const uint32_t owner = heap.back();
        keys.clear();
        keys.reserve(owners[owner].end - owners[owner].first);
        uint64_t least = UINT64_MAX;
        for (uint32_t b = owners[owner].first; b < owners[owner].end; ++b) {
            const uint64_t size = view.bytes(owner, b);
            if (size == 0) continue;
            keys.push_back(leave_key(b, loss));
            least = std::min(least, size);
        }
        // More than these cannot be needed.
        const auto most = keys.begin() + ptrdiff_t(std::min<uint64_t>(keys.size(), (bytes - found) / least + 1));
        std::nth_element(keys.begin(), most, keys.end());
        std::sort(keys.begin(), most);
        for (auto key = keys.begin(); key < most && found < bytes; ++key) {
            victims.push_back({owner, block_of_key(*key, loss)});
            found += view.bytes(owner, victims.back().block);
        }
    }
    return victims;
}

}  // namespace ta
