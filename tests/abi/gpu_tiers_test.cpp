// Tiers of a GPU context: a pool whose blocks are spread over GPU memory, that of another GPU, pinned host memory and disk,
// beside one with all in GPU memory. The same outputs to the bit. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 3, kHeads = 2, kDim = 128, kQHeads = 8;

class GpuTiers : public GpuTest {
  protected:
    void make_pools(uint64_t device_blocks, uint64_t host_bytes, uint64_t disk_bytes, uint32_t bits = 4,
                    ta_x_move_route route = TA_X_MOVE_ROUTE_AUTO, uint64_t peer_bytes = 0) {
        auto options = pool_options(kLayers, kHeads, kDim, bits);
        options.budget_bytes = uint64_t{256} << 20;
        plain_pool = make_pool(gpu, options);
        const ta_kv_pool_stats s = stats(plain_pool);
        options.budget_bytes =
            10 * s.token_block_bytes + device_blocks * (bits == 8 ? s.token_block_bytes : s.channel_block_bytes);
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_bytes;
        tiers.disk_bytes = disk_bytes;
        tiers.peer_bytes = peer_bytes;
        if (peer_bytes > 0) tiers.peer = peer.get();
        auto tuning = sized<ta_x_tier_tuning>();
        tuning.route = route;
        tiers.tuning = &tuning;
        options.tiers = &tiers;
        pool = make_pool(gpu, options);
        plan = make_plan(pool);
        plain_plan = make_plan(plain_pool);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        require(ta_plan_set_stream(plain_plan.get(), stream, &err), err);
    }
    size_t add() {
        seqs.push_back(make_sequence(pool));
        plain_seqs.push_back(make_sequence(plain_pool));
        return seqs.size() - 1;
    }
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new) {
        std::vector<ta_seq> a, b;
        int64_t n = 0;
        for (size_t i = 0; i < members.size(); ++i) {
            a.push_back(seqs[members[i]]);
            b.push_back(plain_seqs[members[i]]);
            n += n_new[i];
        }
        begin(plan, a, n_new);
        begin(plain_plan, b, n_new);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> kv = random.normals(n * kHeads * kDim), qv = random.normals(n * kQHeads * kDim);
            const DeviceTensor k(n, kHeads, kDim, &kv), q(n, kQHeads, kDim, &qv), out(n, kQHeads, kDim),
                plain_out(n, kQHeads, kDim);
            ta_error err;
            require(ta_append(plan.get(), layer, k.view(), k.view(), &err), err);
            require(ta_append(plain_plan.get(), layer, k.view(), k.view(), &err), err);
            require(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
            require(ta_attend(plain_plan.get(), layer, q.view(), plain_out.view(), nullptr, nullptr, &err), err);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            const std::vector<float> x = out.get(), y = plain_out.get();
            ASSERT_EQ(std::memcmp(x.data(), y.data(), x.size() * 4), 0) << "layer " << layer;
        }
        end(plan);
        end(plain_plan);
    }
    void verify() {
        for (size_t s = 0; s < seqs.size(); ++s) {
            ta::testing::verify(pool, seqs[s]);
            const int64_t n = length(plain_pool, plain_seqs[s]), row = kHeads * kDim;
            ASSERT_TRUE(dequantize(pool, seqs[s], 1, 0, n, row) == dequantize(plain_pool, plain_seqs[s], 1, 0, n, row));
        }
    }

    // False: there is no second GPU that the first one reaches.
    bool find_peer() {
        int n = 0, reaches = 0;
        if (cudaGetDeviceCount(&n) != cudaSuccess || n < 2) return false;
        if (cudaDeviceCanAccessPeer(&reaches, 0, 1) != cudaSuccess || !reaches) return false;
        auto options = sized<ta_context_options>();
        options.device = TA_DEVICE_CUDA;
        options.device_ordinal = 1;
        peer = make_context(options);
        return true;
    }

    Context peer;
    KvPool pool, plain_pool;
    Plan plan, plain_plan;
    std::vector<ta_seq> seqs, plain_seqs;
    Random random{3};
};

