// Shapes of pools: where pieces lie, how large blocks are.
#include "src/page/geometry.h"

#include <gtest/gtest.h>

#include "kernels/format/slot.h"

namespace ta {
namespace {

Geometry make(uint32_t layers, uint32_t heads, uint32_t d, uint32_t bits, const uint8_t* k = nullptr,
              const uint8_t* v = nullptr) {
    Result<Geometry> g =
        Geometry::make({.layers = layers, .kv_heads = heads, .head_dim = d, .bits = bits, .k_bits = k, .v_bits = v});
    EXPECT_TRUE(g.ok());
    return g.take();
}

TEST(Geometry, PiecesFillTheSlotWithoutGapsOrOverlaps) {
    const uint8_t k[] = {4, 2, 4, 2, 2, 4}, v[] = {2, 2, 4, 4, 2, 2};
    for (uint32_t d : {64, 96, 128, 256}) {
        const Geometry g = make(2, 3, d, 0, k, v);
        for (PageKind kind : {PageKind::kToken, PageKind::kChannel}) {
            size_t at = 0;
            for (uint32_t layer = 0; layer < 2; ++layer) {
                EXPECT_EQ(g.page_offset(kind, layer), at);
                const size_t first = at;
                for (uint32_t head = 0; head < 3; ++head) {
                    EXPECT_EQ(g.page_offset(kind, layer) + g.head_offset(kind, layer, head), at);
                    EXPECT_EQ(at % kPieceAlignment, 0u);
                    at += kind == PageKind::kToken ? TokenLayout(int(d)).bytes()
                                                   : ChannelLayout(int(d), k[layer * 3 + head], v[layer * 3 + head]).bytes();
                }
                EXPECT_EQ(g.page_bytes(kind, layer), at - first);
            }
            EXPECT_EQ(g.payload_bytes(kind), at);
            EXPECT_GE(g.slot_bytes(kind), at + sizeof(SlotTrailer) + 2 * sizeof(uint64_t));
            EXPECT_LT(g.slot_bytes(kind), at + sizeof(SlotTrailer) + 2 * sizeof(uint64_t) + kPieceAlignment);
        }
    }
}

TEST(Geometry, TrueSizesAreThoseOfTheDesign) {
    EXPECT_NEAR(make(32, 8, 128, 8).bits_per_element(PageKind::kToken), 8.25, 0.01);
    EXPECT_NEAR(make(32, 8, 128, 4).bits_per_element(PageKind::kChannel), 4.31, 0.01);
    EXPECT_NEAR(make(32, 8, 128, 2).bits_per_element(PageKind::kChannel), 2.31, 0.01);
}

TEST(Geometry, EightBitPoolsHaveNoChannelBlocks) {
    const Geometry g = make(3, 2, 64, 8);
    EXPECT_TRUE(g.all_8_bits);
    EXPECT_EQ(g.channel_slot_bytes, 0u);
    const uint8_t eights[] = {8, 8};
    EXPECT_TRUE(make(1, 2, 64, 4, eights, eights).all_8_bits) << "maps win over bits";
}

TEST(Geometry, BitsMixFreely) {
    const uint8_t k[] = {8, 4, 8, 2}, v[] = {4, 8, 8, 2};
    const Geometry g = make(2, 2, 128, 4, k, v);
    EXPECT_FALSE(g.all_8_bits);
    EXPECT_TRUE(g.some_8_bits);
    EXPECT_EQ(g.page_bytes(PageKind::kChannel, 0), 2 * ChannelLayout(128, 8, 4).bytes());
    EXPECT_EQ(g.page_bytes(PageKind::kChannel, 1), ChannelLayout(128, 8, 8).bytes() + ChannelLayout(128, 2, 2).bytes());
    EXPECT_FALSE(make(2, 2, 128, 4).some_8_bits);
    const uint8_t eights[] = {8, 8, 8, 8};
    EXPECT_FALSE(
        Geometry::make({.layers = 2, .kv_heads = 2, .head_dim = 128, .bits = 4, .k_bits = k, .v_bits = v, .falls = true}).ok())
        << "falling precision";
    EXPECT_FALSE(Geometry::make({.layers = 2, .kv_heads = 2, .head_dim = 128, .bits = 4, .k_bits = eights, .falls = true}).ok())
        << "falling precision, K alone";
}

TEST(Geometry, DefaultIsFourBits) {
    const Geometry g = make(1, 2, 64, 0);
    EXPECT_EQ(g.k_bits, (std::vector<uint8_t>{4, 4}));
    EXPECT_EQ(g.v_bits, (std::vector<uint8_t>{4, 4}));
    const uint8_t twos[] = {2, 2};
    EXPECT_EQ(make(1, 2, 64, 0, twos).v_bits, (std::vector<uint8_t>{4, 4})) << "one map given, the other by bits";
}

TEST(Geometry, TheLargestShapeDoesNotWrap) {
    const Geometry g = make(4096, 1024, 256, 4);
    EXPECT_EQ(g.token_payload_bytes, uint64_t{4096} * 1024 * TokenLayout(256).bytes());
    EXPECT_EQ(g.channel_payload_bytes, uint64_t{4096} * 1024 * ChannelLayout(256, 4, 4).bytes());
    EXPECT_EQ(g.page_offset(PageKind::kToken, 4095) + g.head_offset(PageKind::kToken, 4095, 1023) + TokenLayout(256).bytes(),
              g.token_payload_bytes);
}

TEST(Geometry, WrongMapsNameLayerAndHead) {
    const uint8_t k[] = {4, 4, 4, 5};
    Result<Geometry> g = Geometry::make({.layers = 2, .kv_heads = 2, .head_dim = 64, .bits = 4, .k_bits = k});
    ASSERT_FALSE(g.ok());
    const Status status = std::move(g).status();
    EXPECT_EQ(status.code(), TA_E_INVALID);
    EXPECT_EQ(status.detail()->layer, 1);
    EXPECT_EQ(status.detail()->head, 1);
}

// Pages and trailers are where they are without; channel blocks have room in their pages.
TEST(Geometry, OwnScalesAreAtTheEndOfTokenBlocks) {
    for (uint32_t d : {64, 96, 128, 256}) {
        Result<Geometry> made =
            Geometry::make({.layers = 3, .kv_heads = 2, .head_dim = d, .bits = 4, .falls = true, .keeps_own_scales = true});
        ASSERT_TRUE(made.ok());
        const Geometry with = made.take(),
                       without = Geometry::make({.layers = 3, .kv_heads = 2, .head_dim = d, .bits = 4, .falls = true}).take();
        for (PageKind kind : {PageKind::kToken, PageKind::kChannel, PageKind::kLow}) {
            EXPECT_EQ(with.payload_bytes(kind), without.payload_bytes(kind));
            EXPECT_EQ(with.slot_bytes(kind) - without.slot_bytes(kind), kind == PageKind::kToken ? 3u * 2 * 2 * 64 * 4 : 0u);
        }
        EXPECT_EQ(with.own_scales_offset(0, 0), without.token_slot_bytes);
        EXPECT_EQ(with.own_scales_offset(2, 1) + 2 * 64 * 4, with.token_slot_bytes);
    }
}

}  // namespace
}  // namespace ta
