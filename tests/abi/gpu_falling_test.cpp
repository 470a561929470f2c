// Precision that falls as blocks are demoted, of a GPU context beside a CPU context that takes the same steps and moves: the same
// bytes in every block, outputs as close as other pools', and the same to the bit wherever the blocks are. Skipped where there
// is no GPU.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>

#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kGroup = 4;

struct Bytes {
    uint32_t bits = 0;
    std::vector<uint8_t> payload;
    bool operator==(const Bytes&) const = default;
};
Bytes read_block(const KvPool& pool, ta_seq seq, uint64_t block) {
    auto info = sized<ta_x_block_info>();
    ta_error err;
    require(ta_x_seq_block(pool.get(), seq, block, &info, nullptr, 0, &err), err);
    Bytes b{info.bits, std::vector<uint8_t>(info.bytes)};
    require(ta_x_seq_block(pool.get(), seq, block, &info, b.payload.data(), b.payload.size(), &err), err);
    b.payload.resize(info.trailer_offset);
    return b;
}

struct Case {
    const char* name;
    uint32_t d, bits;
    ta_profile profile;
};
void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

class GpuFalling : public GpuTest, public ::testing::WithParamInterface<Case> {
  protected:
    KvPool make(const Context& context, uint64_t device_bytes, uint64_t host_bytes) const {
        auto numerics = sized<ta_numerics>();
        numerics.profile = GetParam().profile;
        auto options = pool_options(kLayers, kHeads, d, GetParam().bits, &numerics);
        options.budget_bytes = device_bytes;
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = host_bytes;
        tiers.disk_bytes = uint64_t{64} << 20;
        tiers.falling_precision = TA_ON;
        options.tiers = &tiers;
        return make_pool(context, options);
    }
    // The same step on a CPU pool and on GPU pools; what they gave.
    std::vector<std::vector<float>> step(const KvPool& cpu_pool, ta_seq cpu_seq, const std::vector<const KvPool*>& pools,
                                         const std::vector<ta_seq>& seqs, int32_t n_new, int32_t n_query) {
        std::vector<std::vector<float>> all(1 + pools.size());
        std::vector<Plan> plans;
        const Plan cpu_plan = make_plan(cpu_pool);
        begin(cpu_plan, {cpu_seq}, {n_new}, {n_query});
        ta_error err;
        for (size_t i = 0; i < pools.size(); ++i) {
            plans.push_back(make_plan(*pools[i]));
            require(ta_plan_set_stream(plans.back().get(), stream, &err), err);
            begin(plans.back(), {seqs[i]}, {n_new}, {n_query});
        }
        const auto add = [](std::vector<float>& to, const std::vector<float>& x) { to.insert(to.end(), x.begin(), x.end()); };
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const auto values = [&](int64_t n) {
                std::vector<float> x = random.normals(n * d);
                for (float& v : x) v = round_to(TA_DTYPE_F16, v);
                return x;
            };
            const std::vector<float> kv = values(int64_t(n_new) * kHeads), vv = values(int64_t(n_new) * kHeads),
                                     qv = values(int64_t(n_query) * kHeads * kGroup);
            Tensor k(kv, n_new, kHeads, d, TA_DTYPE_F16), v(vv, n_new, kHeads, d, TA_DTYPE_F16);
            Tensor q(qv, n_query, kHeads * kGroup, d, TA_DTYPE_F16), out(n_query, kHeads * kGroup, d, TA_DTYPE_F16);
            append(cpu_plan, layer, k, v);
            attend(cpu_plan, layer, q, out);
            add(all[0], out.values());
            const DeviceTensor kd(n_new, kHeads, d, &kv), vd(n_new, kHeads, d, &vv), qd(n_query, kHeads * kGroup, d, &qv);
            for (size_t i = 0; i < pools.size(); ++i) {
                const DeviceTensor od(n_query, kHeads * kGroup, d);
                require(ta_append(plans[i].get(), layer, kd.view(), vd.view(), &err), err);
                require(ta_attend(plans[i].get(), layer, qd.view(), od.view(), nullptr, nullptr, &err), err);
                if (cudaStreamSynchronize(stream) != cudaSuccess) throw std::runtime_error("the stream failed");
                add(all[1 + i], od.get());
            }
        }
        end(cpu_plan);
        for (const Plan& plan : plans) end(plan);
        return all;
    }
    static double difference(const std::vector<float>& a, const std::vector<float>& b) {
        double sum = 0, all = 0;
        for (size_t i = 0; i < a.size(); ++i) {
            sum += double(a[i] - b[i]) * double(a[i] - b[i]);
            all += double(b[i]) * double(b[i]);
        }
        return std::sqrt(sum / all);
    }

    const uint32_t d = GetParam().d;
    // P of 119 or 255 levels is now and then rounded the other way, and prefill has levels of its own.
    const bool paper = GetParam().profile == TA_PROFILE_PAPER;
    // At head_dim 96 closed pages are rounded to INT8 for a prompt (numerics.md, 8).
    const double many_rows = paper ? 3e-2 : d == 96 ? 2.5e-2 : 1e-2, few_rows = paper ? 1e-2 : 1.5e-3;
    Random random{17};
};

