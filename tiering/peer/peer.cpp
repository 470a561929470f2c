#include "tiering/peer/peer.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "kernels/format/slot.h"
#include "src/core/checked.h"

namespace ta {
namespace {

// Checks that the pool's device can read and write the memory of the other one.
Status check_reach(const Context& own, const Context& peer) {
    Device *const device = own.device(), *const other = peer.device();
    if (&own == &peer) return fail(TA_E_INVALID, "options.tiers.peer is the pool's own context");
    if (!device != !other) {
        return fail(TA_E_INVALID, "options.tiers.peer is a context of a %s, the pool's of a %s", other ? "GPU" : "CPU",
                    device ? "GPU" : "CPU");
    }
    if (!device) return {};
    if (device->ordinal() == other->ordinal())
        return fail(TA_E_INVALID, "options.tiers.peer is of the pool's own GPU %d", device->ordinal());
    const int both[] = {device->ordinal(), other->ordinal()};
    Result<bool> reached = device->reach(both);
    if (!reached.ok()) return std::move(reached).status();
    if (reached.value()) return {};
    return fail(TA_E_UNSUPPORTED, "GPU %d does not reach the memory of GPU %d", both[0], both[1]);
}

}  // namespace

Result<PeerTier::Memory> PeerTier::take(const std::shared_ptr<Context>& context, size_t bytes) {
    Device* const device = context->device();
    if (!device) {
        HostMemoryOptions options;
        options.bytes = bytes;
        Result<std::unique_ptr<HostMemory>> taken = HostMemory::create(system_memory(), context->threads(), options);
        if (!taken.ok()) return std::move(taken).status().tier(TA_TIER_PEER);
        const std::shared_ptr<HostMemory> memory = taken.take();
        return Memory(memory, memory->data());
    }
    uint8_t* const memory = device->allocate(bytes);
    if (memory) return Memory(memory, [device, context, bytes](uint8_t* p) { device->deallocate(p, bytes); });
    return fail(TA_E_MEMORY, "GPU %d has no memory for a peer tier of %zu bytes", device->ordinal(), bytes)
        .tier(TA_TIER_PEER)
        .bytes(bytes);
}

Result<std::unique_ptr<PeerTier>> PeerTier::create(const Context& own, std::shared_ptr<Context> peer,
                                                   const PeerTierOptions& options) {
    TA_RETURN_IF_ERROR(check_reach(own, *peer));
    uint64_t strides[kSlotClasses];
    for (int c = 0; c < kSlotClasses; ++c) strides[c] = round_up(options.slot_bytes[c], kSlotAlignment);
    const SlotMap::Shape shape = SlotMap::fit(options.budget, strides);
    if (!shape.valid() || shape.regions == 0) {
        return fail(TA_E_INVALID, "a peer tier of %llu bytes does not hold one block of %zu bytes",
                    (unsigned long long)options.budget, std::ranges::max(options.slot_bytes));
    }
    Result<Memory> memory = take(peer, shape.bytes());
    if (!memory.ok()) return std::move(memory).status();
    return std::unique_ptr<PeerTier>(new PeerTier(std::move(peer), options.budget, shape, memory.take()));
}

Result<std::vector<Slot>> PeerTier::acquire(std::span<const uint8_t> wanted) {
    if (const TierHealth now = health(); now.state != TierState::kOk)
        return fail(TA_E_TIER_FULL, "the peer tier does not answer: %s", now.reason).tier(TA_TIER_PEER);
    return MemoryTier::acquire(wanted);
}

TierStats PeerTier::stats() const {
    TierStats s = MemoryTier::stats();
    s.taken = range().size();
    return s;
}

TierHealth PeerTier::health() const {
    TierHealth h;
    const Status s = context_->device() ? context_->device()->health() : Status();
    if (s.ok()) return h;
    h.state = TierState::kFailed;
    std::snprintf(h.reason, sizeof h.reason, "%.191s", s.detail() ? s.detail()->message : "its device is lost");
    return h;
}

}  // namespace ta
