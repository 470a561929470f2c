// Steps on a GPU: begin() copies the step's tables to the device, append() and attend() enqueue kernels that read them. Between
// begin and end nothing allocates once the plan has seen the step's kind of work, nothing waits, and no argument of a launch
// depends on lengths, so the calls of a step can be captured into a graph and replayed after later begins. There are two exceptions:
// pools with batch_invariant (ranges.h), and prompts over closed pages, which take more memory for a longer context (expansion.h).
#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/channels/channels.h"
#include "kernels/cuda/any/tables/step_tables.h"
#include "src/attend/backend.h"
#include "src/attend/cuda/append_plans.h"
#include "src/attend/cuda/attend.h"
#include "src/attend/cuda/constants.h"
#include "src/attend/cuda/drafts.h"
#include "src/attend/cuda/expansion.h"
#include "src/attend/cuda/mass.h"
#include "src/attend/cuda/parts.h"
#include "src/attend/cuda/passing.h"
#include "src/attend/cuda/ranges.h"
#include "src/attend/cuda/recall.h"
#include "src/attend/cuda/schedules.h"
#include "src/attend/cuda/staging.h"
#include "src/attend/cuda/tables.h"
#include "src/attend/cuda/turned.h"
#include "src/device/cuda/capture.h"
#include "tiering/verify/cuda_hasher.h"

namespace ta {
namespace {

using cuda::AppendArgs;
using cuda::AppendLayer;
using cuda::AttendArgs;
using cuda::TensorArgs;

class CudaStep final : public StepBackend {
  public:
    CudaStep(Pool& pool, CudaDevice& device)
        : pool_(pool),
          device_(device),
          constants_(pool, device),
          tables_(pool, device),
          mass_(pool, device),
          staging_(pool, device),
          schedules_(device),
          ranges_(device),
          turned_(pool, device),
          decode_workspace_(device, "this shape of a batch"),
          prefill_parts_(device, "prompts"),
          expansion_(device),
          kept_(device),
          drafts_(pool, device),
          wide_{DeviceBuffer(device, "this many query rows"), DeviceBuffer(device, "this many new tokens"),
                DeviceBuffer(device, "this many new tokens"), DeviceBuffer(device, "this many query rows")},
          parts_(pool, device, stream_),
          hasher_(pool.pages(), device),
          redone_layers_(pool.geometry().layers) {}
    ~CudaStep() override;

    Status set_stream(ta_stream stream) override;
    Status begin(Step& step) override;
    Status copy_tokens(const Block& from, int tokens, Block& to) override;
    Result<TensorView> wide_tensor(Wide use, const TensorView& x, int64_t channels) override;
    Status copy_channels(Wide use, const TensorView& from, const TensorView& to) override;
    Result<TensorView> turn(uint32_t layer, const TensorView& q) override;
    Status hold_turned(const AttendCall& call, TensorView& out, float*& lse) override;
    Status join_turned(const TensorView& out, const float* lse, const AttendCall& call) override;
    Status append(uint32_t layer, const TensorView& k, const TensorView& v) override;
    Status attend(uint32_t layer, AttendCall& call) override;
    bool replays() const override { return schedules_.left_to_graph(); }
    Status may_end() const override;
    Status may_commit() const override;
    Status redo() override;
    Status seal() override;
    void finish() override;
    PartPath& parts() override { return parts_; }

  private:
    // The launches of a call, in this order; behind them come those of observed_.
    struct Launches {
        AttendWork decode, prefill, trees;
        bool any_decode = false, any_prefill = false, any_trees = false;
    };

