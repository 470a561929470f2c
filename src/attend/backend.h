// The interface that carries out the steps of plans. Each kind of device has one backend.
#pragma once

#include <memory>

#include "src/attend/call.h"
#include "src/attend/partition.h"
#include "src/attend/step.h"

namespace ta {

// Runs the work of steps on a device. The plan has checked shapes, order of calls and options; a failed call changes nothing.
class StepBackend {
  public:
    virtual ~StepBackend() = default;
    // The stream of the calls that follow; TA_E_UNSUPPORTED where there are none.
    virtual Status set_stream(ta_stream stream) = 0;
    // All blocks are reserved. The step stays where it is until finish().
    virtual Status begin(Step& step) = 0;
    // The first `tokens` tokens of a block, which may be shared, closed, or both, into a token block of our own. Before
    // begin().
    virtual Status copy_tokens(const Block& from, int tokens, Block& to) = 0;
    // For callers that have fewer channels than blocks: a tensor like `x` with those of blocks, one for each use, until the next one
    // for it; and what carries rows of one width into rows of the other (kernels/format/channels.h), in the order of the calls.
    enum class Wide : uint8_t { kQ, kK, kV, kOut };
    virtual Result<TensorView> wide_tensor(Wide use, const TensorView& x, int64_t channels) = 0;
    virtual Status copy_channels(Wide use, const TensorView& from, const TensorView& to) = 0;
    // Of steps with gaps. All query rows, then those that are turned (Step::turned), in fp32, as wide as `q`; where attend() leaves
    // the results of all of them; and the joined results of the given rows, with the learned sinks, into what `call` has.
    virtual Result<TensorView> turn(uint32_t layer, const TensorView& q) = 0;
    virtual Status hold_turned(const AttendCall& call, TensorView& out, float*& lse) = 0;
    virtual Status join_turned(const TensorView& out, const float* lse, const AttendCall& call) = 0;
    virtual Status append(uint32_t layer, const TensorView& k, const TensorView& v) = 0;
    // `call` without its sequences.
    virtual Status attend(uint32_t layer, AttendCall& call) = 0;
    // True when calls were captured into a graph that is replayed in place of later ones: a step's calls are not seen then.
    virtual bool replays() const = 0;
    // TA_E_STATE while a graph is captured that the step's end would become a part of.
    virtual Status may_end() const { return {}; }
    // Checks that the step can become part of its sequences. TA_E_STATE: it was left to a graph of another kind of step.
    virtual Status may_commit() const { return {}; }
    // Of drafts, once the members' tokens are those that stay: makes of each block that is to be redone what these give.
    virtual Status redo() = 0;
    // Before the commit: hashes and trailers of the touched blocks, counters of the pool.
    virtual Status seal() = 0;
    // The step is over, committed or not; also called where begin() never was.
    virtual void finish() = 0;
    // Of steps over partitioned sequences.
    virtual PartPath& parts() = 0;
};

// For the plans of a pool: by what its context's device is.
std::unique_ptr<StepBackend> make_step_backend(Pool& pool);

std::unique_ptr<StepBackend> make_cpu_step(Pool& pool);
std::unique_ptr<StepBackend> make_cuda_step(Pool& pool, CudaDevice& device);

}  // namespace ta
