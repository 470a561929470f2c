// Room for tokens to come: promises of sequences, and whether steps would find room.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "src/kv/blocks_to_come.h"
#include "src/kv/sequences.h"
#include "tiering/room/candidates.h"
#include "tiering/room/step_room.h"

namespace ta {

// True if the next step writes new tokens into the last block as it is.
bool Sequences::may_write_last(const Sequence& s) const {
    if (s.blocks.empty() || (numerics_.universal_open_scale && !s.scales_known)) return false;
    const BlockPtr& last = s.blocks.back();
    const long owners = s.in_plan ? 2 : 1;  // an open plan has it, too
    return last->kind() == PageKind::kToken && !last->sealed() && last.use_count() <= owners;
}

void Sequences::keep_promise(Sequence& s, int64_t came, const SlotCounts& freed) {
    if (s.promised_tokens == 0) return;
    if (came >= s.promised_tokens) let_leave(s);
    s.promised_tokens = std::max<int64_t>(0, s.promised_tokens - came);
    blocks().settle(s.promise, least_of(slots_to_promise(pages_, s.length, s.promised_tokens), sum_of(s.promise, freed)));
    if (s.promised_tokens == 0) blocks().room_signal().notify();  // its blocks may leave
}

// Takes the sequence's reservation off its blocks from `first` on, so that moves may take them to the disk. Under the lock, before the
// promise ends or the blocks leave the sequence.
void Sequences::let_leave(const Sequence& s, size_t first) {
    if (s.promised_tokens == 0) return;
    for (size_t b = first; b < s.blocks.size(); ++b) s.blocks[b]->remove_reservation();
}

void Sequences::put_block(Sequence& s, size_t b, BlockPtr& block) {
    const bool promised = s.promised_tokens > 0;
    if (promised) block->add_reservation();  // nothing else knows the block yet, or it stands at `b` already
    if (b >= s.blocks.size()) {
        s.blocks.push_back(std::move(block));
        return;
    }
    if (promised) s.blocks[b]->remove_reservation();
    s.blocks[b].swap(block);
}

// Under the lock.
void Sequences::end_promise(Sequence& s) {
    let_leave(s);
    s.promised_tokens = 0;
    blocks().settle(s.promise, {});
    blocks().room_signal().notify();  // its blocks may leave
}

// Checks that the machine has the memory for a promise's slots beside those that are promised or in use. A begin checks the same of
// its step. On a CPU slots are the machine's memory, unless hooks give them; the lists of slots are in any pool. Before any list grows.
Status Sequences::check_memory(const Sequence& s, const SlotCounts& to, int64_t tokens) const {
    constexpr uint64_t kFewBytes = uint64_t{1} << 30;  // any machine has them; asking takes system calls
    constexpr uint64_t kListed = 32;                   // bytes of a slot in lists
    const bool are_machines = !context_.device() && !context_.allocator().has_hooks();
    uint64_t slots = 0;
    for (const uint64_t n : to) slots += n;  // at most 2^36
    const uint64_t listed = slots * kListed,
                   bytes = are_machines ? checked_add(blocks().bytes_of(to), listed).value_or(UINT64_MAX) : listed;
    if (bytes <= kFewBytes) return {};
    uint64_t taken = 0;
    if (are_machines) {
        const BlockStore::Usage usage = blocks().usage();
        taken = usage.used + usage.promised - blocks().bytes_of(s.promise);
    }
    const uint64_t memory = machine_memory(), left = memory - std::min(memory, taken);
    if (bytes <= left) return {};
    return fail(TA_E_MEMORY,
                "this process can have %llu bytes of memory, of which the pool's blocks and promises take %llu; %lld more "
                "tokens need %llu",
                (unsigned long long)memory, (unsigned long long)taken, (long long)tokens, (unsigned long long)bytes)
        .bytes(bytes - left);
}

// An idle sequence, held as a plan would.
class Sequences::Hold {
  public:
    Hold(Sequences& all, ta_seq seq) : all_(all) {
        held_.reserve(1);
        std::lock_guard lock(all.mutex_);
        Result<Sequence*> found = all.find_idle(seq);
        if (!found.ok()) {
            status_ = std::move(found).status();
            return;
        }
        found.value()->in_plan = true;
        held_.push_back(found.value());
        all.residency_.ledger().enter_plans(1);
    }
    ~Hold() {
        if (!held_.empty()) all_.unlock_for_plan(held_);
    }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;