    Status prepare();
    const cuda::AppendPlan& append_plan(uint32_t layer) const { return append_plans_.of(pool_.geometry().shape(layer)); }
    Status keep_anew(const Step& step);
    AppendLayer append_layer(uint32_t layer) const;
    AppendArgs append_args(uint32_t layer) const;
    const TreeRow* trees() const;
    Status check_tensors(const AttendCall& call) const;
    Status check_capture(const CaptureScope& capture) const;
    Status attend_in_ranges(uint32_t layer, const AttendCall& call);
    AttendArgs attend_args(uint32_t layer, const AttendCall& call) const;
    Status prepare_launches(const AttendArgs& args, const AttendCall& call, bool observed, Launches& launches);
    Status prepare_decode(AttendArgs args, const AttendCall& call, int max_rows, bool observed, AttendWork& work);
    void set_kind_of_pages(AttendArgs& a) const;
    Status prepare_without_channels(AttendArgs a, const AttendCall& call, AttendWork& work, bool* replaced);
    Status prepare_prefill(AttendArgs args, const AttendCall& call, AttendWork& work);
    Status prepare_trees(AttendArgs args, ta_p p, AttendWork& work);
    bool has_prompts(int group, ManyRowsKey::Only only) const;
    Status prepare_observed(const AttendArgs& args, ta_p p);
    static Status check_group(int group, const char* what);
    Status add_schedule(const AttendArgs& args, const ManyRowsKey& key, AttendWork& work);
    Status reserve_workspace(const AttendWork& work);
    Status stage(uint32_t layer, const AttendArgs& args, Launches& launches, bool* staged);
    Status launch(const Launches& launches);
    void see_call();
    KindOfStep kind_of_step() const;
    template <class Data>
    Status check_memory(const Data& data, const char* name) const {
        return check_device_memory(device_, data, name);
    }

    Pool& pool_;
    CudaDevice& device_;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t fence_ = nullptr;
    bool ran_ = false;              // on stream_ since the fence was last recorded
    bool tables_are_last_ = false;  // of the plan's kernels on the stream, no other was enqueued after them
    Step* step_ = nullptr;

    CudaConstants constants_;
    CudaTables tables_;
    CudaMass mass_;
    CudaStaging staging_;
    CudaSchedules schedules_;
    CudaRanges ranges_;
    CudaTurned turned_;
    DeviceBuffer decode_workspace_;
    DeviceBuffer prefill_parts_;
    CudaExpansion expansion_;
    std::vector<const StepBlock*> anew_;  // that begin anew, until the step is sealed
    DeviceBuffer kept_;                   // and what they were
    CudaDrafts drafts_;
    DeviceBuffer wide_[4];  // by Wide
    CudaParts parts_;
    CudaHasher hasher_;
    std::vector<PlacedBlock> full_blocks_;
    std::vector<AttendWork> observed_;  // of a call: prepare_observed()
    AppendPlans append_plans_;
    std::vector<AppendLayer> redone_layers_;  // [layers], at the end of a step with drafts
};

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
    // Earlier work on the old stream comes before later work on the new one, which may have its address.
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
    // With what the last steps attended with, so that their captured calls find this step's tables.
    TA_RETURN_IF_ERROR(tables_.begin(step, schedules_.any_captured(), stream_));
    TA_RETURN_IF_ERROR(recall_scales(step, pool_, device_, constants_, tables_, stream_));
    TA_RETURN_IF_ERROR(mass_.begin(step, tables_, stream_));
    TA_RETURN_IF_ERROR(keep_anew(step));
    TA_RETURN_IF_ERROR(drafts_.begin(step));
    TA_RETURN_IF_ERROR(turned_.begin(step, stream_));
    ranges_.begin();
    expansion_.begin();
    tables_are_last_ = true;
    step_ = &step;
    TA_RETURN_IF_ERROR(schedules_.begin(tables_, stream_));
    TA_RETURN_IF_ERROR(staging_.begin(step, tables_, schedules_.any_captured(), stream_));
    // For a plan that is destroyed within a capture, where nothing can be recorded any more.
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
    // Slots of this step may have been freed by other plans, whose kernels may still read them.
    TA_RETURN_IF_ERROR(device_.wait_for_fences(stream_, fence_));
    ran_ = true;
    return {};
}

// Keeps the blocks that the step begins anew, for an abort to put back.
Status CudaStep::keep_anew(const Step& step) {
    anew_.clear();
    std::vector<const StepBlock*> anew;
    for (const StepMember& m : step.members) {
        for (const StepBlock& t : m.touched) {
            if (t.changes_tokens()) anew.push_back(&t);
        }
    }
    const size_t payload = pool_.geometry().token_payload_bytes;
    TA_RETURN_IF_ERROR(kept_.reserve(anew.size() * payload, "the blocks that a step begins anew"));
    for (size_t i = 0; i < anew.size(); ++i) {
        TA_RETURN_IF_ERROR(device_.check(
            cudaMemcpyAsync(kept_.data() + i * payload, anew[i]->token->slot(), payload, cudaMemcpyDefault, stream_),
            "keeping a block"));
    }
    anew_ = std::move(anew);
    return {};
}

// A call of the step has been enqueued.
void CudaStep::see_call() {
    schedules_.see_call();
    if (CaptureScope::captured()) schedules_.see_kind(kind_of_step());
}

// ------------------------------------------------------------------------------------------------------------------ append

Status CudaStep::copy_tokens(const Block& from, int tokens, Block& to) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(prepare());
    const Geometry& g = pool_.geometry();
    const Block::Stored at = from.stored();
    if (at.kind == PageKind::kToken) {
        return device_.check(cudaMemcpyAsync(to.slot(), at.slot, g.token_slot_bytes, cudaMemcpyDefault, stream_),
                             "copying a block");
    }
    cuda::ReopenArgs args{};
    args.tokens = tokens;
    args.channel_slot = uint64_t(uintptr_t(at.slot));
    args.token_slot = uint64_t(uintptr_t(to.slot()));
    args.k_turning = pool_.numerics().encode.k_turning;
    for (uint32_t layer = 0, end = 0; layer < g.layers; layer = end) {
        end = g.end_of_run(layer);
        args.head_dim = int32_t(g.shape(layer).head_dim);
        args.kv_heads = int32_t(g.shape(layer).kv_heads);
        args.layers = int32_t(end - layer);
        args.channel_layer_offset = constants_.layer_offsets(at.kind) + layer;
        args.heads = constants_.heads(at.kind, layer);
        args.token_layer_offset = constants_.layer_offsets(PageKind::kToken) + layer;
        if (g.keeps_own_scales) args.token_own_scales = g.own_scales_offset(layer, 0);
        TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_reopen(args, stream_)), "reopening a block"));
    }
    return {};
}

