#include <algorithm>
#include <cstring>
#include <vector>

#include "include/turboattention_experimental.h"
#include "kernels/format/channels.h"
#include "kernels/format/dequantize.h"
#include "kernels/format/rotation.h"
#include "kernels/format/turning.h"
#include "src/api/api.h"

using namespace ta;
using namespace ta::api;

namespace {

uint32_t bits_of(const Geometry& g, PageKind of) {
    const PageKind kind = page_format(of);
    if (kind != PageKind::kChannel) return kind == PageKind::kToken ? 8 : 2;
    const auto has_4 = [](const std::vector<uint8_t>& bits) { return std::find(bits.begin(), bits.end(), 4) != bits.end(); };
    return has_4(g.k_bits) || has_4(g.v_bits) ? 4 : 2;
}

// One layer's page of a block, in host memory. `copy` holds it if the block is on a device or on disk.
struct Page {
    const uint8_t* data;
    PageKind kind;
};
Result<Page> readable_page(const Pool& pool, const Block& block, uint64_t index, uint32_t layer, std::vector<uint8_t>& copy) {
    const Geometry& g = pool.geometry();
    const Place at = pool.blocks().place_of(block);
    if (!g.has_page(at.kind, layer))
        return fail(TA_E_STATE, "the layer's window has passed the block").layer(layer).block(int64_t(index));
    const PageKind format = page_format(at.kind);
    if (at.tier == TierKind::kDisk) {
        copy.resize(g.slot_bytes(at.kind));
        TA_RETURN_IF_ERROR(pool.reader().read(block, index, copy.data()));
        return Page{copy.data() + g.page_offset(at.kind, layer), format};
    }
    const uint8_t* page = at.address + g.page_offset(at.kind, layer);
    if (!pool.context().device()) return Page{page, format};
    copy.resize(g.page_bytes(at.kind, layer));
    TA_RETURN_IF_ERROR(pool.context().device()->read(copy.data(), page, copy.size()));
    return Page{copy.data(), format};
}

// Describes a block where it lies: fills in the fields of `info` that depend on the place, and copies the block to `slot`
// unless that is nullptr. TA_E_INVALID: the slot has more bytes than `room`.
Status describe_block(Pool& pool, const Block& block, uint64_t index, uint64_t room, ta_x_block_info& info,
                      std::vector<uint8_t>* slot) {
    const Geometry& g = pool.geometry();
    const ReadingBlocks reading(pool.blocks());
    const Place at = pool.blocks().place_of(block);
    info.bits = bits_of(g, at.kind);
    info.bytes = g.slot_bytes(at.kind);
    info.trailer_offset = g.payload_bytes(at.kind);
    if (!slot) return {};
    if (room < info.bytes) {
        return fail(TA_E_INVALID, "buffer_bytes is %llu; the block has %llu", (unsigned long long)room,
                    (unsigned long long)info.bytes)
            .argument(5);
    }
    slot->resize(info.bytes);
    if (at.tier == TierKind::kDisk) return pool.reader().read(block, index, slot->data());
    TA_RETURN_IF_ERROR(pool.reader().read_memory(at, slot->data()));
    const bool lacks_trailer = !block.sealed() && pool.context().device();
    if (lacks_trailer) block.write_trailer(g, pool.fingerprint(), index, info.tokens, slot->data());
    return {};
}

// Where to write rows of floats, `stride` floats apart; k or v is nullptr if not wanted.
struct FloatRows {
    float *k, *v;
    int64_t k_stride, v_stride;
};

// Dequantizes tokens [first, last) of one head of a page.
void dequantize_head(const Pool& pool, const Page& page, uint32_t layer, uint32_t head, int first, int last,
                     const FloatRows& to) {
    const Geometry& g = pool.geometry();
    const Numerics& n = pool.numerics();
    const LayerShape& shape = g.shape(layer);
    const int d = int(shape.head_dim);
    const PageKind kind = page.kind;
    const uint8_t* piece = page.data + g.head_offset(kind, layer, head);
    const float* offset = n.k_offset.empty() ? nullptr : n.k_offset.data() + g.channel_index(layer, head);
    const TurningPairs turning = !n.encode.k_turning        ? TurningPairs{}
                                 : kind == PageKind::kToken ? turning_of_tokens(piece, TokenLayout(d))
                                                            : turning_of_channel(piece, g.channel_layout(kind, layer, head));
    for (int t = first; t < last; ++t) {
        float row_k[kMaxHeadDim], row_v[kMaxHeadDim];
        if (kind == PageKind::kToken) {
            dequantize_token(piece, TokenLayout(d), t, row_k, row_v);
        } else {
            dequantize_token(piece, g.channel_layout(kind, layer, head), t, row_k, row_v);
        }
        if (n.hadamard) rotate_back(row_k, d, n.hadamard_seed);
        for (int p = 0; p < kTurningPairs && turning.code[p]; ++p) {
            const TurningPair pair = unpack_turning(turning.code[p]);
            const TurningValues at = turning_values(pair, t);
            row_k[pair.first] += at.first;
            row_k[pair.second] += at.second;
        }
        for (int c = 0; to.k && c < int(shape.k_channels); ++c) {
            const int from = channel_of(c, int(shape.k_channels), d);
            to.k[int64_t(t - first) * to.k_stride + c] = row_k[from] + (offset ? offset[from] : 0.0f);
        }
        for (int c = 0; to.v && c < int(shape.v_channels); ++c)
            to.v[int64_t(t - first) * to.v_stride + c] = row_v[channel_of(c, int(shape.v_channels), d)];
    }
}

}  // namespace

