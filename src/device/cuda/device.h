// A GPU through the CUDA runtime. Host code; only CUDA builds include this.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "src/core/device.h"

namespace ta {

class CudaMoves;

// Within this scope, calls of the thread are neither captured nor refused because this or another thread captures.
class OutsideCaptures {
  public:
    OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    ~OutsideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    OutsideCaptures(const OutsideCaptures&) = delete;
    OutsideCaptures& operator=(const OutsideCaptures&) = delete;

  private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Makes a device (-1: none) current for a scope, outside captures, and restores the previous context, even if that was none: a
// thread that has used no device thus gets no context on the first one. The scope also clears the last error that its calls
// leave on the thread, unless the caller had one there before: errors of the embedder are neither reported as ours nor cleared.
class CudaScope {
  public:
    explicit CudaScope(int ordinal);
    ~CudaScope();
    CudaScope(const CudaScope&) = delete;
    CudaScope& operator=(const CudaScope&) = delete;
    // False if the context could not be created. Once it exists, entering always succeeds.
    bool entered() const { return pushed_; }

  private:
    bool pushed_ = false;
    bool callers_error_ = false;
    std::optional<OutsideCaptures> outside_;
};

class CudaDevice final : public Device {
  public:
    static Result<std::unique_ptr<Device>> open(int ordinal);
    ~CudaDevice() override;

    CudaDevice* cuda() override { return this; }
    int ordinal() const override { return ordinal_; }
    Result<bool> reach(std::span<const int> ordinals) override;
    Result<ExportedMemory> export_memory(const uint8_t* memory) override;
    Result<ImportedMemory> import_memory(const ExportedMemory& memory) override;
    std::string bus_address() const override;
    const char* name() const override { return properties_.name; }
    int compute_capability() const override { return 10 * properties_.major + properties_.minor; }
    const cudaDeviceProp& properties() const { return properties_; }
    int kernel_generation() const { return generation_; }  // kernels/cuda/common/generation.h
    uint8_t* allocate(size_t bytes) override;
    void deallocate(uint8_t* ptr, size_t bytes) override;
    Status read(void* to, const uint8_t* from, size_t bytes) override;
    Status read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) override;
    Status write(uint8_t* to, const void* from, size_t bytes) override;
    Status health() const override;
    Status copy(std::span<const DeviceCopy> copies, bool to_host) override;
    Result<std::unique_ptr<DeviceTransfer>> start_copy(std::span<const DeviceCopy> copies, const CopyOptions& options) override;
    bool copies_beside() const override { return true; }
    Status calibrate_moves() override;
    MoveCrossover move_crossover() const override;
    Status zero(std::span<const DeviceRange> ranges) override;
    Status wait_for_steps() override;
    Status register_host(uint8_t* memory, size_t bytes) override;
    void unregister_host(uint8_t* memory) override;
    int numa_node() const override;
    uint32_t* allocate_counters(size_t n) override;
    void deallocate_counters(uint32_t* counters) override;
    uint64_t bytes_in_use() const override { return in_use_.load(std::memory_order_relaxed); }
    uint64_t bytes_peak() const override { return peak_.load(std::memory_order_relaxed); }

    // Counts memory that was taken (or given back) in other ways than allocate().
    void count_bytes(int64_t change);

    // Turns the result of a CUDA call into a status; `what` says what was tried. Remembers errors that end the device.
    Status check(cudaError_t error, const char* what) const;

    CudaMoves& moves() { return *moves_; }
    // An object that some user of the device attaches to it: made by the first call, kept as long as the device.
    std::shared_ptr<void> companion(std::shared_ptr<void> (*make)(CudaDevice&));
    // True if a chunk of registered host memory begins here. One copy must not cross from one chunk to the next.
    bool begins_chunk(const uint8_t* memory) const;

    // Waits for the event. It spins for a while first, because a wake-up takes longer than most waits.
    Status wait_for(cudaEvent_t event, const char* what) const;

    // Fences order steps of different streams: one may take a slot that another has freed. Each plan has an event that is
    // recorded where its last step ends, and steps of other plans wait for it.
    cudaEvent_t add_fence();
    void remove_fence(cudaEvent_t fence);
    // Makes the stream wait for all fences but `except`. `look`: skips fences that are already over, which spares the stream
    // the wait; not allowed while a graph is captured.
    Status wait_for_fences(cudaStream_t stream, cudaEvent_t except, bool look = false) const;

  private:
    explicit CudaDevice(int ordinal);

    const int ordinal_;
    cudaDeviceProp properties_{};
    int generation_ = 0;
    cudaStream_t copies_ = nullptr;
    std::unique_ptr<CudaMoves> moves_;
    cudaStream_t waits_ = nullptr;  // only waits are enqueued on it
    mutable std::mutex mutex_;      // protects fences_, registered_ and companion_
    std::vector<cudaEvent_t> fences_;
    cudaEvent_t zeroed_ = nullptr;            // a fence, too: behind the last zero()
    std::vector<const uint8_t*> registered_;  // chunks of host memory, sorted
    std::atomic<uint64_t> in_use_{0}, peak_{0};
    mutable std::atomic<int> lost_{0};  // the error that ended the device
    std::shared_ptr<void> companion_;   // destroyed first, since it uses the other members
};

}  // namespace ta
