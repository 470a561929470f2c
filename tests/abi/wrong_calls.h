// A pool with two sequences, calls that must fail, and the check that nothing has changed after each of them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "support/handles.h"

namespace ta::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();

// A call that must fail: with which status, which argument it names (-1: none) and a part of its text.
struct Wrong {
    const char* what;
    std::function<ta_status(ta_error* err)> call;
    ta_status status;
    int argument;
    const char* text;
};

// The value that a caller passes for an output; it must still be there afterwards.
template <class T>
T* untouched() {
    alignas(std::max_align_t) static int place;
    return reinterpret_cast<T*>(&place);
}

// A pointer that is not aligned to its type; nothing may be read or written there.
template <class T>
T* misaligned() {
    static T place[2];
    return reinterpret_cast<T*>(reinterpret_cast<char*>(place) + 1);
}

class WrongCalls : public ::testing::Test {
  protected:
    static constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 64, kQHeads = 4;
    static constexpr int64_t kRow = kHeads * kDim;

    WrongCalls() : context(make_context(1)) {
        auto options = pool_options(kLayers, kHeads, kDim);
        options.budget_bytes = 1 << 20;
        options.max_sequences = 8;
        pool = make_pool(context, options);
        plan = make_plan(pool);
        long_seq = make_sequence(pool);
        short_seq = make_sequence(pool);
        step(plan, {long_seq, short_seq}, {130, 10});
        before = snapshot();
    }

    // A whole correct step with seeded data; returns what attention gave, all layers.
    static std::vector<float> step(const Plan& p, const std::vector<ta_seq>& seqs, const std::vector<int32_t>& n_new,
                                   uint64_t seed = 1) {
        begin(p, seqs, n_new);
        std::vector<float> results = run_open_plan(p, n_new, seed);
        end(p);
        return results;
    }
    static std::vector<float> run_open_plan(const Plan& p, const std::vector<int32_t>& n_new, uint64_t seed = 1) {
        Random random(seed);
        int64_t n = 0;
        for (int32_t x : n_new) n += x;
        std::vector<float> results;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim), v(random.normals(n * kRow), n, kHeads, kDim);
            Tensor q(random.normals(n * kQHeads * kDim), n, kQHeads, kDim), out(n, kQHeads, kDim);
            append(p, layer, k, v);
            attend(p, layer, q, out);
            const std::vector<float> layer_results = out.values();
            results.insert(results.end(), layer_results.begin(), layer_results.end());
        }
        return results;
    }

    struct Snapshot {
        ta_kv_pool_stats stats;
        std::vector<int64_t> lengths;
        std::vector<Stored> stored;  // none while a plan is open
    };
    Snapshot snapshot(bool with_contents = true) const {
        Snapshot s{stats(pool), {length(pool, long_seq), length(pool, short_seq)}, {}};
        for (uint32_t layer = 0; with_contents && layer < kLayers; ++layer) {
            s.stored.push_back(dequantize(pool, long_seq, layer, 0, s.lengths[0], kRow));
            s.stored.push_back(dequantize(pool, short_seq, layer, 0, s.lengths[1], kRow));
        }
        return s;
    }
    void expect_unchanged(const Snapshot& was) const {
        const Snapshot now = snapshot(!was.stored.empty());
        EXPECT_EQ(std::memcmp(&was.stats, &now.stats, sizeof now.stats), 0) << "the pool's statistics have changed";
        EXPECT_EQ(was.lengths, now.lengths);
        EXPECT_TRUE(was.stored == now.stored) << "stored tokens have changed";
    }

    // Makes each call with and without an error struct.
    static void expect_failure(const Wrong& wrong) {
        SCOPED_TRACE(wrong.what);
        ta_error err;
        std::memset(&err, 0x5a, sizeof err);
        const ta_status status = wrong.call(&err);
        EXPECT_EQ(status, wrong.status) << ta_status_name(status) << " instead of " << ta_status_name(wrong.status) << ": "
                                        << std::string_view(err.message, strnlen(err.message, sizeof err.message));
        EXPECT_EQ(err.code, status);
        ASSERT_LT(strnlen(err.message, sizeof err.message), sizeof err.message) << "the text does not end";
        EXPECT_NE(std::string_view(err.message).find(wrong.text), std::string_view::npos)
            << '"' << err.message << "\" lacks \"" << wrong.text << '"';
        EXPECT_EQ(err.argument, wrong.argument) << err.message;
        EXPECT_EQ(wrong.call(nullptr), wrong.status) << "without an error struct";
    }
    void expect_failures(std::initializer_list<Wrong> list, bool plan_is_open = false) {
        const Snapshot was = snapshot(!plan_is_open);
        for (const Wrong& wrong : list) {
            expect_failure(wrong);
            SCOPED_TRACE(wrong.what);
            expect_unchanged(was);
        }
    }

    // On success the error struct says so too.
    template <class Call>
    static void expect_success(Call&& call) {
        ta_error err;
        std::memset(&err, 0x5a, sizeof err);
        EXPECT_EQ(call(&err), TA_OK) << err.message;
        EXPECT_EQ(err.code, TA_OK);
        EXPECT_STREQ(err.message, "");
        EXPECT_EQ(err.layer, -1);
        EXPECT_EQ(err.head, -1);
        EXPECT_EQ(err.argument, -1);
        EXPECT_EQ(err.sequence, -1);
        EXPECT_EQ(err.block, -1);
        EXPECT_EQ(err.token, -1);
        EXPECT_EQ(err.tier, -1);
        EXPECT_EQ(err.rank, -1);
        EXPECT_EQ(err.bytes, -1);
        EXPECT_EQ(call(nullptr), TA_OK);
    }

    Context context;
    KvPool pool;
    Plan plan;
    ta_seq long_seq = 0, short_seq = 0;
    Snapshot before;
};

class BadArguments : public WrongCalls {};

}  // namespace ta::testing
