// The CPU's executor: results of several parts are joined in order whatever the threads do, in a workspace that follows from the
// threads and not from the length of the context.
#include "src/attend/cpu/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/cpu/math.h"
#include "support/counting_allocator.h"
#include "support/numbers.h"

namespace ta::testing {
namespace {

std::shared_ptr<Context> context_of(int threads, CountingAllocator* allocator = nullptr) {
    Context::Options options;
    options.threads = threads;
    if (allocator) options.allocator = CallbackSet<ta_allocator>(allocator->hooks());
    return Context::create(std::move(options)).take();
}

TensorView view_of(std::vector<float>& x, int64_t heads, int64_t d) {
    return {reinterpret_cast<uint8_t*>(x.data()), DType::kF32, int64_t(x.size()) / (heads * d), heads, d, heads * d, d};
}

// One batch over token pages of random codes. A page that is null is gone: its jobs take room and no time.
struct Batch {
    struct Member {
        int64_t n_query, n_keys;
        bool observed = false;
    };
    Batch(int head_dim, int heads, int queries_per_head, const std::vector<Member>& members, bool gone = false)
        : d(head_dim), kv_heads(heads), group(queries_per_head) {
        Random random(7);
        const TokenLayout layout(d);
        const cpu::PageCodec& codec = *cpu::find_kernels(TA_CPU_ISA_AUTO)->codec;
        int64_t queries = 0;
        for (const Member& m : members) {
            const size_t n_pages = size_t(m.n_keys + kPageTokens - 1) / kPageTokens;
            pages.emplace_back(n_pages, StoredPage{nullptr, PageKind::kToken});
            masses.emplace_back(n_pages, 0.0f);
            for (StoredPage& page : pages.back()) {
                if (gone) break;
                // 128-byte aligned pieces.
                memory.emplace_back(layout.bytes() * size_t(kv_heads) + 128);
                uint8_t* at = memory.back().data() + (128 - reinterpret_cast<uintptr_t>(memory.back().data()) % 128) % 128;
                page.page = at;
                for (int head = 0; head < kv_heads; ++head, at += layout.bytes()) {
                    auto stage1 = std::make_unique<cpu::HeadStage1>();
                    for (int64_t i = 0; i < kPageTokens * d; ++i) {
                        stage1->k[i] = int8_t(random.between(-119, 119));
                        stage1->v[i] = int8_t(random.between(-119, 119));
                    }
                    for (int t = 0; t < kPageTokens; ++t) stage1->k_scale[t] = stage1->v_scale[t] = 0.02f;
                    codec.store_token_piece(*stage1, d, 0, kPageTokens, at);
                }
            }
            sequences.push_back({pages.back().data(), m.n_keys, m.n_query, queries});
            if (m.observed) {
                sequences.back().mass = masses.back().data();
                sequences.back().n_observed = std::min(sequences.back().n_query, kObservedTokens);
            }
            queries += m.n_query;
        }
        q = random.normals(queries * kv_heads * group * d);
    }

    Status run(Context& context) {
        out.assign(q.size(), -7.0f);
        lse.assign(q.size() / size_t(d), -7.0f);
        for (auto& m : masses) std::fill(m.begin(), m.end(), 0.0f);
        AttendCall call;
        call.head_dim = d;
        call.kv_heads = kv_heads;
        call.group = group;
        call.sequences = sequences;
        call.q = view_of(q, kv_heads * group, d);
        call.out = view_of(out, kv_heads * group, d);
        call.lse = lse.data();
        call.settings.scale = float(1.0 / std::sqrt(double(d)));
        uint64_t saturated = 0;
        AttendExecutor executor(context);
        return executor.run(call, &saturated);
    }

