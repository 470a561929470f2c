// Estimates before anything is lost: can a begin have the room that it lacks? Also the way of its blocks through tiers that are
// full, and what is dropped for one where that is allowed.
#include <algorithm>
#include <array>
#include <functional>
#include <unordered_set>
#include <utility>

#include "tiering/room/candidates.h"
#include "tiering/room/residency.h"
#include "tiering/store/fall.h"

namespace ta {
namespace {

// Bytes of what may be dropped, by tier, and of what may leave for the next tier, or for the disk, once there is room.
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

// True if the block may leave its tier once nothing moves it. `idle`: of a sequence that may be suspended.
bool may_ever_leave(const Block& block, bool idle) {
    return !block.dropped() && (block.sealed() || idle) && block.pins() == 0 && !block.stuck() && block.has_pages();
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

// Bytes that are free in each tier, or are when those have ended who are reading, or are of what is published and nobody uses.
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

// How many bytes of blocks like `above` take the room of one when they lie in the tier.
double Residency::times_in(TierKind tier, PageKind above) const {
    if (!geometry_.falls) return 1.0;
    return double(geometry_.slot_bytes(above)) / double(geometry_.slot_bytes(kind_in_tier(above, tier)));
}

// Moves change where bytes are, not how many. An estimate that errs towards OK.
Status Residency::promise_room(Loading& mine, uint64_t bytes) {
    promised_ -= std::exchange(mine.promised, bytes);
    const uint64_t to_others = promised_.fetch_add(bytes);
    if (mover_ && mover_->busy()) return {};  // what moves has two places for a moment
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

// Estimate, in bytes, of the moves and drops that the present blocks allow.
struct Residency::MoveEstimate {
    // Blocks that may leave the device, here and in the next tier: by kind of those that fall on the way, last those that do not.
    struct Leaves {
        uint64_t bytes = 0, below = 0;
    } leaves[kPageKinds + 1];
    uint64_t shrinks = 0;             // those that become fewer in memory below the device
    uint64_t others = 0;              // above the disk, and not of the step's sequences
    uint64_t droppable[kTiers] = {};  // by TierKind, for this step
    uint64_t moving = 0;              // of blocks that leave their place soon
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
            if (block.tier() == TierKind::kDevice && may_leave(block)) c.moving += geometry_.slot_bytes(block.kind());
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
            if (block.moving()) continue;  // where to, and whether it gets there, is not known yet
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

// Bytes of the device that become free when as much leaves as the tiers below have room for.
double Residency::gained_on_device(const MoveEstimate& estimate, const TierBytes& room, PageKind largest) const {
    double below_bytes = 0;  // of blocks as they are in the next tier
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

// An estimate that errs towards true: fragmentation, and tiers that fail, are found out by trying.
bool Residency::may_make_room(std::span<const PageKind> wanted, std::span<Resident* const> mine, uint64_t* lacking) const {
    // Blocks that leave for nothing come back; not so bits that they lose on the way.
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
    // All of the step's blocks lie in memory.
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    const double on_disk = times_in(TierKind::kDisk, largest);
    const uint64_t comes_up = bytes_on_disk(mine);
    const double to_disk = std::min(double(estimate.others), double(room[kDisk] + comes_up) * on_disk);
    double have = double(here + estimate.shrinks) + double(estimate.droppable[kDisk]) * on_disk + to_disk;
    for (size_t t = 1; t < kDisk; ++t) have += double(room[t] + estimate.droppable[t]);
    return fits(double(bytes + comes_up), have);
}

namespace {

// Room that a tier below the device has for blocks, by slots: a region serves one class while it holds any.
class SlotRoom {
  public:
    SlotRoom() = default;
    explicit SlotRoom(const TierStats& s) : regions_(s.regions_empty) {
        for (size_t c = 0; c < kSlotClasses; ++c) {
            open_[c] = s.slots_free[c] - s.slots_empty[c];
            per_region_[c] = regions_ > 0 ? s.slots_empty[c] / regions_ : 0;
        }
    }
    void add(const SlotCounts& slots) {
        for (size_t c = 0; c < kSlotClasses; ++c) open_[c] += slots[c];
    }
    // The regions that have slots of the class may come to serve others.
    void close(PageKind kind) { open_[size_t(kind)] = 0; }
    // Takes up to `n` slots of a class; how many.
    uint64_t take(PageKind kind, uint64_t n) {
        uint64_t &open = open_[size_t(kind)], each = per_region_[size_t(kind)];
        if (n > open && each > 0) {
            const uint64_t regions = std::min(regions_, (n - open + each - 1) / each);
            regions_ -= regions;
            open += regions * each;
        }
        const uint64_t taken = std::min(n, open);
        open -= taken;
        return taken;
    }

  private:
    uint64_t regions_ = 0, open_[kSlotClasses] = {}, per_region_[kSlotClasses] = {};
};

}  // namespace

// The room that evictions can make for a step: from the device to memory below it as long as there is room, whatever goes first,
// then to the disk, which takes nothing that a plan may be reading.
class Residency::Capacity {
  public:
    Capacity(const Residency& residency, std::span<const Resident* const> mine);
    // Bytes of the device tier that new blocks can have, and of these what so many blocks take that come from the disk, where they leave
    // so many slots, both by kind: more than there are, if they do not fit.
    struct DeviceBytes {
        uint64_t all, from_disk;
    };
    DeviceBytes device_bytes(const SlotCounts& from_disk, const SlotCounts& slots_left) const;
    // Of these, what they can have at once.
    uint64_t free_now() const { return free_now_; }

  private:
    // Blocks by kind: those that fall on their way down, and those that do not.
    struct Kinds {
        SlotCounts falling{}, others{};
    };
    using Rooms = std::array<SlotRoom, kTiers>;
    static uint64_t go(Rooms& rooms, uint64_t& blocks, size_t kind, bool falls, size_t to);
    struct Leaving {
        Kinds readable;     // full blocks in the device that may go to memory below it alone
        Kinds unread;       // that may go to the disk, too
        uint64_t idle = 0;  // token blocks of sequences that may be suspended
    };
    uint64_t leave(Rooms& rooms, Leaving& blocks) const;

    const Residency& residency_;
    const uint64_t free_now_;
    uint64_t free_ = 0;  // bytes of the device that are free, or are as soon as somebody asks
    Rooms rooms_;        // of tiers that take blocks
    Leaving leaving_;
    Kinds below_;             // blocks in memory below the device that may go to the disk
    uint64_t droppable_ = 0;  // bytes, of the device
};

Residency::Capacity::Capacity(const Residency& r, std::span<const Resident* const> mine)
    : residency_(r), free_now_(r.store_.free_bytes()) {
    // NOTES: moves go on meanwhile. First what the device has free is read, then the blocks, then what the tiers below have free. So a
    // move that takes its slot, or ends, between two of these reads does not count twice.
    free_ = r.unused_bytes()[0] + free_now_;
    std::unordered_set<const Block*> seen, own;
    for (const Resident* s : mine) {
        for (const BlockPtr& block : s->blocks) own.insert(block.get());
    }
    const std::unordered_set<const Block*> held = shared_and_readable(r.residents_);
    const SharedOpenBlocks shared_open(r.residents_);
    const auto see = [&](const Resident& s) {
        if (s.may_be_read()) return;  // what leaves its place is room when the plan has ended
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
                // One that moves in memory below, or up, gives the device nothing.
                if (tier == TierKind::kDevice && !of_mine) free_ += r.geometry_.slot_bytes(block.kind());
                continue;
            }
            const bool is_full = b >= r.numerics_.sink_blocks && block.full();
            if (!is_full && !idle) continue;
            if (is_passed(block.kind())) continue;  // small; what they would give is not counted on
            const bool falls = may_fall(r.geometry_, r.numerics_, block, b);
            const auto count = [&](Kinds& kinds) { ++(falls ? kinds.falling : kinds.others)[size_t(block.kind())]; };
            if (tier != TierKind::kDevice) {
                if (is_full && !may_be_read) count(below_);
                continue;
            }
            if (is_full && r.settings_.drop_coldest && !shared && may_lose_blocks(s, mine) && b < count_full(s))
                droppable_ += r.geometry_.slot_bytes(block.kind());
            if (is_full) {
                count(may_be_read ? leaving_.readable : leaving_.unread);
            } else {
                ++leaving_.idle;
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

// Blocks of one kind that go down to the tier, as far as there is room there: how many.
uint64_t Residency::Capacity::go(Rooms& rooms, uint64_t& blocks, size_t kind, bool falls, size_t to) {
    const uint64_t gone = rooms[to].take(falls ? kind_in_tier(PageKind(kind), TierKind(to)) : PageKind(kind), blocks);
    blocks -= gone;
    return gone;
}

// As many blocks of the device as there is room for: their bytes. Larger kinds come after smaller ones: it does least for the device if
// these take the regions that serve any.
uint64_t Residency::Capacity::leave(Rooms& rooms, Leaving& blocks) const {
    if (!residency_.mover_) return 0;
    const Geometry& g = residency_.geometry_;
    constexpr size_t kDisk = size_t(TierKind::kDisk), kToken = size_t(PageKind::kToken);
    uint64_t bytes = 0;
    const auto go_to = [&](size_t to, Kinds& kinds) {
        for (size_t kind = kPageKinds; kind-- > 0;) {
            const uint64_t n = go(rooms, kinds.falling[kind], kind, true, to) + go(rooms, kinds.others[kind], kind, false, to);
            bytes += n * g.slot_bytes(PageKind(kind));
        }
    };
    // Blocks that may go to the disk are the first to take memory: so much is sure.
    for (Kinds* const kinds : {&blocks.unread, &blocks.readable}) {
        for (size_t t = 1; t < kDisk; ++t) go_to(t, *kinds);
    }
    go_to(kDisk, blocks.unread);
    for (size_t t = 1; t < kTiers; ++t) bytes += go(rooms, blocks.idle, kToken, false, t) * g.slot_bytes(PageKind::kToken);
    return bytes;
}

Residency::Capacity::DeviceBytes Residency::Capacity::device_bytes(const SlotCounts& from_disk,
                                                                   const SlotCounts& slots_left) const {
    const Geometry& g = residency_.geometry_;
    Rooms rooms = rooms_;
    constexpr size_t kDisk = size_t(TierKind::kDisk);
    // A promoted block takes memory below the device first, where others of its size make room for it by going to the disk.
    SlotCounts up = from_disk;
    Kinds below = below_;
    for (size_t kind = kPageKinds; kind-- > 0;) {
        for (size_t t = 1; t < kDisk; ++t) go(rooms, up[kind], kind, false, t);
        for (SlotCounts* others : {&below.falling, &below.others}) {
            uint64_t enough = std::min(up[kind], (*others)[kind]);
            up[kind] -= go(rooms, enough, kind, others == &below.falling, kDisk);
        }
    }
    // A region that sink and open blocks leave may come to serve full blocks, which go down first: its slots are not sure.
    constexpr size_t kToken = size_t(PageKind::kToken);
    const bool closes = from_disk[kToken] > 0 && (g.falls || !g.all_8_bits);
    if (closes) rooms[kDisk].close(PageKind::kToken);
    Leaving left = leaving_;
    uint64_t all = 0, gone = leave(rooms, left);
    for (const Kinds* kinds : {&leaving_.unread, &leaving_.readable})
        all += residency_.store_.bytes_of(sum_of(kinds->falling, kinds->others));
    // Without memory between them, the device's blocks also get the slots that others leave on the disk, as these come one by one.
    SlotCounts came{};
    for (bool more = !residency_.has_memory_below(); more; gone += leave(rooms, left)) {
        uint64_t have = free_ + gone;
        SlotCounts vacated{};
        more = false;
        for (size_t kind = 0; kind < kPageKinds; ++kind) {
            const uint64_t bytes = g.slot_bytes(PageKind(kind)), n = std::min(up[kind], bytes > 0 ? have / bytes : 0);
            const uint64_t stay = from_disk[kind] - slots_left[kind];  // records, of those that come first at worst
            have -= n * bytes;
            if (n <= came[kind]) continue;
            vacated[kind] = n - std::min(n, std::max(came[kind], stay));
            came[kind] = n;
            more = true;
        }
        if (closes) vacated[kToken] = 0;
        rooms[kDisk].add(vacated);
    }
    const uint64_t dropped = std::min(droppable_, all - std::min(all, gone));
    return {free_ + gone + dropped, residency_.store_.bytes_of(up)};
}

void Residency::fit(std::span<const Demand> demands, std::span<const Resident* const> mine, ta_fit& fit) const {
    const Capacity capacity(*this, mine);
    std::unordered_set<const Block*> seen;
    SlotCounts from_disk{}, slots_left{};
    uint64_t bytes = 0;
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
                slots_left[size_t(kind)] += !block->published();  // else the record stays
                fit.bytes_from_disk += geometry_.slot_bytes(kind);
            }
        }
        const Capacity::DeviceBytes have = capacity.device_bytes(from_disk, slots_left);
        const uint64_t wanted = checked_add(bytes, have.from_disk).value_or(UINT64_MAX);
        fit.bytes_lacking = wanted - std::min(wanted, have.all);
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

// By their priorities, then in the order of the policy.
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
        BlockPtr(item.block).reset();  // what former owners read happened before others write there
        store_.drop(*item.block);
        item.block->end_move();
        ++counters_.dropped_blocks;
    }
}

Residency::Drop Residency::drop_coldest(std::span<const PageKind> wanted, std::span<Resident* const> mine,
                                        const DropBelow& from_below) {
    if (!settings_.drop_coldest) return Drop::kNothing;
    residents_.take_in_attention(true);  // what is lost must not depend on how far a GPU is
    const uint64_t bytes = bytes_of(wanted), unused = unused_bytes()[0];
    // The lock is held until the blocks are gone: the decision depends on blocks that others might come to have.
    std::lock_guard lock(residents_.lock());
    // Places that moved blocks have left do not count: they were waited for, and plans that stay open may be reading there.
    const uint64_t free = store_.free_bytes();
    if (bytes <= free) return Drop::kHere;
    uint64_t missing = bytes - free;
    Movable m;
    std::unordered_set<const Block*> seen;
    const std::unordered_set<const Block*> held = shared_and_readable(residents_);
    // Below the device a slot that is dropped serves blocks of its size: all full ones have one size, but for passed ones.
    const auto serves = [](TierKind tier, PageKind kind) { return tier == TierKind::kDevice || !is_passed(kind); };
    const auto count = [&](const Resident& s) {
        if (!may_lose_blocks(s, mine)) return;
        for (size_t b = numerics_.sink_blocks; b < count_full(s); ++b) {
            const BlockPtr& block = s.blocks[b];
            const bool shared = block.use_count() > 1;
            if (!may_leave(*block) || (shared && !seen.insert(block.get()).second)) continue;
            const size_t tier = size_t(block->tier()), size = geometry_.slot_bytes(block->kind());
            if (!shared && serves(block->tier(), block->kind())) m.drops[tier] += size;
            if (is_passed(block->kind())) continue;
            m.down[tier] += size;
            if (!s.stays_readable() && !(shared && held.contains(block.get()))) m.to_disk[tier] += size;
        }
    };
    residents_.visit(std::cref(count));
    // Room in a tier helps where the tiers above are full too, and have as much to pass on.
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
    // If no tier has enough alone, the device and the memory below it together may.
    const bool both = from == TierKind::kDevice && m.drops[0] + unused < missing && in_memory >= missing;
    // Room below serves once readers of the blocks that make way there are done. If they are not in time, the device's
    // own blocks serve, what an eviction takes of them aside; else those who read now must have shown that they end.
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
    candidates.set_filter([&](const Block& block, uint64_t) { return serves(block.tier(), block.kind()); });
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
    uint64_t may_go = 0, of_device = 0;
    const auto see = [&](const Resident& s) {
        if (!may_lose_blocks(s, mine)) return;
        const TierKind slowest = s.in_plan ? TierKind::kDisk : TierKind::kHost;
        candidates.add(s, uint32_t(numerics_.sink_blocks), count_full(s), slowest);
        for (size_t b = numerics_.sink_blocks; b < count_full(s); ++b) {
            const BlockPtr& block = s.blocks[b];
            const bool alone = block.use_count() == 1;
            if (!may_leave(*block) || block->tier() > slowest) continue;
            const uint64_t size = geometry_.slot_bytes(block->kind());
            if (alone) may_go += size;
            if (block->tier() == TierKind::kDevice && (alone || has_memory_below())) of_device += size;
        }
    };
    residents_.visit(std::cref(see));
    // Nothing is lost for a step whose new blocks have no room then.
    if (come_up + bytes > free + may_go || bytes > free + of_device) return false;
    if (come_up <= free) return false;  // lost blocks would not help: what has room is fragmented, or others take it
    drop(choose_to_drop(candidates, come_up - free));
    return true;
}

}  // namespace ta
