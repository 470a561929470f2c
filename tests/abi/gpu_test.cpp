// A GPU context beside a CPU context through the same calls: the same bytes in the pages, the same results within rounding, and
// what only a GPU has: streams, graphs, device memory. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "abi/gpu_twins.h"

namespace ta::testing {
namespace {

class Gpu : public GpuTest {};

TEST_F(Gpu, AppendDecodeAndPrefillAsOnACpu) {
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, d " + std::to_string(shape.head_dim) + ", group " +
                     std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 7);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {200, 1, 64}, {200, 1, 64}, kPrefillError);
        for (int i = 0; i < 3; ++i) twins.step({a, b, c}, {1, 1, 1}, {1, 1, 1}, kDecodeError);
        twins.step({c, a}, {130, 1}, {130, 1}, kPrefillError);
        twins.step({b},
                   {
                       63,
                   },
                   {1}, kDecodeError);
        twins.step({a, b, c}, {0, 1, 0}, {1, 0, 1}, kDecodeError);
        twins.compare_pages();
        if (HasFatalFailure()) return;
    }
}

TEST_F(Gpu, ForksTruncationsAndReopenedBlocks) {
    Twins twins(gpu, cpu, kShapes[0], stream, 11);
    const size_t a = twins.add();
    twins.step({a}, {300}, {1}, kDecodeError);
    const size_t b = twins.fork(a);
    twins.step({a, b}, {5, 30}, {1, 1}, kDecodeError);
    twins.truncate(a, 150);
    twins.truncate(b, 10);
    twins.step({b, a}, {1, 100}, {1, 1}, kDecodeError);
    twins.compare_pages();
}

// Its open pages are scaled by what the sequence has seen so far, which an abort and a truncation must not disturb.
TEST_F(Gpu, ProfilePaperKeepsItsUniversalScales) {
    constexpr double kPaperError = 3e-3;  // 119 levels of P: now and then one is rounded the other way
    auto numerics = sized<ta_numerics>();
    numerics.profile = TA_PROFILE_PAPER;
    for (const Shape& shape : {kShapes[0], kShapes[1], kShapes[3]}) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, group " + std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 23, &numerics);
        const size_t a = twins.add(), b = twins.add();
        twins.step({a, b}, {200, 3}, {1, 1}, kPaperError);
        const int64_t heads = shape.kv_heads, d = shape.head_dim;
        const std::vector<float> large(size_t(70 * heads * d), 50.0f);
        const DeviceTensor k(70, heads, d, &large), v(70, heads, d, &large);
        begin(twins.gpu_plan, {twins.sequences[a].gpu}, {70});
        ta_error err;
        for (uint32_t layer = 0; layer < kLayers; ++layer)
            require(ta_append(twins.gpu_plan.get(), layer, k.view(), v.view(), &err), err);
        require(ta_plan_abort(twins.gpu_plan.get(), &err), err);
        const size_t c = twins.fork(a);
        for (int i = 0; i < 3; ++i) twins.step({a, b, c}, {1, 30, 5}, {1, 1, 1}, kPaperError);
        twins.truncate(a, 130);
        twins.step({c, a}, {1, 70}, {1, 1}, kPaperError);
        twins.step({b}, {0}, {1}, kPaperError);
        twins.compare_pages();
        auto on_gpu = sized<ta_kv_pool_stats>(), on_cpu = on_gpu;
        require(ta_kv_pool_get_stats(twins.gpu_pool.get(), &on_gpu, &err), err);
        require(ta_kv_pool_get_stats(twins.cpu_pool.get(), &on_cpu, &err), err);
        EXPECT_GE(on_gpu.clamped_values, on_cpu.clamped_values);  // the aborted step's too
        EXPECT_GT(on_cpu.clamped_values, 0u);
        if (HasFatalFailure()) return;
    }
}

