// The work of the destination's lane for a transfer.
#include <cstdio>
#include <deque>
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

constexpr uint64_t kPullBytes = uint64_t{32} << 20;  // that are copied at once, while those before are checked
constexpr size_t kPullsUnderWay = 4;
constexpr uint64_t kCopyAlignment = 16;                  // that kernels rely on
constexpr size_t kEngineBytes = size_t{1} << 20;         // from this size on blocks go by copy engine
constexpr uint64_t kGpuWindowBytes = uint64_t{1} << 30;  // or a quarter of the pool

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
    TA_RETURN_IF_ERROR(pool.check_room_for(1));
    return begin_moving(t);
}

// Asks for the blocks of the list that are not here.
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

// Full blocks first: this rank reads them itself where it can, or they come from GPU to GPU. The rest comes by the host's memory.
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
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    in.asked_lease = true;
    touch(t);
    group_.send(
        t.progress.peer, MessageType::kAskLease, t.channel,
        PayloadWriter().put(AskLeaseHeader{in.positions.size()}).put_all(std::span<const uint64_t>(in.positions)).bytes());
    return {};
}

// Copies, checks and takes in what is leased; the rest comes by windows.
Status Transfers::take_in_leased(Transfer& t) {
    const Incoming& in = *t.in;
    std::vector<uint64_t> positions, offsets;
    for (size_t i = 0; i < in.positions.size(); ++i) {
        if (in.offsets[i] == kElsewhere) continue;
        const uint64_t position = in.positions[i], bytes = t.pool->geometry().slot_bytes(PageKind(in.list[position].kind));
        if (in.offsets[i] > in.leased.bytes || bytes > in.leased.bytes - in.offsets[i] || in.offsets[i] % kCopyAlignment != 0)
            return fail(TA_E_CORRUPT, "rank %u leases what is not there", t.progress.peer).rank(int32_t(t.progress.peer));
        positions.push_back(position);
        offsets.push_back(in.offsets[i]);
    }
    if (!positions.empty()) TA_RETURN_IF_ERROR(pull(t, positions, offsets));
    return ask_for_windows(t);
}

// A part of it while the parts before are checked.
Status Transfers::pull(Transfer& t, std::span<const uint64_t> positions, std::span<const uint64_t> offsets) {
    Incoming& in = *t.in;
    Result<std::shared_ptr<uint8_t>> found = group_.transport().find_memory(t.progress.peer, in.leased.memory);
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
        Result<Pull> started = start_pull(t, positions.subspan(first, end - first), std::span(from).subspan(first));
        if (!started.ok()) return std::move(started).status();
        under_way.push_back(started.take());
        if (under_way.size() == kPullsUnderWay) TA_RETURN_IF_ERROR(finish_oldest());
        first = end;
    }
    while (!under_way.empty()) TA_RETURN_IF_ERROR(finish_oldest());
    return {};
}

// Blocks for what comes.
Result<Transfers::Pull> Transfers::take_room(Transfer& t, std::span<const uint64_t> positions) {
    Incoming& in = *t.in;
    Pool& pool = *t.pool;
    Pull p;
    std::vector<PageKind> kinds;
    for (const uint64_t i : positions) kinds.push_back(PageKind(in.list[size_t(i)].kind));
    Result<std::vector<BlockPtr>> taken = pool.blocks().acquire(kinds);
    if (taken.ok()) {
        p.blocks = taken.take();
    } else if (Status s = std::move(taken).status(); s.code() != TA_E_TIER_FULL) {
        return s;
    }
    for (size_t n = p.blocks.size(); n < positions.size(); ++n) {  // one by one, while others leave
        Result<BlockPtr> block = pool.residency().new_block(kinds[n], in.mine);
        if (!block.ok()) {
            return std::move(block)
                .status()
                .block(int64_t(in.list[size_t(positions[n])].index))
                .rank(int32_t(group_.settings().rank));
        }
        p.blocks.push_back(block.take());
    }
    for (size_t n = 0; n < positions.size(); ++n) {
        const StoredBlock& b = in.list[size_t(positions[n])];
        Block& block = *p.blocks[n];
        if (in.tenant != 0) block.set_tenant(in.tenant);
        p.positions.push_back(positions[n]);
        p.placed.push_back({&block, b.index, block.slot(), kinds[n], b.content_id});
        p.bytes += pool.geometry().slot_bytes(kinds[n]);
    }
    return p;
}

