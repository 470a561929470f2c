#include "gpu_memory.h"

#include <stdexcept>
#include <string>

#if TINYLM_HAVE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace tinylm {

#if TINYLM_HAVE_CUDA

namespace {

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(error));
}

class PinnedMemory final : public GpuMemory {
  public:
    explicit PinnedMemory(int ordinal) : ordinal_(ordinal) {}
    ~PinnedMemory() override { cudaFreeHost(data_); }
    float* reserve(std::size_t n) override {
        check(cudaSetDevice(ordinal_));
        if (n > size_) {
            check(cudaFreeHost(data_));
            data_ = nullptr;
            size_ = 0;
            check(cudaMallocHost(reinterpret_cast<void**>(&data_), n * sizeof(float)));
            size_ = n;
        }
        return data_;
    }
    void wait() override {
        check(cudaSetDevice(ordinal_));
        check(cudaDeviceSynchronize());
    }

  private:
    const int ordinal_;
    float* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace

std::unique_ptr<GpuMemory> make_gpu_memory(int ordinal) {
    return std::make_unique<PinnedMemory>(ordinal);
}

#else

std::unique_ptr<GpuMemory> make_gpu_memory(int) {
    throw std::runtime_error("this build of tinylm has no CUDA");
}

#endif

}  // namespace tinylm
