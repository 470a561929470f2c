// Carries out the steps of plans. Each kind of device has one backend.
#pragma once

#include <memory>

#include "src/attend/call.h"
#include "src/attend/partition.h"
#include "src/attend/step.h"

namespace ta {

// The plan has checked shapes, order of calls and options. A failed call changes nothing.
class StepBackend {
  public:
    virtual ~StepBackend() = default;
    // Sets the stream of the following calls. TA_E_UNSUPPORTED: the device has no streams.
    virtual Status set_stream(ta_stream stream) = 0;
    // Begins a step whose blocks are all reserved. The step's address stays the same until finish().
    virtual Status begin(Step& step) = 0;
    // Copies the first `tokens` tokens of a block, which may be shared or closed, into a token block of the plan's own. Before
    // begin().
    virtual Status copy_tokens(const Block& from, int tokens, Block& to) = 0;
    // For callers with fewer channels than blocks. wide_tensor(): a tensor like `x` with the blocks' channels; each use has
    // one, valid until the next call for it. copy_channels(): copies rows of one width to rows of the other
    // (kernels/format/channels.h), in the order of the calls.
    enum class Wide : uint8_t { kQ, kK, kV, kOut };
    virtual Result<TensorView> wide_tensor(Wide use, const TensorView& x, int64_t channels) = 0;
    virtual Status copy_channels(Wide use, const TensorView& from, const TensorView& to) = 0;
    // For steps with gaps. turn() returns all query rows, then those that are turned (Step::turned), in fp32, as wide as `q`.
    // hold_turned() says where attend() puts the results of all these rows. join_turned() joins the results into the outputs of
    // `call`, with sinks.
    virtual Result<TensorView> turn(uint32_t layer, const TensorView& q) = 0;
    virtual Status hold_turned(const AttendCall& call, TensorView& out, float*& lse) = 0;
    virtual Status join_turned(const TensorView& out, const float* lse, const AttendCall& call) = 0;
    virtual Status append(uint32_t layer, const TensorView& k, const TensorView& v) = 0;
    // `call` without its sequences.
    virtual Status attend(uint32_t layer, AttendCall& call) = 0;
    // True if calls were captured into a graph, whose replays stand for later calls: the backend does not see these.
    virtual bool replays() const = 0;
    // TA_E_STATE: a graph is being captured, and the end of the step would become a part of it.
    virtual Status may_end() const { return {}; }
    // Checks that the step can become part of its sequences. TA_E_STATE: the step was replayed from a graph of another kind of
    // step.
    virtual Status may_commit() const { return {}; }
    // In a step with drafts, when the members' tokens are the final ones: re-encodes each block that needs it from these
    // tokens.
    virtual Status redo() = 0;
    // Before the commit: writes hashes and trailers of the touched blocks, and updates the pool's counters.
    virtual Status seal() = 0;
    // Ends the step, committed or not; also called if begin() was not.
    virtual void finish() = 0;
    // For steps over partitioned sequences.
    virtual PartPath& parts() = 0;
};

// Chooses the backend by the device of the pool's context.
std::unique_ptr<StepBackend> make_step_backend(Pool& pool);

std::unique_ptr<StepBackend> make_cpu_step(Pool& pool);
std::unique_ptr<StepBackend> make_cuda_step(Pool& pool, CudaDevice& device);

}  // namespace ta
