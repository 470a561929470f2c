// The work of the source's lane for a transfer.
#include <utility>

#include "kernels/format/hash.h"
#include "src/kv/share/transfer.h"

namespace ta::share {
namespace {

Status lost_bits(const StoredBlock& b) {
    return fail(TA_E_BUSY, "the block lost bits on its way to a slower tier while it was sent").block(int64_t(b.index));
}

// Calls f(bytes, address) for each of the offered blocks at `positions`, all seen at one moment. `address`: nullptr unless the
// block is full and in the device's memory.
template <class F>
Status find_on_device(const BlockStore& store, const Geometry& geometry, const Sequences::Snapshot& snapshot,
                      std::span<const StoredBlock> list, std::span<const uint64_t> positions, F&& f) {
    std::vector<const Block*> blocks;
    blocks.reserve(positions.size());
    for (const uint64_t position : positions) blocks.push_back(snapshot.blocks[size_t(position)].get());
    Status s;
    store.visit_places(blocks, [&](size_t i, const Place& at) {
        const StoredBlock& b = list[size_t(positions[i])];
        if (at.kind != PageKind(b.kind) && s.ok()) s = lost_bits(b);
        const bool here = at.tier == TierKind::kDevice && blocks[i]->full();
        f(geometry.slot_bytes(at.kind), here ? at.address : nullptr);
    });
    return s;
}

}  // namespace

OfferHeader offer_of(const Pool& pool) {
    OfferHeader offer{};
    offer.fingerprint = pool.fingerprint();
    offer.pool = pool.serial();
    for (int kind = 0; kind < kPageKinds; ++kind) offer.slot_bytes[kind] = pool.geometry().slot_bytes(PageKind(kind));
    return offer;
}

// Writes the oldest window that was asked for.
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
        const StoredBlock& b = out.list[size_t(positions[n])];
        ++t.progress.blocks_moved;
        t.progress.bytes_moved += t.pool->geometry().slot_bytes(PageKind(b.kind));
        out.sent_open |= b.tokens < uint32_t(kPageTokens);
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
        const std::lock_guard lock(mutex_);
        works(t);
    }
    return {};
}

// Writes blocks that are in the GPU's memory into a window on the peer's GPU. `where`: 0 for such a block, kElsewhere for the
// others.
Status Transfers::write_gpu_window(Transfer& t, uint64_t window, std::span<const uint64_t> positions,
                                   std::vector<uint64_t>& where) {
    const Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    Device* const device = pool.context().device();
    const bool may = device && group_.transport().may_write_gpu(t.progress.peer);
    const ReadingBlocks reading(pool.blocks());
    if (may) TA_RETURN_IF_ERROR(device->wait_for_steps());  // for steps that write these blocks
    std::vector<RemoteCopy> copies;
    uint64_t to = 0;
    TA_RETURN_IF_ERROR(find_on_device(pool.blocks(), pool.geometry(), out.snapshot, out.list, positions,
                                      [&](uint64_t bytes, const uint8_t* address) {
                                          if (may && address) copies.push_back({to, address, bytes});
                                          where.push_back(may && address ? 0 : kElsewhere);
                                          to += bytes;
                                      }));
    return copies.empty() ? Status() : group_.transport().write(t.progress.peer, window, copies, true);
}

// Lets the destination read blocks where they lie in device memory. They stay there until the transfer ends.
Status Transfers::lease(Transfer& t) {
    Outgoing& out = *t.out;
    Pool& pool = *t.pool;
    TA_RETURN_IF_ERROR(pool.check_open());
    Device* const device = pool.context().device();
    LeasedHeader leased{};
    const uint8_t* memory = nullptr;
    if (device) {
        const DeviceRange range = pool.blocks().device_memory();
        memory = range.memory;
        Result<Transport::Shared> shared =
            group_.transport().share_memory(std::shared_ptr<uint8_t>(t.pool, range.memory), range.bytes);
        // If other processes cannot map the memory, all blocks go through windows.
        if (shared.ok()) {
            out.memory = shared.take();
            leased = {out.memory.name, range.bytes, 0};
        }
    }
    std::vector<uint64_t> offsets;
    offsets.reserve(out.leased_positions.size());
    uint64_t moved = 0, bytes = 0;
    out.reading.emplace(pool.blocks());
    if (device) TA_RETURN_IF_ERROR(device->wait_for_steps());  // for steps that write these blocks
    TA_RETURN_IF_ERROR(find_on_device(pool.blocks(), pool.geometry(), out.snapshot, out.list, out.leased_positions,
                                      [&](uint64_t slot_bytes, const uint8_t* address) {
                                          const bool there = leased.bytes > 0 && address;
                                          offsets.push_back(there ? uint64_t(address - memory) : kElsewhere);
                                          moved += there;
                                          bytes += there ? slot_bytes : 0;
                                      }));
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