// By Wide.
constexpr const char* kWideNames[] = {"q", "k", "v", "out"};

Result<TensorView> CudaStep::wide_tensor(Wide use, const TensorView& x, int64_t channels) {
    const CudaScope scope(device_.ordinal());
    CaptureScope capture;
    TA_RETURN_IF_ERROR(capture.enter(device_, stream_));
    TensorView wide = x;
    wide.head_dim = wide.stride_head = channels;
    wide.stride_token = x.heads * wide.head_dim;
    const size_t bytes = size_t(x.tokens * wide.stride_token) * dtype_bytes(x.dtype);
    TA_RETURN_IF_ERROR(device_.health());
    TA_RETURN_IF_ERROR(check_memory(x, kWideNames[size_t(use)]));
    DeviceBuffer& buffer = wide_[size_t(use)];
    TA_RETURN_IF_ERROR(buffer.reserve(std::max<size_t>(bytes, 1), "a tensor with the channels of blocks"));
    wide.data = buffer.data();
    return wide;
}

Status CudaStep::copy_channels(Wide, const TensorView& from, const TensorView& to) {
    const CudaScope scope(device_.ordinal());
    const cuda::CopyChannelsArgs args{tensor_args(from),   tensor_args(to),        from.tokens,
                                      int32_t(from.heads), int32_t(from.head_dim), int32_t(to.head_dim)};
    tables_are_last_ = false;
    return device_.check(cudaError_t(cuda::launch_copy_channels(args, stream_)), "a copy of channels");
}

Result<TensorView> CudaStep::turn(uint32_t layer, const TensorView& q) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    if (Status s = check_memory(q, "q"); !s.ok()) return std::move(s).argument(2);
    CaptureScope capture;
    TA_RETURN_IF_ERROR(capture.enter(device_, stream_));
    TA_RETURN_IF_ERROR(check_capture(capture));
    tables_are_last_ = false;
    return turned_.turn(*step_, constants_, layer, q, stream_);
}

Status CudaStep::hold_turned(const AttendCall& call, TensorView& out, float*& lse) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(check_tensors(call));
    return turned_.hold(*step_, call, out, lse);
}

Status CudaStep::join_turned(const TensorView& out, const float* lse, const AttendCall& call) {
    const CudaScope scope(device_.ordinal());
    return turned_.join(out, lse, call, stream_);
}

