// Trailer, identity and hash: byte positions, and that every bit of page and identity counts.
#include "kernels/format/slot.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/format/hash.h"

namespace ta {
namespace {

TEST(Slot, TrailerPositions) {
    EXPECT_EQ(offsetof(SlotTrailer, magic), 0u);
    EXPECT_EQ(offsetof(SlotTrailer, version), 4u);
    EXPECT_EQ(offsetof(SlotTrailer, kind), 6u);
    EXPECT_EQ(offsetof(SlotTrailer, reserved0), 7u);
    EXPECT_EQ(offsetof(SlotTrailer, fingerprint), 8u);
    EXPECT_EQ(offsetof(SlotTrailer, block_index), 16u);
    EXPECT_EQ(offsetof(SlotTrailer, content_id), 24u);
    EXPECT_EQ(offsetof(SlotTrailer, tokens), 32u);
    EXPECT_EQ(offsetof(SlotTrailer, layers), 36u);
    EXPECT_EQ(offsetof(SlotTrailer, reserved), 40u);
    EXPECT_EQ(std::memcmp(&kSlotMagic, "TAKV", 4), 0);
}

TEST(Slot, IdentityPositionsWithoutHoles) {
    EXPECT_EQ(offsetof(PageIdentity, fingerprint), 0u);
    EXPECT_EQ(offsetof(PageIdentity, block_index), 8u);
    EXPECT_EQ(offsetof(PageIdentity, content_id), 16u);
    EXPECT_EQ(offsetof(PageIdentity, layer), 24u);
    EXPECT_EQ(offsetof(PageIdentity, tokens), 28u);
    EXPECT_EQ(offsetof(PageIdentity, magic), 32u);
    EXPECT_EQ(offsetof(PageIdentity, version), 36u);
    EXPECT_EQ(offsetof(PageIdentity, kind), 38u);
    EXPECT_EQ(offsetof(PageIdentity, reserved), 39u);
    EXPECT_EQ(offsetof(PageIdentity, payload_bytes), 40u);
}

TEST(Slot, BytesHoldTrailerAndHashes) {
    for (uint32_t layers : {1u, 2u, 7u, 8u, 9u, 32u, 80u}) {
        for (size_t payload : {size_t(128), size_t(8832) * 8 * layers}) {
            const size_t bytes = slot_bytes(payload, layers);
            EXPECT_EQ(bytes % kPieceAlignment, 0u);
            EXPECT_GE(bytes, payload + 64 + 8 * size_t(layers));
            EXPECT_LT(bytes, payload + 64 + 8 * size_t(layers) + kPieceAlignment);
        }
    }
}

// XXH3_64bits without seed: values of the reference implementation.
TEST(Hash, IsXxh3) {
    EXPECT_EQ(hash_bytes("", 0), 0x2d06800538d394c2ull);
    EXPECT_EQ(hash_bytes("a", 1), 0xe6c632b61e964e1full);
    EXPECT_EQ(hash_bytes("abc", 3), 0x78af5f94892f3950ull);
}

PageIdentity identity(size_t payload_bytes) {
    PageIdentity id{};
    id.fingerprint = 0x0123456789abcdefull;
    id.block_index = 5;
    id.content_id = 77;
    id.layer = 3;
    id.tokens = 64;
    id.magic = kSlotMagic;
    id.version = kFormatVersion;
    id.kind = uint8_t(PageKind::kChannel);
    id.payload_bytes = payload_bytes;
    return id;
}

TEST(Hash, IsTheHashOfIdentityAndPayloadHash) {
    std::vector<uint8_t> payload(4736);
    for (size_t i = 0; i < payload.size(); ++i) payload[i] = uint8_t(i * 131);
    const PageIdentity id = identity(payload.size());
    const uint64_t inner = hash_bytes(payload.data(), payload.size());
    uint8_t bound[56];
    std::memcpy(bound, &id, 48);
    std::memcpy(bound + 48, &inner, 8);
    EXPECT_EQ(page_hash(id, payload.data()), hash_bytes(bound, sizeof bound));
}

TEST(Hash, EveryBitCounts) {
    std::vector<uint8_t> payload(384, 0);
    const PageIdentity id = identity(payload.size());
    std::set<uint64_t> seen{page_hash(id, payload.data())};
    size_t expected = 1;
    for (size_t bit = 0; bit < payload.size() * 8; ++bit, ++expected) {
        payload[bit / 8] = uint8_t(1 << bit % 8);
        seen.insert(page_hash(id, payload.data()));
        payload[bit / 8] = 0;
    }
    for (size_t bit = 0; bit < 40 * 8; ++bit, ++expected) {  // payload_bytes decides what is read: not flipped
        PageIdentity other = id;
        uint8_t bytes[sizeof other];
        std::memcpy(bytes, &other, sizeof other);
        bytes[bit / 8] = uint8_t(bytes[bit / 8] ^ 1 << bit % 8);
        std::memcpy(&other, bytes, sizeof other);
        seen.insert(page_hash(other, payload.data()));
    }
    EXPECT_EQ(seen.size(), expected);
}

}  // namespace
}  // namespace ta
