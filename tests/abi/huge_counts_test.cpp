// Counts near the limits of their types: refused at once, with nothing taken and nothing changed, however large the budget is.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <ctime>
#include <fstream>
#include <limits>

#include "support/groups.h"
#include "support/tensor.h"

namespace ta::testing {
namespace {

double cpu_seconds() {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

uint64_t resident_bytes() {
    uint64_t all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    return resident * uint64_t(sysconf(_SC_PAGESIZE));
}

class HugeCounts : public ::testing::TestWithParam<uint64_t> {
  protected:
    static KvPool make(const Context& context) {
        auto options = pool_options(1, 1, 64);
        options.budget_bytes = GetParam();
        return make_pool(context, options);
    }
    const Context context_ = make_context(1);
    const KvPool pool_ = make(context_);
};

TEST_P(HugeCounts, NewTokens) {
    const Plan plan = make_plan(pool_);
    std::vector<ta_seq> seqs;
    for (int i = 0; i < 4; ++i) seqs.push_back(make_sequence(pool_));
    const uint64_t before = info(context_).bytes_in_use;
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
    for (const std::vector<int32_t>& n_new :
         {std::vector<int32_t>(4, kMost), {1, 1, 1, kMost}, std::vector<int32_t>(4, 1 << 30)}) {
        const double start = cpu_seconds();
        ta_error err;
        const ta_status s = ta_plan_begin(plan.get(), 4, seqs.data(), n_new.data(), nullptr, nullptr, &err);
        EXPECT_TRUE(s == TA_E_TIER_FULL || s == TA_E_MEMORY) << ta_status_name(s);
        EXPECT_GE(err.sequence, 0) << err.message;
        EXPECT_GE(err.block, 0) << err.message;
        EXPECT_LT(cpu_seconds() - start, 0.2) << err.message;
        EXPECT_EQ(stats(pool_).bytes_used, 0u);
        EXPECT_EQ(info(context_).bytes_in_use, before);
    }
    ta_error err;
    const uint64_t slot = stats(pool_).channel_block_bytes;
    const std::vector<int32_t> alike(4, int32_t(std::min<uint64_t>(GetParam() / slot + 1, 1 << 24)) * 64);
    if (ta_plan_begin(plan.get(), 4, seqs.data(), alike.data(), nullptr, nullptr, &err) == TA_E_TIER_FULL) {
        EXPECT_EQ(uint64_t(err.bytes), 4 * uint64_t(alike[0] / 64) * slot - GetParam()) << "what all lack";
    }
    begin(plan, seqs, {100, 1, 1, 1});
    require(ta_plan_abort(plan.get(), &err), err);
}

TEST_P(HugeCounts, KeysToMatch) {
    ta_namespace space = 0;
    ta_error err;
    auto options = sized<ta_namespace_options>();
    options.salt[0] = 1;
    require(ta_namespace_create(pool_.get(), &options, &space, &err), err);
    constexpr uint64_t kKeys = uint64_t{1} << 34;
    void* keys = mmap(nullptr, kKeys * 32, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (keys == MAP_FAILED) GTEST_SKIP() << "no address space of 2^39 bytes";
    const double start = cpu_seconds();
    ta_seq seq = 0;
    int64_t length = -1;
    require(ta_seq_match_prefix(pool_.get(), space, static_cast<const uint8_t*>(keys), kKeys, &seq, &length, &err), err);
    EXPECT_EQ(length, 0);
    EXPECT_EQ(ta_seq_publish(pool_.get(), seq, space, static_cast<const uint8_t*>(keys), kKeys, &err), TA_E_INVALID);
    const GroupHandle group = make_group(context_, group_options(make_group_id(), 0, 1));
    require(ta_namespace_join(group.get(), pool_.get(), space, &err), err);
    ta_ticket ticket = 0;
    require(ta_namespace_fetch(group.get(), pool_.get(), space, static_cast<const uint8_t*>(keys), kKeys, &ticket, &err), err);
    auto got = sized<ta_transfer_info>();
    require(ta_transfer_wait(group.get(), ticket, -1, &got, &err), err);
    EXPECT_EQ(got.blocks, kKeys);
    EXPECT_EQ(got.length, 0);
    EXPECT_LT(cpu_seconds() - start, 0.2);
    auto s = sized<ta_namespace_stats>();
    require(ta_namespace_get_stats(pool_.get(), space, &s, &err), err);
    EXPECT_EQ(s.misses, kKeys);
    munmap(keys, kKeys * 32);
}

// Of 17 GB of ranges it takes those of the layers that it is shown.
TEST(HugeCalibrator, TakesMemoryLayerByLayer) {
    const Context context = make_context(1);
    constexpr uint32_t kLayers = 4096, kHeads = 1024, kDim = 256;
    const double start = cpu_seconds();
    const uint64_t before = resident_bytes();
    ta_calibrator* calibrator = nullptr;
    ta_error err;
    require(ta_calibrator_create(context.get(), kLayers, kHeads, kDim, &calibrator, &err), err);
    Tensor k(std::vector<float>(size_t{kHeads} * kDim, 1.0f), 1, kHeads, kDim);
    for (const uint32_t layer : {0u, kLayers - 1}) {
        require(ta_calibrator_observe(calibrator, layer, k.view(), k.view(), &err), err);
    }
    EXPECT_LT(cpu_seconds() - start, 0.2);
    EXPECT_LT(resident_bytes() - before, uint64_t{64} << 20);
    std::vector<uint8_t> bits(size_t{kLayers} * kHeads);
    EXPECT_EQ(ta_calibrator_finish(calibrator, 1, bits.data(), bits.data(), nullptr, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.layer, 1) << err.message;
    ta_calibrator_destroy(calibrator);
}

INSTANTIATE_TEST_SUITE_P(Budgets, HugeCounts, ::testing::Values(uint64_t{1} << 20, uint64_t{1} << 44, UINT64_MAX));

}  // namespace
}  // namespace ta::testing
