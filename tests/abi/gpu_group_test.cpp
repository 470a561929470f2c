// Groups with ranks on GPUs: what arrives is what left, to the bit, and goes on as it would have at the source. Two GPUs where
// there are two, else two contexts on one. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "support/gpu.h"
#include "support/groups.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 128, kQHeads = 8;
constexpr int64_t kRow = kHeads * kDim;
constexpr int kCpu = -1;

// The devices of the two ranks: a GPU's number, or kCpu.
struct Ends {
    const char* name;
    int source, destination;
};
void PrintTo(const Ends& e, std::ostream* out) {
    *out << e.name;
}

class GpuGroup : public ::testing::TestWithParam<Ends> {
  protected:
    void SetUp() override {
        if (cudaGetDeviceCount(&gpus_) != cudaSuccess || gpus_ == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
    }
    void TearDown() override {
        if (IsSkipped()) return;
        for (int i = 0; i < gpus_; ++i) {
            EXPECT_EQ(cudaSetDevice(i), cudaSuccess);
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        }
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }

    int device(uint32_t rank) const {
        const int wanted = rank == 0 ? GetParam().source : GetParam().destination;
        return wanted < gpus_ ? wanted : 0;
    }
    bool on_gpu(uint32_t rank) const { return device(rank) != kCpu; }

    template <class Change>
    std::vector<Rank> make(const ta_kv_pool_options& pool, Change&& change) const {
        std::vector<Context> contexts;
        for (const uint32_t r : {0u, 1u}) {
            auto options = sized<ta_context_options>();
            options.threads = 2;
            if (on_gpu(r)) {
                options.device = TA_DEVICE_CUDA;
                options.device_ordinal = device(r);
            }
            contexts.push_back(make_context(options));
        }
        return make_ranks(std::move(contexts), pool, change);
    }

    // A step of one rank; what attention gives to its last two tokens.
    std::vector<float> step(const std::vector<Rank>& ranks, uint32_t rank, ta_seq seq, int32_t n, uint64_t seed) const {
        Random random(seed);
        const auto values = [&](int64_t count) {
            std::vector<float> x = random.normals(count);
            for (float& v : x) v = round_to(TA_DTYPE_F16, v);
            return x;
        };
        const Plan& plan = ranks[rank].plan;
        const int32_t rows = std::min(n, 2);
        begin(plan, {seq}, {n}, {rows});
        std::vector<float> all;
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> kv = values(n * kRow), vv = values(n * kRow), qv = values(rows * kQHeads * kDim);
            std::vector<float> x;
            if (on_gpu(rank)) {
                EXPECT_EQ(cudaSetDevice(device(rank)), cudaSuccess);
                const DeviceTensor k(n, kHeads, kDim, &kv), v(n, kHeads, kDim, &vv), q(rows, kQHeads, kDim, &qv),
                    out(rows, kQHeads, kDim);
                require(ta_append(plan.get(), layer, k.view(), v.view(), &err), err);
                require(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
                EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                x = out.get();
            } else {
                Tensor k(kv, n, kHeads, kDim, TA_DTYPE_F16), v(vv, n, kHeads, kDim, TA_DTYPE_F16),
                    q(qv, rows, kQHeads, kDim, TA_DTYPE_F16), out(rows, kQHeads, kDim, TA_DTYPE_F16);
                append(plan, layer, k, v);
                attend(plan, layer, q, out);
                x = out.values();
            }
            all.insert(all.end(), x.begin(), x.end());
        }
        end(plan);
        return all;
    }
    ta_seq grown(const std::vector<Rank>& ranks, uint32_t rank, int32_t tokens, uint64_t seed) const {
        const ta_seq seq = make_sequence(ranks[rank].pool);
        if (tokens > 0) step(ranks, rank, seq, tokens, seed);
        return seq;
    }

    // Sends the sequence of rank 0 to rank 1. Returns the destination's report.
    static ta_transfer_info transfer(const std::vector<Rank>& ranks, ta_seq seq, ta_send_mode mode) {
        const ta_ticket sent = send(ranks[0], seq, 1, 1, mode), got = receive(ranks[1], 0, 1);
        const ta_transfer_info there = wait(ranks[1], got), here = wait(ranks[0], sent);
        EXPECT_EQ(there.state, TA_MOVE_DONE) << there.reason;
        EXPECT_EQ(here.state, TA_MOVE_DONE) << here.reason;
        EXPECT_EQ(here.bytes_moved, there.bytes_moved);
        return there;
    }
    static void expect_equal(const std::vector<Rank>& ranks, ta_seq source, ta_seq arrived) {
        const int64_t n = length(ranks[0].pool, source);
        ASSERT_EQ(length(ranks[1].pool, arrived), n);
        verify(ranks[1].pool, arrived);
        for (uint32_t layer = 0; layer < kLayers && n > 0; ++layer)
            EXPECT_TRUE(dequantize(ranks[0].pool, source, layer, 0, n, kRow) ==
                        dequantize(ranks[1].pool, arrived, layer, 0, n, kRow))
                << "layer " << layer;
    }
    // Steps of both: the same bits between GPUs, else within what rounding does.
    void expect_same_steps(const std::vector<Rank>& ranks, ta_seq source, ta_seq arrived) const {
        for (const int32_t n : {1, 70, 2}) {
            const std::vector<float> here = step(ranks, 0, source, n, uint64_t(n)),
                                     there = step(ranks, 1, arrived, n, uint64_t(n));
            ASSERT_EQ(here.size(), there.size());
            if (on_gpu(0) && on_gpu(1)) {
                EXPECT_EQ(std::memcmp(here.data(), there.data(), here.size() * sizeof(float)), 0) << n << " tokens";
                continue;
            }
            double wrong = 0, all = 0;
            for (size_t i = 0; i < here.size(); ++i) {
                wrong += double(here[i] - there[i]) * double(here[i] - there[i]);
                all += double(here[i]) * double(here[i]);
            }
            EXPECT_LT(std::sqrt(wrong / all), 1.5e-3) << n << " tokens";
        }
    }

  private:
    int gpus_ = 0;
};

constexpr ta_send_mode kModes[] = {TA_SEND_COPY, TA_SEND_MOVE};

ta_kv_pool_options pool_shape(uint32_t bits) {
    auto options = pool_options(kLayers, kHeads, kDim, bits);
    options.budget_bytes = uint64_t{64} << 20;
    return options;
}

TEST_P(GpuGroup, WhatArrivesIsWhatLeft) {
    for (const uint32_t bits : {4u, 8u, 2u}) {
        // A window holds two or three of the blocks.
        const std::vector<Rank> ranks = make(pool_shape(bits), [](ta_group_options& o) { o.staging_bytes = 160000; });
        for (const ta_send_mode mode : kModes) {
            for (const int32_t n : {0, 1, 63, 64, 65, 127, 128, 129, 1000}) {
                SCOPED_TRACE(std::to_string(bits) + " bits, " + std::to_string(n) + " tokens, mode " + std::to_string(mode));
                const ta_seq source = grown(ranks, 0, n, uint64_t(n + 1)),
                             twin = mode == TA_SEND_MOVE ? grown(ranks, 0, n, uint64_t(n + 1)) : source;
                const ta_transfer_info got = transfer(ranks, source, mode);
                EXPECT_EQ(got.length, n);
                EXPECT_EQ(got.blocks_moved, uint64_t((n + 63) / 64));
                expect_equal(ranks, twin, got.seq);
                expect_same_steps(ranks, twin, got.seq);
                expect_equal(ranks, twin, got.seq);
            }
        }
    }
}

TEST_P(GpuGroup, BlocksComeFromAllTiers) {
    auto shape = pool_shape(4);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{16} << 20;
    shape.tiers = &tiers;
    const std::vector<Rank> ranks = make(shape, [](ta_group_options& o) { o.staging_bytes = 250000; });
    for (const ta_send_mode mode : kModes) {
        SCOPED_TRACE(mode);
        const ta_seq source = grown(ranks, 0, 1230, 1), twin = grown(ranks, 0, 1230, 1);
        EXPECT_EQ(move_now(ranks[0].pool, source, 2, 3, TA_TIER_HOST).moved, 3u);
        EXPECT_EQ(move_now(ranks[0].pool, source, 6, 2, TA_TIER_DISK).moved, 2u);
        EXPECT_EQ(move_now(ranks[0].pool, source, 14, 5, TA_TIER_HOST).moved, 5u);
        const ta_transfer_info got = transfer(ranks, source, mode);
        expect_equal(ranks, twin, got.seq);
        expect_same_steps(ranks, twin, got.seq);
    }
}

TEST_P(GpuGroup, FallenBlocksArriveAsTheyAre) {
    auto shape = pool_shape(8);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{16} << 20;
    tiers.falling_precision = TA_ON;
    shape.tiers = &tiers;
    const std::vector<Rank> ranks = make(shape, [](ta_group_options& o) { o.staging_bytes = 250000; });
    const ta_seq source = grown(ranks, 0, 1230, 1);
    EXPECT_EQ(move_now(ranks[0].pool, source, 2, 4, TA_TIER_HOST).moved, 4u);
    EXPECT_EQ(move_now(ranks[0].pool, source, 8, 4, TA_TIER_DISK).moved, 4u);
    // Some of them are back, with fewer bits.
    EXPECT_EQ(move_now(ranks[0].pool, source, 4, 6, TA_TIER_DEVICE).moved, 4u);
    EXPECT_GT(tier_stats(ranks[0].pool, TA_TIER_DEVICE).low_blocks, 0u);
    const ta_transfer_info got = transfer(ranks, source, TA_SEND_COPY);
    expect_equal(ranks, source, got.seq);
    const ta_tier_stats there = tier_stats(ranks[1].pool, TA_TIER_DEVICE);
    EXPECT_EQ(there.low_blocks, 4u);
    expect_same_steps(ranks, source, got.seq);
    expect_equal(ranks, source, got.seq);
}

INSTANTIATE_TEST_SUITE_P(Ends, GpuGroup,
                         ::testing::Values(Ends{"CpuToGpu", kCpu, 0}, Ends{"GpuToCpu", 0, kCpu}, Ends{"GpuToGpu", 0, 1}),
                         [](const auto& i) { return i.param.name; });

}  // namespace
}  // namespace ta::testing
