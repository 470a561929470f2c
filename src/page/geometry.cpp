#include "src/page/geometry.h"

#include <algorithm>
#include <cstdio>

#include "include/turboattention.h"
#include "kernels/format/slot.h"
#include "src/page/block_channels.h"

namespace ta {
namespace {

Status check_bits(const Geometry& g, const std::vector<uint8_t>& bits, const char* name) {
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            const uint8_t n = bits[g.index(layer, head)];
            if (n != 8 && n != 4 && n != 2)
                return fail(TA_E_INVALID, "%s is %u; it takes 8, 4 or 2", name, n).layer(layer).head(head);
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

LayerShape layer_shape(uint32_t kv_heads, uint32_t k_channels, uint32_t v_channels) {
    return {kv_heads, block_channels(std::max(k_channels, v_channels)), k_channels, v_channels};
}

}  // namespace

Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in) {
    if (layers < 1 || layers > kMaxLayers)
        return fail(TA_E_INVALID, "%slayers is %u; it takes 1..%u", in, layers, kMaxLayers).argument(1);
    if (kv_heads < 1 || kv_heads > kMaxKvHeads)
        return fail(TA_E_INVALID, "%skv_heads is %u; it takes 1..%u", in, kv_heads, kMaxKvHeads).argument(2);
    return check_channels(head_dim, in, "head_dim");
}

Result<Geometry> Geometry::make(const GeometryOptions& o) {
    TA_RETURN_IF_ERROR(check_shape(o.layers, o.kv_heads, o.head_dim, "options."));
    const uint32_t v_channels = o.v_head_dim > 0 ? o.v_head_dim : o.head_dim;
    TA_RETURN_IF_ERROR(check_channels(v_channels, "options.", "v_head_dim"));
    const bool uses_bits = !o.k_bits || !o.v_bits;
    if (uses_bits && o.bits != 0 && o.bits != 8 && o.bits != 4 && o.bits != 2)
        return fail(TA_E_INVALID, "options.bits is %u; it takes 8, 4 or 2", o.bits);
    Geometry g;
    g.layers = o.layers;
    g.common = layer_shape(o.kv_heads, o.head_dim, v_channels);
    g.falls = o.falls;
    g.keeps_own_scales = o.keeps_own_scales;
    TA_RETURN_IF_ERROR(g.shape_layers(o.groups));
    const auto map_of = [&](const uint8_t* given) {
        return given ? std::vector<uint8_t>(given, given + g.heads())
                     : std::vector<uint8_t>(g.heads(), uint8_t(o.bits ? o.bits : 4));
    };
    g.k_bits = map_of(o.k_bits);
    g.v_bits = map_of(o.v_bits);
    if (o.k_bits) TA_RETURN_IF_ERROR(check_bits(g, g.k_bits, "options.k_bits"));
    if (o.v_bits) TA_RETURN_IF_ERROR(check_bits(g, g.v_bits, "options.v_bits"));
    g.all_8_bits = are_all(g.k_bits, 8) && are_all(g.v_bits, 8);
    if (o.falls && !g.all_8_bits && !(are_all(g.k_bits, 4) && are_all(g.v_bits, 4)))
        return fail(TA_E_UNSUPPORTED, "options.tiers.falling_precision is for pools of 8 or of 4 bits, the same for all heads");

    const auto has_8 = [](const std::vector<uint8_t>& map) { return std::find(map.begin(), map.end(), 8) != map.end(); };
    g.some_8_bits = !g.all_8_bits && (has_8(g.k_bits) || has_8(g.v_bits));

    TA_RETURN_IF_ERROR(g.place_layers());
    g.place_pages();
    return g;
}

// Fills in the shapes and windows of all layers.
Status Geometry::shape_layers(std::span<const ta_layer_group> groups) {
    shapes.assign(layers, common);
    for (size_t i = 0; i < groups.size(); ++i) {
        const ta_layer_group& group = groups[i];
        char in[48];
        std::snprintf(in, sizeof in, "options.layer_groups[%zu].", i);
        const uint32_t kv_heads = group.kv_heads > 0 ? group.kv_heads : common.kv_heads;
        const uint32_t k_channels = group.head_dim > 0 ? group.head_dim : common.k_channels;
        const uint32_t v_channels = group.v_head_dim > 0 ? group.v_head_dim
                                    : group.head_dim > 0 ? group.head_dim
                                                         : common.v_channels;
        TA_RETURN_IF_ERROR(check_shape(layers, kv_heads, k_channels, in));
        TA_RETURN_IF_ERROR(check_channels(v_channels, in, "v_head_dim"));
        const LayerShape shape = layer_shape(kv_heads, k_channels, v_channels);
        std::fill_n(shapes.begin() + group.first, group.layers, shape);
        if (falls && shape != common)
            return fail(TA_E_UNSUPPORTED, "%skv_heads and head_dim are for pools without falling_precision", in);
        if (keeps_own_scales && shape != common)
            return fail(TA_E_UNSUPPORTED, "%skv_heads and head_dim are not for pools with TA_OPEN_SCALE_UNIVERSAL", in);
        if (group.window == 0) continue;
        windows.resize(layers);
        std::fill_n(windows.begin() + group.first, group.layers, group.window);
    }
    first_head.assign(1, 0);
    first_channel.assign(1, 0);
    for (const LayerShape& s : shapes) {
        first_head.push_back(first_head.back() + s.kv_heads);
        first_channel.push_back(first_channel.back() + size_t(s.kv_heads) * s.head_dim);
        most_kv_heads = std::max(most_kv_heads, s.kv_heads);
        most_channels = std::max(most_channels, s.kv_heads * s.head_dim);
    }
    return {};
}

// Orders the pages of a slot.
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

// Computes the offsets of pages and the sizes of all kinds of blocks. There are at most 4096 x 1024 heads of 34 KB, so no
// product comes near 2^64.
void Geometry::place_pages() {
    token_page_offset.assign(1, 0);
    for (const uint32_t layer : layer_at) {
        const size_t bytes = token_layout(layer).bytes() * shapes[layer].kv_heads;
        token_page_offset.push_back(token_page_offset.back() + bytes);
        largest_token_page_bytes = std::max(largest_token_page_bytes, bytes);
    }
    token_payload_bytes = token_page_offset[layers];
    token_slot_bytes = ta::slot_bytes(token_payload_bytes, layers) + own_scales_bytes(PageKind::kToken);
    if (falls) {
        if (all_8_bits) {
            constexpr uint8_t kFallenBits = 4;
            std::fill(k_bits.begin(), k_bits.end(), kFallenBits);
            std::fill(v_bits.begin(), v_bits.end(), kFallenBits);
        }
        low_page_bytes = channel_layout(PageKind::kLow, 0, 0).bytes() * common.kv_heads;
        low_payload_bytes = low_page_bytes * layers;
        low_slot_bytes = ta::slot_bytes(low_payload_bytes, layers);
    }
    if (has_windows()) {
        passed_token_payload_bytes = token_page_offset[lasting_layers];
        passed_token_slot_bytes = ta::slot_bytes(passed_token_payload_bytes, lasting_layers);
    }
    if (all_8_bits && !falls) return;
    channel_head_offset.resize(heads());
    channel_page_offset.assign(1, 0);
    for (const uint32_t layer : layer_at) {
        size_t offset = 0;
        for (uint32_t head = 0; head < shapes[layer].kv_heads; ++head) {
            channel_head_offset[index(layer, head)] = offset;
            offset += channel_layout(PageKind::kChannel, layer, head).bytes();
        }
        channel_page_offset.push_back(channel_page_offset.back() + offset);
    }
    channel_payload_bytes = channel_page_offset[layers];
    channel_slot_bytes = ta::slot_bytes(channel_payload_bytes, layers);
    if (has_windows()) {
        passed_channel_payload_bytes = channel_page_offset[lasting_layers];
        passed_channel_slot_bytes = ta::slot_bytes(passed_channel_payload_bytes, lasting_layers);
    }
}

size_t Geometry::values_of_token() const {
    size_t n = 0;
    for (const LayerShape& s : shapes) n += size_t(s.kv_heads) * (s.k_channels + s.v_channels);
    return n;
}

double Geometry::bits_per_element(PageKind kind) const {
    return 8.0 * double(slot_bytes(kind)) / (double(kPageTokens) * double(values_of_token()));
}

}  // namespace ta
