// Pool.describe: ta_kv_pool_description as a PoolDescription.
#include <span>
#include <vector>

#include "objects.h"

namespace {

nb::object flag(ta_switch s) {
    return s == TA_DEFAULT ? nb::object(nb::none()) : nb::bool_(s == TA_ON);
}

// Makes arrays of values that the heads of all layers have.
class Heads {
  public:
    explicit Heads(const ta_kv_pool_description& d)
        : d_(d),
          layer_groups_(ta::layer_groups_of(d)),
          sizes_(ta::detail::map_sizes(d.layers, d.kv_heads, d.head_dim, std::span(layer_groups_))) {
        for (const ta_layer_group& g : layer_groups_)
            even_ = even_ && (g.kv_heads == 0 || g.kv_heads == d.kv_heads) && (g.head_dim == 0 || g.head_dim == d.head_dim);
    }
    const std::vector<ta_layer_group>& layer_groups() const { return layer_groups_; }
    // [layers, kv_heads]
    nb::object bits(const uint8_t* data) const { return array(data, sizes_.heads, "uint8"); }
    // [layers, kv_heads, head_dim], None for null
    nb::object offsets(const float* data) const {
        return data ? array(data, sizes_.channels * sizeof(float), "float32", d_.head_dim) : nb::object(nb::none());
    }

  private:
    // The layers one after the other in one axis, where their shapes differ.
    nb::object array(const void* data, size_t bytes, const char* type, auto... channels) const {
        const nb::object flat = package("numpy", "frombuffer")(nb::bytes(data, bytes), nb::str(type));
        return even_ ? flat.attr("reshape")(nb::make_tuple(d_.layers, d_.kv_heads, channels...)) : flat;
    }

    const ta_kv_pool_description& d_;
    const std::vector<ta_layer_group> layer_groups_;
    const ta::detail::MapSizes sizes_;
    bool even_ = true;  // all layers have the pool's shape
};

nb::dict to_dict(const ta_numerics& n, const Heads& heads) {
    nb::dict numerics;
    numerics["profile"] = n.profile;
    numerics["k_granularity"] = n.k_granularity;
    numerics["v_granularity"] = n.v_granularity;
    numerics["open_scale"] = n.open_scale;
    numerics["v_exponents"] = flag(n.v_exponents);
    numerics["fractional_zero"] = flag(n.fractional_zero);
    numerics["v_search"] = flag(n.v_search);
    numerics["hadamard"] = flag(n.hadamard);
    numerics["sink_blocks"] = n.sink_blocks;
    numerics["exp"] = n.exp;
    numerics["p"] = n.p;
    numerics["nonfinite"] = n.nonfinite;
    numerics["hadamard_seed"] = n.hadamard_seed;
    numerics["k_offset"] = heads.offsets(n.k_offset);
    numerics["k_turning"] = flag(n.k_turning);
    numerics["k_search"] = flag(n.k_search);
    numerics["unit_slope"] = flag(n.unit_slope);
    numerics["q_bits"] = n.q_bits;
    numerics["batch_invariant"] = flag(n.batch_invariant);
    return numerics;
}

nb::dict to_dict(const ta_tier_options& t, const nb::object& peer) {
    const auto path = [](const char* text) -> nb::object {
        return text ? package("os", "fsdecode")(nb::bytes(text)) : nb::object(nb::none());
    };
    nb::dict tiers;
    tiers["host_node"] = t.host_node;
    tiers["host_bytes"] = t.host_bytes;
    tiers["disk_bytes"] = t.disk_bytes;
    tiers["disk_folder"] = path(t.disk_folder);
    tiers["high_percent"] = t.high_percent;
    tiers["low_percent"] = t.low_percent;
    tiers["eviction"] = t.eviction;
    tiers["disk_path"] = path(t.disk_path);
    tiers["drop_coldest"] = flag(t.drop_coldest);
    tiers["begin_wait_ms"] = t.begin_wait_ms;
    tiers["staging"] = t.staging;
    tiers["falling_precision"] = flag(t.falling_precision);
    tiers["tuning"] = reinterpret_cast<uintptr_t>(t.tuning);
    tiers["peer"] = peer;
    tiers["peer_bytes"] = t.peer_bytes;
    return tiers;
}

nb::dict to_dict(const ta_rotary& r) {
    const nb::bytes angles(r.angles, size_t{r.layers} * (r.channels / 2) * sizeof(double));
    nb::dict rotary;
    rotary["angles"] = package("numpy", "frombuffer")(angles, nb::str("float64")).attr("reshape")(r.layers, r.channels / 2);
    rotary["channels"] = r.channels;
    rotary["pairs"] = r.pairs;
    return rotary;
}

nb::tuple to_tuple(const std::vector<ta_layer_group>& layer_groups) {
    nb::list groups;
    for (const ta_layer_group& g : layer_groups) {
        groups.append(package("turboattention._options", "LayerGroup")(g.first, g.layers, g.window, g.kv_heads, g.head_dim,
                                                                       g.v_head_dim));
    }
    return nb::tuple(groups);
}

}  // namespace

nb::object describe(const PoolObject& self) {
    const auto pool = self.handle.get();
    const ta_kv_pool_description d = unlocked([&] { return pool.describe(); });
    const Heads heads(d);
    nb::dict all;
    all["device"] = d.device;
    all["device_ordinal"] = d.device_ordinal;
    all["layers"] = d.layers;
    all["kv_heads"] = d.kv_heads;
    all["head_dim"] = d.head_dim;
    all["bits"] = d.bits;
    all["max_sequences"] = d.max_sequences;
    all["k_bits"] = heads.bits(d.k_bits);
    all["v_bits"] = heads.bits(d.v_bits);
    all["budget_bytes"] = d.budget_bytes;
    all["fingerprint"] = d.fingerprint;
    all["token_block_bytes"] = d.token_block_bytes;
    all["channel_block_bytes"] = d.channel_block_bytes;
    all["low_block_bytes"] = d.low_block_bytes;
    all["v_head_dim"] = d.v_head_dim;
    all["block_head_dim"] = d.block_head_dim;
    all["layer_groups"] = to_tuple(heads.layer_groups());
    all["passed_token_block_bytes"] = d.passed_token_block_bytes;
    all["passed_channel_block_bytes"] = d.passed_channel_block_bytes;
    all["rotary"] = d.rotary ? nb::object(to_dict(*d.rotary)) : nb::none();
    all["numerics"] = to_dict(*d.numerics, heads);
    all["tiers"] = d.tiers ? nb::object(to_dict(*d.tiers, self.peer)) : nb::none();
    return package("turboattention._options", "_description")(**all);
}
