#include "src/kv/sequences.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>

#include "kernels/format/slot.h"
#include "src/kv/partition.h"
#include "tiering/room/candidates.h"

namespace ta {
namespace {

Status windows_passed(int64_t block, int64_t length) {
    return fail(TA_E_STATE, "windows have passed block %lld; behind token %lld they would see it", (long long)block,
                (long long)length)
        .block(block);
}

}  // namespace

Sequences::Sequences(Context& context, const Pages& pages, Residency& residency, PrefixStore& prefixes, uint32_t most,
                     uint32_t first_generation, std::atomic<uint64_t>& saturated_values)
    : context_(context),
      pages_(pages),
      geometry_(pages.geometry),
      numerics_(pages.numerics),
      residency_(residency),
      prefixes_(prefixes),
      most_(most),
      first_generation_(first_generation),
      saturated_values_(saturated_values) {}

// On a device, values that are not finite are replaced and counted. The sequence's next step reports them, once.
Status Sequences::take_nonfinite_mark(Sequence& s) {
    const uint32_t now = records_.nonfinite_of(s.slot);
    const uint32_t values = now - s.nonfinite_seen;
    s.nonfinite_seen = now;
    if (values == 0) return {};
    if (numerics_.saturate) {
        saturated_values_ += values;
        return {};
    }
    return fail(TA_E_NONFINITE, "%u values of k or v appended to the sequence were NaN, infinite or above 2^56; they became 0",
                values);
}

Status Sequences::check_range(const Sequence& s, uint64_t first, uint64_t n) const {
    if (first <= s.blocks.size() && n <= s.blocks.size() - first) return {};
    return fail(TA_E_INVALID, "blocks %llu to %llu are asked for; the sequence has %zu", (unsigned long long)first,
                (unsigned long long)(first + n), s.blocks.size())
        .argument(2);
}

Status Sequences::check_open() const {
    if (closed_) return fail(TA_E_CLOSED, "the pool is closed");
    return {};
}

Status Sequences::busy(ta_seq seq) {
    return fail(TA_E_BUSY, "sequence 0x%llx is in an open plan", (unsigned long long)seq);
}

Result<Sequence*> Sequences::find(ta_seq seq) const {
    const uint32_t slot = uint32_t(seq), generation = uint32_t(seq >> 32);
    if (slot < sequences_.size() && sequences_[slot]->generation == generation) {
        Sequence& s = *sequences_[slot];
        if (s.alive && !s.released) return &s;
    }
    // The sequence is argument 1 of every call that takes one sequence.
    return fail(TA_E_STALE, "0x%llx is no living sequence of this pool", (unsigned long long)seq).argument(1);
}

// Finds a sequence of an open pool that is in no plan.
Result<Sequence*> Sequences::find_idle(ta_seq seq) const {
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (found.ok() && found.value()->in_plan) return busy(seq);
    return found;
}

Status Sequences::check_room_for(uint64_t sequences) const {
    std::lock_guard lock(mutex_);
    if (sequences <= free_slots_.size() + (most_ - sequences_.size())) return {};
    return fail(TA_E_LIMIT, "%llu more sequences do not fit; the pool takes %u at most", (unsigned long long)sequences, most_);
}

// Takes a slot with an empty sequence of a fresh generation, not yet alive. If the caller fails, it gives the slot back.
Result<uint32_t> Sequences::take_slot() {
    // On a device, kernels of a released sequence may still count in its slot. So fresh slots come first, then the one released
    // longest ago.
    if (free_slots_.empty() || (records_.are_open() && sequences_.size() < most_)) {
        if (sequences_.size() >= most_) {
            return fail(TA_E_LIMIT, "the pool has its maximum of %u sequences", most_);
        }
        if (free_slots_.capacity() <= sequences_.size())
            free_slots_.reserve(2 * sequences_.size() + 16);  // so that release never allocates
        auto fresh = std::make_unique<Sequence>();
        fresh->generation = first_generation_;
        sequences_.push_back(std::move(fresh));
        free_slots_.push_back(uint32_t(sequences_.size() - 1));
    }
    if (records_.are_open() && sequences_.size() == most_)
        std::rotate(free_slots_.begin(), free_slots_.begin() + 1, free_slots_.end());
    const uint32_t slot = free_slots_.back();
    Sequence& s = *sequences_[slot];
    s.slot = slot;
    s.nonfinite_seen = records_.nonfinite_of(slot);
    s.scales_side = kNothingSeen;
    s.scales_known = true;
    s.tenant = 0;
    s.last_used = 0;
    s.last_used_at = {};
    if (numerics_.universal_open_scale && !records_.largest_scales())
        s.largest_scales.assign(AppendRecords::scales_of(geometry_), 0.0f);
    free_slots_.pop_back();
    ++s.generation;
    return slot;
}

// A slot that has used up its generations is retired: an old id must never name a new sequence.
void Sequences::give_slot(const Sequence& s) {
    if (s.generation != UINT32_MAX) free_slots_.push_back(s.slot);
}

Status Sequences::close() {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    closed_ = true;
    blocks().room_signal().notify();
    return {};
}

void Sequences::release_all() {
    for (size_t slot = 0;; ++slot) {
        const RoomSignal::AtEnd signal(blocks().room_signal());
        std::vector<BlockPtr> dropped;  // freed after the lock is released
        std::lock_guard lock(mutex_);
        if (slot == sequences_.size()) return;
        if (sequences_[slot]->alive) release_locked(*sequences_[slot], dropped);
    }
}

Result<ta_seq> Sequences::create() {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<uint32_t> slot = take_slot();
    if (!slot.ok()) return std::move(slot).status();
    Sequence& s = *sequences_[slot.value()];
    s.alive = true;
    s.length = 0;
    s.passed_to = s.whole_from = 0;
    s.priority = 0;
    return id_of(slot.value());
}

Result<ta_seq> Sequences::fork(ta_seq source) {
    std::lock_guard lock(mutex_);
    Result<Sequence*> from = find_idle(source);
    if (!from.ok()) return std::move(from).status();
    // Takes all memory first: the slot would have to be given back by hand.
    Result<Snapshot> copied = copy_locked(*from.value());
    if (!copied.ok()) return std::move(copied).status();
    Snapshot copy = copied.take();
    std::vector<Gap> gaps = from.value()->gaps;
    Result<uint32_t> slot = take_slot();
    if (!slot.ok()) return std::move(slot).status();
    Sequence& s = *sequences_[slot.value()];
    s.gaps.swap(gaps);
    s.scales_known = false;
    s.alive = true;
    s.length = copy.length;
    s.priority = from.value()->priority;
    s.passed_to = from.value()->passed_to;
    s.whole_from = from.value()->whole_from;
    s.blocks = std::move(copy.blocks);
    // The copy, too, reports non-finite values that the source has not reported yet.
    s.nonfinite_seen -= records_.nonfinite_of(from.value()->slot) - from.value()->nonfinite_seen;
    s.tenant = copy.tenant;
    return id_of(slot.value());
}

Result<Sequences::Snapshot> Sequences::snapshot(ta_seq seq) const {
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    return copy_locked(*found.value());
}

Result<Sequences::Snapshot> Sequences::snapshot_in_plan(const Sequence& seq) const {
    std::lock_guard lock(mutex_);
    return copy_locked(seq);
}

Result<Sequences::Snapshot> Sequences::snapshot_to_publish(ta_seq seq) {
    // Waits for kernels: others must not get tokens before it is known whether they are finite.
    if (records_.are_open()) TA_RETURN_IF_ERROR(context_.device()->wait_for_steps());
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    TA_RETURN_IF_ERROR(take_nonfinite_mark(*found.value()));
    return copy_locked(*found.value());
}

Result<Sequences::Snapshot> Sequences::copy_locked(const Sequence& s) const {
    if (s.partition) {
        return fail(TA_E_STATE, "sequence 0x%llx is partitioned: this rank has only some of its blocks",
                    (unsigned long long)id_of(s.slot));
    }
    return Snapshot{s.length, s.blocks, s.tenant.load()};
}

Result<std::vector<std::pair<ta_seq, Sequences::Snapshot>>> Sequences::snapshot_all() const {
    std::vector<std::pair<ta_seq, Snapshot>> all;
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    for (const auto& s : sequences_) {
        if (!s->alive || s->released) continue;
        if (s->in_plan) return busy(id_of(s->slot));
        Result<Snapshot> copy = copy_locked(*s);
        if (!copy.ok()) return std::move(copy).status();
        all.emplace_back(id_of(s->slot), copy.take());
    }
    return all;
}

Result<ta_seq> Sequences::adopt(Snapshot&& from) {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    return adopt_locked(std::move(from));
}

Result<std::vector<ta_seq>> Sequences::adopt_all(std::vector<Snapshot>&& all) {
    std::vector<ta_seq> ids;
    ids.reserve(all.size());
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<std::vector<BlockPtr>> dropped(all.size());  // freed after the lock is released
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Status status;
    try {
        for (Snapshot& s : all) {
            Result<ta_seq> id = adopt_locked(std::move(s));
            if (!id.ok()) {
                status = std::move(id).status();
                break;
            }
            ids.push_back(id.value());
        }
    } catch (const std::bad_alloc&) {
        status = fail(TA_E_MEMORY, "no memory for a sequence");
    }
    if (status.ok()) return ids;
    for (size_t i = 0; i < ids.size(); ++i) end_locked(*sequences_[uint32_t(ids[i])], dropped[i]);
    return status;
}

Result<ta_seq> Sequences::adopt_locked(Snapshot&& from) {
    if (geometry_.has_windows()) TA_RETURN_IF_ERROR(check_not_passed(from.blocks, from.length));
    Result<uint32_t> slot = take_slot();
    if (!slot.ok()) return std::move(slot).status();
    Sequence& s = *sequences_[slot.value()];
    s.scales_known = false;
    s.alive = true;
    s.length = from.length;
    s.priority = 0;
    s.blocks = std::move(from.blocks);
    s.passed_to = s.whole_from = 0;
    if (geometry_.has_windows()) note_passed(s);
    s.tenant = from.tenant;
    ++s.version;
    return id_of(slot.value());
}

void Sequences::note_passed(Sequence& s) const {
    const int64_t before = s.partition ? std::min(s.passed_to, int64_t(s.blocks.size())) : 0;
    s.passed_to = std::max(geometry_.first_kept(s.length), before);
    s.whole_from = std::min(s.whole_from, s.passed_to);
    const auto has_passed = [&](int64_t b) {
        const Block& block = *s.blocks[size_t(b)];
        return block.dropped() || is_passed(block.kind());
    };
    while (s.whole_from < s.passed_to && has_passed(s.whole_from)) ++s.whole_from;
}

Status Sequences::check_not_passed(std::span<const BlockPtr> blocks, int64_t length) const {
    for (size_t b = size_t(geometry_.first_needed(length)); b < blocks.size() && int64_t(b) * kPageTokens < length; ++b) {
        if (is_passed(blocks[b]->kind())) return windows_passed(int64_t(b), length);
    }
    return {};
}

Status Sequences::truncate(ta_seq seq, int64_t length) {
    const RoomSignal::AtEnd signal(blocks().room_signal());  // published blocks may be unused now
    std::vector<BlockPtr> dropped;                           // freed after the lock is released
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    Sequence& s = *found.value();
    if (length < 0 || length > s.length) {
        return fail(TA_E_INVALID, "length is %lld; the sequence has %lld tokens", (long long)length, (long long)s.length)
            .argument(2);
    }
    if (s.partition && length % kPageTokens != 0 && length / kPageTokens != s.shared_block) {
        return fail(TA_E_STATE,
                    "token %lld of the partitioned sequence lies in a block of one rank; truncate to a multiple of %d",
                    (long long)length, kPageTokens)
            .block(length / kPageTokens);
    }
    if (s.partition && numerics_.universal_open_scale && length > 0 && length < s.length) {
        return fail(TA_E_UNSUPPORTED,
                    "a partitioned sequence of a pool with universal open scales is truncated to 0 alone: the scales of its "
                    "blocks are at several ranks");
    }
    if (const auto last = size_t(length / kPageTokens); length % kPageTokens != 0 && s.blocks[last]->dropped()) {
        return fail(TA_E_STATE, "token %lld lies in a block that was dropped; truncate to a multiple of %d", (long long)length,
                    kPageTokens)
            .block(int64_t(last));
    }
    if (geometry_.has_windows()) {
        TA_RETURN_IF_ERROR(check_not_passed(s.blocks, length));
        // All ranks decide alike, whichever rank has the block, and whether the block could pass there.
        const int64_t b = geometry_.first_needed(length);
        if (s.partition && b < s.passed_to && length > 0) return windows_passed(b, length);
    }
    const auto first_dropped = s.blocks.begin() + (length + kPageTokens - 1) / kPageTokens;
    let_leave(s, size_t(first_dropped - s.blocks.begin()));
    try {
        dropped.assign(std::make_move_iterator(first_dropped), std::make_move_iterator(s.blocks.end()));
    } catch (const std::bad_alloc&) {
        // Without memory for the list, erase() below frees them under the lock.
    }
    SlotCounts freed{};
    for (const BlockPtr& b : dropped) {
        if (b.use_count() == 1 && b->tier() == TierKind::kDevice && !b->dropped()) ++freed[size_t(b->kind())];
    }
    s.blocks.erase(first_dropped, s.blocks.end());
    ++s.version;
    s.scales_known = s.scales_known && length == s.length;
    s.length = length;
    cut_gaps(s.gaps, int64_t(s.blocks.size()));
    if (geometry_.has_windows()) note_passed(s);
    keep_promise(s, 0, freed);
    return {};
}

Result<int64_t> Sequences::forget(ta_seq seq, int64_t first, int64_t n) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> forgotten;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    Sequence& s = *found.value();
    if (first < 0 || n < 0 || first > s.length || n > s.length - first) {
        return fail(TA_E_INVALID, "%lld tokens from %lld on are to be forgotten; the sequence has %lld", (long long)n,
                    (long long)first, (long long)s.length)
            .argument(2);
    }
    return forget_locked(s, size_t((first + kPageTokens - 1) / kPageTokens), size_t((first + n) / kPageTokens), forgotten);
}

