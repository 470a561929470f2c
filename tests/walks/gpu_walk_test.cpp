// The twin walk with a GPU: settings, data and calls that nobody thought of, beside a CPU. TA_WALK_SECONDS=600 walks for ten
// minutes. The text of a failure names the keys that count in the row; what kernels may do to extreme data is in docs/gpu.md.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "kernels/cuda/common/generation.h"
#include "support/gpu.h"
#include "walks/twin_walk.h"

namespace ta::testing {
namespace {

class OnDevice : public Placed {
  public:
    explicit OnDevice(Tensor& host) : copy_(host) {}
    const ta_tensor* view() const override { return copy_.view(); }
    void fetch() const override {
        if (copy_.view()->tokens > 0) copy_.fetch();
    }

  private:
    DeviceCopy copy_;
};
class FloatsOnDevice : public PlacedFloats {
  public:
    explicit FloatsOnDevice(std::vector<float>& host)
        : host_(host), memory_(to_device(host.data(), host.size() * sizeof(float))) {}
    float* data() const override { return static_cast<float*>(memory_.get()); }
    void fetch() const override {
        EXPECT_EQ(cudaMemcpy(host_.data(), memory_.get(), host_.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
    }

  private:
    std::vector<float>& host_;
    DeviceMemory memory_;
};

class Gpu : public Device {
  public:
    Gpu(const Context& context, cudaStream_t stream) : context_(context), stream_(stream) {}
    const Context& context() const override { return context_; }
    std::unique_ptr<Placed> place(Tensor& host) override { return std::make_unique<OnDevice>(host); }
    std::unique_ptr<PlacedFloats> place(std::vector<float>& host) override { return std::make_unique<FloatsOnDevice>(host); }
    void start(const Plan& plan) override {
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream_, &err), err);
    }
    void wait() override { EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }
    KernelOf kernel_of() const override {
        int shared_bytes = 0, major = 0, generation = 0;
        const int device = info(context_).device_ordinal;
        EXPECT_EQ(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), cudaSuccess);
        EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), cudaSuccess);
        EXPECT_EQ(cuda::kernel_generation(&generation), cudaSuccess);
        if (major == 9 && generation == 9) return kernel_for<true, true>;
        return shared_bytes >= 160 * 1024 ? kernel_for<false, true> : kernel_for<false, false>;
    }

  private:
    // As kernels/cuda/variants.h.
    template <bool kHopper, bool kWide>
    static Kernel kernel_for(const RowsOfHead& rows) {
        const int d = rows.head_dim;
        const bool fits = d != 256 || kWide;
        if (rows.rows <= 16 || rows.p_levels > 255 || !fits || rows.batch_invariant) return Kernel::kDecode;
        return kHopper && d <= 128 && d != 96 ? Kernel::kHopperPrefill : Kernel::kPrefill;
    }

    const Context& context_;
    cudaStream_t stream_;
};

class GpuWalk : public GpuTest {};

TEST_F(GpuWalk, AgreesWithACpu) {
    Gpu device(gpu, stream);
    const std::string wrong = run_walks(device, make_recorded_context(), {});
    EXPECT_TRUE(wrong.empty()) << wrong;
}

}  // namespace
}  // namespace ta::testing
