// is_good_token_piece and is_good_channel_piece: a page is good if each of its values is one that FORMAT.md allows, taken one by
// one here; and pages of the encoder are.
#include "kernels/format/check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/format/codec.h"
#include "kernels/format/turning.h"

namespace ta {
namespace {

using Bytes = std::vector<uint8_t>;

float scale_at(const Bytes& piece, size_t at) {
    float x;
    std::memcpy(&x, piece.data() + at, sizeof x);
    return x;
}

bool allows_scale(float x) {
    return !std::signbit(x) && (x == 0.0f || (std::isnormal(x) && x <= kMaxScale));
}

bool allows_token(const Bytes& piece, int d) {
    const TokenLayout at(d);
    for (size_t i = 0; i < at.k_scale(); ++i) {
        if (std::abs(int8_t(piece[i])) > kStage1Levels) return false;
    }
    for (size_t i = at.k_scale(); i < at.bytes(); i += 4) {
        if (!allows_scale(scale_at(piece, i))) return false;
    }
    return true;
}

bool allows_channel(const Bytes& piece, const ChannelLayout& at) {
    const bool k_bytes = at.k_bits == 8, v_bytes = at.v_bits == 8;
    for (size_t i = at.v_exponents(); i < at.bytes(); ++i) {
        const bool may_be = i < at.k_scale() ? !v_bytes : i < at.v_scale() ? !k_bytes : i < at.k_turning() && !v_bytes;
        if (!may_be && piece[i] != 0) return false;
    }
    for (bool v : {false, true}) {
        const int bits = v ? at.v_bits : at.k_bits, stored = v ? v_stored_channels(at.d, bits) : at.d;
        const size_t codes = v ? at.v_codes() : at.k_codes(), parameters = v ? at.v_parameters() : at.k_parameters();
        if (bits == 8) {
            for (size_t i = 0; i < size_t(kPageTokens * at.d); ++i) {
                if (std::abs(int8_t(piece[codes + i])) > kStage1Levels) return false;
            }
            for (size_t t = 0; t < kPageTokens; ++t) {
                if (!allows_scale(scale_at(piece, parameters + 4 * t))) return false;
            }
            continue;
        }
        if (!allows_scale(scale_at(piece, v ? at.v_scale() : at.k_scale()))) return false;
        for (int c = 0; c < stored; ++c) {
            const bool exists = c < at.d;
            const int step = exists ? step_of(piece[parameters + size_t(c)], bits) : 1;
            const int zero = exists ? int8_t(piece[parameters + size_t(at.d + c)]) : 0;
            if (step < 1 || step > (bits == 4 ? 16 : 80)) return false;
            for (int t = 0; t < kPageTokens; ++t) {
                const CodePlace p = v ? v_place(at.d, bits, t, c) : k_place(at.d, bits, t, c);
                const int code = piece[codes + p.byte] >> p.shift & ((1 << bits) - 1);
                if (exists ? code * step + zero > 127 : code != 0) return false;
            }
        }
    }
    return true;
}

struct Pages {
    Bytes token;
    std::vector<std::pair<Bytes, ChannelLayout>> channel;
};

// Of tokens from small to the largest that there are, with outliers among channels and tokens.
Pages encode(int d, float largest, bool searches, std::mt19937& random) {
    const cpu::PageCodec& codec = *cpu::find_kernels(TA_CPU_ISA_SCALAR)->codec;
    const auto head = std::make_unique<cpu::HeadStage1>();
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(d));
    for (bool v : {false, true}) {
        for (int t = 0; t < kPageTokens; ++t) {
            for (int c = 0; c < d; ++c)
                row[size_t(c)] = (t == 7 ? 0.0f : normal(random)) * (c % 13 == 3 ? 20.0f : 1.0f) * (t == 11 ? 1e-3f : 1.0f);
            const float most = codec.amax(row.data(), d);
            for (float& x : row) x = most > 0.0f ? x / most * (t % 3 ? largest : largest / 50) : 0.0f;
            const float scale = stage1_scale(codec.amax(row.data(), d), kStage1Levels);
            (v ? head->v_scale : head->k_scale)[t] = scale;
            codec.quantize(row.data(), d, scale, kStage1Levels, (v ? head->v : head->k) + t * d);
        }
    }
    Pages pages;
    pages.token.resize(TokenLayout(d).bytes());
    codec.store_token_piece(*head, d, 0, kPageTokens, pages.token.data());
    for (int k_bits : {8, 4, 2}) {
        for (int v_bits : {8, 4, 2}) {
            const ChannelLayout layout(d, k_bits, v_bits);
            Bytes piece(layout.bytes(), 0xff);
            codec.encode_channel_piece(*head, layout, {searches, searches, searches}, piece.data());
            pages.channel.emplace_back(std::move(piece), layout);
        }
    }
    return pages;
}

TEST(Check, PagesOfTheEncoder) {
    std::mt19937 random(1);
    for (int d : {64, 96, 128, 256}) {
        for (float largest : {0.0f, 1e-30f, 1.0f, 0x1p61f}) {
            for (bool searches : {false, true}) {
                const Pages pages = encode(d, largest, searches, random);
                EXPECT_TRUE(is_good_token_piece(pages.token.data(), d)) << d;
                for (const auto& [piece, at] : pages.channel)
                    EXPECT_TRUE(is_good_channel_piece(piece.data(), at)) << d << " " << at.k_bits << " " << at.v_bits;
            }
        }
    }
}

TEST(Check, GoldenPages) {
    int seen = 0;
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(TA_TEST_DIR) / "data" / "golden")) {
        const std::string name = entry.path().filename().string();
        int d = 0, k_bits = 0, v_bits = 0;
        const bool token = std::sscanf(name.c_str(), "d%d_k%dv%d_", &d, &k_bits, &v_bits) == 1;
        if (d == 0) continue;
        std::ifstream in(entry.path(), std::ios::binary);
        const Bytes piece{std::istreambuf_iterator<char>(in), {}};
        EXPECT_TRUE(token ? is_good_token_piece(piece.data(), d)
                          : is_good_channel_piece(piece.data(), ChannelLayout(d, k_bits, v_bits)))
            << name;
        ++seen;
    }
    EXPECT_GE(seen, 9);
}

