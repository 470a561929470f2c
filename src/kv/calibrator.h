// Which bits kv heads get: 4 or 2 by the ranges of their channels (TurboAttention, head-wise mixed precision), or 8, 4 or 2 by costs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "src/core/context.h"
#include "src/kv/tensor.h"

namespace ta {

class Calibrator {
  public:
    Calibrator(std::shared_ptr<Context> context, uint32_t layers, uint32_t kv_heads, uint32_t head_dim);

    Context& context() const { return *context_; }
    uint32_t layers() const { return layers_; }
    uint32_t kv_heads() const { return kv_heads_; }
    uint32_t head_dim() const { return head_dim_; }

    // Tensors of a GPU context are copied to the host first, behind the steps that were ended so far.
    Status observe(uint32_t layer, TensorView k, TensorView v);
    // Outputs [layers, kv_heads]; the priorities may be nullptr.
    Status finish(uint32_t n_low, uint8_t* k_bits, uint8_t* v_bits, float* k_priority, float* v_priority) const;
    // The maps of least total cost whose blocks have at most block_bytes. Costs [layers, kv_heads, 3], with 8, 4 and 2 bits.
    Status choose(const float* k_cost, const float* v_cost, uint64_t block_bytes, uint8_t* k_bits, uint8_t* v_bits) const;

  private:
    struct Ranges {  // of a layer: [kv_heads, head_dim], or empty before it is observed
        std::vector<float> min, max;
    };
    void prepare(Ranges& ranges) const;
    void widen(Ranges& ranges, const TensorView& x);
    void rank(const std::vector<Ranges>& ranges, uint32_t n_low, uint8_t* bits, float* priority) const;

    std::shared_ptr<Context> context_;
    uint32_t layers_, kv_heads_, head_dim_;
    std::vector<Ranges> k_, v_;     // [layers]
    std::vector<uint64_t> tokens_;  // [layers]
    std::vector<float> row_;
};

}  // namespace ta
