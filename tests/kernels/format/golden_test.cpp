// Golden pages: fixed input, every byte of the result in tests/data/golden. A difference means that pages of an older
// library are read wrongly, or that the encoder changed. TA_UPDATE_GOLDEN=1 in the environment rewrites the files.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/format/codec.h"
#include "kernels/format/hash.h"
#include "kernels/format/rotation.h"
#include "kernels/format/slot.h"

namespace ta {
namespace {

using cpu::HeadStage1;
using cpu::PageCodec;

constexpr uint64_t kSeed = 0x7461;  // also of the rotation

// Integers alone make the input, so that no C library can change it.
class Lcg {
  public:
    explicit Lcg(uint64_t seed) : state_(seed) {}
    uint32_t next() {
        state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
        return uint32_t(state_ >> 33);
    }

  private:
    uint64_t state_;
};

// fp16 values [64, d]: a spread of magnitudes, outlier channels, one small and one large token and one of zeros, zeros of both
// signs.
std::vector<uint16_t> make_values(int d, uint64_t seed) {
    Lcg random(seed);
    std::vector<uint16_t> x(size_t(kPageTokens) * d);
    for (int t = 0; t < kPageTokens; ++t) {
        for (int c = 0; c < d; ++c) {
            const uint32_t r = random.next();
            uint32_t exponent = 11 + (r >> 10) % 5;  // 2^-4 .. 2
            if (c % 29 == 3) exponent += 4;
            if (t == 5) exponent -= 9;
            if (t == 40) exponent += 3;
            uint32_t h = (r >> 20 & 1) << 15 | exponent << 10 | (r & 1023);
            if (c % 29 == 3 && t != 9) h &= 0x7fff;  // an outlier channel keeps its sign
            if ((r >> 21) % 64 == 0 || t == 17) h &= 0x8000;
            x[size_t(t) * d + c] = uint16_t(h);
        }
    }
    return x;
}

// Stage 1 with a scale per token; K rotated where that is possible.
std::unique_ptr<HeadStage1> make_head(const PageCodec& codec, int d, uint64_t seed) {
    auto head = std::make_unique<HeadStage1>();
    for (bool is_v : {false, true}) {
        const std::vector<uint16_t> halves = make_values(d, seed + is_v);
        std::vector<float> x(halves.size()), sign(d);
        codec.to_float(halves.data(), DType::kF16, int64_t(x.size()), false, x.data());
        for (int c = 0; c < d; ++c) sign[c] = rotation_sign(kSeed, c) ? -1.0f : 1.0f;
        for (int t = 0; t < kPageTokens; ++t) {
            float* row = x.data() + size_t(t) * d;
            if (!is_v && can_rotate(d)) codec.rotate(row, d, sign.data());
            const float scale = stage1_scale(codec.amax(row, d), kStage1Levels);
            (is_v ? head->v_scale : head->k_scale)[t] = scale;
            codec.quantize(row, d, scale, kStage1Levels, (is_v ? head->v : head->k) + t * d);
        }
    }
    return head;
}

std::vector<const cpu::Kernels*> all_kernels() {
    std::vector<const cpu::Kernels*> out;
    for (ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX512, TA_CPU_ISA_AMX}) {
        if (const cpu::Kernels* k = cpu::find_kernels(isa)) out.push_back(k);
    }
    return out;
}

void compare(const std::string& name, const std::vector<uint8_t>& bytes) {
    const std::filesystem::path path = std::filesystem::path(TA_TEST_DIR) / "data" / "golden" / (name + ".bin");
    if (const char* update = std::getenv("TA_UPDATE_GOLDEN"); update && *update == '1') {
        std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), std::streamsize(bytes.size()));
    }
    std::ifstream in(path, std::ios::binary);
    ASSERT_TRUE(in) << path << " is missing";
    const std::vector<char> golden(std::istreambuf_iterator<char>(in), {});
    ASSERT_EQ(golden.size(), bytes.size()) << name;
    for (size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], uint8_t(golden[i])) << name << " byte " << i;
}

struct Geometry {
    const char* token_name;
    const char* channel_name;
    int d, k_bits, v_bits;
};
constexpr Geometry kGeometries[] = {{"d64_token", "d64_k4v4", 64, 4, 4},
                                    {"d128_token", "d128_k4v2", 128, 4, 2},
                                    {"d96_token", "d96_k2v2", 96, 2, 2},
                                    {"d64_token", "d64_k8v4", 64, 8, 4},
                                    {"d128_token", "d128_k2v8", 128, 2, 8}};

TEST(Golden, TokenPieces) {
    for (const Geometry& g : kGeometries) {
        for (const cpu::Kernels* kernels : all_kernels()) {
            std::vector<uint8_t> piece(TokenLayout(g.d).bytes());
            kernels->codec->store_token_piece(*make_head(*kernels->codec, g.d, g.d), g.d, 0, kPageTokens, piece.data());
            compare(g.token_name, piece);
        }
    }
}

