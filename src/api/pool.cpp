#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

constexpr uint32_t kDefaultMaxSequences = 65536;

Status read_tuning(const ta_x_tier_tuning* given, TierSettings& settings) {
    Result<ta_x_tier_tuning> read = read_struct(given, "options.tiers.tuning", 1);
    if (!read.ok()) return std::move(read).status();
    const ta_x_tier_tuning& o = read.value();
    if (o.route < TA_X_MOVE_ROUTE_AUTO || o.route > TA_X_MOVE_ROUTE_KERNEL)
        return fail(TA_E_INVALID, "options.tiers.tuning.route is %d, no value of ta_x_move_route", int(o.route));
    settings.route = MoveRoute(o.route);
    settings.staging_bytes = o.staging_bytes;
    if (o.attention_half_life < 0) {
        return fail(TA_E_INVALID, "options.tiers.tuning.attention_half_life is %d; it takes 1 and more, or 0 for the default",
                    int(o.attention_half_life));
    }
    if (o.attention_half_life > 0) settings.half_life = uint32_t(o.attention_half_life);
    if (o.attention_layers < 0) {
        return fail(TA_E_INVALID, "options.tiers.tuning.attention_layers is %d; it takes 1 and more, or 0 for the default",
                    int(o.attention_layers));
    }
    settings.attention_layers = uint32_t(o.attention_layers);
    return {};
}

Status read_tiers(const ta_tier_options* given, TierSettings& settings, bool& falls) {
    Result<ta_tier_options> read = read_struct(given, "options.tiers", 1);
    if (!read.ok()) return std::move(read).status();
    const ta_tier_options& o = read.value();
    TA_RETURN_IF_ERROR(check_aligned(o.peer, "options.tiers.peer", 1));
    if (o.peer) {
        TA_RETURN_IF_ERROR(check_process(*o.peer->impl));
        settings.peer = o.peer->impl;
    }
    settings.peer_budget = o.peer_bytes;
    settings.host_budget = o.host_bytes;
    settings.disk_budget = o.disk_bytes;
    if (o.host_node > uint32_t(INT32_MAX))
        return fail(TA_E_INVALID, "options.tiers.host_node is %u; it takes 1 + the number of a NUMA node", o.host_node);
    settings.numa_node = int(o.host_node) - 1;
    const char* temporary = std::getenv("TMPDIR");
    settings.disk_folder = o.disk_folder ? o.disk_folder : temporary && *temporary ? temporary : "/tmp";
    if (settings.disk_folder.empty()) return fail(TA_E_INVALID, "options.tiers.disk_folder is empty");
    if (o.disk_path) settings.disk_path = o.disk_path;
    if (o.disk_path && (o.disk_bytes == 0 || settings.disk_path.empty()))
        return fail(TA_E_INVALID, "options.tiers.disk_path asks for a file and a budget in disk_bytes");
    constexpr int kBetween = 4;
    if (o.high_percent) settings.high_percent = o.high_percent;
    settings.low_percent = o.low_percent ? o.low_percent : std::max(settings.high_percent, kBetween) - kBetween;
    if (settings.high_percent < 1 || settings.high_percent > 100 || settings.low_percent < 0 ||
        settings.low_percent > settings.high_percent) {
        return fail(TA_E_INVALID,
                    "options.tiers: low_percent %d and high_percent %d; they take 0 <= low <= high, 1 <= high <= 100",
                    settings.low_percent, settings.high_percent);
    }
    if (o.eviction < TA_EVICT_LRU || o.eviction > TA_EVICT_ATTENTION)
        return fail(TA_E_INVALID, "options.tiers.eviction is %d, no value of ta_eviction", int(o.eviction));
    settings.eviction = Eviction(o.eviction);
    if (o.drop_coldest < TA_DEFAULT || o.drop_coldest > TA_OFF)
        return fail(TA_E_INVALID, "options.tiers.drop_coldest is %d, no value of ta_switch", int(o.drop_coldest));
    settings.drop_coldest = o.drop_coldest == TA_ON;
    TA_RETURN_IF_ERROR(check_wait_ms(o.begin_wait_ms, "options.tiers.begin_wait_ms", 1));
    settings.patience = settings.patience.or_of(o.begin_wait_ms);
    falls = o.falling_precision == TA_ON;
    if (o.falling_precision < TA_DEFAULT || o.falling_precision > TA_OFF)
        return fail(TA_E_INVALID, "options.tiers.falling_precision is %d, no value of ta_switch", int(o.falling_precision));
    if (o.staging < TA_STAGING_AUTO || o.staging > TA_STAGING_ALWAYS)
        return fail(TA_E_INVALID, "options.tiers.staging is %d, no value of ta_staging", int(o.staging));
    settings.staging = StagingMode(o.staging);
    return o.tuning ? read_tuning(o.tuning, settings) : Status();
}

}  // namespace

