// ta_tier_options.drop_coldest: what goes when no tier has room, what never goes, and that attention is exactly attention over
// the tokens that are left.

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "abi/tier_twins.h"
#include "support/files.h"

namespace ta::testing {
namespace {

class Dropping : public ::testing::Test {
  protected:
    void make(const Budgets& budgets, ta_cpu_isa isa = TA_CPU_ISA_AUTO) {
        context = make_context(2, isa);
        ta_tier_options tiers;
        const auto options = options_of(budgets, tiers);
        pool = make_pool(context, options);
        plan = make_plan(pool);
    }
    // Appends, then attends in a step of its own, so that all tokens are read as they are stored, and compares with float64
    // over what the sequence still has.
    void step(ta_seq seq, int32_t n_new, int32_t n_query = 1) {
        begin(plan, {seq}, {n_new}, {0});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            Tensor k(random.normals(n_new * kRow), n_new, kHeads, kDim), v(random.normals(n_new * kRow), n_new, kHeads, kDim);
            append(plan, layer, k, v);
        }
        end(plan);
        begin(plan, {seq}, {0}, {n_query});
        std::vector<std::vector<float>> q, out, lse;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            q.push_back(random.normals(n_query * kQHeads * kDim));
            Tensor query(q.back(), n_query, kQHeads, kDim), o(n_query, kQHeads, kDim);
            lse.emplace_back(size_t(n_query * kQHeads));
            attend(plan, layer, query, o, lse.back().data());
            out.push_back(o.values());
        }
        end(plan);
        const int64_t n = length(pool, seq);
        const std::vector<bool> has = present(seq);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            std::vector<float> k(size_t(n * kRow)), v(k.size());
            for (int64_t b = 0; b * 64 < n; ++b) {
                if (!has[size_t(b)]) continue;
                const Stored s = dequantize(pool, seq, layer, b * 64, std::min<int64_t>(64, n - b * 64), kRow);
                std::copy(s.k.begin(), s.k.end(), k.begin() + b * 64 * kRow);
                std::copy(s.v.begin(), s.v.end(), v.begin() + b * 64 * kRow);
            }
            double error = 0.0, norm = 0.0;
            for (int64_t row = 0; row < n_query; ++row) {
                for (uint32_t head = 0; head < kQHeads; ++head) {
                    std::vector<double> o(kDim, 0.0);
                    double sum = 0.0;
                    for (int64_t key = 0; key <= n - n_query + row; ++key) {
                        if (!has[size_t(key / 64)]) continue;
                        double dot = 0.0;
                        const size_t at = size_t(key * kRow + head / 2 * kDim), q_at = size_t((row * kQHeads + head) * kDim);
                        for (uint32_t c = 0; c < kDim; ++c) dot += double(q[layer][q_at + c]) * double(k[at + c]);
                        const double p = std::exp(dot / 8.0);
                        sum += p;
                        for (uint32_t c = 0; c < kDim; ++c) o[c] += p * double(v[at + c]);
                    }
                    EXPECT_NEAR(double(lse[layer][size_t(row * kQHeads + head)]), std::log(sum), 0.02);
                    for (uint32_t c = 0; c < kDim; ++c) {
                        const double want = o[c] / sum, got = double(out[layer][size_t((row * kQHeads + head) * kDim + c)]);
                        error += (got - want) * (got - want);
                        norm += want * want;
                    }
                }
            }
            EXPECT_LT(std::sqrt(error / norm), 0.03) << n << " tokens, layer " << layer;
        }
    }
    std::vector<bool> present(ta_seq seq) const {
        std::vector<bool> has;
        for (uint64_t b = 0; b < uint64_t(length(pool, seq) + 63) / 64; ++b) {
            auto info = sized<ta_x_block_info>();
            ta_error err;
            const ta_status s = ta_x_seq_block(pool.get(), seq, b, &info, nullptr, 0, &err);
            EXPECT_TRUE(s == TA_OK || (s == TA_E_STATE && err.block == int64_t(b))) << ta_status_name(s);
            has.push_back(s == TA_OK);
        }
        return has;
    }
    uint64_t dropped() const { return move_stats(pool).dropped_blocks; }

    Context context;
    KvPool pool;
    Plan plan;
    Random random{11};
};

