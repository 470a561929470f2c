// A block store that a CPU's pool and a GPU's have in common: what one has put the other finds, to the bit. Skipped where there is no
// GPU.
#include "abi/prefix_steps.h"
#include "support/gpu.h"
#include "support/memory_store.h"

namespace ta::testing {
namespace {

class GpuStore : public PrefixSteps {
  protected:
    void SetUp() override {
        int n = 0;
        if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
        auto o = sized<ta_context_options>();
        o.device = TA_DEVICE_CUDA;
        gpu = make_context(o);
    }
    // A block more, of tokens that only the GPU has.
    static void grow_on_gpu(const KvPool& pool, ta_seq seq) {
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {64});
        Random random(3);
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> values = random.normals(64 * kRow);
            const DeviceTensor k(64, kHeads, kDim, &values);
            require(ta_append(plan.get(), layer, k.view(), k.view(), &err), err);
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        }
        end(plan);
    }
    Context gpu;
};

TEST_F(GpuStore, CpusAndGpusShareAPrefixToTheBit) {
    constexpr uint64_t kText = 7;
    constexpr size_t kBlocks = 5;
    for (const uint32_t bits : {8u, 4u, 2u}) {
        SCOPED_TRACE(std::to_string(bits) + " bits");
        MemoryStore store;
        const KvPool first = make_pool(context, options(bits)), second = make_pool(gpu, options(bits)),
                     third = make_pool(context, options(bits));
        const ta_namespace a = make_namespace(first, 1), b = make_namespace(second, 1), c = make_namespace(third, 1);
        attach_store(first, a, store.attach());
        attach_store(second, b, store.attach());
        attach_store(third, c, store.attach());
        const ta_seq text = write(first, kBlocks * 64, kText);
        publish(first, text, a, kText, kBlocks);
        EXPECT_EQ(flush_store(first, a), 0u);
        EXPECT_EQ(load_from_store(second, b, keys(kText, kBlocks)).moved, kBlocks);
        const auto [on_gpu, n] = match(second, b, kText, kBlocks);
        ASSERT_EQ(n, int64_t(kBlocks) * 64);
        verify(second, on_gpu);
        EXPECT_TRUE(same_values(first, text, second, on_gpu, n));
        grow_on_gpu(second, on_gpu);
        publish(second, on_gpu, b, kText, kBlocks + 1);
        EXPECT_EQ(flush_store(second, b), 0u);
        EXPECT_EQ(store_stats(second, b).puts, 1u);
        EXPECT_EQ(load_from_store(third, c, keys(kText, kBlocks + 1)).moved, kBlocks + 1);
        const auto [back, m] = match(third, c, kText, kBlocks + 1);
        ASSERT_EQ(m, n + 64);
        verify(third, back);
        EXPECT_TRUE(same_values(second, on_gpu, third, back, m));
    }
}

}  // namespace
}  // namespace ta::testing
