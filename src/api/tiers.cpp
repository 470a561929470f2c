#include <cstdio>
#include <string>

#include "src/api/api.h"
#include "src/core/text.h"

using namespace ta;
using namespace ta::api;

namespace {

Result<TierKind> read_tier(ta_tier tier, int argument) {
    for (size_t t = 0; t < kTiers; ++t) {
        if (code_of(TierKind(t)) == tier) return TierKind(t);
    }
    return fail(TA_E_INVALID, "tier is %d, no value of ta_tier", int(tier)).argument(argument);
}

// The two sources of a pool's tickets: its mover, and its loads from block stores.
struct TicketsOf {
    Mover* mover;
    store::Tickets* loads;
};

// TA_E_UNSUPPORTED: the pool has neither source.
Result<TicketsOf> tickets_of(const ta_kv_pool* pool) {
    TA_RETURN_IF_ERROR(check_pool(pool));
    TA_RETURN_IF_ERROR(pool->impl->check_open());
    const TicketsOf of{pool->impl->mover(), pool->stores->used() ? &pool->stores->tickets() : nullptr};
    if (of.mover || of.loads) return of;
    return fail(TA_E_UNSUPPORTED, "the pool has no tier below the device, and no namespace had a store").argument(0);
}

// The same for one ticket: only the source that issued it is set.
Result<TicketsOf> tickets_of(const ta_kv_pool* pool, ta_ticket ticket) {
    Result<TicketsOf> of = tickets_of(pool);
    if (!of.ok()) return of;
    TicketsOf& t = of.value();
    const bool load = !t.mover || (t.loads && store::Stores::is_ticket(ticket));
    return TicketsOf{load ? nullptr : t.mover, load ? t.loads : nullptr};
}

Status write_info(const MoveProgress& p, ta_move_info* info, int argument) {
    ta_move_info r{};
    r.state = p.state;
    r.blocks = p.blocks;
    r.moved = p.moved;
    r.present = p.present;
    r.skipped = p.skipped;
    r.failed = p.failed;
    r.status = p.status.code();
    r.block = p.status.detail() ? p.status.detail()->block : -1;
    return write_struct(r, info, "info", argument);
}

// Blocks [first, first + n) of a sequence.
struct BlockRange {
    ta_seq seq;
    uint64_t first, n;
};

ta_status move(ta_kv_pool* pool, const BlockRange& blocks, ta_tier tier, MoveReason reason, ta_ticket* out, int out_argument,
               ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", out_argument));
        Result<TierKind> to = read_tier(tier, 4);
        if (!to.ok()) return std::move(to).status();
        Result<uint64_t> ticket = pool->impl->sequences().move_blocks(blocks.seq, blocks.first, blocks.n, to.value(), reason);
        if (!ticket.ok()) return std::move(ticket).status();
        *out = ticket.value();
        return {};
    });
}

void fill_device_usage(const BlockStore& store, ta_tier_stats& r) {
    const BlockStore::Usage usage = store.usage();
    r.bytes_budget = store.budget();
    r.bytes_used = usage.used;
    r.bytes_free = r.bytes_budget - usage.used;
    r.fragmentation = store.fragmentation();
    r.token_blocks = usage.token_blocks;
    r.channel_blocks = usage.channel_blocks;
    r.low_blocks = usage.low_blocks;
    r.passed_blocks = usage.passed_blocks;
}

static_assert(int(TierState::kOk) == TA_TIER_OK && int(TierState::kReadOnly) == TA_TIER_READ_ONLY &&
              int(TierState::kFailed) == TA_TIER_FAILED);

