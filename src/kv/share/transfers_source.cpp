// What the lane of the source does for a transfer.
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {

OfferHeader offer_of(const Pool& pool) {
    OfferHeader offer{};
    offer.fingerprint = pool.fingerprint();
    offer.pool = pool.serial();
    for (int kind = 0; kind < kPageKinds; ++kind) offer.slot_bytes[kind] = pool.geometry().slot_bytes(PageKind(kind));
    return offer;
}

Status Transfers::write_window(Transfer& t) {
    Outgoing& out = *t.out;
    const Pool& pool = *t.pool;
    std::vector<uint64_t> hashes;
    std::vector<uint8_t> slot;
    uint64_t to = out.ready.address, bytes = 0;  // nobody else looks at these two while `writing`
    for (const uint64_t position : out.positions) {
        if (t.phase != Phase::kMoving) return {};
        TA_RETURN_IF_ERROR(pool.check_open());
        const StoredBlock& b = out.list[size_t(position)];
        Result<PageKind> kind = copy_slot(*t.pool, *out.snapshot.blocks[size_t(position)], b.index, b.tokens, slot);
        if (!kind.ok()) return std::move(kind).status().block(int64_t(b.index)).rank(int32_t(group_.settings().rank));
        if (kind.value() != PageKind(b.kind)) {
            return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
        }
        hashes.push_back(hash_bytes(slot.data(), slot.size()));
        const RemoteCopy copy{to, slot.data(), slot.size()};
        TA_RETURN_IF_ERROR(group_.transport().write(t.progress.peer, out.ready.window, {&copy, 1}));
        to += slot.size();
        bytes += slot.size();
    }
    const std::lock_guard lock(mutex_);
    if (t.phase != Phase::kMoving) return {};
    t.progress.blocks_moved += out.positions.size();
    t.progress.bytes_moved += bytes;
    touch(t);
    out.writing = false;
    const SentHeader sent{out.ready.window, hashes.size()};
    group_.send(t.progress.peer, MessageType::kSent, t.channel,
                PayloadWriter().put(sent).put_all(std::span<const uint64_t>(hashes)).bytes());
    return {};
}

// What lies in the device's memory is read there by the destination. The blocks stay where they are until the lease ends.
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
        if (at.kind != PageKind(b.kind)) {
            return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
        }
        const bool there = leased.bytes > 0 && at.tier == TierKind::kDevice && block.sealed();
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