TEST_F(GpuTiers, SequencesGrowPastTheDeviceBudget) {
    for (uint32_t bits : {4u, 2u, 8u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        seqs.clear();
        plain_seqs.clear();
        plan.reset();
        plain_plan.reset();
        make_pools(20, uint64_t{64} << 20, 0, bits);
        const size_t a = add(), b = add();
        step({a, b}, {300, 1000});
        for (int i = 0; i < 12; ++i) step({a, b}, {i % 3 == 0 ? 1 : 130, 1});
        for (int i = 0; i < 8; ++i) step({b}, {400});
        for (int i = 0; i < 3; ++i) step({a, b}, {1, 1});
        EXPECT_GT(residency(pool, seqs[b]).host_blocks, 5u);
        verify();
    }
}

TEST_F(GpuTiers, SequencesGrowThroughAPeerGpu) {
    if (!find_peer()) GTEST_SKIP() << "no second GPU that the first one reaches";
    for (const uint32_t bits : {4u, 2u, 8u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        seqs.clear(), plain_seqs.clear();
        plan.reset(), plain_plan.reset();
        make_pools(20, uint64_t{64} << 20, 0, bits, TA_X_MOVE_ROUTE_AUTO, uint64_t{1} << 20);
        const size_t a = add(), b = add();
        step({a, b}, {300, 1000});
        for (int i = 0; i < 12; ++i) step({a, b}, {i % 3 == 0 ? 1 : 130, 1});
        for (int i = 0; i < 8; ++i) step({b}, {400});
        for (int i = 0; i < 3; ++i) step({a, b}, {1, 1});
        EXPECT_GT(residency(pool, seqs[b]).peer_blocks, 5u);
        const void* first = nullptr;
        auto of_device = sized<ta_memory_range>(), of_peer = of_device;
        EXPECT_EQ(ta_seq_locate_blocks(pool.get(), seqs[b], 0, 1, &first, nullptr), TA_OK);
        EXPECT_EQ(ta_kv_pool_get_memory(pool.get(), TA_TIER_DEVICE, &of_device, nullptr), TA_OK);
        EXPECT_EQ(ta_kv_pool_get_memory(pool.get(), TA_TIER_PEER, &of_peer, nullptr), TA_OK);
        EXPECT_EQ(of_device.device_ordinal, 0);
        EXPECT_EQ(of_peer.device_ordinal, 1);
        const auto* const device_data = static_cast<const uint8_t*>(of_device.data);
        EXPECT_TRUE(first >= device_data && first < device_data + of_device.bytes) << "a sink block";
        EXPECT_GT(tier_stats(pool, TA_TIER_PEER).evicted_blocks, 0u);
        EXPECT_GT(move_stats(pool).staged_pages, 0u);
        verify();
    }
}

TEST_F(GpuTiers, BlocksMoveToAPeerGpuAndBack) {
    if (!find_peer()) GTEST_SKIP() << "no second GPU that the first one reaches";
    constexpr ta_tier kAll[] = {TA_TIER_DEVICE, TA_TIER_PEER, TA_TIER_HOST, TA_TIER_DISK};
    for (const ta_x_move_route route : {TA_X_MOVE_ROUTE_AUTO, TA_X_MOVE_ROUTE_COPY_ENGINE, TA_X_MOVE_ROUTE_KERNEL}) {
        SCOPED_TRACE("route " + std::to_string(route));
        seqs.clear(), plain_seqs.clear();
        plan.reset(), plain_plan.reset();
        make_pools(100, uint64_t{64} << 20, uint64_t{64} << 20, 4, route, uint64_t{64} << 20);
        const size_t a = add();
        step({a}, {80 * 64 + 5});
        for (const ta_tier from : kAll) {
            for (const ta_tier to : kAll) {
                (void)move_now(pool, seqs[a], 0, 80, from);
                const ta_move_info info = move_now(pool, seqs[a], 0, 80, to);
                EXPECT_EQ(info.moved, from == to ? 0u : 80u) << ta_status_name(info.status);
                EXPECT_EQ(residency(pool, seqs[a]).peer_blocks, to == TA_TIER_PEER ? 80u : 0u);
                step({a}, {1});
            }
        }
        // While steps run.
        for (int i = 0; i < 20; ++i) {
            const ta_ticket ticket = ta::testing::move(pool, seqs[a], uint64_t(1 + i), 50, kAll[i % 4]);
            step({a}, {i % 5 == 0 ? 70 : 1});
            (void)wait(pool, ticket);
        }
        verify();
    }
}

TEST_F(GpuTiers, MovesOverAllTiersWhileDecoding) {
    make_pools(200, uint64_t{64} << 20, uint64_t{64} << 20);
    const size_t a = add();
    step({a}, {30 * 64 + 5});
    for (ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK, TA_TIER_DEVICE, TA_TIER_DISK, TA_TIER_HOST, TA_TIER_DEVICE}) {
        SCOPED_TRACE("to tier " + std::to_string(tier));
        const ta_move_info info = move_now(pool, seqs[a], 3, 20, tier);
        EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
        EXPECT_EQ(info.moved + info.present, 20u);
        const ta_residency r = residency(pool, seqs[a]);
        EXPECT_EQ(tier == TA_TIER_HOST ? 20u : 0u, r.host_blocks);
        EXPECT_EQ(tier == TA_TIER_DISK ? 20u : 0u, r.disk_blocks);
        verify();
        step({a}, {1});
    }
    EXPECT_EQ(move_now(pool, seqs[a], 0, 30, TA_TIER_HOST).state, TA_MOVE_DONE);
    step({a}, {1});
    verify();
}

// Suspended sequences go on as if they had stayed; a promise holds however full the GPU's memory gets.
TEST_F(GpuTiers, SuspendedSequencesAndReservations) {
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DISK}) {
        seqs.clear();
        plain_seqs.clear();
        plan.reset();
        plain_plan.reset();
        make_pools(24, uint64_t{64} << 20, uint64_t{64} << 20);
        const size_t a = add();
        ta_error err;
        step({a}, {100});
        for (const int32_t more : {1, 27, 64, 70}) {
            ta_ticket ticket = 0;
            require(ta_seq_suspend(pool.get(), seqs[a], tier, &ticket, &err), err);
            EXPECT_EQ(wait(pool, ticket).state, TA_MOVE_DONE);
            EXPECT_EQ(residency(pool, seqs[a]).device_blocks, 0u);
            verify();
            step({a}, {more});
            if (HasFatalFailure()) return;
        }
        const size_t b = add();
        require(ta_seq_reserve(pool.get(), seqs[b], 500, 0, &err), err);
        std::vector<size_t> others;
        for (int i = 0; i < 12; ++i) step({others.emplace_back(add())}, {int32_t(random.between(1, 130))});
        auto at_once = sized<ta_step_options>();
        at_once.wait_ms = -1;
        for (int32_t left = 500, n = 0; left > 0; left -= n) {
            n = int32_t(random.between(1, std::min(left, 90)));
            require(ta_plan_begin(plan.get(), 1, &seqs[b], &n, nullptr, &at_once, &err), err);
            require(ta_plan_abort(plan.get(), &err), err);
            step({b}, {n});
            if (HasFatalFailure()) return;
        }
        EXPECT_EQ(stats(pool).bytes_promised, 0u);
        wait_for_moves(pool);
        verify();
    }
}