// Fails if groups name a layer twice, or one that does not exist.
Status ta::api::read_layer_groups(const ta_kv_pool_options& o, std::vector<ta_layer_group>& groups) {
    if (o.n_layer_groups == 0) return {};
    if (!o.layer_groups)
        return fail(TA_E_INVALID, "options.layer_groups is null, but options.n_layer_groups %u", o.n_layer_groups);
    if (o.layers > kMaxLayers) return {};  // refused later, with the rest of the shape
    if (o.n_layer_groups > o.layers) {
        return fail(TA_E_INVALID, "options.n_layer_groups is %u; the pool has %u layers", o.n_layer_groups, o.layers);
    }
    std::vector<bool> seen(o.layers);
    for (uint32_t i = 0; i < o.n_layer_groups; ++i) {
        char name[40];
        std::snprintf(name, sizeof name, "options.layer_groups[%u]", i);
        if (i == 0) TA_RETURN_IF_ERROR(check_aligned(o.layer_groups, name, 1));
        Result<const ta_layer_group*> given = element_of(o.layer_groups, i, name, 1);
        if (!given.ok()) return std::move(given).status();
        Result<ta_layer_group> read = read_struct(given.value(), name, 1);
        if (!read.ok()) return std::move(read).status();
        ta_layer_group g = read.value();
        if (g.layers < 1 || g.first >= o.layers || g.layers > o.layers - g.first) {
            return fail(TA_E_INVALID, "%s has %u layers from %u on; the pool has %u", name, g.layers, g.first, o.layers);
        }
        if (g.window < 0 || g.window > kMaxTokens)
            return fail(TA_E_INVALID, "%s.window is %lld; it takes 0 to 2^40", name, (long long)g.window);
        for (uint32_t layer = g.first; layer < g.first + g.layers; ++layer) {
            if (seen[layer]) return fail(TA_E_INVALID, "%s has layer %u, which is in one before", name, layer);
            seen[layer] = true;
        }
        g.struct_size = sizeof g;
        groups.push_back(g);
    }
    return {};
}