extern "C" {

ta_status ta_x_seq_block(const ta_kv_pool* pool, ta_seq seq, uint64_t block, ta_x_block_info* info, void* buffer,
                         uint64_t buffer_bytes, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(info, "info", 3));
        TA_RETURN_IF_ERROR(check_struct_size(info, "info", 3));
        Pool& p = *pool->impl;
        const Residency::BlockHold holds(p.residency());
        BlockPtr full;  // read without the pool's lock, because that may take long
        ta_x_block_info r{};
        std::vector<uint8_t> bytes, *const slot = buffer ? &bytes : nullptr;
        TA_RETURN_IF_ERROR(p.sequences().inspect(seq, [&](const Sequence& s) -> Status {
            if (block >= s.blocks.size()) {
                return fail(TA_E_INVALID, "block is %llu; the sequence has %zu", (unsigned long long)block, s.blocks.size())
                    .argument(2);
            }
            const BlockPtr& b = s.blocks[size_t(block)];
            if (b->dropped()) return p.sequences().lacks_block(b).block(int64_t(block));
            r.tokens = uint32_t(std::min<int64_t>(kPageTokens, s.length - int64_t(block) * kPageTokens));
            r.owners = uint32_t(b.use_count());
            r.content_id = b->content_id();
            // A step may go on writing an open block, so read it under the lock.
            if (!b->sealed()) return describe_block(p, *b, block, buffer_bytes, r, slot);
            full = b;
            return {};
        }));
        if (full) TA_RETURN_IF_ERROR(describe_block(p, *full, block, buffer_bytes, r, slot));
        TA_RETURN_IF_ERROR(write_struct(r, info, "info", 3));
        if (buffer) std::memcpy(buffer, bytes.data(), bytes.size());
        return {};
    });
}

ta_status ta_x_seq_attention(const ta_kv_pool* pool, ta_seq seq, uint64_t first, uint64_t n, float* mass, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_pointer(mass, "mass", 4));
        Pool& p = *pool->impl;
        TA_RETURN_IF_ERROR(p.check_open());
        if (!p.residency().observes_attention())
            return fail(TA_E_UNSUPPORTED, "the pool does not evict by TA_EVICT_ATTENTION").argument(0);
        p.sequences().take_in_attention(true);
        return p.sequences().inspect(seq, [&](const Sequence& s) -> Status {
            if (first > s.blocks.size() || n > s.blocks.size() - first) {
                return fail(TA_E_INVALID, "blocks %llu + %llu are asked for; the sequence has %zu", (unsigned long long)first,
                            (unsigned long long)n, s.blocks.size())
                    .argument(2);
            }
            Decay decay = p.residency().decay();
            for (uint64_t i = 0; i < n; ++i) mass[i] = decay.at_now(s.blocks[size_t(first + i)]->mass());
            return {};
        });
    });
}

