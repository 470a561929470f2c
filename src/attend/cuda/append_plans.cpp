#include "src/attend/cuda/append_plans.h"

#include <algorithm>

namespace ta {

// The grids serve any number of tasks: idle CTAs end at once.
Status AppendPlans::make(const Geometry& g, const CudaDevice& device) {
    if (!plans_.empty()) return {};
    std::vector<std::pair<LayerShape, cuda::AppendPlan>> plans;
    for (uint32_t layer = 0; layer < g.layers; layer = g.end_of_run(layer)) {
        const LayerShape& shape = g.shape(layer);
        if (std::any_of(plans.begin(), plans.end(), [&](const auto& p) { return p.first == shape; })) continue;
        cuda::AppendPlan plan{};
        const int planned = cuda::plan_append(device.ordinal(), int(shape.head_dim), int(shape.kv_heads),
                                              INT32_MAX / int64_t(shape.kv_heads), &plan);
        TA_RETURN_IF_ERROR(device.check(cudaError_t(planned), "planning an append"));
        plans.push_back({shape, plan});
    }
    plans_ = std::move(plans);
    return {};
}

const cuda::AppendPlan& AppendPlans::of(const LayerShape& shape) const {
    return std::find_if(plans_.begin(), plans_.end(), [&](const auto& p) { return p.first == shape; })->second;
}

}  // namespace ta