namespace {

// Copies the embedding to the handle, and to `rotary` as steps use it.
Status take_rotary(const ta_rotary* given, std::span<const LayerShape> layers, ta_kv_pool& handle, Rotary& rotary) {
    if (!given) return {};
    Result<ta_rotary> read = read_struct(given, "options.rotary", 1);
    if (!read.ok()) return std::move(read).status();
    TA_RETURN_IF_ERROR(check_aligned(read.value().angles, "options.rotary.angles", 1));
    Result<Rotary> taken = read_rotary(read.value(), layers);
    if (!taken.ok()) return std::move(taken).status();
    rotary = taken.take();
    const size_t angles = size_t(read.value().layers) * (rotary.channels / 2);
    handle.rotary_angles.assign(read.value().angles, read.value().angles + angles);
    handle.rotary = read.value();
    handle.rotary.struct_size = sizeof handle.rotary;
    handle.rotary.angles = handle.rotary_angles.data();
    return {};
}

// Stores absolute paths in the handle. If a folder no longer exists, its path stays as given.
void describe_paths(const TierSettings& tiers, ta_kv_pool& handle) {
    std::error_code none;
    const auto absolute = [&](const std::string& path) {
        const std::filesystem::path full = std::filesystem::absolute(path, none);
        return none ? path : full.lexically_normal().string();
    };
    if (!tiers.disk_path.empty()) handle.disk_path = absolute(tiers.disk_path);
    if (tiers.disk_path.empty() && tiers.disk_budget > 0) handle.disk_folder = absolute(tiers.disk_folder);
}

// Fills in everything that the handle's description points to, except paths. The pool exists already, so nothing here may fail.
void describe_settings(ta_kv_pool& handle) {
    const Pool& p = *handle.impl;
    const TierSettings& t = p.tier_settings();
    handle.numerics = describe_numerics(p.numerics());
    if (const Geometry& g = p.geometry(); g.is_wider() && !p.numerics().k_offset.empty())
        handle.numerics.k_offset = handle.k_offset.data();
    const Device* device = p.context().device();
    const int node = t.numa_node < 0 && device ? device->numa_node() : t.numa_node;
    ta_x_tier_tuning& u = handle.tuning;
    u.struct_size = sizeof u;
    u.route = ta_x_move_route(t.route);
    u.staging_bytes = t.staging_bytes;
    u.attention_half_life = int32_t(t.half_life);
    u.attention_layers = int32_t(t.attention_layers);
    ta_tier_options& o = handle.tiers;
    o.struct_size = sizeof o;
    o.host_node = uint32_t(node + 1);
    if (const Tier* peer = p.residency().tier(TierKind::kPeer)) {
        o.peer_bytes = peer->stats().budget;
        handle.peer.impl = t.peer;
        o.peer = &handle.peer;
    }
    if (const Tier* host = p.residency().tier(TierKind::kHost)) o.host_bytes = host->stats().budget;
    if (const Tier* disk = p.residency().tier(TierKind::kDisk)) o.disk_bytes = disk->stats().budget;
    if (!handle.disk_folder.empty()) o.disk_folder = handle.disk_folder.c_str();
    if (!handle.disk_path.empty()) o.disk_path = handle.disk_path.c_str();
    o.high_percent = t.high_percent;
    o.low_percent = t.low_percent;
    o.eviction = ta_eviction(t.eviction);
    o.drop_coldest = t.drop_coldest ? TA_ON : TA_OFF;
    const auto wait = t.patience.plans.count();
    o.begin_wait_ms = t.patience.plans != t.patience.moves ? 0 : wait == 0 ? -1 : int32_t(wait);
    o.staging = ta_staging(t.staging);
    o.falling_precision = p.geometry().falls ? TA_ON : TA_OFF;
    o.tuning = &u;
}

// Makes the pool of a handle. That comes last: a pool keeps the file of its disk tier, so nothing may fail after it.
Status make_pool(const std::shared_ptr<Context>& context, const ta_kv_pool_options& o, ta_kv_pool& handle) {
    TierSettings tiers;
    bool falls = false;
    if (o.tiers) TA_RETURN_IF_ERROR(read_tiers(o.tiers, tiers, falls));
    describe_paths(tiers, handle);
    handle.has_tiers = o.tiers != nullptr;
    TA_RETURN_IF_ERROR(read_layer_groups(o, handle.layer_groups));
    const auto make_geometry = [&](bool keeps_own_scales) {
        return Geometry::make({.layers = o.layers,
                               .kv_heads = o.kv_heads,
                               .head_dim = o.head_dim,
                               .v_head_dim = o.v_head_dim,
                               .bits = o.bits,
                               .k_bits = o.k_bits,
                               .v_bits = o.v_bits,
                               .falls = falls,
                               .keeps_own_scales = keeps_own_scales,
                               .groups = handle.layer_groups});
    };
    // Before the numerics, because the sizes of their arrays follow from the shapes.
    Result<Geometry> shape = make_geometry(false);
    if (!shape.ok()) return std::move(shape).status();
    ta_numerics numerics{};
    if (o.numerics) {
        Result<ta_numerics> read = read_struct(o.numerics, "options.numerics", 1);
        if (!read.ok()) return std::move(read).status();
        numerics = read.value();
        TA_RETURN_IF_ERROR(check_aligned(numerics.k_offset, "options.numerics.k_offset", 1));
    }
    Result<Numerics> resolved = resolve_numerics(&numerics, shape.value().shapes);
    if (!resolved.ok()) return std::move(resolved).status();
    if (resolved.value().batch_invariant && context->device() && tiers.eviction == Eviction::kAttention) {
        return fail(
            TA_E_UNSUPPORTED,
            "options.tiers.eviction is TA_EVICT_ATTENTION, and options.numerics.batch_invariant is on: a GPU does not observe "
            "that attention");
    }
    TA_RETURN_IF_ERROR(take_rotary(o.rotary, shape.value().shapes, handle, resolved.value().rotary));
    Result<Geometry> geometry = make_geometry(resolved.value().universal_open_scale);
    if (!geometry.ok()) return std::move(geometry).status();
    const uint64_t least = geometry.value().token_slot_bytes;
    if (o.budget_bytes < least) {
        return fail(TA_E_INVALID, "options.budget_bytes is %llu; a single block of this pool takes %llu",
                    (unsigned long long)o.budget_bytes, (unsigned long long)least);
    }
    if (geometry.value().all_8_bits) handle.all_8_bits.assign(geometry.value().k_bits.size(), 8);
    std::vector<float> k_offset;  // in the caller's channels
    if (numerics.k_offset && geometry.value().is_wider()) {
        size_t channels = 0;
        for (const LayerShape& s : geometry.value().shapes) channels += size_t(s.kv_heads) * s.k_channels;
        k_offset.assign(numerics.k_offset, numerics.k_offset + channels);
    }
    handle.stores = std::make_unique<store::Stores>();
    const uint32_t max_sequences = o.max_sequences ? o.max_sequences : kDefaultMaxSequences;
    Result<std::shared_ptr<Pool>> pool =
        Pool::create(context, geometry.take(), resolved.take(), o.budget_bytes, max_sequences, tiers);
    if (!pool.ok()) return std::move(pool).status();
    handle.impl = pool.take();
    handle.stores->serve(handle.impl);
    handle.k_offset = std::move(k_offset);
    describe_settings(handle);
    return {};
}

}  // namespace