ta_status ta_x_seq_dequantize(const ta_kv_pool* pool, ta_seq seq, uint32_t layer, int64_t first, int64_t tokens, float* k,
                              float* v, ta_error* err) {
    return guard(err, [&]() -> Status {
        TA_RETURN_IF_ERROR(check_pool(pool));
        TA_RETURN_IF_ERROR(check_aligned(k, "k", 5));
        TA_RETURN_IF_ERROR(check_aligned(v, "v", 6));
        const Pool& p = *pool->impl;
        const Geometry& g = p.geometry();
        if (layer >= g.layers) return fail(TA_E_INVALID, "layer is %u; the pool has %u", layer, g.layers).argument(2);
        const LayerShape& shape = g.shape(layer);
        const int64_t k_stride = int64_t(shape.kv_heads) * shape.k_channels,
                      v_stride = int64_t(shape.kv_heads) * shape.v_channels;
        const Residency::BlockHold holds(pool->impl->residency());
        std::vector<uint8_t> copy;
        std::vector<float> rows_k, rows_v;  // reading may fail, so results go here first
        const auto read = [&](const Block& block, int64_t b) -> Status {
            const ReadingBlocks reading(pool->impl->blocks());
            Result<Page> page = readable_page(p, block, uint64_t(b), layer, copy);
            if (!page.ok()) return std::move(page).status();
            const int64_t from = std::max(first, b * kPageTokens), to = std::min(first + tokens, (b + 1) * kPageTokens);
            for (uint32_t head = 0; head < shape.kv_heads; ++head) {
                const int64_t k_at = (from - first) * k_stride + int64_t(head) * shape.k_channels,
                              v_at = (from - first) * v_stride + int64_t(head) * shape.v_channels;
                const FloatRows rows{k ? rows_k.data() + k_at : nullptr, v ? rows_v.data() + v_at : nullptr, k_stride,
                                     v_stride};
                dequantize_head(p, page.value(), layer, head, int(from - b * kPageTokens), int(to - b * kPageTokens), rows);
            }
            return {};
        };
        std::vector<BlockPtr> full;  // read without the pool's lock, because that may take long
        Status seen = p.sequences().inspect(seq, [&](const Sequence& s) -> Status {
            if (first < 0 || tokens < 0 || first > s.length || tokens > s.length - first) {
                return fail(TA_E_INVALID, "tokens %lld + %lld do not lie in a sequence of %lld", (long long)first,
                            (long long)tokens, (long long)s.length)
                    .argument(3);
            }
            if (tokens == 0) return {};
            if (k) rows_k.resize(size_t(tokens * k_stride));
            if (v) rows_v.resize(size_t(tokens * v_stride));
            for (int64_t b = first / kPageTokens; b * kPageTokens < first + tokens; ++b) {
                const BlockPtr& block = s.blocks[size_t(b)];
                if (block->dropped()) return p.sequences().lacks_block(block).block(b);
                full.push_back(block->sealed() ? block : nullptr);
                if (!block->sealed()) TA_RETURN_IF_ERROR(read(*block, b));  // under the lock: a step may go on writing it
            }
            return {};
        });
        if (!seen.ok()) return seen;
        for (size_t i = 0; i < full.size(); ++i) {
            if (full[i]) TA_RETURN_IF_ERROR(read(*full[i], first / kPageTokens + int64_t(i)));
        }
        if (k && tokens > 0) std::memcpy(k, rows_k.data(), rows_k.size() * sizeof(float));
        if (v && tokens > 0) std::memcpy(v, rows_v.data(), rows_v.size() * sizeof(float));
        return {};
    });
}

}  // extern "C"
