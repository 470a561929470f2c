// Host memory that a GPU's kernels read and write in place: all that this example needs of CUDA.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

namespace tinylm {

class GpuMemory {
  public:
    virtual ~GpuMemory() = default;
    // Room for n floats, valid until the next call.
    virtual float* reserve(std::size_t n) = 0;
    // Waits until the GPU has completed its work.
    virtual void wait() = 0;
};

// Calls run(q, k, v, out) with copies that the GPU can access, and copies `out` back: n_q floats for q and out, n_kv for k and
// v.
template <class Run>
void run_on_gpu(GpuMemory& memory, std::size_t n_q, std::size_t n_kv, const float* q, const float* k, const float* v,
                float* out, Run&& run) {
    float* const q_at = memory.reserve(2 * n_q + 2 * n_kv);
    float *const k_at = std::copy_n(q, n_q, q_at), *const v_at = std::copy_n(k, n_kv, k_at),
                 *const out_at = std::copy_n(v, n_kv, v_at);
    run(q_at, k_at, v_at, out_at);
    memory.wait();
    std::copy_n(out_at, n_q, out);
}

// Throws in a build without CUDA.
std::unique_ptr<GpuMemory> make_gpu_memory(int ordinal = 0);

}  // namespace tinylm
