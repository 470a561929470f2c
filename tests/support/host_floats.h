// Floats where a CPU reads them, with the names that DeviceFloats (gpu_rows.h) has: tests of both are templates of them.
#pragma once

#include <vector>

namespace ta::testing {

class HostFloats {
  public:
    explicit HostFloats(const std::vector<float>& values) : values_(values) {}
    float* data() { return values_.data(); }
    std::vector<float> values() const { return values_; }

  private:
    std::vector<float> values_;
};

}  // namespace ta::testing
