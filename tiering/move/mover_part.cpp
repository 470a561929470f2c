#include "tiering/move/mover_part.h"

#include <algorithm>
#include <utility>

#include "src/core/profile.h"
#include "tiering/store/fall.h"

namespace ta {

MovePart::MovePart(MoveSharing& sharing, std::span<const MoveItem> items, TierKind to, MoveReason reason,
                   std::chrono::milliseconds patience, DiskWork* disk_work)
    : sharing_(sharing),
      items_(items),
      to_(to),
      reason_(reason),
      patience_(patience),
      disk_work_(disk_work),
      moves_(sharing.pool.store, items.size()) {
    sharing_.parts.fetch_add(1);
}

MovePart::~MovePart() {
    transfers_.clear();
    for (const MovedBlock& w : work_) {
        if (w.over) continue;
        give_back(w);
        w.item->block->end_move();
    }
    sharing_.parts.fetch_sub(1);
    sharing_.pool.store.room_signal().notify();
}

bool MovePart::prepare() {
    work_.reserve(items_.size());
    for (const MoveItem& item : items_) take(item);
    start_ = std::chrono::steady_clock::now();
    has_room_ = work_.empty() || acquire(work_).ok();
    return has_room_;
}

bool MovePart::starts_at_once() const {
    return has_room_ && std::none_of(work_.begin(), work_.end(),
                                     [](const MovedBlock& w) { return w.falls() || w.from.tier == TierKind::kDisk; });
}

void MovePart::wake_checkers() {
    const auto wants = [](const auto& transfer) { return transfer->wants_checkers(); };
    if (std::none_of(transfers_.begin(), transfers_.end(), wants)) return;
    if (const std::unique_lock lock(sharing_.checking, std::try_to_lock); lock)
        sharing_.checkers.parallel_for(sharing_.checkers.threads(), 1, [](int64_t, int) {});
}

void MovePart::start() {
    static const char* const kNames[kTiers] = {"start a move to the device", "start a move to the peer",
                                               "start a move to the host", "start a move to disk"};
    const ProfileRange range(kNames[size_t(to_)]);
    if (work_.empty()) return;
    if (!has_room_) find_room();
    for (const Way way : {Way::kInMemory, Way::kByDevice, Way::kToDisk, Way::kFromDisk}) {
        MovedBlocks blocks;
        for (MovedBlock& b : work_) {
            if (b.status.ok() && way_of(sharing_, b) == way) blocks.push_back(&b);
        }
        if (blocks.empty()) continue;
        transfers_.push_back(make_transfer(way, sharing_, std::move(blocks), to_, reason_, disk_work_));
        transfers_.back()->start();
    }
}

void MovePart::finish() {
    if (work_.empty()) return;
    static const char* const kNames[kTiers] = {"finish a move to the device", "finish a move to the peer",
                                               "finish a move to the host", "finish a move to disk"};
    const ProfileRange range(kNames[size_t(to_)]);
    for (const auto& transfer : transfers_) transfer->finish();
    commit(std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
}

// Takes a block for this part. False: it stays where it is, or is moved already; the counters say which.
bool MovePart::take(const MoveItem& item) {
    if (!item.block || !item.block->start_move()) {
        ++progress_.skipped;
        return false;
    }
    Block& block = *item.block;
    if (!block.sealed()) {  // it was dropped since: a waiting ticket owns no blocks
        block.end_move();
        ++progress_.skipped;
        return false;
    }
    const Place from = sharing_.pool.store.place_of(block);
    const bool refuses = block.refuses(to_);
    // A needed block may have come to a faster tier by another move meanwhile. That serves the step.
    const bool serves = reason_ == MoveReason::kNeeded && from.tier < to_;
    if (from.tier == to_ || serves || refuses) {
        block.end_move();
        ++(refuses && !serves ? progress_.skipped : progress_.present);
        return false;
    }
    const MoveHost& pool = sharing_.pool;
    if (to_ == TierKind::kDisk && pool.store.move_to_record(block)) {
        MoveCounters counted;
        count_moved({&item, from, {to_, from.kind, nullptr, {}, {}}, {}}, counted);
        block.end_move();
        std::lock_guard lock(sharing_.counting);
        sharing_.counters += counted;
        return false;
    }
    const PageKind kind = kind_moved(pool.pages.geometry, pool.pages.numerics, block, item.index, from.tier, to_);
    work_.push_back({&item, from, {to_, kind, nullptr, {}, {}}, {}});
    return true;
}

// Acquires slots for all blocks. If there is no room for all, tries each one; those without a slot get a status.
void MovePart::find_room() {
    const BlockStore& store = sharing_.pool.store;
    const Deadline until = store.room_signal().now() + patience_;
    std::vector<PageKind> kinds;
    uint64_t bytes = 0;
    for (const MovedBlock& w : work_) {
        kinds.push_back(w.to.kind);
        bytes += sharing_.pool.pages.geometry.slot_bytes(w.to.kind);
    }
    RoomSignal::Watch watch(store.room_signal());
    Status all = acquire(work_);
    while (all.code() == TA_E_TIER_FULL) {
        // First waits for readers of places that blocks have left, which become free then.
        if (!store.has_vacated() || !watch.wait(until)) {
            if (reason_ == MoveReason::kPrefetch || store.vacated_bytes(to_) >= bytes) break;
            if (!sharing_.pool.make_room(to_, kinds, until)) break;
        }
        all = acquire(work_);
    }
    if (all.ok()) return;
    for (MovedBlock& w : work_) w.status = acquire({&w, 1});
}

Status MovePart::acquire(std::span<MovedBlock> blocks) {
    if (to_ == TierKind::kDevice) {
        std::vector<PageKind> kinds;
        for (const MovedBlock& w : blocks) kinds.push_back(w.to.kind);
        Result<std::vector<uint8_t*>> slots = sharing_.pool.store.acquire_slots(kinds);
        if (!slots.ok()) return std::move(slots).status();
        for (size_t i = 0; i < blocks.size(); ++i) {
            blocks[i].to.address = slots.value()[i];
            blocks[i].item->block->set_has_place();
        }
        return {};
    }
    std::vector<uint8_t> classes;
    for (const MovedBlock& w : blocks) classes.push_back(uint8_t(w.to.kind));
    Tier* const tier = sharing_.pool.tiers[to_];
    Result<std::vector<Slot>> slots = tier->acquire(classes);
    if (!slots.ok()) return std::move(slots).status();
    for (size_t i = 0; i < blocks.size(); ++i) {
        blocks[i].to.slot = slots.value()[i];
        blocks[i].to.address = tier->address(blocks[i].to.slot);
        blocks[i].item->block->set_has_place();
    }
    return {};
}

void MovePart::give_back(const MovedBlock& w) {
    if (w.to.tier == TierKind::kDevice) {
        if (w.to.address) sharing_.pool.store.release_slot(w.to.kind, w.to.address);
    } else if (w.to.slot.index != Slot::kNone) {
        sharing_.pool.tiers[w.to.tier]->release({&w.to.slot, 1});
    }
}

// True if the block itself is damaged, not only the copy that arrived. False also if there is no memory to find out; the next
// move will.
bool MovePart::is_damaged(const MovedBlock& w) const {
    if (w.status.code() != TA_E_CORRUPT) return false;
    const MoveHost& pool = sharing_.pool;
    const Block& block = *w.item->block;
    try {
        if (w.from.tier == TierKind::kDisk) return pool.reader.read(block, w.item->index, nullptr).code() == TA_E_CORRUPT;
        std::vector<uint8_t> copy(pool.pages.geometry.slot_bytes(w.from.kind));
        return pool.reader.read_memory(w.from, copy.data()).ok() &&
               block.verify(pool.pages.geometry, pool.pages.fingerprint, w.item->index, copy.data(), w.from.kind).code() ==
                   TA_E_CORRUPT;
    } catch (const std::bad_alloc&) {
        return false;
    }
}

void MovePart::count_moved(const MovedBlock& w, MoveCounters& counted) {
    const Geometry& g = sharing_.pool.pages.geometry;
    const uint64_t bytes = g.slot_bytes(w.to.kind);
    ++progress_.moved;
    ++counted.blocks_in[size_t(to_)];
    ++counted.blocks_out[size_t(w.from.tier)];
    counted.bytes_in[size_t(to_)] += bytes;
    counted.bytes_out[size_t(w.from.tier)] += g.slot_bytes(w.from.kind);
    counted.fallen[size_t(to_)] += w.falls();
    counted.bytes_by_reason[size_t(reason_)] += bytes;
    if (to_ > w.from.tier && w.item->block->prefetch().waste()) ++sharing_.pool.store.prefetches().wasted;
    if (reason_ != MoveReason::kEviction) return;
    ++counted.evicted[size_t(w.from.tier)];
    if (w.item->last_used_at == std::chrono::steady_clock::time_point()) return;
    const auto age = std::chrono::steady_clock::now() - w.item->last_used_at;
    counted.evicted_age[size_t(w.from.tier)] += std::chrono::duration<double>(age).count();
}

void MovePart::commit(double seconds) {
    MoveCounters counted;
    for (MovedBlock& w : work_) {
        Block& block = *w.item->block;
        const uint64_t bytes = sharing_.pool.pages.geometry.slot_bytes(w.to.kind);
        bool stays = false;
        if (w.status.ok()) {
            // Before the block can be found here by a step.
            if (reason_ == MoveReason::kPrefetch) block.prefetch().arrive();
            stays = !sharing_.pool.store.move(block, w.to);  // pinned, reserved or published since prepare()
        }
        if (w.status.ok() && !stays) {
            w.over = true;
            block.set_unreadable(false);
            count_moved(w, counted);
            if (w.route) (*w.route == MoveRoute::kKernel ? counted.bytes_by_kernel : counted.bytes_by_engine) += bytes;
        } else if (w.cancelled) {
            give_back(w);
            w.over = true;
        } else if (stays || (reason_ == MoveReason::kPrefetch && w.status.code() == TA_E_TIER_FULL)) {
            give_back(w);
            w.over = true;
            ++progress_.skipped;
        } else {
            const bool damaged = is_damaged(w);
            give_back(w);
            w.over = true;
            if (damaged) block.set_stuck();
            if (w.from.tier == TierKind::kDisk && w.status.code() == TA_E_IO) block.set_unreadable(true);
            ++progress_.failed;
            if (damaged) {
                ++counted.corrupt;
            } else if (w.status.code() != TA_E_TIER_FULL) {
                ++counted.failed;
            }
            if (progress_.status.ok()) progress_.status = std::move(w.status).block(int64_t(w.item->index));
        }
        block.end_move();
    }
    int bucket = 0;
    while (bucket < kLatencyBuckets - 1 && seconds > 1e-6 * double(uint64_t{1} << bucket)) ++bucket;
    ++counted.latency[size_t(to_)][bucket];
    counted.seconds[size_t(to_)] += seconds;
    std::lock_guard lock(sharing_.counting);
    sharing_.counters += counted;
}

}  // namespace ta