extern "C" {

ta_status ta_kv_pool_create(ta_context* context, const ta_kv_pool_options* options, ta_kv_pool** out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pointer(context, "context", 0));
        TA_RETURN_IF_ERROR(check_pointer(options, "options", 1));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 2));
        TA_RETURN_IF_ERROR(check_process(*context->impl));
        Result<ta_kv_pool_options> known = read_struct(options, "options", 1);
        if (!known.ok()) return std::move(known).status();
        auto handle = std::make_unique<ta_kv_pool>();
        if (Status s = make_pool(context->impl, known.value(), *handle); !s.ok()) return std::move(s).argument(1);
        *out = handle.release();
        return {};
    });
}

ta_status ta_kv_pool_close(ta_kv_pool* pool, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(pool->impl->close());
        pool->stores->end_all(pool->impl->check_open());
        return {};
    });
}

void ta_kv_pool_destroy(ta_kv_pool* pool) {
    destroy(pool, [](const ta_kv_pool& p) -> const Context& { return p.impl->context(); });
}

ta_status ta_kv_pool_describe(const ta_kv_pool* pool, ta_kv_pool_description* out, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(out, "out", 1));
        const Pool& p = *pool->impl;
        TA_RETURN_IF_ERROR(p.check_open());
        const Geometry& g = p.geometry();
        const std::vector<uint8_t>&k_bits = g.all_8_bits ? pool->all_8_bits : g.k_bits,
              &v_bits = g.all_8_bits ? pool->all_8_bits : g.v_bits;
        const auto is_other = [&](uint8_t bits) { return bits != k_bits[0]; };
        const bool alike =
            std::none_of(k_bits.begin(), k_bits.end(), is_other) && std::none_of(v_bits.begin(), v_bits.end(), is_other);
        const Device* device = p.context().device();
        ta_kv_pool_description r{};
        r.device = device ? TA_DEVICE_CUDA : TA_DEVICE_CPU;
        r.device_ordinal = device ? device->ordinal() : 0;
        r.layers = g.layers;
        r.kv_heads = g.common.kv_heads;
        r.head_dim = g.common.k_channels;
        r.v_head_dim = g.common.v_channels;
        r.block_head_dim = g.common.head_dim;
        r.layer_groups = pool->layer_groups.empty() ? nullptr : pool->layer_groups.data();
        r.n_layer_groups = uint32_t(pool->layer_groups.size());
        r.passed_token_block_bytes = g.passed_token_slot_bytes;
        r.passed_channel_block_bytes = g.passed_channel_slot_bytes;
        r.bits = alike ? k_bits[0] : 0;
        r.max_sequences = p.sequences().most();
        r.k_bits = k_bits.data();
        r.v_bits = v_bits.data();
        r.budget_bytes = p.blocks().budget();
        r.fingerprint = p.fingerprint();
        r.token_block_bytes = g.token_slot_bytes;
        r.channel_block_bytes = g.channel_slot_bytes;
        r.low_block_bytes = g.low_slot_bytes;
        r.numerics = &pool->numerics;
        r.tiers = pool->has_tiers ? &pool->tiers : nullptr;
        r.rotary = p.numerics().rotary.given() ? &pool->rotary : nullptr;
        return write_struct(r, out, "out", 1);
    });
}