TEST_F(Gpu, OptionsOfAttend) {
    Twins twins(gpu, cpu, kShapes[0], stream, 13);
    const size_t a = twins.add();
    twins.step({a}, {400}, {1}, kDecodeError);
    const std::vector<float> slopes(8, 0.01f), sinks(8, 2.0f);
    float* arrays = nullptr;
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&arrays), 64), cudaSuccess);
    cudaMemcpy(arrays, slopes.data(), 32, cudaMemcpyHostToDevice);
    cudaMemcpy(arrays + 8, sinks.data(), 32, cudaMemcpyHostToDevice);
    for (int n_query : {1, 3, 40}) {
        for (int which = 0; which < 6; ++which) {
            auto options = sized<ta_attend_options>();
            auto on_gpu = options;
            if (which == 0) options.window = 100;
            if (which == 1) options.softcap = 5.0f;
            if (which == 2) options.exp = TA_EXP_EXACT;
            if (which == 3) options.mask = TA_MASK_FULL;
            if (which == 4) options.scale = 0.3f;
            on_gpu = options;
            if (which == 5) {
                options.alibi_slopes = slopes.data();
                options.sinks = sinks.data();
                on_gpu.alibi_slopes = arrays;
                on_gpu.sinks = arrays + 8;
            }
            SCOPED_TRACE(std::to_string(n_query) + " queries, options " + std::to_string(which));
            twins.step({a}, {0}, {n_query}, n_query * 4 <= 16 ? kDecodeError : kPrefillError, &options, &on_gpu);
        }
    }
    cudaFree(arrays);
}

