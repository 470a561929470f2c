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

struct DeviceCopy {
    uint8_t* to;
    const uint8_t* from;
    size_t bytes;
};

// Recomputes hashes of blocks where the device reads them. Thread-safe.
class BlockVerifier {
  public:
    virtual ~BlockVerifier() = default;
    // Behind all steps that were ended so far; waits. statuses[i] is TA_E_CORRUPT with block and layer for a block that does not match.
    virtual Status verify(std::span<const PlacedBlock> blocks, std::span<Status> statuses) = 0;
};

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
    // The same for rows that lie `pitch` bytes apart, pitch >= row_bytes; `to` gets them without gaps.
    virtual Status read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) = 0;
    // The other way, before anything that is enqueued from now on.
    virtual Status write(uint8_t* to, const void* from, size_t bytes) = 0;
    // TA_E_DEVICE_LOST from the first error on after which the device runs nothing any more.
    virtual Status health() const = 0;
    // What runs the steps of a plan of `pool`.
    virtual std::unique_ptr<StepBackend> make_step(Pool& pool) = 0;
    // Enqueues a dense call; inputs are checked but for where they lie and their values.
    virtual Status attend_dense(const DenseCall& call) = 0;
    virtual std::unique_ptr<BlockVerifier> make_verifier(const Pool& pool) = 0;
    // Copies between device memory and host memory that the device reads, behind all steps that were ended so far; waits. Calls from
    // several threads overlap, also in the same direction.
    virtual Status copy(std::span<const DeviceCopy> copies, bool to_host) = 0;
    // Until all steps that were ended so far are over on the device.
    virtual Status wait_for_steps() = 0;
    // Makes host memory one that kernels read at the same address.
    virtual Status register_host(uint8_t* memory, size_t bytes) = 0;
    virtual void unregister_host(uint8_t* memory) = 0;
    // NUMA node that the device is nearest to, -1: unknown.
    virtual int numa_node() const = 0;
    // Zeroed host memory that kernels write to; nullptr when there is none.
    virtual uint32_t* allocate_counters(size_t n) = 0;
    virtual void deallocate_counters(uint32_t* counters) = 0;
    virtual uint64_t bytes_in_use() const = 0;
    virtual uint64_t bytes_peak() const = 0;
};

// TA_E_UNSUPPORTED in a build without CUDA, without a driver, without that GPU or when it is older than sm_80.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

}  // namespace ta