TEST(Golden, ChannelPieces) {
    for (const Geometry& g : kGeometries) {
        const ChannelLayout layout(g.d, g.k_bits, g.v_bits);
        for (const cpu::Kernels* kernels : all_kernels()) {
            const auto head = make_head(*kernels->codec, g.d, g.d);
            std::vector<uint8_t> piece(layout.bytes());
            kernels->codec->encode_channel_piece(*head, layout, {true, true, true, true, true}, piece.data());
            compare(std::string(g.channel_name) + "_accurate", piece);
            kernels->codec->encode_channel_piece(*head, layout, {}, piece.data());
            compare(std::string(g.channel_name) + "_plain", piece);
        }
    }
}

// The worked example of docs/FORMAT.md, byte for byte.
TEST(Golden, WorkedExample) {
    constexpr int kToken = 37, kChannel = 77;
    std::ifstream in(std::filesystem::path(TA_TEST_DIR) / "data" / "golden" / "d128_k4v2_accurate.bin", std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
    const ChannelLayout layout(128, 4, 2);
    ASSERT_EQ(bytes.size(), layout.bytes());
    const auto at = [&](size_t offset) { return uint8_t(bytes[offset]); };
    const auto scale_at = [&](size_t offset) {
        float x;
        std::memcpy(&x, bytes.data() + offset, sizeof x);
        return x;
    };
    const CodePlace k = k_place(128, 4, kToken, kChannel), v = v_place(128, 2, kToken, kChannel);
    EXPECT_EQ(layout.k_codes() + k.byte, 2921u);
    EXPECT_EQ(k.shift, 0u);
    EXPECT_EQ(at(2921), 0x54);
    EXPECT_EQ(layout.k_step(), 6144u);
    EXPECT_EQ(at(6144 + kChannel), 0xe3);
    EXPECT_EQ(layout.k_zero(), 6272u);
    EXPECT_EQ(at(6272 + kChannel), 0xf0);
    EXPECT_EQ(layout.k_scale(), 6688u);
    EXPECT_EQ(scale_at(6688), 0.35664022f);
    EXPECT_FLOAT_EQ(0.35664022f * (4 * 3 - 16 + 7 / 8.0f), -1.1145007f);
    EXPECT_EQ(layout.v_codes() + v.byte, 5932u);
    EXPECT_EQ(v.shift, 4u);
    EXPECT_EQ(at(5932), 0x2f);
    EXPECT_EQ(at(5932) >> v.shift & 3, 2);
    EXPECT_EQ(layout.v_step(), 6400u);
    EXPECT_EQ(at(6400 + kChannel), 0x86);
    EXPECT_EQ(layout.v_zero(), 6528u);
    EXPECT_EQ(at(6528 + kChannel), 0xf7);
    EXPECT_EQ(layout.v_exponents(), 6656u);
    EXPECT_EQ(at(6656 + kToken / 2) >> 4, 3);
    EXPECT_EQ(layout.v_scale(), 6692u);
    EXPECT_EQ(scale_at(6692), 1.25157154f);
    EXPECT_FLOAT_EQ(1.25157154f / 8 * (2 * 6 - 9 + 0.5f), 0.54756255f);
}

// A slot of 2 layers with 2 kv heads, trailer and hashes: pins identity and hash.
TEST(Golden, Slot) {
    constexpr uint32_t kLayers = 2, kHeads = 2;
    const ChannelLayout layout(64, 4, 4);
    const size_t page_bytes = kHeads * layout.bytes();
    for (const cpu::Kernels* kernels : all_kernels()) {
        std::vector<uint8_t> slot(slot_bytes(kLayers * page_bytes, kLayers), 0);
        SlotTrailer trailer{};
        trailer.magic = kSlotMagic;
        trailer.version = kFormatVersion;
        trailer.kind = uint8_t(PageKind::kChannel);
        trailer.fingerprint = 0x0123456789abcdefull;
        trailer.block_index = 7;
        trailer.content_id = 0xfedcba98;
        trailer.tokens = kPageTokens;
        trailer.layers = kLayers;
        std::memcpy(&slot[kLayers * page_bytes], &trailer, sizeof trailer);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            for (uint32_t h = 0; h < kHeads; ++h) {
                kernels->codec->encode_channel_piece(*make_head(*kernels->codec, 64, 100 + 10 * layer + 2 * h), layout,
                                                     {true, true, true, true, true},
                                                     &slot[layer * page_bytes + h * layout.bytes()]);
            }
            PageIdentity id{};
            id.fingerprint = trailer.fingerprint;
            id.block_index = trailer.block_index;
            id.content_id = trailer.content_id;
            id.layer = layer;
            id.tokens = trailer.tokens;
            id.magic = trailer.magic;
            id.version = trailer.version;
            id.kind = trailer.kind;
            id.payload_bytes = page_bytes;
            const uint64_t hash = page_hash(id, &slot[layer * page_bytes]);
            std::memcpy(&slot[kLayers * page_bytes + sizeof trailer + layer * sizeof hash], &hash, sizeof hash);
        }
        compare("slot_d64_k4v4_l2_h2", slot);
    }
}

}  // namespace
}  // namespace ta
