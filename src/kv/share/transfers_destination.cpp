// The work of the destination's lane for a transfer.
#include <cstdio>
#include <deque>
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

constexpr uint64_t kPullBytes = uint64_t{32} << 20;  // copied at a time, while earlier ones are checked
constexpr size_t kPullsUnderWay = 4;
constexpr uint64_t kCopyAlignment = 16;                  // as the copy kernels need it
constexpr size_t kEngineBytes = size_t{1} << 20;         // from this size on blocks go by copy engine
constexpr uint64_t kGpuWindowBytes = uint64_t{1} << 30;  // at most, and at most a quarter of the pool

}  // namespace

Status Transfers::prepare(Transfer& t) {
    Pool& pool = *t.pool;
    Incoming& in = *t.in;
    TA_RETURN_IF_ERROR(pool.check_open());
    TA_RETURN_IF_ERROR(read_offer(t));
    TA_RETURN_IF_ERROR(read_sequence(t));
    pool.end_forgotten_namespaces();
    in.tenant = in.spaces.tenant_of(in.offer.space);
    TA_RETURN_IF_ERROR(in.spaces.complete());
    TA_RETURN_IF_ERROR(pool.sequences().check_room_for(1));
    return begin_moving(t);
}

// Asks for the blocks of the list that are not here yet.
Status Transfers::begin_moving(Transfer& t) {
    Pool& pool = *t.pool;
    Incoming& in = *t.in;
    in.blocks.resize(in.list.size());
    share_present(t);
    uint64_t bytes = 0;
    for (size_t i = 0; i < in.list.size(); ++i) {
        if (!in.blocks[i]) bytes += pool.geometry().slot_bytes(PageKind(in.list[i].kind));
    }
    TA_RETURN_IF_ERROR(pool.residency().promise_room(in.mine, bytes));
    return ask_for_blocks(t);
}

// Makes blocks for those at `positions`, if there is free room for all.
Result<std::vector<BlockPtr>> Transfers::take_free(Transfer& t, std::span<const uint64_t> positions) {
    std::vector<PageKind> kinds;
    kinds.reserve(positions.size());
    for (const uint64_t i : positions) kinds.push_back(PageKind(t.in->list[size_t(i)].kind));
    const std::vector<Tenant> tenants(kinds.size(), t.in->tenant);
    return t.pool->residency().new_blocks(kinds, tenants, t.in->mine);
}

// Asks for full blocks first: this rank reads them itself if it can, or they come from GPU to GPU. The rest comes through host
// memory.
Status Transfers::ask_for_blocks(Transfer& t) {
    Incoming& in = *t.in;
    in.positions.clear();
    const bool has_gpu = t.pool->context().device() != nullptr;
    Result<bool> reaches = has_gpu ? group_.transport().reaches(t.progress.peer) : Result<bool>(false);
    if (reaches.ok() && reaches.value()) {
        for (size_t i = 0; i < in.list.size(); ++i) {
            if (!in.blocks[i] && in.list[i].tokens == uint32_t(kPageTokens)) in.positions.push_back(i);
        }
    }
    if (in.positions.empty()) {
        in.by_gpu = has_gpu && group_.transport().may_write_gpu(t.progress.peer);
        return ask_for_windows(t);
    }
    PayloadWriter ask;
    ask.put(AskLeaseHeader{in.positions.size()}).put_all(std::span<const uint64_t>(in.positions));
    {
        const std::lock_guard lock(mutex_);
        if (t.phase != Phase::kMoving) return {};
        in.asked_lease = true;
        touch(t);
        group_.send(t.progress.peer, MessageType::kAskLease, t.channel, ask.bytes());
    }
    // While the source looks its blocks up, takes room for all of them. If there is not enough, pull() makes room part by part.
    Result<std::vector<BlockPtr>> room = take_free(t, in.positions);
    if (room.ok()) in.room = room.take();
    return {};
}

