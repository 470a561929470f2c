// The statistics of a pool as text. Each value is listed once, with its type and help, and can be written in either format.
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

// The shortest text that reads back as the same value, whatever the locale of the process.
struct Number {
    explicit Number(double x) {
        char* const end = text + sizeof text - 1;
        const bool whole = std::abs(x) < 0x1p53 && x == std::trunc(x);
        *(whole ? std::to_chars(text, end, int64_t(x)) : std::to_chars(text, end, x)).ptr = '\0';
    }
    char text[32];
};

class Writer {
  public:
    explicit Writer(bool json) : json_(json) {}

    // Begins a metric: one value follows, or one for each label.
    void family(const char* name, const char* type, const char* help) {
        name_ = name;
        counter_ = std::string(type) == "counter";
        if (!json_) {
            add("# TYPE ta_%s %s\n# HELP ta_%s %s\n", name, type, name, help);
            return;
        }
        if (in_family_) text_ += '}';
        add("%s\"%s\": {", in_family_ ? ", " : "{", name);
        in_family_ = true;
        first_ = true;
    }
    void value(double x, const char* label = nullptr, const char* of = nullptr) {
        const Number number(x);
        if (json_) {
            add("%s\"%s\": %s", first_ ? "" : ", ", of ? of : "value", number.text);
        } else if (label) {
            add("ta_%s%s{%s=\"%s\"} %s\n", name_, counter_ ? "_total" : "", label, of, number.text);
        } else {
            add("ta_%s%s %s\n", name_, counter_ ? "_total" : "", number.text);
        }
        first_ = false;
    }
    // Bucket i counts values up to 2^i microseconds that no earlier bucket counts.
    template <size_t N>
    void histogram(const uint64_t (&buckets)[N], double sum, const char* of) {
        if (json_) {
            add("%s\"%s\": {\"sum\": %s, \"buckets\": [", first_ ? "" : ", ", of, Number(sum).text);
            for (size_t i = 0; i < N; ++i) add("%s%" PRIu64, i ? ", " : "", buckets[i]);
            text_ += "]}";
        } else {
            uint64_t n = 0;
            for (size_t i = 0; i < N; ++i) {
                n += buckets[i];
                if (i + 1 < N) {
                    const Number bound(double(uint64_t{1} << i) / 1e6);
                    add("ta_%s_bucket{tier=\"%s\",le=\"%s\"} %" PRIu64 "\n", name_, of, bound.text, n);
                } else {
                    add("ta_%s_bucket{tier=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name_, of, n);
                }
            }
            add("ta_%s_count{tier=\"%s\"} %" PRIu64 "\nta_%s_sum{tier=\"%s\"} %s\n", name_, of, n, name_, of, Number(sum).text);
        }
        first_ = false;
    }
    std::string finish() {
        text_ += json_ ? "}}\n" : "# EOF\n";
        return std::move(text_);
    }

  private:
    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        char line[512];
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(line, sizeof line, format, arguments);
        va_end(arguments);
        text_ += line;
    }

    const bool json_;
    bool in_family_ = false, first_ = true, counter_ = false;
    const char* name_ = "";
    std::string text_;
};

template <class Stats>
struct Metric {
    const char *name, *type, *help;
    double (*of)(const Stats& s);
};
constexpr Metric<ta_kv_pool_stats> kPoolMetrics[] = {
    {"sequences", "gauge", "Sequences that are alive.", [](auto& s) { return double(s.sequences); }},
    {"tokens", "gauge", "Sum of the lengths of all sequences.", [](auto& s) { return double(s.tokens); }},
    {"shared_blocks", "gauge", "Blocks with more than one owner.", [](auto& s) { return double(s.shared_blocks); }},
    {"cached_bytes", "gauge", "Bytes of freed blocks kept for reuse.", [](auto& s) { return double(s.bytes_cached); }},
    {"peak_bytes", "gauge", "Most bytes of blocks that were in use.", [](auto& s) { return double(s.bytes_peak); }},
    {"free_bytes", "gauge", "Bytes of the device tier that a step's new blocks can have at once.",
     [](auto& s) { return double(s.bytes_free); }},
    {"reclaimable_bytes", "gauge", "Bytes that they can have after blocks have left the device tier.",
     [](auto& s) { return double(s.bytes_reclaimable); }},
    {"promised_bytes", "gauge", "Bytes that are set aside for sequences that have reservations.",
     [](auto& s) { return double(s.bytes_promised); }},
    {"appended_tokens", "counter", "Tokens appended.", [](auto& s) { return double(s.appended_tokens); }},
    {"closed_pages", "counter", "Pages encoded to 4 or 2 bits.", [](auto& s) { return double(s.closed_pages); }},
    {"reopened_blocks", "counter", "Closed blocks turned back into open ones.",
     [](auto& s) { return double(s.reopened_blocks); }},
    {"copied_blocks", "counter", "Blocks copied on write.", [](auto& s) { return double(s.copied_blocks); }},
    {"saturated_values", "counter", "Non-finite inputs replaced.", [](auto& s) { return double(s.saturated_values); }},
    {"clamped_values", "counter", "Values cut off by a universal scale.", [](auto& s) { return double(s.clamped_values); }},
};

