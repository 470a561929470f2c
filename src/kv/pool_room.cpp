// Room for tokens to come: what sequences are promised, and whether steps would find some.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "src/kv/blocks_to_come.h"
#include "src/kv/pool.h"
#include "tiering/room/candidates.h"
#include "tiering/room/step_room.h"

namespace ta {

// True if the next step writes new tokens into the last block as it is.
bool Pool::may_write_last(const Sequence& s) const {
    if (s.blocks.empty() || (numerics_.universal_open_scale && !s.scales_known)) return false;
    const BlockPtr& last = s.blocks.back();
    const long owners = s.in_plan ? 2 : 1;  // an open plan holds it, too
    return last->kind() == PageKind::kToken && !last->sealed() && last.use_count() <= owners;
}

void Pool::keep_promise(Sequence& s, int64_t came, const SlotCounts& freed) {
    if (s.promised_tokens == 0) return;
    s.promised_tokens = std::max<int64_t>(0, s.promised_tokens - came);
    blocks().settle(s.promise, least_of(slots_to_promise(pages_, s.length, s.promised_tokens), sum_of(s.promise, freed)));
    if (s.promised_tokens == 0) blocks().room_signal().notify();  // its blocks may leave
}

// Under the lock.
void Pool::end_promise(Sequence& s) {
    s.promised_tokens = 0;
    blocks().settle(s.promise, {});
    blocks().room_signal().notify();  // its blocks may leave
}

// An idle sequence, held as a plan would.
class Pool::Hold {
  public:
    Hold(Pool& pool, ta_seq seq) : pool_(pool) {
        held_.reserve(1);
        std::lock_guard lock(pool.mutex_);
        Result<Sequence*> found = pool.find_idle(seq);
        if (!found.ok()) {
            status_ = std::move(found).status();
            return;
        }
        found.value()->in_plan = true;
        held_.push_back(found.value());
        pool.residency_.ledger().enter_plans(1);
    }
    ~Hold() {
        if (!held_.empty()) pool_.unlock_for_plan(held_);
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    Status status() const { return status_.clone(); }
    Sequence& sequence() const { return *held_[0]; }

  private:
    Pool& pool_;
    Status status_;
    std::vector<Sequence*> held_;
};

Status Pool::reserve(ta_seq seq, int64_t tokens, Patience patience) {
    if (tokens < 0) return fail(TA_E_INVALID, "tokens is %lld", (long long)tokens).argument(2);
    if (tokens == 0) {  // what gives back needs no memory
        std::lock_guard lock(mutex_);
        Result<Sequence*> found = find_idle(seq);
        if (!found.ok()) return std::move(found).status();
        end_promise(*found.value());
        return {};
    }
    const Hold hold(*this, seq);
    TA_RETURN_IF_ERROR(hold.status());
    Sequence& s = hold.sequence();
    if (tokens > kMaxTokens - s.length) {
        return fail(TA_E_LIMIT, "the sequence has %lld tokens; with %lld more it would have more than 2^40",
                    (long long)s.length, (long long)tokens)
            .argument(2);
    }
    const SlotCounts to = slots_to_promise(pages_, s.length, tokens);
    const int64_t before = s.promised_tokens;
    std::vector<PageKind> wanted;
    const uint64_t bytes = blocks().bytes_of(to);
    if (const uint64_t budget = blocks().budget(); bytes > budget) {
        return fail(TA_E_TIER_FULL, "the device tier has a budget of %llu bytes; %lld more tokens need %llu",
                    (unsigned long long)budget, (long long)tokens, (unsigned long long)bytes)
            .tier(TA_TIER_DEVICE)
            .bytes(bytes - budget);
    }
    for (size_t kind = 0; kind < to.size(); ++kind)
        wanted.insert(wanted.end(), to[kind] - std::min(to[kind], s.promise[kind]), PageKind(kind));
    Resident* const resident[] = {&s};
    const uint64_t failed = residency_.failed_evictions();
    const SlotCounts held = s.promise;
    // Until it is known how the call ends the sequence has what it had, too.
    SlotCounts both;
    for (size_t kind = 0; kind < to.size(); ++kind) both[kind] = std::max(held[kind], to[kind]);
    const auto promise = [&]() -> Status {
        SlotCounts mine = s.promise;
        TA_RETURN_IF_ERROR(blocks().promise(mine, both));
        std::lock_guard lock(mutex_);
        s.promise = mine;
        s.promised_tokens = tokens;
        return {};
    };
    // A block may be on its way to the disk when the promise is made, which keeps others from following it.
    const auto is_leaving = [](const BlockPtr& b) { return b->moving() || b->tier() == TierKind::kDisk; };
    const RoomSignal& room = blocks().room_signal();
    const Deadline until = room.now() + patience.moves;
    Status found;
    for (bool again = true; again;) {
        RoomSignal::Watch watch(room);
        std::optional<uint64_t> reading;
        found = find_room_for_step(residency_, resident, wanted, patience, promise, reading);
        if (reading) blocks().stop_reading(*reading);
        if (!found.ok()) break;
        residency_.stop_keeping_room();
        wanted.clear();
        // A block that still leaves after that is promoted by the begin that needs it.
        again = std::any_of(s.blocks.begin(), s.blocks.end(), is_leaving) && watch.wait(until);
    }
    std::lock_guard lock(mutex_);
    if (found.ok() && s.released) found = fail(TA_E_STALE, "the sequence was released").argument(1);
    if (!found.ok()) s.promised_tokens = before;
    blocks().settle(s.promise, found.ok() ? to : held);
    return found.code() == TA_E_TIER_FULL ? residency_.with_cause(std::move(found), failed) : std::move(found);
}

Result<uint64_t> Pool::suspend(ta_seq seq, TierKind to) {
    if (to == TierKind::kDevice) return fail(TA_E_INVALID, "tier is the device: it takes one below it").argument(2);
    if (!residency_.tier(to)) return fail(TA_E_UNSUPPORTED, "the pool has no %s tier", name_of(to)).argument(2);
    const Hold hold(*this, seq);
    TA_RETURN_IF_ERROR(hold.status());
    Sequence& s = hold.sequence();
    std::vector<MoveRequest> requests;
    requests.reserve(s.blocks.size());
    {
        std::lock_guard lock(mutex_);
        const std::unordered_set<const Block*> stay = shared_and_readable(*this, &s);
        const SharedOpenBlocks shared(*this, &s);
        for (uint64_t b = 0; b < s.blocks.size(); ++b) {
            const BlockPtr& block = s.blocks[size_t(b)];
            const bool leaves = !block->dropped() && !stay.contains(block.get()) && block->has_pages();
            if (leaves && !block->sealed() && block.use_count() == shared.owners(*block)) {
                if (Status sealed = residency_.suspend_block(*block, b); !sealed.ok())
                    return std::move(sealed).block(int64_t(b));
            }
            requests.push_back(leaves && block->sealed() ? MoveRequest(block, b) : MoveRequest(b));
        }
    }
    Result<uint64_t> ticket = mover()->submit(std::move(requests), to, MoveReason::kAsked);
    if (ticket.ok()) {
        std::lock_guard lock(mutex_);
        end_promise(s);
    }
    return ticket;
}

Result<ta_fit> Pool::fit(std::span<const ta_seq> seqs, const int32_t* n_new) const {
    std::vector<const Resident*> mine;
    std::vector<Residency::Demand> demands;
    std::unordered_set<const Resident*> seen;
    std::unique_lock lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    ta_fit r{};
    for (size_t i = 0; i < seqs.size(); ++i) {
        const int64_t n = n_new ? n_new[i] : 0;
        if (n < 0) return fail(TA_E_INVALID, "n_new[%zu] is %lld", i, (long long)n).argument(3).sequence(int64_t(i));
        SlotCounts slots;
        if (seqs[i] == 0) {
            slots = slots_of_step(pages_, 0, n, false, {});
        } else {
            Result<Sequence*> found = find(seqs[i]);
            if (!found.ok()) return std::move(found).status().argument(2).sequence(int64_t(i));
            const Sequence& s = *found.value();
            if (!seen.insert(&s).second)
                return fail(TA_E_INVALID, "the sequence stands twice in the list").argument(2).sequence(int64_t(i));
            if (n > kMaxTokens - s.length) {
                return fail(TA_E_LIMIT, "the sequence would have %lld tokens; the limit is 2^40", (long long)(s.length + n))
                    .sequence(int64_t(i));
            }
            mine.push_back(&s);
            slots = slots_of_step(pages_, s.length, n, may_write_last(s), s.blocks);
            for (size_t kind = 0; kind < slots.size(); ++kind) slots[kind] -= std::min(slots[kind], s.promise[kind]);
        }
        const uint64_t bytes = blocks().bytes_of(slots);
        r.bytes_new = checked_add(r.bytes_new, bytes).value_or(UINT64_MAX);
        demands.push_back({bytes, mine.size()});
    }
    residency_.fit(demands, mine, r);
    return r;
}

uint64_t Pool::reclaimable_bytes() const {
    std::lock_guard lock(mutex_);
    return residency_.reclaimable_bytes();
}

}  // namespace ta
