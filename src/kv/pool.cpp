#include "src/kv/pool.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <new>

#include "kernels/format/hash.h"
#include "kernels/format/rotation.h"
#include "kernels/format/slot.h"
#include "src/kv/partition.h"

namespace ta {
namespace {

// A hash of all that decides the meaning of a page's bytes. Equal fingerprints: pages can be exchanged.
uint64_t fingerprint_of(const Geometry& g, const Numerics& n) {
    std::vector<uint8_t> bytes;
    const auto add = [&bytes](const auto& value) {
        const auto* p = reinterpret_cast<const uint8_t*>(&value);
        bytes.insert(bytes.end(), p, p + sizeof value);
    };
    add(uint32_t(kFormatVersion));
    add(g.layers);
    add(g.common.kv_heads);
    add(g.common.head_dim);
    bytes.insert(bytes.end(), g.k_bits.begin(), g.k_bits.end());
    bytes.insert(bytes.end(), g.v_bits.begin(), g.v_bits.end());
    add(uint32_t(n.hadamard));
    add(n.hadamard ? n.hadamard_seed : uint64_t{0});
    add(n.sink_blocks);
    add(uint32_t(n.encode.k_turning));
    for (const float x : n.k_offset) add(x);
    // Tokens of other pools may share scales.
    if (n.batch_invariant) add(uint32_t{1} << 31);
    if (g.falls) add(uint32_t(g.all_8_bits ? 8 : 4));
    if (g.keeps_own_scales) add(uint32_t(kPageTokens));
    if (g.common.is_wider()) {
        add(g.common.k_channels);
        add(g.common.v_channels);
    }
    for (const int64_t window : g.windows) add(window);
    if (!g.is_even()) {
        for (const LayerShape& s : g.shapes) add(s);
    }
    return hash_bytes(bytes.data(), bytes.size());
}

uint64_t next_serial() {
    static std::atomic<uint64_t> pools{0};
    return pools.fetch_add(1) + 1;
}

// Somewhere in the lower half of all generations.
uint32_t some_generation(const void* pool) {
    const uint64_t seed[] = {reinterpret_cast<uintptr_t>(pool),
                             uint64_t(std::chrono::steady_clock::now().time_since_epoch().count())};
    return uint32_t(hash_bytes(seed, sizeof seed) >> 33);
}

Status windows_passed(int64_t block, int64_t length) {
    return fail(TA_E_STATE, "windows have passed block %lld; behind token %lld they would see it", (long long)block,
                (long long)length)
        .block(block);
}

}  // namespace

static Pages pages_of(Geometry&& geometry, Numerics&& numerics, const Context& context) {
    const uint64_t fingerprint = fingerprint_of(geometry, numerics);
    return {std::move(geometry), std::move(numerics), fingerprint, context.kernels().codec};
}

Pool::Pool(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics, uint64_t budget, uint32_t max_sequences)
    : context_(std::move(context)),
      pages_(pages_of(std::move(geometry), std::move(numerics), *context_)),
      max_sequences_(max_sequences),
      serial_(next_serial()),
      first_generation_(some_generation(this)),
      residency_(*context_, pages_, *this, budget),
      prefixes_(residency_.store(), geometry_, uint64_t(first_generation_) << 32),
      nonfinite_(nullptr, {context_->device()}),
      largest_scales_(nullptr, {context_->device(), 0}) {
    for (int c = 0; c < kMaxHeadDim; ++c) signs_[c] = rotation_sign(numerics_.hadamard_seed, c) ? -1.0f : 1.0f;
}

Result<std::shared_ptr<Pool>> Pool::create(std::shared_ptr<Context> context, Geometry geometry, Numerics numerics,
                                           uint64_t budget, uint32_t max_sequences, const TierSettings& tiers) {
    std::shared_ptr<Pool> pool(new Pool(std::move(context), std::move(geometry), std::move(numerics), budget, max_sequences));
    if (Device* device = pool->context().device()) {
        TA_RETURN_IF_ERROR(device->health());
        TA_RETURN_IF_ERROR(pool->blocks().take_slab());
        if (pool->numerics_.universal_open_scale) {
            const std::vector<uint8_t> progress(size_t(max_sequences) * pool->geometry_.most_kv_heads * kAppendProgressBytes);
            const size_t bytes = pool->append_progress_offset() + progress.size();
            pool->largest_scales_ = {device->allocate(bytes), FreeMemory{device, bytes}};
            if (!pool->largest_scales_)
                return fail(TA_E_MEMORY, "GPU %d has no %zu bytes for universal scales", device->ordinal(), bytes).bytes(bytes);
            TA_RETURN_IF_ERROR(device->write(pool->append_progress(), progress.data(), progress.size()));
        }
        pool->nonfinite_.reset(device->allocate_counters(first_even(max_sequences) + 2));
        if (!pool->nonfinite_) return fail(TA_E_MEMORY, "no pinned host memory for %u counters", max_sequences);
    }
    TA_RETURN_IF_ERROR(pool->residency_.open(tiers));
    if (!tiers.disk_path.empty() && tiers.disk_budget > 0) pool->recover_published();
    TA_RETURN_IF_ERROR(pool->residency_.start(pool->first_ticket()));
    return pool;
}

Pool::~Pool() {
    blocks().keep_records();
    residency_.stop();
}

// On a device a value that is not finite is replaced, counted, and reported by the sequence's next step, once.
Status Pool::take_nonfinite_mark(Sequence& s) {
    if (!nonfinite_) return {};
    const uint32_t now = std::atomic_ref(nonfinite_[s.slot]).load(std::memory_order_relaxed);
    const uint32_t values = now - s.nonfinite_seen;
    s.nonfinite_seen = now;
    if (values == 0) return {};
    if (numerics_.saturate) {
        counters_.saturated_values += values;
        return {};
    }
    return fail(TA_E_NONFINITE, "%u values of k or v appended to the sequence were NaN, infinite or above 2^56; they became 0",
                values);
}

Status Pool::check_range(const Sequence& s, uint64_t first, uint64_t n) const {
    if (first <= s.blocks.size() && n <= s.blocks.size() - first) return {};
    return fail(TA_E_INVALID, "blocks %llu to %llu are asked for; the sequence has %zu", (unsigned long long)first,
                (unsigned long long)(first + n), s.blocks.size())
        .argument(2);
}

Status Pool::check_open() const {
    if (closed_) return fail(TA_E_CLOSED, "the pool is closed");
    return {};
}

Status Pool::busy(ta_seq seq) {
    return fail(TA_E_BUSY, "sequence 0x%llx is in an open plan", (unsigned long long)seq);
}

Result<Sequence*> Pool::find(ta_seq seq) const {
    const uint32_t slot = uint32_t(seq), generation = uint32_t(seq >> 32);
    if (slot < sequences_.size() && sequences_[slot]->generation == generation) {
        Sequence& s = *sequences_[slot];
        if (s.alive && !s.released) return &s;
    }
    // Every call of one sequence has it there.
    return fail(TA_E_STALE, "0x%llx is no living sequence of this pool", (unsigned long long)seq).argument(1);
}

// In an open pool, and in no plan.
Result<Sequence*> Pool::find_idle(ta_seq seq) const {
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (found.ok() && found.value()->in_plan) return busy(seq);
    return found;
}

Status Pool::check_room_for(uint64_t sequences) const {
    std::lock_guard lock(mutex_);
    if (sequences <= free_slots_.size() + (max_sequences_ - sequences_.size())) return {};
    return fail(TA_E_LIMIT, "%llu more sequences do not fit; the pool takes %u at most", (unsigned long long)sequences,
                max_sequences_);
}

// A slot whose sequence is empty and has a fresh generation, not yet alive. A caller that fails gives it back.
Result<uint32_t> Pool::take_slot() {
    // On a device the kernels of a released sequence may still count in its slot: fresh slots first, then the oldest.
    if (free_slots_.empty() || (nonfinite_ && sequences_.size() < max_sequences_)) {
        if (sequences_.size() >= max_sequences_) {
            return fail(TA_E_LIMIT, "the pool has its maximum of %u sequences", max_sequences_);
        }
        if (free_slots_.capacity() <= sequences_.size())
            free_slots_.reserve(2 * sequences_.size() + 16);  // release never allocates
        auto fresh = std::make_unique<Sequence>();
        fresh->generation = first_generation_;
        sequences_.push_back(std::move(fresh));
        free_slots_.push_back(uint32_t(sequences_.size() - 1));
    }
    if (nonfinite_ && sequences_.size() == max_sequences_)
        std::rotate(free_slots_.begin(), free_slots_.begin() + 1, free_slots_.end());
    const uint32_t slot = free_slots_.back();
    Sequence& s = *sequences_[slot];
    s.slot = slot;
    if (nonfinite_) s.nonfinite_seen = std::atomic_ref(nonfinite_[slot]).load(std::memory_order_relaxed);
    s.scales_side = kNothingSeen;
    s.scales_known = true;
    s.tenant = 0;
    s.last_used = 0;
    s.last_used_at = {};
    if (numerics_.universal_open_scale && !largest_scales_) s.largest_scales.assign(scales_record(), 0.0f);
    free_slots_.pop_back();
    ++s.generation;
    return slot;
}

// A slot whose generations are used up is retired, so that an old id can never name a new sequence.
void Pool::give_slot(const Sequence& s) {
    if (s.generation != UINT32_MAX) free_slots_.push_back(s.slot);
}

// Nothing is created in a closed pool, so no sequence comes behind the loop.
Status Pool::close() {
    {
        std::lock_guard lock(mutex_);
        TA_RETURN_IF_ERROR(check_open());
        closed_ = true;
        blocks().room_signal().notify();
    }
    if (mover()) mover()->cancel_all();
    blocks().keep_records();
    prefixes_.close();
    for (size_t slot = 0;; ++slot) {
        const RoomSignal::AtEnd signal(blocks().room_signal());
        std::vector<BlockPtr> dropped;  // after the lock
        std::lock_guard lock(mutex_);
        if (slot == sequences_.size()) break;
        if (sequences_[slot]->alive) release_locked(*sequences_[slot], dropped);
    }
    blocks().trim();
    return {};
}

Result<ta_seq> Pool::create_sequence() {
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

Result<ta_seq> Pool::fork_sequence(ta_seq source) {
    std::lock_guard lock(mutex_);
    Result<Sequence*> from = find_idle(source);
    if (!from.ok()) return std::move(from).status();
    // Copies first, and whatever else takes memory: a slot that was taken is given back by hand.
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
    // Non-finite values that have not been reported of the source are reported of the copy too.
    if (nonfinite_) {
        const uint32_t counted = std::atomic_ref(nonfinite_[from.value()->slot]).load(std::memory_order_relaxed);
        s.nonfinite_seen -= counted - from.value()->nonfinite_seen;
    }
    s.tenant = copy.tenant;
    return id_of(slot.value());
}

Result<Pool::Snapshot> Pool::snapshot(ta_seq seq) const {
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    return copy_locked(*found.value());
}

Result<Pool::Snapshot> Pool::snapshot_in_plan(const Sequence& seq) const {
    std::lock_guard lock(mutex_);
    return copy_locked(seq);
}

Result<Pool::Snapshot> Pool::copy_locked(const Sequence& s) const {
    if (s.partition) {
        return fail(TA_E_STATE, "sequence 0x%llx is partitioned: this rank has only some of its blocks",
                    (unsigned long long)id_of(s.slot));
    }
    return Snapshot{s.length, s.blocks, s.tenant.load()};
}

Result<std::vector<std::pair<ta_seq, Pool::Snapshot>>> Pool::snapshot_all() const {
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

Result<ta_seq> Pool::adopt(Snapshot&& from) {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    return adopt_locked(std::move(from));
}

Result<std::vector<ta_seq>> Pool::adopt_all(std::vector<Snapshot>&& all) {
    std::vector<ta_seq> ids;
    ids.reserve(all.size());
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<std::vector<BlockPtr>> dropped(all.size());  // after the lock
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

Result<ta_seq> Pool::adopt_locked(Snapshot&& from) {
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

void Pool::note_passed(Sequence& s) const {
    const int64_t before = s.partition ? std::min(s.passed_to, int64_t(s.blocks.size())) : 0;
    s.passed_to = std::max(geometry_.first_kept(s.length), before);
    s.whole_from = std::min(s.whole_from, s.passed_to);
    const auto has_passed = [&](int64_t b) {
        const Block& block = *s.blocks[size_t(b)];
        return block.dropped() || is_passed(block.kind());
    };
    while (s.whole_from < s.passed_to && has_passed(s.whole_from)) ++s.whole_from;
}

Status Pool::check_not_passed(std::span<const BlockPtr> blocks, int64_t length) const {
    for (size_t b = size_t(geometry_.first_needed(length)); b < blocks.size() && int64_t(b) * kPageTokens < length; ++b) {
        if (is_passed(blocks[b]->kind())) return windows_passed(int64_t(b), length);
    }
    return {};
}

Status Pool::truncate(ta_seq seq, int64_t length) {
    const RoomSignal::AtEnd signal(blocks().room_signal());  // of published blocks that nobody uses now
    std::vector<BlockPtr> dropped;                           // after the lock
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
        // All ranks say the same, whichever has the block, and whether it could pass there.
        const int64_t b = geometry_.first_needed(length);
        if (s.partition && b < s.passed_to && length > 0) return windows_passed(b, length);
    }
    const auto first_dropped = s.blocks.begin() + (length + kPageTokens - 1) / kPageTokens;
    try {
        dropped.assign(std::make_move_iterator(first_dropped), std::make_move_iterator(s.blocks.end()));
    } catch (const std::bad_alloc&) {
        // Then they are freed here: giving back needs no memory.
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

Result<int64_t> Pool::forget(ta_seq seq, int64_t first, int64_t n) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> forgotten;  // freed after the lock
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

// Blocks [begin, end), which go to `forgotten`; how many tokens.
int64_t Pool::forget_locked(Sequence& s, size_t begin, size_t end, std::vector<BlockPtr>& forgotten) {
    for (size_t b = begin; b < end; ++b) {
        if (!s.blocks[b]->dropped()) forgotten.push_back(blocks().forgotten());
    }
    auto next = forgotten.begin();
    for (size_t b = begin; b < end; ++b) {
        if (!s.blocks[b]->dropped()) s.blocks[b].swap(*next++);
    }
    if (!forgotten.empty()) ++s.version;
    return int64_t(forgotten.size()) * kPageTokens;
}

// Checks that sequences of this pool can be shifted at all.
Status Pool::check_shift() const {
    if (!numerics_.rotary.given())
        return fail(TA_E_UNSUPPORTED, "the pool was created without options.rotary: how positions turn K is not known");
    if (geometry_.has_windows())
        return fail(TA_E_UNSUPPORTED, "the pool has layers with windows, which count what was taken out");
    if (numerics_.batch_invariant) return fail(TA_E_UNSUPPORTED, "a pool with batch_invariant does not shift sequences");
    if (residency_.observes_attention())
        return fail(TA_E_UNSUPPORTED, "options.tiers.eviction is TA_EVICT_ATTENTION: attention across a gap is not observed");
    return {};
}

Status Pool::shift(ta_seq seq, int64_t first, int64_t n) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> forgotten;  // freed after the lock
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

Status Pool::release(ta_seq seq) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> dropped;  // after the lock
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    release_locked(*found.value(), dropped);
    return {};
}

// A plan that has it reads and writes its blocks until it ends, on a GPU behind the kernels that it has enqueued.
void Pool::release_locked(Sequence& s, std::vector<BlockPtr>& dropped) {
    if (s.in_plan) {
        s.released = true;
    } else {
        end_locked(s, dropped);
    }
}

void Pool::end_locked(Sequence& s, std::vector<BlockPtr>& dropped) {
    s.alive = s.released = false;
    s.length = 0;
    s.promised_tokens = 0;
    blocks().settle(s.promise, {});
    s.blocks.swap(dropped);
    s.partition.reset();
    s.gaps.clear();
    give_slot(s);
}

Status Pool::set_priority(ta_seq seq, int32_t priority) {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    found.value()->priority = priority;
    return {};
}

Result<int64_t> Pool::length(ta_seq seq) const {
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(check_open());
    Result<Sequence*> found = find(seq);
    if (!found.ok()) return std::move(found).status();
    return found.value()->length;
}

Status Pool::verify(ta_seq seq) {
    const Residency::BlockHold hold(residency_);
    // The blocks are held, so that hashing them needs no lock.
    std::vector<BlockPtr> held;
    TA_RETURN_IF_ERROR(inspect(seq, [&](const Sequence& s) {
        held = s.blocks;
        // A block that is not full may be reopened by the next plan while its hashes are computed.
        if (!held.empty() && s.length % kPageTokens != 0 && !held.back()->sealed()) held.pop_back();
        return Status();
    }));
    Device* device = context_->device();
    const ReadingBlocks reading(residency_.store());
    std::vector<PlacedBlock> on_device;
    for (size_t b = 0; b < held.size(); ++b) {
        if (!held[b]->sealed()) continue;
        const Place at = blocks().place_of(*held[b]);
        if (at.tier == TierKind::kDisk) {
            TA_RETURN_IF_ERROR(reader().read(*held[b], b, nullptr));
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

Result<std::vector<Sequence*>> Pool::lock_for_plan(std::span<const ta_seq> seqs) {
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

void Pool::forget_use(std::span<Sequence* const> seqs) {
    std::lock_guard lock(mutex_);
    for (Sequence* s : seqs) {
        s->last_used = s->used_before;
        s->last_used_at = s->used_before_at;
    }
}

void Pool::unlock_for_plan(std::vector<Sequence*>& seqs) {
    const size_t n = seqs.size();
    std::unique_lock lock(mutex_);
    // A sequence that is not released may be another's as soon as the lock is open.
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

void Pool::trim_if_closed() {
    if (closed_) blocks().trim();
}

void Pool::visit(const std::function<void(const Resident&)>& see) const {
    for (const auto& s : sequences_) {
        if (s->alive) see(*s);
    }
}

void Pool::add_attention(uint32_t slot, uint32_t generation, std::span<const float> weights, float each, uint32_t at) {
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

void Pool::add_attention_source(AttentionSource* source) {
    std::lock_guard lock(sources_mutex_);
    sources_.push_back(source);
}

void Pool::remove_attention_source(AttentionSource* source) {
    std::lock_guard lock(sources_mutex_);
    std::erase(sources_, source);
}

void Pool::take_in_attention(bool wait) {
    std::lock_guard lock(sources_mutex_);
    for (AttentionSource* source : sources_) source->take_in(wait);
}

// Blocks that may move to `to`: full ones, and to the disk none that were promised to stay in memory that the device reads.
Result<std::vector<MoveRequest>> Pool::movable_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to) const {
    std::vector<MoveRequest> items;
    Status found = inspect(seq, [&](const Sequence& s) -> Status {
        TA_RETURN_IF_ERROR(check_range(s, first, n));
        items.reserve(n);
        for (uint64_t b = first; b < first + n; ++b) {
            const BlockPtr& block = s.blocks[size_t(b)];
            const bool stays = to == TierKind::kDisk && s.stays_readable();
            items.push_back(block->sealed() && !stays ? MoveRequest(block, b) : MoveRequest(b));
        }
        return {};
    });
    if (!found.ok()) return found;
    return items;
}

Result<uint64_t> Pool::move_blocks(ta_seq seq, uint64_t first, uint64_t n, TierKind to, MoveReason reason) {
    if (to != TierKind::kDevice && !residency_.tier(to))
        return fail(TA_E_UNSUPPORTED, "the pool has no %s tier", name_of(to)).argument(4);
    Result<std::vector<MoveRequest>> items = movable_blocks(seq, first, n, to);
    if (!items.ok()) return std::move(items).status();
    if (!mover()) return fail(TA_E_UNSUPPORTED, "the pool has no tier below the device").argument(0);
    Result<uint64_t> ticket = mover()->submit(items.take(), to, reason);
    if (!ticket.ok() || to != TierKind::kDevice) return ticket;
    // The caller is about to use these blocks: evictions that make room for them, or that come later, take other blocks first.
    std::lock_guard lock(mutex_);
    if (Result<Sequence*> s = find(seq); s.ok()) s.value()->last_used = ++uses_;
    return ticket;
}

Status Pool::lacks_block(const BlockPtr& block) const {
    return fail(TA_E_STATE, "the block %s", block == blocks().absent() ? "is another rank's" : "was dropped");
}

// `cut`: blocks that a truncate has cut count as full.
Status Pool::check_full(const Sequence& s, uint64_t first, uint64_t n, bool cut) const {
    TA_RETURN_IF_ERROR(check_range(s, first, n));
    for (uint64_t b = first; b < first + n; ++b) {
        const BlockPtr& block = s.blocks[size_t(b)];
        if (block->dropped()) return lacks_block(block).block(int64_t(b));
        if (!block->sealed() || (!cut && b >= uint64_t(s.length) / kPageTokens))
            return fail(TA_E_STATE, "the block is not full yet").block(int64_t(b));
    }
    return {};
}

Status Pool::retain(ta_seq seq, uint64_t first, uint64_t n, Retention retention) {
    return inspect(seq, [&](const Sequence& s) -> Status {
        TA_RETURN_IF_ERROR(check_full(s, first, n, false));
        blocks().retain({s.blocks.data() + first, size_t(n)}, retention);
        return {};
    });
}

Status Pool::pin_blocks(ta_seq seq, uint64_t first, uint64_t n, bool pinned) {
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

Pool::SequenceStats Pool::sequence_stats() const {
    SequenceStats r;
    std::vector<const Block*> shared;  // only to tell them apart: they may be gone when they are counted
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
