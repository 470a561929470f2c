// Drafts and token trees on a GPU: what stays is what a CPU stores, and queries see what they see there. The CPU's own judge is
// drafts_test.cpp.
#include <limits>

#include "abi/draft_steps.h"
#include "abi/gpu_twins.h"

namespace ta::testing {
namespace {

class GpuDrafts : public GpuTest {};

TEST_F(GpuDrafts, WhatStaysIsWhatACpuStores) {
    uint64_t seed = 1;
    for (const Shape& shape : kShapes) {
        Random random(++seed);
        Twins twins(gpu, cpu, shape, stream, seed);
        std::vector<size_t> members;
        std::vector<int32_t> starts;
        for (const int32_t n : {63, 64, 65, 130}) {
            members.push_back(twins.add());
            starts.push_back(n);
        }
        twins.step(members, starts, {1, 1, 1, 1}, kPrefillError);
        members.push_back(twins.add());
        members.push_back(twins.fork(members[3]));
        for (int round = 0; round < 8; ++round) {
            SCOPED_TRACE(::testing::Message()
                         << shape.bits << " bits, d " << shape.head_dim << ", group " << shape.group << ", round " << round);
            const bool trees = round % 2 == 0, few = round % 4 < 2;
            std::vector<int32_t> n_new, keep, parents;
            for (size_t i = 0; i < members.size(); ++i) {
                const bool chain = !trees || (!few && i == 0);
                const auto n = int32_t(few     ? random.between(1, std::max(1, 16 / shape.group))
                                       : chain ? random.between(65, 150)
                                               : random.between(1, 64));
                const std::vector<int32_t> parent = random_tree(random, n, chain ? 100 : 50);
                parents.insert(parents.end(), parent.begin(), parent.end());
                n_new.push_back(n);
                keep.push_back(int32_t(random.chance(20) ? 0 : random.between(0, n)));
            }
            auto how = sized<ta_step_options>();
            how.drafts = TA_ON;
            how.tree_parent = trees ? parents.data() : nullptr;
            auto rules = sized<ta_attend_options>();
            rules.window = round % 3 == 1 ? 5 : round % 3 == 2 ? 100 : 0;
            rules.softcap = round == 6 ? 20.0f : 0.0f;
            twins.step(members, n_new, n_new, few ? 2 * kDecodeError : kRunningError, &rules, &rules, &how, keep.data());
            if (HasFatalFailure()) return;
            twins.compare_pages();
            if (HasFatalFailure()) return;
        }
        ta_error err;
        for (const auto& s : twins.sequences) require(ta_seq_verify(twins.gpu_pool.get(), s.gpu, &err), err);
    }
}

// Layers again and in any order give the bits that they gave at first; values that are not finite count where they stay.
TEST_F(GpuDrafts, LayersInAnyOrderAndMarksOfWhatStays) {
    for (const uint32_t bits : {4u, 8u}) {
        const KvPool pool = make_pool(gpu, pool_options(3, 2, 128, bits));
        const Plan plan = make_plan(pool);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        const ta_seq seq = make_sequence(pool);
        const int32_t n = 150;
        Random random(5);
        const std::vector<float> values = random.normals(n * 2 * 128);
        DeviceTensor x(n, 2, 128, &values);
        require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), err);
        std::vector<std::vector<float>> first(3);
        const auto attend_to = [&](uint32_t layer) {
            DeviceTensor out(n, 2, 128);
            require(ta_attend(plan.get(), layer, x.view(), out.view(), nullptr, nullptr, &err), err);
            EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            return out.get();
        };
        for (uint32_t layer = 0; layer < 3; ++layer) {
            const std::vector<float> k = random.normals(n * 2 * 128), v = random.normals(n * 2 * 128);
            DeviceTensor gk(n, 2, 128, &k), gv(n, 2, 128, &v);
            require(ta_append(plan.get(), layer, gk.view(), gv.view(), &err), err);
            first[layer] = attend_to(layer);
        }
        for (const uint32_t layer : {0u, 2u, 1u, 0u})
            EXPECT_TRUE(same_bits(attend_to(layer), first[layer])) << "layer " << layer;
        require(ta_plan_end(plan.get(), nullptr, &err), err);
        // The last of four drafts is not finite.
        std::vector<float> bad = random.normals(4 * 2 * 128);
        bad.back() = std::numeric_limits<float>::quiet_NaN();
        DeviceTensor drafts(4, 2, 128, &bad);
        const int32_t four = 4;
        for (const int32_t keep : {3, 4}) {
            auto how = sized<ta_step_options>();
            how.drafts = TA_ON;
            require(ta_plan_begin(plan.get(), 1, &seq, &four, nullptr, &how, &err), err);
            for (uint32_t layer = 0; layer < 3; ++layer)
                require(ta_append(plan.get(), layer, drafts.view(), drafts.view(), &err), err);
            require(ta_plan_end(plan.get(), &keep, &err), err);
            EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        EXPECT_EQ(length(pool, seq), 157);
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &four, nullptr, nullptr, &err), TA_E_NONFINITE);
    }
}