// Blocks go between the GPU's memory and the disk by the disk tier's own buffers.
TEST_F(GpuTiers, ADiskWithoutAHostTier) {
    for (uint32_t bits : {4u, 8u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        seqs.clear();
        plain_seqs.clear();
        plan.reset();
        plain_plan.reset();
        make_pools(24, 0, uint64_t{64} << 20, bits);
        std::vector<size_t> s;
        for (int i = 0; i < 5; ++i) s.push_back(add());
        for (int round = 0; round < 3; ++round) {
            for (const size_t i : s) step({i}, {330});
        }
        verify();
        EXPECT_GT(tier_stats(pool, TA_TIER_DEVICE).evicted_blocks, 20u);
        for (const ta_tier tier : {TA_TIER_DISK, TA_TIER_DEVICE}) {
            const ta_move_info info = move_now(pool, seqs[s[0]], 0, 8, tier);
            EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
            EXPECT_EQ(residency(pool, seqs[s[0]]).host_blocks, 0u);
            step({s[0]}, {1});
        }
        verify();
    }
}

// The step's blocks on disk are more than the host tier holds, which others fill.
TEST_F(GpuTiers, AHostTierSmallerThanAStep) {
    make_pools(40, 300 << 10, uint64_t{64} << 20);
    const size_t a = add(), b = add();
    for (int round = 0; round < 4; ++round) {
        step({a}, {600});
        step({b}, {500});
    }
    EXPECT_GT(tier_stats(pool, TA_TIER_DISK).bytes_used, 0u);
    for (int i = 0; i < 4; ++i) step({i % 2 ? a : b}, {1});
    verify();
}

// Another stream is captured in the mode that forbids most calls in all threads; nothing that the library does ends the
// capture.
TEST_F(GpuTiers, MovesBesideACaptureInGlobalMode) {
    make_pools(200, uint64_t{64} << 20, uint64_t{64} << 20);
    const size_t a = add();
    step({a}, {100 * 64 + 5});
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 256), cudaSuccess);
    const std::unique_ptr<void, FreeDevice> owner(memory);
    for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DEVICE, TA_TIER_DISK, TA_TIER_HOST, TA_TIER_DEVICE}) {
        SCOPED_TRACE("to tier " + std::to_string(tier));
        ASSERT_EQ(cudaStreamBeginCapture(other, cudaStreamCaptureModeGlobal), cudaSuccess);
        const ta_move_info info = move_now(pool, seqs[a], 1, 90, tier);
        EXPECT_EQ(info.moved + info.present, 90u) << ta_status_name(info.status);
        const size_t b = add();
        begin(plan, {seqs[b]}, {0});
        ta_error err;
        require(ta_plan_abort(plan.get(), &err), err);
        ta::testing::verify(pool, seqs[a]);
        EXPECT_EQ(cudaMemsetAsync(memory, 0, 256, other), cudaSuccess);
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(other, &graph), cudaSuccess);
        size_t nodes = 0;
        EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
        EXPECT_EQ(nodes, 1u);
        cudaGraphDestroy(graph);
        step({a}, {1});
    }
    cudaStreamDestroy(other);
    verify();
}

