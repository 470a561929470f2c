// The check that a disk tier gets from its pool.
#include "tiering/verify/block_check.h"

#include <gtest/gtest.h>

#include "tiering/store/blocks.h"

namespace ta {
namespace {

TEST(BlockCheck, EveryPageAndEveryFieldThatNamesTheBlockCounts) {
    Geometry g = Geometry::make({.layers = 2, .kv_heads = 1, .head_dim = 64, .bits = 4}).take();
    const BlockCheck check = make_block_check(g, 42);
    Allocator allocator{ta_allocator{}};
    BlockStore store(allocator, nullptr, g, 1 << 20);
    const PageKind kind = PageKind::kChannel;
    BlockPtr block = store.acquire({&kind, 1}).take()[0];
    for (size_t i = 0; i < g.channel_payload_bytes; ++i) block->slot()[i] = uint8_t(i * 7);
    block->seal(g, 42, 5, 64);
    BlockIdentity id;
    id.block_index = 5;
    id.content_id = block->content_id();
    id.tokens = 64;
    std::vector<uint8_t> bytes(block->slot(), block->slot() + g.channel_slot_bytes);
    const auto code = [&] { return check(id, uint8_t(kind), bytes.data()).code(); };
    EXPECT_EQ(code(), TA_OK);
    EXPECT_EQ(make_value_check(g, false)(id, uint8_t(kind), bytes.data()).code(), TA_E_CORRUPT)
        << "no encoder writes such values";
    for (size_t at = 0; at < bytes.size(); at += at < g.channel_payload_bytes ? 511 : 1) {
        const size_t trailer = g.channel_payload_bytes;
        if (at >= trailer + 7 && at < trailer + 8) continue;    // reserved
        if (at >= trailer + 40 && at < trailer + 64) continue;  // reserved
        if (at >= trailer + 64 + 8 * g.layers) break;           // padding
        bytes[at] ^= 0x10;
        EXPECT_EQ(code(), TA_E_CORRUPT) << "at byte " << at;
        bytes[at] ^= 0x10;
    }
    id.content_id ^= 1;
    EXPECT_EQ(code(), TA_E_CORRUPT);
}

}  // namespace
}  // namespace ta