constexpr Metric<ta_tier_stats> kTierMetrics[] = {
    {"tier_budget_bytes", "gauge", "Byte budget of a tier.", [](auto& s) { return double(s.bytes_budget); }},
    {"tier_used_bytes", "gauge", "Bytes of blocks in a tier.", [](auto& s) { return double(s.bytes_used); }},
    {"tier_free_bytes", "gauge", "Bytes of a tier that no block has.", [](auto& s) { return double(s.bytes_free); }},
    {"tier_largest_free_bytes", "gauge", "Longest run of free bytes in a tier; 0 where it is not known.",
     [](auto& s) { return double(s.largest_free); }},
    {"tier_blocks", "gauge", "Blocks in a tier.", [](auto& s) { return double(s.blocks); }},
    {"tier_blocks_of_8_bits", "gauge", "Token blocks in a tier.", [](auto& s) { return double(s.token_blocks); }},
    {"tier_blocks_of_low_bits", "gauge", "Blocks in a tier that precision fell to 2 bits of.",
     [](auto& s) { return double(s.low_blocks); }},
    {"tier_passed_blocks", "gauge", "Blocks in a tier that windows have passed.",
     [](auto& s) { return double(s.passed_blocks); }},
    {"tier_fallen_blocks", "counter", "Blocks that came into a tier with fewer bits than they had.",
     [](auto& s) { return double(s.fallen_blocks); }},
    {"tier_state", "gauge", "0: ok, 1: read-only, 2: failed.", [](auto& s) { return double(s.state); }},
    {"tier_requests_queued", "gauge", "Reads and writes of a disk that are not finished.",
     [](auto& s) { return double(s.requests_queued); }},
    {"tier_in_blocks", "counter", "Blocks moved into a tier.", [](auto& s) { return double(s.blocks_in); }},
    {"tier_out_blocks", "counter", "Blocks moved out of a tier.", [](auto& s) { return double(s.blocks_out); }},
    {"tier_in_bytes", "counter", "Bytes moved into a tier.", [](auto& s) { return double(s.bytes_in); }},
    {"tier_out_bytes", "counter", "Bytes moved out of a tier.", [](auto& s) { return double(s.bytes_out); }},
    {"tier_requests_failed", "counter", "Reads and writes of a disk that failed, or did not end in time.",
     [](auto& s) { return double(s.requests_failed); }},
    {"tier_requests_corrupt", "counter", "Reads of a disk that found what does not match its hash.",
     [](auto& s) { return double(s.requests_corrupt); }},
    {"tier_fragmentation_ratio", "gauge", "Share of the free bytes that the block size which fits worst cannot use.",
     [](auto& s) { return s.fragmentation; }},
    {"tier_hits", "counter", "Blocks of steps that were in a tier when the step began.",
     [](auto& s) { return double(s.hits); }},
    {"tier_misses_absent", "counter", "Blocks of steps that were in a slower tier.", [](auto& s) { return double(s.misses); }},
    {"tier_misses_failed", "counter", "Blocks of steps that were in a tier but could not be brought up.",
     [](auto& s) { return double(s.misses_failed); }},
    {"tier_evicted_blocks", "counter", "Blocks that left a tier to make room.",
     [](auto& s) { return double(s.evicted_blocks); }},
    {"tier_evicted_age_seconds", "counter", "Time since the last step of evicted blocks' sequences, summed.",
     [](auto& s) { return s.evicted_age_seconds; }},
};