// Replaces blocks [begin, end) by forgotten ones and moves them to `forgotten`. Returns how many tokens that are.
int64_t Sequences::forget_locked(Sequence& s, size_t begin, size_t end, std::vector<BlockPtr>& forgotten) {
    for (size_t b = begin; b < end; ++b) {
        if (!s.blocks[b]->dropped()) forgotten.push_back(blocks().forgotten());
    }
    auto next = forgotten.begin();
    for (size_t b = begin; b < end; ++b) {
        if (!s.blocks[b]->dropped()) put_block(s, b, *next++);
    }
    if (!forgotten.empty()) ++s.version;
    return int64_t(forgotten.size()) * kPageTokens;
}

// Checks that this pool can shift sequences at all.
Status Sequences::check_shift() const {
    if (!numerics_.rotary.given())
        return fail(TA_E_UNSUPPORTED, "the pool was created without options.rotary: how positions turn K is not known");
    if (geometry_.has_windows())
        return fail(TA_E_UNSUPPORTED, "the pool has layers with windows, which count what was taken out");
    if (numerics_.batch_invariant) return fail(TA_E_UNSUPPORTED, "a pool with batch_invariant does not shift sequences");
    if (residency_.observes_attention())
        return fail(TA_E_UNSUPPORTED, "options.tiers.eviction is TA_EVICT_ATTENTION: attention across a gap is not observed");
    return {};
}