Status CudaStep::append(uint32_t layer, const TensorView& k, const TensorView& v) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    if (Status s = check_memory(k, "k"); !s.ok()) return std::move(s).argument(2);
    if (Status s = check_memory(v, "v"); !s.ok()) return std::move(s).argument(3);
    CaptureScope capture;
    TA_RETURN_IF_ERROR(capture.enter(device_, stream_));
    TA_RETURN_IF_ERROR(check_capture(capture));
    schedules_.begin_call();
    AppendArgs a = append_args(layer);
    a.n_tasks = tables_.n_tasks();
    a.tasks = tables_.tasks();
    a.layer.k = tensor_args(k);
    a.layer.v = tensor_args(v);
    if (step_->drafts) drafts_.keep(layer, k.tokens, a);
    // Of drafts those that stay are counted, at the end.
    a.nonfinite = step_->drafts ? nullptr : pool_.nonfinite_counters();
    const bool pages_turn = capture.captured() || tables_.pages_begin();
    TA_RETURN_IF_ERROR(
        device_.check(cudaError_t(cuda::launch_append(append_plan(layer), a, pages_turn, stream_)), "an append"));
    tables_are_last_ = false;
    see_call();
    return {};
}

// What an append takes of a layer, but for K and V.
AppendLayer CudaStep::append_layer(uint32_t layer) const {
    const Geometry& g = pool_.geometry();
    AppendLayer a{};
    a.token_layer_offset = g.page_offset(PageKind::kToken, layer);
    a.low_layer_offset = g.falls ? g.page_offset(PageKind::kLow, layer) : 0;
    if (g.has_channel_blocks()) {
        a.channel_layer_offset = g.page_offset(PageKind::kChannel, layer);
        a.heads = constants_.heads(PageKind::kChannel, layer);
    }
    a.k_offset = constants_.k_offset(layer);
    if (pool_.numerics().universal_open_scale) {
        a.largest_scales = pool_.largest_scales() + g.index(layer, 0) * 2;
        a.token_own_scales = g.own_scales_offset(layer, 0);
    }
    return a;
}

// All but the tasks and what they read.
AppendArgs CudaStep::append_args(uint32_t layer) const {
    const Geometry& g = pool_.geometry();
    const Numerics& n = pool_.numerics();
    AppendArgs a{};
    a.head_dim = int32_t(g.shape(layer).head_dim);
    a.kv_heads = int32_t(g.shape(layer).kv_heads);
    a.layer = append_layer(layer);
    a.signs = constants_.signs();
    a.k_page_scale = n.k_page_scale;
    a.v_page_scale = n.v_page_scale;
    a.k_page_scale_at_8_bits = n.k_page_scale_at_8_bits;
    a.v_page_scale_at_8_bits = n.v_page_scale_at_8_bits;
    a.encode = n.encode;
    a.saturate = n.saturate;
    a.universal_open_scale = n.universal_open_scale;
    if (n.universal_open_scale) {
        a.scales_stride = int64_t(pool_.scales_record());
        static_assert(sizeof(cuda::AppendProgress) == Pool::kAppendProgressBytes);
        a.progress = reinterpret_cast<cuda::AppendProgress*>(pool_.append_progress());
    }
    a.clamped = pool_.clamped_counter();
    return a;
}

// Appends the tokens that stay once more to the blocks in which others had a say: all layers of one shape at once. Universal scales take
// one layer after the other, since all of them count their tasks in the same place (AppendProgress).
Status CudaStep::redo() {
    if (step_->total_new == 0) return {};
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    const Geometry& g = pool_.geometry();
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        AppendLayer& of_drafts = redone_layers_[layer];
        of_drafts = append_layer(layer);
        of_drafts.k = drafts_.rows(layer, false);
        of_drafts.v = drafts_.rows(layer, true);
    }
    Result<CudaDrafts::Redone> closed_up = drafts_.close_up(*step_, tables_, redone_layers_, stream_);
    if (!closed_up.ok()) return std::move(closed_up).status();
    const CudaDrafts::Redone redone = closed_up.take();
    for (uint32_t layer = 0, end = 0; layer < g.layers && redone.blocks > 0; layer = end) {
        end = pool_.numerics().universal_open_scale ? layer + 1 : g.end_of_run(layer);
        AppendArgs a = append_args(layer);
        a.n_tasks = redone.n_tasks;
        a.tasks = redone.tasks;
        a.most_tasks = int32_t(redone.blocks);
        a.layers = redone.layers + layer;
        a.n_layers = int32_t(end - layer);
        TA_RETURN_IF_ERROR(
            device_.check(cudaError_t(cuda::launch_append(append_plan(layer), a, true, stream_)), "an append of drafts"));
    }
    return {};
}

// ------------------------------------------------------------------------------------------------------------------ attend

