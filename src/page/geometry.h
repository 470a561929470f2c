// The shape of a pool, and the place of each head's piece in a slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/status.h"

struct ta_layer_group;

namespace ta {

inline constexpr uint32_t kMaxLayers = 4096, kMaxKvHeads = 1024;

// head_dim: the channels that blocks have. k_channels, v_channels: those that callers pass (kernels/format/channels.h).
struct LayerShape {
    uint32_t kv_heads = 0, head_dim = 0, k_channels = 0, v_channels = 0;
    bool is_wider() const { return k_channels != head_dim || v_channels != head_dim; }
    bool operator==(const LayerShape&) const = default;
};

// The shape of a pool, as ta_kv_pool_options says it.
struct GeometryOptions {
    uint32_t layers = 0, kv_heads = 0;
    uint32_t head_dim = 0, v_head_dim = 0;               // in channels of callers; v_head_dim 0: as head_dim
    uint32_t bits = 0;                                   // of heads that no map covers; 0: 4
    const uint8_t *k_bits = nullptr, *v_bits = nullptr;  // [heads of all layers], or none
    bool falls = false;                                  // falling precision is on
    bool keeps_own_scales = false;                       // keep each token's own scales, for universal open scales
    std::span<const ta_layer_group> groups = {};         // disjoint ranges of layers, each within the pool
};

struct Geometry {
    static constexpr size_t kOwnScales = 2 * size_t(kPageTokens);  // values for one head: K and V of 64 tokens
    uint32_t layers = 0;
    LayerShape common;                              // of layers that no group covers
    std::vector<LayerShape> shapes;                 // [layers]
    uint32_t most_kv_heads = 0, most_channels = 0;  // the most of any layer; channels: summed over its heads
    bool all_8_bits = false;                        // all heads have 8 bits: blocks on the device stay token blocks
    bool some_8_bits = false;                       // some heads of channel blocks have 8 bits
    bool falls = false;  // Precision falls on demotion (tiering/store/fall.h), so the pool has low blocks and channel blocks.
    // For universal open scales: blocks also store the scales that each token would have had alone. A channel page stores the
    // largest of them (ChannelLayout::own_scales); a token block stores all, [layers, kv_heads, K and V, 64], behind its
    // trailer.
    bool keeps_own_scales = false;
    std::vector<size_t> first_head;     // [layers + 1]: sum of heads before the layer
    std::vector<size_t> first_channel;  // [layers + 1]: sum of channels before the layer
    std::vector<uint8_t> k_bits;        // [heads of all layers] of channel blocks: 8, 4 or 2
    std::vector<uint8_t> v_bits;
    // [layers]: how many keys a query sees at most; 0: all. Empty: no layer has a window.
    std::vector<int64_t> windows;
    int64_t largest_window = 0;

    // The order of pages in a slot. Layers without a window come first, because a passed block keeps only their pages.
    std::vector<uint32_t> layer_at, place_of;  // [layers]: place to layer, and layer to place
    uint32_t lasting_layers = 0;               // layers without a window
    std::vector<size_t> token_page_offset;     // [layers + 1] within a token slot, by place
    std::vector<size_t> channel_page_offset;   // likewise; empty: the pool has no channel blocks
    size_t low_page_bytes = 0;                 // the same for all layers
    size_t largest_token_page_bytes = 0;
    std::vector<size_t> channel_head_offset;  // [heads of all layers] within a channel page
    size_t token_payload_bytes = 0, channel_payload_bytes = 0;
    size_t low_payload_bytes = 0, passed_token_payload_bytes = 0, passed_channel_payload_bytes = 0;
    // Sizes with trailer; 0: the pool has no blocks of that kind.
    size_t token_slot_bytes = 0, channel_slot_bytes = 0, low_slot_bytes = 0, passed_token_slot_bytes = 0,
           passed_channel_slot_bytes = 0;

    // Checks the shape and computes the layout. Error texts name fields of ta_kv_pool_options.
    static Result<Geometry> make(const GeometryOptions& options);