Status Sequences::shift(ta_seq seq, int64_t first, int64_t n) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> forgotten;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    Sequence& s = *found.value();
    if (first < 0 || n < 0 || first % kPageTokens != 0 || n % kPageTokens != 0) {
        return fail(TA_E_INVALID, "%lld tokens from %lld on are to be taken out; both are to be multiples of %d, 0 and up",
                    (long long)n, (long long)first, kPageTokens)
            .argument(first < 0 || first % kPageTokens != 0 ? 2 : 3);
    }
    if (first > s.length || n > s.length - first) {
        return fail(TA_E_INVALID, "%lld tokens from %lld on are to be taken out; the sequence has %lld", (long long)n,
                    (long long)first, (long long)s.length)
            .argument(first > s.length ? 2 : 3);
    }
    if (Status able = check_shift(); !able.ok()) return std::move(able).argument(0);
    if (s.partition) return fail(TA_E_UNSUPPORTED, "a partitioned sequence cannot be shifted").argument(1);
    if (n == 0) return {};
    const Gap gap{first / kPageTokens, (first + n) / kPageTokens};
    const auto is_dropped = [](const BlockPtr& b) { return b->dropped(); };
    const bool is_start = std::all_of(s.blocks.begin(), s.blocks.begin() + gap.first, is_dropped);
    std::vector<Gap> gaps = with_gap(s.gaps, is_start ? Gap{0, gap.end} : gap);
    forget_locked(s, size_t(gap.first), size_t(gap.end), forgotten);
    s.gaps.swap(gaps);
    return {};
}