// Fills in the usage of a tier below the device.
void fill_tier_usage(const Tier& tier, ta_tier_stats& r) {
    const TierStats s = tier.stats();
    const TierHealth health = tier.health();
    r.state = int32_t(health.state);
    r.bytes_budget = s.budget;
    r.bytes_used = s.used;
    r.bytes_free = s.free;
    r.largest_free = s.largest_free;
    r.fragmentation = s.fragmentation;
    r.token_blocks = s.slots_used[size_t(PageKind::kToken)];
    r.channel_blocks = s.slots_used[size_t(PageKind::kChannel)];
    r.low_blocks = s.slots_used[size_t(PageKind::kLow)];
    r.passed_blocks = s.slots_used[size_t(PageKind::kPassedToken)] + s.slots_used[size_t(PageKind::kPassedChannel)];
    r.requests_failed = s.failed + s.stalled;
    r.requests_corrupt = s.corrupt;
    r.requests_queued = s.queued + s.in_flight;
    std::string reason = health.reason;
    for (const std::string& missing : tier.degraded()) reason += (reason.empty() ? "" : "; ") + missing;
    std::snprintf(r.reason, sizeof r.reason, "%s", reason.c_str());
    make_plain(r.reason);
}

void fill_moves(const MoveCounters& c, TierKind kind, ta_tier_stats& r) {
    const auto i = size_t(kind);
    r.evicted_blocks = c.evicted[i];
    r.fallen_blocks = c.fallen[i];
    r.evicted_age_seconds = c.evicted_age[i];
    r.blocks_in = c.blocks_in[i];
    r.blocks_out = c.blocks_out[i];
    r.bytes_in = c.bytes_in[i];
    r.bytes_out = c.bytes_out[i];
}

// Fills in how often the pool's steps waited, and how much they staged.
void fill_steps(const Pool& pool, ta_move_stats& r) {
    const Pool::Counters& c = pool.counters();
    const Residency::Counters& room = pool.residency().counters();
    r.waits_for_room = room.waits_for_room;
    r.waits_for_blocks = room.waits_for_blocks;
    r.dropped_blocks = room.dropped_blocks;
    r.host_steps = room.host_steps;
    r.staged_steps = c.staged_steps;
    r.staged_pages = c.staged_pages;
    r.staged_bytes = c.staged_bytes;
    r.wait_seconds = 1e-9 * double(room.wait_nanoseconds.load());
    const BlockStore::PrefetchCounters& prefetches = pool.blocks().prefetches();
    r.prefetch_used = prefetches.used;
    r.prefetch_late = prefetches.late;
    r.prefetch_wasted = prefetches.wasted;
}

// `device`: of the pool; nullptr on a CPU.
void fill_moves(const Mover& mover, const Device* device, ta_move_stats& r) {
    const MoveCounters c = mover.counters();
    r.queued_tickets = mover.queued();
    r.failed_blocks = c.failed;
    r.corrupt_blocks = c.corrupt;
    r.bytes_asked = c.bytes_by_reason[size_t(MoveReason::kAsked)];
    r.bytes_prefetched = c.bytes_by_reason[size_t(MoveReason::kPrefetch)];
    r.bytes_needed = c.bytes_by_reason[size_t(MoveReason::kNeeded)];
    r.bytes_evicted = c.bytes_by_reason[size_t(MoveReason::kEviction)];
    r.bytes_by_copy_engine = c.bytes_by_engine;
    r.bytes_by_kernel = c.bytes_by_kernel;
    if (!device) return;
    const MoveCrossover crossover = device->move_crossover();
    r.copy_engine_from_down = crossover.to_host;
    r.copy_engine_from_up = crossover.to_device;
}

Result<Retention> read_retention(const ta_retention* given, int argument) {
    if (!given) return Retention();
    Result<ta_retention> read = read_struct(given, "retention", argument);
    if (!read.ok()) return std::move(read).status();
    const ta_retention& r = read.value();
    if (r.priority > kMostPriority)
        return fail(TA_E_INVALID, "retention.priority is %u; it takes 1..%u", r.priority, kMostPriority).argument(argument);
    if (r.duration_ms < 0 || r.duration_ms > int64_t{1} << 53) {
        return fail(TA_E_INVALID, "retention.duration_ms is %lld; it takes 0 to 2^53", (long long)r.duration_ms)
            .argument(argument);
    }
    return Retention(r.priority > 0 ? r.priority : kUsualPriority,
                     r.duration_ms > 0 ? retention_now() + uint64_t(r.duration_ms) : Retention::kForEver);
}

