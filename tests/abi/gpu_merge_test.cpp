// ta_merge_states on a GPU: the bits of a CPU. Skipped where there is no GPU.
#include <bit>

#include "abi/merge_problem.h"
#include "support/gpu.h"

namespace ta::testing {
namespace {

std::vector<uint32_t> bits_of(const std::vector<float>& x) {
    std::vector<uint32_t> bits;
    for (const float v : x) bits.push_back(std::bit_cast<uint32_t>(v));
    return bits;
}

// A problem in device memory.
class DeviceProblem {
  public:
    explicit DeviceProblem(MergeProblem& p) : p_(p) {
        for (Tensor& part : p.parts) tensors_.emplace_back(part);
        for (const DeviceCopy& t : tensors_) parts.push_back(*t.view());
        for (const auto& lse : p.lses) {
            memory_.push_back(to_device(lse.data(), lse.size() * sizeof(float)));
            lses.push_back(static_cast<float*>(memory_.back().get()));
        }
    }
    ta_status merge(const Context& gpu, const ta_tensor* out, float* lse, cudaStream_t stream, ta_error* err) const {
        return ta_merge_states(gpu.get(), p_.s.n, parts.data(), lses.data(), out, lse, stream, err);
    }

    std::vector<ta_tensor> parts;
    std::vector<const float*> lses;

