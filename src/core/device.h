// The seam to an accelerator: its memory, copies and health. A CPU context has no Device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "src/core/status.h"

namespace ta {

class CudaDevice;

struct DeviceCopy {
    uint8_t* to;
    const uint8_t* from;
    size_t bytes;
};

struct DeviceRange {
    uint8_t* memory;
    size_t bytes;
};

// The engine that copies blocks between a device and the host.
enum class MoveRoute : uint8_t {
    kCalibrated,  // whichever was faster for blocks of this size in the calibration
    kCopyEngine,
    kKernel,
};

struct CopyOptions {
    bool to_host = false;
    bool behind_steps = true;  // waits for all steps ended so far. Only tests turn it off
    MoveRoute route = MoveRoute::kCalibrated;
};

// Copies in flight. The destructor waits for them.
class DeviceTransfer {
  public:
    virtual ~DeviceTransfer() = default;
    virtual Status wait() = 0;
    virtual MoveRoute route() const = 0;  // the one that was taken
};

// Blocks of at least so many bytes go by copy engine, smaller ones by kernel. 0: not measured yet.
struct MoveCrossover {
    uint64_t to_host = 0, to_device = 0;
};

// How device memory is named to other processes of the host.
struct ExportedMemory {
    uint8_t handle[64];
    uint64_t offset;  // of the memory, within the allocation that the handle names
};

struct ImportedMemory {
    std::shared_ptr<uint8_t> memory;  // stays mapped until the last copy of the pointer is gone
    uint64_t bytes = 0;               // from `memory` to the end of the allocation, according to this process's driver
};

class Device {
  public:
    virtual ~Device() = default;
    // This device as a CUDA device. nullptr: its memory is host memory, and CPUs do what kernels do elsewhere.
    virtual CudaDevice* cuda() { return nullptr; }
    // Waits until a CPU may read the memory of such a device.
    virtual Status may_read() { return {}; }
    virtual int ordinal() const = 0;
    // True if all these GPUs of the process, this one among them, can access each other's memory. If so, this one has enabled
    // the access. False if two of them are the same. Every GPU of the list gets the same answer.
    virtual Result<bool> reach(std::span<const int> ordinals);
    // Names the memory to other processes, which can map it on their own device while this process has it. TA_E_UNSUPPORTED:
    // this kind of memory cannot be exported.
    virtual Result<ExportedMemory> export_memory(const uint8_t* memory);
    // Maps memory that another process exported, maybe from a device that this process does not see. TA_E_UNSUPPORTED: the
    // devices cannot access each other. TA_E_CORRUPT: the offset is not within the allocation.
    virtual Result<ImportedMemory> import_memory(const ExportedMemory& memory);
    // PCI address, by which processes tell whether they use the same device; empty: none.
    virtual std::string bus_address() const { return {}; }
    virtual const char* name() const = 0;
    virtual int compute_capability() const = 0;  // 90: sm_90
    // Device memory, 4096-byte aligned, with unspecified content; nullptr if there is none left.
    virtual uint8_t* allocate(size_t bytes) = 0;
    virtual void deallocate(uint8_t* ptr, size_t bytes) = 0;
    // Copies to host memory, after all work that was enqueued so far; waits.
    virtual Status read(void* to, const uint8_t* from, size_t bytes) = 0;
    // The same for rows that lie `pitch` >= row_bytes apart. `to` gets them without gaps.
    virtual Status read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) = 0;
    // Copies to device memory: after all steps ended so far, and before anything that is enqueued later.
    virtual Status write(uint8_t* to, const void* from, size_t bytes) = 0;
    // TA_E_DEVICE_LOST once an error has ended the device.
    virtual Status health() const = 0;
    // Copies between device memory and host memory that the device can read, after all steps ended so far; waits. Addresses and
    // sizes are multiples of 16. Calls from several threads overlap, also within one direction.
    virtual Status copy(std::span<const DeviceCopy> copies, bool to_host) = 0;
    // The same without waiting. Within a direction, the copies of one call complete roughly before those of the next. A device
    // that cannot copy in the background copies at once.
    virtual Result<std::unique_ptr<DeviceTransfer>> start_copy(std::span<const DeviceCopy> copies, const CopyOptions& options);
    // True if start_copy() returns before the copies are complete.
    virtual bool copies_beside() const { return false; }
    // On its first call, measures from what size on the copy engine is faster. That takes some milliseconds.
    virtual Status calibrate_moves() { return {}; }
    virtual MoveCrossover move_crossover() const { return {}; }
    // Enqueues zeroing of device memory: after all steps ended so far, and before steps and copies that begin later. A device
    // whose memory is host memory zeroes at once.
    virtual Status zero(std::span<const DeviceRange> ranges);
    // Waits until the device has completed all steps ended so far.
    virtual Status wait_for_steps() = 0;
    // Registers host memory, so that kernels can read it at the same address.
    virtual Status register_host(uint8_t* memory, size_t bytes) = 0;
    virtual void unregister_host(uint8_t* memory) = 0;
    // The nearest NUMA node; -1: unknown.
    virtual int numa_node() const = 0;
    // Zeroed host memory that kernels can write to; nullptr if there is none left.
    virtual uint32_t* allocate_counters(size_t n) = 0;
    virtual void deallocate_counters(uint32_t* counters) = 0;
    virtual uint64_t bytes_in_use() const = 0;
    virtual uint64_t bytes_peak() const = 0;
};

// TA_E_UNSUPPORTED: the build has no CUDA, there is no driver or no such GPU, or the GPU is older than sm_80.
Result<std::unique_ptr<Device>> open_cuda_device(int ordinal);

}  // namespace ta
