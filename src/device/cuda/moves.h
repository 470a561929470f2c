// Copies of blocks between a GPU and the host, by copy engine or by kernel, with several batches in flight in each direction.
// Only CUDA builds include this.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/device/cuda/device.h"

namespace ta {

class CudaTransfer final : public DeviceTransfer {
  public:
    CudaTransfer(CudaMoves& moves, cudaEvent_t done, MoveRoute route);
    ~CudaTransfer() override;
    Status wait() override;
    MoveRoute route() const override { return route_; }
    cudaEvent_t done() const { return done_; }

  private:
    CudaMoves& moves_;
    const cudaEvent_t done_;
    const MoveRoute route_;
    bool over_ = false;
};

class CudaMoves {
  public:
    explicit CudaMoves(CudaDevice& device) : device_(device) {}
    ~CudaMoves();
    CudaMoves(const CudaMoves&) = delete;
    CudaMoves& operator=(const CudaMoves&) = delete;

    Status open();
    Result<std::unique_ptr<DeviceTransfer>> start(std::span<const DeviceCopy> copies, const CopyOptions& options);
    Status calibrate();
    // Enqueues copies on the caller's stream, in no order among each other.
    Status enqueue(std::span<const DeviceCopy> copies, bool to_host, MoveRoute route, cudaStream_t stream);
    // Measured rate of large copies from the host, in bytes/s; a guess before it was measured.
    double up_bytes_per_s() const { return up_bytes_per_s_.load(std::memory_order_relaxed); }
    MoveCrossover crossover() const { return {crossover_[0].load(), crossover_[1].load()}; }

    CudaDevice& device() { return device_; }
    // An event without timing; nullptr if there is none.
    cudaEvent_t take_event();
    void give_event(cudaEvent_t event);

  private:
    using Copies = std::vector<DeviceCopy>;
    MoveRoute route_for(const Copies& copies, bool to_host, MoveRoute route) const;
    cudaError_t enqueue_engine(const Copies& copies, cudaStream_t stream);
    cudaError_t enqueue_kernel(const Copies& copies, cudaStream_t stream);
    cudaError_t time_copies(const Copies& copies, MoveRoute route, cudaStream_t stream, double& seconds);
    cudaError_t measure();

    CudaDevice& device_;
    // [0]: to the host, [1]: from the host. Two streams for each, so that the kernel of a batch starts while the one before it
    // drains.
    cudaStream_t streams_[2][2] = {};
    std::atomic<unsigned> turn_[2] = {0, 0};
    std::atomic<uint64_t> crossover_[2] = {0, 0};  // bytes
    std::atomic<double> up_bytes_per_s_{20e9};
    std::atomic<bool> batches_{true};  // the driver takes several copies in one call
    std::mutex calibrating_;
    bool calibrated_ = false;
    std::mutex mutex_;
    std::vector<cudaEvent_t> events_;  // events that are not in use
};

}  // namespace ta
