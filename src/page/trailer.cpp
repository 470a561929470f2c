#include "src/page/trailer.h"

#include <cstring>

#include "kernels/format/check.h"
#include "kernels/format/hash.h"
#include "kernels/format/slot.h"

namespace ta {
namespace {

SlotTrailer* trailer_of(const Geometry& g, PageKind kind, uint8_t* slot) {
    return reinterpret_cast<SlotTrailer*>(slot + g.payload_bytes(kind));
}

PageIdentity identity_of(const SlotTrailer& t, const Geometry& g, uint32_t place) {
    PageIdentity id{};
    id.fingerprint = t.fingerprint;
    id.block_index = t.block_index;
    id.content_id = t.content_id;
    id.layer = place;
    id.tokens = t.tokens;
    id.magic = t.magic;
    id.version = t.version;
    id.kind = t.kind;
    id.payload_bytes = g.page_bytes(PageKind(t.kind), g.layer_at[place]);
    return id;
}

uint64_t hash_of(const Geometry& g, PageKind kind, const SlotTrailer& t, const uint8_t* slot, uint32_t place) {
    const uint64_t hash = page_hash(identity_of(t, g, place), slot + g.page_offset(kind, g.layer_at[place]));
    const size_t own = place + 1 == g.layers ? g.own_scales_bytes(kind) : 0;
    return own > 0 ? hash ^ hash_bytes(slot + g.own_scales_offset(0, 0), own) : hash;
}

}  // namespace

void write_trailer(const Geometry& g, PageKind kind, uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens, bool hashes) {
    SlotTrailer* t = trailer_of(g, kind, slot);
    std::memset(t, 0, g.slot_bytes(kind) - g.own_scales_bytes(kind) - g.payload_bytes(kind));
    t->magic = kSlotMagic;
    t->version = kFormatVersion;
    t->kind = uint8_t(page_format(kind));
    t->fingerprint = fingerprint;
    t->block_index = block_index;
    t->content_id = content_id;
    t->tokens = tokens;
    t->layers = g.layers;
    if (hashes && tokens == uint32_t(kPageTokens)) write_page_hashes(g, kind, slot, 0, g.pages_of(kind));
}

void write_page_hashes(const Geometry& g, PageKind kind, uint8_t* slot, uint32_t first, uint32_t n) {
    SlotTrailer* t = trailer_of(g, kind, slot);
    auto* hashes = reinterpret_cast<uint64_t*>(t + 1);
    for (uint32_t place = first; place < first + n; ++place) hashes[place] = hash_of(g, kind, *t, slot, place);
}

LastingPages lasting_pages(const Geometry& g, PageKind kind) {
    const PageKind to = passed_kind(kind);
    const size_t trailer = sizeof(SlotTrailer) + g.lasting_layers * sizeof(uint64_t);
    return {g.payload_bytes(to), g.payload_bytes(kind), trailer, g.slot_bytes(to) - g.payload_bytes(to) - trailer};
}

void copy_lasting_pages(const Geometry& g, PageKind kind, const uint8_t* slot, uint8_t* passed) {
    const LastingPages p = lasting_pages(g, kind);
    std::memcpy(passed, slot, p.payload);
    std::memcpy(passed + p.payload, slot + p.trailer_from, p.trailer);
    std::memset(passed + p.payload + p.trailer, 0, p.rest);
}

Status verify_trailer(const Geometry& g, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                      uint64_t content_id, uint32_t tokens) {
    const auto* t = reinterpret_cast<const SlotTrailer*>(slot + g.payload_bytes(kind));
    if (t->magic == kSlotMagic && t->version == kFormatVersion && t->kind == uint8_t(page_format(kind)) &&
        t->fingerprint == fingerprint && t->block_index == block_index && t->content_id == content_id && t->tokens == tokens &&
        t->layers == g.layers)
        return {};
    return fail(TA_E_CORRUPT, "the block's trailer does not name the block that is asked for").block(int64_t(block_index));
}

Status verify_pages(const Geometry& g, PageKind kind, const uint8_t* slot, uint64_t block_index, uint32_t first, uint32_t n) {
    const auto* t = reinterpret_cast<const SlotTrailer*>(slot + g.payload_bytes(kind));
    const auto* hashes = reinterpret_cast<const uint64_t*>(t + 1);
    for (uint32_t place = first; place < first + n; ++place) {
        if (hash_of(g, kind, *t, slot, place) == hashes[place]) continue;
        return fail(TA_E_CORRUPT, "a page does not match its hash").layer(g.layer_at[place]).block(int64_t(block_index));
    }
    return {};
}

Status verify_slot(const Geometry& g, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens) {
    TA_RETURN_IF_ERROR(verify_trailer(g, kind, slot, fingerprint, block_index, content_id, tokens));
    return tokens < uint32_t(kPageTokens) ? Status() : verify_pages(g, kind, slot, block_index, 0, g.pages_of(kind));
}

Status check_values(const Geometry& g, bool k_turning, PageKind kind, const uint8_t* slot, uint64_t block_index) {
    for (uint32_t place = 0; place < g.pages_of(kind); ++place) {
        const uint32_t layer = g.layer_at[place];
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            const uint8_t* piece = slot + g.page_offset(kind, layer) + g.head_offset(kind, layer, head);
            bool good;
            if (page_format(kind) == PageKind::kToken) {
                good =
                    is_good_token_piece(piece, int(g.shape(layer).head_dim), k_turning) &&
                    (!g.keeps_own_scales || are_good_own_scales(slot + g.own_scales_offset(layer, head), Geometry::kOwnScales));
            } else {
                good = is_good_channel_piece(piece, g.channel_layout(kind, layer, head), k_turning, g.keeps_own_scales);
            }
            if (good) continue;
            return fail(TA_E_CORRUPT, "a page has steps, codes or scales that no encoder writes")
                .layer(layer)
                .head(head)
                .block(int64_t(block_index));
        }
    }
    return {};
}

}  // namespace ta