TEST_P(GpuFalling, BytesAreTheCpusAndOutputsDoNotDependOnPlaces) {
    constexpr uint64_t kPlenty = uint64_t{64} << 20, kBlocks = 40;
    const KvPool on_cpu = make(cpu, kPlenty, kPlenty), on_gpu = make(gpu, kPlenty, kPlenty),
                 loaded_pool = make(gpu, kPlenty, kPlenty);
    const ta_seq a = make_sequence(on_cpu), b = make_sequence(on_gpu);
    step(on_cpu, a, {&on_gpu}, {b}, int32_t(kBlocks * 64), 1);
    uint32_t widths = 0;
    for (uint64_t block = 0; block < kBlocks; ++block) {
        const auto tier = ta_tier(random.below(3));
        if (tier == TA_TIER_DEVICE) continue;
        const uint64_t n = std::min<uint64_t>(uint64_t(random.between(1, 3)), kBlocks - block);
        EXPECT_EQ(move_now(on_cpu, a, block, n, tier).failed, 0u);
        EXPECT_EQ(move_now(on_gpu, b, block, n, tier).failed, 0u);
        block += n - 1;
    }
    for (uint64_t block = 0; block < kBlocks; ++block) {
        const Bytes x = read_block(on_cpu, a, block), y = read_block(on_gpu, b, block);
        EXPECT_EQ(x.bits, y.bits) << "block " << block;
        EXPECT_TRUE(x == y) << "block " << block << " of " << y.bits << " bits";
        widths |= x.bits;
    }
    EXPECT_EQ(widths, GetParam().bits == 8 || GetParam().profile == TA_PROFILE_ACCURATE ? 14u : 6u);
    ta_error err;
    require(ta_seq_verify(on_gpu.get(), b, &err), err);
    // A file of the CPU, all of it in GPU memory.
    const std::filesystem::path path = std::filesystem::temp_directory_path() / ("ta-falling-" + std::to_string(getpid()));
    require(ta_seq_save(on_cpu.get(), a, path.c_str(), nullptr, &err), err);
    ta_seq c = 0;
    require(ta_seq_load(loaded_pool.get(), path.c_str(), nullptr, &c, &err), err);
    std::filesystem::remove(path);
    EXPECT_EQ(tier_stats(loaded_pool, TA_TIER_DEVICE).blocks, kBlocks);
    for (const int32_t n : {1, 3, 1, 30, 1}) {
        const auto all = step(on_cpu, a, {&on_gpu, &loaded_pool}, {b, c}, n, n);
        EXPECT_LT(difference(all[1], all[0]), n == 30 ? many_rows : few_rows) << n << " queries";
        EXPECT_EQ(std::memcmp(all[1].data(), all[2].data(), all[1].size() * sizeof(float)), 0) << n << " queries";
        // It comes back to the device, and keeps its bits.
        move_now(on_gpu, b, uint64_t(random.below(20)), 12, ta_tier(random.below(3)));
        for (uint64_t block = 0; block < kBlocks; ++block) {
            const Bytes y = read_block(on_gpu, b, block);
            if (y.bits != read_block(on_cpu, a, block).bits) {  // what has fallen since on the one falls on the other two
                for (const uint32_t bits : {4u, 2u}) {
                    if (bits < y.bits) continue;
                    move_now(on_cpu, a, block, 1, bits == 4 ? TA_TIER_HOST : TA_TIER_DISK);
                    move_now(loaded_pool, c, block, 1, bits == 4 ? TA_TIER_HOST : TA_TIER_DISK);
                }
                move_now(loaded_pool, c, block, 1, TA_TIER_DEVICE);
            }
            EXPECT_TRUE(read_block(on_cpu, a, block) == y);
            EXPECT_TRUE(read_block(loaded_pool, c, block) == y);
        }
    }
    // Opened again from 4 and from 2 bits.
    for (const int64_t length : {35 * 64 + 20, 20 * 64 + 33, 5 * 64 + 50}) {
        for (const auto& [pool, seq] : {std::pair(&on_cpu, a), std::pair(&on_gpu, b)})
            require(ta_seq_truncate(pool->get(), seq, length, &err), err);
        const auto all = step(on_cpu, a, {&on_gpu}, {b}, 70, 2);
        EXPECT_LT(difference(all[1], all[0]), few_rows);
        EXPECT_TRUE(read_block(on_cpu, a, uint64_t(length) / 64) == read_block(on_gpu, b, uint64_t(length) / 64));
        require(ta_seq_verify(on_gpu.get(), b, &err), err);
    }
}