  private:
    MergeProblem& p_;
    std::vector<DeviceCopy> tensors_;
    std::vector<DeviceMemory> memory_;
};

class GpuMerge : public GpuTest {
  protected:
    std::vector<float> fetch(const float* device, size_t n) {
        std::vector<float> x(n);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(x.data(), device, n * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
        return x;
    }
    // The GPU's `out` and `lse` are those of the CPU.
    void expect_twin(MergeProblem& p, Tensor& out, const DeviceCopy& device_out, const float* lse) {
        Tensor expected(p.s.tokens, p.s.heads, p.s.head_dim, out.view()->dtype);
        std::vector<float> expected_lse(size_t(p.rows()));
        ta_error err;
        require(p.merge(cpu, expected, expected_lse.data(), &err), err);
        const std::vector<float> got_lse = fetch(lse, expected_lse.size());
        if (p.rows() > 0) device_out.fetch();
        ASSERT_EQ(bits_of(out.values()), bits_of(expected.values()));
        ASSERT_EQ(bits_of(got_lse), bits_of(expected_lse));
        EXPECT_TRUE(out.gaps_poison());
    }
    void compare(const MergeShape& shape, uint64_t seed) {
        SCOPED_TRACE(::testing::Message() << shape.n << " parts of [" << shape.tokens << ", " << shape.heads << ", "
                                          << shape.head_dim << "], seed " << seed);
        MergeProblem p(shape, seed);
        const DeviceProblem device(p);
        Tensor out = p.random_tensor();
        const DeviceCopy device_out(out);
        const std::vector<float> nothing(size_t(p.rows()), -777.0f);
        const DeviceMemory lse = to_device(nothing.data(), nothing.size() * sizeof(float));
        ta_error err;
        ASSERT_EQ(device.merge(gpu, device_out.view(), static_cast<float*>(lse.get()), stream, &err), TA_OK) << err.message;
        expect_twin(p, out, device_out, static_cast<const float*>(lse.get()));
    }
};

// The first call of the process is captured, and the graph replayed with other data at the same addresses.
TEST_F(GpuMerge, Captured) {
    MergeProblem p({3, 40, 4, 128}, 1), later({3, 40, 4, 128}, 2);
    for (MergeProblem* of : {&p, &later}) {
        for (Tensor& part : of->parts) part = Tensor(part.values(), 40, 4, 128, TA_DTYPE_F16);
    }
    const DeviceProblem device(p), other(later);
    Tensor out(40, 4, 128);
    const DeviceCopy device_out(out);
    const std::vector<float> nothing(160, -777.0f);
    const DeviceMemory lse = to_device(nothing.data(), nothing.size() * sizeof(float));
    auto* const to = static_cast<float*>(lse.get());
    CapturedGraph graph;
    graph.capture(stream, [&] {
        ta_error err;
        EXPECT_EQ(device.merge(gpu, device_out.view(), to, stream, &err), TA_OK) << err.message;
    });
    ASSERT_TRUE(graph);
    EXPECT_EQ(fetch(to, 160), nothing) << "a captured call has run";
    ASSERT_EQ(graph.launch(stream), cudaSuccess);
    expect_twin(p, out, device_out, to);
    for (uint32_t i = 0; i < p.s.n; ++i) {
        ASSERT_EQ(cudaMemcpy(device.parts[i].data, other.parts[i].data, 160 * 128 * 2, cudaMemcpyDeviceToDevice), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(const_cast<float*>(device.lses[i]), other.lses[i], 160 * sizeof(float), cudaMemcpyDeviceToDevice),
                  cudaSuccess);
    }
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(graph.launch(stream), cudaSuccess);
    expect_twin(later, out, device_out, to);
}

TEST_F(GpuMerge, HasTheBitsOfACpu) {
    for (const MergeShape& shape : kMergeShapes) {
        for (uint64_t seed = 0; seed < 8; ++seed) {
            compare(shape, seed);
            if (HasFatalFailure()) return;
        }
    }
}

// More tiles than a launch has CTAs.
TEST_F(GpuMerge, ManyRows) {
    compare({2, (1 << 20) + 77, 1, 8}, 1);
}

TEST_F(GpuMerge, InPlaceOfAnyPart) {
    for (const MergeShape& shape : kMergeShapes) {
        for (uint32_t place = 0; place < shape.n && shape.tokens > 0; ++place) {
            MergeProblem p(shape, 5), own = p;
            DeviceProblem in_place(own);
            const DeviceCopy out(own.parts[place]);
            in_place.parts[place] = *out.view();
            ta_error err;
            auto* const lse = const_cast<float*>(in_place.lses[place]);
            ASSERT_EQ(in_place.merge(gpu, out.view(), lse, stream, &err), TA_OK) << err.message;
            expect_twin(p, own.parts[place], out, lse);
            if (HasFatalFailure()) return;
        }
    }
}

// The call cannot wait: the rows are NaN, and no others.
TEST_F(GpuMerge, LseThatIsNotFinite) {
    MergeProblem p({2, 2, 2, 64}, 1);
    p.parts = {Tensor(std::vector<float>(256, 1.0f), 2, 2, 64), Tensor(std::vector<float>(256, 3.0f), 2, 2, 64)};
    p.lses = {{0.0f, kNan, 0.0f, 0.0f}, {0.0f, 0.0f, -kMinusInf, kMinusInf}};
    const DeviceProblem device(p);
    Tensor out(2, 2, 64);
    const DeviceCopy device_out(out);
    const DeviceMemory lse = to_device(p.lses[0].data(), 16);
    ta_error err;
    ASSERT_EQ(device.merge(gpu, device_out.view(), static_cast<float*>(lse.get()), stream, &err), TA_OK) << err.message;
    const std::vector<float> got = fetch(static_cast<const float*>(lse.get()), 4);
    device_out.fetch();
    for (int64_t row = 0; row < 4; ++row) {
        const bool bad = row == 1 || row == 2;
        EXPECT_EQ(std::isnan(got[size_t(row)]), bad) << row;
        for (int64_t c = 0; c < 64; ++c) {
            const float x = out.get(row / 2, row % 2, c);
            EXPECT_TRUE(bad ? std::isnan(x) : x == (row == 0 ? 2.0f : 1.0f)) << "row " << row << ": " << x;
        }
    }
}

TEST_F(GpuMerge, WrongMemoryAndStreams) {
    MergeProblem p({2, 3, 2, 64}, 1);
    const DeviceProblem device(p);
    Tensor out(3, 2, 64);
    const DeviceCopy device_out(out);
    const DeviceMemory device_lse = to_device(p.lses[0].data(), 24);
    std::vector<float> host_lse(6, -777.0f);
    for (int which = 2; which <= 5; ++which) {
        DeviceProblem wrong(p);
        if (which == 2) wrong.parts[1] = *p.parts[1].view();
        if (which == 3) wrong.lses[1] = p.lses[1].data();
        ta_error err;
        EXPECT_EQ(wrong.merge(gpu, which == 4 ? out.view() : device_out.view(),
                              which == 5 ? host_lse.data() : static_cast<float*>(device_lse.get()), stream, &err),
                  TA_E_INVALID);
        EXPECT_EQ(err.argument, which) << err.message;
        EXPECT_NE(std::string(err.message).find("pageable"), std::string::npos) << err.message;
    }
    // A capture that the legacy default stream would disturb.
    cudaStream_t blocking = nullptr;
    ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ta_error err;
    EXPECT_EQ(device.merge(gpu, device_out.view(), nullptr, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.argument, 6);
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamEndCapture(blocking, &graph), cudaSuccess) << "the capture was disturbed";
    cudaGraphDestroy(graph);
    cudaStreamDestroy(blocking);
}

}  // namespace
}  // namespace ta::testing
