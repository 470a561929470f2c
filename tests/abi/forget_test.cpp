// Tokens that the caller forgets: attention is that over the others, and what others have stays.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "abi/tier_twins.h"
#include "support/exact_attention.h"
#include "support/files.h"

namespace ta::testing {
namespace {

class Forget : public ::testing::Test {
  protected:
    void make(const ta_tier_options* tiers = nullptr) {
        numerics_.hadamard = TA_OFF;
        numerics_.exp = TA_EXP_EXACT;
        numerics_.p = TA_P_U16;
        auto options = pool_options(kLayers, kHeads, kDim, 4, &numerics_);
        options.tiers = tiers;
        pool = make_pool(context_, options);
        plan_ = make_plan(pool);
    }
    void append_tokens(ta_seq seq, int32_t n) {
        begin(plan_, {seq}, {n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random_.normals(n * kRow), n, kHeads, kDim), v(random_.normals(n * kRow), n, kHeads, kDim);
            append(plan_, layer, k, v);
        }
        end(plan_);
    }
    // Of queries that INT8 holds exactly, at the end of the sequence.
    std::vector<float> attend_at_end(ta_seq seq) {
        std::vector<float> q;
        Random random(3);
        for (int64_t h = 0; h < kQHeads; ++h) {
            for (int64_t c = 0; c < kDim; ++c) q.push_back(float(c == h ? 119 : random.between(-119, 119)) * 0x1p-6f);
        }
        q_ = q;
        Tensor queries(q, 1, kQHeads, kDim), out(1, kQHeads, kDim);
        begin(plan_, {seq}, {0}, {1});
        attend(plan_, 1, queries, out);
        end(plan_);
        return out.values();
    }
    int64_t forget(ta_seq seq, int64_t first, int64_t n) {
        int64_t forgotten = -1;
        ta_error err;
        require(ta_seq_forget(pool.get(), seq, first, n, &forgotten, &err), err);
        return forgotten;
    }

    KvPool pool;
    std::vector<float> q_;

  private:
    const Context context_ = make_context(2);
    ta_numerics numerics_ = sized<ta_numerics>();
    Plan plan_;
    Random random_{7};
};

TEST_F(Forget, AttentionIsThatOverTheOtherTokens) {
    make();
    const ta_seq seq = make_sequence(pool);
    append_tokens(seq, 10 * 64 + 20);
    const int64_t n = length(pool, seq);
    const Stored stored = dequantize(pool, seq, 1, 0, n, kRow);
    const uint64_t used = stats(pool).bytes_used;
    EXPECT_EQ(forget(seq, 65, 62), 0) << "no block is in it as a whole";
    EXPECT_EQ(forget(seq, 640, 20), 0) << "the last block is not full";
    EXPECT_EQ(forget(seq, 1, 0), 0);
    // Of tokens 100 to 450 blocks 2 to 6, then the sink.
    EXPECT_EQ(forget(seq, 100, 351), 5 * 64);
    EXPECT_EQ(forget(seq, 100, 351), 0) << "they are gone already";
    EXPECT_EQ(forget(seq, 0, 64), 64);
    EXPECT_EQ(length(pool, seq), n);
    EXPECT_LT(stats(pool).bytes_used, used);
    EXPECT_EQ(residency(pool, seq).dropped_blocks, 6u);
    std::vector<float> k, v;
    for (int64_t t = 0; t < n; ++t) {
        if (t < 64 || (t >= 128 && t < 448)) continue;
        k.insert(k.end(), stored.k.begin() + t * kRow, stored.k.begin() + (t + 1) * kRow);
        v.insert(v.end(), stored.v.begin() + t * kRow, stored.v.begin() + (t + 1) * kRow);
    }
    const std::vector<float> got = attend_at_end(seq);
    const AttentionShape shape{1, int64_t(k.size()) / kRow, kQHeads, kHeads, kDim};
    const Attention exact = exact_attention(shape, {}, q_.data(), k.data(), v.data());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], exact.out[i], 2e-4) << i;
    append_tokens(seq, 100);
    ta_error err;
    EXPECT_EQ(ta_seq_verify(pool.get(), seq, &err), TA_OK) << err.message;
}

