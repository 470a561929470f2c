// Steps over partitioned sequences: each rank attends to the blocks that it has, and the results are merged.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "src/attend/backend.h"
#include "src/kv/partition.h"

namespace ta {

class PartitionedStep {
  public:
    explicit PartitionedStep(Pool& pool) : pool_(pool), own_(pool.context().allocator()) {}

    // TA_E_INVALID: some of the members are partitioned, and others are not or otherwise.
    static Status check(const Step& step);
    // Tells the other ranks, if the members are partitioned.
    Status begin(const Step& step);
    // Between begin() and end() of such a step.
    bool open() const { return exchange_ != nullptr; }
    // As the backend's, and the exchange with the other ranks.
    Status attend(uint32_t layer, const AttendCall& call, StepBackend& backend);
    // `gave_up`: it was not committed.
    void end(bool gave_up) noexcept;

  private:
    struct Heads {
        int64_t first, end;
    };
    Heads heads_of(uint32_t rank, int64_t q_heads) const;
    std::vector<float> part_for(uint32_t rank, const AttendCall& own) const;
    Status merge(const AttendCall& call, const AttendCall& own, share::Exchange::Parts& parts);

    Pool& pool_;
    std::shared_ptr<share::Exchange> exchange_;
    uint64_t channel_ = 0, calls_ = 0;
    ta_partition_output output_ = TA_OUTPUT_ALL;
    uint32_t output_rank_ = 0;
    Buffer own_;  // O and LSE of this rank's blocks
};

}  // namespace ta
