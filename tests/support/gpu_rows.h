// F32 tensors on the device, with the names that Tensor and HostFloats have: tests of a CPU and a GPU are templates of them.
#pragma once

#include "support/gpu.h"

namespace ta::testing {

// Floats on the device, with the names that Tensor has.
class DeviceFloats {
  public:
    explicit DeviceFloats(const std::vector<float>& values)
        : n_(values.size()), memory_(to_device(values.data(), values.size() * sizeof(float))) {}
    float* data() { return static_cast<float*>(memory_.get()); }
    std::vector<float> values() const {
        std::vector<float> x(n_);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(x.data(), memory_.get(), n_ * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
        return x;
    }

  private:
    size_t n_;
    DeviceMemory memory_;
};
class DeviceRows {
  public:
    DeviceRows(const std::vector<float>& values, int64_t tokens, int64_t heads, int64_t d)
        : floats_(values), view_(view_of(floats_.data(), tokens, heads, d)) {}
    DeviceRows(int64_t tokens, int64_t heads, int64_t d)
        : DeviceRows(std::vector<float>(size_t(tokens * heads * d), -1.0f), tokens, heads, d) {}
    const ta_tensor* view() const { return &view_; }
    std::vector<float> values() const { return floats_.values(); }

  private:
    DeviceFloats floats_;
    ta_tensor view_;
};

}  // namespace ta::testing
