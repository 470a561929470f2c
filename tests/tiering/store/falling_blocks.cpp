#include "tests/tiering/store/falling_blocks.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/hash.h"
#include "kernels/format/slot.h"

namespace ta::testing {

size_t FallingShape::piece_bytes(uint32_t bits) const {
    const int d = int(head_dim), b = int(bits);
    return bits == 8 ? TokenLayout(d).bytes() : ChannelLayout(d, b, b).bytes();
}

std::vector<uint8_t> encode_lower_by_hand(const FallingShape& s, uint32_t bits, const std::vector<uint8_t>& payload,
                                          const std::vector<uint8_t>& trailer) {
    const cpu::PageCodec& codec = cpu::page_codec_scalar();
    const int d = int(s.head_dim), low = int(bits) / 2;
    std::vector<uint8_t> out(s.payload_bytes(bits / 2), 0xa5);
    cpu::HeadStage1 values;
    for (uint32_t piece = 0; piece < s.layers * s.kv_heads; ++piece) {
        const uint8_t* from = payload.data() + piece * s.piece_bytes(bits);
        if (bits == 8) {
            codec.load_token_piece(from, d, kPageTokens, values);
        } else {
            codec.decode_channel_piece(from, ChannelLayout(d, int(bits), int(bits)), kPageTokens, values);
        }
        uint8_t* to = out.data() + piece * s.piece_bytes(bits / 2);
        codec.encode_channel_piece(values, ChannelLayout(d, low, low), s.encode, to);
        if (!s.own_scales) continue;
        // Behind the page scales and turning pairs, K's and V's largest.
        const size_t at = s.piece_bytes(bits / 2) - 128 + 104, each = kPageTokens * sizeof(float);
        for (size_t which = 0; which < 2; ++which) {
            float own[kPageTokens] = {};
            if (bits == 8) {
                std::memcpy(own, trailer.data() + trailer.size() - s.own_scales_bytes() + (2 * piece + which) * each, each);
            } else {
                std::memcpy(own, from + s.piece_bytes(bits) - 128 + 104 + which * sizeof(float), sizeof(float));
            }
            const float largest = *std::max_element(own, own + kPageTokens);
            std::memcpy(to + at + which * sizeof largest, &largest, sizeof largest);
        }
    }
    return out;
}

BlockBits read_block(const KvPool& pool, ta_seq seq, uint64_t block) {
    auto info = sized<ta_x_block_info>();
    ta_error err;
    require(ta_x_seq_block(pool.get(), seq, block, &info, nullptr, 0, &err), err);
    std::vector<uint8_t> bytes(info.bytes);
    require(ta_x_seq_block(pool.get(), seq, block, &info, bytes.data(), bytes.size(), &err), err);
    bytes.resize(info.bytes);
    BlockBits b{info.bits, info.tokens, info.content_id, {}, {}};
    b.payload.assign(bytes.begin(), bytes.begin() + ptrdiff_t(info.trailer_offset));
    b.trailer.assign(bytes.begin() + ptrdiff_t(info.trailer_offset), bytes.end());
    return b;
}

namespace {

template <class T>
void put(std::vector<uint8_t>& to, const T& value) {
    const auto* p = reinterpret_cast<const uint8_t*>(&value);
    to.insert(to.end(), p, p + sizeof value);
}

}  // namespace

std::vector<uint8_t> sequence_file_by_hand(const FallingShape& shape, const KvPool& pool,
                                           const std::vector<BlockBits>& blocks) {
    uint64_t fingerprint = 0;
    std::memcpy(&fingerprint, blocks.at(0).trailer.data() + 8, sizeof fingerprint);
    const ta_kv_pool_stats sizes = stats(pool);
    std::vector<uint8_t> index_of_file, records;
    for (uint64_t index = 0; index < blocks.size(); ++index) {
        const BlockBits& b = blocks[index];
        const auto kind = uint8_t(b.bits == 8 ? 0 : b.bits == 4 ? 1 : 2);
        std::vector<uint8_t> slot = b.payload;
        put(slot, kSlotMagic);
        put(slot, kFormatVersion);
        put(slot, uint16_t(kind));
        put(slot, fingerprint);
        put(slot, index);
        put(slot, b.content_id);
        put(slot, uint32_t(kPageTokens));
        put(slot, shape.layers);
        slot.resize(slot.size() + 24);
        const size_t page_bytes = shape.kv_heads * shape.piece_bytes(b.bits), own = b.bits == 8 ? shape.own_scales_bytes() : 0;
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            const PageIdentity id{fingerprint, index,          b.content_id, layer, uint32_t(kPageTokens),
                                  kSlotMagic,  kFormatVersion, kind,         0,     page_bytes};
            uint64_t hash = page_hash(id, b.payload.data() + layer * page_bytes);
            if (own > 0 && layer + 1 == shape.layers) hash ^= hash_bytes(b.trailer.data() + b.trailer.size() - own, own);
            put(slot, hash);
        }
        slot.resize((slot.size() + 127) / 128 * 128);
        slot.insert(slot.end(), b.trailer.end() - ptrdiff_t(own), b.trailer.end());
        const uint64_t slot_hash = hash_bytes(slot.data(), slot.size());
        put(index_of_file, b.content_id);
        put(index_of_file, slot_hash);
        put(index_of_file, index);
        put(index_of_file, uint32_t(kPageTokens));
        put(index_of_file, uint32_t{kind});
        const size_t header = records.size();
        put(records, uint32_t{0x4B4C4254});
        put(records, uint32_t{kind});
        put(records, uint32_t(kPageTokens));
        put(records, uint32_t{0});
        put(records, index);
        put(records, b.content_id);
        put(records, slot_hash);
        put(records, hash_bytes(records.data() + header, records.size() - header));
        records.insert(records.end(), slot.begin(), slot.end());
    }
    std::vector<uint8_t> file;
    put(file, uint32_t{0x51455354});
    put(file, uint32_t{3});  // version, reserved
    put(file, fingerprint);
    put(file, int64_t(blocks.size()) * kPageTokens);
    put(file, uint64_t(blocks.size()));
    put(file, uint64_t{0});  // no magnitudes
    put(file, sizes.token_block_bytes);
    put(file, sizes.channel_block_bytes);
    put(file, hash_bytes(index_of_file.data(), index_of_file.size()));
    put(file, uint64_t{0});  // no namespace
    put(file, hash_bytes(file.data(), file.size()));
    file.insert(file.end(), index_of_file.begin(), index_of_file.end());
    file.insert(file.end(), records.begin(), records.end());
    return file;
}

}  // namespace ta::testing