constexpr Metric<ta_move_stats> kMoveMetrics[] = {
    {"moves_queued", "gauge", "Tickets of moves that are not finished.", [](auto& s) { return double(s.queued_tickets); }},
    {"moves_failed_blocks", "counter", "Blocks that could not move, but for lack of room.",
     [](auto& s) { return double(s.failed_blocks); }},
    {"moves_corrupt_blocks", "counter", "Blocks that did not match their hashes where they lay.",
     [](auto& s) { return double(s.corrupt_blocks); }},
    {"prefetch_used", "counter", "Prefetched blocks that a step then found.", [](auto& s) { return double(s.prefetch_used); }},
    {"prefetch_late", "counter", "Prefetched blocks that a step wanted before they came.",
     [](auto& s) { return double(s.prefetch_late); }},
    {"prefetch_wasted", "counter", "Prefetched blocks that left again, or were released, unused.",
     [](auto& s) { return double(s.prefetch_wasted); }},
    {"begin_waits_for_room", "counter", "Begins that waited for blocks to leave.",
     [](auto& s) { return double(s.waits_for_room); }},
    {"begin_waits_for_blocks", "counter", "Begins that waited for blocks to come from disk.",
     [](auto& s) { return double(s.waits_for_blocks); }},
    {"dropped_blocks", "counter", "Blocks that were dropped because no tier had room.",
     [](auto& s) { return double(s.dropped_blocks); }},
    {"host_steps", "counter", "Steps that read blocks in host memory.", [](auto& s) { return double(s.host_steps); }},
    {"staged_steps", "counter", "Those of them that copied pages to the device layer by layer.",
     [](auto& s) { return double(s.staged_steps); }},
    {"staged_pages", "counter", "Pages that were copied so.", [](auto& s) { return double(s.staged_pages); }},
    {"staged_bytes", "counter", "Their bytes.", [](auto& s) { return double(s.staged_bytes); }},
    {"begin_wait_seconds", "counter", "Time that begins waited, summed.", [](auto& s) { return s.wait_seconds; }},
};

constexpr Metric<NamespaceStats> kNamespaceMetrics[] = {
    {"namespace_entries", "gauge", "Published blocks of a namespace.", [](auto& s) { return double(s.entries); }},
    {"namespace_bytes", "gauge", "Their bytes.", [](auto& s) { return double(s.bytes); }},
    {"namespace_quota_bytes", "gauge", "Limit of them; 0: none.", [](auto& s) { return double(s.quota); }},
    {"namespace_shared_bytes", "gauge", "Bytes of published blocks that sequences have.",
     [](auto& s) { return double(s.bytes_shared); }},
    {"namespace_hits", "counter", "Keys asked for and found.", [](auto& s) { return double(s.hits); }},
    {"namespace_misses", "counter", "Keys asked for and not found.", [](auto& s) { return double(s.misses); }},
    {"namespace_published", "counter", "Blocks published.", [](auto& s) { return double(s.published); }},
    {"namespace_evicted", "counter", "Published blocks dropped for room or quota.", [](auto& s) { return double(s.evicted); }},
};

constexpr Metric<ta_store_stats> kStoreMetrics[] = {
    {"store_puts", "counter", "Blocks put to the store of a namespace.", [](auto& s) { return double(s.puts); }},
    {"store_puts_present", "counter", "Blocks that the store had already.", [](auto& s) { return double(s.puts_present); }},
    {"store_put_failures", "counter", "Attempts to put a block that failed.", [](auto& s) { return double(s.put_failures); }},
    {"store_hits", "counter", "Blocks that loads brought.", [](auto& s) { return double(s.hits); }},
    {"store_misses", "counter", "Blocks that loads asked for and did not get.", [](auto& s) { return double(s.misses); }},
    {"store_refused", "counter", "Values that were not what they should be.", [](auto& s) { return double(s.refused); }},
    {"store_put_bytes", "counter", "Bytes put.", [](auto& s) { return double(s.bytes_put); }},
    {"store_got_bytes", "counter", "Bytes brought.", [](auto& s) { return double(s.bytes_got); }},
    {"store_calls", "counter", "Calls of the store's functions.", [](auto& s) { return double(s.calls); }},
    {"store_calls_failed", "counter", "Calls that returned an error.", [](auto& s) { return double(s.calls_failed); }},
    {"store_timeouts", "counter", "Calls that did not return in time.", [](auto& s) { return double(s.timeouts); }},
    {"store_waiting", "gauge", "Published blocks that are still to be put.", [](auto& s) { return double(s.waiting); }},
    {"store_pausing", "gauge", "1: the store failed and is asked again after a pause.",
     [](auto& s) { return double(s.pausing); }},
};

