// Steps over partitioned sequences: each rank attends to the blocks that it has, and the results are merged.
#pragma once

#include <memory>
#include <vector>

#include "kernels/format/merge_states.h"
#include "kernels/format/output_heads.h"
#include "src/attend/call.h"
#include "src/attend/step.h"
#include "src/kv/partition.h"

namespace ta {

class StepBackend;

// One such step, for who moves its parts.
struct PartitionedCalls {
    std::shared_ptr<share::Exchange> exchange;
    uint64_t channel = 0;
    OutputHeads outputs;     // `heads` is the call's
    uint64_t exchanged = 0;  // how often
};

// Carries the ranks' results of one step to each other, and merges them. The device decides where that is done.
class PartPath {
  public:
    virtual ~PartPath() = default;
    // Tells the other ranks of the step. `arguments`: hash of those that must be the same.
    virtual Status begin(const PartitionedCalls& step, uint64_t arguments) = 0;
    // Memory for O and LSE of this rank's blocks, both F32 and packed: sets own.out and own.lse.
    virtual Status reserve(AttendCall& own) = 0;
    // Gives `own` to the ranks that want it, and merges all into call.out and call.lse. `arguments`: as above, of the call.
    virtual Status exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) = 0;
    // Waits until the results of all calls are there. Why one of them is not.
    virtual Status settle(const PartitionedCalls& step) = 0;
    // Nothing of the step is used any more. `gave_up`: it was not settled.
    virtual void end(bool gave_up) noexcept = 0;
};

class PartitionedStep {
  public:
    PartitionedStep(Pool& pool, StepBackend& backend) : pool_(pool), backend_(backend) {}

    // TA_E_INVALID: some of the members are partitioned, and others are not or otherwise.
    static Status check(const Step& step);
    // Tells the other ranks, if the members are partitioned and the step has queries.
    Status begin(const Step& step);
    // Between begin() and end() of such a step.
    bool open() const { return step_.exchange != nullptr; }
    // Heads of `out` that this rank gets of the last call: all, but for such a step.
    TensorView written(const TensorView& out) const;
    // As the backend's, and the exchange with the other ranks.
    Status attend(uint32_t layer, const AttendCall& call);
    // Before the commit: every result is there, or why not.
    Status settle();
    // `gave_up`: it was not committed.
    void end(bool gave_up) noexcept;

  private:
    Pool& pool_;
    StepBackend& backend_;
    PartitionedCalls step_;
    bool all_cpus_ = false;
};

// For PartPaths: exchanges through messages. `o` [tokens, heads, head_dim], `lse` [tokens, heads] of this rank, in host memory.
// [ranks] what each of the others gave: O, then LSE, of this rank's heads.
Result<share::Exchange::Parts> exchange_by_messages(PartitionedCalls& step, const AttendCall& call, const float* o,
                                                    const float* lse, uint64_t arguments);

// For the merge of those parts, in the order of the ranks: the same bits everywhere. The own part is set, the others are not.
// `heads` is 0 where this rank gets no results.
MergeArgs merge_args(const PartitionedCalls& step, const AttendCall& call, const AttendCall& own);
// The part of another rank that lies at `data`.
MergeState packed_part(float* data, const MergeArgs& args);

}  // namespace ta
