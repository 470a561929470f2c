// Contexts on one of several GPUs. A program of its own: a process in which others ran has a context on the first GPU. Skipped
// where there are no two GPUs.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2;

// A context on the second GPU makes none on the first, where the thread's device is.
TEST(GpuDevices, AContextIsWhereItIsAskedFor) {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 2) GTEST_SKIP() << "there are no two GPUs";
    decltype(&cuDevicePrimaryCtxGetState) state = nullptr;
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 12000, cudaEnableDefault, &result),
              cudaSuccess);
    state = reinterpret_cast<decltype(state)>(found);
    unsigned flags = 0;
    int active = 0;
    ASSERT_EQ(state(0, &flags, &active), CUDA_SUCCESS);
    if (active) GTEST_SKIP() << "the process has a context on the first GPU already";
    auto options = sized<ta_context_options>();
    options.device = TA_DEVICE_CUDA;
    options.device_ordinal = 1;
    const Context gpu = make_context(options);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{64} << 20;
    auto po = pool_options(kLayers, 2, 128, 4);
    po.budget_bytes = uint64_t{64} << 20;
    po.tiers = &tiers;
    const KvPool pool = make_pool(gpu, po);
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    begin(plan, {seq}, {0});
    ta_error err;
    require(ta_plan_abort(plan.get(), &err), err);
    int current = -1;
    EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
    EXPECT_EQ(current, 0);
    ASSERT_EQ(state(0, &flags, &active), CUDA_SUCCESS);
    EXPECT_FALSE(active);
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    const DeviceTensor k(64 * 5, 2, 128), q(1, 8, 128), out(1, 8, 128);
    ASSERT_EQ(cudaMemset(k.view()->data, 0, size_t{64} * 5 * 2 * 128 * 2), cudaSuccess);
    ASSERT_EQ(cudaMemset(q.view()->data, 0, size_t{8} * 128 * 2), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    begin(plan, {seq}, {64 * 5}, {1});
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        require(ta_append(plan.get(), layer, k.view(), k.view(), &err), err);
        require(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
    }
    end(plan);
    auto info = sized<ta_move_info>();
    ta_ticket ticket = 0;
    require(ta_seq_move(pool.get(), seq, 1, 4, TA_TIER_HOST, &ticket, &err), err);
    require(ta_move_wait(pool.get(), ticket, -1, &info, &err), err);
    EXPECT_EQ(info.moved, 4u);
    require(ta_seq_verify(pool.get(), seq, &err), err);
}

}  // namespace
}  // namespace ta::testing
