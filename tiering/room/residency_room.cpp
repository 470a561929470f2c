// Estimates, made before anything is lost: can a begin have the room that it lacks? Also the way of its blocks through full
// tiers, and dropping.
#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tiering/room/candidates.h"
#include "tiering/room/residency.h"
#include "tiering/store/fall.h"

namespace ta {
namespace {

// Bytes by tier: that may be dropped, that may go to the next tier, and that may go to the disk, once there is room.
struct Movable {
    uint64_t drops[kTiers] = {}, down[kTiers] = {}, to_disk[kTiers] = {};
};

bool is_full(const Tier& tier, const Geometry& geometry) {
    const TierStats stats = tier.stats();
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        if (geometry.slot_bytes(PageKind(kind)) > 0 && stats.slots_free[kind] == 0) return true;
    }
    return false;
}

// True if the block may leave its tier once nothing moves it. `idle`: its sequence may be suspended.
bool may_ever_leave(const Block& block, bool idle) {
    return !block.dropped() && (block.sealed() || idle) && block.pins() == 0 && !block.stuck() && block.has_pages();
}

// True if the slot of a dropped block serves others. Below the device it serves blocks of its size only. All full blocks have one
// size there, but for passed ones.
bool slot_serves(TierKind tier, PageKind kind) {
    return tier == TierKind::kDevice || !is_passed(kind);
}

}  // namespace

uint64_t Residency::bytes_of(std::span<const PageKind> kinds) const {
    uint64_t bytes = 0;
    for (const PageKind kind : kinds) bytes += geometry_.slot_bytes(kind);
    return bytes;
}

uint64_t Residency::bytes_on_disk(std::span<Resident* const> seqs) const {
    if (store_.blocks_on_disk() == 0) return 0;
    uint64_t bytes = 0;
    std::unordered_set<const Block*> seen;
    for (const Resident* s : seqs) {
        for (const BlockPtr& block : s->blocks) {
            if (block->tier() == TierKind::kDisk && (block.use_count() == 1 || seen.insert(block.get()).second))
                bytes += geometry_.slot_bytes(block->kind());
        }
    }
    return bytes;
}

Residency::TierBytes Residency::unused_bytes() const {
    const std::array<SlotCounts, kTiers> slots = residents_.unused_slots();
    TierBytes bytes;
    for (size_t t = 0; t < kTiers; ++t) bytes[t] = store_.bytes_of(slots[t]);
    return bytes;
}

// For each tier: bytes that are free, that are free when the present readers end, and of published blocks that nobody uses.
Residency::TierBytes Residency::count_room() const {
    TierBytes room = unused_bytes();
    room[0] += store_.free_bytes();
    for (std::optional<TierKind> t = tiers_.below(TierKind::kDevice); t; t = tiers_.below(*t)) {
        const Tier& there = *tiers_[*t];
        if (there.health().state == TierState::kOk) room[size_t(*t)] += there.stats().room;
    }
    for (size_t t = 0; t < kTiers; ++t) room[t] += store_.vacated_bytes(TierKind(t));
    return room;
}

// The size of a block like `above`, in units of its size in the tier.
double Residency::times_in(TierKind tier, PageKind above) const {
    if (!geometry_.falls) return 1.0;
    return double(geometry_.slot_bytes(above)) / double(geometry_.slot_bytes(kind_in_tier(above, tier)));
}

// Moves change where bytes are, not how many there are, so this counts room in all tiers. The estimate errs towards OK.
Status Residency::promise_room(Loading& mine, uint64_t bytes) {
    promised_ -= std::exchange(mine.promised, bytes);
    const uint64_t to_others = promised_.fetch_add(bytes);
    if (mover_ && mover_->busy()) return {};  // a moving block has two places for a moment
    const TierBytes room = count_room();
    double all = 0;
    for (size_t t = 0; t < kTiers; ++t) all += double(room[t]) * (t == 0 ? 1.0 : times_in(TierKind::kDisk, PageKind::kToken));
    all -= std::min(all, double(to_others));
    if (double(bytes) <= all) return {};
    promised_ -= std::exchange(mine.promised, 0);
    return fail(TA_E_TIER_FULL, "%llu more bytes of blocks do not fit: all tiers together have room for %.0f",
                (unsigned long long)bytes, all)
        .bytes(bytes - uint64_t(all));
}

