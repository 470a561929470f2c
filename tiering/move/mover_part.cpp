#include "tiering/move/mover_part.h"

#include <algorithm>
#include <cstring>

#include "src/core/profile.h"
#include "tiering/store/fall.h"

namespace ta {
namespace {

constexpr size_t kCheckedBytes = 128 << 10;  // by a thread at a time: all of them end at about the same time

}  // namespace

MoveCounters& MoveCounters::operator+=(const MoveCounters& more) {
    for (int t = 0; t < 3; ++t) {
        for (int b = 0; b < kLatencyBuckets; ++b) latency[t][b] += more.latency[t][b];
        seconds[t] += more.seconds[t];
        blocks_in[t] += more.blocks_in[t];
        blocks_out[t] += more.blocks_out[t];
        bytes_in[t] += more.bytes_in[t];
        bytes_out[t] += more.bytes_out[t];
        fallen[t] += more.fallen[t];
        evicted[t] += more.evicted[t];
        evicted_age[t] += more.evicted_age[t];
    }
    for (int r = 0; r < kMoveReasons; ++r) bytes_by_reason[r] += more.bytes_by_reason[r];
    bytes_by_kernel += more.bytes_by_kernel;
    bytes_by_engine += more.bytes_by_engine;
    failed += more.failed;
    corrupt += more.corrupt;
    return *this;
}

void DiskWork::add(DiskTier& disk, DiskBatch batch) {
    std::lock_guard lock(mutex_);
    if (cancelled_) return disk.cancel(batch);
    batches_.push_back(batch);
}

void DiskWork::cancel(DiskTier& disk) {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (const DiskBatch batch : batches_) disk.cancel(batch);
    batches_.clear();
}

FallingRoom::~FallingRoom() {
    for (const Piece& piece : idle_) device_->deallocate(piece.data, piece.bytes);
}

FallingRoom::Piece FallingRoom::take(size_t bytes) {
    constexpr size_t kLeast = 5 << 20;  // 8 MiB of 8 bits become 4.2
    {
        std::lock_guard lock(mutex_);
        for (Piece& piece : idle_) {
            if (piece.bytes < bytes) continue;
            std::swap(piece, idle_.back());
            const Piece taken = idle_.back();
            idle_.pop_back();
            return taken;
        }
    }
    bytes = std::max(bytes, kLeast);
    return {device_->allocate(bytes), bytes};
}

void FallingRoom::give(const Piece& piece) {
    if (!piece.data) return;
    std::lock_guard lock(mutex_);
    try {
        idle_.push_back(piece);
    } catch (const std::bad_alloc&) {
        device_->deallocate(piece.data, piece.bytes);
    }
}

MovePart::MovePart(MoveSharing& sharing, std::span<const MoveItem> items, TierKind to, MoveReason reason,
                   std::chrono::milliseconds patience, DiskWork* disk_work)
    : sharing_(sharing), items_(items), to_(to), reason_(reason), patience_(patience), disk_work_(disk_work) {
    sharing_.parts.fetch_add(1);
}

MovePart::~MovePart() {
    arrival_.reset();
    transfer_.reset();
    sharing_.falling.give(on_device_);
    if (latch_) latch_->wait();
    for (const Work& w : work_) {
        if (w.over) continue;
        give_back(w);
        w.item->block->end_move();
    }
    sharing_.parts.fetch_sub(1);
    sharing_.pool.store.room().notify();
}

bool MovePart::prepare() {
    work_.reserve(items_.size());
    for (const MoveItem& item : items_) take(item);
    start_ = std::chrono::steady_clock::now();
    has_room_ = work_.empty() || acquire(work_).ok();
    return has_room_;
}

bool MovePart::starts_at_once() const {
    return has_room_ &&
           std::none_of(work_.begin(), work_.end(), [](const Work& w) { return w.falls() || w.from.tier == TierKind::kDisk; });
}

void MovePart::wake_checkers() {
    if (!transfer_ || to_ != TierKind::kHost) return;
    if (const std::unique_lock lock(sharing_.checking, std::try_to_lock); lock)
        sharing_.checkers.parallel_for(sharing_.checkers.threads(), 1, [](int64_t, int) {});
}

void MovePart::start() {
    static const char* const kNames[] = {"start a move to the device", "start a move to the host", "start a move to disk"};
    const ProfileRange range(kNames[size_t(to_)]);
    if (work_.empty()) return;
    if (!has_room_) find_room();
    std::vector<size_t> memory, from_disk, to_disk;
    for (size_t i = 0; i < work_.size(); ++i) {
        if (!work_[i].status.ok()) continue;
        (to_ == TierKind::kDisk ? to_disk : work_[i].from.tier == TierKind::kDisk ? from_disk : memory).push_back(i);
    }
    start_in_memory(std::move(memory));
    start_with_disk(fall_for_disk(std::move(to_disk)), DiskRequest::Kind::kWrite);
    start_with_disk(from_disk, DiskRequest::Kind::kRead);
}

void MovePart::finish() {
    if (work_.empty()) return;
    static const char* const kNames[] = {"finish a move to the device", "finish a move to the host", "finish a move to disk"};
    const ProfileRange range(kNames[size_t(to_)]);
    wait_for_copies();
    if (to_ == TierKind::kDevice && sharing_.pool.device) {
        check_on_device();
    } else if (to_ != TierKind::kDisk) {
        check_on_host();
    }
    commit(std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
}

// False when the block stays where it is; the progress says why.
bool MovePart::take(const MoveItem& item) {
    if (!item.block || !item.block->start_move()) {
        ++progress_.skipped;
        return false;
    }
    Block& block = *item.block;
    if (!block.sealed()) {  // or dropped since it was asked for: a ticket that waited was no owner
        block.end_move();
        ++progress_.skipped;
        return false;
    }
    const Place from = sharing_.pool.store.place_of(block);
    const bool pinned = block.pins() > 0 && to_ > from.tier;
    // A step that needs a block is served by any faster tier: another move may have brought it there meanwhile.
    const bool serves = reason_ == MoveReason::kNeeded && from.tier < to_;
    if (from.tier == to_ || serves || pinned) {
        block.end_move();
        ++(pinned && !serves ? progress_.skipped : progress_.present);
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
    const bool falls = to_ > from.tier && may_fall(pool.pages.geometry, pool.pages.numerics, block, item.index);
    const PageKind kind = falls ? kind_in_tier(from.kind, to_) : from.kind;
    work_.push_back({&item, from, {to_, kind, nullptr, {}, {}}, {}});
    return true;
}

// Slots for all, or for as many as possible one by one; the others get a status.
void MovePart::find_room() {
    const BlockStore& store = sharing_.pool.store;
    const Deadline until = store.room().now() + patience_;
    std::vector<PageKind> kinds;
    uint64_t bytes = 0;
    for (const Work& w : work_) {
        kinds.push_back(w.to.kind);
        bytes += sharing_.pool.pages.geometry.slot_bytes(w.to.kind);
    }
    RoomSignal::Watch watch(store.room());
    Status all = acquire(work_);
    while (all.code() == TA_E_TIER_FULL) {
        // What blocks have left counts when those are done who were reading there.
        if (!store.has_vacated() || !watch.wait(until)) {
            if (reason_ == MoveReason::kPrefetch || store.vacated_bytes(to_) >= bytes) break;
            if (!sharing_.pool.make_room(to_, kinds, until)) break;
        }
        all = acquire(work_);
    }
    if (all.ok()) return;
    for (Work& w : work_) w.status = acquire({&w, 1});
}

Status MovePart::acquire(std::span<Work> work) {
    if (to_ == TierKind::kDevice) {
        std::vector<PageKind> kinds;
        for (const Work& w : work) kinds.push_back(w.to.kind);
        Result<std::vector<uint8_t*>> slots = sharing_.pool.store.acquire_slots(kinds);
        if (!slots.ok()) return std::move(slots).status();
        for (size_t i = 0; i < work.size(); ++i) work[i].to.address = slots.value()[i];
        return {};
    }
    std::vector<uint8_t> classes;
    for (const Work& w : work) classes.push_back(uint8_t(w.to.kind));
    Result<std::vector<Slot>> slots = below(to_)->acquire(classes);
    if (!slots.ok()) return std::move(slots).status();
    for (size_t i = 0; i < work.size(); ++i) {
        work[i].to.slot = slots.value()[i];
        work[i].to.address = below(to_)->address(work[i].to.slot);
    }
    return {};
}

void MovePart::fail_all(std::span<const size_t> list, const Status& status) {
    for (const size_t i : list) work_[i].status = status.clone();
}

// By the device behind what it does; a CPU copies when it checks.
void MovePart::start_in_memory(std::vector<size_t> list) {
    copied_ = std::move(list);
    Device* device = sharing_.pool.device;
    if (!device || copied_.empty()) return;
    const Geometry& g = sharing_.pool.pages.geometry;
    fall_on_device(copied_);
    std::vector<DeviceCopy> copies;
    std::vector<PlacedBlock> placed;
    for (const size_t i : copied_) {
        const Work& w = work_[i];
        if (!w.status.ok()) continue;
        copies.push_back({w.to.address, w.written ? w.written : w.from.address, g.slot_bytes(w.to.kind)});
        placed.push_back({w.item->block.get(), w.item->index, w.to.address, w.to.kind});
    }
    if (copies.empty()) return;
    // What nobody waits for does not take multiprocessors from those who decode.
    const bool urgent = reason_ == MoveReason::kAsked || reason_ == MoveReason::kNeeded;
    const MoveRoute route = sharing_.route == MoveRoute::kCalibrated && !urgent ? MoveRoute::kCopyEngine : sharing_.route;
    const CopyOptions options{to_ == TierKind::kHost, sharing_.pool.store.barriers().writers, route};
    Result<std::unique_ptr<DeviceTransfer>> transfer = device->start_copy(copies, options);
    if (!transfer.ok()) return fail_all(copied_, std::move(transfer).status());
    transfer_ = transfer.take();
    if (to_ == TierKind::kHost) return;
    arriving_ = copied_;
    Result<std::unique_ptr<ArrivalCheck>> check = sharing_.pool.verifier->start(placed, *transfer_);
    if (!check.ok()) return fail_all(copied_, std::move(check).status());
    arrival_ = check.take();
}

void MovePart::start_with_disk(std::span<const size_t> list, DiskRequest::Kind kind) {
    if (list.empty()) return;
    const bool write = kind == DiskRequest::Kind::kWrite;
    Device* const device = sharing_.pool.device;
    if (device && to_ == TierKind::kHost && sharing_.pool.store.barriers().writers) {
        // Kernels may still read what these host slots held before.
        if (Status s = device->wait_for_steps(); !s.ok()) return fail_all(list, s);
    }
    std::vector<DiskRequest> requests;
    for (size_t i = 0; i < list.size(); ++i) {
        Work& w = work_[list[i]];
        const Block& block = *w.item->block;
        DiskRequest r;
        r.kind = kind;
        r.slot = write ? w.to.slot : w.from.slot;
        r.bytes = sharing_.pool.pages.geometry.slot_bytes(w.to.kind);
        r.memory = !write ? w.to.address : w.written ? w.written : w.from.address;
        r.on_device = write ? !w.written && on_device(w.from) : on_device(w.to);
        if (write) w.to.keys = sharing_.pool.store.keys_of(block, r.more_keys);
        r.identity = block.identity(w.item->index, write ? w.to.keys : w.from.keys);
        r.tag = i;
        requests.push_back(std::move(r));
    }
    on_disk_.assign(list.begin(), list.end());
    auto latch = std::make_unique<DiskLatch>(list.size());
    Result<DiskBatch> batch = sharing_.pool.disk->submit(requests, *latch);
    if (!batch.ok()) return fail_all(list, std::move(batch).status());
    latch_ = std::move(latch);
    if (disk_work_) disk_work_->add(*sharing_.pool.disk, batch.value());
}

void MovePart::wait_for_copies() {
    if (transfer_) {
        if (const Status s = transfer_->wait(); !s.ok()) fail_all(copied_, s);
    }
    if (latch_) {
        std::vector<DiskCompletion>& completions = latch_->wait();
        for (size_t i = 0; i < completions.size(); ++i) {
            Work& w = work_[on_disk_[i]];
            w.status = std::move(completions[i].status);
            w.cancelled = completions[i].cancelled;
        }
        latch_.reset();
    }
}

void MovePart::check_on_device() {
    const auto take_over = [this](std::span<const size_t> list, const Status& all, std::vector<Status>& statuses) {
        for (size_t i = 0; i < list.size(); ++i) {
            Work& w = work_[list[i]];
            if (w.status.ok()) w.status = all.ok() ? std::move(statuses[i]) : all.clone();
        }
    };
    if (arrival_) {
        std::vector<Status> statuses(arriving_.size());
        const Status all = arrival_->wait(statuses);
        take_over(arriving_, all, statuses);
    }
    // A disk has checked what it read, and not what the device got of it.
    std::erase_if(on_disk_, [this](size_t i) { return !work_[i].status.ok(); });
    if (on_disk_.empty()) return;
    std::vector<PlacedBlock> placed;
    for (const size_t i : on_disk_) {
        const Work& w = work_[i];
        placed.push_back({w.item->block.get(), w.item->index, w.to.address, w.to.kind});
    }
    std::vector<Status> statuses(placed.size());
    const Status all = sharing_.pool.verifier->verify(placed, statuses);
    take_over(on_disk_, all, statuses);
}

// What arrived in memory must match its hashes before anybody is sent there; a disk has checked when it read. On a CPU it
// arrives here.
void MovePart::check_on_host() {
    const MoveHost& pool = sharing_.pool;
    const Geometry& g = pool.pages.geometry;
    const bool copy = pool.device == nullptr;
    std::vector<Piece> pieces;
    for (const size_t i : copied_) {
        const Work& w = work_[i];
        if (!w.status.ok()) continue;
        const size_t bytes = g.slot_bytes(w.to.kind);
        const bool falls = copy && w.falls();
        if (falls) write_empty_trailer(w, w.to.address);
        const auto n = falls  ? 1
                       : copy ? g.layers
                              : uint32_t(std::max<uint64_t>(uint64_t{g.layers} * kCheckedBytes / bytes, 1));
        for (uint32_t first = 0; first < g.layers; first += n) pieces.push_back({i, first, std::min(n, g.layers - first)});
    }
    std::mutex failing;
    std::lock_guard lock(sharing_.checking);
    sharing_.checkers.parallel_for(int64_t(pieces.size()), 1, [&](int64_t i, int) {
        const Piece& piece = pieces[size_t(i)];
        Work& w = work_[piece.work];
        if (copy && w.falls()) return fall(w, w.to.address, piece, failing);
        const Block& block = *w.item->block;
        if (copy) std::memcpy(w.to.address, w.from.address, g.slot_bytes(w.to.kind));
        Status s = verify_trailer(g, w.to.kind, w.to.address, pool.pages.fingerprint, w.item->index, block.content_id(),
                                  uint32_t(kPageTokens));
        if (s.ok()) s = verify_pages(g, w.to.kind, w.to.address, w.item->index, piece.first, piece.n);
        if (s.ok()) return;
        std::lock_guard one(failing);
        if (w.status.ok()) w.status = std::move(s);
    });
}

void MovePart::write_empty_trailer(const Work& w, uint8_t* to) const {
    const MoveHost& pool = sharing_.pool;
    write_trailer(pool.pages.geometry, w.to.kind, to, pool.pages.fingerprint, w.item->index, w.item->block->content_id(),
                  uint32_t(kPageTokens), false);
}

// What is encoded anew gets new hashes: it is checked before. The trailer has its identity already.
void MovePart::fall(Work& w, uint8_t* to, const Piece& piece, std::mutex& failing) {
    const MoveHost& pool = sharing_.pool;
    const Geometry& g = pool.pages.geometry;
    const uint8_t* const from = w.read ? w.read : w.from.address;
    Status s = verify_trailer(g, w.from.kind, from, pool.pages.fingerprint, w.item->index, w.item->block->content_id(),
                              uint32_t(kPageTokens));
    if (s.ok()) s = verify_pages(g, w.from.kind, from, w.item->index, piece.first, piece.n);
    if (s.ok()) {
        s = encode_lower(g, pool.pages.numerics, *pool.pages.codec, from, w.from.kind, to, w.to.kind, piece.first, piece.n);
    }
    if (s.ok()) {
        write_page_hashes(g, w.to.kind, to, piece.first, piece.n);
        return;
    }
    std::lock_guard one(failing);
    if (w.status.ok()) w.status = std::move(s);
}

// Encodes what leaves a device with fewer bits, in memory of the device.
void MovePart::fall_on_device(std::span<const size_t> list) {
    const MoveHost& pool = sharing_.pool;
    const Geometry& g = pool.pages.geometry;
    std::vector<size_t> falling;
    std::vector<PlacedBlock> placed;
    for (const size_t i : list) {
        const Work& w = work_[i];
        if (!w.falls()) continue;
        falling.push_back(i);
        placed.push_back({w.item->block.get(), w.item->index, w.from.address, w.from.kind});
    }
    if (falling.empty()) return;
    // What is encoded anew gets new hashes: it is checked before.
    std::vector<Status> statuses(falling.size());
    if (Status s = pool.verifier->verify(placed, statuses); !s.ok()) return fail_all(falling, s);
    std::vector<uint8_t*> to;
    size_t n = 0;
    for (size_t i = 0; i < falling.size(); ++i) {
        work_[falling[i]].status = std::move(statuses[i]);
        if (!work_[falling[i]].status.ok()) continue;
        falling[n] = falling[i];
        placed[n++] = placed[i];
    }
    falling.resize(n);
    placed.resize(n);
    const size_t bytes = g.slot_bytes(PageKind::kChannel);
    on_device_ = sharing_.falling.take(n * bytes);
    if (!on_device_.data)
        return fail_all(falling, fail(TA_E_MEMORY, "the GPU has no %zu bytes to encode blocks in", n * bytes).bytes(n * bytes));
    for (size_t i = 0; i < n; ++i) {
        to.push_back(on_device_.data + i * bytes);
        work_[falling[i]].written = to.back();
    }
    if (Status s = pool.encoder->encode_lower(placed, to); !s.ok()) fail_all(falling, s);
}

// Copies what falls on its way from a device to the disk to memory where a CPU encodes it.
void MovePart::fetch_falling(std::span<const size_t> list) {
    const Geometry& g = sharing_.pool.pages.geometry;
    const auto fetched = [&](const Work& w) { return w.falls() && on_device(w.from); };
    size_t bytes = 0;
    for (const size_t i : list) bytes += fetched(work_[i]) ? g.slot_bytes(work_[i].from.kind) : 0;
    if (bytes == 0) return;
    fetched_.resize(bytes);
    uint8_t* next = fetched_.data();
    for (const size_t i : list) {
        Work& w = work_[i];
        if (!fetched(w)) continue;
        w.read = next;
        next += g.slot_bytes(w.from.kind);
        if (Status s = sharing_.pool.device->read(w.read, w.from.address, g.slot_bytes(w.from.kind)); !s.ok())
            w.status = std::move(s);
    }
}

// Encodes what falls on its way to disk; without the blocks that do not match their hashes.
std::vector<size_t> MovePart::fall_for_disk(std::vector<size_t> list) {
    const Geometry& g = sharing_.pool.pages.geometry;
    std::vector<Piece> pieces;
    size_t bytes = 0;
    for (const size_t i : list) bytes += work_[i].falls() ? g.slot_bytes(work_[i].to.kind) : 0;
    if (bytes == 0) return list;
    fetch_falling(list);
    fallen_.resize(bytes);
    uint8_t* next = fallen_.data();
    for (const size_t i : list) {
        Work& w = work_[i];
        if (!w.falls() || !w.status.ok()) continue;
        w.written = next;
        next += g.slot_bytes(w.to.kind);
        write_empty_trailer(w, w.written);
        for (uint32_t layer = 0; layer < g.layers; ++layer) pieces.push_back({i, layer, 1});
    }
    {
        std::mutex failing;
        std::lock_guard lock(sharing_.checking);
        sharing_.checkers.parallel_for(int64_t(pieces.size()), 1, [&](int64_t i, int) {
            const Piece& piece = pieces[size_t(i)];
            fall(work_[piece.work], work_[piece.work].written, piece, failing);
        });
    }
    std::erase_if(list, [this](size_t i) { return !work_[i].status.ok(); });
    return list;
}

void MovePart::give_back(const Work& w) {
    if (w.to.tier == TierKind::kDevice) {
        if (w.to.address) sharing_.pool.store.release_slot(w.to.kind, w.to.address);
    } else if (w.to.slot.index != Slot::kNone) {
        below(w.to.tier)->release({&w.to.slot, 1});
    }
}

// Whether what did not match is the block where it lies, and not only what arrived of it. Who cannot tell says no: the next
// move does.
bool MovePart::is_damaged(const Work& w) const {
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

void MovePart::count_moved(const Work& w, MoveCounters& counted) {
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
    const bool kernel = transfer_ && transfer_->route() == MoveRoute::kKernel;
    for (Work& w : work_) {
        Block& block = *w.item->block;
        const uint64_t bytes = sharing_.pool.pages.geometry.slot_bytes(w.to.kind);
        bool stays = w.status.ok() && block.pins() > 0 && to_ > w.from.tier;  // pinned since it was taken
        if (w.status.ok() && !stays) {
            // Before a step can find it here.
            if (reason_ == MoveReason::kPrefetch) block.prefetch().arrive();
            stays = !sharing_.pool.store.move(block, w.to);  // or published
        }
        if (w.status.ok() && !stays) {
            w.over = true;
            count_moved(w, counted);
            if (transfer_ && w.from.tier != TierKind::kDisk)
                (kernel ? counted.bytes_by_kernel : counted.bytes_by_engine) += bytes;
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