// Copies and checks the leased blocks. The others come through windows.
Status Transfers::take_in_leased(Transfer& t) {
    Incoming& in = *t.in;
    std::vector<uint64_t> positions, offsets;
    std::vector<BlockPtr> room;
    for (size_t i = 0; i < in.positions.size(); ++i) {
        const uint64_t position = in.positions[i], bytes = t.pool->geometry().slot_bytes(PageKind(in.list[position].kind));
        if (in.offsets[i] == kElsewhere) {  // it comes through a window
            if (!in.room.empty()) t.pool->residency().promise_again(in.mine, bytes);
            continue;
        }
        if (in.offsets[i] > in.leased.bytes || bytes > in.leased.bytes - in.offsets[i] || in.offsets[i] % kCopyAlignment != 0)
            return fail(TA_E_CORRUPT, "rank %u leases what is not there", t.progress.peer).rank(int32_t(t.progress.peer));
        positions.push_back(position);
        offsets.push_back(in.offsets[i]);
        if (!in.room.empty()) room.push_back(std::move(in.room[i]));
    }
    in.room = std::move(room);
    if (!positions.empty()) TA_RETURN_IF_ERROR(pull(t, positions, offsets));
    return ask_for_windows(t);
}

// Copies leased blocks part by part; checks of earlier parts run meanwhile.
Status Transfers::pull(Transfer& t, std::span<const uint64_t> positions, std::span<const uint64_t> offsets) {
    Incoming& in = *t.in;
    Result<std::shared_ptr<uint8_t>> found = group_.transport().find_memory(t.progress.peer, in.leased.memory, in.leased.bytes);
    if (!found.ok()) return std::move(found).status();
    const std::shared_ptr<uint8_t> memory = found.take();
    if (!memory) {
        return fail(TA_E_CANCELLED, "rank %u has let go of the blocks", t.progress.peer).rank(int32_t(t.progress.peer));
    }
    std::vector<uint8_t*> from;
    for (const uint64_t offset : offsets) from.push_back(memory.get() + offset);
    const Geometry& g = t.pool->geometry();
    std::deque<Pull> under_way;
    const auto finish_oldest = [&]() -> Status {
        Pull oldest = std::move(under_way.front());
        under_way.pop_front();
        return finish_pull(t, oldest);
    };
    for (size_t first = 0; first < positions.size();) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(t.pool->check_open());
        size_t end = first;
        for (uint64_t bytes = 0; end < positions.size() && (end == first || bytes < kPullBytes); ++end)
            bytes += g.slot_bytes(PageKind(in.list[size_t(positions[end])].kind));
        const std::span<BlockPtr> room =
            in.room.empty() ? std::span<BlockPtr>() : std::span(in.room).subspan(first, end - first);
        Result<Pull> started = start_pull(t, positions.subspan(first, end - first), room, std::span(from).subspan(first));
        if (!started.ok()) return std::move(started).status();
        under_way.push_back(started.take());
        if (under_way.size() == kPullsUnderWay) TA_RETURN_IF_ERROR(finish_oldest());
        first = end;
    }
    while (!under_way.empty()) TA_RETURN_IF_ERROR(finish_oldest());
    return {};
}

// Makes a block for one that comes; makes room, until the transfer ends.
Result<BlockPtr> Transfers::take_block(Transfer& t, const StoredBlock& b) {
    t.in->mine.check = [&t] {
        return t.phase == Phase::kMoving ? Status() : fail(TA_E_CANCELLED, "the transfer ended while it waited for room");
    };
    Result<BlockPtr> block = t.pool->residency().new_block(PageKind(b.kind), t.in->mine);
    if (!block.ok()) return std::move(block).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
    return block;
}