// Estimate in bytes of what moves and drops could free now.
struct Residency::MoveEstimate {
    // Blocks that may leave the device: their bytes here and in the next tier. By kind for blocks that fall on the way; last
    // those that do not fall.
    struct Leaves {
        uint64_t bytes = 0, below = 0;
    } leaves[kPageKinds + 1];
    uint64_t shrinks = 0;             // bytes that blocks lose when they leave the device for memory below it
    uint64_t others = 0;              // blocks above the disk that are not of the step's sequences
    uint64_t droppable[kTiers] = {};  // by TierKind, for this step
    uint64_t moving = 0;              // blocks of the device that loads have read and that may leave
};

Residency::MoveEstimate Residency::estimate_moves(std::span<Resident* const> mine) const {
    MoveEstimate c;
    const TierKind next = tiers_.below(TierKind::kDevice).value_or(TierKind::kDisk);
    std::lock_guard lock(residents_.lock());
    std::unordered_set<const Block*> seen, shared_with_mine;
    for (const Resident* s : mine) {
        for (const BlockPtr& block : s->blocks) {
            if (block.use_count() > 1) shared_with_mine.insert(block.get());
        }
    }
    for (const Loading* load : loads_) {
        for (const MoveItem& item : load->blocks) {
            const Block& block = *item.block;
            if (block.tier() == TierKind::kDevice && may_leave(block) && seen.insert(&block).second)
                c.moving += geometry_.slot_bytes(block.kind());
        }
    }
    const auto see = [&](const Resident& s) {
        const bool of_mine = std::find(mine.begin(), mine.end(), &s) != mine.end();
        const bool may_lose = settings_.drop_coldest && may_lose_blocks(s, mine);
        const bool idle = mover_ && s.is_idle() && !of_mine;
        for (size_t b = idle ? 0 : numerics_.sink_blocks; b < s.blocks.size(); ++b) {
            const Block& block = *s.blocks[b];
            if (!may_ever_leave(block, idle)) continue;
            const bool alone = s.blocks[b].use_count() == 1;
            if (!alone && !seen.insert(&block).second) continue;
            const TierKind tier = block.tier();
            const PageKind kind = block.kind();
            const uint64_t bytes = geometry_.slot_bytes(kind);
            if (alone && may_lose && b >= numerics_.sink_blocks && b < count_full(s)) {
                c.droppable[size_t(tier)] += bytes;
                continue;
            }
            if (block.moving()) continue;  // its new place, and whether it gets there, is not known yet
            const bool is_mine = of_mine || (!alone && shared_with_mine.contains(&block));
            if (tier != TierKind::kDisk && !is_mine && s.promised_tokens == 0) c.others += bytes;
            if (tier != TierKind::kDevice) continue;
            const bool falls = may_fall(geometry_, numerics_, block, b);
            const uint64_t there = falls ? geometry_.slot_bytes(kind_in_tier(kind, next)) : bytes;
            MoveEstimate::Leaves& l = c.leaves[falls ? size_t(kind) : size_t(kPageKinds)];
            l.bytes += bytes;
            l.below += there;
            if (has_memory_below()) c.shrinks += bytes - there;
        }
    };
    residents_.visit(std::cref(see));
    return c;
}

// Bytes that the device gains if as much leaves as the tiers below have room for.
double Residency::gained_on_device(const MoveEstimate& estimate, const TierBytes& room, PageKind largest) const {
    double below_bytes = 0;  // room, in bytes of blocks as they are in the next tier
    if (const std::optional<TierKind> next = tiers_.below(TierKind::kDevice)) {
        const PageKind there = geometry_.falls ? kind_in_tier(largest, *next) : largest;
        for (std::optional<TierKind> t = next; t; t = tiers_.below(*t))
            below_bytes += double(room[size_t(*t)]) * times_in(*t, there) + double(estimate.droppable[size_t(*t)]);
    }
    double gained = 0;
    for (const MoveEstimate::Leaves& l : estimate.leaves) {
        if (l.below == 0) continue;
        const double part = std::min(1.0, below_bytes / double(l.below));
        gained += part * double(l.bytes);
        below_bytes -= part * double(l.below);
    }
    return gained;
}

