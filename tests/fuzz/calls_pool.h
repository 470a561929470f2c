// Calls on contexts and pools.
#pragma once

#include <cmath>
#include <filesystem>

#include "tests/fuzz/calls_arguments.h"

namespace ta::fuzz {

class PoolCalls : public Arguments {
  protected:
    using Arguments::Arguments;

    // Memory runs out early, so that huge budgets take no time.
    static void* allocate(size_t bytes, size_t alignment, void* user) {
        auto& allocator = *static_cast<testing::CountingAllocator*>(user);
        const uint64_t left = kMostMemory - std::min(kMostMemory, allocator.bytes_alive());
        return bytes > left ? nullptr : allocator.hooks().allocate(bytes, alignment, user);
    }
    ta_status context_create(ta_error* err) {
        if (contexts_.size() == kMostHandles) return TA_OK;
        ta_allocator hooks = allocator_.hooks();
        hooks.allocate = allocate;
        ta_context_options o{};
        o.device = ta_device_kind(number(TA_DEVICE_CPU));
        o.threads = int32_t(small_if_right(1, 1024));
        if (o.threads > 2 && o.threads <= 1024) o.threads = 2;
        o.cpu_isa = ta_cpu_isa(number(TA_CPU_ISA_AUTO));
        o.allocator = sized(hooks);
        if (!o.allocator) o.device = -1;  // memory that nothing limits
        o.device_ordinal = int32_t(number(0));
        o.log = log_sink();
        return created(contexts_, [&](ta_context** out) { return ta_context_create(sized(o), out, err); });
    }
    ta_status context_destroy(ta_error*) { return destroyed(contexts_, ta_context_destroy); }
    ta_status context_get_info(ta_error* err) { return ta_context_get_info(context(), sized(ta_context_info{}), err); }
    ta_status context_health(ta_error* err) { return ta_context_health(context(), err); }