TEST_F(Forget, WhatOthersHaveStays) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    make(&tiers);
    const ta_seq seq = make_sequence(pool);
    append_tokens(seq, 5 * 64);
    const ta_seq fork = fork_sequence(pool, seq);
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    ta_namespace space = 0;
    std::vector<uint8_t> keys(5 * 32, 9);
    for (size_t i = 0; i < 5; ++i) keys[32 * i] = uint8_t(i);
    ta_error err;
    require(ta_namespace_create(pool.get(), &options, &space, &err), err);
    require(ta_seq_publish(pool.get(), seq, space, keys.data(), 5, &err), err);
    ta_ticket ticket = 0;
    require(ta_seq_move(pool.get(), seq, 1, 3, TA_TIER_HOST, &ticket, &err), err);  // be they on their way or not
    const Stored stored = dequantize(pool, fork, 1, 0, 320, kRow);
    EXPECT_EQ(forget(seq, 0, 320), 320);
    EXPECT_TRUE(dequantize(pool, fork, 1, 0, 320, kRow) == stored);
    require(ta_seq_release(pool.get(), fork, &err), err);
    ta_seq match = 0;
    int64_t matched = 0;
    require(ta_seq_match_prefix(pool.get(), space, keys.data(), 5, &match, &matched, &err), err);
    EXPECT_EQ(matched, 320);
    EXPECT_TRUE(dequantize(pool, match, 1, 0, 320, kRow) == stored);
    const std::vector<float> nothing = attend_at_end(seq);
    EXPECT_TRUE(std::all_of(nothing.begin(), nothing.end(), [](float x) { return x == 0.0f; }));
}

// Blocks that one tenant forgets stay in other namespaces.
TEST_F(Forget, NamespacesAreApart) {
    make();
    ta_error err;
    for (uint8_t tenant = 1; tenant <= 2; ++tenant) {
        auto options = sized<ta_namespace_options>();
        options.salt[0] = tenant;
        ta_namespace space = 0;
        require(ta_namespace_create(pool.get(), &options, &space, &err), err);
        const ta_seq seq = make_sequence(pool);
        append_tokens(seq, 5 * 64);
        EXPECT_EQ(forget(seq, 4 * 64, 64), 64);
        std::vector<uint8_t> keys(4 * 32, 1);
        for (uint8_t i = 0; i < 4; ++i) keys[32 * i] = i;
        EXPECT_EQ(ta_seq_publish(pool.get(), seq, space, keys.data(), 4, &err), TA_OK) << err.message;
    }
    EXPECT_EQ(stats(pool).shared_blocks, 8u);  // those that are published
}

TEST_F(Forget, WhatNeedsTheTokensIsRefused) {
    make();
    const ta_seq seq = make_sequence(pool);
    append_tokens(seq, 4 * 64 + 3);
    EXPECT_EQ(forget(seq, 64, 64), 64);
    ta_error err;
    const Folder folder;
    EXPECT_EQ(ta_seq_save(pool.get(), seq, folder.file("s").c_str(), nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.block, 1);
    EXPECT_EQ(ta_seq_truncate(pool.get(), seq, 100, &err), TA_E_STATE);
    EXPECT_EQ(err.block, 1);
    EXPECT_EQ(ta_seq_pin(pool.get(), seq, 1, 1, &err), TA_E_STATE);
    EXPECT_EQ(ta_seq_retain(pool.get(), seq, 0, 2, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.block, 1);
    // To a length where blocks end it can be cut, and goes on.
    EXPECT_EQ(ta_seq_truncate(pool.get(), seq, 128, &err), TA_OK) << err.message;
    append_tokens(seq, 70);
    EXPECT_EQ(ta_seq_verify(pool.get(), seq, &err), TA_OK) << err.message;
}

}  // namespace
}  // namespace ta::testing
