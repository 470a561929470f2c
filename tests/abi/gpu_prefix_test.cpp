// Prefix reuse, a disk tier that lasts and pool files on a GPU context: a matched sequence beside a fork of its publisher, the
// same outputs to the bit. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>

#include "support/files.h"
#include "support/gpu.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kDim = 128, kQHeads = 8;

class GpuPrefix : public GpuTest {
  protected:
    std::vector<float> grow(const KvPool& pool, ta_seq seq, int32_t n, uint64_t seed) {
        Random values(seed);
        const Plan plan = make_plan(pool);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        std::vector<float> seen;
        begin(plan, {seq}, {n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> kv = values.normals(n * kHeads * kDim), qv = values.normals(n * kQHeads * kDim);
            const DeviceTensor k(n, kHeads, kDim, &kv), q(n, kQHeads, kDim, &qv), out(n, kQHeads, kDim);
            require(ta_append(plan.get(), layer, k.view(), k.view(), &err), err);
            require(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
            if (cudaStreamSynchronize(stream) != cudaSuccess) ADD_FAILURE() << "the stream failed";
            const std::vector<float> x = out.get();
            seen.insert(seen.end(), x.begin(), x.end());
        }
        end(plan);
        return seen;
    }
    static ta_namespace make_namespace(const KvPool& pool, uint8_t salt) {
        auto o = sized<ta_namespace_options>();
        std::memset(o.salt, salt, sizeof o.salt);
        ta_namespace space = 0;
        ta_error err;
        require(ta_namespace_create(pool.get(), &o, &space, &err), err);
        return space;
    }
    static std::vector<uint8_t> keys(size_t n) {
        std::vector<uint8_t> all(n * 32);
        for (size_t i = 0; i < n; ++i) all[i * 32] = uint8_t(i + 1);
        return all;
    }
    static std::pair<ta_seq, int64_t> match(const KvPool& pool, ta_namespace space, size_t n) {
        std::pair<ta_seq, int64_t> m{0, -1};
        ta_error err;
        require(ta_seq_match_prefix(pool.get(), space, keys(n).data(), n, &m.first, &m.second, &err), err);
        return m;
    }
};

TEST_F(GpuPrefix, AMatchedSequenceGoesOnLikeAFork) {
    for (ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (uint32_t bits : {4u, 2u, 8u}) {
            SCOPED_TRACE(std::to_string(profile) + " at " + std::to_string(bits) + " bits");
            auto numerics = sized<ta_numerics>();
            numerics.profile = profile;
            auto options = pool_options(kLayers, kHeads, kDim, bits, &numerics);
            options.budget_bytes = uint64_t{64} << 20;
            const KvPool pool = make_pool(gpu, options);
            const ta_namespace space = make_namespace(pool, 1), other = make_namespace(pool, 2);
            const ta_seq seq = make_sequence(pool);
            grow(pool, seq, 300, 1);
            ta_error err;
            require(ta_seq_publish(pool.get(), seq, space, keys(4).data(), 4, &err), err);
            EXPECT_EQ(match(pool, other, 4).second, 0);
            const ta_seq fork = fork_sequence(pool, seq);
            require(ta_seq_truncate(pool.get(), fork, 192, &err), err);
            require(ta_seq_release(pool.get(), seq, &err), err);
            const auto [same, n] = match(pool, space, 3);
            ASSERT_EQ(n, 192);
            for (int32_t step : {1, 70, 64})
                ASSERT_TRUE(same_bits(grow(pool, same, step, 5), grow(pool, fork, step, 5))) << step;
            // Another namespace gets the memory.
            require(ta_namespace_destroy(pool.get(), space, &err), err);
            for (ta_seq s : {same, fork}) require(ta_seq_release(pool.get(), s, &err), err);
            const ta_seq theirs = match(pool, other, 0).first;
            const std::vector<float> in_used = grow(pool, theirs, 200, 7);
            const KvPool fresh = make_pool(gpu, options);
            EXPECT_TRUE(same_bits(in_used, grow(fresh, make_sequence(fresh), 200, 7)));
            require(ta_seq_verify(pool.get(), theirs, &err), err);
        }
    }
}

TEST_F(GpuPrefix, FilesAndADiskTierThatLasts) {
    const Folder folder;
    const std::string disk = folder.file("tier"), file = folder.file("pool");
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = tiers.disk_bytes = uint64_t{16} << 20;
    tiers.disk_path = disk.c_str();
    auto options = pool_options(kLayers, kHeads, kDim);
    options.budget_bytes = uint64_t{16} << 20;
    options.tiers = &tiers;
    ta_error err;
    std::vector<float> expected;
    {
        const KvPool pool = make_pool(gpu, options);
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = make_sequence(pool);
        grow(pool, seq, 260, 1);
        require(ta_seq_publish(pool.get(), seq, space, keys(4).data(), 4, &err), err);
        require(ta_namespace_flush(pool.get(), space, &err), err);
        require(ta_kv_pool_save(pool.get(), file.c_str(), TA_SAVE_PUBLISHED, nullptr, &err), err);
        require(ta_seq_truncate(pool.get(), seq, 256, &err), err);
        expected = grow(pool, seq, 3, 2);
    }
    {
        const KvPool pool = make_pool(gpu, options);
        const auto [seq, n] = match(pool, make_namespace(pool, 1), 5);
        ASSERT_EQ(n, 256);
        EXPECT_TRUE(same_bits(grow(pool, seq, 3, 2), expected)) << "from disk";
    }
    options.tiers = nullptr;
    const KvPool pool = make_pool(gpu, options);
    ta_loaded_seq loaded[1];
    uint64_t count = 0;
    require(ta_kv_pool_load(pool.get(), file.c_str(), nullptr, loaded, 1, &count, &err), err);
    ASSERT_EQ(count, 1u);
    EXPECT_EQ(length(pool, loaded[0].loaded), 260);
    const auto [seq, n] = match(pool, make_namespace(pool, 1), 4);
    ASSERT_EQ(n, 256);
    EXPECT_TRUE(same_bits(grow(pool, seq, 3, 2), expected)) << "from a file";
}

}  // namespace
}  // namespace ta::testing
