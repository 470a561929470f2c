#include "tiering/store/fall.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace ta {
namespace {

// Writes the page's largest own scales: [64] of K and of V, or one of each.
void keep_largest(const float* own, size_t each, uint8_t* to) {
    for (int which = 0; which < 2; ++which, own += each) {
        const float largest = *std::max_element(own, own + each);
        std::memcpy(to + size_t(which) * sizeof largest, &largest, sizeof largest);
    }
}

// On the heap: too large for a caller's stack.
struct Scratch {
    cpu::HeadStage1 values;
    alignas(kPieceAlignment) uint8_t between[ChannelLayout(kMaxHeadDim, 4, 4).bytes()];
};

}  // namespace

Status encode_lower(const Pages& pages, const uint8_t* from, PageKind from_kind, uint8_t* to, PageKind to_kind, uint32_t first,
                    uint32_t n) {
    const Geometry& g = pages.geometry;
    const cpu::PageCodec& codec = *pages.codec;
    const auto piece_of = [&g](PageKind kind, uint32_t layer, uint32_t head) {
        return g.page_offset(kind, layer) + g.head_offset(kind, layer, head);
    };
    const std::unique_ptr<Scratch> scratch(new (std::nothrow) Scratch);
    if (!scratch) return fail(TA_E_MEMORY, "no memory to encode a page with fewer bits").bytes(sizeof(Scratch));
    cpu::HeadStage1& values = scratch->values;
    for (uint32_t layer = first; layer < first + n; ++layer) {
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            const uint8_t* piece = from + piece_of(from_kind, layer, head);
            uint8_t* out = to + piece_of(to_kind, layer, head);
            const ChannelLayout channel = g.channel_layout(PageKind::kChannel, layer, head);
            const auto keep = [&](const ChannelLayout& layout) {
                if (!g.keeps_own_scales) return;
                const bool of_tokens = from_kind == PageKind::kToken;
                const uint8_t* own = of_tokens ? from + g.own_scales_offset(layer, head)
                                               : from + piece_of(from_kind, layer, head) + channel.own_scales();
                keep_largest(reinterpret_cast<const float*>(own), of_tokens ? kPageTokens : 1, out + layout.own_scales());
            };
            if (from_kind == PageKind::kToken) {
                codec.load_token_piece(piece, int(g.shape(layer).head_dim), kPageTokens, values);
                uint8_t* closed = to_kind == PageKind::kChannel ? out : scratch->between;
                codec.encode_channel_piece(values, channel, pages.numerics.encode, closed);
                if (to_kind == PageKind::kChannel) {
                    keep(channel);
                    continue;
                }
                piece = closed;
            }
            codec.decode_channel_piece(piece, channel, kPageTokens, values);
            const ChannelLayout low = g.channel_layout(PageKind::kLow, layer, head);
            codec.encode_channel_piece(values, low, pages.numerics.encode, out);
            keep(low);
        }
    }
    return {};
}

}  // namespace ta
