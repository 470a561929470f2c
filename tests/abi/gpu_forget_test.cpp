// Forgotten tokens on a GPU: attention passes over them as a CPU's does, and graphs that know only whole sequences read nothing that
// is not there.
#include <cmath>

#include "support/files.h"
#include "support/gpu.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

constexpr uint32_t kLayers = 2, kKvHeads = 2, kDim = 128, kQHeads = 8;

class GpuForget : public GpuTest {
  protected:
    void SetUp() override {
        GpuTest::SetUp();
        if (IsSkipped()) return;
        const auto options = pool_options(kLayers, kKvHeads, kDim);
        pool_ = make_pool(gpu, options);
        cpu_pool_ = make_pool(cpu, options);
        plan_ = make_plan(pool_);
        cpu_plan_ = make_plan(cpu_pool_);
        ta_error err;
        require(ta_plan_set_stream(plan_.get(), stream, &err), err);
    }
    // The next tokens, the last n_query of which attend.
    void set(int32_t n, int32_t n_query) {
        const auto rows = [&](int64_t tokens, int64_t heads) {
            std::vector<float> values = random_.normals(tokens * heads * kDim);
            for (float& x : values) x = f16_to_float(float_to_f16(x));
            return values;
        };
        n_ = n;
        n_query_ = n_query;
        k_ = rows(n, kKvHeads);
        v_ = rows(n, kKvHeads);
        q_ = rows(n_query, kQHeads);
    }
    struct Rows {
        DeviceTensor k, v, q, out;
    };
    Rows rows() const {
        return {
            {n_, kKvHeads, kDim, &k_}, {n_, kKvHeads, kDim, &v_}, {n_query_, kQHeads, kDim, &q_}, {n_query_, kQHeads, kDim}};
    }
    void begin_on_gpu() {
        ta_error err;
        require(ta_plan_begin(plan_.get(), 1, &seq_, &n_, &n_query_, nullptr, &err), err);
    }
    void enqueue(Rows& r) {
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(plan_.get(), layer, r.k.view(), r.v.view(), &err), err);
            require(ta_attend(plan_.get(), layer, r.q.view(), r.out.view(), nullptr, nullptr, &err), err);
        }
    }
    // The same on the CPU, whose results are near.
    void expect_as_on_cpu(const Rows& r) {
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        Tensor k(k_, n_, kKvHeads, kDim), v(v_, n_, kKvHeads, kDim), q(q_, n_query_, kQHeads, kDim),
            out(n_query_, kQHeads, kDim);
        begin(cpu_plan_, {cpu_seq_}, {n_}, {n_query_});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(cpu_plan_, layer, k, v);
            attend(cpu_plan_, layer, q, out);
        }
        end(cpu_plan_);
        const std::vector<float> got = r.out.get(), near = out.values();
        const float error = n_query_ * int32_t(kQHeads / kKvHeads) > 16 ? 2e-2f : 4e-3f;  // of a prefill kernel
        for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], near[i], error + error * std::fabs(near[i])) << i;
    }
    void step(int32_t n, int32_t n_query) {
        set(n, n_query);
        Rows r = rows();
        begin_on_gpu();
        enqueue(r);
        end(plan_);
        expect_as_on_cpu(r);
    }
    void make_sequences(int32_t tokens) {
        seq_ = make_sequence(pool_);
        cpu_seq_ = make_sequence(cpu_pool_);
        step(tokens, 1);
    }
    void forget(int64_t first, int64_t n) {
        ta_error err;
        require(ta_seq_forget(pool_.get(), seq_, first, n, nullptr, &err), err);
        require(ta_seq_forget(cpu_pool_.get(), cpu_seq_, first, n, nullptr, &err), err);
    }

    KvPool pool_, cpu_pool_;
    Plan plan_, cpu_plan_;
    ta_seq seq_ = 0, cpu_seq_ = 0;
    int32_t n_ = 0, n_query_ = 0;
    std::vector<float> k_, v_, q_;
    Random random_{7};
};

TEST_F(GpuForget, AttentionPassesOverWhatIsForgotten) {
    make_sequences(10 * 64 + 20);
    forget(100, 351);
    step(1, 1);
    step(100, 100);
    forget(0, 64);
    step(3, 3);
    step(200, 50);
    forget(0, 14 * 64);
    step(1, 1);
    step(64, 64);
    ta_error err;
    EXPECT_EQ(ta_seq_verify(pool_.get(), seq_, &err), TA_OK) << err.message;
}

// Prompts before which nothing is missing take a prefill kernel, in the step of others.
TEST_F(GpuForget, PromptsWithAndWithoutWhatIsForgotten) {
    make_sequences(10 * 64 + 20);
    forget(100, 351);
    const ta_seq missing = seq_, cpu_missing = cpu_seq_;
    make_sequences(7 * 64 + 5);
    for (const int32_t n : {1, 40, 130}) {
        set(2 * n, 2 * n);
        Rows r = rows();
        Tensor k(k_, 2 * n, kKvHeads, kDim), v(v_, 2 * n, kKvHeads, kDim), q(q_, 2 * n, kQHeads, kDim),
            out(2 * n, kQHeads, kDim);
        begin(plan_, {missing, seq_}, {n, n}, {n, n});
        enqueue(r);
        end(plan_);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        begin(cpu_plan_, {cpu_missing, cpu_seq_}, {n, n}, {n, n});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            append(cpu_plan_, layer, k, v);
            attend(cpu_plan_, layer, q, out);
        }
        end(cpu_plan_);
        const std::vector<float> got = r.out.get(), near = out.values();
        for (size_t i = 0; i < got.size(); ++i)
            ASSERT_NEAR(got[i], near[i], 0.03f + 0.03f * std::fabs(near[i])) << n << " " << i;
    }
}

TEST_F(GpuForget, GraphsOfWholeSequencesAreRefusedAndReadNothing) {
    make_sequences(10 * 64 + 20);
    step(1, 1);
    CapturedGraph graph, later;
    set(1, 1);
    Rows r = rows();
    const auto replay = [&](CapturedGraph& of) {
        r.k.set(k_), r.v.set(v_), r.q.set(q_);
        begin_on_gpu();
        if (!of) of.capture(stream, [&] { enqueue(r); });
        ASSERT_EQ(of.launch(stream), cudaSuccess);
        end(plan_);
        expect_as_on_cpu(r);
    };
    for (int i = 0; i < 5; ++i) set(1, 1), replay(graph);
    forget(64, 8 * 64);
    set(1, 1);
    begin_on_gpu();
    ASSERT_EQ(graph.launch(stream), cudaSuccess);
    ta_error err;
    EXPECT_EQ(ta_plan_end(plan_.get(), nullptr, &err), TA_E_STATE);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << "the graph has read what is not there";
    ASSERT_EQ(ta_plan_abort(plan_.get(), &err), TA_OK) << err.message;
    step(1, 1);
    for (int i = 0; i < 70; ++i) set(1, 1), replay(later);
    forget(64, 9 * 64);  // more of it
    for (int i = 0; i < 5; ++i) set(1, 1), replay(later);
}

}  // namespace
}  // namespace ta::testing