Status Sequences::release(ta_seq seq) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> dropped;  // freed after the lock is released
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    release_locked(*found.value(), dropped);
    return {};
}

// If a plan has the sequence, it reads and writes the blocks until it ends, on a GPU until its kernels have ended.
void Sequences::release_locked(Sequence& s, std::vector<BlockPtr>& dropped) {
    if (s.in_plan) {
        s.released = true;
    } else {
        end_locked(s, dropped);
    }
}

void Sequences::end_locked(Sequence& s, std::vector<BlockPtr>& dropped) {
    s.alive = s.released = false;
    s.length = 0;
    let_leave(s);
    s.promised_tokens = 0;
    blocks().settle(s.promise, {});
    s.blocks.swap(dropped);
    s.partition.reset();
    s.gaps.clear();
    give_slot(s);
}

Status Sequences::set_priority(ta_seq seq, int32_t priority) {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    found.value()->priority = priority;
    return {};
}

Result<int64_t> Sequences::length(ta_seq seq) const {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    return found.value()->length;
}

Status Sequences::verify(ta_seq seq) {
    const Residency::BlockHold hold(residency_);
    // Owning the blocks keeps them, so that hashing needs no lock.
    std::vector<BlockPtr> held;
    TA_RETURN_IF_ERROR(inspect(seq, [&](const Sequence& s) {
        held = s.blocks;
        // The next plan may go on writing a block that is not full while its hashes are computed.
        if (!held.empty() && s.length % kPageTokens != 0 && !held.back()->sealed()) held.pop_back();
        return Status();
    }));
    Device* device = context_.device();
    const ReadingBlocks reading(residency_.store());
    std::vector<PlacedBlock> on_device;
    for (size_t b = 0; b < held.size(); ++b) {
        if (!held[b]->sealed()) continue;
        const Place at = blocks().place_of(*held[b]);
        if (at.tier == TierKind::kDisk) {
            TA_RETURN_IF_ERROR(residency_.reader().read(*held[b], b, nullptr));
        } else if (device && is_of_devices(at.tier)) {
            on_device.push_back({held[b].get(), b, at.address, at.kind});
        } else {
            Status s = held[b]->verify(geometry_, pages_.fingerprint, b, at.address, at.kind);
            if (!s.ok()) return std::move(s).tier(code_of(at.tier));
        }
    }
    if (on_device.empty()) return {};
    std::vector<Status> statuses(on_device.size());
    TA_RETURN_IF_ERROR(residency_.verifier()->verify(on_device, statuses));
    for (Status& s : statuses) {
        if (!s.ok()) return std::move(s).tier(TA_TIER_DEVICE);
    }
    return {};
}