// Errs towards true: fragmentation, and tiers that fail, show only by trying.
bool Residency::may_make_room(std::span<const PageKind> wanted, std::span<Resident* const> mine, uint64_t* lacking) const {
    // Blocks that leave in vain are promoted again. Published blocks that are dropped, and bits that are lost, do not come
    // back.
    if (!geometry_.falls && unused_bytes() == TierBytes{}) return true;
    TierBytes room = count_room();
    const MoveEstimate estimate = estimate_moves(mine);
    room[0] += estimate.moving;
    const PageKind largest = geometry_.all_8_bits ? PageKind::kToken : PageKind::kChannel;
    const uint64_t bytes = bytes_of(wanted), here = room[0] + estimate.droppable[0];
    const auto fits = [&](double need, double have) {
        if (lacking && need > have) *lacking = uint64_t(need - have);
        return need <= have;
    };
    if (!fits(double(bytes), double(here) + gained_on_device(estimate, room, largest))) return false;
    // In the end all of the step's blocks lie in memory.
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    const double on_disk = times_in(TierKind::kDisk, largest);
    const uint64_t comes_up = bytes_on_disk(mine);
    const double to_disk = std::min(double(estimate.others), double(room[kDisk] + comes_up) * on_disk);
    double have = double(here + estimate.shrinks) + double(estimate.droppable[kDisk]) * on_disk + to_disk;
    for (size_t t = 1; t < kDisk; ++t) have += double(room[t] + estimate.droppable[t]);
    return fits(double(bytes + comes_up), have);
}

namespace {

// A tier's room by slots: a region serves one class while it has any.
class SlotRoom {
  public:
    SlotRoom() = default;
    explicit SlotRoom(const TierStats& s) : regions_(s.regions_empty) {
        for (size_t c = 0; c < kSlotClasses; ++c) {
            open_[c] = s.slots_free[c] - s.slots_empty[c];
            per_region_[c] = s.slots_per_region[c];
        }
    }
    // Adds slots that become free on demand.
    void add(const SlotCounts& slots) {
        for (size_t c = 0; c < kSlotClasses; ++c) {
            open_[c] += slots[c];
            added_[c] += slots[c];
        }
    }
    // From now on regions of added slots serve the class that takes slots first: they may be empty by then.
    void let_regions_empty() { empties_ = true; }
    // Stops counting on regions of this class: they may come to serve another one.
    void close(PageKind kind) { open_[size_t(kind)] = added_[size_t(kind)] = 0; }
    // Takes up to `n` slots of a class; returns how many. Added ones last: while there is room, nothing is dropped for it.
    uint64_t take(PageKind kind, uint64_t n) {
        uint64_t& open = open_[size_t(kind)];
        const uint64_t each = per_region_[size_t(kind)], at_once = open - added_[size_t(kind)];
        if (n > at_once && each > 0) {
            const uint64_t regions = std::min(regions_, ceil_div(n - at_once, each));
            regions_ -= regions;
            open += regions * each;
        }
        for (size_t c = 0; c < kSlotClasses && empties_ && n > open && each > 0; ++c) {
            if (c == size_t(kind) || added_[c] == 0 || per_region_[c] == 0) continue;
            const uint64_t their = per_region_[c], regions = std::min(ceil_div(n - open, each), ceil_div(open_[c], their));
            open_[c] -= std::min(open_[c], regions * their);
            added_[c] = std::min(added_[c], open_[c]);
            open += regions * each;
        }
        const uint64_t taken = std::min(n, open);
        open -= taken;
        added_[size_t(kind)] = std::min(added_[size_t(kind)], open);
        return taken;
    }

  private:
    static uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

    uint64_t regions_ = 0, open_[kSlotClasses] = {}, added_[kSlotClasses] = {}, per_region_[kSlotClasses] = {};
    bool empties_ = false;
};

// Calls fn with the kinds of which there are some, in every order. Takes no memory: statistics must not fail.
template <class Fn>
void for_each_order(const SlotCounts& counts, Fn&& fn) {
    std::array<size_t, kPageKinds> kinds;
    size_t n = 0;
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        if (counts[kind] > 0) kinds[n++] = kind;
    }
    do {
        fn(std::span<const size_t>(kinds.data(), n));
    } while (std::next_permutation(kinds.begin(), kinds.begin() + std::ptrdiff_t(n)));
}

}  // namespace

