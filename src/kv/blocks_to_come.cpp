#include "src/kv/blocks_to_come.h"

#include <algorithm>

namespace ta {
namespace {

constexpr size_t kToken = size_t(PageKind::kToken), kChannel = size_t(PageKind::kChannel);

// Counts slots for the blocks that windows pass as the sequence grows, by the kind that these blocks then take. Leaves out
// those of `blocks` that may not pass now.
void add_passing(const Pages& pages, int64_t length, int64_t tokens, std::span<const BlockPtr> blocks, SlotCounts& slots) {
    const Geometry& g = pages.geometry;
    if (!g.has_windows()) return;
    const int64_t first = g.first_kept(length), end = g.first_kept(length + tokens);
    const int64_t at_8_bits = g.all_8_bits ? end : std::clamp<int64_t>(pages.numerics.sink_blocks, first, end);
    slots[size_t(PageKind::kPassedToken)] = uint64_t(at_8_bits - first);
    slots[size_t(PageKind::kPassedChannel)] = uint64_t(end - at_8_bits);
    for (int64_t b = first; b < std::min({end, length / kPageTokens, int64_t(blocks.size())}); ++b) {
        if (!may_pass(blocks[size_t(b)])) --slots[size_t(b < at_8_bits ? PageKind::kPassedToken : PageKind::kPassedChannel)];
    }
}

// Blocks that receive tokens [length, end), sorted by whether they stay at 8 bits.
struct Range {
    Range(const Pages& pages, int64_t length, int64_t end)
        : first(length / kPageTokens), last((end + kPageTokens - 1) / kPageTokens), has_partial(length % kPageTokens != 0) {
        const int64_t at_8_bits = pages.geometry.all_8_bits ? last : std::min<int64_t>(pages.numerics.sink_blocks, last);
        stay = uint64_t(std::max<int64_t>(at_8_bits - first, 0));
        change = uint64_t(last - first) - stay;
        full = uint64_t(std::max<int64_t>(end / kPageTokens - std::max(first, at_8_bits), 0));
    }
    int64_t first, last;    // [first, last)
    bool has_partial;       // the first block has tokens already
    uint64_t stay, change;  // stay: blocks that keep 8 bits; change: blocks that go to their bits once they are full
    uint64_t full;          // blocks of `change` that end up full
};

}  // namespace

bool may_pass(const BlockPtr& block) {
    return block.use_count() == 1 && block->full() && !is_passed(block->kind()) && block->tier() != TierKind::kDisk &&
           block->pins() == 0 && !block->stuck();
}

SlotCounts slots_of_step(const Pages& pages, int64_t length, int64_t n_new, bool may_write_last,
                         std::span<const BlockPtr> blocks) {
    SlotCounts slots{};
    if (n_new == 0) return slots;
    const Range r(pages, length, length + n_new);
    slots[kChannel] = r.full;
    slots[kToken] = r.stay + (r.change - r.full);
    add_passing(pages, length, n_new, blocks, slots);
    if (!r.has_partial) return slots;
    const bool counted = r.stay > 0 || r.change - r.full == r.change;  // the first block counts among the token blocks
    if (may_write_last && counted) --slots[kToken];
    if (!may_write_last && !counted) ++slots[kToken];
    return slots;
}

SlotCounts slots_to_promise(const Pages& pages, int64_t length, int64_t tokens) {
    SlotCounts slots{};
    if (tokens == 0) return slots;
    const Range r(pages, length, length + tokens);
    static constexpr uint64_t kCopy = 1, kTogether = 2, kReopened = 1;
    const auto at_once = [](const Range& range) { return range.stay + std::min(range.change, kTogether); };
    slots[kChannel] = r.change > 0 ? r.full + kReopened : 0;
    // After a truncate into the first block the most sink blocks come again. It frees none of them if others own them, too. In
    // both cases somebody may own the last block afterwards, so that it is copied.
    const int64_t cut = std::min<int64_t>(length, kPageTokens - 1);
    slots[kToken] = kCopy + std::max(at_once(r), at_once(Range(pages, cut, cut + tokens)));
    add_passing(pages, length, tokens, {}, slots);
    return slots;
}

}  // namespace ta