// One or two bytes of metadata, codes and padding take any value: what is good is what the definition allows.
TEST(Check, WhatTheFormatAllows) {
    std::mt19937 random(2);
    int good = 0, bad = 0;
    const auto below = [&](size_t n) { return size_t(random() % n); };
    for (int d : {64, 96, 128, 256}) {
        const Pages pages = encode(d, 1.0f, true, random);
        for (int i = 0; i < 400; ++i) {
            Bytes piece = pages.token;
            piece[i % 2 ? below(TokenLayout(d).k_scale()) : TokenLayout(d).k_scale() + below(512)] = uint8_t(random());
            const bool allowed = allows_token(piece, d);
            ASSERT_EQ(is_good_token_piece(piece.data(), d), allowed);
            ++(allowed ? good : bad);
        }
        for (const auto& [of, layout] : pages.channel) {
            for (int i = 0; i < 600; ++i) {
                Bytes piece = of;
                const size_t from = layout.k_parameters(), channels = layout.v_exponents() - from;
                if (i % 3 == 0) {
                    piece[below(from)] = uint8_t(random());
                } else if (i % 3 == 1) {
                    piece[from + below(channels)] = uint8_t(random());
                } else {
                    piece[from + below(piece.size() - from)] = uint8_t(random());
                }
                const bool allowed = allows_channel(piece, layout);
                ASSERT_EQ(is_good_channel_piece(piece.data(), layout), allowed) << d << " " << i;
                ++(allowed ? good : bad);
            }
        }
    }
    EXPECT_GT(good, 1000);
    EXPECT_GT(bad, 1000);
    for (float x : {0.0f, 0x1p-126f, 1.0f, kMaxScale}) EXPECT_TRUE(is_good_scale(x)) << x;
    for (float x : {-0.0f, -1.0f, 0x1p-127f, std::nextafter(kMaxScale, 1e30f), std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()})
        EXPECT_FALSE(is_good_scale(x)) << x;
}

TEST(Check, TurningPairs) {
    constexpr int kDim = 96;
    const ChannelLayout channel(kDim, 4, 2);
    const TokenLayout token(kDim);
    std::mt19937 random(7);
    const Pages pages = encode(kDim, 1.0f, true, random);
    const auto good = [&](const TurningPairs& pairs) {
        Bytes of_tokens = pages.token, of_channels;
        for (const auto& [piece, at] : pages.channel) {
            if (at.k_bits == channel.k_bits && at.v_bits == channel.v_bits) of_channels = piece;
        }
        for (int t = 0; t < kPageTokens; ++t) of_tokens[token.k_scale() + 4 * size_t(t)] = pairs.byte(t);
        store_turning_of_missing(pairs, 40, token, of_tokens.data());
        std::memcpy(of_channels.data() + channel.k_turning(), pairs.code, kTurningBytes);
        const bool is_good = is_good_token_piece(of_tokens.data(), kDim, true);
        EXPECT_EQ(is_good_channel_piece(of_channels.data(), channel, true), is_good);
        if (pairs.any()) {
            EXPECT_FALSE(is_good_channel_piece(of_channels.data(), channel));
        }
        return is_good;
    };
    TurningPairs pairs;
    EXPECT_TRUE(good(pairs));
    for (uint64_t& code : pairs.code) {
        code = pack_turning({95, 1, 0xffffffff, 0xffffffff, kMostTurning});
        EXPECT_TRUE(good(pairs));
    }
    const auto with = [](int n, const TurningPair& p) {
        TurningPairs x;
        for (int i = 0; i <= n; ++i) x.code[i] = pack_turning(i == n ? p : TurningPair{0, 1, 0, 0, 1.0f});
        return x;
    };
    for (int n : {0, 1, 7}) {
        EXPECT_TRUE(good(with(n, {0, 95, 0, 0, kLeastTurning})));
        EXPECT_FALSE(good(with(n, {96, 0, 0, 0, 1.0f})));
        EXPECT_FALSE(good(with(n, {0, 96, 0, 0, 1.0f})));
        EXPECT_FALSE(good(with(n, {5, 5, 0, 0, 1.0f})));
        EXPECT_FALSE(good(with(n, {0, 1, 0, 0, 2 * kMostTurning})));
        EXPECT_FALSE(good(with(n, {0, 1, 0, 0, kLeastTurning / 2})));
        EXPECT_FALSE(good(with(n, {0, 1, 0, 0, std::numeric_limits<float>::infinity()})));
    }
    TurningPairs gap = with(2, {0, 1, 0, 0, 1.0f});
    gap.code[1] = 0;
    EXPECT_FALSE(good(gap));
}

}  // namespace
}  // namespace ta
