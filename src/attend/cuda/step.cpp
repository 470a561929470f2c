// Steps on a GPU: begin() copies the step's tables to the device; append() and attend() enqueue kernels that read them. Once
// the plan has seen the step's kind of work, nothing allocates or waits between begin and end, and no launch argument depends
// on lengths. So a step's calls can be captured into a graph and replayed after later begins. Two exceptions: pools with
// batch_invariant (ranges.h), and prompts over closed pages, which take more memory for a longer context (expansion.h).
#include "src/attend/cuda/step.h"

#include <algorithm>

#include "src/attend/cuda/passing.h"
#include "src/attend/cuda/recall.h"

namespace ta {

CudaStep::~CudaStep() {
    const CudaScope scope(device_.ordinal());
    if (fence_) device_.remove_fence(fence_);
}

Status CudaStep::set_stream(ta_stream stream) {
    const CudaScope scope(device_.ordinal());
    bool captured = false;
    TA_RETURN_IF_ERROR(is_captured(device_, stream, &captured));
    if (captured && fence_ && stream != stream_)
        return fail(TA_E_STATE, "the stream is being captured; the plan's earlier steps cannot be part of a graph");
    // NOTES: earlier work on the old stream comes before later work on the new one. The new stream may have the old one's
    // address.
    if (fence_ && !captured)
        TA_RETURN_IF_ERROR(device_.check(cudaStreamWaitEvent(stream, fence_, 0), "waiting for the plan's earlier steps"));
    stream_ = stream;
    return {};
}

Status CudaStep::begin(Step& step) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    if (std::max(step.total_new, step.all_rows()) > kMaxCudaKeys) {
        return fail(TA_E_LIMIT, "the step has %lld tokens; on a GPU the limit is 2^30",
                    (long long)std::max(step.total_new, step.all_rows()));
    }
    TA_RETURN_IF_ERROR(prepare());
    for (size_t i = 0; i < step.members.size(); ++i) {
        const StepMember& m = step.members[i];
        if (m.length + m.n_new > kMaxCudaKeys) {
            return fail(TA_E_LIMIT, "the sequence would have %lld tokens; on a GPU the limit is 2^30",
                        (long long)(m.length + m.n_new))
                .sequence(int64_t(i));
        }
    }
    // Sends also what the last steps attended with, so that their captured calls find this step's tables.
    TA_RETURN_IF_ERROR(tables_.begin(step, schedules_.any_captured(), stream_));
    TA_RETURN_IF_ERROR(recall_scales(step, pool_, device_, constants_, tables_, stream_));
    TA_RETURN_IF_ERROR(mass_.begin(step, tables_, stream_));
    TA_RETURN_IF_ERROR(keep_anew(step));
    TA_RETURN_IF_ERROR(drafts_.begin(step));
    redone_to_ = 0;
    TA_RETURN_IF_ERROR(turned_.begin(step, stream_));
    ranges_.begin();
    expansion_.begin();
    tables_are_last_ = true;
    step_ = &step;
    TA_RETURN_IF_ERROR(schedules_.begin(tables_, stream_));
    TA_RETURN_IF_ERROR(staging_.begin(step, tables_, schedules_.any_captured(), stream_));
    // Recorded now in case the plan is destroyed within a capture, where nothing can be recorded.
    return device_.check(cudaEventRecord(fence_, stream_), "recording an event");
}

Status CudaStep::prepare() {
    TA_RETURN_IF_ERROR(device_.health());
    bool captured = false;
    TA_RETURN_IF_ERROR(is_captured(device_, stream_, &captured));
    if (captured) return fail(TA_E_STATE, "the plan's stream is being captured; a begin cannot be part of a graph");
    if (!fence_ && !(fence_ = device_.add_fence())) return fail(TA_E_MEMORY, "the driver has no memory for an event");
    TA_RETURN_IF_ERROR(append_plans_.make(pool_.geometry(), device_));
    TA_RETURN_IF_ERROR(constants_.upload());
    // Other plans may have freed slots of this step, and their kernels may still read them.
    TA_RETURN_IF_ERROR(device_.wait_for_fences(stream_, fence_));
    ran_ = true;
    return {};
}

// Saves the blocks whose tokens the step is about to change, so that an abort can restore them.
Status CudaStep::keep_anew(const Step& step) {
    std::vector<const StepBlock*> anew = step.blocks_begun_anew();
    const size_t payload = pool_.geometry().token_payload_bytes;
    TA_RETURN_IF_ERROR(kept_.reserve(anew.size() * payload, "the blocks that a step begins anew"));
    for (size_t i = 0; i < anew.size(); ++i) {
        TA_RETURN_IF_ERROR(device_.check(
            cudaMemcpyAsync(kept_.data() + i * payload, anew[i]->token->slot(), payload, cudaMemcpyDefault, stream_),
            "keeping a block"));
    }
    anew_.swap(anew);
    return {};
}