// Makes blocks for those at `positions`, in one call if there is room. `room`: they are made already; or empty.
Result<Transfers::Pull> Transfers::take_room(Transfer& t, std::span<const uint64_t> positions, std::span<BlockPtr> room) {
    Incoming& in = *t.in;
    Pool& pool = *t.pool;
    Pull p;
    p.blocks.reserve(positions.size());
    p.positions.reserve(positions.size());
    p.placed.reserve(positions.size());
    std::move(room.begin(), room.end(), std::back_inserter(p.blocks));
    if (p.blocks.empty()) {
        Result<std::vector<BlockPtr>> taken = take_free(t, positions);
        if (taken.ok()) {
            p.blocks = taken.take();
        } else if (Status s = std::move(taken).status(); s.code() != TA_E_TIER_FULL) {
            return s;
        }
    }
    for (size_t n = p.blocks.size(); n < positions.size(); ++n) {  // one by one, while other blocks leave
        Result<BlockPtr> block = take_block(t, in.list[size_t(positions[n])]);
        if (!block.ok()) return std::move(block).status();
        p.blocks.push_back(block.take());
        const std::lock_guard lock(mutex_);
        works(t);
    }
    for (size_t n = 0; n < positions.size(); ++n) {
        const StoredBlock& b = in.list[size_t(positions[n])];
        Block& block = *p.blocks[n];
        block.set_tenant(in.tenant);
        p.positions.push_back(positions[n]);
        p.placed.push_back({&block, b.index, block.slot(), PageKind(b.kind), b.content_id});
        p.bytes += pool.geometry().slot_bytes(PageKind(b.kind));
    }
    return p;
}

Result<Transfers::Pull> Transfers::start_pull(Transfer& t, std::span<const uint64_t> positions, std::span<BlockPtr> room,
                                              std::span<uint8_t* const> from) {
    Result<Pull> taken = take_room(t, positions, room);
    if (!taken.ok()) return taken;
    Pull p = taken.take();
    std::vector<DeviceCopy> copies;
    copies.reserve(p.placed.size());
    for (size_t n = 0; n < p.placed.size(); ++n)
        copies.push_back({p.placed[n].slot, from[n], t.pool->geometry().slot_bytes(p.placed[n].kind)});
    CopyOptions options;
    options.route = p.bytes >= kEngineBytes * copies.size() ? MoveRoute::kCopyEngine : MoveRoute::kKernel;
    Result<std::unique_ptr<DeviceTransfer>> transfer = t.pool->context().device()->start_copy(copies, options);
    if (!transfer.ok()) return std::move(transfer).status();
    p.transfer = transfer.take();
    TA_RETURN_IF_ERROR(start_check(t, p));
    return p;
}

Status Transfers::start_check(Transfer& t, Pull& p) {
    Result<std::unique_ptr<ArrivalCheck>> check = t.pool->residency().verifier()->start_adopting(p.placed, p.transfer.get());
    if (!check.ok()) return std::move(check).status();
    p.check = check.take();
    return {};
}

// Checks page hashes only: they prove that the pages are as the source sealed them, and the source's kernels write only values
// that attention can compute with.
Status Transfers::finish_pull(Transfer& t, Pull& p) {
    Incoming& in = *t.in;
    if (p.transfer) TA_RETURN_IF_ERROR(p.transfer->wait());
    std::vector<Status> statuses(p.placed.size());
    TA_RETURN_IF_ERROR(p.check->wait(statuses));
    for (Status& s : statuses) {
        if (!s.ok()) return std::move(s).rank(int32_t(t.progress.peer));
    }
    std::vector<MoveItem> arrived;
    arrived.reserve(p.blocks.size());
    for (size_t n = 0; n < p.blocks.size(); ++n) {
        p.blocks[n]->mark_sealed();
        in.blocks[size_t(p.positions[n])] = p.blocks[n];
        arrived.push_back({std::move(p.blocks[n]), p.placed[n].index});
    }
    in.others_see.add_all(arrived);
    const std::lock_guard lock(mutex_);
    t.progress.blocks_moved += p.placed.size();
    t.progress.bytes_moved += p.bytes;
    works(t);
    return {};
}