Result<std::vector<Sequence*>> Sequences::lock_for_plan(std::span<const ta_seq> seqs) {
    std::vector<Sequence*> taken;
    taken.reserve(seqs.size());
    const auto now = std::chrono::steady_clock::now();
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Status status;
    for (size_t i = 0; i < seqs.size(); ++i) {
        Result<Sequence*> found = find(seqs[i]);
        if (!found.ok()) {
            status = std::move(found).status().argument(2).sequence(int64_t(i));
            break;
        }
        if (found.value()->in_plan) {
            status = std::find(taken.begin(), taken.end(), found.value()) != taken.end()
                         ? fail(TA_E_INVALID, "the sequence stands twice in the list").argument(2).sequence(int64_t(i))
                         : busy(seqs[i]).sequence(int64_t(i));
            break;
        }
        status = take_nonfinite_mark(*found.value());
        if (!status.ok()) {
            status = std::move(status).sequence(int64_t(i));
            break;
        }
        found.value()->in_plan = true;
        taken.push_back(found.value());
    }
    for (Sequence* s : taken) {
        if (!status.ok()) {
            s->in_plan = false;
            continue;
        }
        s->used_before = std::exchange(s->last_used, ++uses_);
        s->used_before_at = std::exchange(s->last_used_at, now);
    }
    if (!status.ok()) return status;
    residency_.ledger().enter_plans(taken.size());
    return taken;
}