// Notes that a call of the step has been enqueued.
void CudaStep::see_call() {
    schedules_.see_call();
    if (CaptureScope::captured()) schedules_.see_kind(kind_of_step());
}

// --------------------------------------------------------------------------------------------------------------------- end

// Compares the step with those of captured graphs: the launch of a graph itself is not seen.
Status CudaStep::may_commit() const {
    const bool has_calls = step_->total_new > 0 || step_->total_query > 0;
    if (has_calls && schedules_.left_to_graph() && !schedules_.serves(kind_of_step(), tables_)) {
        return fail(TA_E_STATE,
                    "the step's calls were left to a graph, but the step is of no kind that was captured: abort it, "
                    "run it without the graph and capture again");
    }
    return {};
}

// Hashes the blocks that became full, on the stream.
Status CudaStep::seal() {
    const CudaScope scope(device_.ordinal());
    full_blocks_.clear();
    for (const StepMember& m : step_->members) {
        for (const StepBlock& t : m.touched) {
            if (t.end != kPageTokens) continue;
            Block* full = (t.channel ? t.channel : t.token).get();
            full_blocks_.push_back({full, uint64_t(t.index), full->slot(), full->kind()});
        }
    }
    TA_RETURN_IF_ERROR(hasher_.seal(full_blocks_, stream_));
    TA_RETURN_IF_ERROR(copy_passing(pool_.geometry(), device_, *step_, fence_, stream_));
    // Recorded before blocks are sealed: others may move a sealed block, after the fence.
    if (!full_blocks_.empty() || step_->any_passes())
        TA_RETURN_IF_ERROR(device_.check(cudaEventRecord(fence_, stream_), "recording an event"));
    for (const PlacedBlock& b : full_blocks_) b.block->mark_sealed();
    for (const StepMember& m : step_->members) {
        for (const PassingBlock& p : m.passing) p.to->mark_sealed();
    }
    TA_RETURN_IF_ERROR(mass_.end(*step_, tables_, stream_));
    tables_.committed(*step_);
    anew_.clear();
    return {};
}

// What a captured launch depends on beside tables and schedules. A workspace that was outgrown since then still serves the
// launch.
KindOfStep CudaStep::kind_of_step() const {
    KindOfStep kind{mass_.address(), uint64_t(tables_.any_prefill_of_any_group() && tables_.lacks_blocks())};
    tables_.addresses(kind);
    parts_.add_kind(kind);
    kind.push_back(uint64_t(!step_->is_ordinary()) << 2 | uint64_t(step_->layers_in_order) << 1 | uint64_t(step_->drafts));
    kind.push_back(step_->tree.empty() ? 0 : uint64_t(uintptr_t(tables_.trees())));
    if (step_->drafts) drafts_.add_kind(kind);
    for (const StepMember& m : step_->members) kind.push_back(uint64_t(m.n_query) << 32 | uint64_t(m.n_new));
    return kind;
}

Status CudaStep::may_end() const {
    const CudaScope scope(device_.ordinal());
    bool captured = false;
    // If the device is lost, the step need not stay open.
    if (Status s = is_captured(device_, stream_, &captured); !s.ok()) return s.code() == TA_E_STATE ? std::move(s) : Status();
    if (!captured) return {};
    return fail(TA_E_STATE, "the plan's stream is being captured: end the capture before the step");
}

void CudaStep::finish() {
    schedules_.end(tables_);
    step_ = nullptr;
    if (!ran_) return;
    const CudaScope scope(device_.ordinal());
    if (!may_end().ok())
        return;  // destroyed within a capture: the fence of begin() serves, a new one would belong to the
                 // graph
    staging_.finish(stream_);
    const size_t payload = pool_.geometry().token_payload_bytes;
    for (size_t i = 0; i < anew_.size(); ++i)
        cudaMemcpyAsync(anew_[i]->token->slot(), kept_.data() + i * payload, payload, cudaMemcpyDefault, stream_);
    anew_.clear();
    cudaEventRecord(fence_, stream_);
    staging_.release();
    ran_ = false;
}

std::unique_ptr<StepBackend> make_cuda_step(Pool& pool, CudaDevice& device) {
    return std::make_unique<CudaStep>(pool, device);
}

}  // namespace ta