Status CudaStep::attend(uint32_t layer, AttendCall& call) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    TA_RETURN_IF_ERROR(check_tensors(call));
    CaptureScope capture;
    TA_RETURN_IF_ERROR(capture.enter(device_, stream_));
    TA_RETURN_IF_ERROR(check_capture(capture));
    if (call.batch_invariant) return attend_in_ranges(layer, call);
    schedules_.begin_call();
    if (!tables_.use_group(call.group)) {
        if (capture.captured()) return needs_a_run("this number of query heads");
        TA_RETURN_IF_ERROR(tables_.send_sequences(*step_, call.group, stream_));
        tables_are_last_ = true;
    }
    schedules_.add_group(call.group, tables_.sequences(), !tables_.may_lack_blocks());
    if (capture.captured()) tables_.keep_group();
    // Whatever may fail comes before the first launch, which writes to out.
    const AttendArgs args = attend_args(layer, call);
    // A graph is replayed in any turn.
    const bool observed = step_->is_ordinary() && pool_.observes(layer, capture.captured() ? 0 : step_->turn);
    Launches launches;
    TA_RETURN_IF_ERROR(prepare_launches(args, call, observed, launches));
    bool staged = false;
    if (!capture.captured()) TA_RETURN_IF_ERROR(stage(layer, args, launches, &staged));
    // Decode may start while the kernel before it runs, and reads the tables at once.
    if (tables_are_last_ || staged)
        launches.decode.plan.overlap = launches.prefill.plan.overlap = launches.trees.plan.overlap = false;
    tables_are_last_ = false;
    Status launched = launch(launches);
    if (staged) TA_RETURN_IF_ERROR(staging_.after_attend(stream_));
    TA_RETURN_IF_ERROR(std::move(launched));
    see_call();
    return {};
}

// How the keys of queries are cut follows from lengths, which a graph must not depend on.
Status CudaStep::check_capture(const CaptureScope& capture) const {
    if (!capture.captured()) return {};
    if (pool_.numerics().batch_invariant)
        return fail(TA_E_UNSUPPORTED, "calls of a pool with batch_invariant cannot be captured");
    if (step_->is_ordinary()) return {};
    return fail(TA_E_UNSUPPORTED,
                "calls of a step with options.query_positions, or with a sequence that was shifted, cannot be captured");
}

Status CudaStep::attend_in_ranges(uint32_t layer, const AttendCall& call) {
    TA_RETURN_IF_ERROR(check_group(call.group, "under batch_invariant"));
    tables_are_last_ = false;
    return ranges_.attend(*step_, tables_, attend_args(layer, call), call, stream_);
}

Status CudaStep::check_tensors(const AttendCall& call) const {
    const AttendSettings& settings = call.settings;
    if (Status s = check_memory(call.q, "q"); !s.ok()) return std::move(s).argument(2);
    if (Status s = check_memory(call.out, "out"); !s.ok()) return std::move(s).argument(3);
    if (call.q.tokens > 0) {
        if (Status s = check_memory(call.lse, "lse"); !s.ok()) return std::move(s).argument(4);
    }
    if (Status s = check_memory(settings.alibi_slopes, "options.alibi_slopes"); !s.ok()) return std::move(s).argument(5);
    if (Status s = check_memory(settings.sinks, "options.sinks"); !s.ok()) return std::move(s).argument(5);
    return {};
}

// The arguments that all launches of a call have in common.
AttendArgs CudaStep::attend_args(uint32_t layer, const AttendCall& call) const {
    const Geometry& g = pool_.geometry();
    AttendArgs a{};
    a.head_dim = call.head_dim;
    a.kv_heads = call.kv_heads;
    a.group = call.group;
    a.batch = int32_t(tables_.queries().size());
    if (!call.batch_invariant) {  // there each query is a sequence
        a.sequences = tables_.sequences();
        a.pages_before = tables_.pages_before();
    }
    a.table = tables_.entries();
    a.token_layer_offset = g.page_offset(PageKind::kToken, layer);
    if (g.has_channel_blocks()) {
        a.channel_layer_offset = g.page_offset(PageKind::kChannel, layer);
        a.heads = constants_.heads(PageKind::kChannel, layer);
    }
    a.has_low = g.falls;
    a.some_8_bits = g.some_8_bits;
    a.low_layer_offset = g.falls ? g.page_offset(PageKind::kLow, layer) : 0;
    a.q = tensor_args(call.q);
    a.out = tensor_args(call.out);
    a.lse = call.lse;
    a.signs = constants_.signs();
    a.k_offset = constants_.k_offset(layer);
    a.k_turning = call.k_turning;
    a.q_levels = call.q_levels;
    a.saturate = call.saturate;
    a.nonfinite = nullptr;
    set_options(call.settings, a);
    return a;
}

