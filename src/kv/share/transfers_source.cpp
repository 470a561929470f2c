// The work of the source's lane for a transfer.
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

Status lost_bits(const StoredBlock& b) {
    return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
}

}  // namespace

OfferHeader offer_of(const Pool& pool) {
    OfferHeader offer{};
    offer.fingerprint = pool.fingerprint();
    offer.pool = pool.serial();
    for (int kind = 0; kind < kPageKinds; ++kind) offer.slot_bytes[kind] = pool.geometry().slot_bytes(PageKind(kind));
    return offer;
}

// The oldest of those that are asked for.
Status Transfers::write_window(Transfer& t) {
    Outgoing& out = *t.out;
    TA_RETURN_IF_ERROR(t.pool->check_open());
    uint64_t window;
    bool on_gpu;
    std::vector<uint64_t> positions, said;
    {
        const std::lock_guard lock(mutex_);
        const Outgoing::Asked& asked = out.asked.front();
        window = asked.window, on_gpu = asked.on_gpu, positions = asked.positions;
    }
    TA_RETURN_IF_ERROR(on_gpu ? write_gpu_window(t, window, positions, said) : write_host_window(t, window, positions, said));
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    for (size_t n = 0; n < said.size(); ++n) {
        if (on_gpu && said[n] == kElsewhere) continue;
        ++t.progress.blocks_moved;
        t.progress.bytes_moved += t.pool->geometry().slot_bytes(PageKind(out.list[size_t(positions[n])].kind));
    }
    touch(t);
    out.asked.pop_front();
    group_.send(t.progress.peer, MessageType::kSent, t.channel,
                PayloadWriter().put(SentHeader{window, said.size()}).put_all(std::span<const uint64_t>(said)).bytes());
    return {};
}

Status Transfers::write_host_window(Transfer& t, uint64_t window, std::span<const uint64_t> positions,
                                    std::vector<uint64_t>& hashes) {
    const Outgoing& out = *t.out;
    const Pool& pool = *t.pool;
    std::vector<uint8_t> slot;
    uint64_t to = 0;
    for (const uint64_t position : positions) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(pool.check_open());
        const StoredBlock& b = out.list[size_t(position)];
        Result<PageKind> kind = copy_slot(*t.pool, *out.snapshot.blocks[size_t(position)], b.index, b.tokens, slot);
        if (!kind.ok()) return std::move(kind).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
        if (kind.value() != PageKind(b.kind)) return lost_bits(b);
        hashes.push_back(hash_bytes(slot.data(), slot.size()));
        const RemoteCopy copy{to, slot.data(), slot.size()};
        TA_RETURN_IF_ERROR(group_.transport().write(t.progress.peer, window, {&copy, 1}));
        to += slot.size();
    }
    return {};
}

// Blocks in the GPU's memory are written from there. `where`: 0 for such a block, kElsewhere for the others.
Status Transfers::write_gpu_window(Transfer& t, uint64_t window, std::span<const uint64_t> positions,
                                   std::vector<uint64_t>& where) {
    const Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    Device* const device = pool.context().device();
    const bool may = device && group_.transport().may_write_gpu(t.progress.peer);
    const ReadingBlocks reading(pool.blocks());
    if (may) TA_RETURN_IF_ERROR(device->wait_for_steps());  // which write them
    std::vector<RemoteCopy> copies;
    uint64_t to = 0;
    for (const uint64_t position : positions) {
        const StoredBlock& b = out.list[size_t(position)];
        const Block& block = *out.snapshot.blocks[size_t(position)];
        const Place at = pool.blocks().place_of(block);
        if (at.kind != PageKind(b.kind)) return lost_bits(b);
        const uint64_t bytes = pool.geometry().slot_bytes(at.kind);
        const bool here = may && at.tier == TierKind::kDevice && block.full();
        if (here) copies.push_back({to, at.address, bytes});
        where.push_back(here ? 0 : kElsewhere);
        to += bytes;
    }
    return copies.empty() ? Status() : group_.transport().write(t.progress.peer, window, copies, true);
}

// Lets the destination read blocks where they lie in the device's memory. They stay there until the lease ends.
Status Transfers::lease(Transfer& t) {
    Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    TA_RETURN_IF_ERROR(pool.check_open());
    Device* const device = pool.context().device();
    LeasedHeader leased{};
    if (device) {
        const DeviceRange memory = pool.blocks().device_memory();
        Result<Transport::Shared> shared = group_.transport().share_memory(std::shared_ptr<uint8_t>(t.pool, memory.memory));
        // Memory that other processes cannot map: all goes by windows.
        if (shared.ok()) {
            out.memory = shared.take();
            leased = {out.memory.name, memory.bytes, 0};
        }
    }
    std::vector<uint64_t> offsets;
    uint64_t moved = 0, bytes = 0;
    out.reading.emplace(pool.blocks());
    if (device) TA_RETURN_IF_ERROR(device->wait_for_steps());  // which write them
    for (const uint64_t position : out.leased_positions) {
        const StoredBlock& b = out.list[size_t(position)];
        const Block& block = *out.snapshot.blocks[size_t(position)];
        const Place at = pool.blocks().place_of(block);
        if (at.kind != PageKind(b.kind)) return lost_bits(b);
        const bool there = leased.bytes > 0 && at.tier == TierKind::kDevice && block.full();
        offsets.push_back(there ? uint64_t(at.address - pool.blocks().device_memory().memory) : kElsewhere);
        moved += there;
        bytes += there ? pool.geometry().slot_bytes(at.kind) : 0;
    }
    leased.blocks = offsets.size();
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.blocks_moved += moved;
    t.progress.bytes_moved += bytes;
    touch(t);
    group_.send(t.progress.peer, MessageType::kLeased, t.channel,
                PayloadWriter().put(leased).put_all(std::span<const uint64_t>(offsets)).bytes());
    return {};
}

}  // namespace ta::share