// The room that evictions can make for a step. Blocks of the device go to memory below it as long as that has room, then to the
// disk. The disk takes no block that a plan may be reading. Which blocks go first is found out by trying. It matters if kinds
// want the same regions. The gain is concave in the regions that each kind gets, so it is least where the kinds take them one
// after another. This counts the least gain of all such orders.
class Residency::Capacity {
  public:
    Capacity(const Residency& residency, std::span<const Resident* const> mine);
    // all: bytes of the device tier that new blocks can have. from_disk: the part that `from_disk` blocks take when they are
    // promoted, more than all if they do not fit. They leave `slots_left` slots of the disk.
    struct DeviceBytes {
        uint64_t all, from_disk;
    };
    DeviceBytes device_bytes(const SlotCounts& from_disk, const SlotCounts& slots_left) const;
    // The part of that which is free already.
    uint64_t free_now() const { return free_now_; }

  private:
    // Counts by kind: blocks that fall on their way down, and others.
    struct Kinds {
        SlotCounts falling{}, others{};
        SlotCounts all() const { return sum_of(falling, others); }
    };
    using Rooms = std::array<SlotRoom, kTiers>;
    using Order = std::span<const size_t>;  // kinds, those that go first first
    static uint64_t go(Rooms& rooms, uint64_t& blocks, size_t kind, bool falls, size_t to);
    struct Leaving {
        Kinds readable;     // full blocks in the device that may go only to memory below it
        Kinds unread;       // full blocks in the device that may go to the disk, too
        SlotCounts idle{};  // sink and open blocks of sequences that may be suspended
        SlotCounts all() const { return sum_of(sum_of(readable.all(), unread.all()), idle); }
    };
    uint64_t leave(Rooms& rooms, Leaving& blocks, Order order) const;
    void come_below(Rooms& rooms, SlotCounts& up, Order order) const;
    DeviceBytes device_bytes(Rooms rooms, const SlotCounts& from_disk, const SlotCounts& slots_left, Order up_order,
                             Order order) const;

    const Residency& residency_;
    const uint64_t free_now_;
    uint64_t free_ = 0;  // bytes of the device that are free, or are on demand
    Rooms rooms_;        // by tier; empty for tiers that take no blocks
    Leaving leaving_;
    SlotCounts drop_readable_{}, drop_unread_{};  // parts of leaving_ that may be dropped
    std::array<Kinds, kTiers> below_;             // blocks in memory below the device that may go to the disk
};

Residency::Capacity::Capacity(const Residency& r, std::span<const Resident* const> mine)
    : residency_(r), free_now_(r.store_.usable_bytes()) {
    // NOTES: moves go on meanwhile. So this reads first the free bytes of the device, then the blocks, then the room of the
    // tiers below: a move that takes its slot or ends between two of these reads does not count twice.
    free_ = r.unused_bytes()[0] + free_now_;
    std::unordered_set<const Block*> seen, own;
    for (const Resident* s : mine) {
        for (const BlockPtr& block : s->blocks) own.insert(block.get());
    }
    const std::unordered_set<const Block*> held = shared_and_readable(r.residents_);
    const SharedOpenBlocks shared_open(r.residents_);
    const auto see = [&](const Resident& s) {
        if (s.may_be_read()) return;  // its places become room only when the plan ends
        const bool is_idle = r.mover_ && s.is_idle();
        for (size_t b = is_idle ? 0 : r.numerics_.sink_blocks; b < s.blocks.size(); ++b) {
            const Block& block = *s.blocks[b];
            const TierKind tier = block.tier();
            const bool of_mine = own.contains(&block), idle = is_idle && !of_mine;
            if (tier == TierKind::kDisk || !may_ever_leave(block, idle)) continue;
            const bool shared = s.blocks[b].use_count() > 1;
            if (!block.sealed() && s.blocks[b].use_count() > idle_owners(shared_open, s, block)) continue;
            if (shared && (held.contains(&block) || !seen.insert(&block).second)) continue;
            const bool may_be_read = of_mine || s.stays_readable();
            if (block.has_place()) {
                // A block that moves up, or between tiers below, gives the device nothing.
                if (tier == TierKind::kDevice && !of_mine) free_ += r.geometry_.slot_bytes(block.kind());
                continue;
            }
            const bool is_full = b >= r.numerics_.sink_blocks && block.full();
            if (!is_full && !idle) continue;
            const bool falls = may_fall(r.geometry_, r.numerics_, block, b);
            const auto count = [&](Kinds& kinds) { ++(falls ? kinds.falling : kinds.others)[size_t(block.kind())]; };
            if (tier != TierKind::kDevice) {
                if (is_full && !may_be_read) count(below_[size_t(tier)]);
                continue;
            }
            if (is_full && r.settings_.drop_coldest && !shared && may_lose_blocks(s, mine) && b < count_full(s))
                ++(may_be_read ? drop_readable_ : drop_unread_)[size_t(block.kind())];
            if (is_full) {
                count(may_be_read ? leaving_.readable : leaving_.unread);
            } else {
                ++leaving_.idle[size_t(block.kind())];
            }
        }
    };
    r.residents_.visit(std::cref(see));
    const std::array<SlotCounts, kTiers> unused = r.residents_.unused_slots();
    for (std::optional<TierKind> t = r.tiers_.below(TierKind::kDevice); t; t = r.tiers_.below(*t)) {
        const Tier& tier = *r.tiers_[*t];
        if (tier.health().state != TierState::kOk) continue;
        SlotRoom& room = rooms_[size_t(*t)] = SlotRoom(tier.stats());
        room.add(sum_of(r.store_.vacated_slots(*t), unused[size_t(*t)]));
    }
}