// A graph of a verification: replayed with other trees, a chain among them, and other tokens that stay.
TEST_F(GpuDrafts, GraphsReplayWithOtherTrees) {
    constexpr uint32_t kKvHeads = 2, kDim = 128, kGroup = 2, kTokens = 6;
    const KvPool pool = make_pool(gpu, pool_options(kLayers, kKvHeads, kDim)),
                 twin = make_pool(gpu, pool_options(kLayers, kKvHeads, kDim));
    const Plan plan = make_plan(pool), twin_plan = make_plan(twin);
    ta_error err;
    for (const Plan* p : {&plan, &twin_plan}) require(ta_plan_set_stream(p->get(), stream, &err), err);
    const ta_seq a = make_sequence(pool), b = make_sequence(twin);
    DeviceTensor k(kTokens, kKvHeads, kDim), v(kTokens, kKvHeads, kDim), q(kTokens, kKvHeads * kGroup, kDim),
        out(kTokens, kKvHeads * kGroup, kDim), expected(kTokens, kKvHeads * kGroup, kDim);
    Random random(11);
    const auto calls = [&](const Plan& p, DeviceTensor& to) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(p.get(), layer, k.view(), v.view(), &err), err);
            require(ta_attend(p.get(), layer, q.view(), to.view(), nullptr, nullptr, &err), err);
        }
    };
    CapturedGraph graph;
    for (int round = 0; round < 60; ++round) {
        for (DeviceTensor* x : {&k, &v, &q}) {
            const std::vector<float> values = random.normals(kTokens * kDim * (x == &q ? kKvHeads * kGroup : kKvHeads));
            x->set(values);
        }
        const std::vector<int32_t> parent = random_tree(random, kTokens, round % 7 == 3 ? 100 : 50);
        const auto n = int32_t(kTokens), keep = int32_t(random.between(1, kTokens));
        auto how = sized<ta_step_options>();
        how.tree_parent = parent.data();
        require(ta_plan_begin(plan.get(), 1, &a, &n, nullptr, &how, &err), err);
        require(ta_plan_begin(twin_plan.get(), 1, &b, &n, nullptr, &how, &err), err);
        calls(twin_plan, expected);
        if (round < 2) {
            calls(plan, out);
        } else {
            if (!graph) graph.capture(stream, [&] { calls(plan, out); });
            ASSERT_EQ(graph.launch(stream), cudaSuccess);
        }
        require(ta_plan_end(plan.get(), &keep, &err), err);
        require(ta_plan_end(twin_plan.get(), &keep, &err), err);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        const std::vector<float> got = out.get(), right = expected.get();
        double error = 0.0, norm = 0.0;
        for (size_t i = 0; i < got.size(); ++i) error += std::pow(got[i] - right[i], 2), norm += std::pow(right[i], 2);
        ASSERT_LE(std::sqrt(error), 2 * kDecodeError * std::sqrt(norm)) << "round " << round;
        ASSERT_EQ(length(pool, a), length(twin, b));
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            ASSERT_TRUE(dequantize(pool, a, layer, 0, length(pool, a), kKvHeads * kDim) ==
                        dequantize(twin, b, layer, 0, length(pool, a), kKvHeads * kDim))
                << "round " << round;
        }
    }
}

// The decode kernel alone knows trees that branch, up to 16 rows at a time.
TEST_F(GpuDrafts, TreesOfManyQueryHeadsAreRefused) {
    constexpr uint32_t kDim = 64, kTokens = 3;
    const KvPool pool = make_pool(gpu, pool_options(1, 1, kDim));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    const int32_t branches[] = {-1, 0, 0}, chain[] = {-1, 0, 1}, n = int32_t(kTokens);
    for (const int32_t* parents : {branches, chain}) {
        for (const uint32_t group : {16u, 17u, 128u}) {
            auto how = sized<ta_step_options>();
            how.tree_parent = parents;
            DeviceTensor k(kTokens, 1, kDim), v(kTokens, 1, kDim), q(kTokens, group, kDim), out(kTokens, group, kDim);
            ta_error err;
            require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, &how, &err), err);
            require(ta_append(plan.get(), 0, k.view(), v.view(), &err), err);
            EXPECT_EQ(ta_attend(plan.get(), 0, q.view(), out.view(), nullptr, nullptr, &err),
                      parents == branches && group > 16 ? TA_E_UNSUPPORTED : TA_OK)
                << group;
            require(ta_plan_abort(plan.get(), &err), err);
        }
    }
}

}  // namespace
}  // namespace ta::testing
