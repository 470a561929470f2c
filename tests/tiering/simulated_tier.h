// A tier that does nothing until it is told to: requests complete late and in any order, and the bytes move only then, as with
// a copy engine. Whoever reuses memory or a slot too early gets wrong bytes.
#pragma once

#include <algorithm>
#include <cstring>
#include <list>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "src/tiering/slot_map.h"
#include "src/tiering/tier.h"

namespace ta::testing {

class SimulatedTier final : public Tier {
  public:
    SimulatedTier(TierKind kind, uint64_t bytes, const size_t (&slot_bytes)[kSlotClasses], uint64_t seed)
        : kind_(kind), map_(SlotMap::fit(bytes, {round(slot_bytes[0]), round(slot_bytes[1])})), random_(seed) {
        std::copy(std::begin(slot_bytes), std::end(slot_bytes), slot_bytes_);
        memory_.assign(map_.shape().bytes(), 0xdb);
        busy_.resize(map_.shape().indices());
        released_.resize(map_.shape().indices());
    }
    ~SimulatedTier() override {
        for (Op& op : pending_) op.cancelled = true;
        while (step()) {
        }
    }

    // Lets one pending request, any of them, complete with this status, or as its own turn of events has it. False when there
    // is none.
    bool step(Status status = {}) {
        std::list<Op> one;
        {
            std::lock_guard lock(mutex_);
            if (pending_.empty()) return false;
            auto pick = pending_.begin();
            std::advance(pick, long(random_() % pending_.size()));
            one.splice(one.end(), pending_, pick);
        }
        Op& op = one.front();
        TierCompletion c{op.request.tag, op.cancelled, {}};
        if (op.cancelled) {
            c.status = fail(TA_E_IO, "cancelled");
        } else if (!status.ok()) {
            c.status = std::move(status);
        } else {
            uint8_t* slot = data(op.request.slot) + op.request.offset;
            const bool read = op.request.kind == TierRequest::Kind::kRead;
            std::memcpy(read ? op.request.memory : slot, read ? slot : op.request.memory, op.request.bytes);
        }
        {
            std::lock_guard lock(mutex_);
            const uint32_t i = op.request.slot.index;
            if (--busy_[i] == 0 && released_[i]) give(op.request.slot);
        }
        op.client->on_done(std::move(c));
        return true;
    }
    size_t pending() const {
        std::lock_guard lock(mutex_);
        return pending_.size();
    }

    TierKind kind() const override { return kind_; }
    size_t slot_bytes(uint8_t slot_class) const override { return slot_class < kSlotClasses ? slot_bytes_[slot_class] : 0; }
    Result<std::vector<Slot>> acquire(std::span<const uint8_t> wanted) override {
        std::lock_guard lock(mutex_);
        std::vector<Slot> slots;
        for (const uint8_t slot_class : wanted) {
            Slot s;
            if (slot_class < kSlotClasses && map_.acquire(slot_class, s)) {
                slots.push_back(s);
                continue;
            }
            for (const Slot taken : slots) map_.give(taken);
            return fail(TA_E_TIER_FULL, "the simulated tier is full");
        }
        return slots;
    }
    void release(std::span<const Slot> slots) override {
        std::lock_guard lock(mutex_);
        for (const Slot s : slots) {
            if (busy_[s.index] > 0) {
                released_[s.index] = true;
            } else {
                give(s);
            }
        }
    }
    uint8_t* address(Slot slot) const override { return kind_ == TierKind::kDisk ? nullptr : data(slot); }
    Result<TierBatch> submit(std::span<const TierRequest> requests, TierClient& client) override {
        std::lock_guard lock(mutex_);
        for (const TierRequest& r : requests) {
            if (!map_.taken(r.slot) || released_[r.slot.index]) return fail(TA_E_STATE, "the slot is not acquired");
        }
        for (const TierRequest& r : requests) {
            pending_.push_back({r, &client, next_batch_, false});
            ++busy_[r.slot.index];
        }
        return next_batch_++;
    }
    void cancel(TierBatch batch) override {
        std::lock_guard lock(mutex_);
        for (Op& op : pending_) op.cancelled |= op.batch == batch;
    }
    TierStats stats() const override {
        std::lock_guard lock(mutex_);
        TierStats s;
        map_.describe(s);
        s.budget = s.taken = map_.shape().bytes();
        s.queued = pending_.size();
        return s;
    }
    TierHealth health() const override { return {}; }
    std::span<const std::string> degraded() const override { return {}; }

  private:
    struct Op {
        TierRequest request;
        TierClient* client;
        TierBatch batch;
        bool cancelled;
    };
    static uint64_t round(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
    uint8_t* data(Slot slot) const { return const_cast<uint8_t*>(memory_.data()) + map_.offset(slot); }
    // What is left in a slot must not pass for what comes next.
    void give(Slot slot) {
        released_[slot.index] = false;
        std::memset(data(slot), 0xdb, slot_bytes_[slot.slot_class]);
        map_.give(slot);
    }

    const TierKind kind_;
    size_t slot_bytes_[kSlotClasses];
    SlotMap map_;
    std::vector<uint8_t> memory_;
    std::vector<uint32_t> busy_;
    std::vector<bool> released_;
    mutable std::mutex mutex_;
    std::list<Op> pending_;
    TierBatch next_batch_ = 1;
    std::mt19937_64 random_;
};

}  // namespace ta::testing