Result<Transfers::Pull> Transfers::start_pull(Transfer& t, std::span<const uint64_t> positions,
                                              std::span<uint8_t* const> from) {
    Result<Pull> room = take_room(t, positions);
    if (!room.ok()) return room;
    Pull p = room.take();
    std::vector<DeviceCopy> copies;
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

// The hash of each page says that it is what the source sealed; what attention can compute with, the source's kernels wrote.
Status Transfers::finish_pull(Transfer& t, Pull& p) {
    Incoming& in = *t.in;
    if (p.transfer) TA_RETURN_IF_ERROR(p.transfer->wait());
    std::vector<Status> statuses(p.placed.size());
    TA_RETURN_IF_ERROR(p.check->wait(statuses));
    for (Status& s : statuses) {
        if (!s.ok()) return std::move(s).rank(int32_t(t.progress.peer));
    }
    for (size_t n = 0; n < p.blocks.size(); ++n) {
        p.blocks[n]->mark_sealed();
        in.blocks[size_t(p.positions[n])] = p.blocks[n];
        in.others_see.add({std::move(p.blocks[n]), p.placed[n].index});
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks_moved += p.placed.size();
    t.progress.bytes_moved += p.bytes;
    touch(t);
    return {};
}

Status Transfers::no_offer(const Transfer& t) const {
    return fail(TA_E_CORRUPT, "rank %u offers what no pool has", t.progress.peer).rank(int32_t(t.progress.peer));
}

// The offer is of a pool like this one.
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

// It may be that of a sequence.
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

// Blocks of the list that an earlier transfer from the same pool brought.
void Transfers::share_present(Transfer& t) {
    Incoming& in = *t.in;
    uint64_t shared = 0;
    const ArrivedBlocks& arrived = arrived_[{t.progress.peer, in.offer.pool, t.pool.get()}];
    for (size_t i = 0; i < in.list.size() && !arrived.empty(); ++i) {
        const StoredBlock& b = in.list[i];
        if (b.tokens != uint32_t(kPageTokens)) continue;
        const auto found = arrived.find(b.content_id);
        if (found == arrived.end() || found->second.index != b.index) continue;
        BlockPtr block = found->second.block.lock();
        if (!block || block->dropped() || block->stuck() || block->kind() != PageKind(b.kind) || block->tenant() != in.tenant)
            continue;
        in.blocks[i] = std::move(block);
        ++shared;
    }
    const std::lock_guard lock(mutex_);
    t.progress.blocks_shared += shared;
}

// If no blocks are left, makes the sequence.
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

// Names memory for the next blocks; false: there are none left.
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
        Result<Pull> room = take_room(t, w.positions);
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
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return false;
    w.number = uint64_t(group_.settings().rank + 1) << 40 | ++windows_;
    const PayloadWriter ready = PayloadWriter()
                                    .put(ReadyHeader{w.number, w.on_gpu, w.positions.size()})
                                    .put_all(std::span<const uint64_t>(w.positions));
    in.windows.push_back(std::move(w));
    group_.transport().open_window(in.windows.back().number, t.progress.peer,
                                   WindowMemory(std::move(parts), in.windows.back().on_gpu));
    touch(t);
    group_.send(t.progress.peer, MessageType::kReady, t.channel, ready.bytes());
    return true;
}

// The oldest one.
Status Transfers::take_in_window(Transfer& t) {
    Incoming& in = *t.in;
    const Incoming::Window& w = in.windows.front();
    group_.transport().close_window(w.number);
    TA_RETURN_IF_ERROR(w.on_gpu ? take_in_gpu_window(t) : take_in_host_window(t));
    Incoming::Window over{};  // its blocks go without the lock
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
        if (w.said[n] == kElsewhere) continue;
        const StoredBlock& b = t.in->list[size_t(w.positions[n])];
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
        Result<BlockPtr> block = pool.residency().new_block(kind, in.mine);
        if (!block.ok()) return std::move(block).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
        if (in.tenant != 0) block.value()->set_tenant(in.tenant);
        TA_RETURN_IF_ERROR(fill_block(pool, *block.value(), b, bytes));
        in.blocks[size_t(w.positions[n])] = block.value();
        in.others_see.add({block.take(), b.index});
        const std::lock_guard lock(mutex_);
        ++t.progress.blocks_moved;
        t.progress.bytes_moved += bytes.size();
        touch(t);
    }
    return {};
}

void Transfers::remember_arrived(const Transfer& t) {
    const Incoming& in = *t.in;
    ArrivedBlocks& arrived = arrived_[{t.progress.peer, in.offer.pool, t.pool.get()}];
    for (size_t i = 0; i < in.list.size(); ++i) {
        if (in.list[i].tokens == uint32_t(kPageTokens)) arrived[in.list[i].content_id] = {in.list[i].index, in.blocks[i]};
    }
    size_t all = 0;
    for (const auto& [origin, blocks] : arrived_) all += blocks.size();
    if (all <= prune_arrived_at_) return;
    all = 0;
    for (auto& [origin, blocks] : arrived_) {
        std::erase_if(blocks, [](const auto& entry) { return entry.second.block.expired(); });
        all += blocks.size();
    }
    std::erase_if(arrived_, [](const auto& entry) { return entry.second.empty(); });
    prune_arrived_at_ = 2 * all + 1024;
}

Status Transfers::land(Transfer& t) {
    {
        const std::lock_guard lock(mutex_);
        if (t.phase != Phase::kMoving) return {};
        t.phase = Phase::kLanding;
    }
    Incoming& in = *t.in;
    remember_arrived(t);
    Pool::Snapshot s;
    s.length = in.offer.length;
    s.blocks = in.blocks;
    s.tenant = in.tenant;
    Result<ta_seq> seq = t.pool->adopt(std::move(s));
    if (!seq.ok()) return std::move(seq).status().rank(int32_t(group_.settings().rank));
    in.spaces.keep();
    const std::lock_guard lock(mutex_);
    t.progress.seq = seq.value();
    tell(t.progress.peer, MessageType::kArrived, t.channel);
    conclude(t, {});
    return {};
}

}  // namespace ta::share