// Moves blocks of one kind down to the tier, as far as it has room. Returns how many.
uint64_t Residency::Capacity::go(Rooms& rooms, uint64_t& blocks, size_t kind, bool falls, size_t to) {
    const uint64_t gone = rooms[to].take(falls ? kind_in_tier(PageKind(kind), TierKind(to)) : PageKind(kind), blocks);
    blocks -= gone;
    return gone;
}

// Moves blocks of the device to the room below it, as far as it goes. Returns their bytes.
uint64_t Residency::Capacity::leave(Rooms& rooms, Leaving& blocks, Order order) const {
    if (!residency_.mover_) return 0;
    const Geometry& g = residency_.geometry_;
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    uint64_t bytes = 0;
    const auto go_to = [&](size_t to, Kinds& kinds, size_t kind) {
        const uint64_t n = go(rooms, kinds.falling[kind], kind, true, to) + go(rooms, kinds.others[kind], kind, false, to);
        bytes += n * g.slot_bytes(PageKind(kind));
    };
    // Blocks that may also go to the disk take memory first: the pessimistic order.
    for (const size_t kind : order) {
        for (Kinds* const kinds : {&blocks.unread, &blocks.readable}) {
            for (size_t t = 1; t < kDisk; ++t) go_to(t, *kinds, kind);
        }
    }
    for (const size_t kind : order) go_to(kDisk, blocks.unread, kind);
    for (const size_t kind : order) {
        for (size_t t = 1; t < kTiers; ++t)
            bytes += go(rooms, blocks.idle[kind], kind, false, t) * g.slot_bytes(PageKind(kind));
    }
    return bytes;
}

// Takes memory below the device for blocks that come up from the disk, as far as it goes.
void Residency::Capacity::come_below(Rooms& rooms, SlotCounts& up, Order order) const {
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    for (const size_t kind : order) {
        for (size_t t = 1; t < kDisk; ++t) go(rooms, up[kind], kind, false, t);
    }
    // Blocks there make room by going to the disk. Those whose slots are of no use here may go first.
    for (const bool of_use : {false, true}) {
        if (up == SlotCounts{}) return;
        for (size_t t = 1; t < kDisk; ++t) {
            Kinds below = below_[t];
            for (size_t kind = 0; kind < kPageKinds; ++kind) {
                if ((up[kind] > 0) != of_use) continue;
                SlotCounts left{};
                left[kind] =
                    go(rooms, below.falling[kind], kind, true, kDisk) + go(rooms, below.others[kind], kind, false, kDisk);
                rooms[t].add(left);
                go(rooms, up[kind], kind, false, t);
            }
        }
    }
}