// More query rows than the decode kernel takes at once, each chunk of them somewhere among the keys: P of 16 bits goes that
// way.
TEST_F(Gpu, FullMasksWithWindowsAndAlibiInChunks) {
    for (const Shape& shape : {kShapes[0], kShapes[3], kShapes[5], kShapes[6], kShapes[7]}) {
        SCOPED_TRACE("d " + std::to_string(shape.head_dim) + ", group " + std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 31);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {900, 333, 40}, {1, 1, 1}, kDecodeError);
        const size_t heads = size_t(shape.kv_heads * shape.group);
        std::vector<float> slopes(heads);
        for (size_t h = 0; h < heads; ++h) slopes[h] = 0.01f * float(h + 1);
        void* memory = nullptr;
        ASSERT_EQ(cudaMalloc(&memory, heads * sizeof(float)), cudaSuccess);
        const std::unique_ptr<void, FreeDevice> owner(memory);
        ASSERT_EQ(cudaMemcpy(memory, slopes.data(), heads * sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
        for (const int64_t window : {0, 1, 30, 64, 65, 200, 5000}) {
            for (const bool alibi : {false, true}) {
                SCOPED_TRACE("window " + std::to_string(window) + (alibi ? ", ALiBi" : ""));
                auto options = sized<ta_attend_options>();
                options.mask = TA_MASK_FULL;
                options.window = window;
                options.p = TA_P_U16;
                auto on_gpu = options;
                if (alibi) {
                    options.alibi_slopes = slopes.data();
                    on_gpu.alibi_slopes = static_cast<const float*>(memory);
                }
                twins.step({a, b, c}, {1, 0, 0}, {300, 333, 1}, kDecodeError, &options, &on_gpu);
                twins.step({c, a}, {0, 0}, {37, 17}, kDecodeError, &options, &on_gpu);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(Gpu, PrefillInUnitsOfTheRunningMaximum) {
    auto options = sized<ta_attend_options>();
    options.p = TA_P_U8_RUNNING;
    for (const Shape& shape : kShapes) {
        SCOPED_TRACE(std::to_string(shape.bits) + " bits, d " + std::to_string(shape.head_dim) + ", group " +
                     std::to_string(shape.group));
        Twins twins(gpu, cpu, shape, stream, 7);
        const size_t a = twins.add(), b = twins.add(), c = twins.add();
        twins.step({a, b, c}, {700, 65, 128}, {700, 65, 128}, kRunningError, &options);
        twins.step({c, a, b}, {130, 63, 1}, {130, 63, 1}, kRunningError, &options);
        if (HasFatalFailure()) return;
    }
}

// The natural way out of a captured call that is refused.
TEST_F(Gpu, AStepDoesNotEndWithinACapture) {
    Twins twins(gpu, cpu, kShapes[0], stream, 23);
    const size_t a = twins.add(), b = twins.add();
    const ta_seq on_gpu = twins.sequences[a].gpu;
    twins.step({a, b}, {70, 1}, {1, 1}, kDecodeError);
    Plan other = make_plan(twins.gpu_pool);
    begin(twins.gpu_plan, {on_gpu}, {0}, {1});
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(ta_plan_end(twins.gpu_plan.get(), nullptr, nullptr), TA_E_STATE);
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_E_STATE);
    EXPECT_EQ(ta_plan_set_stream(other.get(), stream, nullptr), TA_OK);  // it has no earlier steps
    EXPECT_EQ(ta_plan_begin(other.get(), 1, &twins.sequences[b].gpu, nullptr, nullptr, nullptr, nullptr), TA_E_STATE);
    other.reset();
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
    twins.step({a}, {70}, {1}, kDecodeError);
    twins.compare_pages();
}

// Nothing can be enqueued on the legacy default stream while a stream that synchronizes with it is captured.
TEST_F(Gpu, AStepOfTheLegacyStreamBesideACapture) {
    const KvPool pool = make_pool(gpu, pool_options(1, 1, 64, 4));
    const Plan plan = make_plan(pool);
    const ta_seq seq = make_sequence(pool);
    const std::vector<float> zeros(64, 0.0f);
    const DeviceTensor kv(1, 1, 64, &zeros);
    ta_error err;
    begin(plan, {seq}, {1});
    require(ta_append(plan.get(), 0, kv.view(), kv.view(), &err), err);
    cudaStream_t blocking = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeRelaxed), cudaSuccess);
    EXPECT_EQ(ta_plan_end(plan.get(), nullptr, &err), TA_E_STATE) << err.message;
    EXPECT_EQ(ta_plan_abort(plan.get(), &err), TA_E_STATE) << err.message;
    EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaSuccess);
    EXPECT_EQ(ta_plan_end(plan.get(), nullptr, &err), TA_OK) << err.message;
    EXPECT_EQ(length(pool, seq), 1);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(blocking);
}

TEST_F(Gpu, WrongMemoryAndNonFiniteValues) {
    const Shape shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 19);
    const ta_seq s = make_sequence(twins.gpu_pool);
    std::vector<float> host(size_t(2 * 128));
    auto view = sized<ta_tensor>();
    view.dtype = TA_DTYPE_F16;
    view.data = host.data();
    view.tokens = 1;
    view.heads = shape.kv_heads;
    view.head_dim = shape.head_dim;
    begin(twins.gpu_plan, {s}, {1});
    ta_error err;
    EXPECT_EQ(ta_append(twins.gpu_plan.get(), 0, &view, &view, &err), TA_E_INVALID) << err.message;
    EXPECT_EQ(err.argument, 2);
    std::vector<float> values(2 * 128, 1.0f);
    values[3] = NAN;
    DeviceTensor k(1, 2, 128, &values);
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
        require(ta_append(twins.gpu_plan.get(), layer, k.view(), k.view(), &err), err);
    }
    end(twins.gpu_plan);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    const int32_t one = 1;
    EXPECT_EQ(ta_plan_begin(twins.gpu_plan.get(), 1, &s, &one, nullptr, nullptr, &err), TA_E_NONFINITE) << err.message;
    EXPECT_EQ(err.sequence, 0);
    EXPECT_EQ(ta_plan_begin(twins.gpu_plan.get(), 1, &s, &one, nullptr, nullptr, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
}

TEST_F(Gpu, PlansOnTwoStreamsShareAPool) {
    const Shape shape = kShapes[0];
    Twins twins(gpu, cpu, shape, stream, 23);
    cudaStream_t other = nullptr;
    ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    Plan second = make_plan(twins.gpu_pool);
    ta_error err;
    require(ta_plan_set_stream(second.get(), other, &err), err);
    // One plan's sequence frees blocks that the other's takes while the first may still read them.
    for (int round = 0; round < 20; ++round) {
        const size_t a = twins.add();
        twins.step({a}, {200}, {1}, kDecodeError);
        ta_seq s = make_sequence(twins.gpu_pool);
        Random random(uint64_t(round) + 1);
        const std::vector<float> kv = random.normals(300 * 2 * 128);
        DeviceTensor k(300, 2, 128, &kv);
        begin(second, {s}, {300});
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            require(ta_append(second.get(), layer, k.view(), k.view(), &err), err);
        }
        end(second);
        require(ta_seq_release(twins.gpu_pool.get(), s, &err), err);
        twins.step({a}, {70}, {1}, kDecodeError);
    }
    twins.compare_pages();
    second.reset();
    cudaStreamDestroy(other);
}

