// Channels that blocks do not have, many query heads for each kv head, and more queries than keys, on a GPU beside a CPU. The CPU's
// own judge is shapes_test.cpp.
#include "abi/gpu_twins.h"

namespace ta::testing {
namespace {

class GpuChannels : public GpuTest {};

TEST_F(GpuChannels, StoreAndGiveWhatACpuDoes) {
    uint64_t seed = 1;
    for (const Shape& shape :
         {Shape{4, 80, 2, 4}, Shape{8, 16, 2, 2}, Shape{2, 120, 2, 4}, Shape{4, 72, 1, 8}, Shape{4, 192, 2, 2}}) {
        SCOPED_TRACE(::testing::Message() << shape.bits << " bits, d " << shape.head_dim);
        Twins twins(gpu, cpu, shape, stream, ++seed);
        const size_t a = twins.add(), b = twins.add();
        twins.step({a, b}, {130, 1}, {130, 1}, kRunningError);
        for (const int32_t n : {1, 62, 3})
            twins.step({a, b}, {n, 1}, {n, 1}, n * shape.group > 16 ? kRunningError : kDecodeError);
        if (HasFatalFailure()) return;
        twins.compare_pages();
        if (HasFatalFailure()) return;
    }
}

TEST_F(GpuChannels, ManyQueryHeadsForEachKvHead) {
    for (const int group : {17, 32, 64, 71, 128}) {
        SCOPED_TRACE(::testing::Message() << "group " << group);
        Twins twins(gpu, cpu, {4, 64, group > 64 ? 1 : 2, group}, stream, uint64_t(group));
        const size_t a = twins.add(), b = twins.add();
        twins.step({a, b}, {150, 1}, {3, 1}, kRunningError);
        twins.step({a, b}, {1, 1}, {1, 1}, kRunningError);
        twins.step({a, b}, {70, 2}, {70, 2}, kRunningError);
        if (HasFatalFailure()) return;
    }
    auto options = pool_options(1, 1, 64);
    auto tiers = sized<ta_tier_options>();
    tiers.eviction = TA_EVICT_ATTENTION;
    tiers.host_bytes = 16 << 20;
    options.tiers = &tiers;
    const KvPool pool = make_pool(gpu, options);
    const Plan plan = make_plan(pool);
    begin(plan, {make_sequence(pool)}, {1});
    const std::vector<float> ones(64, 1.0f), many(32 * 64, 1.0f);
    const DeviceTensor k(1, 1, 64, &ones), q(1, 32, 64, &many), out(1, 32, 64);
    ta_error err;
    require(ta_append(plan.get(), 0, k.view(), k.view(), &err), err);
    EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), TA_E_UNSUPPORTED) << err.message;
    require(ta_plan_abort(plan.get(), &err), err);
}

TEST_F(GpuChannels, MoreQueriesThanKeys) {
    for (const ta_mask mask : {TA_MASK_FULL, TA_MASK_CAUSAL}) {
        for (const auto& [keys, queries] : {std::pair{3, 4}, {3, 10}, {63, 65}, {64, 200}, {130, 131}}) {
            SCOPED_TRACE(::testing::Message() << "mask " << mask << ", " << keys << " keys, " << queries << " queries");
            Twins twins(gpu, cpu, {4, 128, 2, 4}, stream, uint64_t(queries));
            const size_t a = twins.add();
            twins.step({a}, {keys}, {1}, kRunningError);
            auto rules = sized<ta_attend_options>();
            rules.mask = mask;
            twins.step({a}, {0}, {queries}, kRunningError, &rules);
            if (HasFatalFailure()) return;
        }
    }
}

}  // namespace
}  // namespace ta::testing
