// The launch plans of appends, one for each shape of layers in a pool. Only CUDA builds include this.
#pragma once

#include <utility>
#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "src/device/cuda/device.h"
#include "src/page/geometry.h"

namespace ta {

class AppendPlans {
  public:
    // Does nothing after the first time.
    Status make(const Geometry& geometry, const CudaDevice& device);
    const cuda::AppendPlan& of(const LayerShape& shape) const;

  private:
    std::vector<std::pair<LayerShape, cuda::AppendPlan>> plans_;
};

}  // namespace ta