// The same map and priorities as on a CPU, from rows that lie in any order; what is refused changes nothing.
TEST_F(Gpu, ACalibratorLooksAtDeviceMemory) {
    constexpr int64_t kTokens = 37, kHeads = 5, kDim = 96;
    std::vector<uint16_t> values(size_t(3 * kTokens * kHeads * kDim));
    const std::vector<float> normals = Random(31).normals(int64_t(values.size()));
    for (size_t i = 0; i < values.size(); ++i) values[i] = float_to_f16(normals[i]);
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 2 * values.size()), cudaSuccess);
    const std::unique_ptr<void, FreeDevice> owner(memory);
    const auto copy = [&] {
        ASSERT_EQ(cudaMemcpy(memory, values.data(), 2 * values.size(), cudaMemcpyHostToDevice), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    };
    copy();
    Calibrator calibrators[2];
    for (int i = 0; i < 2; ++i) {
        ta_calibrator* c = nullptr;
        ta_error err;
        require(ta_calibrator_create((i ? gpu : cpu).get(), 1, kHeads, kDim, &c, &err), err);
        calibrators[i].reset(c);
    }
    const auto observe = [&](int on, int64_t first, int64_t tokens, int64_t stride_token, int64_t stride_head) {
        auto t = sized<ta_tensor>();
        t.dtype = TA_DTYPE_F16;
        t.data = static_cast<uint16_t*>(on ? memory : values.data()) + first;
        t.tokens = tokens;
        t.heads = kHeads;
        t.head_dim = kDim;
        t.stride_token = stride_token;
        t.stride_head = stride_head;
        ta_error err;
        return ta_calibrator_observe(calibrators[on].get(), 0, &t, &t, &err);
    };
    const auto expect_equal = [&](uint32_t n_low) {
        uint8_t bits[2][2][kHeads];
        float priority[2][2][kHeads];
        for (int i = 0; i < 2; ++i) {
            ta_error err;
            require(
                ta_calibrator_finish(calibrators[i].get(), n_low, bits[i][0], bits[i][1], priority[i][0], priority[i][1], &err),
                err);
        }
        EXPECT_EQ(std::memcmp(bits[0], bits[1], sizeof bits[0]), 0);
        EXPECT_EQ(std::memcmp(priority[0], priority[1], sizeof priority[0]), 0);
    };
    const int64_t row = kHeads * kDim;
    const struct {
        int64_t first, tokens, stride_token, stride_head;
    } views[] = {{0, kTokens, 0, 0},
                 {row, kTokens, 3 * row, kDim},               // the middle of three interleaved tensors
                 {0, kTokens, kDim, kTokens * kDim},          // head by head
                 {(kTokens - 1) * row, kTokens, -row, kDim},  // the last token first
                 {(kHeads - 1) * kTokens * kDim, kTokens, kDim, -kTokens * kDim},
                 {7, 1, 0, 0},
                 {0, kTokens, kDim, kDim}};  // rows that share memory
    for (const auto& v : views) {
        for (int on = 0; on < 2; ++on) ASSERT_EQ(observe(on, v.first, v.tokens, v.stride_token, v.stride_head), TA_OK);
        expect_equal(2);
    }
    values[size_t(5 * row + 3)] = 0x7E00;  // NaN
    copy();
    for (int on = 0; on < 2; ++on) EXPECT_EQ(observe(on, 0, kTokens, 0, 0), TA_E_NONFINITE);
    expect_equal(3);
}

TEST_F(Gpu, TheCallersDeviceAndErrorsStay) {
    EXPECT_NE(cudaMemcpy(nullptr, nullptr, 16, cudaMemcpyDeviceToDevice), cudaSuccess);  // an error of the embedder's
    const cudaError_t before = cudaPeekAtLastError();
    Twins twins(gpu, cpu, kShapes[0], stream, 29);
    const size_t a = twins.add();
    begin(twins.gpu_plan, {twins.sequences[a].gpu}, {1});
    EXPECT_EQ(ta_plan_abort(twins.gpu_plan.get(), nullptr), TA_OK);
    EXPECT_EQ(cudaPeekAtLastError(), before);
    (void)cudaGetLastError();
}

}  // namespace
}  // namespace ta::testing
