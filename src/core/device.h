// The seam to an accelerator: its memory and its health. A CPU context has no Device.
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
    kCalibrated,  // whichever was faster for blocks of that size when it was measured
    kCopyEngine,
    kKernel,
};

struct CopyOptions {
    bool to_host = false;
    bool behind_steps = true;  // behind all steps that were ended so far. Only tests do without
    MoveRoute route = MoveRoute::kCalibrated;
};

// Copies that are on their way. The destructor waits for them.
class DeviceTransfer {
  public:
    virtual ~DeviceTransfer() = default;
    virtual Status wait() = 0;
    virtual MoveRoute route() const = 0;  // that was taken
};

// Blocks of at least so many bytes go by copy engine, smaller ones by kernel; 0 before it was measured.
struct MoveCrossover {
    uint64_t to_host = 0, to_device = 0;
};

// Device memory as other processes of the host find it.
struct ExportedMemory {
    uint8_t handle[64];
    uint64_t offset;  // in what the handle is of
};

class Device {
  public:
    virtual ~Device() = default;
    // The CUDA device that this is. nullptr: its memory is the host's, where CPUs do what kernels do elsewhere.
    virtual CudaDevice* cuda() { return nullptr; }
    // Of such memory: a CPU may read it now.
    virtual Status may_read() { return {}; }
    virtual int ordinal() const = 0;
    // True if each of these GPUs of the process, this one among them, reaches the memory of each other; from then on this one does.
    // Two that are the same do not. Any of them asks and gets the same answer.
    virtual Result<bool> reach(std::span<const int> ordinals);
    // For other processes, which map it on their own device while this one has it. TA_E_UNSUPPORTED: it is not of a kind that can be.
    virtual Result<ExportedMemory> export_memory(const uint8_t* memory);
    // Maps memory that another process exported, until the last copy of the pointer goes. Its device may be one that this process
    // does not see. TA_E_UNSUPPORTED: the devices do not reach each other.
    virtual Result<std::shared_ptr<uint8_t>> import_memory(const ExportedMemory& memory);
    // PCI address, by which processes tell whether they mean the same device; empty: it has none.
    virtual std::string bus_address() const { return {}; }
    virtual const char* name() const = 0;
    virtual int compute_capability() const = 0;  // 90: sm_90
    // Device memory, 4096-byte aligned, unspecified bytes; nullptr when there is none.
    virtual uint8_t* allocate(size_t bytes) = 0;
    virtual void deallocate(uint8_t* ptr, size_t bytes) = 0;
    // Copies to host memory what all work enqueued so far leaves there.
    virtual Status read(void* to, const uint8_t* from, size_t bytes) = 0;
    // The same for rows that lie `pitch` bytes apart, pitch >= row_bytes; `to` gets them without gaps.
    virtual Status read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) = 0;
    // The other way, behind all steps that were ended so far and before anything that is enqueued from now on.
    virtual Status write(uint8_t* to, const void* from, size_t bytes) = 0;
    // TA_E_DEVICE_LOST from the first error on after which the device runs nothing any more.
    virtual Status health() const = 0;
    // Copies between device memory and host memory that the device reads, behind all steps that were ended so far; waits.
    // Addresses and sizes are multiples of 16. Calls from several threads overlap, also in the same direction.
    virtual Status copy(std::span<const DeviceCopy> copies, bool to_host) = 0;
    // The same without waiting; within a direction the copies of a call are done, more or less, before those of the next. A
    // device that cannot copies at once.
    virtual Result<std::unique_ptr<DeviceTransfer>> start_copy(std::span<const DeviceCopy> copies, const CopyOptions& options);
    // True if start_copy returns before the copies are done.
    virtual bool copies_beside() const { return false; }
    // Measures, the first time, from what size on the copy engine is the faster way. Takes some milliseconds.
    virtual Status calibrate_moves() { return {}; }
    virtual MoveCrossover move_crossover() const { return {}; }
    // Enqueues zeroing of device memory behind all steps that were ended so far, before steps and copies that begin from now
    // on. A device whose memory is the host's does it at once.
    virtual Status zero(std::span<const DeviceRange> ranges);
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