TEST_F(Dropping, IsOffByDefault) {
    for (const ta_switch off : {TA_DEFAULT, TA_OFF}) {
        make({.device_blocks = 10, .drop_coldest = off});
        const ta_seq seq = make_sequence(pool);
        step(seq, 10 * 64);
        ta_error err;
        const int32_t n = 20 * 64;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), TA_E_TIER_FULL);
        EXPECT_EQ(dropped(), 0u);
    }
}

TEST_F(Dropping, ASequenceGrowsBeyondAllBudgets) {
    for (const ta_cpu_isa isa : available_isas()) {
        for (const ta_eviction eviction : {TA_EVICT_LRU, TA_EVICT_ATTENTION}) {
            SCOPED_TRACE("instruction set " + std::to_string(isa) + ", policy " + std::to_string(eviction));
            make({.device_blocks = 12, .eviction = eviction, .drop_coldest = TA_ON}, isa);
            const ta_seq seq = make_sequence(pool);
            for (int i = 0; i < 40; ++i) step(seq, i % 2 == 0 ? 64 : 37, i % 5 == 0 ? 12 : 1);
            const ta_residency r = residency(pool, seq);
            const std::vector<bool> has = present(seq);
            EXPECT_EQ(r.dropped_blocks, uint64_t(std::count(has.begin(), has.end(), false)));
            EXPECT_EQ(r.device_blocks + r.dropped_blocks, has.size());
            EXPECT_GT(r.dropped_blocks, 5u);
            EXPECT_EQ(dropped(), r.dropped_blocks);
            EXPECT_TRUE(has.front()) << "the sink";
            EXPECT_TRUE(has.back()) << "the open block";
            ta_error err;
            EXPECT_EQ(ta_seq_verify(pool.get(), seq, &err), TA_OK) << err.message;
            const ta_tier_stats s = tier_stats(pool, TA_TIER_DEVICE);
            EXPECT_LE(s.bytes_used, s.bytes_budget);
            EXPECT_GE(s.bytes_used, s.bytes_budget / 2) << "more was dropped than had to go";
        }
    }
}

TEST_F(Dropping, DroppedBlocksAreNoHits) {
    for (const uint64_t host_bytes : {uint64_t{0}, uint64_t{60000}}) {
        make({.device_blocks = 6, .host_bytes = host_bytes, .drop_coldest = TA_ON});
        const ta_seq seq = make_sequence(pool);
        for (int i = 0; i < 30; ++i) step(seq, 64);
        const ta_residency r = residency(pool, seq);
        EXPECT_GT(r.dropped_blocks, 5u);
        const uint64_t before = tier_stats(pool, TA_TIER_DEVICE).hits;
        begin(plan, {seq}, {0}, {1});
        ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
        EXPECT_EQ(tier_stats(pool, TA_TIER_DEVICE).hits - before, r.device_blocks);
    }
}

TEST_F(Dropping, PinnedAndSharedBlocksStay) {
    make({.device_blocks = 30, .drop_coldest = TA_ON});
    const ta_seq a = make_sequence(pool), other = make_sequence(pool);
    step(a, 10 * 64);
    ta_error err;
    require(ta_seq_pin(pool.get(), a, 2, 2, &err), err);
    step(other, 5 * 64 + 7);
    const ta_seq b = fork_sequence(pool, other);
    for (int i = 0; i < 40; ++i) step(b, 64);
    EXPECT_EQ(present(a), (std::vector<bool>{true, false, true, true, false, false, false, false, false, false}));
    EXPECT_EQ(present(other), std::vector<bool>(6, true));
    EXPECT_EQ(residency(pool, a).dropped_blocks, 7u);
    EXPECT_EQ(ta_seq_pin(pool.get(), a, 1, 1, &err), TA_E_STATE);
    EXPECT_NE(std::string(err.message).find("dropped"), std::string::npos) << err.message;
}

TEST_F(Dropping, NothingIsLostWhereItWouldNotBeEnough) {
    make({.device_blocks = 12, .drop_coldest = TA_ON});
    const ta_seq seq = make_sequence(pool);
    step(seq, 16 * 64);
    ta_error err;
    require(ta_seq_pin(pool.get(), seq, 1, 13, &err), err);
    const int32_t n = 14 * 64;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(dropped(), 0u);
    require(ta_seq_unpin(pool.get(), seq, 1, 13, &err), err);
    step(seq, n);
    EXPECT_GT(dropped(), 0u);
}