// Once with a host tier, and once with a disk only: its blocks lose all their bits at once.
TEST_P(GpuFalling, SequencesGrowPastTheBudgets) {
    const ta_kv_pool_stats s = stats(make(gpu, uint64_t{64} << 20, uint64_t{1} << 20));
    const uint64_t largest = GetParam().bits == 8 ? s.token_block_bytes : s.channel_block_bytes;
    for (const uint64_t host_blocks : {40u, 0u}) {
        SCOPED_TRACE(std::to_string(host_blocks) + " blocks of host memory");
        const KvPool pool = make(gpu, 6 * s.token_block_bytes + 16 * largest, host_blocks * (s.channel_block_bytes + 4096));
        const KvPool on_cpu = make(cpu, uint64_t{64} << 20, uint64_t{64} << 20);
        std::vector<ta_seq> seqs, others;
        for (int i = 0; i < 3; ++i) {
            seqs.push_back(make_sequence(pool));
            others.push_back(make_sequence(on_cpu));
        }
        ta_error err;
        for (int round = 0; round < 6; ++round) {
            for (size_t i = 0; i < seqs.size(); ++i) {
                const auto all = step(on_cpu, others[i], {&pool}, {seqs[i]}, round % 2 ? 260 : 190, 1);
                for (const float x : all[1]) ASSERT_TRUE(std::isfinite(x));
            }
        }
        for (const ta_seq seq : seqs) require(ta_seq_verify(pool.get(), seq, &err), err);
        EXPECT_GT(tier_stats(pool, TA_TIER_DISK).low_blocks, 0u);
        EXPECT_GT(tier_stats(pool, TA_TIER_DISK).fallen_blocks, 0u);
        EXPECT_LE(tier_stats(pool, TA_TIER_DEVICE).bytes_used, tier_stats(pool, TA_TIER_DEVICE).bytes_budget);
        if (host_blocks > 0) {
            EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).fallen_blocks > 0, GetParam().bits == 8);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Pools, GpuFalling,
    ::testing::Values(Case{"D64Bits8", 64, 8, TA_PROFILE_ACCURATE}, Case{"D96Bits8", 96, 8, TA_PROFILE_ACCURATE},
                      Case{"D128Bits8", 128, 8, TA_PROFILE_ACCURATE}, Case{"D256Bits8", 256, 8, TA_PROFILE_ACCURATE},
                      Case{"D128Bits4", 128, 4, TA_PROFILE_ACCURATE}, Case{"D64Bits8Paper", 64, 8, TA_PROFILE_PAPER}),
    [](const auto& i) { return i.param.name; });

}  // namespace
}  // namespace ta::testing