Status Transfers::no_offer(const Transfer& t) const {
    return fail(TA_E_CORRUPT, "rank %u offers what no pool has", t.progress.peer).rank(int32_t(t.progress.peer));
}

// Checks that the offer is of a pool like this one, and reads its list.
Status Transfers::read_offer(Transfer& t) {
    Incoming& in = *t.in;
    const Pool& pool = *t.pool;
    OfferHeader& h = in.offer;
    PayloadReader payload(in.offer_bytes);
    if (!payload.get(h)) return no_offer(t);
    bool same = h.fingerprint == pool.fingerprint();
    for (int kind = 0; kind < kPageKinds; ++kind)
        same = same && h.slot_bytes[kind] == pool.geometry().slot_bytes(PageKind(kind));
    if (!same) {
        return fail(TA_E_MISMATCH,
                    "the pools of ranks %u and %u differ in rotation, sink blocks, K offset, falling precision, shape or bits",
                    t.progress.peer, group_.settings().rank)
            .rank(int32_t(t.progress.peer));
    }
    if (!payload.get_rest(h.blocks, in.list)) return no_offer(t);
    in.offer_bytes = {};
    for (const StoredBlock& b : in.list) {
        if (!can_exist(pool, b)) return no_offer(t);
    }
    return {};
}

