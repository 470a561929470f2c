// Shapes of a pool and where each head's piece lies in a slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/layout.h"
#include "src/core/status.h"

namespace ta {

inline constexpr uint32_t kMaxLayers = 4096, kMaxKvHeads = 1024;

struct Geometry {
    static constexpr size_t kOwnScales = 2 * size_t(kPageTokens);  // of a head's tokens, K's and V's
    uint32_t layers = 0, kv_heads = 0, head_dim = 0;
    bool all_8_bits = false;  // every block stays a token block, on the device
    bool falls = false;  // precision falls on the way down (tiering/store/fall.h): there are low blocks, and channel blocks
    // For universal open scales: blocks have the scales that their tokens would have alone. Channel pages have the largest
    // (ChannelLayout::own_scales); token blocks have all, [layers, kv_heads, K and V, 64], behind their trailer.
    bool keeps_own_scales = false;
    std::vector<uint8_t> k_bits;  // [layers, kv_heads] of channel blocks; 8 where there are none
    std::vector<uint8_t> v_bits;

    size_t token_page_bytes = 0, low_page_bytes = 0;  // one layer, the same for all
    std::vector<size_t> channel_page_offset;          // [layers + 1] within a channel slot
    std::vector<size_t> channel_head_offset;          // [layers, kv_heads] within a channel page
    size_t token_payload_bytes = 0, channel_payload_bytes = 0;
    size_t low_payload_bytes = 0;
    size_t token_slot_bytes = 0, channel_slot_bytes = 0, low_slot_bytes = 0;  // with trailer; 0: there is no such kind

    // Checks the shape and lays everything out; empty bit maps mean `bits` everywhere. Texts speak of ta_kv_pool_options.
    static Result<Geometry> make(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, uint32_t bits, const uint8_t* k_bits,
                                 const uint8_t* v_bits, bool falls = false, bool keeps_own_scales = false);

    size_t index(uint32_t layer, uint32_t head) const { return size_t(layer) * kv_heads + head; }
    // Of a head's piece in a page that is not a token page.
    ChannelLayout channel_layout(PageKind kind, uint32_t layer, uint32_t head) const {
        if (kind == PageKind::kLow) return {int(head_dim), 2, 2};
        return {int(head_dim), k_bits[index(layer, head)], v_bits[index(layer, head)]};
    }
    size_t page_offset(PageKind kind, uint32_t layer) const {
        return kind == PageKind::kChannel ? channel_page_offset[layer] : layer * page_bytes(kind, layer);
    }
    size_t page_bytes(PageKind kind, uint32_t layer) const {
        return kind == PageKind::kToken ? token_page_bytes
               : kind == PageKind::kLow ? low_page_bytes
                                        : channel_page_offset[layer + 1] - channel_page_offset[layer];
    }
    // Of a head's piece within its page.
    size_t head_offset(PageKind kind, uint32_t layer, uint32_t head) const {
        return kind == PageKind::kToken ? head * TokenLayout(int(head_dim)).bytes()
               : kind == PageKind::kLow ? head * (low_page_bytes / kv_heads)
                                        : channel_head_offset[index(layer, head)];
    }
    bool has_channel_blocks() const { return channel_slot_bytes > 0; }
    size_t payload_bytes(PageKind kind) const {
        return kind == PageKind::kToken ? token_payload_bytes
               : kind == PageKind::kLow ? low_payload_bytes
                                        : channel_payload_bytes;
    }
    size_t slot_bytes(PageKind kind) const {
        return kind == PageKind::kToken ? token_slot_bytes : kind == PageKind::kLow ? low_slot_bytes : channel_slot_bytes;
    }
    size_t own_scales_bytes(PageKind kind) const {
        return keeps_own_scales && kind == PageKind::kToken ? size_t(layers) * kv_heads * kOwnScales * sizeof(float) : 0;
    }
    // Of a head's, in a token block.
    size_t own_scales_offset(uint32_t layer, uint32_t head) const {
        return token_slot_bytes - own_scales_bytes(PageKind::kToken) + index(layer, head) * kOwnScales * sizeof(float);
    }
    double bits_per_element(PageKind kind) const;
};

// Layers, heads and head_dim that a pool or calibrator accepts; a failure names their places in ta_calibrator_create. `in`:
// what texts call the struct that they are fields of, with a dot.
Status check_shape(uint32_t layers, uint32_t kv_heads, uint32_t head_dim, const char* in = "");

}  // namespace ta
