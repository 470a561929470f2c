// batch_invariant on a GPU: a token's results have the same bits in every step, and are as near to those of a CPU as without it.
#include "abi/batch_invariant.h"
#include "support/gpu_rows.h"

namespace ta::testing {
namespace {

using DeviceTexts = InvariantTexts<DeviceRows, DeviceFloats>;
using HostTexts = InvariantTexts<Tensor, HostFloats>;

class GpuBatchInvariant : public GpuTest {};

TEST_F(GpuBatchInvariant, TokensHaveTheSameBitsInEveryStep) {
    for (InvariantCase c : invariant_cases(16)) {
        SCOPED_TRACE(c.name);
        for (int64_t& n : c.lengths) n = std::min<int64_t>(n, 1300);  // a GPU cuts every 512
        DeviceTexts texts(gpu, c, nullptr, uint64_t{256} << 20, stream);
        walk_all(texts);
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{1} << 20;
        tiers.disk_bytes = uint64_t{64} << 20;
        DeviceTexts tiered(gpu, c, &tiers, uint64_t{2} << 20, stream);
        tiered.book = texts.book;
        if (!HasFatalFailure()) tiered.walk(6, 50, 200, false);
        if (HasFatalFailure()) return;
        HostTexts host(cpu, c);
        host.walk(1, 0, 1 << 20, true);
        const bool cuts = std::string(c.name) == "Paper" || std::string(c.name) == "PRunning";  // weights follow from the cut
        double error = 0.0, all = 0.0, lse = 0.0;
        for (const auto& [token, of_host] : host.book) {
            const auto& of_device = texts.book.at(token);
            for (size_t i = 0; i < of_host.out.size(); ++i) {
                error += std::pow(double(of_host.out[i]) - of_device.out[i], 2);
                all += std::pow(double(of_host.out[i]), 2);
            }
            for (size_t i = 0; i < of_host.lse.size(); ++i)
                lse = std::max(lse, std::abs(double(of_host.lse[i]) - of_device.lse[i]));
        }
        EXPECT_LT(std::sqrt(error / all), cuts ? 2e-2 : 1e-3);
        EXPECT_LT(lse, cuts ? 2e-2 : 1e-3);
    }
}

// More parts than are in work at a time.
TEST_F(GpuBatchInvariant, ManyQueriesTakeTurns) {
    const InvariantCase c{"many", {1, 8, 128, 4, false}, 4, {}, {1500}};
    DeviceTexts texts(gpu, c, nullptr, uint64_t{256} << 20, stream);
    texts.walk(1, 0, 1 << 20, true);
    texts.walk(2, 5, 600, true);
    texts.walk(3, 95, 100, true);
}

TEST_F(GpuBatchInvariant, CapturesAndWideGroupsAreRefused) {
    auto numerics = sized<ta_numerics>();
    numerics.batch_invariant = TA_ON;
    const KvPool pool = make_pool(gpu, pool_options(1, 1, 64, 4, &numerics));
    const Plan plan = make_plan(pool);
    ta_error err;
    require(ta_plan_set_stream(plan.get(), stream, &err), err);
    const ta_seq seq = make_sequence(pool);
    Random random(1);
    DeviceRows k(random.normals(64), 1, 1, 64), out(1, 1, 64), wide(random.normals(17 * 64), 1, 17, 64), wide_out(1, 17, 64);
    begin(plan, {seq}, {1});
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(ta_append(plan.get(), 0, k.view(), k.view(), &err), TA_E_UNSUPPORTED);
    cudaGraph_t nothing = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &nothing), cudaSuccess);
    cudaGraphDestroy(nothing);
    require(ta_append(plan.get(), 0, k.view(), k.view(), &err), err);
    EXPECT_EQ(ta_attend(plan.get(), 0, wide.view(), wide_out.view(), nullptr, nullptr, &err), TA_E_UNSUPPORTED);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(ta_attend(plan.get(), 0, k.view(), out.view(), nullptr, nullptr, &err), TA_E_UNSUPPORTED);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    require(ta_attend(plan.get(), 0, k.view(), out.view(), nullptr, nullptr, &err), err);
    end(plan);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = 1 << 20;
    tiers.eviction = TA_EVICT_ATTENTION;
    auto options = pool_options(1, 1, 64, 4, &numerics);
    options.tiers = &tiers;
    ta_kv_pool* none = nullptr;
    EXPECT_EQ(ta_kv_pool_create(gpu.get(), &options, &none, &err), TA_E_UNSUPPORTED);
}

}  // namespace
}  // namespace ta::testing