// Checks that the offered blocks can form a sequence.
Status Transfers::read_sequence(Transfer& t) {
    const OfferHeader& h = t.in->offer;
    const std::vector<StoredBlock>& list = t.in->list;
    if (h.length < 0 || h.blocks > uint64_t(INT64_MAX / kPageTokens) || uint64_t(h.length) > h.blocks * kPageTokens ||
        uint64_t(h.length) + kPageTokens <= h.blocks * kPageTokens)
        return no_offer(t);
    for (size_t i = 0; i < list.size(); ++i) {
        const bool is_end = i + 1 == list.size() && h.length == int64_t(i) * kPageTokens + int64_t(list[i].tokens);
        if (list[i].index != i || (list[i].tokens != uint32_t(kPageTokens) && !is_end)) return no_offer(t);
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks = h.blocks;
    t.progress.length = h.length;
    return {};
}

// Shares blocks of the list that an earlier transfer from the same pool brought.
void Transfers::share_present(Transfer& t) {
    Incoming& in = *t.in;
    uint64_t shared = 0;
    const auto arrived = arrived_.find({t.progress.peer, in.offer.pool, t.pool.get()});
    if (arrived == arrived_.end()) return;
    for (size_t i = 0; i < in.list.size(); ++i) {
        const StoredBlock& b = in.list[i];
        if (b.tokens != uint32_t(kPageTokens)) continue;
        const auto found = arrived->second.find(b.content_id);
        if (found == arrived->second.end() || found->second.index != b.index) continue;
        BlockPtr block = found->second.block.lock();
        if (!block || block->dropped() || block->stuck() || block->kind() != PageKind(b.kind) || block->tenant() != in.tenant)
            continue;
        in.blocks[i] = std::move(block);
        ++shared;
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks_shared += shared;
}

// Asks for the next windows. When no blocks are left, makes the sequence, or publishes.
Status Transfers::ask_for_windows(Transfer& t) {
    Incoming& in = *t.in;
    for (;;) {
        while (in.windows.size() < kWindows) {
            Result<bool> opened = open_window(t);
            if (!opened.ok()) return std::move(opened).status();
            if (!opened.value()) break;
        }
        if (!in.windows.empty() || t.phase != Phase::kMoving) return {};
        if (!in.by_gpu) return in.fetch ? land_leg(t) : land(t);
        in.by_gpu = false;
        in.next = 0;
    }
}

// Opens a window for the next blocks. False: there are none left, or the transfer has ended.
Result<bool> Transfers::open_window(Transfer& t) {
    Incoming& in = *t.in;
    const Geometry& g = t.pool->geometry();
    Incoming::Window w{};
    w.on_gpu = in.by_gpu;
    const uint64_t most =
        w.on_gpu ? std::min(kGpuWindowBytes, t.pool->blocks().budget() / 4) : group_.settings().staging_bytes / kWindows;
    size_t bytes = 0;
    for (; in.next < in.list.size(); ++in.next) {
        const StoredBlock& b = in.list[in.next];
        if (in.blocks[in.next] || (w.on_gpu && b.tokens != uint32_t(kPageTokens))) continue;
        const size_t more = g.slot_bytes(PageKind(b.kind));
        if (!w.positions.empty() && bytes + more > most) break;
        bytes += more;
        w.positions.push_back(in.next);
    }
    if (w.positions.empty()) return false;
    std::vector<std::span<uint8_t>> parts;
    if (w.on_gpu) {
        Result<Pull> room = take_room(t, w.positions, {});
        if (!room.ok()) return std::move(room).status();
        for (const PlacedBlock& b : room.value().placed) parts.emplace_back(b.slot, g.slot_bytes(b.kind));
        w.blocks = std::move(room.value().blocks);
    } else {
        Buffer& staging = in.staging[in.uses_of_staging++ % kWindows];
        if (!staging.reserve(bytes)) {
            return fail(TA_E_MEMORY, "no %zu bytes of host memory for blocks that arrive", bytes)
                .bytes(bytes)
                .rank(int32_t(group_.settings().rank));
        }
        w.memory = staging.data();
        parts.emplace_back(w.memory, bytes);
    }
    {
        const std::lock_guard lock(mutex_);
        w.number = uint64_t(group_.settings().rank + 1) << 40 | ++windows_;
    }
    const PayloadWriter ready = PayloadWriter()
                                    .put(ReadyHeader{w.number, w.on_gpu, w.positions.size()})
                                    .put_all(std::span<const uint64_t>(w.positions));
    struct Close {
        Transport& transport;
        uint64_t number;
        ~Close() {
            if (number != 0) transport.close_window(number);
        }
    } close{group_.transport(), w.number};
    // Without the lock: it may wait for a write into another window.
    group_.transport().open_window(w.number, t.progress.peer, WindowMemory(std::move(parts), w.on_gpu));
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return false;
    in.windows.push_back(std::move(w));
    close.number = 0;
    touch(t);
    group_.send(t.progress.peer, MessageType::kReady, t.channel, ready.bytes());
    return true;
}

// Takes in the oldest window.
Status Transfers::take_in_window(Transfer& t) {
    Incoming& in = *t.in;
    const Incoming::Window& w = in.windows.front();
    group_.transport().close_window(w.number);
    TA_RETURN_IF_ERROR(w.on_gpu ? take_in_gpu_window(t) : take_in_host_window(t));
    Incoming::Window over{};  // its blocks are released after the lock
    {
        const std::lock_guard lock(mutex_);
        std::swap(over, in.windows.front());
        in.windows.pop_front();
    }
    return ask_for_windows(t);
}

Status Transfers::take_in_gpu_window(Transfer& t) {
    Incoming::Window& w = t.in->windows.front();
    Pull p;
    for (size_t n = 0; n < w.positions.size(); ++n) {
        const StoredBlock& b = t.in->list[size_t(w.positions[n])];
        if (w.said[n] == kElsewhere) {  // it comes through another window
            t.pool->residency().promise_again(t.in->mine, t.pool->geometry().slot_bytes(PageKind(b.kind)));
            continue;
        }
        p.positions.push_back(w.positions[n]);
        p.placed.push_back({w.blocks[n].get(), b.index, w.blocks[n]->slot(), PageKind(b.kind), b.content_id});
        p.blocks.push_back(std::move(w.blocks[n]));
        p.bytes += t.pool->geometry().slot_bytes(PageKind(b.kind));
    }
    if (p.placed.empty()) return {};
    TA_RETURN_IF_ERROR(start_check(t, p));
    return finish_pull(t, p);
}

Status Transfers::take_in_host_window(Transfer& t) {
    Incoming& in = *t.in;
    Pool& pool = *t.pool;
    const Incoming::Window& w = in.windows.front();
    char from[32];
    std::snprintf(from, sizeof from, "what rank %u sent", t.progress.peer);
    uint8_t* slot = w.memory;
    for (size_t n = 0; n < w.positions.size(); ++n) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(pool.check_open());
        const StoredBlock& b = in.list[size_t(w.positions[n])];
        const auto kind = PageKind(b.kind);
        const std::span<uint8_t> bytes(slot, pool.geometry().slot_bytes(kind));
        slot += bytes.size();
        if (hash_bytes(bytes.data(), bytes.size()) != w.said[n]) {
            return fail(TA_E_CORRUPT, "the block arrived damaged from rank %u", t.progress.peer)
                .block(int64_t(b.index))
                .rank(int32_t(t.progress.peer));
        }
        if (Status s = check_block(pool, b, bytes, from); !s.ok()) return std::move(s).rank(int32_t(t.progress.peer));
        Result<BlockPtr> block = take_block(t, b);
        if (!block.ok()) return std::move(block).status();
        if (in.tenant != 0) block.value()->set_tenant(in.tenant);
        TA_RETURN_IF_ERROR(fill_block(pool, *block.value(), b, bytes));
        in.blocks[size_t(w.positions[n])] = block.value();
        in.others_see.add({block.take(), b.index});
        const std::lock_guard lock(mutex_);
        ++t.progress.blocks_moved;
        t.progress.bytes_moved += bytes.size();
        works(t);
    }
    return {};
}

// If memory runs out, it remembers fewer blocks; the others come again.
void Transfers::remember_arrived(const Transfer& t) noexcept try {
    const Incoming& in = *t.in;
    ArrivedBlocks& arrived = arrived_[{t.progress.peer, in.offer.pool, t.pool.get()}];
    arrived.reserve(arrived.size() + in.list.size());
    for (size_t i = 0; i < in.list.size(); ++i) {
        if (in.list[i].tokens == uint32_t(kPageTokens)) arrived[in.list[i].content_id] = {in.list[i].index, in.blocks[i]};
    }
    const auto count = [this] {
        size_t entries = arrived_.size();  // pools come and go, too
        for (const auto& [origin, blocks] : arrived_) entries += blocks.size();
        return entries;
    };
    if (count() <= prune_arrived_at_) return;
    for (auto& [origin, blocks] : arrived_)
        std::erase_if(blocks, [](const auto& entry) { return entry.second.block.expired(); });
    std::erase_if(arrived_, [](const auto& entry) { return entry.second.empty(); });
    prune_arrived_at_ = 2 * count() + 1024;
} catch (const std::bad_alloc&) {
}

Status Transfers::land(Transfer& t) {
    {
        const std::lock_guard lock(mutex_);
        if (t.phase != Phase::kMoving) return {};
        t.phase = Phase::kLanding;
    }
    Incoming& in = *t.in;
    Sequences::Snapshot s;
    s.length = in.offer.length;
    s.blocks = in.blocks;
    s.tenant = in.tenant;
    Result<ta_seq> seq = t.pool->sequences().adopt(std::move(s));
    if (!seq.ok()) return std::move(seq).status().rank(int32_t(group_.settings().rank));
    in.spaces.keep();
    {
        const std::lock_guard lock(mutex_);
        t.progress.seq = seq.value();
        tell(t.progress.peer, MessageType::kArrived, t.channel);
    }
    remember_arrived(t);  // while the source lets go of the blocks
    const std::lock_guard lock(mutex_);
    conclude(t, {});
    return {};
}

}  // namespace ta::share