// The open block that could not leave has no slot in the host tier even then, a channel block has.
TEST_F(Dropping, WhatFitsBelowMakesUseOfWhatWasDropped) {
    context = make_context(1);
    auto numerics = sized<ta_numerics>();
    numerics.sink_blocks = -1;
    auto options = pool_options(kLayers, kHeads, kDim);
    options.numerics = &numerics;
    const ta_kv_pool_stats sizes = stats(make_pool(context, options));
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 5 * sizes.channel_block_bytes;
    tiers.drop_coldest = TA_ON;
    tiers.high_percent = 100;
    options.tiers = &tiers;
    options.budget_bytes = 2 * sizes.token_block_bytes;
    pool = make_pool(context, options);
    plan = make_plan(pool);
    ta_seq cold = 0;
    do {
        cold = make_sequence(pool);
        step(cold, 64);
    } while (move_now(pool, cold, 0, 1, TA_TIER_HOST).moved > 0);
    ta_error err;
    require(ta_seq_release(pool.get(), cold, &err), err);
    const ta_seq seq = make_sequence(pool);
    step(seq, 64);
    fork_sequence(pool, seq);
    step(seq, 10);
    ta_ticket ticket = 0;
    require(ta_seq_suspend(pool.get(), seq, TA_TIER_HOST, &ticket, &err), err);
    EXPECT_EQ(wait(pool, ticket).failed, 2u);
    begin(plan, {seq}, {1});
    require(ta_plan_abort(plan.get(), &err), err);
    EXPECT_EQ(dropped(), 1u);
}

// Blocks that windows have passed have small slots below, which are no use to others.
TEST_F(Dropping, NothingIsLostForSlotsOfAnotherSize) {
    context = make_context(1);
    auto numerics = sized<ta_numerics>();
    numerics.sink_blocks = -1;
    auto group = sized<ta_layer_group>();
    group.layers = 3;
    group.window = 64;
    auto options = pool_options(4, kHeads, kDim);
    options.numerics = &numerics;
    options.layer_groups = &group;
    options.n_layer_groups = 1;
    const ta_kv_pool_stats sizes = stats(make_pool(context, options));
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 4 * sizes.channel_block_bytes;
    tiers.drop_coldest = TA_ON;
    tiers.high_percent = 100;
    options.tiers = &tiers;
    options.budget_bytes = sizes.token_block_bytes * 21 / 10;
    pool = make_pool(context, options);
    plan = make_plan(pool);
    const auto grow = [&](ta_seq seq, int32_t n) {
        begin(plan, {seq}, {n}, {0});
        for (uint32_t layer = 0; layer < 4; ++layer) {
            Tensor k(random.normals(n * kRow), n, kHeads, kDim);
            append(plan, layer, k, k);
        }
        end(plan);
    };
    const ta_seq seq = make_sequence(pool), cold = make_sequence(pool), fresh = make_sequence(pool);
    grow(seq, 64);
    fork_sequence(pool, seq);
    ta_error err;
    require(ta_seq_pin(pool.get(), seq, 0, 1, &err), err);
    for (int i = 0; i < 3; ++i) grow(cold, 64);
    move_now(pool, cold, 0, 3, TA_TIER_HOST);
    grow(seq, 10);
    require(ta_seq_unpin(pool.get(), seq, 0, 1, &err), err);
    const int32_t n = 1;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &fresh, &n, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(dropped(), 0u);
}

