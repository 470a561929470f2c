// Chooses the bits of kv heads: 4 or 2 by the ranges of their channels (TurboAttention's head-wise mixed precision), or 8, 4 or
// 2 by costs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/core/context.h"
#include "src/kv/tensor.h"
#include "src/page/geometry.h"

namespace ta {

class Calibrator {
  public:
    // Only the geometry's shape counts, not its bits.
    Calibrator(std::shared_ptr<Context> context, Geometry geometry);

    Context& context() const { return *context_; }
    const Geometry& geometry() const { return geometry_; }

    // Tensors of a GPU context are copied to the host first, after the steps that were ended so far.
    Status observe(uint32_t layer, TensorView k, TensorView v);
    // Outputs [heads of all layers]; the priorities may be nullptr.
    Status finish(uint32_t n_low, uint8_t* k_bits, uint8_t* v_bits, float* k_priority, float* v_priority) const;
    // Finds the maps of least total cost whose blocks have at most block_bytes. Costs: [heads of all layers, 3], for 8, 4 and 2
    // bits.
    Status choose(const float* k_cost, const float* v_cost, uint64_t block_bytes, uint8_t* k_bits, uint8_t* v_bits) const;

  private:
    struct Ranges {  // of a layer: [kv_heads, channels], or empty before it is observed
        size_t channels = 0;
        std::vector<float> min, max;
    };
    static void prepare(Ranges& ranges, const TensorView& x);
    void widen(Ranges& ranges, const TensorView& x);
    void rank(const std::vector<Ranges>& ranges, uint32_t n_low, uint8_t* bits, float* priority) const;

    std::shared_ptr<Context> context_;
    const Geometry geometry_;
    std::vector<Ranges> k_, v_;     // [layers]
    std::vector<uint64_t> tokens_;  // [layers]
    std::vector<float> row_;
};

}  // namespace ta
