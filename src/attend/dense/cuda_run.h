// One dense call on a GPU. CudaDense (cuda_dense.h) calls these functions in this order. Only CUDA builds include this.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "src/attend/dense/dense.h"
#include "src/device/cuda/memory.h"

namespace ta {

// Offsets of the parts of a call's device memory.
class Layout {
  public:
    size_t take(size_t bytes, size_t alignment = 16) {
        const size_t at = round_up(bytes_, alignment);
        bytes_ = at + bytes;
        return at;
    }
    size_t bytes() const { return bytes_; }

  private:
    size_t bytes_ = 0;
};

class CudaDenseRun {
  public:
    CudaDenseRun(const CudaDevice& device, const DenseCall& call) : device_(device), call_(call) {}
    virtual ~CudaDenseRun() = default;
    CudaDenseRun(const CudaDenseRun&) = delete;
    CudaDenseRun& operator=(const CudaDenseRun&) = delete;

    // Makes all checks that may refuse the call, and the layout.
    virtual Status prepare() = 0;
    size_t bytes() const { return layout_.bytes(); }
    size_t input_bytes() const { return inputs_end_; }
    // Writes the device's inputs to host memory at `inputs`. `base`: the device memory of the call, 4096-byte aligned.
    virtual void write(uint8_t* inputs, uint8_t* base) const = 0;
    // `replaced`: host memory mapped into the device.
    virtual Status launch(const uint8_t* inputs, uint8_t* base, uint32_t* replaced, cudaStream_t stream) = 0;

  protected:
    template <class T>
    static T* at(uint8_t* base, size_t offset) {
        return reinterpret_cast<T*>(base + offset);
    }
    template <class T>
    static void put(uint8_t* base, size_t offset, const std::vector<T>& values) {
        if (!values.empty()) std::memcpy(base + offset, values.data(), values.size() * sizeof(T));
    }
    Status copy_tables(const uint8_t* inputs, uint8_t* base, cudaStream_t stream) const {
        return device_.check(cudaMemcpyAsync(base, inputs, inputs_end_, cudaMemcpyHostToDevice, stream),
                             "copying a dense call's tables");
    }
    Status clear(uint8_t* from, size_t bytes, cudaStream_t stream) const {
        return bytes == 0 ? Status() : device_.check(cudaMemsetAsync(from, 0, bytes, stream), "clearing a dense call's counts");
    }

    const CudaDevice& device_;
    const DenseCall& call_;
    Layout layout_;
    size_t inputs_end_ = 0;
};

std::unique_ptr<CudaDenseRun> make_distr_run(const CudaDevice& device, const DenseCall& call);

}  // namespace ta