Residency::Capacity::DeviceBytes Residency::Capacity::device_bytes(Rooms rooms, const SlotCounts& from_disk,
                                                                   const SlotCounts& slots_left, Order up_order,
                                                                   Order order) const {
    const Geometry& g = residency_.geometry_;
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    SlotCounts up = from_disk;
    come_below(rooms, up, up_order);
    // Full blocks go down before sink and open blocks. They may take the regions in which token slots are free now, so those
    // are not counted on.
    constexpr size_t kToken = size_t(PageKind::kToken);
    const bool closes = from_disk[kToken] > 0 && (g.falls || !g.all_8_bits);
    if (closes) rooms[kDisk].close(PageKind::kToken);
    Leaving left = leaving_;
    uint64_t gone = leave(rooms, left, order);
    // Without memory between device and disk, the device's blocks also get the disk slots that promoted blocks leave, as those
    // come up one by one.
    SlotCounts came{};
    for (bool more = !residency_.has_memory_below(); more; gone += leave(rooms, left, order)) {
        uint64_t have = free_ + gone;
        SlotCounts vacated{};
        more = false;
        for (size_t kind = 0; kind < kPageKinds; ++kind) {
            const uint64_t bytes = g.slot_bytes(PageKind(kind)), n = std::min(up[kind], bytes > 0 ? have / bytes : 0);
            const uint64_t stay = from_disk[kind] - slots_left[kind];  // records that stay; at worst those of the blocks that
                                                                       // come first
            have -= n * bytes;
            if (n <= came[kind]) continue;
            vacated[kind] = n - std::min(n, std::max(came[kind], stay));
            came[kind] = n;
            more = true;
        }
        if (closes) vacated[kToken] = 0;
        rooms[kDisk].add(vacated);
    }
    // Blocks are dropped when no more can leave. Those that left may be the ones that could have been dropped.
    const auto stay = [](SlotCounts may_drop, const Kinds& all, const Kinds& stayed) {
        const SlotCounts before = all.all(), after = stayed.all();
        for (size_t kind = 0; kind < kPageKinds; ++kind) may_drop[kind] -= std::min(may_drop[kind], before[kind] - after[kind]);
        return may_drop;
    };
    const SlotCounts dropped =
        sum_of(stay(drop_unread_, leaving_.unread, left.unread), stay(drop_readable_, leaving_.readable, left.readable));
    return {free_ + gone + residency_.store_.bytes_of(dropped), residency_.store_.bytes_of(up)};
}

Residency::Capacity::DeviceBytes Residency::Capacity::device_bytes(const SlotCounts& from_disk,
                                                                   const SlotCounts& slots_left) const {
    std::optional<DeviceBytes> least;
    Rooms emptying = rooms_;
    for (SlotRoom& room : emptying) room.let_regions_empty();
    for_each_order(from_disk, [&](Order up_order) {
        for_each_order(leaving_.all(), [&](Order order) {
            for (const Rooms& rooms : {rooms_, emptying}) {
                const DeviceBytes have = device_bytes(rooms, from_disk, slots_left, up_order, order);
                if (!least || have.all + least->from_disk < least->all + have.from_disk) least = have;
            }
        });
    });
    return *least;
}

void Residency::fit(std::span<const Demand> demands, std::span<const Resident* const> mine, ta_fit& fit) const {
    const Capacity capacity(*this, mine);
    std::unordered_set<const Block*> seen;
    SlotCounts from_disk{}, slots_left{};
    std::optional<Capacity::DeviceBytes> have;
    uint64_t bytes = 0, counted = 0;  // counted: blocks from disk in `have`
    size_t next = 0;
    fit.first_lacking = -1;
    for (size_t i = 0; i < demands.size(); ++i) {
        bytes = checked_add(bytes, demands[i].bytes).value_or(UINT64_MAX);
        for (; next < demands[i].residents; ++next) {
            for (const BlockPtr& block : mine[next]->blocks) {
                if (block->tier() != TierKind::kDisk || !seen.insert(block.get()).second) continue;
                ++fit.blocks_from_disk;
                const PageKind kind = block->kind();
                ++from_disk[size_t(kind)];
                slots_left[size_t(kind)] += !block->published();  // a published block keeps its record
                fit.bytes_from_disk += geometry_.slot_bytes(kind);
            }
        }
        if (!have || fit.blocks_from_disk > counted) have = capacity.device_bytes(from_disk, slots_left);
        counted = fit.blocks_from_disk;
        const uint64_t wanted = checked_add(bytes, have->from_disk).value_or(UINT64_MAX);
        fit.bytes_lacking = wanted - std::min(wanted, have->all);
        if (fit.bytes_lacking > 0 && fit.first_lacking < 0) fit.first_lacking = int64_t(i);
    }
    fit.now = bytes <= capacity.free_now() && fit.blocks_from_disk == 0;
    fit.after_eviction = fit.bytes_lacking == 0;
}