TEST_F(Dropping, WhatCanBeDoneWithTheRest) {
    make({.device_blocks = 12, .drop_coldest = TA_ON});
    const ta_seq seq = make_sequence(pool);
    for (int i = 0; i < 30; ++i) step(seq, 64);
    const std::vector<bool> has = present(seq);
    const int64_t gone = std::find(has.begin(), has.end(), false) - has.begin();
    constexpr int64_t kLeft = 29;  // the newest
    ASSERT_LT(gone, kLeft);
    ASSERT_TRUE(has[kLeft]);
    ta_error err;
    const Folder folder;
    const std::string path = folder.file("sequence");
    EXPECT_EQ(ta_seq_save(pool.get(), seq, path.c_str(), nullptr, &err), TA_E_STATE) << err.message;
    EXPECT_GE(err.block, 1);
    EXPECT_FALSE(std::filesystem::exists(path));
    const std::vector<float> none(10 * kRow, -1.0f);
    std::vector<float> k = none;
    EXPECT_EQ(ta_x_seq_dequantize(pool.get(), seq, 0, gone * 64 - 5, 10, k.data(), nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.block, gone);
    EXPECT_EQ(k, none) << "rows before the dropped block";
    // A fork lacks what its source lacks.
    const ta_seq fork = fork_sequence(pool, seq);
    EXPECT_EQ(present(fork), has);
    ta_error ignored;
    require(ta_seq_release(pool.get(), seq, &err), err);
    step(fork, 10);
    // Into a dropped block nothing can be appended.
    EXPECT_EQ(ta_seq_truncate(pool.get(), fork, gone * 64 + 1, &err), TA_E_STATE) << err.message;
    EXPECT_EQ(err.block, gone);
    EXPECT_EQ(length(pool, fork), 30 * 64 + 10);
    require(ta_seq_truncate(pool.get(), fork, kLeft * 64 + 5, &err), err);
    step(fork, 70);
    require(ta_seq_truncate(pool.get(), fork, gone * 64, &err), err);
    step(fork, 100);
    require(ta_seq_truncate(pool.get(), fork, 0, &err), err);
    EXPECT_EQ(residency(pool, fork).dropped_blocks, 0u);
    step(fork, 100);
    EXPECT_EQ(ta_seq_verify(pool.get(), fork, &ignored), TA_OK);
}

TEST_F(Dropping, NothingIsLostBelowADeviceThatIsPinned) {
    make({.device_blocks = 4, .disk_bytes = kPlenty, .bits = 8, .drop_coldest = TA_ON});
    const ta_seq idle = make_sequence(pool), pinned = make_sequence(pool), other = make_sequence(pool);
    step(idle, 5 * 64);
    EXPECT_EQ(move_now(pool, idle, 0, 5, TA_TIER_DISK).moved, 5u);
    step(pinned, 11 * 64);
    ta_error err;
    require(ta_seq_pin(pool.get(), pinned, 0, 11, &err), err);
    const int32_t n = 2 * 64;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &other, &n, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(dropped(), 0u);
}

TEST_F(Dropping, AStepLargerThanTheDeviceLosesItsOwn) {
    make({.device_blocks = 4, .disk_bytes = kPlenty, .bits = 8, .drop_coldest = TA_ON});
    const ta_seq idle = make_sequence(pool), a = make_sequence(pool), b = make_sequence(pool);
    for (const ta_seq s : {idle, a, b}) {
        step(s, 8 * 64);
        EXPECT_EQ(move_now(pool, s, 0, 8, TA_TIER_DISK).moved, 8u);
    }
    begin(plan, {a, b}, {0, 0});
    ta_error err;
    require(ta_plan_abort(plan.get(), &err), err);
    EXPECT_EQ(residency(pool, idle).disk_blocks, 8u);
    EXPECT_EQ(dropped(), 4u);
}

// Places that an open plan may be reading are not free before it ends.
TEST_F(Dropping, NoMoreGoesWhileAnotherPlanIsOpen) {
    make({.device_blocks = 12, .host_bytes = 512 << 10, .bits = 8, .drop_coldest = TA_ON, .begin_wait_ms = 20000});
    const ta_seq idle = make_sequence(pool), held = make_sequence(pool), fresh = make_sequence(pool);
    step(held, 2 * 64);
    for (int i = 0; i < 100 && dropped() == 0; ++i) step(idle, 64);
    const uint64_t before = dropped();
    ASSERT_GT(before, 0u);
    const Plan open = make_plan(pool);
    begin(open, {held}, {0});
    std::jthread ends([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        ta_error err;
        EXPECT_EQ(ta_plan_abort(open.get(), &err), TA_OK) << err.message;
    });
    step(fresh, 3 * 64);
    EXPECT_LE(dropped() - before, 4u);
}

TEST_F(Dropping, ABeginWaitsForAnOpenPlanAsLongAsItMay) {
    for (const int wait : {-1, 100, 0}) {
        for (const uint64_t host_bytes : {uint64_t{0}, uint64_t{512} << 10}) {
            SCOPED_TRACE(std::to_string(wait) + " ms, host tier of " + std::to_string(host_bytes));
            make({.device_blocks = 12, .host_bytes = host_bytes, .bits = 8, .drop_coldest = TA_ON, .begin_wait_ms = wait});
            const ta_seq idle = make_sequence(pool), held = make_sequence(pool), fresh = make_sequence(pool);
            step(held, 2 * 64);
            for (int i = 0; i < 100 && dropped() == 0; ++i) step(idle, 64);
            const Plan open = make_plan(pool);
            begin(open, {held}, {0});
            const uint64_t before = dropped();
            const auto start = std::chrono::steady_clock::now();
            begin(plan, {fresh}, {3 * 64});
            const auto took = std::chrono::steady_clock::now() - start;
            EXPECT_LT(took, std::chrono::milliseconds(wait == 0 ? 5000 : 1500));
            // First what the host tier has; the device's own blocks when what these make room for is still being read, or might
            // be.
            const bool waits = host_bytes > 0 && wait >= 0;
            EXPECT_GE(took, std::chrono::milliseconds(waits ? std::max(wait, 90) : 0));
            EXPECT_LE(dropped() - before, waits ? 6u : 3u);
            ta_error err;
            require(ta_plan_abort(plan.get(), &err), err);
            require(ta_plan_abort(open.get(), &err), err);
            step(fresh, 3 * 64);
        }
    }
}

// Shared blocks that a step reads may leave the device, if nothing else can, once there is room below: but the step must
// end.
TEST_F(Dropping, NothingIsLostForRoomThatAnotherPlanKeeps) {
    for (const bool ends : {false, true}) {
        make({.device_blocks = 4,
              .host_bytes = 512 << 10,
              .bits = 8,
              .drop_coldest = TA_ON,
              .begin_wait_ms = ends ? 20000 : 100});
        const ta_seq idle = make_sequence(pool), held = make_sequence(pool), fresh = make_sequence(pool);
        for (int i = 0; i < 100 && dropped() == 0; ++i) step(idle, 64);
        step(held, 11 * 64);
        fork_sequence(pool, held);
        for (uint64_t b = 0; b < uint64_t(length(pool, idle)) / 64; ++b) {
            if (present(idle)[b]) move_now(pool, idle, b, 1, TA_TIER_HOST);
        }
        move_now(pool, held, 0, 11, TA_TIER_DEVICE);
        const Plan open = make_plan(pool);
        begin(open, {held}, {0});
        const uint64_t before = dropped();
        const std::jthread later([&] {
            if (!ends) return;
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            ta_error ignored;
            EXPECT_EQ(ta_plan_abort(open.get(), &ignored), TA_OK);
        });
        const int32_t n = 3 * 64;
        ta_error err;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &fresh, &n, nullptr, nullptr, &err), ends ? TA_OK : TA_E_TIER_FULL)
            << err.message;
        EXPECT_EQ(dropped() > before, ends);
    }
}