    Status status() const { return status_.clone(); }
    Sequence& sequence() const { return *held_[0]; }

  private:
    Sequences& all_;
    Status status_;
    std::vector<Sequence*> held_;
};

Status Sequences::reserve(ta_seq seq, int64_t tokens, Patience patience) {
    if (tokens < 0) return fail(TA_E_INVALID, "tokens is %lld", (long long)tokens).argument(2);
    if (tokens == 0) {  // giving a promise back needs no memory
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
    TA_RETURN_IF_ERROR(check_memory(s, to, tokens));
    for (size_t kind = 0; kind < to.size(); ++kind)
        wanted.insert(wanted.end(), to[kind] - std::min(to[kind], s.promise[kind]), PageKind(kind));
    Resident* const resident[] = {&s};
    const uint64_t failed = residency_.failed_evictions();
    const SlotCounts held = s.promise;
    // Until the call's end is known, the sequence also keeps what it was promised before.
    SlotCounts both;
    for (size_t kind = 0; kind < to.size(); ++kind) both[kind] = std::max(held[kind], to[kind]);
    const auto promise = [&]() -> Status {
        SlotCounts mine = s.promise;
        TA_RETURN_IF_ERROR(blocks().promise(mine, both));
        std::lock_guard lock(mutex_);
        s.promise = mine;
        if (before == 0 && !blocks().promise_readable(s.blocks)) {
            blocks().settle(s.promise, held);
            return fail(TA_E_BUSY, "blocks of the sequence are moved to disk as fast as they are brought back");
        }
        s.promised_tokens = tokens;
        return {};
    };
    const auto settle = [&](bool kept) {  // under the lock
        if (!kept && before == 0) let_leave(s);
        if (!kept) s.promised_tokens = before;
        blocks().settle(s.promise, kept ? to : held);
    };
    Status found;
    try {
        std::optional<uint64_t> reading;
        found = find_room_for_step(residency_, resident, wanted, patience, promise, reading);
        if (reading) blocks().stop_reading(*reading);
    } catch (...) {
        std::lock_guard lock(mutex_);
        settle(false);
        throw;
    }
    std::lock_guard lock(mutex_);
    if (found.ok() && s.released) found = fail(TA_E_STALE, "the sequence was released").argument(1);
    settle(found.ok());
    return found.code() == TA_E_TIER_FULL ? residency_.with_cause(std::move(found), failed) : std::move(found);
}

Result<uint64_t> Sequences::suspend(ta_seq seq, TierKind to) {
    TA_RETURN_IF_ERROR(check_open());
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
    // Before the mover looks at them: the sequence's own promise does not keep its blocks.
    int64_t promised = 0;
    const auto keep = [&](bool kept) {
        std::lock_guard lock(mutex_);
        if (!kept) let_leave(s);
        std::swap(promised, s.promised_tokens);
        for (size_t b = 0; kept && s.promised_tokens > 0 && b < s.blocks.size(); ++b) s.blocks[b]->add_reservation();
    };
    keep(false);
    try {
        Result<uint64_t> ticket = residency_.mover()->submit(std::move(requests), to, MoveReason::kAsked);
        std::unique_lock lock(mutex_);
        if (ticket.ok()) end_promise(s);
        lock.unlock();
        if (!ticket.ok()) keep(true);
        return ticket;
    } catch (...) {
        keep(true);
        throw;
    }
}

Result<ta_fit> Sequences::fit(std::span<const ta_seq> seqs, const int32_t* n_new) const {
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

uint64_t Sequences::reclaimable_bytes() const {
    std::lock_guard lock(mutex_);
    return residency_.reclaimable_bytes();
}

}  // namespace ta
