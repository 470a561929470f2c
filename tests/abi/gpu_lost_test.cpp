// A GPU that an error has ended: every later call that needs it says so, what lies in host memory can still be read, and
// everything can be destroyed. A program of its own, since nothing works on the GPU afterwards. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

TEST(GpuLost, TheErrorIsRememberedAndNothingElseBreaks) {
    constexpr int64_t kHeads = 2, kDim = 128, kTokens = 64 * 10 + 5;
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
        GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
    auto context_options = sized<ta_context_options>();
    context_options.device = TA_DEVICE_CUDA;
    Context gpu = make_context(context_options);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{64} << 20;
    auto options = pool_options(1, kHeads, kDim, 4);
    options.budget_bytes = uint64_t{64} << 20;
    options.tiers = &tiers;
    KvPool pool = make_pool(gpu, options);
    Plan plan = make_plan(pool), other = make_plan(pool);
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ta_error err;
    require(ta_plan_set_stream(plan.get(), stream, &err), err);
    const ta_seq seq = make_sequence(pool), second = make_sequence(pool);
    const std::vector<float> kv = Random(1).normals(kTokens * kHeads * kDim);
    const DeviceTensor k(kTokens, kHeads, kDim, &kv), out(2, kHeads, kDim);
    for (const ta_seq s : {seq, second}) {
        begin(plan, {s}, {int32_t(kTokens)}, {0});
        require(ta_append(plan.get(), 0, k.view(), k.view(), &err), err);
        end(plan);
    }
    ASSERT_EQ(move_now(pool, seq, 2, 4, TA_TIER_HOST).moved, 4u);
    EXPECT_EQ(ta_context_health(gpu.get(), &err), TA_OK) << err.message;

    // The second query is read where no memory is, away from the output.
    ta_tensor q = *k.view();
    q.tokens = 2;
    q.stride_token = (out.view()->data > q.data ? -1 : 1) * (int64_t{1} << 40);
    q.stride_head = q.head_dim;
    begin(plan, {seq}, {0}, {2});
    require(ta_attend(plan.get(), 0, &q, out.view(), nullptr, nullptr, &err), err);
    EXPECT_NE(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(ta_attend(plan.get(), 0, k.view(), out.view(), nullptr, nullptr, &err), TA_E_SHAPE);  // not looked at by the GPU
    q.stride_token = q.stride_head = 0;
    EXPECT_EQ(ta_attend(plan.get(), 0, &q, out.view(), nullptr, nullptr, &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(ta_context_health(gpu.get(), &err), TA_E_DEVICE_LOST);
    EXPECT_NE(err.message[0], '\0');
    EXPECT_EQ(ta_plan_abort(plan.get(), &err), TA_OK) << err.message;
    const int32_t one = 1;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &one, nullptr, nullptr, &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(ta_plan_begin(other.get(), 1, &second, &one, nullptr, nullptr, &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(ta_seq_verify(pool.get(), second, &err), TA_E_DEVICE_LOST) << err.message;
    auto dense = sized<ta_dense_options>();
    EXPECT_EQ(ta_attend_dense(gpu.get(), &q, k.view(), k.view(), out.view(), nullptr, &dense, &err), TA_E_DEVICE_LOST)
        << err.message;
    const ta_tensor none = ta_tensor_make(nullptr, TA_DTYPE_F32, 0, 1, 64);
    const float* lses[] = {nullptr};
    EXPECT_EQ(ta_merge_states(gpu.get(), 1, &none, lses, &none, nullptr, stream, &err), TA_E_DEVICE_LOST) << err.message;
    ta_kv_pool* unused = nullptr;
    EXPECT_EQ(ta_kv_pool_create(gpu.get(), &options, &unused, &err), TA_E_DEVICE_LOST) << err.message;

    // A block of the host tier, and one of the GPU's.
    auto info = sized<ta_x_block_info>();
    require(ta_x_seq_block(pool.get(), seq, 3, &info, nullptr, 0, &err), err);
    std::vector<uint8_t> bytes(info.bytes);
    EXPECT_EQ(ta_x_seq_block(pool.get(), seq, 3, &info, bytes.data(), bytes.size(), &err), TA_OK) << err.message;
    EXPECT_EQ(ta_x_seq_block(pool.get(), seq, 8, &info, bytes.data(), bytes.size(), &err), TA_E_DEVICE_LOST) << err.message;
    EXPECT_EQ(length(pool, seq), kTokens);
    require(ta_seq_release(pool.get(), second, &err), err);
    EXPECT_EQ(ta_kv_pool_close(pool.get(), &err), TA_OK) << err.message;
    plan.reset(), other.reset();
    pool.reset();
    gpu.reset();
}

}  // namespace
}  // namespace ta::testing