ta_block_info describe_block(const Pool& p, const Sequence& s, size_t index, uint64_t now) {
    const BlockPtr& b = s.blocks[index];
    ta_block_info r{};
    r.priority = kUsualPriority;
    r.retained_ms = -1;
    if (b->dropped()) {
        r.flags = b == p.blocks().absent() ? TA_BLOCK_ABSENT : TA_BLOCK_DROPPED;
        return r;
    }
    const PageKind kind = b->kind();
    r.tier = code_of(b->tier());
    r.bytes = p.geometry().slot_bytes(kind);
    r.owners = uint32_t(b.use_count());
    r.pins = b->pins();
    r.flags = (b->sealed() && index < size_t(s.length / kPageTokens) ? 0 : TA_BLOCK_OPEN) |
              (is_passed(kind) ? TA_BLOCK_PASSED : 0) | (b->entries() > 0 ? TA_BLOCK_PUBLISHED : 0);
    const Retention retention = b->retention();
    r.priority = retention.priority(now);
    if (retention.given() && retention.until() > now && retention.until() != Retention::kForEver)
        r.retained_ms = int64_t(retention.until() - now);
    return r;
}

// Writes tell(pool, sequence, block) for blocks [first, first + n) to `out`.
template <class T, class Tell>
ta_status list_blocks(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, T* out, ta_error* err, Tell&& tell) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_aligned(out, "out", 4));
        if (n > 0) TA_RETURN_IF_ERROR(check_pointer(out, "out", 4));
        const Pool& p = *pool->impl;
        return p.sequences().inspect(seq, [&](const Sequence& s) -> Status {
            TA_RETURN_IF_ERROR(p.sequences().check_range(s, first, n));
            for (uint64_t b = first; b < first + n; ++b) out[b - first] = tell(p, s, size_t(b));
            return {};
        });
    });
}

Result<ta_memory_range> memory_of(const Pool& pool, TierKind kind) {
    const Residency& residency = pool.residency();
    const Device* device = pool.context().device();
    std::span<uint8_t> memory;
    if (kind == TierKind::kDevice) {
        if (!device) return fail(TA_E_UNSUPPORTED, "tier: the device tier of a CPU has no memory that stays");
        const DeviceRange slab = pool.blocks().device_memory();
        memory = {slab.memory, slab.bytes};
    } else {
        const Tier* const tier = residency.tier(kind);
        if (!tier) return fail(TA_E_UNSUPPORTED, "tier: the pool has no such tier");
        memory = tier->range();
        if (memory.empty()) return fail(TA_E_UNSUPPORTED, "tier: the disk tier is no memory");
        device = kind == TierKind::kPeer ? pool.tier_settings().peer->device() : nullptr;
    }
    return ta_memory_range{0, device ? device->ordinal() : -1, memory.data(), memory.size()};
}

}  // namespace

extern "C" {

ta_status ta_seq_move(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_tier tier, ta_ticket* out, ta_error* err) {
    return move(pool, {seq, first, n}, tier, MoveReason::kAsked, out, 5, err);
}

ta_status ta_seq_prefetch(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_ticket* out, ta_error* err) {
    return move(pool, {seq, first, n}, TA_TIER_DEVICE, MoveReason::kPrefetch, out, 4, err);
}

ta_status ta_seq_pin(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().pin_blocks(seq, first, n, true);
    });
}

ta_status ta_seq_unpin(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        return pool->impl->sequences().pin_blocks(seq, first, n, false);
    });
}