// The step's blocks on disk would fit if others were dropped, its new ones all the same not.
TEST_F(Dropping, NothingIsLostForBlocksOnDiskOfAStepThatDoesNotFit) {
    make({.device_blocks = 4, .disk_bytes = 16 << 14, .bits = 8, .drop_coldest = TA_ON});
    const ta_seq a = make_sequence(pool), pinned = make_sequence(pool), idle = make_sequence(pool);
    step(a, 5 * 64);
    EXPECT_EQ(move_now(pool, a, 0, 5, TA_TIER_DISK).moved, 5u);
    step(pinned, 4 * 64);
    ta_error err;
    require(ta_seq_pin(pool.get(), pinned, 0, 4, &err), err);
    while (dropped() == 0) step(idle, 64);
    const uint64_t before = dropped();
    const int32_t n = 9 * 64;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &a, &n, nullptr, nullptr, &err), TA_E_TIER_FULL) << err.message;
    EXPECT_EQ(dropped(), before);
    // The first ones may go by turns: promoted blocks make room on the disk for those that others have on the device.
    for (int i = 0; i < 4 && dropped() == before; ++i) step(a, 64);
    EXPECT_GT(dropped(), before);
}

// Steps with blocks on disk that must be dropped for, beside full tiers: what a begin drops has to serve it.
class DroppingForBlocksOnDisk : public ::testing::Test {
  protected:
    // `host_blocks`: of whole blocks.
    void make(uint64_t host_blocks, int64_t window) {
        auto options = pool_options(4, 1, 16, 8);
        auto numerics = sized<ta_numerics>();
        numerics.sink_blocks = -1;
        options.numerics = &numerics;
        auto group = sized<ta_layer_group>();
        group.layers = 3;
        group.window = window;
        if (window > 0) options.layer_groups = &group, options.n_layer_groups = 1;
        const uint64_t block = stats(make_pool(make_context(), options)).token_block_bytes;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_blocks * (block + 4095) / 4096 * 4096 + 8192;
        tiers.disk_bytes = 8 << 20;
        tiers.drop_coldest = TA_ON;
        tiers.high_percent = 100;
        options.tiers = &tiers;
        options.budget_bytes = 12 * block;
        pool = make_pool(context, options);
        plan = make_plan(pool);
    }
    ta_status step(ta_seq seq, int32_t n_new) {
        ta_error err;
        if (const ta_status s = ta_plan_begin(plan.get(), 1, &seq, &n_new, nullptr, nullptr, &err); s != TA_OK) return s;
        for (uint32_t layer = 0; layer < 4; ++layer) {
            Tensor k(std::vector<float>(size_t(n_new) * 16, 0.5f), n_new, 1, 16);
            append(plan, layer, k, k);
        }
        end(plan);
        return TA_OK;
    }
    // A sequence of whole blocks.
    ta_seq grown(int blocks) {
        const ta_seq seq = make_sequence(pool);
        for (int b = 0; b < blocks; ++b) EXPECT_EQ(step(seq, 64), TA_OK);
        return seq;
    }
    // Pinned blocks take what the device has free.
    void fill() {
        const ta_seq none = 0;
        const int32_t n = 64;
        auto f = sized<ta_fit>();
        ta_error err;
        for (;;) {
            require(ta_kv_pool_fit(pool.get(), 1, &none, &n, &f, &err), err);
            if (!f.now) return;
            require(ta_seq_pin(pool.get(), grown(1), 0, 1, &err), err);
        }
    }
    uint64_t dropped() const { return move_stats(pool).dropped_blocks; }

