// Layers with windows on a GPU: beside a pool that gives pages back one that keeps everything. Results are the same to the bit, also
// where blocks lie in host memory and where steps are graphs. The CPU's own judge is windows_test.cpp.
#include "support/files.h"
#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 3, kKvHeads = 2, kDim = 128, kQHeads = 8;

struct Side {
    KvPool pool;
    Plan plan;
    std::vector<ta_seq> seqs;
};

class GpuWindows : public GpuTest {
  protected:
    // Layers 0 and 2 have the window, where it is not 0.
    Side make(const Context& context, int64_t window, uint32_t bits, const ta_tier_options* tiers, uint64_t budget) {
        auto options = pool_options(kLayers, kKvHeads, kDim, bits);
        options.budget_bytes = budget;
        options.tiers = tiers;
        ta_layer_group groups[] = {sized<ta_layer_group>(), sized<ta_layer_group>()};
        groups[0].layers = groups[1].layers = 1;
        groups[1].first = 2;
        groups[0].window = groups[1].window = window;
        options.layer_groups = groups;
        options.n_layer_groups = window > 0 ? 2 : 0;
        Side side;
        side.pool = make_pool(context, options);
        side.plan = make_plan(side.pool);
        return side;
    }
    Side make_gpu(int64_t window, uint32_t bits, const ta_tier_options* tiers, uint64_t budget) {
        Side side = make(gpu, window, bits, tiers, budget);
        ta_error err;
        require(ta_plan_set_stream(side.plan.get(), stream, &err), err);
        return side;
    }
    // The calls of a step between begin and end.
    void enqueue(const Side& side, int64_t window, DeviceTensor& k, DeviceTensor& v, DeviceTensor& q, DeviceTensor& out) {
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            auto options = sized<ta_attend_options>();
            options.window = layer == 1 ? 0 : window;
            require(ta_append(side.plan.get(), layer, k.view(), v.view(), &err), err);
            require(ta_attend(side.plan.get(), layer, q.view(), out.view(), nullptr, &options, &err), err);
        }
    }
    // Layers one after the other, each with other tokens.
    std::vector<float> step(const Side& side, int64_t window, const std::vector<ta_seq>& seqs,
                            const std::vector<int32_t>& n_new, uint64_t seed) {
        ta_error err;
        require(ta_plan_begin(side.plan.get(), uint32_t(seqs.size()), seqs.data(), n_new.data(), nullptr, nullptr, &err), err);
        int64_t n = 0;
        for (const int32_t of : n_new) n += of;
        Random random(seed);
        std::vector<float> results;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const std::vector<float> kv = random.normals(2 * n * kKvHeads * kDim), qs = random.normals(n * kQHeads * kDim);
            const std::vector<float> ks(kv.begin(), kv.begin() + n * kKvHeads * kDim),
                vs(kv.begin() + n * kKvHeads * kDim, kv.end());
            DeviceTensor k(n, kKvHeads, kDim, &ks), v(n, kKvHeads, kDim, &vs), q(n, kQHeads, kDim, &qs), out(n, kQHeads, kDim);
            auto options = sized<ta_attend_options>();
            options.window = layer == 1 ? 0 : window;
            require(ta_append(side.plan.get(), layer, k.view(), v.view(), &err), err);
            require(ta_attend(side.plan.get(), layer, q.view(), out.view(), nullptr, &options, &err), err);
            EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            const std::vector<float> x = out.get();
            results.insert(results.end(), x.begin(), x.end());
        }
        require(ta_plan_end(side.plan.get(), nullptr, &err), err);
        return results;
    }
};