ta_status ta_seq_retain(ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, const ta_retention* retention,
                        ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        Result<Retention> read = read_retention(retention, 4);
        if (!read.ok()) return std::move(read).status();
        return pool->impl->sequences().retain(seq, first, n, read.value());
    });
}

ta_status ta_seq_describe_blocks(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, ta_block_info* out,
                                 ta_error* err) {
    const uint64_t now = retention_now();
    return list_blocks(pool, seq, first, n, out, err,
                       [now](const Pool& p, const Sequence& s, size_t b) { return describe_block(p, s, b, now); });
}

ta_status ta_kv_pool_get_memory(const ta_kv_pool* pool, ta_tier tier, ta_memory_range* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        Result<TierKind> kind = read_tier(tier, 1);
        if (!kind.ok()) return std::move(kind).status();
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        TA_RETURN_IF_ERROR(pool->impl->check_open());
        Result<ta_memory_range> range = memory_of(*pool->impl, kind.value());
        if (!range.ok()) return std::move(range).status().argument(1);
        return write_struct(range.value(), out, "out", 2);
    });
}

ta_status ta_seq_locate_blocks(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, const void** out,
                               ta_error* err) {
    return list_blocks(pool, seq, first, n, out, err, [](const Pool& p, const Sequence& s, size_t b) -> const void* {
        return p.blocks().place_of(*s.blocks[b]).address;
    });
}

ta_status ta_move_query(const ta_kv_pool* pool, ta_ticket ticket, ta_move_info* info, ta_error* err) {
    return guard(err, [&]() -> Status {
        Result<TicketsOf> of = tickets_of(pool, ticket);
        if (!of.ok()) return std::move(of).status();
        TA_RETURN_IF_ERROR(check_pointer(info, "info", 2));
        const auto [mover, loads] = of.value();
        Result<MoveProgress> progress = loads ? loads->wait(ticket, 0) : mover->query(ticket);
        if (!progress.ok()) return std::move(progress).status().argument(1);
        return write_info(progress.value(), info, 2);
    });
}

ta_status ta_move_wait(const ta_kv_pool* pool, ta_ticket ticket, int64_t nanoseconds, ta_move_info* info, ta_error* err) {
    return guard(err, [&]() -> Status {
        Result<TicketsOf> of = tickets_of(pool, ticket);
        if (!of.ok()) return std::move(of).status();
        TA_RETURN_IF_ERROR(check_pointer(info, "info", 3));
        TA_RETURN_IF_ERROR(check_struct_size(info, "info", 3));  // checked before the wait
        const auto [mover, loads] = of.value();
        Result<MoveProgress> progress = loads ? loads->wait(ticket, nanoseconds) : mover->wait(ticket, nanoseconds);
        if (!progress.ok()) return std::move(progress).status().argument(1);
        return write_info(progress.value(), info, 3);
    });
}

ta_status ta_kv_pool_descriptor(ta_kv_pool* pool, int32_t* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        Result<TicketsOf> of = tickets_of(pool);
        if (!of.ok()) return std::move(of).status();
        const auto [mover, loads] = of.value();
        Result<int> descriptor = mover ? mover->finished_descriptor() : loads->descriptor();
        if (!descriptor.ok()) return std::move(descriptor).status();
        *out = descriptor.value();
        return {};
    });
}

ta_status ta_move_take_finished(ta_kv_pool* pool, ta_ticket* out, uint64_t most, uint64_t* n, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_aligned(out, "out", 1));
        if (most > 0) TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        TA_RETURN_IF_ERROR(check_pointer(n, "n", 3));
        Result<TicketsOf> of = tickets_of(pool);
        if (!of.ok()) return std::move(of).status();
        const auto [mover, loads] = of.value();
        Result<uint64_t> taken = mover ? mover->take_finished({out, most}) : loads->take_finished({out, most});
        if (!taken.ok()) return std::move(taken).status();
        *n = taken.value();
        return {};
    });
}

