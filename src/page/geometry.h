// Shapes of a pool and where each head's piece lies in a slot.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/status.h"

namespace ta {

inline constexpr uint32_t kMaxLayers = 4096, kMaxKvHeads = 1024;

struct Geometry {
    static constexpr size_t kOwnScales = 2 * size_t(kPageTokens);  // of a head's tokens, K's and V's
    uint32_t layers = 0, kv_heads = 0, head_dim = 0;               // head_dim: channels that blocks have
    uint32_t k_channels = 0, v_channels = 0;                       // that callers have (kernels/format/channels.h)
    bool is_wider() const { return k_channels != head_dim || v_channels != head_dim; }
    bool all_8_bits = false;   // every block stays a token block, on the device
    bool some_8_bits = false;  // some heads of channel blocks have 8 bits
    bool falls = false;  // precision falls on the way down (tiering/store/fall.h): there are low blocks, and channel blocks
    // For universal open scales: blocks have the scales that their tokens would have alone. Channel pages have the largest
    // (ChannelLayout::own_scales); token blocks have all, [layers, kv_heads, K and V, 64], behind their trailer.
    bool keeps_own_scales = false;
    std::vector<uint8_t> k_bits;  // [layers, kv_heads] of channel blocks: 8, 4 or 2
    std::vector<uint8_t> v_bits;
    // [layers] keys that a query sees at most, 0: all of them. Empty: no layer has a window.
    std::vector<int64_t> windows;
    int64_t largest_window = 0;

    // Pages lie in a slot in this order: those of layers without a window first, which are all that passed blocks have.
    std::vector<uint32_t> layer_at, place_of;         // [layers] by place, and the reverse
    uint32_t lasting_layers = 0;                      // without a window
    size_t token_page_bytes = 0, low_page_bytes = 0;  // one layer, the same for all
    std::vector<size_t> channel_page_offset;          // [layers + 1] within a channel slot, by place
    std::vector<size_t> channel_head_offset;          // [layers, kv_heads] within a channel page
    size_t token_payload_bytes = 0, channel_payload_bytes = 0;
    size_t low_payload_bytes = 0, passed_token_payload_bytes = 0, passed_channel_payload_bytes = 0;
    // With trailer; 0: there is no such kind.
    size_t token_slot_bytes = 0, channel_slot_bytes = 0, low_slot_bytes = 0, passed_token_slot_bytes = 0,
           passed_channel_slot_bytes = 0;

    // Checks the shape and lays everything out; empty bit maps mean `bits` everywhere. Texts speak of ta_kv_pool_options.
    // head_dim, v_head_dim: those of callers; 0: as head_dim.
    static Result<Geometry> make(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t bits, const uint8_t* k_bits,
                                 const uint8_t* v_bits, bool falls = false, bool keeps_own_scales = false,
                                 uint32_t v_head_dim = 0, std::vector<int64_t> windows = {});

    bool has_windows() const { return !windows.empty(); }
    int64_t window(uint32_t layer) const { return has_windows() ? windows[layer] : 0; }
    // The first block of which tokens at `position` and behind it may need the pages of layers with windows. The block before the
    // one that they come into counts: its keys help to encode theirs (kernels/format/turning.h).
    int64_t first_needed(int64_t position) const {
        const int64_t seen = position - largest_window + 1, before = (position / kPageTokens - 1) * kPageTokens;
        return std::max<int64_t>(0, std::min(seen, before)) / kPageTokens;
    }
    // How many pages a block has, in their places.
    uint32_t pages_of(PageKind kind) const { return is_passed(kind) ? lasting_layers : layers; }
    bool has_page(PageKind kind, uint32_t layer) const { return place_of[layer] < pages_of(kind); }

    size_t index(uint32_t layer, uint32_t head) const { return size_t(layer) * kv_heads + head; }
    // Of a head's piece in a page that is not a token page.
    ChannelLayout channel_layout(PageKind kind, uint32_t layer, uint32_t head) const {
        if (kind == PageKind::kLow) return {int(head_dim), 2, 2};
        return {int(head_dim), k_bits[index(layer, head)], v_bits[index(layer, head)]};
    }
    size_t page_offset(PageKind kind, uint32_t layer) const {
        const uint32_t place = place_of[layer];
        return page_format(kind) == PageKind::kChannel ? channel_page_offset[place] : place * page_bytes(kind, layer);
    }
    size_t page_bytes(PageKind kind, uint32_t layer) const {
        const PageKind format = page_format(kind);
        const uint32_t place = place_of[layer];
        return format == PageKind::kToken ? token_page_bytes
               : format == PageKind::kLow ? low_page_bytes
                                          : channel_page_offset[place + 1] - channel_page_offset[place];
    }
    // Of a head's piece within its page.
    size_t head_offset(PageKind kind, uint32_t layer, uint32_t head) const {
        const PageKind format = page_format(kind);
        return format == PageKind::kToken ? head * TokenLayout(int(head_dim)).bytes()
               : format == PageKind::kLow ? head * (low_page_bytes / kv_heads)
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
        return keeps_own_scales && kind == PageKind::kToken ? size_t(layers) * kv_heads * kOwnScales * sizeof(float) : 0;
    }
    // Of a head's, in a token block.
    size_t own_scales_offset(uint32_t layer, uint32_t head) const {
        return token_slot_bytes - own_scales_bytes(PageKind::kToken) + index(layer, head) * kOwnScales * sizeof(float);
    }
    double bits_per_element(PageKind kind) const;

  private:
    Status place_layers();
};

// Layers, heads and head_dim that a pool or calibrator accepts; a failure names their places in ta_calibrator_create. `in`:
// what texts call the struct that they are fields of, with a dot.
Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in = "");

}  // namespace ta