ta_status ta_kv_pool_get_stats(const ta_kv_pool* pool, ta_kv_pool_stats* stats, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(stats, "stats", 1));
        const Pool& p = *pool->impl;
        TA_RETURN_IF_ERROR(p.check_open());
        const Sequences::Stats sequences = p.sequences().stats();
        const BlockStore::Usage usage = p.blocks().usage();
        const Geometry& g = p.geometry();
        const Pool::Counters& c = p.counters();
        ta_kv_pool_stats r{};
        r.sequences = sequences.sequences;
        r.tokens = sequences.tokens;
        r.shared_blocks = sequences.shared_blocks;
        r.bytes_budget = p.blocks().budget();
        r.bytes_used = usage.used;
        r.bytes_cached = usage.cached;
        r.bytes_peak = usage.peak;
        r.token_blocks = usage.token_blocks;
        r.channel_blocks = usage.channel_blocks;
        r.token_block_bytes = g.token_slot_bytes;
        r.channel_block_bytes = g.channel_slot_bytes;
        r.token_bits_per_element = g.bits_per_element(PageKind::kToken);
        r.channel_bits_per_element = g.bits_per_element(PageKind::kChannel);
        r.low_blocks = usage.low_blocks;
        r.low_block_bytes = g.low_slot_bytes;
        r.passed_blocks = usage.passed_blocks;
        r.bytes_free = usage.free;
        r.bytes_reclaimable = p.sequences().reclaimable_bytes();
        r.bytes_promised = usage.promised;
        r.appended_tokens = c.appended_tokens;
        r.closed_pages = c.closed_pages;
        r.reopened_blocks = c.reopened_blocks;
        r.copied_blocks = c.copied_blocks;
        r.saturated_values = c.saturated_values;
        r.clamped_values = c.clamped_values;
        if (uint64_t* const clamped = p.sequences().records().clamped())
            r.clamped_values += std::atomic_ref(*clamped).load(std::memory_order_relaxed);
        return write_struct(r, stats, "stats", 1);
    });
}

}  // extern "C"