    const Context context = make_context(1);
    KvPool pool;
    Plan plan;
};

TEST_F(DroppingForBlocksOnDisk, NothingIsLostForSlotsOfAnotherSize) {
    make(1, 128);
    const ta_seq seq = grown(5);  // windows have passed the first two blocks
    ASSERT_EQ(move_now(pool, seq, 0, 2, TA_TIER_HOST).moved, 2u);
    ASSERT_EQ(move_now(pool, seq, 3, 1, TA_TIER_DISK).moved, 1u);
    ta_error err;
    require(ta_seq_pin(pool.get(), seq, 1, 2, &err), err);
    fill();
    begin(plan, {seq}, {0}, {0});
    ASSERT_EQ(ta_plan_abort(plan.get(), nullptr), TA_OK);
    EXPECT_EQ(dropped(), 1u) << "a slot that the block from disk does not fit into";
}

// Passed blocks in the host tier have the bytes of the block that lacks, but not its slot.
TEST_F(DroppingForBlocksOnDisk, NothingIsLostForNewBlocksThatFindNoRoom) {
    make(2, 128);
    const ta_seq seq = grown(9), reserved = grown(1);  // windows have passed six blocks
    fork_sequence(pool, reserved);
    ASSERT_EQ(move_now(pool, seq, 0, 6, TA_TIER_HOST).moved, 6u);
    ASSERT_EQ(move_now(pool, seq, 7, 1, TA_TIER_DISK).moved, 1u);
    ta_error err;
    for (const uint64_t b : {1, 4, 6, 8}) require(ta_seq_pin(pool.get(), seq, b, 1, &err), err);
    require(ta_seq_reserve(pool.get(), reserved, 1, -1, &err), err);
    fill();
    EXPECT_EQ(step(seq, 1), TA_E_TIER_FULL);
    EXPECT_EQ(dropped(), 0u);
}

