// turboattention.hpp on a GPU: views of device memory, a stream, what is refused. Skipped where there is no GPU.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>

#include "hpp_steps.h"

namespace hpp_tests {
namespace {

constexpr uint32_t kLayers = 2, kHeads = 2, kQHeads = 8, kDim = 128;
constexpr int64_t kTokens = 300;

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// Device memory with the elements of x.
template <class T>
class Device {
  public:
    explicit Device(const std::vector<T>& x) : n_(x.size()) {
        check(cudaMalloc(&data_, n_ * sizeof(T)));
        check(cudaMemcpy(data_, x.data(), n_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    ~Device() { cudaFree(data_); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    T* data() const { return static_cast<T*>(data_); }
    std::vector<T> host() const {
        std::vector<T> x(n_);
        check(cudaMemcpy(x.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return x;
    }

  private:
    void* data_ = nullptr;
    size_t n_;
};

const std::vector<float> q = numbers(kTokens * kQHeads * kDim, 1), k = numbers(kTokens * kHeads * kDim, 2),
                         v = numbers(kTokens * kHeads * kDim, 3);

// The prompt, then 5 tokens one at a time; out and lse get the last step.
void decode(const ta::Plan& plan, const ta::Sequence& seq, const float* q_at, const float* k_at, const float* v_at, float* out,
            float* lse) {
    for (int i = 0; i < 6; ++i) {
        const int32_t n = i ? 1 : int32_t{kTokens};
        auto step = plan.begin(seq, n);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            step.append(layer, ta::View(k_at, n, kHeads, kDim), ta::View(v_at, n, kHeads, kDim));
            step.attend(layer, ta::View(q_at, n, kQHeads, kDim), ta::View(out, n, kQHeads, kDim), lse);
        }
        step.end();
    }
}

class HppGpu : public ::testing::Test {
  protected:
    void SetUp() override {
        int gpus = 0;
        if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
    }
    static ta::Pool make_pool(ta_device_kind device) {
        return ta::Context::create({.device = device})
            .create_pool({.layers = kLayers, .kv_heads = kHeads, .head_dim = kDim, .bits = 4, .budget_bytes = 64 << 20});
    }
};

TEST_F(HppGpu, StepsOnAStreamGiveWhatACpuGives) {
    const auto cpu = make_pool(TA_DEVICE_CPU), gpu = make_pool(TA_DEVICE_CUDA);
    std::vector<float> want(q.size()), want_lse(kTokens * kQHeads);
    decode(cpu.create_plan(), cpu.create_sequence(), q.data(), k.data(), v.data(), want.data(), want_lse.data());

    const Device<float> dq(q), dk(k), dv(v), out(std::vector<float>(q.size())), lse(std::vector<float>(kTokens * kQHeads));
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    {
        const auto plan = gpu.create_plan();
        plan.set_stream(stream);
        const auto seq = gpu.create_sequence();
        decode(plan, seq, dq.data(), dk.data(), dv.data(), out.data(), lse.data());
        check(cudaStreamSynchronize(stream));
        EXPECT_EQ(seq.length(), kTokens + 5);
        seq.verify();
    }
    check(cudaStreamDestroy(stream));
    const auto got = out.host(), got_lse = lse.host();
    double difference = 0, norm = 0;
    for (size_t i = 0; i < kQHeads * kDim; ++i) {
        difference += std::pow(got[i] - want[i], 2);
        norm += std::pow(want[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 0.01);
    for (size_t i = 0; i < kQHeads; ++i) EXPECT_NEAR(got_lse[i], want_lse[i], 0.01);
}

TEST_F(HppGpu, HostMemoryIsRefused) {
    const auto pool = make_pool(TA_DEVICE_CUDA);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    const Device<float> dq(q), dk(k), out(std::vector<float>(q.size()));
    const ta::View host(k.data(), 1, kHeads, kDim), device(static_cast<const float*>(dk.data()), 1, kHeads, kDim);
    const ta::View query(static_cast<const float*>(dq.data()), 1, kQHeads, kDim);
    {
        auto step = plan.begin(seq, 1);
        EXPECT_EQ(status_of([&] { step.append(0, host, device); }), TA_E_INVALID);
        EXPECT_EQ(status_of([&] { plan.set_stream(nullptr); }), TA_E_STATE);  // a step is open
        step.append(0, device, device);
        std::vector<float> to(q.size());
        EXPECT_EQ(status_of([&] { step.attend(0, query, ta::View(to.data(), 1, kQHeads, kDim)); }), TA_E_INVALID);
        step.attend(0, query, ta::View(out.data(), 1, kQHeads, kDim));
        step.append(1, device, device);
        step.end();
    }
    EXPECT_EQ(seq.length(), 1);
    check(cudaDeviceSynchronize());
    EXPECT_EQ(status_of([] { ta::Context::create({.device = TA_DEVICE_CUDA, .device_ordinal = 99}); }), TA_E_INVALID);
}

// Calls of a GPU cannot wait for what they find: the next call of the host says it.
TEST_F(HppGpu, NanIsReportedByALaterCall) {
    const auto pool = make_pool(TA_DEVICE_CUDA);
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    auto bad = k;
    bad[kDim] = NAN;
    const Device<float> dk(bad);
    const ta::View device(static_cast<const float*>(dk.data()), 1, kHeads, kDim);
    auto step = plan.begin(seq, 1);
    for (uint32_t layer = 0; layer < kLayers; ++layer) step.append(layer, device, device);
    step.end();
    check(cudaDeviceSynchronize());
    EXPECT_EQ(status_of([&] { plan.begin(seq, 1); }), TA_E_NONFINITE);
}

TEST_F(HppGpu, DenseOnDeviceMemory) {
    const auto cpu = ta::Context::create(), gpu = ta::Context::create({.device = TA_DEVICE_CUDA});
    std::vector<float> want(q.size());
    const auto attend = [](const ta::Context& context, const float* q_at, const float* k_at, const float* v_at, float* out) {
        context.attend_dense(ta::View(q_at, kTokens, kQHeads, kDim), ta::View(k_at, kTokens, kHeads, kDim),
                             ta::View(v_at, kTokens, kHeads, kDim), ta::View(out, kTokens, kQHeads, kDim));
    };
    attend(cpu, q.data(), k.data(), v.data(), want.data());
    const Device<float> dq(q), dk(k), dv(v), out(std::vector<float>(q.size()));
    attend(gpu, dq.data(), dk.data(), dv.data(), out.data());
    const auto got = out.host();  // waits: the legacy default stream
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        difference += std::pow(got[i] - want[i], 2);
        norm += std::pow(want[i], 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), 0.01);
}

}  // namespace
}  // namespace hpp_tests
