#include "src/page/geometry.h"

#include <algorithm>

#include "kernels/format/slot.h"

namespace ta {
namespace {

Status check_bits(const std::vector<uint8_t>& bits, const char* name, uint32_t kv_heads) {
    for (size_t i = 0; i < bits.size(); ++i) {
        if (bits[i] != 8 && bits[i] != 4 && bits[i] != 2) {
            return fail(TA_E_INVALID, "%s is %u; it takes 8, 4 or 2", name, bits[i])
                .layer(int64_t(i / kv_heads))
                .head(int64_t(i % kv_heads));
        }
    }
    return {};
}

bool are_all(const std::vector<uint8_t>& bits, uint8_t value) {
    return std::count(bits.begin(), bits.end(), value) == std::ptrdiff_t(bits.size());
}

Status check_channels(uint32_t channels, const char* in, const char* name) {
    if (channels >= 16 && channels <= uint32_t(kMaxHeadDim) && channels % 8 == 0) return {};
    return fail(TA_E_UNSUPPORTED, "%s%s is %u; it takes a multiple of 8 from 16 to %d", in, name, channels, kMaxHeadDim)
        .argument(3);
}

// Of the kinds of blocks that there are the one with the fewest channels that are enough.
uint32_t block_channels(uint32_t channels) {
    while (!is_supported_head_dim(int(channels))) channels += 8;
    return channels;
}

}  // namespace

Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in) {
    if (layers < 1 || layers > kMaxLayers)
        return fail(TA_E_INVALID, "%slayers is %u; it takes 1..%u", in, layers, kMaxLayers).argument(1);
    if (kv_heads < 1 || kv_heads > kMaxKvHeads)
        return fail(TA_E_INVALID, "%skv_heads is %u; it takes 1..%u", in, kv_heads, kMaxKvHeads).argument(2);
    return check_channels(head_dim, in, "head_dim");
}

Result<Geometry> Geometry::make(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t bits, const uint8_t* k_bits,
                                const uint8_t* v_bits, bool falls, bool keeps_own_scales, uint32_t v_head_dim,
                                std::vector<int64_t> windows) {
    TA_RETURN_IF_ERROR(check_shape(layers, kv_heads, head_dim, "options."));
    const uint32_t k_channels = head_dim, v_channels = v_head_dim > 0 ? v_head_dim : head_dim;
    TA_RETURN_IF_ERROR(check_channels(v_channels, "options.", "v_head_dim"));
    head_dim = block_channels(std::max(k_channels, v_channels));
    const bool uses_bits = !k_bits || !v_bits;
    if (uses_bits && bits != 0 && bits != 8 && bits != 4 && bits != 2)
        return fail(TA_E_INVALID, "options.bits is %u; it takes 8, 4 or 2", bits);
    Geometry g;
    g.layers = layers;
    g.kv_heads = kv_heads;
    g.head_dim = head_dim;
    g.k_channels = k_channels;
    g.v_channels = v_channels;
    const size_t heads = size_t(layers) * kv_heads;
    const auto map_of = [&](const uint8_t* given) {
        return given ? std::vector<uint8_t>(given, given + heads) : std::vector<uint8_t>(heads, uint8_t(bits ? bits : 4));
    };
    g.k_bits = map_of(k_bits);
    g.v_bits = map_of(v_bits);
    TA_RETURN_IF_ERROR(check_bits(g.k_bits, "options.k_bits", kv_heads));
    TA_RETURN_IF_ERROR(check_bits(g.v_bits, "options.v_bits", kv_heads));
    g.all_8_bits = are_all(g.k_bits, 8) && are_all(g.v_bits, 8);
    g.falls = falls;
    g.keeps_own_scales = keeps_own_scales;
    if (falls && !g.all_8_bits && !(are_all(g.k_bits, 4) && are_all(g.v_bits, 4)))
        return fail(TA_E_UNSUPPORTED, "options.tiers.falling_precision is for pools of 8 or of 4 bits, the same for all heads");

    const auto has_8 = [](const std::vector<uint8_t>& map) { return std::find(map.begin(), map.end(), 8) != map.end(); };
    g.some_8_bits = !g.all_8_bits && (has_8(g.k_bits) || has_8(g.v_bits));

    g.windows = std::move(windows);
    TA_RETURN_IF_ERROR(g.place_layers());

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
    if (g.has_windows()) {
        g.passed_token_payload_bytes = g.token_page_bytes * g.lasting_layers;
        g.passed_token_slot_bytes = ta::slot_bytes(g.passed_token_payload_bytes, g.lasting_layers);
    }
    if (g.all_8_bits && !falls) return g;
    g.channel_head_offset.resize(heads);
    g.channel_page_offset.resize(layers + 1);
    for (uint32_t place = 0; place < layers; ++place) {
        const uint32_t layer = g.layer_at[place];
        size_t offset = 0;
        for (uint32_t head = 0; head < kv_heads; ++head) {
            g.channel_head_offset[g.index(layer, head)] = offset;
            offset += g.channel_layout(PageKind::kChannel, layer, head).bytes();
        }
        g.channel_page_offset[place + 1] = g.channel_page_offset[place] + offset;
    }
    g.channel_payload_bytes = g.channel_page_offset[layers];
    g.channel_slot_bytes = ta::slot_bytes(g.channel_payload_bytes, layers);
    if (g.has_windows()) {
        g.passed_channel_payload_bytes = g.channel_page_offset[g.lasting_layers];
        g.passed_channel_slot_bytes = ta::slot_bytes(g.passed_channel_payload_bytes, g.lasting_layers);
    }
    return g;
}

// The order of pages in a slot.
Status Geometry::place_layers() {
    for (uint32_t layer = 0; layer < layers; ++layer) layer_at.push_back(layer);
    const auto last = std::stable_partition(layer_at.begin(), layer_at.end(), [&](uint32_t l) { return window(l) == 0; });
    lasting_layers = uint32_t(last - layer_at.begin());
    place_of.resize(layers);
    for (uint32_t place = 0; place < layers; ++place) place_of[layer_at[place]] = place;
    if (!has_windows()) return {};
    largest_window = *std::max_element(windows.begin(), windows.end());
    if (falls) return fail(TA_E_UNSUPPORTED, "options.layer_groups: windows are not for pools with falling_precision");
    if (keeps_own_scales)
        return fail(TA_E_UNSUPPORTED, "options.layer_groups: windows are not for pools with TA_OPEN_SCALE_UNIVERSAL");
    return {};
}

double Geometry::bits_per_element(PageKind kind) const {
    return 8.0 * double(slot_bytes(kind)) / (double(kPageTokens) * layers * kv_heads * (k_channels + v_channels));
}

}  // namespace ta