void Sequences::forget_use(std::span<Sequence* const> seqs) {
    std::lock_guard lock(mutex_);
    for (Sequence* s : seqs) {
        s->last_used = s->used_before;
        s->last_used_at = s->used_before_at;
    }
}

void Sequences::unlock_for_plan(std::vector<Sequence*>& seqs) {
    const size_t n = seqs.size();
    std::unique_lock lock(mutex_);
    // NOTES: a sequence that is not released may be another plan's as soon as the lock is released.
    std::erase_if(seqs, [](Sequence* s) {
        if (!s->released) s->in_plan = false;
        return !s->released;
    });
    for (Sequence* s : seqs) {
        std::vector<BlockPtr> dropped;
        s->in_plan = false;
        end_locked(*s, dropped);
        lock.unlock();
        dropped.clear();
        lock.lock();
    }
    residency_.ledger().leave_plans(n);
    lock.unlock();
    seqs.clear();
    trim_if_closed();
}

void Sequences::trim_if_closed() {
    if (closed_) blocks().trim();
}

void Sequences::set_tenant(ta_seq seq, Tenant space) {
    std::lock_guard lock(mutex_);
    if (Result<Sequence*> found = find(seq); found.ok()) found.value()->tenant = space;
}

void Sequences::visit_tenants(const std::function<void(const std::unordered_set<Tenant>&)>& see) const {
    std::lock_guard lock(mutex_);
    std::unordered_set<Tenant> in_use;
    for (const auto& s : sequences_) {
        if (!s->alive) continue;
        in_use.insert(s->tenant);
        for (const BlockPtr& block : s->blocks) in_use.insert(block->tenant());
    }
    see(in_use);
}

void Sequences::visit(const std::function<void(const Resident&)>& see) const {
    for (const auto& s : sequences_) {
        if (s->alive) see(*s);
    }
}

void Sequences::add_attention(uint32_t slot, uint32_t generation, std::span<const float> weights, float each, uint32_t at) {
    constexpr size_t kAhead = 8;  // blocks lie anywhere in memory
    std::lock_guard lock(mutex_);
    if (slot >= sequences_.size()) return;  // the pool was closed
    const Sequence& s = *sequences_[slot];
    if (!s.alive || s.generation != generation) return;
    Decay now = residency_.decay();
    const float faded = now.at_now({each, at});
    const size_t n = std::min(weights.size(), s.blocks.size());
    for (size_t b = 0; b < n; ++b) {
        if (b + kAhead < n) __builtin_prefetch(s.blocks[b + kAhead].get(), 1);
        s.blocks[b]->add_mass(weights[b] * faded, at, now);
    }
}

void Sequences::add_source(AttentionSource* source) {
    std::lock_guard lock(sources_mutex_);
    sources_.push_back(source);
}

void Sequences::remove_source(AttentionSource* source) {
    std::lock_guard lock(sources_mutex_);
    std::erase(sources_, source);
}

void Sequences::take_in_attention(bool wait) {
    std::lock_guard lock(sources_mutex_);
    for (AttentionSource* source : sources_) source->take_in(wait);
}

