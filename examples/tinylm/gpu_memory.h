// Host memory that a GPU's kernels read and write in place, which is all that the example needs from CUDA.
#pragma once

#include <cstddef>
#include <memory>

namespace tinylm {

class GpuMemory {
  public:
    virtual ~GpuMemory() = default;
    // Room for n floats, until the next call.
    virtual float* reserve(std::size_t n) = 0;
    // Until the GPU has done what it was told.
    virtual void wait() = 0;
};

// Throws in a build without CUDA.
std::unique_ptr<GpuMemory> make_gpu_memory(int ordinal = 0);

}  // namespace tinylm
