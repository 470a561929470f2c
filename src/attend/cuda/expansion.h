// A plan's memory for expanded pages (kernels/cuda/any/expand), for one layer at a time. Only CUDA builds include this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/tables.h"

namespace ta {

class CudaExpansion {
  public:
    explicit CudaExpansion(CudaDevice& device) : device_(device) {}
    ~CudaExpansion() { release(); }
    CudaExpansion(const CudaExpansion&) = delete;
    CudaExpansion& operator=(const CudaExpansion&) = delete;

    // To be called when a step begins.
    void begin() { refused_ = SIZE_MAX; }
    // Gives the work's expansion memory and a block table. False: the device has none.
    bool take(const CudaTables& tables, AttendWork& work);

  private:
    bool grow(size_t pages, size_t rest);
    void release();

    CudaDevice& device_;
    uint8_t* memory_ = nullptr;
    size_t bytes_ = 0;
    size_t refused_ = SIZE_MAX;  // bytes of pages for which the device had no memory in this step
};

}  // namespace ta
