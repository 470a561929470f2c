// The GPU where a peer tier lies is lost: so are the blocks there, and no others, as far as CUDA goes on. A program of its own, since
// nothing works on that GPU afterwards. Skipped where there are no two GPUs that reach each other.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr int64_t kHeads = 2, kDim = 128, kTokens = 64 * 10 + 5;

Context context_on(int ordinal) {
    auto options = sized<ta_context_options>();
    options.device = TA_DEVICE_CUDA;
    options.device_ordinal = ordinal;
    return make_context(options);
}

// The kernel reads where no memory is.
void lose(const Context& context, int ordinal) {
    ASSERT_EQ(cudaSetDevice(ordinal), cudaSuccess);
    auto options = pool_options(1, kHeads, kDim, 4);
    options.budget_bytes = uint64_t{64} << 20;
    const KvPool pool = make_pool(context, options);
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    const std::vector<float> kv = Random(1).normals(kTokens * kHeads * kDim);
    const DeviceTensor k(kTokens, kHeads, kDim, &kv), out(2, kHeads, kDim);
    begin(plan, {seq}, {int32_t(kTokens)}, {2});
    ta_error err;
    require(ta_append(plan.get(), 0, k.view(), k.view(), &err), err);
    ta_tensor q = *k.view();
    q.tokens = 2;
    q.stride_token = (out.view()->data > q.data ? -1 : 1) * (int64_t{1} << 40);
    q.stride_head = q.head_dim;
    require(ta_attend(plan.get(), 0, &q, out.view(), nullptr, nullptr, &err), err);
    EXPECT_NE(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(ta_plan_abort(plan.get(), &err), TA_OK) << err.message;
    ta_seq unused = seq;
    EXPECT_NE(ta_plan_begin(plan.get(), 1, &unused, nullptr, nullptr, nullptr, &err), TA_OK);
    EXPECT_EQ(ta_context_health(context.get(), &err), TA_E_DEVICE_LOST);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
}

TEST(GpuPeerLost, ItsBlocksAreAndNoOthers) {
    int n = 0, reaches = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n < 2 || cudaDeviceCanAccessPeer(&reaches, 0, 1) != cudaSuccess || !reaches)
        GTEST_SKIP() << "there are no two GPUs that reach each other";
    const Context own = context_on(0), peer = context_on(1);
    auto tiers = sized<ta_tier_options>();
    tiers.peer = peer.get();
    tiers.peer_bytes = tiers.host_bytes = uint64_t{64} << 20;
    auto options = pool_options(1, kHeads, kDim, 4);
    options.budget_bytes = uint64_t{64} << 20;
    options.tiers = &tiers;
    const KvPool pool = make_pool(own, options);
    const Plan plan = make_plan(pool);
    const ta_seq there = make_sequence(pool), here = make_sequence(pool);
    const std::vector<float> kv = Random(1).normals(kTokens * kHeads * kDim);
    const DeviceTensor k(kTokens, kHeads, kDim, &kv), out(1, kHeads, kDim);
    ta_error err;
    for (const ta_seq s : {there, here}) {
        begin(plan, {s}, {int32_t(kTokens)}, {0});
        require(ta_append(plan.get(), 0, k.view(), k.view(), &err), err);
        end(plan);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(move_now(pool, there, 2, 4, TA_TIER_PEER).moved, 4u);
    ASSERT_EQ(move_now(pool, here, 2, 4, TA_TIER_HOST).moved, 4u);

    lose(peer, 1);
    EXPECT_EQ(tier_stats(pool, TA_TIER_PEER).state, TA_TIER_FAILED);
    const int32_t one = 1;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &there, &one, nullptr, nullptr, &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(err.tier, TA_TIER_PEER);
    EXPECT_EQ(err.block, 2);
    // CUDA may have ended the pool's own GPU for this process, too; then all calls say so, and end.
    const std::vector<float> ones(kHeads * kDim, 1.0f);
    std::unique_ptr<DeviceTensor> q;
    if (cudaDeviceSynchronize() == cudaSuccess) q = std::make_unique<DeviceTensor>(1, kHeads, kDim, &ones);
    const int32_t none = 0;
    ta_status status = ta_plan_begin(plan.get(), 1, &here, &none, &one, nullptr, &err);
    if (status == TA_OK && q) {
        require(ta_attend(plan.get(), 0, q->view(), out.view(), nullptr, nullptr, &err), err);
        end(plan);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_EQ(ta_context_health(own.get(), &err), TA_OK) << err.message;
        verify(pool, here);
        return;
    }
    EXPECT_EQ(q, nullptr);
    if (status == TA_OK) status = ta_plan_abort(plan.get(), &err);
    EXPECT_TRUE(status == TA_OK || status == TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &here, &one, nullptr, nullptr, &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(err.tier, -1);
    auto info = sized<ta_x_block_info>();  // of the host tier
    EXPECT_EQ(ta_x_seq_block(pool.get(), here, 3, &info, nullptr, 0, &err), TA_OK) << err.message;
    std::vector<uint8_t> bytes(info.bytes);
    EXPECT_EQ(ta_x_seq_block(pool.get(), here, 3, &info, bytes.data(), bytes.size(), &err), TA_OK) << err.message;
}

}  // namespace
}  // namespace ta::testing
