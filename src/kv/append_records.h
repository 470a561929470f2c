// What a device's append kernels write beside pages: a record for each slot of a pool's sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "src/core/device.h"
#include "src/page/pages.h"

namespace ta {

// Empty on a CPU, which checks values before it changes anything.
class AppendRecords {
  public:
    static constexpr size_t kProgressBytes = 16;

    // Takes memory for so many sequences. Called once.
    Status open(Device& device, const Pages& pages, uint32_t max_sequences);
    bool are_open() const { return nonfinite_ != nullptr; }

    // [max_sequences]: for each sequence's slot, the number of values that kernels replaced because they were not finite; or
    // nullptr.
    uint32_t* nonfinite() const { return nonfinite_.get(); }
    // The slot's count now, which includes all kernels that have ended. 0 on a CPU.
    uint32_t nonfinite_of(uint32_t slot) const;
    // The number of values beyond a universal scale; or nullptr.
    uint64_t* clamped() const {
        return nonfinite_ ? reinterpret_cast<uint64_t*>(nonfinite_.get() + first_even(max_sequences_)) : nullptr;
    }
    // Device memory, only with universal open scales: [max_sequences, 2 sides, layers, kv_heads, 2] of
    // Sequence::largest_scales.
    float* largest_scales() const { return reinterpret_cast<float*>(scales_.get()); }
    // Floats of one side.
    static size_t scales_of(const Geometry& geometry) { return geometry.heads() * 2; }
    // After those scales: [max_sequences, kv_heads] that append kernels use while they run; 0 between them.
    uint8_t* progress() const { return scales_ ? scales_.get() + progress_at_ : nullptr; }

  private:
    static size_t first_even(size_t n) { return (n + 1) / 2 * 2; }
    struct FreeCounters {
        Device* device;
        void operator()(uint32_t* counters) const { device->deallocate_counters(counters); }
    };
    struct FreeMemory {
        Device* device;
        size_t bytes;
        void operator()(uint8_t* memory) const { device->deallocate(memory, bytes); }
    };

    uint32_t max_sequences_ = 0;
    size_t progress_at_ = 0;
    std::unique_ptr<uint32_t[], FreeCounters> nonfinite_{nullptr, {nullptr}};
    std::unique_ptr<uint8_t[], FreeMemory> scales_{nullptr, {nullptr, 0}};
};

}  // namespace ta