// For a call: a graph is replayed with other trees, a chain among them.
const TreeRow* CudaStep::trees() const {
    return step_->branches || (CaptureScope::captured() && !step_->tree.empty()) ? tables_.trees() : nullptr;
}

// A call by hand gets what it would need to be observed even where it is not: a graph may observe it.
Status CudaStep::prepare_launches(const AttendArgs& a, const AttendCall& call, bool observed, Launches& l) {
    const ta_p p = call.settings.p;
    const int rows = tables_.max_decode_rows();
    l.any_decode = rows > 0;
    l.any_prefill = tables_.any_prefill();
    if (trees() && l.any_prefill) {
        l.any_trees = has_prompts(a.group, ManyRowsKey::Only::kTrees);
        l.any_prefill = has_prompts(a.group, ManyRowsKey::Only::kChains);
    }
    if (l.any_decode) TA_RETURN_IF_ERROR(prepare_decode(a, call, rows, observed, l.decode));
    observed_.clear();
    if (l.any_trees) TA_RETURN_IF_ERROR(prepare_trees(a, p, l.trees));
    if (l.any_prefill) TA_RETURN_IF_ERROR(prepare_prefill(a, call, l.prefill));
    if (l.any_prefill || l.any_trees) {
        if (observed || (mass_.on() && !CaptureScope::captured())) TA_RETURN_IF_ERROR(prepare_observed(a, p));
    }
    if (!observed) {
        observed_.clear();
        return {};
    }
    cuda::DecodeMass mass = mass_.args();  // now that it has room for all of them
    if (l.any_decode) l.decode.mass = std::exchange(mass, mass_.without_heads());
    for (AttendWork& w : observed_) w.mass = std::exchange(mass, mass_.without_heads());
    return {};
}

Status CudaStep::prepare_decode(AttendArgs a, const AttendCall& call, int max_rows, bool observed, AttendWork& work) {
    set_p(call.settings.p, max_rows, kDecodeRangePages, a);
    a.may_lack_pages = tables_.may_lack_blocks();
    // Observed launches take all entries: the attention of pages is added up by entry, and there other ranks' blocks are skipped.
    if (tables_.block_stride() > 1 && !observed) {
        a.first_block = tables_.first_block();
        a.block_stride = tables_.block_stride();
        a.pages_before = tables_.own_pages_before();
    }
    TA_RETURN_IF_ERROR(plan_few_rows(device_, a, max_rows, call.q_rest, work));
    work.tree = trees();
    if (mass_.on()) TA_RETURN_IF_ERROR(mass_.reserve(tables_, 4 * work.plan.tiles));
    return reserve_workspace(work);
}

// The decode kernel takes whole tokens.
Status CudaStep::check_group(int group, const char* what) {
    if (group <= cuda::kDecodeRows) return {};
    return fail(TA_E_UNSUPPORTED, "a GPU takes up to %d query heads per kv head in attention %s; the call has %d",
                cuda::kDecodeRows, what, group);
}

Status CudaStep::prepare_prefill(AttendArgs a, const AttendCall& call, AttendWork& work) {
    a.may_lack_pages = tables_.lacks_blocks();
    ManyRowsKey key = choose_for_many_rows(device_, call.settings.p, a);
    if (trees()) key.only = ManyRowsKey::Only::kChains;
    if (!key.kernel) TA_RETURN_IF_ERROR(check_group(a.group, trees() ? "of a token tree" : "by this kernel"));
    // Decode, which takes the rows of a prompt by their places, passes over other ranks' blocks one by one.
    if (!key.kernel && (tables_.block_stride() > 1 || CaptureScope::captured())) a.may_lack_pages = tables_.may_lack_blocks();
    if (key.kernel && call.lse_of_o) a.lse_of_o = std::exchange(a.lse, nullptr);
    // A graph is replayed with other steps: what it captures takes the kernel for all of them, which is loaded by then.
    if (CaptureScope::captured()) return add_schedule(a, key, work);
    if (!key.kernel) {
        Status decode = add_schedule(a, key, work);
        bool replaced = false;
        if (a.heads) TA_RETURN_IF_ERROR(prepare_without_channels(a, call, work, &replaced));
        return replaced ? Status() : std::move(decode);
    }
    TA_RETURN_IF_ERROR(device_.check(key.kernel->load(a), "loading a kernel"));
    set_kind_of_pages(a);
    return add_schedule(a, key, work);
}