// The device can gain one block: a shared one, which two forks have, may go down where another one is dropped.
TEST_F(DroppingForBlocksOnDisk, ASharedBlockLeavesOnce) {
    make(2, 0);
    const ta_seq seq = grown(3), reserved = grown(1);
    for (int fork = 0; fork < 2; ++fork) fork_sequence(pool, reserved);
    ASSERT_EQ(move_now(pool, seq, 0, 1, TA_TIER_DISK).moved, 1u);
    ASSERT_EQ(move_now(pool, seq, 1, 2, TA_TIER_HOST).moved, 2u);
    ta_error err;
    require(ta_seq_reserve(pool.get(), reserved, 1, -1, &err), err);
    fill();
    EXPECT_EQ(step(seq, 65), TA_E_TIER_FULL);
    EXPECT_EQ(dropped(), 0u);
    EXPECT_EQ(step(seq, 64), TA_OK);
    EXPECT_EQ(dropped(), 2u);
}

// Dropped blocks are free at once, beside steps and checks of others: nobody may be reading there.
TEST_F(Dropping, BesideStepsOfOtherThreads) {
    for (const uint64_t host_bytes : {uint64_t{0}, uint64_t{512} << 10}) {
        make({.device_blocks = 24, .host_bytes = host_bytes, .bits = 8, .drop_coldest = TA_ON});
        const auto grow = [&](uint64_t seed) {
            Random values(seed);
            const Plan mine = make_plan(pool);
            ta_seq seq = make_sequence(pool);
            ta_error err;
            int steps = 0;
            for (int i = 0; i < 60; ++i) {
                const int32_t n = 40;
                const ta_status begun = ta_plan_begin(mine.get(), 1, &seq, &n, nullptr, nullptr, &err);
                EXPECT_TRUE(begun == TA_OK || begun == TA_E_TIER_FULL) << err.message;
                if (begun != TA_OK) continue;
                for (uint32_t layer = 0; layer < kLayers; ++layer) {
                    Tensor k(values.normals(n * kRow), n, kHeads, kDim),
                        q(values.normals(n * kQHeads * kDim), n, kQHeads, kDim);
                    Tensor out(n, kQHeads, kDim);
                    append(mine, layer, k, k);
                    attend(mine, layer, q, out);
                    for (const float x : out.values()) ASSERT_TRUE(std::isfinite(x));
                }
                end(mine);
                ++steps;
                EXPECT_EQ(ta_seq_verify(pool.get(), seq, &err), TA_OK) << err.message;
                if (i % 8 != 7) continue;
                const ta_seq fork = fork_sequence(pool, seq);
                require(ta_seq_release(pool.get(), seq, &err), err);
                seq = fork;
            }
            EXPECT_GT(steps, 0);
        };
        {
            std::vector<std::jthread> threads;
            for (uint64_t t = 0; t < 3; ++t) threads.emplace_back(grow, t + 1);
        }
        EXPECT_GT(dropped(), 20u);
    }
}

TEST_F(Dropping, TiersAreFilledFirst) {
    make({.device_blocks = 12, .host_bytes = 512 << 10, .disk_bytes = 1 << 20, .drop_coldest = TA_ON});
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 3; ++i) seqs.push_back(make_sequence(pool));
    uint64_t most_on_disk = 0;
    for (int i = 0; i < 90; ++i) {
        step(seqs[size_t(i) % 3], 64 + i % 7);
        uint64_t on_disk = 0;
        for (const ta_seq s : seqs) on_disk += residency(pool, s).disk_blocks;
        most_on_disk = std::max(most_on_disk, on_disk);
        EXPECT_TRUE(dropped() == 0 || most_on_disk > 10) << "dropped with room on the disk";
    }
    EXPECT_GT(dropped(), 5u);
    ta_error err;
    for (const ta_seq s : seqs) {
        EXPECT_EQ(ta_seq_verify(pool.get(), s, &err), TA_OK) << err.message;
        EXPECT_TRUE(present(s)[0]);
    }
}

}  // namespace
}  // namespace ta::testing