// A load makes room while kernels read what it might take: those of a step that has ended, which nobody has waited for, or that
// another thread has open.
TEST_F(GpuTiers, LoadsBesideStepsInFlight) {
    constexpr int32_t kLoaded = 12 * 64 + 5, kCalls = 20;
    make_pools(20, uint64_t{64} << 20, uint64_t{64} << 20);
    const std::filesystem::path path = std::filesystem::temp_directory_path() / ("ta-gpu-tiers-" + std::to_string(getpid()));
    const size_t a = add(), b = add(), idle = add();
    step({b}, {kLoaded});
    ta_error err;
    require(ta_seq_save(pool.get(), seqs[b], path.c_str(), nullptr, &err), err);
    step({a, idle}, {500, 500});
    uint64_t evicted = 0;
    for (int round = 0; round < 6; ++round) {
        SCOPED_TRACE("round " + std::to_string(round));
        begin(plain_plan, {plain_seqs[a]}, {1});
        const std::vector<float> kv = random.normals(kHeads * kDim), qv = random.normals(kQHeads * kDim);
        const DeviceTensor k(1, kHeads, kDim, &kv), q(1, kQHeads, kDim, &qv), plain_out(1, kQHeads, kDim);
        std::vector<DeviceTensor> outs;
        for (int n = 0; n < kCalls * int(kLayers); ++n) outs.emplace_back(1, kQHeads, kDim);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        const auto enqueue_step = [&] {
            begin(plan, {seqs[a]}, {1});
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                require(ta_append(plan.get(), layer, k.view(), k.view(), &err), err);
                for (int n = 0; n < kCalls; ++n) {
                    const DeviceTensor& out = outs[layer * kCalls + size_t(n)];
                    require(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
                }
            }
            end(plan);
        };
        ta_seq loaded = 0;
        ta_error load_err;
        ta_status status = TA_OK;
        const auto load = [&] { status = ta_seq_load(pool.get(), path.c_str(), nullptr, &loaded, &load_err); };
        const uint64_t before = tier_stats(pool, TA_TIER_DEVICE).evicted_blocks;
        if (round % 2) {
            std::thread loader(load);
            enqueue_step();
            loader.join();
        } else {
            enqueue_step();
            load();
        }
        ASSERT_EQ(status, TA_OK) << load_err.message;
        evicted += tier_stats(pool, TA_TIER_DEVICE).evicted_blocks - before;
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(plain_plan.get(), layer, k.view(), k.view(), &err), err);
            require(ta_attend(plain_plan.get(), layer, q.view(), plain_out.view(), nullptr, nullptr, &err), err);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            const std::vector<float> expected = plain_out.get();
            for (int n = 0; n < kCalls; ++n) {
                const std::vector<float> x = outs[layer * kCalls + size_t(n)].get();
                ASSERT_EQ(std::memcmp(x.data(), expected.data(), x.size() * 4), 0) << "layer " << layer << " call " << n;
            }
        }
        end(plain_plan);
        ta::testing::verify(pool, loaded);
        constexpr int64_t kRow = kHeads * kDim;
        EXPECT_TRUE(dequantize(pool, loaded, 1, 0, kLoaded, kRow) ==
                    dequantize(plain_pool, plain_seqs[b], 1, 0, kLoaded, kRow));
        require(ta_seq_release(pool.get(), loaded, &err), err);
        step({idle}, {1});  // brings its blocks back, so that the next load has to make room again
    }
    std::filesystem::remove(path);
    EXPECT_GT(evicted, 0u);
    verify();
}

