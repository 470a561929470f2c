#include "src/page/geometry.h"

#include <algorithm>

#include "kernels/format/slot.h"

namespace ta {
namespace {

Status check_bits(const std::vector<uint8_t>& bits, const char* name, uint32_t kv_heads, bool* all_8) {
    size_t eights = 0;
    for (size_t i = 0; i < bits.size(); ++i) {
        if (bits[i] != 8 && bits[i] != 4 && bits[i] != 2) {
            return fail(TA_E_INVALID, "%s is %u; it takes 8, 4 or 2", name, bits[i])
                .layer(int64_t(i / kv_heads))
                .head(int64_t(i % kv_heads));
        }
        eights += bits[i] == 8;
    }
    *all_8 = eights == bits.size();
    if (eights == 0 || *all_8) return {};
    return fail(TA_E_UNSUPPORTED, "%s mixes 8 bits with 4 or 2; 8 bits are for all heads of a pool or for none", name);
}

}  // namespace

Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in) {
    if (layers < 1 || layers > kMaxLayers)
        return fail(TA_E_INVALID, "%slayers is %u; it takes 1..%u", in, layers, kMaxLayers).argument(1);
    if (kv_heads < 1 || kv_heads > kMaxKvHeads)
        return fail(TA_E_INVALID, "%skv_heads is %u; it takes 1..%u", in, kv_heads, kMaxKvHeads).argument(2);
    if (!is_supported_head_dim(int(head_dim)))
        return fail(TA_E_UNSUPPORTED, "%shead_dim is %u; it takes 64, 96, 128 or 256", in, head_dim).argument(3);
    return {};
}

Result<Geometry> Geometry::make(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t bits, const uint8_t* k_bits,
                                const uint8_t* v_bits, bool falls, bool keeps_own_scales) {
    TA_RETURN_IF_ERROR(check_shape(layers, kv_heads, head_dim, "options."));
    const bool uses_bits = !k_bits || !v_bits;
    if (uses_bits && bits != 0 && bits != 8 && bits != 4 && bits != 2)
        return fail(TA_E_INVALID, "options.bits is %u; it takes 8, 4 or 2", bits);
    Geometry g;
    g.layers = layers;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    const size_t heads = size_t(layers) * kv_heads;
    const auto map_of = [&](const uint8_t* given) {
        return given ? std::vector<uint8_t>(given, given + heads) : std::vector<uint8_t>(heads, uint8_t(bits ? bits : 4));
    };
    g.k_bits = map_of(k_bits);
    g.v_bits = map_of(v_bits);
    bool k_8 = false, v_8 = false;
    TA_RETURN_IF_ERROR(check_bits(g.k_bits, "options.k_bits", kv_heads, &k_8));
    TA_RETURN_IF_ERROR(check_bits(g.v_bits, "options.v_bits", kv_heads, &v_8));
    if (k_8 != v_8)
        return fail(TA_E_UNSUPPORTED,
                    "one of options.k_bits and v_bits is 8 and the other is not; 8 bits are for both or none");
    g.all_8_bits = k_8;
    g.falls = falls;
    g.keeps_own_scales = keeps_own_scales;
    for (const auto* map : {&g.k_bits, &g.v_bits}) {
        for (const uint8_t b : *map) {
            if (falls && b != 8 && b != 4)
                return fail(TA_E_UNSUPPORTED,
                            "options.tiers.falling_precision is for pools of 8 or of 4 bits, the same for all heads");
        }
    }

    // At most 4096 x 1024 heads of 34 KB: no product here comes near 2^64.
    g.token_page_bytes = TokenLayout(int(head_dim)).bytes() * kv_heads;
    g.token_payload_bytes = g.token_page_bytes * layers;
    g.token_slot_bytes = ta::slot_bytes(g.token_payload_bytes, layers) + g.own_scales_bytes(PageKind::kToken);
    if (falls) {
        if (g.all_8_bits) {
            constexpr uint8_t kFallenBits = 4;
            std::fill(g.k_bits.begin(), g.k_bits.end(), kFallenBits);
            std::fill(g.v_bits.begin(), g.v_bits.end(), kFallenBits);
        }
        g.low_page_bytes = ChannelLayout(int(head_dim), 2, 2).bytes() * kv_heads;
        g.low_payload_bytes = g.low_page_bytes * layers;
        g.low_slot_bytes = ta::slot_bytes(g.low_payload_bytes, layers);
    }
    if (g.all_8_bits && !falls) return g;
    g.channel_head_offset.resize(heads);
    g.channel_page_offset.resize(layers + 1);
    for (uint32_t layer = 0; layer < layers; ++layer) {
        size_t offset = 0;
        for (uint32_t head = 0; head < kv_heads; ++head) {
            g.channel_head_offset[g.index(layer, head)] = offset;
            offset += g.channel_layout(PageKind::kChannel, layer, head).bytes();
        }
        g.channel_page_offset[layer + 1] = g.channel_page_offset[layer] + offset;
    }
    g.channel_payload_bytes = g.channel_page_offset[layers];
    g.channel_slot_bytes = ta::slot_bytes(g.channel_payload_bytes, layers);
    return g;
}

double Geometry::bits_per_element(PageKind kind) const {
    return 8.0 * double(slot_bytes(kind)) / (double(kPageTokens) * layers * kv_heads * head_dim * 2.0);
}

}  // namespace ta