ta_status ta_seq_suspend(ta_kv_pool* pool, ta_seq seq, ta_tier tier, ta_ticket* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 3));
        Result<TierKind> to = read_tier(tier, 2);
        if (!to.ok()) return std::move(to).status();
        Result<uint64_t> ticket = pool->impl->sequences().suspend(seq, to.value());
        if (!ticket.ok()) return std::move(ticket).status();
        *out = ticket.value();
        return {};
    });
}

ta_status ta_move_cancel(ta_kv_pool* pool, ta_ticket ticket, ta_error* err) {
    return guard(err, [&]() -> Status {
        Result<TicketsOf> of = tickets_of(pool, ticket);
        if (!of.ok()) return std::move(of).status();
        const auto [mover, loads] = of.value();
        Status s = loads ? loads->cancel(ticket) : mover->cancel(ticket);
        return s.ok() ? std::move(s) : std::move(s).argument(1);
    });
}

ta_status ta_seq_residency(const ta_kv_pool* pool, ta_seq seq, ta_residency* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        const Geometry& g = pool->impl->geometry();
        ta_residency r{};
        TA_RETURN_IF_ERROR(pool->impl->sequences().inspect(seq, [&](const Sequence& s) {
            uint64_t* const blocks[] = {&r.device_blocks, &r.peer_blocks, &r.host_blocks, &r.disk_blocks};
            uint64_t* const bytes[] = {&r.device_bytes, &r.peer_bytes, &r.host_bytes, &r.disk_bytes};
            const BlockPtr& absent = pool->impl->blocks().absent();
            for (const BlockPtr& b : s.blocks) {
                if (b->dropped()) {
                    r.dropped_blocks += b != absent;
                    continue;
                }
                const auto tier = size_t(b->tier());
                ++*blocks[tier];
                *bytes[tier] += g.slot_bytes(b->kind());
                r.pinned_blocks += b->pins() > 0;
            }
            return Status();
        }));
        return write_struct(r, out, "out", 2);
    });
}

ta_status ta_kv_pool_get_tier_stats(const ta_kv_pool* pool, ta_tier tier, ta_tier_stats* stats, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(stats, "stats", 2));
        const Pool& p = *pool->impl;
        TA_RETURN_IF_ERROR(p.check_open());
        Result<TierKind> kind = read_tier(tier, 1);
        if (!kind.ok()) return std::move(kind).status();
        ta_tier_stats r{};
        if (kind.value() == TierKind::kDevice) {
            fill_device_usage(p.blocks(), r);
        } else {
            const Tier* t = p.residency().tier(kind.value());
            if (!t) return fail(TA_E_UNSUPPORTED, "the pool has no %s tier", name_of(kind.value())).argument(1);
            fill_tier_usage(*t, r);
            if (kind.value() == TierKind::kDisk) r.requests_corrupt += p.refused_records();
        }
        r.blocks = r.token_blocks + r.channel_blocks + r.low_blocks + r.passed_blocks;
        const auto i = size_t(kind.value());
        r.hits = p.residency().counters().hits[i];
        r.misses = p.residency().counters().absent[i];
        r.misses_failed = p.residency().counters().failed[i];
        if (const Mover* mover = p.mover()) fill_moves(mover->counters(), kind.value(), r);
        return write_struct(r, stats, "stats", 2);
    });
}

ta_status ta_kv_pool_get_move_stats(const ta_kv_pool* pool, ta_move_stats* stats, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(stats, "stats", 1));
        const Pool& p = *pool->impl;
        TA_RETURN_IF_ERROR(p.check_open());
        ta_move_stats r{};
        fill_steps(p, r);
        if (const Mover* mover = p.mover()) fill_moves(*mover, p.context().device(), r);
        return write_struct(r, stats, "stats", 1);
    });
}

}  // extern "C"