uint64_t Residency::reclaimable_bytes() const {
    const Capacity capacity(*this, {});
    return capacity.device_bytes({}, {}).all - capacity.free_now();
}

void Residency::set_waiting(std::span<Resident* const> mine, RoomLedger::Waits waits) {
    std::lock_guard lock(residents_.lock());
    for (Resident* s : mine) s->waits = waits;
}

// Chooses by priority, then in the policy's order.
std::vector<MoveItem> Residency::choose_to_drop(Candidates& candidates, uint64_t bytes) const {
    std::vector<MoveItem> items;
    for_each_level(store_.given_priorities(), [&](const RetentionLevel& level) {
        candidates.set_level(level);
        for (const Victim v : policy_->choose(candidates, bytes, Loss::kDropped)) {
            bytes -= std::min(bytes, candidates.bytes(v.owner, v.block));
            items.push_back(candidates.item(v));
        }
        return bytes == 0;
    });
    return items;
}

void Residency::drop(std::span<const MoveItem> items) {
    for (const MoveItem& item : items) {
        if (!item.block->start_move()) continue;
        BlockPtr(item.block).reset();  // NOTES: makes reads of former owners happen before the next user's writes
        store_.drop(*item.block);
        item.block->end_move();
        ++counters_.dropped_blocks;
    }
}

Residency::Drop Residency::drop_coldest(std::span<const PageKind> wanted, std::span<Resident* const> mine,
                                        const DropBelow& from_below, bool fragmented) {
    if (!settings_.drop_coldest) return Drop::kNothing;
    residents_.take_in_attention(true);  // waits: what is lost must not depend on how far a GPU is
    const uint64_t bytes = bytes_of(wanted), unused = unused_bytes()[0];
    // Holds the lock until the blocks are dropped: others must not become owners after the decision.
    std::lock_guard lock(residents_.lock());
    // Places that moved blocks have left do not count: they were waited for, and open plans may be reading there.
    const uint64_t have = store_.free_bytes(), free = fragmented && bytes <= have ? 0 : have;
    if (bytes <= free) return Drop::kFree;
    uint64_t missing = bytes - free;
    Movable m;
    std::unordered_set<const Block*> seen;
    const std::unordered_set<const Block*> held = shared_and_readable(residents_);
    const auto count = [&](const Resident& s) {
        if (!may_lose_blocks(s, mine)) return;
        for (size_t b = numerics_.sink_blocks; b < count_full(s); ++b) {
            const BlockPtr& block = s.blocks[b];
            const bool shared = block.use_count() > 1;
            if (!may_leave(*block) || (shared && !seen.insert(block.get()).second)) continue;
            const size_t tier = size_t(block->tier()), size = geometry_.slot_bytes(block->kind());
            if (!shared && slot_serves(block->tier(), block->kind())) m.drops[tier] += size;
            if (is_passed(block->kind())) continue;
            m.down[tier] += size;
            if (!s.stays_readable() && !(shared && held.contains(block.get()))) m.to_disk[tier] += size;
        }
    };
    residents_.visit(std::cref(count));
    // Room in a lower tier helps only if the tiers above it are full, and have as many bytes to pass on.
    TierKind from = TierKind::kDevice, lowest = from;  // of memory that can be passed on
    bool passes[kTiers] = {true};
    uint64_t in_memory = m.drops[0];
    for (std::optional<TierKind> t = tiers_.below(from); t && from_below.allowed; t = tiers_.below(*t)) {
        const uint64_t* const to_here = *t == TierKind::kDisk ? m.to_disk : m.down;
        bool& passed = passes[size_t(*t)];
        for (size_t above = 0; above < size_t(*t); ++above) passed |= passes[above] && to_here[above] >= missing;
        passed &= is_full(*tiers_[*t], geometry_);
        if (!passed) continue;
        if (m.drops[size_t(*t)] >= missing) from = *t;
        if (*t == TierKind::kDisk) continue;
        lowest = *t;
        in_memory += m.drops[size_t(*t)];
    }
    // If no tier has enough by itself, the device and memory below may together.
    const bool both = from == TierKind::kDevice && m.drops[0] + unused < missing && in_memory >= missing;
    // Room below is of use only when the readers of the blocks that make way there are done. If they do not end in time, drops
    // the device's own blocks, if there are enough besides those of an eviction. Else waits until the present readers have
    // shown that they end.
    const uint64_t evicted = std::max(bytes, store_.budget() / kEvictedPart);
    if ((from != TierKind::kDevice || both) && m.drops[0] < missing + evicted && store_.still_reading(from_below.readers)) {
        if (m.drops[0] + unused < missing) return Drop::kLater;
        from = TierKind::kDevice;
    }
    if (from == TierKind::kDevice && !both) {
        if (m.drops[0] + unused < missing) return Drop::kNothing;
        if (unused > 0) missing -= std::min(missing, residents_.drop_unused(from, missing, false));
        if (missing == 0) return Drop::kHere;
    }
    Candidates candidates(geometry_, from, steps_.load(std::memory_order_relaxed));
    const auto add = [&](const Resident& s) {
        if (may_lose_blocks(s, mine)) candidates.add(s, uint32_t(numerics_.sink_blocks), count_full(s), both ? lowest : from);
    };
    residents_.visit(std::cref(add));
    candidates.set_filter([](const Block& block, uint64_t) { return slot_serves(block.tier(), block.kind()); });
    drop(choose_to_drop(candidates, missing));
    return from == TierKind::kDevice && !both ? Drop::kHere : Drop::kBelow;
}

