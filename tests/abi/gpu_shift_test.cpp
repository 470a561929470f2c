// Context shift, and positions of queries, on a GPU.
#include "abi/shifted.h"
#include "support/gpu_rows.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using Texts = ShiftedTexts<DeviceRows, DeviceFloats>;
using Text = Texts::Text;

class GpuShift : public GpuTest {
  protected:
    // Prompts over sequences that lack blocks take the decode kernel.
    static std::vector<ShiftCase> cases() {
        std::vector<ShiftCase> all = shift_cases();
        std::erase_if(all, [](const ShiftCase& c) { return c.group > 16; });
        return all;
    }
};

TEST_F(GpuShift, AttentionIsThatOfTheTextWithoutWhatWasTakenOut) {
    for (const ShiftCase& c : cases()) {
        SCOPED_TRACE(c.name);
        Texts texts(gpu, c, stream);
        take_out_twice(texts, c);
        if (HasFatalFailure()) return;
    }
}

TEST_F(GpuShift, StepsOfAllKinds) {
    for (const ShiftCase& c : cases()) {
        SCOPED_TRACE(c.name);
        Texts texts(gpu, c, stream);
        texts.walk(std::hash<std::string>()(c.name) % 1000, 25);
        if (HasFatalFailure()) return;
    }
}

// Prompts over pages in host memory, which are staged.
TEST_F(GpuShift, PagesBelow) {
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{64} << 20;
    tiers.staging = TA_STAGING_ALWAYS;
    const ShiftCase c{"Bits4", 2, 2, 128, 4};
    Texts texts(gpu, c, stream, &tiers);
    Text t = texts.make_text(12 * 64 + 20);
    texts.shift(t, 128, 4 * 64);
    ta_error err;
    ta_ticket ticket = 0;
    for (const auto& [first, n] : {std::pair(1, 1), std::pair(6, 5)}) {
        require(ta_seq_move(texts.pool.get(), t.seq, uint64_t(first), uint64_t(n), TA_TIER_HOST, &ticket, &err), err);
        ASSERT_EQ(wait(texts.pool, ticket).state, TA_MOVE_DONE);
    }
    texts.step({{&t, 0, texts.last(t, 1)}});
    texts.step({{&t, 0, texts.last(t, 100)}});
    texts.step({{&t, 0, {700, 701, 450, 451, 452, 640}}}, true);
}

// A graph of an ordinary step is refused for others, and serves again.
TEST_F(GpuShift, GraphsOfOtherStepsAreRefused) {
    const ShiftCase c{"Halves"};
    Texts texts(gpu, c, stream);
    Text t = texts.make_text(300);
    const Text whole = texts.make_text(300);
    texts.step({{&t, 0, texts.last(t, 1)}});
    DeviceRows q(std::vector<float>(64, 0.5f), 1, 1, 64), out(1, 1, 64);
    CapturedGraph graph;
    ta_error err;
    const int32_t none = 0, one = 1;
    const int64_t last = 299;
    auto positions = sized<ta_step_options>();
    positions.query_positions = &last;
    const auto replay = [&](ta_seq seq, const ta_step_options* how) {
        require(ta_plan_begin(texts.plan.get(), 1, &seq, &none, &one, how, &err), err);
        if (!graph) {
            graph.capture(stream, [&] {
                for (uint32_t layer = 0; layer < Texts::kLayers; ++layer)
                    require(ta_attend(texts.plan.get(), layer, q.view(), out.view(), nullptr, nullptr, &err), err);
            });
        }
        EXPECT_EQ(graph.launch(stream), cudaSuccess);
        const ta_status status = ta_plan_end(texts.plan.get(), nullptr, &err);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        if (status != TA_OK) {
            EXPECT_EQ(ta_plan_abort(texts.plan.get(), nullptr), TA_OK);
        }
        return status;
    };
    EXPECT_EQ(replay(t.seq, nullptr), TA_OK) << err.message;
    EXPECT_EQ(replay(whole.seq, nullptr), TA_OK) << err.message;
    EXPECT_EQ(replay(whole.seq, &positions), TA_E_STATE);
    texts.shift(t, 64, 64);
    EXPECT_EQ(replay(t.seq, nullptr), TA_E_STATE);
    EXPECT_EQ(replay(whole.seq, nullptr), TA_OK) << err.message;
    texts.step({{&t, 0, texts.last(t, 1)}});
}

// Which keys a graph's queries see follows from where they stand.
TEST_F(GpuShift, CallsAreNotCaptured) {
    const ShiftCase c{"Halves"};
    Texts texts(gpu, c, stream);
    Text t = texts.make_text(300);
    texts.step({{&t, 0, texts.last(t, 1)}});
    texts.shift(t, 64, 64);
    const int32_t none = 0, one = 1;
    const int64_t last = 299;
    auto positions = sized<ta_step_options>();
    positions.query_positions = &last;
    const Text whole = texts.make_text(300);
    DeviceRows q(1, 1, 64), out(1, 1, 64);
    ta_error err;
    for (const bool with_positions : {false, true}) {
        const ta_step_options* const how = with_positions ? &positions : nullptr;
        const ta_seq seq = with_positions ? whole.seq : t.seq;
        require(ta_plan_begin(texts.plan.get(), 1, &seq, &none, &one, how, &err), err);
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
        EXPECT_EQ(ta_attend(texts.plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err), TA_E_UNSUPPORTED)
            << err.message;
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        cudaGraphDestroy(graph);
        require(ta_plan_abort(texts.plan.get(), &err), err);
    }
}

}  // namespace
}  // namespace ta::testing
