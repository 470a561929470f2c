// Inputs of a plan's kernels that do not change between steps: the rotation's signs, the keys' offsets, and the offsets of
// heads in channel and low pages. Only CUDA builds include this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/attend_args.h"
#include "src/device/cuda/memory.h"
#include "src/kv/pool.h"

namespace ta {

class CudaConstants {
  public:
    CudaConstants(const Pool& pool, CudaDevice& device) : pool_(pool), device_(device), memory_(device) {}

    // Call it before the first step; later calls do nothing.
    Status upload();

    // nullptr: no rotation.
    const float* signs() const { return pool_.numerics().hadamard ? reinterpret_cast<const float*>(memory_.data()) : nullptr; }
    // [kv_heads, head_dim] of a layer, or nullptr.
    const float* k_offset(uint32_t layer) const {
        if (pool_.numerics().k_offset.empty()) return nullptr;
        const Geometry& g = pool_.geometry();
        return reinterpret_cast<const float*>(memory_.data() + k_offset_at_) + g.channel_index(layer, 0);
    }
    // [kv_heads] of a layer; the next layers follow. `kind`: kChannel or kLow, if the pool has it.
    const cuda::HeadArgs* heads(PageKind kind, uint32_t layer) const {
        return reinterpret_cast<const cuda::HeadArgs*>(tables(kind) + heads_at_) + pool_.geometry().index(layer, 0);
    }
    // [channels / 2] of a layer: see Rotary::turns.
    const double* rotary_turns(uint32_t layer) const {
        return reinterpret_cast<const double*>(memory_.data() + rotary_at_) +
               size_t(layer) * (pool_.numerics().rotary.channels / 2);
    }
    // [layers]: the offset of each layer's page in a block of this kind.
    const uint64_t* layer_offsets(PageKind kind) const {
        return reinterpret_cast<const uint64_t*>(kind == PageKind::kToken ? memory_.data() + token_layers_at_
                                                                          : tables(kind) + layers_at_);
    }

  private:
    const uint8_t* tables(PageKind kind) const { return memory_.data() + (kind == PageKind::kLow ? table_bytes_ : 0); }

    const Pool& pool_;
    CudaDevice& device_;
    // [signs][k_offset of all layers][token layer offsets][HeadArgs of all layers][channel layer offsets], then the last two of
    // low pages; [rotary turns of all layers]
    DeviceBuffer memory_;
    bool uploaded_ = false;
    size_t k_offset_at_ = 0, token_layers_at_ = 0, heads_at_ = 0, layers_at_ = 0, table_bytes_ = 0, rotary_at_ = 0;
};

}  // namespace ta