// Prompts of new sequences take the kernel that knows no channel pages, long ones that for long tiles.
void CudaStep::set_kind_of_pages(AttendArgs& a) const {
    const Numerics& n = pool_.numerics();
    if (!tables_.may_have_channel_blocks()) a.heads = nullptr;
    a.long_tiles = pool_.geometry().has_channel_blocks() ? n.k_page_scale : n.k_page_scale_at_8_bits;
    a.resident = true;
}

// Where no prefill kernel knows channel pages: one of those that know none, if the step has none or all of them can be expanded.
// Else `work` stays, the decode kernel's; graphs find its schedule then.
Status CudaStep::prepare_without_channels(AttendArgs a, const AttendCall& call, AttendWork& work, bool* replaced) {
    const cuda::HeadArgs* const heads = a.heads;
    a.may_lack_pages = tables_.lacks_blocks();
    a.heads = nullptr;
    ManyRowsKey key = choose_for_many_rows(device_, call.settings.p, a);
    if (!key.kernel) return {};
    if (trees()) key.only = ManyRowsKey::Only::kChains;
    if (call.lse_of_o) a.lse_of_o = std::exchange(a.lse, nullptr);
    TA_RETURN_IF_ERROR(device_.check(key.kernel->load(a), "loading a kernel"));
    a.heads = heads;
    set_kind_of_pages(a);
    if (a.heads) key.expands = ManyRowsKey::Expands::kAlways;
    AttendWork without;
    TA_RETURN_IF_ERROR(add_schedule(a, key, without));
    *replaced = !a.heads || without.expand.pages > 0;
    if (*replaced) work = without;
    return {};
}

bool CudaStep::has_prompts(int group, ManyRowsKey::Only only) const {
    const std::vector<cuda::SequenceArgs> prompts = prompts_of(tables_.queries(), group, only);
    return std::any_of(prompts.begin(), prompts.end(), [](const cuda::SequenceArgs& s) { return s.n_query > 0; });
}

// Sequences that may be token trees and have more rows than the decode kernel takes at once: it alone knows trees.
Status CudaStep::prepare_trees(AttendArgs a, ta_p p, AttendWork& work) {
    set_p(p, cuda::kDecodeRows + 1, kPromptRangePages, a);
    a.may_lack_pages = tables_.may_lack_blocks();
    ManyRowsKey key{a.group, a.causal, a.window, nullptr};
    key.only = ManyRowsKey::Only::kTrees;
    key.trees = true;
    return add_schedule(a, key, work);
}

// The prefill kernel does not say what pages get. The last query tokens of prompts, those that are observed, are attended to
// once more in layers that are observed, by the decode kernel, which writes their rows again. A launch takes one chunk of each
// sequence: a page has room for the rows of one.
Status CudaStep::prepare_observed(const AttendArgs& args, ta_p p) {
    AttendArgs a = args;
    TA_RETURN_IF_ERROR(check_group(a.group, "whose attention the policy observes"));
    set_p(p, cuda::kDecodeRows, kPromptRangePages, a);
    a.may_lack_pages = tables_.may_lack_blocks();
    const int chunks = count_observed_chunks(a.group, prompts_of(tables_.queries(), a.group));
    for (int chunk = 0; chunk < chunks; ++chunk) {
        AttendWork& work = observed_.emplace_back();
        ManyRowsKey key{a.group, a.causal, a.window, nullptr, chunk};
        key.trees = trees() != nullptr;
        TA_RETURN_IF_ERROR(add_schedule(a, key, work));
        TA_RETURN_IF_ERROR(mass_.reserve(tables_, 4 * work.plan.tiles));
    }
    return {};
}