// Sealed blocks, which may move. The mover leaves blocks that refuse where they are.
Result<std::vector<MoveRequest>> Sequences::movable_blocks(ta_seq seq, uint64_t first, uint64_t n) const {
    std::vector<MoveRequest> items;
    Status found = inspect(seq, [&](const Sequence& s) -> Status {
        TA_RETURN_IF_ERROR(check_range(s, first, n));
        items.reserve(n);
        for (uint64_t b = first; b < first + n; ++b) {
            const BlockPtr& block = s.blocks[size_t(b)];
            items.push_back(block->sealed() ? MoveRequest(block, b) : MoveRequest(b));
        }
        return {};
    });
    if (!found.ok()) return found;
    return items;
}

Result<uint64_t> Sequences::move_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to, MoveReason reason) {
    TA_RETURN_IF_ERROR(check_open());
    if (to != TierKind::kDevice && !residency_.tier(to))
        return fail(TA_E_UNSUPPORTED, "the pool has no %s tier", name_of(to)).argument(4);
    Result<std::vector<MoveRequest>> items = movable_blocks(seq, first, n);
    if (!items.ok()) return std::move(items).status();
    if (!residency_.mover()) return fail(TA_E_UNSUPPORTED, "the pool has no tier below the device").argument(0);
    Result<uint64_t> ticket = residency_.mover()->submit(items.take(), to, reason);
    if (!ticket.ok() || to != TierKind::kDevice) return ticket;
    // The caller is about to use these blocks: present and later evictions shall take other blocks first.
    std::lock_guard lock(mutex_);
    if (Result<Sequence*> s = find(seq); s.ok()) s.value()->last_used = ++uses_;
    return ticket;
}

Status Sequences::lacks_block(const BlockPtr& block) const {
    return fail(TA_E_STATE, "the block %s", block == blocks().absent() ? "is another rank's" : "was dropped");
}

// `cut`: blocks that a truncate has cut count as full.
Status Sequences::check_full(const Sequence& s, uint64_t first, uint64_t n, bool cut) const {
    TA_RETURN_IF_ERROR(check_range(s, first, n));
    for (uint64_t b = first; b < first + n; ++b) {
        const BlockPtr& block = s.blocks[size_t(b)];
        if (block->dropped()) return lacks_block(block).block(int64_t(b));
        if (!block->sealed() || (!cut && b >= uint64_t(s.length) / kPageTokens))
            return fail(TA_E_STATE, "the block is not full yet").block(int64_t(b));
    }
    return {};
}

Status Sequences::retain(ta_seq seq, uint64_t first, uint64_t n, Retention retention) {
    return inspect(seq, [&](const Sequence& s) -> Status {
        TA_RETURN_IF_ERROR(check_full(s, first, n, false));
        blocks().retain({s.blocks.data() + first, size_t(n)}, retention);
        return {};
    });
}

Status Sequences::pin_blocks(ta_seq seq, uint64_t first, uint64_t n, bool pinned) {
    return inspect(seq, [&](const Sequence& s) -> Status {
        TA_RETURN_IF_ERROR(check_full(s, first, n, !pinned));
        for (uint64_t b = first; b < first + n && !pinned; ++b) {
            if (s.blocks[size_t(b)]->pins() == 0) return fail(TA_E_STATE, "the block is not pinned").block(int64_t(b));
        }
        const std::span range(s.blocks.data() + first, n);
        if (pinned) {
            blocks().pin(range);
        } else {
            for (const BlockPtr& b : range) b->unpin();
            blocks().room_signal().notify();
        }
        return {};
    });
}

Sequences::Stats Sequences::stats() const {
    Stats r;
    std::vector<const Block*> shared;  // only compared, never followed: the blocks may be gone by then
    {
        std::lock_guard lock(mutex_);
        for (const auto& s : sequences_) {
            if (!s->alive || s->released) continue;
            ++r.sequences;
            r.tokens += uint64_t(s->length);
            if (s->in_plan) continue;
            for (const BlockPtr& b : s->blocks) {
                if (b.use_count() > 1 && !b->dropped()) shared.push_back(b.get());
            }
        }
    }
    std::sort(shared.begin(), shared.end());
    r.shared_blocks = uint64_t(std::unique(shared.begin(), shared.end()) - shared.begin());
    return r;
}

}  // namespace ta
