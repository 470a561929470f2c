// Shared by tests of a GPU through the ABI: a fixture that is skipped where there is none, and tensors in its memory.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "support/handles.h"
#include "support/numbers.h"

namespace ta::testing {

struct FreeDevice {
    void operator()(void* p) const { cudaFree(p); }
};

// A GPU context, a CPU context beside it, and a stream.
class GpuTest : public ::testing::Test {
  protected:
    void SetUp() override {
        int n = 0;
        if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
            GTEST_SKIP() << "no GPU: NOTHING OF THE CUDA BACKEND IS TESTED HERE";
        auto options = sized<ta_context_options>();
        options.device = TA_DEVICE_CUDA;
        gpu = make_context(options);
        cpu = make_context(0);
        ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    }
    void TearDown() override {
        if (IsSkipped()) return;
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        if (stream) cudaStreamDestroy(stream);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }

    Context gpu, cpu;
    cudaStream_t stream = nullptr;
};

// F16 rows [tokens, heads, d] on the device, or outputs to be.
class DeviceTensor {
  public:
    DeviceTensor(int64_t tokens, int64_t heads, int64_t d, const std::vector<float>* values = nullptr)
        : n_(size_t(tokens * heads * d)) {
        void* p = nullptr;
        EXPECT_EQ(cudaMalloc(&p, std::max<size_t>(2 * n_, 16)), cudaSuccess);
        data_.reset(p);
        view_ = sized<ta_tensor>();
        view_.dtype = TA_DTYPE_F16;
        view_.data = p;
        view_.tokens = tokens;
        view_.heads = heads;
        view_.head_dim = d;
        if (values) set(*values);
        if (!values) cudaMemset(p, 0xFF, 2 * n_), cudaStreamSynchronize(nullptr);
    }
    void set(const std::vector<float>& values) {
        std::vector<uint16_t> half(values.size());
        for (size_t i = 0; i < values.size(); ++i) half[i] = float_to_f16(values[i]);
        EXPECT_EQ(cudaMemcpy(data_.get(), half.data(), 2 * half.size(), cudaMemcpyHostToDevice), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // cudaMemcpy from pageable memory returns earlier
    }
    std::vector<float> get() const {
        std::vector<uint16_t> half(n_);
        EXPECT_EQ(cudaMemcpy(half.data(), data_.get(), 2 * n_, cudaMemcpyDeviceToHost), cudaSuccess);
        std::vector<float> values(n_);
        for (size_t i = 0; i < n_; ++i) values[i] = f16_to_float(half[i]);
        return values;
    }
    const ta_tensor* view() const { return &view_; }

  private:
    size_t n_;
    std::unique_ptr<void, FreeDevice> data_;
    ta_tensor view_;
};

// A graph of the work that calls enqueue on a stream, to be launched there again.
class CapturedGraph {
  public:
    CapturedGraph() = default;
    ~CapturedGraph() {
        if (exec_) cudaGraphExecDestroy(exec_);
    }
    CapturedGraph(const CapturedGraph&) = delete;
    CapturedGraph& operator=(const CapturedGraph&) = delete;

    explicit operator bool() const { return exec_ != nullptr; }
    template <typename Calls>
    void capture(cudaStream_t stream, Calls&& calls) {
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        calls();
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
        cudaGraphDestroy(graph);
    }
    cudaError_t launch(cudaStream_t stream) const { return cudaGraphLaunch(exec_, stream); }

  private:
    cudaGraphExec_t exec_ = nullptr;
};

using DeviceMemory = std::unique_ptr<void, FreeDevice>;

inline DeviceMemory to_device(const void* from, size_t bytes) {
    void* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, std::max<size_t>(bytes, 16)), cudaSuccess);
    DeviceMemory memory(p);
    EXPECT_EQ(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);  // cudaMemcpy from pageable memory returns earlier
    return memory;
}

// The bytes of a host tensor, gaps included, in device memory.
class DeviceCopy {
  public:
    explicit DeviceCopy(Tensor& host) : view_(*host.view()), host_(static_cast<uint8_t*>(view_.data)) {
        const int64_t size = int64_t(dtype_bytes(view_.dtype));
        const auto stride = [&](int64_t given, int64_t usual) { return (given ? given : usual) * size; };
        const int64_t reach[] = {(view_.tokens - 1) * stride(view_.stride_token, view_.heads * view_.head_dim),
                                 (view_.heads - 1) * stride(view_.stride_head, view_.head_dim)};
        int64_t high = view_.head_dim * size;
        for (int64_t r : reach) (r < 0 ? low_ : high) += r;
        bytes_ = view_.tokens > 0 ? size_t(high - low_) : 0;
        if (bytes_ == 0) return;  // of no tokens: any pointer will do
        memory_ = to_device(host_ + low_, bytes_);
        view_.data = static_cast<uint8_t*>(memory_.get()) - low_;
    }
    const ta_tensor* view() const { return &view_; }
    void fetch() const { EXPECT_EQ(cudaMemcpy(host_ + low_, memory_.get(), bytes_, cudaMemcpyDeviceToHost), cudaSuccess); }

  private:
    ta_tensor view_;
    uint8_t* host_;
    int64_t low_ = 0;
    size_t bytes_ = 0;
    DeviceMemory memory_;
};

}  // namespace ta::testing
