// Sequences that publish and match prefixes: what the tests of prefix reuse, of pool files and of the persistent tier share.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "support/tiers.h"

namespace ta::testing {

class PrefixSteps : public ::testing::Test {
  protected:
    static constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
    static constexpr int64_t kRow = kHeads * kDim;

    static ta_kv_pool_options options(uint32_t bits = 4, const ta_numerics* numerics = nullptr) {
        return pool_options(kLayers, kHeads, kDim, bits, numerics);
    }
    // Room for so many channel blocks beside 8 token blocks.
    static ta_kv_pool_options small_options(uint64_t blocks, ta_tier_options* tiers = nullptr) {
        auto o = options();
        const ta_kv_pool_stats s = stats(make_pool(make_context(), o));
        o.budget_bytes = 8 * s.token_block_bytes + blocks * s.channel_block_bytes;
        o.tiers = tiers;
        return o;
    }

    // Appends n tokens of the stream `text`: what they are depends on it and on their places alone. Returns what attention
    // gave.
    static std::vector<float> grow(const KvPool& pool, ta_seq seq, int32_t n, uint64_t text) {
        const int64_t have = length(pool, seq);
        const Plan plan = make_plan(pool);
        std::vector<float> seen;
        begin(plan, {seq}, {n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            std::vector<float> k, v, q;
            for (int64_t t = have; t < have + n; ++t) {
                Random token(text * 1000003 + uint64_t(t) * 17 + layer);
                for (auto [x, size] : {std::pair(&k, kRow), std::pair(&v, kRow), std::pair(&q, int64_t{kQHeads * kDim})}) {
                    const std::vector<float> values = token.normals(size);
                    x->insert(x->end(), values.begin(), values.end());
                }
            }
            Tensor kt(k, n, kHeads, kDim), vt(v, n, kHeads, kDim), qt(q, n, kQHeads, kDim), out(n, kQHeads, kDim);
            append(plan, layer, kt, vt);
            attend(plan, layer, qt, out);
            const std::vector<float> x = out.values();
            seen.insert(seen.end(), x.begin(), x.end());
        }
        end(plan);
        return seen;
    }
    static ta_seq write(const KvPool& pool, int32_t n, uint64_t text) {
        const ta_seq seq = make_sequence(pool);
        grow(pool, seq, n, text);
        return seq;
    }
    static void release(const KvPool& pool, ta_seq seq) {
        ta_error err;
        require(ta_seq_release(pool.get(), seq, &err), err);
    }
    static void truncate(const KvPool& pool, ta_seq seq, int64_t n) {
        ta_error err;
        require(ta_seq_truncate(pool.get(), seq, n, &err), err);
    }

    static ta_namespace_options namespace_options(uint8_t salt, uint64_t quota = 0) {
        auto o = sized<ta_namespace_options>();
        std::memset(o.salt, salt, sizeof o.salt);
        o.quota_bytes = quota;
        return o;
    }
    static ta_namespace make_namespace(const KvPool& pool, uint8_t salt, uint64_t quota = 0) {
        const auto o = namespace_options(salt, quota);
        ta_namespace space = 0;
        ta_error err;
        require(ta_namespace_create(pool.get(), &o, &space, &err), err);
        return space;
    }
    // Of the first n blocks of a text.
    static std::vector<uint8_t> keys(uint64_t text, size_t n) {
        std::vector<uint8_t> all(n * 32, 0);
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(all.data() + i * 32, &text, sizeof text);
            std::memcpy(all.data() + i * 32 + 8, &i, sizeof i);
        }
        return all;
    }
    static void publish(const KvPool& pool, ta_seq seq, ta_namespace space, uint64_t text, size_t n) {
        ta_error err;
        require(ta_seq_publish(pool.get(), seq, space, keys(text, n).data(), n, &err), err);
    }
    static std::pair<ta_seq, int64_t> match(const KvPool& pool, ta_namespace space, uint64_t text, size_t n) {
        std::pair<ta_seq, int64_t> m{0, -1};
        ta_error err;
        require(ta_seq_match_prefix(pool.get(), space, keys(text, n).data(), n, &m.first, &m.second, &err), err);
        EXPECT_EQ(length(pool, m.first), m.second);
        return m;
    }
    static ta_namespace_stats space_stats(const KvPool& pool, ta_namespace space) {
        auto s = sized<ta_namespace_stats>();
        ta_error err;
        require(ta_namespace_get_stats(pool.get(), space, &s, &err), err);
        return s;
    }
    static ta_move_info move(const KvPool& pool, ta_seq seq, uint64_t n, ta_tier tier) {
        return move_now(pool, seq, 0, n, tier);
    }
    static bool same_values(const KvPool& a, ta_seq x, const KvPool& b, ta_seq y, int64_t n) {
        for (uint32_t layer = 0; layer < kLayers && n > 0; ++layer) {
            if (!(dequantize(a, x, layer, 0, n, kRow) == dequantize(b, y, layer, 0, n, kRow))) return false;
        }
        return true;
    }

    Context context = make_context(2);
};

}  // namespace ta::testing