    const LayerShape& shape(uint32_t layer) const { return shapes[layer]; }
    bool is_even() const {
        return std::all_of(shapes.begin(), shapes.end(), [&](const LayerShape& s) { return s == common; });
    }
    // The first layer after this one whose shape differs.
    uint32_t end_of_run(uint32_t layer) const {
        const auto is_other = [&](const LayerShape& s) { return s != shapes[layer]; };
        return uint32_t(std::find_if(shapes.begin() + layer, shapes.end(), is_other) - shapes.begin());
    }
    bool is_wider() const {
        return std::any_of(shapes.begin(), shapes.end(), [](const LayerShape& s) { return s.is_wider(); });
    }
    // How many values of K and V one token has over all layers, in channels of callers.
    size_t values_of_token() const;
    bool has_windows() const { return !windows.empty(); }
    int64_t window(uint32_t layer) const { return has_windows() ? windows[layer] : 0; }
    // The first block whose windowed pages are needed by tokens at `position` or later. That includes the block before the one
    // that the tokens are written to, because its keys help to encode theirs (kernels/format/turning.h).
    int64_t first_needed(int64_t position) const {
        const int64_t seen = position - largest_window + 1, before = (position / kPageTokens - 1) * kPageTokens;
        return std::max<int64_t>(0, std::min(seen, before)) / kPageTokens;
    }
    // Blocks before this one are passed once a sequence has this length. It leaves slack for a rollback by one block's tokens.
    int64_t first_kept(int64_t length) const { return first_needed(length - kPageTokens); }
    // How many pages a block of this kind has: those in the first places.
    uint32_t pages_of(PageKind kind) const { return is_passed(kind) ? lasting_layers : layers; }
    bool has_page(PageKind kind, uint32_t layer) const { return place_of[layer] < pages_of(kind); }

    size_t heads() const { return first_head[layers]; }  // of all layers
    size_t index(uint32_t layer, uint32_t head) const { return first_head[layer] + head; }
    // The index of a head's first channel among the channels of all heads.
    size_t channel_index(uint32_t layer, uint32_t head) const {
        return first_channel[layer] + size_t(head) * shapes[layer].head_dim;
    }
    TokenLayout token_layout(uint32_t layer) const { return TokenLayout(int(shapes[layer].head_dim)); }
    // The layout of a head's piece in a page that is not a token page.
    ChannelLayout channel_layout(PageKind kind, uint32_t layer, uint32_t head) const {
        const int d = int(shapes[layer].head_dim);
        if (kind == PageKind::kLow) return {d, 2, 2};
        return {d, k_bits[index(layer, head)], v_bits[index(layer, head)]};
    }
    // The offset of the page in a place; for place == `layers`, the end of the last page.
    size_t offset_in_place(PageKind kind, uint32_t place) const {
        const PageKind format = page_format(kind);
        return format == PageKind::kToken ? token_page_offset[place]
               : format == PageKind::kLow ? place * low_page_bytes
                                          : channel_page_offset[place];
    }
    size_t page_offset(PageKind kind, uint32_t layer) const { return offset_in_place(kind, place_of[layer]); }
    size_t page_bytes(PageKind kind, uint32_t layer) const {
        const uint32_t place = place_of[layer];
        return offset_in_place(kind, place + 1) - offset_in_place(kind, place);
    }
    // The offset of a head's piece within its page.
    size_t head_offset(PageKind kind, uint32_t layer, uint32_t head) const {
        const PageKind format = page_format(kind);
        return format == PageKind::kToken ? head * token_layout(layer).bytes()
               : format == PageKind::kLow ? head * channel_layout(kind, layer, 0).bytes()
                                          : channel_head_offset[index(layer, head)];
    }
    bool has_channel_blocks() const { return channel_slot_bytes > 0; }
    size_t payload_bytes(PageKind kind) const {
        const size_t bytes[kPageKinds] = {token_payload_bytes, channel_payload_bytes, low_payload_bytes,
                                          passed_token_payload_bytes, passed_channel_payload_bytes};
        return bytes[size_t(kind)];
    }
    size_t slot_bytes(PageKind kind) const {
        const size_t bytes[kPageKinds] = {token_slot_bytes, channel_slot_bytes, low_slot_bytes, passed_token_slot_bytes,
                                          passed_channel_slot_bytes};
        return bytes[size_t(kind)];
    }
    size_t own_scales_bytes(PageKind kind) const {
        return keeps_own_scales && kind == PageKind::kToken ? heads() * kOwnScales * sizeof(float) : 0;
    }
    // The offset of a head's own scales in a token block.
    size_t own_scales_offset(uint32_t layer, uint32_t head) const {
        return token_slot_bytes - own_scales_bytes(PageKind::kToken) + index(layer, head) * kOwnScales * sizeof(float);
    }
    double bits_per_element(PageKind kind) const;

  private:
    Status shape_layers(std::span<const ta_layer_group> groups);
    Status place_layers();
    void place_pages();
};

// Checks layers, heads and head_dim of a pool or calibrator. A failure names the argument of ta_calibrator_create. `in`: the
// prefix for field names in error texts, with the dot, such as "options.".
Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in = "");

}  // namespace ta