TEST_F(GpuTiers, CopyEngineAndKernel) {
    for (const ta_x_move_route route : {TA_X_MOVE_ROUTE_AUTO, TA_X_MOVE_ROUTE_COPY_ENGINE, TA_X_MOVE_ROUTE_KERNEL}) {
        SCOPED_TRACE("route " + std::to_string(route));
        seqs.clear();
        plain_seqs.clear();
        plan.reset();
        plain_plan.reset();
        make_pools(200, uint64_t{64} << 20, 0, 4, route);
        const size_t a = add();
        constexpr uint64_t kMoved = 130;  // more than a part
        step({a}, {int32_t(kMoved + 1) * 64 + 5});
        for (const ta_tier tier : {TA_TIER_HOST, TA_TIER_DEVICE, TA_TIER_HOST}) {
            const ta_move_info info = move_now(pool, seqs[a], 1, kMoved, tier);
            EXPECT_EQ(info.moved, kMoved) << ta_status_name(info.status);
            step({a}, {1});
        }
        verify();
        const ta_move_stats s = move_stats(pool);
        const uint64_t bytes = 3 * kMoved * stats(pool).channel_block_bytes;
        EXPECT_EQ(s.bytes_by_copy_engine + s.bytes_by_kernel, bytes);
        if (route == TA_X_MOVE_ROUTE_AUTO) {
            EXPECT_GT(s.copy_engine_from_down, 0u);
            EXPECT_GT(s.copy_engine_from_up, 0u);
        } else {
            EXPECT_EQ(s.bytes_by_kernel, route == TA_X_MOVE_ROUTE_KERNEL ? bytes : 0u);
        }
    }
}

}  // namespace
}  // namespace ta::testing
