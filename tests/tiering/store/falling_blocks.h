// The bytes of blocks that fell when they were demoted, made by hand: with the scalar codec, from the offsets of
// docs/FORMAT.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/cpu/page_codec.h"
#include "support/handles.h"

namespace ta::testing {

struct FallingShape {
    uint32_t layers = 2, kv_heads = 2, head_dim = 64;
    EncodeOptions encode{true, true, true, true, true, true};
    bool own_scales = false;  // of universal open scales

    size_t piece_bytes(uint32_t bits) const;
    // At the end of a token block's slot, [layers, kv_heads, K and V, 64] floats.
    size_t own_scales_bytes() const { return own_scales ? size_t(layers) * kv_heads * 2 * kPageTokens * sizeof(float) : 0; }
    size_t payload_bytes(uint32_t bits) const { return layers * kv_heads * piece_bytes(bits); }
};

// The payload of a full block with half its bits: 8 -> 4, 4 -> 2. `trailer`: what comes behind the payload.
std::vector<uint8_t> encode_lower_by_hand(const FallingShape& shape, uint32_t bits, const std::vector<uint8_t>& payload,
                                          const std::vector<uint8_t>& trailer);

struct BlockBits {
    uint32_t bits = 0, tokens = 0;
    uint64_t content_id = 0;
    std::vector<uint8_t> payload, trailer;
};
BlockBits read_block(const KvPool& pool, ta_seq seq, uint64_t block);

// The file of a sequence of these full blocks, for pools of the fingerprint that is in the trailers.
std::vector<uint8_t> sequence_file_by_hand(const FallingShape& shape, const KvPool& pool, const std::vector<BlockBits>& blocks);

}  // namespace ta::testing