TEST_F(GpuWindows, RandomStepsAreAsWithout) {
    constexpr uint64_t kPlenty = uint64_t{64} << 20;
    for (const uint32_t bits : {4u, 8u}) {
        for (const bool tiered : {false, true}) {
            for (const int64_t window : {64, 100, 300}) {
                SCOPED_TRACE(::testing::Message() << bits << " bits, window " << window << (tiered ? ", tiers" : ""));
                auto tiers = sized<ta_tier_options>();
                tiers.host_bytes = kPlenty;
                tiers.staging = window == 300 ? TA_STAGING_ALWAYS : TA_STAGING_AUTO;
                Side a = make_gpu(window, bits, tiered ? &tiers : nullptr, tiered ? 4 << 20 : kPlenty),
                     b = make_gpu(0, bits, nullptr, kPlenty);
                Random random{uint64_t(window + bits)};
                for (int i = 0; i < 3; ++i) a.seqs.push_back(make_sequence(a.pool)), b.seqs.push_back(make_sequence(b.pool));
                for (int round = 0; round < 40; ++round) {
                    const size_t s = random.below(a.seqs.size()), t = random.below(a.seqs.size());
                    const int what = int(random.below(10));
                    ta_error err;
                    if (what < 7) {
                        const auto more = [&] {
                            return int32_t(random.chance(50) ? random.between(1, 4) : random.between(1, 190));
                        };
                        std::vector<ta_seq> x{a.seqs[s]}, y{b.seqs[s]};
                        std::vector<int32_t> n{more()};
                        if (s != t) x.push_back(a.seqs[t]), y.push_back(b.seqs[t]), n.push_back(more());
                        ASSERT_TRUE(step(a, window, x, n, uint64_t(round)) == step(b, window, y, n, uint64_t(round))) << round;
                    } else if (what == 7 && a.seqs.size() < 5) {
                        a.seqs.push_back(fork_sequence(a.pool, a.seqs[s]));
                        b.seqs.push_back(fork_sequence(b.pool, b.seqs[s]));
                    } else if (what == 8) {
                        const int64_t to = std::max<int64_t>(0, length(a.pool, a.seqs[s]) - random.between(0, 80));
                        if (ta_seq_truncate(a.pool.get(), a.seqs[s], to, &err) != TA_OK) continue;
                        require(ta_seq_truncate(b.pool.get(), b.seqs[s], to, &err), err);
                    } else if (tiered) {
                        ta_ticket ticket = 0;
                        require(ta_seq_suspend(a.pool.get(), a.seqs[s], TA_TIER_HOST, &ticket, &err), err);
                        wait(a.pool, ticket);
                    }
                }
                for (const ta_seq seq : a.seqs) verify(a.pool, seq);
                EXPECT_GT(stats(a.pool).passed_blocks + (tiered ? tier_stats(a.pool, TA_TIER_HOST).passed_blocks : 0), 0u);
                EXPECT_LT(stats(a.pool).bytes_used, stats(b.pool).bytes_used);
                // A CPU reads the file that a GPU wrote.
                const Folder folder;
                const std::string path = folder.file("seq");
                ta_error err;
                require(ta_seq_save(a.pool.get(), a.seqs[0], path.c_str(), nullptr, &err), err);
                const Side c = make(cpu, window, bits, nullptr, kPlenty);
                ta_seq loaded = 0;
                require(ta_seq_load(c.pool.get(), path.c_str(), nullptr, &loaded, &err), err);
                EXPECT_EQ(length(c.pool, loaded), length(a.pool, a.seqs[0]));
                verify(c.pool, loaded);
            }
        }
    }
}

// A graph of a decode step, launched while windows pass one block after the other.
TEST_F(GpuWindows, GraphsGoOnBehindWhatHasPassed) {
    Side a = make_gpu(100, 4, nullptr, 64 << 20), b = make_gpu(0, 4, nullptr, 64 << 20);
    const ta_seq x = make_sequence(a.pool), y = make_sequence(b.pool);
    const int32_t prompt = 60, one = 1;
    step(a, 100, {x}, {prompt}, 1);
    step(b, 100, {y}, {prompt}, 1);
    step(a, 100, {x}, {one}, 2);
    step(b, 100, {y}, {one}, 2);
    Random random(3);
    DeviceTensor k(1, kKvHeads, kDim), v(1, kKvHeads, kDim), q(1, kQHeads, kDim), out(1, kQHeads, kDim),
        plain(1, kQHeads, kDim);
    ta_error err;
    CapturedGraph graph, plain_graph;
    for (int i = 0; i < 600; ++i) {
        k.set(random.normals(kKvHeads * kDim)), v.set(random.normals(kKvHeads * kDim)), q.set(random.normals(kQHeads * kDim));
        require(ta_plan_begin(a.plan.get(), 1, &x, &one, nullptr, nullptr, &err), err);
        if (!graph) graph.capture(stream, [&] { enqueue(a, 100, k, v, q, out); });
        ASSERT_EQ(graph.launch(stream), cudaSuccess);
        require(ta_plan_end(a.plan.get(), nullptr, &err), err);
        require(ta_plan_begin(b.plan.get(), 1, &y, &one, nullptr, nullptr, &err), err);
        if (!plain_graph) plain_graph.capture(stream, [&] { enqueue(b, 100, k, v, q, plain); });
        ASSERT_EQ(plain_graph.launch(stream), cudaSuccess);
        require(ta_plan_end(b.plan.get(), nullptr, &err), err);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        ASSERT_TRUE(out.get() == plain.get()) << i;
    }
    EXPECT_GE(stats(a.pool).passed_blocks, 7u);
    verify(a.pool, x);
}

}  // namespace
}  // namespace ta::testing