Status write_all(const ta_kv_pool* pool, Writer& w) {
    ta_error error{};
    ta_kv_pool_stats s{};
    s.struct_size = sizeof s;
    if (ta_kv_pool_get_stats(pool, &s, &error) != TA_OK) return fail(error.code, "%s", error.message);
    ta_tier_stats tiers[kTiers]{};
    bool has[kTiers];
    for (size_t t = 0; t < kTiers; ++t) {
        tiers[t].struct_size = sizeof tiers[t];
        has[t] = ta_kv_pool_get_tier_stats(pool, code_of(TierKind(t)), &tiers[t], &error) == TA_OK;
    }
    ta_move_stats moves{};
    moves.struct_size = sizeof moves;
    if (ta_kv_pool_get_move_stats(pool, &moves, &error) != TA_OK) return fail(error.code, "%s", error.message);
    for (const Metric<ta_kv_pool_stats>& m : kPoolMetrics) {
        w.family(m.name, m.type, m.help);
        w.value(m.of(s));
    }
    for (const Metric<ta_tier_stats>& m : kTierMetrics) {
        w.family(m.name, m.type, m.help);
        for (size_t t = 0; t < kTiers; ++t) {
            if (has[t]) w.value(m.of(tiers[t]), "tier", name_of(TierKind(t)));
        }
    }
    for (const Metric<ta_move_stats>& m : kMoveMetrics) {
        w.family(m.name, m.type, m.help);
        w.value(m.of(moves));
    }
    w.family("moved_bytes", "counter", "Bytes moved, by what for.");
    w.value(double(moves.bytes_asked), "reason", "asked");
    w.value(double(moves.bytes_prefetched), "reason", "prefetch");
    w.value(double(moves.bytes_needed), "reason", "needed");
    w.value(double(moves.bytes_evicted), "reason", "eviction");
    w.family("moved_by_route_bytes", "counter", "Bytes that a GPU moved between memories, by what carried them.");
    w.value(double(moves.bytes_by_copy_engine), "route", "copy_engine");
    w.value(double(moves.bytes_by_kernel), "route", "kernel");
    w.family("copy_engine_from_bytes", "gauge", "Size of blocks from which on the copy engine carries them; 0: not measured.");
    w.value(double(moves.copy_engine_from_down), "direction", "down");
    w.value(double(moves.copy_engine_from_up), "direction", "up");
    if (const Mover* mover = pool->impl->mover()) {
        const MoveCounters c = mover->counters();
        w.family("move_seconds", "histogram", "Time of a batch of moves into a tier, by powers of two of a microsecond.");
        for (size_t t = 0; t < kTiers; ++t) {
            if (has[t]) w.histogram(c.latency[t], c.seconds[t], name_of(TierKind(t)));
        }
    }
    if (const std::vector<NamespaceStats> spaces = std::as_const(*pool->impl).prefixes().all_stats(); !spaces.empty()) {
        for (const Metric<NamespaceStats>& m : kNamespaceMetrics) {
            w.family(m.name, m.type, m.help);
            for (const NamespaceStats& space : spaces) w.value(m.of(space), "namespace", std::to_string(space.id).c_str());
        }
    }
    if (const std::map<Tenant, ta_store_stats> stores = pool->stores->all_stats(); !stores.empty()) {
        for (const Metric<ta_store_stats>& m : kStoreMetrics) {
            w.family(m.name, m.type, m.help);
            for (const auto& [space, stats] : stores) w.value(m.of(stats), "namespace", std::to_string(space).c_str());
        }
    }
    return {};
}

}  // namespace

extern "C" {

ta_status ta_kv_pool_write_metrics(const ta_kv_pool* pool, ta_metrics_format format, char* buffer, uint64_t buffer_bytes,
                                   uint64_t* needed, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(needed, "needed", 4));
        if (format != TA_METRICS_OPENMETRICS && format != TA_METRICS_JSON)
            return fail(TA_E_INVALID, "format is %d, no value of ta_metrics_format", int(format)).argument(1);
        Writer w(format == TA_METRICS_JSON);
        TA_RETURN_IF_ERROR(write_all(pool, w));
        const std::string text = w.finish();
        *needed = text.size() + 1;
        if (!buffer) return {};
        if (buffer_bytes < *needed) {
            return fail(TA_E_INVALID, "buffer_bytes is %llu; the text has %llu", (unsigned long long)buffer_bytes,
                        (unsigned long long)*needed)
                .argument(3);
        }
        std::memcpy(buffer, text.c_str(), *needed);
        return {};
    });
}

}  // extern "C"