    ta_numerics numerics() {
        ta_numerics n{};
        n.profile = ta_profile(number(TA_PROFILE_ACCURATE));
        for (int32_t* setting :
             {&n.k_granularity, &n.v_granularity, &n.open_scale, &n.v_exponents, &n.fractional_zero, &n.v_search, &n.k_search,
              &n.unit_slope, &n.hadamard, &n.sink_blocks, &n.exp, &n.p, &n.nonfinite})
            *setting = int32_t(number(0));
        n.hadamard_seed = in_.bits(plain_ ? 0 : 1);
        n.q_bits = uint32_t(number(0));
        n.batch_invariant = n.hadamard_seed % 4 == 1 ? TA_ON : TA_DEFAULT;  // reads nothing, so that inputs stay what they were
        return n;
    }
    ta_tier_options tiers() {
        ta_tier_options t{};
        t.host_node = uint32_t(number(0));
        for (uint64_t* bytes : {&t.host_bytes, &t.disk_bytes}) {
            *bytes = uint64_t(number(1 << 18));
            if (*bytes > 1 << 22 && *bytes < uint64_t{1} << 50) *bytes = 1 << 18;  // they are taken at once
        }
        t.disk_folder = odd() ? path() : folder().path().c_str();
        t.disk_path = odd() ? path() : nullptr;
        for (int32_t* setting :
             {&t.high_percent, &t.low_percent, &t.eviction, &t.drop_coldest, &t.staging, &t.falling_precision})
            *setting = int32_t(number(0));
        if (odd()) {
            const auto route = ta_x_move_route(number(0)), half_life = int32_t(number(0)), layers = int32_t(number(0));
            t.tuning = sized(ta_x_tier_tuning{0, route, uint64_t(number(0)), half_life, layers});
        }
        t.begin_wait_ms = -1;
        return t;
    }
    ta_status pool_create_with(bool with_tiers, bool with_rotary, ta_error* err) {
        ta_kv_pool_options o{};
        o.layers = uint32_t(small_if_right(kLayers, 4096));
        o.kv_heads = uint32_t(small_if_right(kHeads, 1024));
        o.head_dim = uint32_t(number(kDim));
        o.bits = uint32_t(number(4));
        const size_t heads = std::min<size_t>(uint64_t(o.layers) * o.kv_heads, kMostBytes);
        if (odd()) o.k_bits = or_null(items<uint8_t>(heads, uint8_t(number(2))));
        if (odd()) o.v_bits = or_null(items<uint8_t>(heads, uint8_t(number(4))));
        o.budget_bytes = uint64_t(number(1 << 18));
        o.max_sequences = uint32_t(number(16));
        ta_numerics n = numerics();
        const size_t channels = size_t(std::min<uint64_t>(heads * uint64_t(o.head_dim), kMostBytes));
        if (odd() && channels < kMostBytes) n.k_offset = array(items<float>(channels, odd() ? INFINITY : 0.5f));
        o.numerics = sized(n);
        if (with_tiers) o.tiers = sized(tiers());
        if (odd()) {
            o.n_layer_groups = 1;
            const auto first = uint32_t(number(0)), layers = uint32_t(number(1));
            const bool arrays = o.k_bits || o.v_bits || n.k_offset;  // which are as long as the pool's shape has them
            const auto heads_of_group = uint32_t(!arrays && odd() ? number(1) : 0);
            const auto dim = uint32_t(!arrays && odd() ? number(64) : 0);
            o.layer_groups = sized(ta_layer_group{0, first, layers, heads_of_group, number(100), dim, 0});
        }
        if (with_rotary) {
            const auto turned = uint32_t(number(16)), layers = uint32_t(number(1));
            const size_t angles = size_t(std::min<uint64_t>(uint64_t(turned / 2) * layers, kMostBytes));
            auto* a = items<double>(angles, odd() ? NAN : 0.5);
            o.rotary =
                sized(ta_rotary{0, ta_rotary_pairs(number(1)), turned, layers, angles < kMostBytes ? array(a) : nullptr});
        }
        return created(pools_, [&](ta_kv_pool** out) { return ta_kv_pool_create(context(), sized(o), out, err); });
    }
    ta_status pool_create(ta_error* err) { return pool_create_with(false, false, err); }
    ta_status tiered_pool_create(ta_error* err) { return pool_create_with(true, false, err); }
    ta_status rotary_pool_create(ta_error* err) { return pool_create_with(odd(), true, err); }
    ta_status pool_close(ta_error* err) { return ta_kv_pool_close(pool(), err); }
    ta_status pool_destroy(ta_error*) { return destroyed(pools_, ta_kv_pool_destroy); }
    ta_status pool_get_stats(ta_error* err) { return ta_kv_pool_get_stats(pool(), sized(ta_kv_pool_stats{}), err); }
    ta_status pool_save(ta_error* err) {
        const char* to = path();
        if (plain_ && to) std::filesystem::remove(to);
        return ta_kv_pool_save(pool(), to, ta_save_flags(number(TA_SAVE_PUBLISHED)), progress(), err);
    }
    ta_status pool_load(ta_error* err) {
        constexpr size_t kMost = 4;
        auto* loaded = items<ta_loaded_seq>(kMost);
        const uint64_t most = odd() ? in_.below(kMost) : kMost;
        auto* n = items<uint64_t>(1);
        const bool counts = odd();
        const ta_status s = ta_kv_pool_load(pool(), path(), progress(), counts ? nullptr : array(loaded), most, array(n), err);
        for (uint64_t i = 0; s == TA_OK && !counts && i < *n; ++i) remember(seqs_, loaded[i].loaded);
        return s;
    }
    ta_status pool_get_memory(ta_error* err) {
        return ta_kv_pool_get_memory(pool(), ta_tier(number(TA_TIER_HOST)), sized(ta_memory_range{}), err);
    }
    ta_status pool_fit(ta_error* err) {
        const auto n = uint32_t(plain_ ? 1 : in_.below(4));
        auto* seqs = items<ta_seq>(n);
        auto* n_new = items<int32_t>(n);
        for (uint32_t i = 0; i < n; ++i) {
            seqs[i] = id(seqs_);
            n_new[i] = int32_t(number(kTokens));
        }
        ta_fit* out = sized(ta_fit{});
        const ta_status s = ta_kv_pool_fit(pool(), n, array(seqs), array(n_new), out, err);
        if (s == TA_OK && out->struct_size >= sizeof *out)
            require(out->after_eviction >= out->now && (out->first_lacking < 0) == (out->after_eviction == 1), "a fit");
        return s;
    }
    ta_status get_move_stats(ta_error* err) { return ta_kv_pool_get_move_stats(pool(), sized(ta_move_stats{}), err); }
    ta_status pool_describe(ta_error* err) { return ta_kv_pool_describe(pool(), sized(ta_kv_pool_description{}), err); }
    ta_status get_tier_stats(ta_error* err) {
        return ta_kv_pool_get_tier_stats(pool(), ta_tier(number(TA_TIER_DEVICE)), sized(ta_tier_stats{}), err);
    }
    ta_status write_metrics(ta_error* err) {
        const size_t bytes = odd() ? in_.below(64) : 32768;
        return ta_kv_pool_write_metrics(pool(), ta_metrics_format(number(TA_METRICS_JSON)),
                                        or_null(reinterpret_cast<char*>(memory(bytes))), bytes, array(items<uint64_t>(1)), err);
    }
    ta_status about(ta_error* err) {
        const ta_status s = ta_status(number(TA_E_INVALID));
        require(ta_status_name(s) && ta_build_info() && ta_version() > 0 && ta_abi_version() == TA_ABI_VERSION,
                "about the library");
        if (err) *err = kNoError;
        return TA_OK;
    }
};

}  // namespace ta::fuzz