    int d, kv_heads, group;
    std::vector<std::vector<StoredPage>> pages;
    std::vector<std::vector<float>> masses;
    std::vector<std::vector<uint8_t>> memory;
    std::vector<AttendSequence> sequences;
    std::vector<float> q, out, lse;
};

TEST(Executor, SameBitsWithAnyNumberOfThreads) {
    // Tiles of one part, of two and of many; results that end while earlier ones are in work. Heads of 256: places for six parts
    // with three threads.
    Batch batch(256, 2, 1, {{1, 5000, true}, {300, 9000, true}, {2, 12000}, {1, 100, true}, {1, 1100}, {1, 1030}, {250, 4500}});
    ASSERT_TRUE(batch.run(*context_of(1)).ok());
    const Batch want = batch;
    for (size_t s = 0; s < want.masses.size(); ++s) {
        if (!want.sequences[s].mass) continue;
        double sum = 0.0;
        for (float m : want.masses[s]) sum += double(m);
        EXPECT_NEAR(sum, double(2 * std::min<int64_t>(want.sequences[s].n_query, kObservedTokens)), 1e-3) << "sequence " << s;
    }
    for (const int threads : {2, 3, 8}) {
        const std::shared_ptr<Context> context = context_of(threads);
        for (int round = 0; round < 2; ++round) {
            ASSERT_TRUE(batch.run(*context).ok());
            EXPECT_EQ(std::memcmp(batch.out.data(), want.out.data(), want.out.size() * sizeof(float)), 0) << threads;
            EXPECT_EQ(std::memcmp(batch.lse.data(), want.lse.data(), want.lse.size() * sizeof(float)), 0) << threads;
            EXPECT_EQ(batch.masses, want.masses) << threads;
        }
    }
}

// Bytes that a call takes from the allocator while it runs.
uint64_t workspace(int threads, Batch batch) {
    const std::shared_ptr<Context> context = context_of(threads);
    EXPECT_TRUE(batch.run(*context).ok());
    EXPECT_EQ(context->allocator().bytes_in_use(), 0u);
    return context->allocator().bytes_peak();
}

TEST(Executor, TheWorkspaceDoesNotGrowWithTheContext) {
    constexpr uint64_t kMiB = 1 << 20;
    for (const int threads : {1, 8}) {
        const auto chunk = [&](int64_t n_query, int64_t n_keys) {
            return workspace(threads, Batch(128, 2, 4, {{n_query, n_keys}}, true));
        };
        const auto decode = [&](int64_t members, int64_t n_keys) {
            return workspace(threads, Batch(128, 2, 4, std::vector<Batch::Member>(size_t(members), {1, n_keys}), true));
        };
        const uint64_t shorter = chunk(256, 100'000);
        EXPECT_EQ(chunk(256, 1'000'000), shorter);
        EXPECT_EQ(chunk(512, 100'000), shorter);
        EXPECT_LE(shorter, uint64_t(threads + 1) * 3 * kMiB / 2);
        EXPECT_LE(decode(1, 1'000'000), decode(4, 100'000));
        EXPECT_EQ(decode(64, 100'000), decode(4, 100'000));
        EXPECT_LE(decode(64, 100'000), uint64_t(threads + 10) * kMiB / 4);
    }
    // The weights of pages in the last 16 tokens are of their number; docs/threading.md.
    EXPECT_LE(workspace(4, Batch(128, 2, 4, {{300, 1'000'000, true}}, true)), 32 * kMiB);
}

TEST(Executor, WithoutMemoryNothingIsWritten) {
    static int64_t left;
    CountingAllocator allocator;
    const std::shared_ptr<Context> context = context_of(2, &allocator);
    Batch batch(64, 2, 2, {{1, 5000, true}, {130, 5000, true}});
    allocator.fails = [] { return left-- <= 0; };
    int64_t failures = 0;
    for (;; ++failures) {
        left = failures;
        const Status s = batch.run(*context);
        if (s.ok()) break;
        EXPECT_EQ(s.code(), TA_E_MEMORY);
        EXPECT_EQ(batch.out, std::vector<float>(batch.out.size(), -7.0f));
        EXPECT_EQ(batch.lse, std::vector<float>(batch.lse.size(), -7.0f));
        for (const auto& m : batch.masses) EXPECT_EQ(m, std::vector<float>(m.size(), 0.0f));
        EXPECT_EQ(allocator.bytes_alive(), 0u);
    }
    EXPECT_GE(failures, 4);
    EXPECT_EQ(allocator.faults(), 0u);
}

TEST(Executor, JoinsAsThePagesOfARowAreJoined) {
    constexpr int kDim = 96;
    constexpr int64_t kRows = 5;
    Random random(3);
    std::vector<float> o = random.normals(kRows * kDim), part = random.normals(kRows * kDim);
    std::vector<float> m = {1.0f, -3.0f, cpu::kMinusInf, 2.0f, cpu::kMinusInf}, l = {1.0f, 2.0f, 0.0f, 4.0f, 0.0f};
    std::vector<float> part_m = {4.0f, -3.5f, 7.0f, cpu::kMinusInf, cpu::kMinusInf}, part_l = {5.0f, 6.0f, 7.0f, 0.0f, 0.0f};
    for (const ta_cpu_isa isa : {TA_CPU_ISA_SCALAR, TA_CPU_ISA_AVX2, TA_CPU_ISA_AVX512, TA_CPU_ISA_AMX}) {
        const cpu::Kernels* kernels = cpu::find_kernels(isa);
        if (!kernels) continue;
        std::vector<float> got_o = o, got_m = m, got_l = l;
        kernels->join({kDim, kRows, got_o.data(), got_m.data(), got_l.data(), part.data(), part_m.data(), part_l.data()});
        for (size_t r = 0; r < size_t(kRows); ++r) {
            const bool skips = part_m[r] == cpu::kMinusInf;
            const float top = std::max(m[r], part_m[r]);
            const float alpha = skips ? 1.0f : m[r] == cpu::kMinusInf ? 0.0f : cpu::exp2_neg_exact(top - m[r]);
            const float weight = skips ? 0.0f : cpu::exp2_neg_exact(top - part_m[r]);
            EXPECT_EQ(got_m[r], top);
            EXPECT_EQ(got_l[r], std::fma(weight, part_l[r], l[r] * alpha));
            for (size_t i = r * kDim; i < (r + 1) * kDim; ++i) EXPECT_EQ(got_o[i], std::fma(weight, part[i], o[i] * alpha));
        }
    }
}

}  // namespace
}  // namespace ta::testing
