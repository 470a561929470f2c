// The seam to an accelerator: its memory and its health. A CPU context has no Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "src/core/status.h"

namespace ta {

class Pool;
class StepBackend;
struct PlacedBlock;
struct DenseCall;

class Device {
  public:
    virtual ~Device() = default;
    virtual int ordinal() const = 0;
    virtual const char* name() const = 0;
    virtual int compute_capability() const = 0;  // 90: sm_90
    // Device memory, 4096-byte aligned, unspecified bytes; nullptr when there is none.
    virtual uint8_t* allocate(size_t bytes) = 0;
    virtual void deallocate(uint8_t* ptr, size_t bytes) = 0;
    // Copies to host memory what all work enqueued so far leaves there.
    virtual Status read(void* to, const uint8_t* from, size_t bytes) = 0;
    // The other way, before anything that is enqueued from now on.
    virtual Status write(uint8_t* to, const void* from, size_t bytes) = 0;
    // TA_E_DEVICE_LOST from the first error on after which the device runs nothing any more.
    virtual Status health() const = 0;
    // What runs the steps of a plan of `pool`.
    virtual std::unique_ptr<StepBackend> make_step(Pool& pool) = 0;
    // Enqueues a dense call; inputs are checked but for where they lie and their values.
    virtual Status attend_dense(const DenseCall& call) = 0;
    // Recomputes the hashes of sealed blocks of `pool`, behind all work enqueued so far. TA_E_CORRUPT names block and layer.
    virtual Status verify_blocks(const Pool& pool, std::span<const PlacedBlock> blocks) = 0;
    // Zeroed host memory that kernels write to; nullptr when there is none.
    virtual uint32_t* allocate_counters(size_t n) = 0;
    virtual void deallocate_counters(uint32_t* counters) = 0;
    virtual uint64_t bytes_in_use() const = 0;
    virtual uint64_t bytes_peak() const = 0;
};

// TA_E_UNSUPPORTED in a build without CUDA, without a driver, without that GPU or when it is older than sm_80.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

}  // namespace ta
