// ta_attend_dense on a GPU: K and V become INT8 token pages in device memory, and the kernels of steps attend to them.
// cuda_distr.cpp has DistrAttention. There is one CudaDense for each device. Only CUDA builds include this.
#pragma once

#include <mutex>
#include <vector>

#include "src/attend/dense/dense.h"
#include "src/device/cuda/memory.h"

namespace ta {

class CudaDense {
  public:
    explicit CudaDense(CudaDevice& device) : device_(device) {}
    ~CudaDense();
    CudaDense(const CudaDense&) = delete;
    CudaDense& operator=(const CudaDense&) = delete;

    // Enqueues the call on its stream. Any thread.
    Status attend(const DenseCall& call);
    // Like check_dense().
    Status check(const DenseCall& call);

  private:
    Status check_memory(const DenseCall& call) const;
    Status open();
    Status report_replaced();
    void count_memory();

    CudaDevice& device_;
    std::mutex mutex_;
    // Calls take and free memory in stream order. Freed memory is kept for later calls.
    cudaMemPool_t memory_ = nullptr;
    uint64_t counted_bytes_ = 0;
    std::vector<PinnedBuffer> pinned_ = std::vector<PinnedBuffer>(8);
    uint64_t calls_ = 0;
    uint32_t* replaced_ = nullptr;  // in mapped host memory: values that kernels replaced in calls that reject such values
    uint32_t reported_ = 0;         // values of replaced_ that were reported
};

}  // namespace ta
