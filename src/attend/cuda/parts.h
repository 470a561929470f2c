// Parts of partitioned steps on a GPU. If every rank's GPU reaches every other's memory, one kernel of each rank writes its
// part into the others' areas, waits for theirs, and merges. Then nothing waits before the step's end, and calls can be
// captured. Otherwise parts go through pinned memory and messages, and each call waits for them. Only CUDA builds include this.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/cuda/any/merge/exchange_parts.h"
#include "src/attend/cuda/schedules.h"
#include "src/attend/partition.h"
#include "src/device/cuda/memory.h"

namespace ta {

class CudaParts final : public PartPath {
  public:
    // `stream`: the plan's present stream, by reference.
    CudaParts(Pool& pool, CudaDevice& device, const cudaStream_t& stream)
        : pool_(pool), device_(device), stream_(stream), own_(device), state_(device), others_(device) {}
    ~CudaParts() override;

    Status begin(const PartitionedCalls& step, uint64_t arguments) override;
    Status reserve(AttendCall& own) override;
    Status exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) override;
    Status settle(const PartitionedCalls& step) override;
    void end(bool gave_up) noexcept override;

    // Adds to `kind` what captured exchanges depend on.
    void add_kind(KindOfStep& kind) const;

  private:
    Status open();
    Status share_area(const std::shared_ptr<share::Exchange>& exchange);
    Status send_state(const PartitionedCalls& step, const share::Exchange::Agreement& agreed);
    Status exchange_by_kernel(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments);
    Status exchange_by_host(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments);
    Status wait();

    Pool& pool_;
    CudaDevice& device_;
    const cudaStream_t& stream_;
    DeviceBuffer own_;  // O and LSE of this rank's blocks

    // By kernel.
    std::shared_ptr<share::Exchange> area_of_;  // the exchange that area_ is for
    std::shared_ptr<uint8_t> area_;
    share::Transport::Shared shared_;              // the name of area_ for the other ranks
    std::vector<std::shared_ptr<uint8_t>> areas_;  // the other ranks' areas in the last step
    DeviceBuffer state_;
    PinnedBuffer sent_;
    cuda::ExchangeNotes* notes_ = nullptr;
    cudaEvent_t done_ = nullptr;

    // By host.
    PinnedBuffer down_, up_;
    DeviceBuffer others_;

    bool open_ = false, by_kernel_ = false;
    OutputHeads outputs_;
    uint32_t rank_ = 0;
    uint64_t identity_ = 0;
};

}  // namespace ta