Status CudaStep::add_schedule(const AttendArgs& args, const ManyRowsKey& key, AttendWork& work) {
    Result<CudaSchedules::Schedule*> found = schedules_.find(key, tables_, stream_);
    if (!found.ok()) return std::move(found).status();
    CudaSchedules::Schedule& schedule = *found.value();
    TA_RETURN_IF_ERROR(plan_many_rows(device_, args, schedule.rows, work));
    if (key.trees) work.tree = trees();
    set_schedule(schedule.rows, schedule.buffer.data(), work);
    schedules_.add_read(schedule);
    TA_RETURN_IF_ERROR(prefill_parts_.may_reserve(work.parts_bytes));
    Status reserved = prefill_parts_.reserve(work.parts_bytes, "the parts of prompts");
    if (!reserved.ok() && schedule.rows.tiles.slots() > 0) return reserved;
    work.parts = prefill_parts_.data();
    const bool expands = work.expand.pages > 0 && !CaptureScope::captured();
    if (!expands || !expansion_.take(tables_, work)) work.expand.pages = 0;
    return reserve_workspace(work);
}

Status CudaStep::reserve_workspace(const AttendWork& work) {
    return decode_workspace_.reserve(work.plan.workspace_bytes, "the workspace of attention", [&](uint8_t* data) {
        return device_.check(cudaMemsetAsync(data, 0, work.plan.zeroed_bytes, stream_), "zeroing the workspace of attention");
    });
}

// Has the launches read pages where they are staged. `*staged`: some are.
Status CudaStep::stage(uint32_t layer, const AttendArgs& a, Launches& l, bool* staged) {
    CudaStaging::Call like{0, a.window};
    if (l.any_prefill || l.any_trees)
        like.rows_at_once = l.prefill.kernel ? l.prefill.kernel->rows : cuda::kDecodeRows / a.group * a.group;
    Result<const uint64_t*> table = staging_.before_attend(layer, like, staged, stream_);
    if (!table.ok()) return std::move(table).status();
    l.decode.args.table = l.prefill.args.table = l.trees.args.table = table.value();
    for (AttendWork& w : observed_) w.args.table = table.value();
    return {};
}

Status CudaStep::launch(const Launches& l) {
    uint8_t* const workspace = decode_workspace_.data();
    if (l.any_decode) TA_RETURN_IF_ERROR(launch_attend(device_, l.decode, workspace, stream_));
    if (l.any_prefill) TA_RETURN_IF_ERROR(launch_attend(device_, l.prefill, workspace, stream_));
    if (l.any_trees) TA_RETURN_IF_ERROR(launch_attend(device_, l.trees, workspace, stream_));
    for (const AttendWork& w : observed_) TA_RETURN_IF_ERROR(launch_attend(device_, w, workspace, stream_));
    return {};
}

// --------------------------------------------------------------------------------------------------------------------- end

// Compares the step with those in which graphs were captured; the launch of a graph itself is not seen.
Status CudaStep::may_commit() const {
    const bool has_calls = step_->total_new > 0 || step_->total_query > 0;
    if (has_calls && schedules_.left_to_graph() && !schedules_.serves(kind_of_step(), tables_)) {
        return fail(TA_E_STATE,
                    "the step's calls were left to a graph, but the step is of no kind that was captured: abort it, "
                    "run it without the graph and capture again");
    }
    return {};
}

// Enqueues the hashes of the blocks that became full.
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
    // Others may move a block as soon as it is sealed, behind the fence.
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

// All that a captured launch depends on beside the tables and schedules. A workspace that was outgrown since still serves it.
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
    // A device that is lost is no reason to stay open.
    if (Status s = is_captured(device_, stream_, &captured); !s.ok()) return s.code() == TA_E_STATE ? std::move(s) : Status();
    if (!captured) return {};
    return fail(TA_E_STATE, "the plan's stream is being captured: end the capture before the step");
}

void CudaStep::finish() {
    schedules_.end(tables_);
    step_ = nullptr;
    if (!ran_) return;
    const CudaScope scope(device_.ordinal());
    if (!may_end().ok()) return;  // destroyed within a capture: the fence of begin stands, a later one would be part of it
    staging_.finish(stream_);
    const size_t payload = pool_.geometry().token_payload_bytes;
    for (size_t i = 0; i < anew_.size(); ++i)
        cudaMemcpyAsync(anew_[i]->token->slot(), kept_.data() + i * payload, payload, cudaMemcpyDefault, stream_);
    anew_.clear();
    cudaEventRecord(fence_, stream_);
    staging_.release();
    ran_ = false;
}

}  // namespace

std::unique_ptr<StepBackend> make_cuda_step(Pool& pool, CudaDevice& device) {
    return std::make_unique<CudaStep>(pool, device);
}

}  // namespace ta
