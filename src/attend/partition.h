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
struct Partition;

// One such step, for the path of its parts.
struct PartitionedCalls {
    std::shared_ptr<share::Exchange> exchange;
    uint64_t channel = 0;
    uint64_t without_queries = 0;  // Exchange's hash of the step without queries
    OutputHeads outputs;           // `heads` is set by each call
    uint64_t exchanged = 0;        // number of exchanges so far
};

// Carries the ranks' results of a step to each other and merges them. Each kind of device has one.
class PartPath {
  public:
    virtual ~PartPath() = default;
    // Tells the other ranks of the step. `arguments`: hash of those that must be the same on all ranks.
    virtual Status begin(const PartitionedCalls& step, uint64_t arguments) = 0;
    // Sets own.out and own.lse to memory for the results of this rank's blocks: F32, packed.
    virtual Status reserve(AttendCall& own) = 0;
    // Sends `own` to the ranks that want it, and merges all parts into call.out and call.lse. `arguments`: hash of the call's.
    virtual Status exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) = 0;
    // Waits until the results of all calls are there. An error says why one is missing.
    virtual Status settle(const PartitionedCalls& step) = 0;
    // Ends the use of all memory of the step. `gave_up`: the step was not settled.
    virtual void end(bool gave_up) noexcept = 0;
};

class PartitionedStep {
  public:
    PartitionedStep(Pool& pool, StepBackend& backend) : pool_(pool), backend_(backend) {}

    // TA_E_INVALID: the members are not all partitioned alike, or not all of them are.
    static Status check(const Step& step);
    // If the members are partitioned and the step has queries, tells the other ranks, and the step is open(). A step without
    // queries is reported only at its end.
    Status begin(const Step& step);
    // True between begin() and end() of such a step.
    bool open() const { return step_.exchange != nullptr; }
    // The heads of `out` that the last call has written on this rank: all heads, unless the step is open().
    TensorView written(const TensorView& out) const;
    // Runs the backend's attend(), and exchanges parts with the other ranks.
    Status attend(uint32_t layer, const AttendCall& call);
    // To be called before the commit. OK: all results are there.
    Status settle();
    // `gave_up`: the step was not committed.
    void end(bool gave_up) noexcept;

  private:
    Pool& pool_;
    StepBackend& backend_;
    PartitionedCalls step_;
    share::Exchange* idle_ = nullptr;  // of a step without queries, which is not open()
    std::vector<const Partition*> members_;
    bool all_cpus_ = false;
};

// For PartPaths that exchange by messages. `o` [tokens, heads, head_dim] and `lse` [tokens, heads]: this rank's, in host
// memory. Returns, for [ranks], what each of the others gave: O, then LSE, of this rank's heads.
Result<share::Exchange::Parts> exchange_by_messages(PartitionedCalls& step, const AttendCall& call, const float* o,
                                                    const float* lse, uint64_t arguments);

// Arguments for the merge of all ranks' parts. The order of the ranks gives the same bits on all of them. Only this rank's part
// is set. `heads` is 0 if this rank gets no results.
MergeArgs merge_args(const PartitionedCalls& step, const AttendCall& call, const AttendCall& own);
// The part of another rank, which starts at `data`.
MergeState packed_part(float* data, const MergeArgs& args);

}  // namespace ta
