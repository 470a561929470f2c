#include "src/tiering/host.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "kernels/format/slot.h"

namespace ta {
namespace {

constexpr uint64_t kHugePage = 2 << 20;

// What the index of a region takes, about: its entry in the map and its slots.
constexpr uint64_t kIndexOfRegion = 16 + SlotMap::kIndicesPerRegion * 8;

SlotMap::Shape shape_for(const HostTierOptions& o) {
    uint64_t strides[kSlotClasses];
    for (int c = 0; c < kSlotClasses; ++c)
        strides[c] = (o.slot_bytes[c] + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    SlotMap::Shape shape = SlotMap::fit(o.budget, strides);
    const uint64_t index = shape.regions * kIndexOfRegion;
    uint64_t rest = o.budget - std::min(o.budget, index);
    if (o.memory.pages == HostMemoryOptions::Pages::kHugeTlb) rest = rest / kHugePage * kHugePage;
    return SlotMap::fit(rest, strides);
}

}  // namespace

Result<std::unique_ptr<HostTier>> HostTier::create(std::shared_ptr<MemorySystem> system, ThreadPool& touching,
                                                   const HostTierOptions& options) {
    const SlotMap::Shape shape = shape_for(options);
    if (!shape.valid() || shape.regions == 0) {
        return fail(TA_E_INVALID, "a host tier of %llu bytes does not hold one block of %zu bytes and its index",
                    (unsigned long long)options.budget, std::ranges::max(options.slot_bytes));
    }
    HostMemoryOptions memory_options = options.memory;
    memory_options.bytes = shape.bytes();
    // No slot crosses from one registered chunk to the next: CUDA refuses a copy that does.
    const uint64_t regions = std::max<uint64_t>(memory_options.chunk_bytes / shape.region_bytes, 1);
    memory_options.chunk_bytes = regions * shape.region_bytes;
    Result<std::unique_ptr<HostMemory>> memory = HostMemory::create(std::move(system), touching, memory_options);
    if (!memory.ok()) return std::move(memory).status();
    std::unique_ptr<HostTier> tier(new HostTier(options, shape, memory.take()));
    TA_RETURN_IF_ERROR(tier->start());
    return tier;
}

HostTier::HostTier(const HostTierOptions& options, const SlotMap::Shape& shape, std::unique_ptr<HostMemory> memory)
    : options_(options), memory_(std::move(memory)), map_(shape), slots_(shape.indices()) {}

Status HostTier::start() {
    const unsigned threads = std::max(1u, options_.threads);
    try {
        workers_.reserve(threads);
        for (unsigned i = 0; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
        return fail(TA_E_LIMIT, "the threads of the host tier could not be started");
    }
    return {};
}

HostTier::~HostTier() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        cancelled_.splice(cancelled_.end(), queued_);
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
}

Result<std::vector<Slot>> HostTier::acquire(std::span<const uint8_t> wanted) {
    std::vector<Slot> slots;
    slots.reserve(wanted.size());
    std::lock_guard lock(mutex_);
    for (const uint8_t slot_class : wanted) {
        Slot slot;
        if (slot_class < kSlotClasses && map_.acquire(slot_class, slot)) {
            slots.push_back(slot);
            continue;
        }
        for (const Slot s : slots) map_.give(s);
        if (slot_bytes(slot_class) == 0) return fail(TA_E_INVALID, "the host tier has no slots of class %u", slot_class);
        TierStats now;
        map_.describe(now);
        return fail(TA_E_TIER_FULL, "the host tier has no room for %zu more blocks: %llu of %llu bytes are in use",
                    wanted.size(), (unsigned long long)now.used, (unsigned long long)map_.shape().bytes());
    }
    for (const Slot s : slots) slots_[s.index] = {0, s.slot_class, true};
    return slots;
}

void HostTier::release(std::span<const Slot> slots) {
    std::lock_guard lock(mutex_);
    for (const Slot s : slots) {
        if (!map_.taken(s) || !slots_[s.index].acquired) continue;
        slots_[s.index].acquired = false;
        if (slots_[s.index].busy == 0) map_.give(s);
    }
}

void HostTier::leave_slot(uint32_t index) {
    SlotInfo& slot = slots_[index];
    if (--slot.busy == 0 && !slot.acquired) map_.give({index, slot.slot_class});
}

Result<TierBatch> HostTier::submit(std::span<const TierRequest> requests, TierClient& client) {
    Ops ops;
    for (const TierRequest& r : requests) ops.push_back({r, &client, 0});
    std::lock_guard lock(mutex_);
    for (Op& op : ops) {
        op.batch = next_batch_;
        TA_RETURN_IF_ERROR(admit(op.request));
    }
    for (const Op& op : ops) ++slots_[op.request.slot.index].busy;
    queued_.splice(queued_.end(), ops);
    wake_.notify_all();
    return next_batch_++;
}

Status HostTier::admit(const TierRequest& r) {
    if (!map_.taken(r.slot) || !slots_[r.slot.index].acquired)
        return fail(TA_E_STATE, "slot %u of the host tier is not acquired", r.slot.index);
    const size_t bytes = slot_bytes(r.slot.slot_class);
    if (r.memory && r.bytes > 0 && r.offset <= bytes && r.bytes <= bytes - r.offset) return {};
    return fail(TA_E_INVALID, "a request for bytes %llu ... of a slot of %zu", (unsigned long long)r.offset, bytes);
}

void HostTier::cancel(TierBatch batch) {
    {
        std::lock_guard lock(mutex_);
        for (auto op = queued_.begin(); op != queued_.end();) {
            const auto next = std::next(op);
            if (op->batch == batch) cancelled_.splice(cancelled_.end(), queued_, op);
            op = next;
        }
    }
    wake_.notify_all();
}

void HostTier::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return stopping_ || !queued_.empty() || !cancelled_.empty(); });
        const bool cancelled = !cancelled_.empty();
        Ops& from = cancelled ? cancelled_ : queued_;
        if (from.empty()) return;
        Ops one;
        one.splice(one.end(), from, from.begin());
        const Op& op = one.front();
        const TierRequest& r = op.request;
        TierCompletion completion{r.tag, cancelled, {}};
        ++in_flight_;
        lock.unlock();
        completion.status = cancelled ? fail(TA_E_IO, "cancelled") : copy(r);
        lock.lock();
        --in_flight_;
        leave_slot(r.slot.index);
        const bool read = r.kind == TierRequest::Kind::kRead;
        if (cancelled) {
            ++counters_.cancelled;
        } else if (!completion.status.ok()) {
            ++counters_.corrupt;
        } else {
            ++(read ? counters_.reads : counters_.writes);
            (read ? counters_.bytes_read : counters_.bytes_written) += r.bytes;
        }
        lock.unlock();
        op.client->on_done(std::move(completion));
        lock.lock();
    }
}

// What is read is checked where it lies, so that nothing wrong is seen by the client; what is written once it has arrived.
Status HostTier::copy(const TierRequest& r) {
    uint8_t* slot = address(r.slot);
    const bool check = options_.check && r.bytes == slot_bytes(r.slot.slot_class);
    if (r.kind == TierRequest::Kind::kWrite) {
        std::memcpy(slot + r.offset, r.memory, r.bytes);
        return check ? options_.check(r.identity, r.slot.slot_class, slot) : Status();
    }
    if (check) TA_RETURN_IF_ERROR(options_.check(r.identity, r.slot.slot_class, slot));
    std::memcpy(r.memory, slot + r.offset, r.bytes);
    return {};
}

TierStats HostTier::stats() const {
    std::lock_guard lock(mutex_);
    TierStats s = counters_;
    map_.describe(s);
    s.budget = options_.budget;
    s.memory = map_.index_bytes() + slots_.capacity() * sizeof(SlotInfo);
    s.taken = memory_->bytes() + s.memory;
    s.queued = queued_.size();
    s.in_flight = in_flight_;
    return s;
}

}  // namespace ta
