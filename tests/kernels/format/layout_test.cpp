// The byte layout: sizes and offsets against the published table, places against the fragment order that kernels rely
// on.
#include "kernels/format/layout.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace ta {
namespace {

constexpr int kHeadDims[] = {64, 96, 128, 256};

TEST(TokenLayout, PartsFollowEachOther) {
    for (int d : kHeadDims) {
        const TokenLayout t(d);
        EXPECT_EQ(t.k_codes(), 0u);
        EXPECT_EQ(t.v_codes(), 64u * d);
        EXPECT_EQ(t.k_scale(), 128u * d);
        EXPECT_EQ(t.v_scale(), 128u * d + 256);
        EXPECT_EQ(t.bytes(), 128u * d + 512);
        EXPECT_EQ(t.bytes() % kPieceAlignment, 0u);
    }
}

TEST(ChannelLayout, PartsFollowEachOther) {
    for (int d : kHeadDims) {
        for (int kb : {4, 2}) {
            for (int vb : {4, 2}) {
                const ChannelLayout c(d, kb, vb);
                const size_t v_channels = d == 96 && vb == 2 ? 128 : d;
                EXPECT_EQ(c.k_codes(), 0u);
                EXPECT_EQ(c.v_codes(), size_t(8) * d * kb);
                EXPECT_EQ(c.k_step(), c.v_codes() + 8 * v_channels * vb);
                EXPECT_EQ(c.k_zero(), c.k_step() + d);
                EXPECT_EQ(c.v_step(), c.k_zero() + d);
                EXPECT_EQ(c.v_zero(), c.v_step() + d);
                EXPECT_EQ(c.v_exponents(), c.v_zero() + d);
                EXPECT_EQ(c.k_scale(), c.v_exponents() + 32);
                EXPECT_EQ(c.v_scale(), c.k_scale() + 4);
                EXPECT_GE(c.bytes(), c.v_scale() + 4);
                EXPECT_LT(c.bytes(), c.v_scale() + 4 + kPieceAlignment);
                EXPECT_EQ(c.bytes() % kPieceAlignment, 0u);
                EXPECT_EQ(c.v_codes() % 512, 0u) << "whole fragment loads";
                EXPECT_EQ((c.k_step() - c.v_codes()) % 512, 0u);
            }
        }
    }
}

// The sizes in docs/FORMAT.md.
TEST(Layout, PublishedSizes) {
    EXPECT_EQ(TokenLayout(64).bytes(), 8704u);
    EXPECT_EQ(TokenLayout(96).bytes(), 12800u);
    EXPECT_EQ(TokenLayout(128).bytes(), 16896u);
    EXPECT_EQ(TokenLayout(256).bytes(), 33280u);
    const struct {
        int d;
        size_t k4v4, k4v2, k2v4, k2v2;
    } table[] = {{64, 4480, 3456, 3456, 2432},
                 {96, 6656, 5632, 5120, 4096},
                 {128, 8832, 6784, 6784, 4736},
                 {256, 17536, 13440, 13440, 9344}};
    for (const auto& row : table) {
        EXPECT_EQ(ChannelLayout(row.d, 4, 4).bytes(), row.k4v4) << row.d;
        EXPECT_EQ(ChannelLayout(row.d, 4, 2).bytes(), row.k4v2) << row.d;
        EXPECT_EQ(ChannelLayout(row.d, 2, 4).bytes(), row.k2v4) << row.d;
        EXPECT_EQ(ChannelLayout(row.d, 2, 2).bytes(), row.k2v2) << row.d;
    }
    EXPECT_EQ(ChannelLayout(128, 8, 4).bytes(), 12928u);  // codes 12288, scales 256, steps and zeros 256, the rest 112
    EXPECT_EQ(ChannelLayout(64, 4, 8).bytes(), 6656u);
    EXPECT_EQ(ChannelLayout(128, 8, 8).bytes(), 17024u);
}

TEST(Places, AreOneToOneOntoTheCodeArrays) {
    for (int d : kHeadDims) {
        for (int bits : {8, 4, 2}) {
            for (bool is_v : {false, true}) {
                const int stored = is_v ? v_stored_channels(d, bits) : d;
                std::vector<uint8_t> taken(size_t(kPageTokens) * stored * bits / 8, 0);
                for (int t = 0; t < kPageTokens; ++t) {
                    for (int c = 0; c < stored; ++c) {
                        const CodePlace p = is_v ? v_place(d, bits, t, c) : k_place(d, bits, t, c);
                        ASSERT_LT(p.byte, taken.size()) << "d " << d << " bits " << bits << " token " << t << " channel " << c;
                        ASSERT_EQ(p.shift % bits, 0u);
                        ASSERT_LT(p.shift, 8u);
                        const auto mask = uint8_t(((1 << bits) - 1) << p.shift);
                        ASSERT_EQ(taken[p.byte] & mask, 0)
                            << "d " << d << " bits " << bits << " token " << t << " channel " << c;
                        taken[p.byte] = uint8_t(taken[p.byte] | mask);
                    }
                }
                for (uint8_t byte : taken) ASSERT_EQ(byte, 0xFF);
            }
        }
    }
}

TEST(Places, StoredChannelsArePaddedOnlyAt96And2Bits) {
    for (int d : kHeadDims) {
        for (int bits : {8, 4, 2}) EXPECT_EQ(v_stored_channels(d, bits), d == 96 && bits == 2 ? 128 : d);
    }
}

// The element in register w, byte b of a lane, of the 16 x 32 A operand of mma.sync.m16n8k32 (PTX ISA, "Matrix fragments
// for mma.m16n8k32", .u8): a_n with n = 4 w + b.
std::pair<int, int> a_fragment(int lane, int w, int b) {
    const int n = 4 * w + b, group = lane >> 2, in_group = lane & 3;
    const int row = n < 4 || (n >= 8 && n < 12) ? group : group + 8;
    const int column = in_group * 4 + (n & 3) + (n >= 8 ? 16 : 0);
    return {row, column};
}

// Every load of 512 bytes is a stack of 8 / bits whole A operands: each holds every (row, column) once, and one column
// means the same channel (K) or token (V) in all rows, so that the other operand can be laid out once.
TEST(Places, FormFragmentsForEveryHeadDim) {
    for (int d : kHeadDims) {
        for (int bits : {8, 4, 2}) {
            for (bool is_v : {false, true}) {
                const int stored = is_v ? v_stored_channels(d, bits) : d, loads = kPageTokens * stored * bits / 8 / 512;
                // meaning[load][field][row or column] -> token or channel
                std::vector<int> row_is(size_t(loads) * (8 / bits) * 16, -1), column_is(size_t(loads) * (8 / bits) * 32, -1);
                for (int t = 0; t < kPageTokens; ++t) {
                    for (int c = 0; c < stored; ++c) {
                        const CodePlace p = is_v ? v_place(d, bits, t, c) : k_place(d, bits, t, c);
                        const int load = int(p.byte) / 512, lane = int(p.byte) % 512 / 16, w = int(p.byte) % 16 / 4;
                        const auto [row, column] = a_fragment(lane, w, int(p.byte) % 4);
                        const int tile = load * (8 / bits) + int(p.shift) / bits;
                        int& r = row_is[size_t(tile) * 16 + row];
                        int& k = column_is[size_t(tile) * 32 + column];
                        const int row_value = is_v ? c : t, column_value = is_v ? t : c;
                        ASSERT_TRUE(r == -1 || r == row_value) << "d " << d << " bits " << bits;
                        ASSERT_TRUE(k == -1 || k == column_value) << "d " << d << " bits " << bits;
                        r = row_value;
                        k = column_value;
                    }
                }
                for (int v : row_is) ASSERT_GE(v, 0);
                for (int v : column_is) ASSERT_GE(v, 0);
            }
        }
    }
}

// The maps that were measured at d = 128: "lane = 4r+i, w = word 0..3, b =
// byte".
TEST(Places, MatchTheMeasuredDecodeKernelAt128) {
    for (int bits : {4, 2}) {
        const int fields = 8 / bits;
        for (int load = 0; load < 64 * 128 * bits / 8 / 512; ++load) {
            for (int r = 0; r < 8; ++r) {
                for (int i = 0; i < 4; ++i) {
                    for (int w = 0; w < 4; ++w) {
                        for (int b = 0; b < 4; ++b) {
                            for (int field = 0; field < fields; ++field) {
                                const auto byte = uint32_t(load * 512 + (4 * r + i) * 16 + w * 4 + b);
                                const int kk = load % 4, mt = load / 4 * fields + field;
                                const CodePlace k =
                                    k_place(128, bits, 16 * mt + r + 8 * (w & 1), 32 * i + 8 * kk + 4 * (w >> 1) + b);
                                ASSERT_EQ(k.byte, byte);
                                ASSERT_EQ(k.shift, uint32_t(field * bits));
                                const int ks = load % 2, mu = load / 2 * fields + field;
                                const CodePlace v =
                                    v_place(128, bits, 8 * (4 * (w >> 1) + b) + 2 * i + ks, 16 * r + 2 * mu + (w & 1));
                                ASSERT_EQ(v.byte, byte);
                                ASSERT_EQ(v.shift, uint32_t(field * bits));
                            }
                        }
                    }
                }
            }
        }
    }
}

// Places are sums of a token part and a channel part: encoders and kernels walk the arrays by two small tables.
TEST(Places, AreSeparable) {
    for (int d : kHeadDims) {
        for (int bits : {8, 4, 2}) {
            for (int t = 0; t < kPageTokens; ++t) {
                for (int c = 0; c < d; ++c) {
                    const CodePlace k = k_place(d, bits, t, c), v = v_place(d, bits, t, c);
                    ASSERT_EQ(k.byte, k_place(d, bits, t, 0).byte + k_place(d, bits, 0, c).byte);
                    ASSERT_EQ(k.shift, k_place(d, bits, t, 0).shift);
                    ASSERT_EQ(v.byte, v_place(d, bits, t, 0).byte + v_place(d, bits, 0, c).byte);
                    ASSERT_EQ(v.shift, v_place(d, bits, 0, c).shift);
                }
            }
        }
    }
}

TEST(StepByte, RoundTrips) {
    for (int step = 1; step <= 31; ++step) {
        for (int f = 0; f < 8; ++f) {
            const uint8_t byte = step_byte(step, f, 4);
            EXPECT_EQ(byte, step + 32 * f);
            EXPECT_EQ(step_of(byte, 4), step);
            EXPECT_EQ(fraction_eighths_of(byte, 4), f);
        }
    }
    for (int step = 1; step <= 127; ++step) {
        for (int f : {0, 4}) {
            const uint8_t byte = step_byte(step, f, 2);
            EXPECT_EQ(byte, step + 32 * f);
            EXPECT_EQ(step_of(byte, 2), step);
            EXPECT_EQ(fraction_eighths_of(byte, 2), f);
        }
    }
}

}  // namespace
}  // namespace ta