bool Residency::drop_to_be_resident(std::span<const PageKind> wanted, std::span<Resident* const> mine) {
    if (!settings_.drop_coldest) return false;
    residents_.take_in_attention(true);
    std::lock_guard lock(residents_.lock());
    const uint64_t come_up = bytes_on_disk(mine), bytes = bytes_of(wanted);
    const uint64_t free = store_.free_bytes();
    Candidates candidates(geometry_, TierKind::kDevice, steps_.load(std::memory_order_relaxed));
    // A block on disk that is dropped needs no slot above any more.
    const auto serves = [](TierKind tier, PageKind kind) { return tier == TierKind::kDisk || slot_serves(tier, kind); };
    candidates.set_filter([&](const Block& block, uint64_t) { return serves(block.tier(), block.kind()); });
    // Bytes of blocks that may be dropped: in the device, those of them that may move down instead, in memory below, on disk.
    uint64_t here = 0, here_whole = 0, below = 0, on_disk = 0;
    uint64_t shared_here = 0, shared_on_disk = 0;  // of blocks with several owners: they may move down
    std::unordered_set<const Block*> seen;
    const auto see = [&](const Resident& s) {
        if (!may_lose_blocks(s, mine)) return;
        const TierKind slowest = s.in_plan ? TierKind::kDisk : TierKind::kHost;
        candidates.add(s, uint32_t(numerics_.sink_blocks), count_full(s), slowest);
        for (size_t b = numerics_.sink_blocks; b < count_full(s); ++b) {
            const BlockPtr& block = s.blocks[b];
            const TierKind tier = block->tier();
            const PageKind kind = block->kind();
            const bool shared = block.use_count() > 1;
            if (!may_leave(*block) || tier > slowest || (shared && !seen.insert(block.get()).second)) continue;
            const uint64_t size = geometry_.slot_bytes(kind);
            if (shared) {
                if (is_passed(kind)) continue;
                if (tier == TierKind::kDevice) shared_here += size;
                if (tier == TierKind::kDisk) shared_on_disk += size;
            } else if (serves(tier, kind)) {
                (tier == TierKind::kDevice ? here : tier == TierKind::kDisk ? on_disk : below) += size;
                if (tier == TierKind::kDevice && !is_passed(kind)) here_whole += size;
            }
        }
    };
    residents_.visit(std::cref(see));
    // Drops nothing for a step whose new blocks would find no room afterwards. Either the device takes all, or memory below
    // takes as many blocks as are dropped there. Sinks and pinned blocks that come up may not go down again.
    const uint64_t stay_up = come_up - std::min(come_up, on_disk), stuck_up = stay_up - std::min(stay_up, shared_on_disk);
    const bool here_fits = stay_up + bytes <= free + here;
    const bool all_fit = stay_up + bytes <= free + here + below;
    if (!here_fits && !(all_fit && stuck_up + bytes <= free + here_whole + std::min(shared_here, below))) return false;
    if (come_up <= free) return false;  // dropping would not help: the room is fragmented, or others take it
    drop(choose_to_drop(candidates, come_up - free));
    return true;
}

}  // namespace ta
