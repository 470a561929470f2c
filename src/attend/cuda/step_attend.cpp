// Attention of a step: which launches a call takes, what they read, and their order.
#include <algorithm>
#include <utility>

#include "src/attend/cuda/step.h"

namespace ta {

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
    // All that may fail comes before the first launch, which writes to out.
    const AttendArgs args = attend_args(layer, call);
    // A graph may be replayed in any turn.
    const bool observed = step_->is_ordinary() && pool_.residency().observes(layer, capture.captured() ? 0 : step_->turn);
    Launches launches;
    TA_RETURN_IF_ERROR(prepare_launches(args, call, observed, launches));
    bool staged = false;
    if (!capture.captured()) TA_RETURN_IF_ERROR(stage(layer, args, launches, &staged));
    // A decode launch that overlaps the kernel before it reads the tables at once: not if that kernel writes them.
    if (tables_are_last_ || staged) {
        for (AttendWork* w : {&launches.decode, &launches.prefill, &launches.lacking, &launches.trees}) w->plan.overlap = false;
    }
    tables_are_last_ = false;
    Status launched = launch(launches);
    if (staged) TA_RETURN_IF_ERROR(staging_.after_attend(stream_));
    TA_RETURN_IF_ERROR(std::move(launched));
    see_call();
    return {};
}

// batch_invariant: the cut of a query's keys depends on lengths, and a graph must not.
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

// The arguments that all launches of a call share.
AttendArgs CudaStep::attend_args(uint32_t layer, const AttendCall& call) const {
    const Geometry& g = pool_.geometry();
    AttendArgs a{};
    a.head_dim = call.head_dim;
    a.kv_heads = call.kv_heads;
    a.group = call.group;
    a.batch = int32_t(tables_.queries().size());
    if (!call.batch_invariant) {  // else each query is a sequence of its own
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

// For a call: nullptr if it can do without trees. A graph may be replayed with other trees, or chains.
const TreeRow* CudaStep::trees() const {
    return step_->branches || (CaptureScope::captured() && !step_->tree.empty()) ? tables_.trees() : nullptr;
}

// A call by hand takes the memory for observation even if it is not observed: a graph may be.
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
    if (l.any_prefill) TA_RETURN_IF_ERROR(prepare_prompts(a, call, l));
    if (l.any_prefill || l.any_trees) {
        if (observed || (mass_.on() && !CaptureScope::captured())) TA_RETURN_IF_ERROR(prepare_observed(a, p));
    }
    if (!observed) {
        observed_.clear();
        return {};
    }
    cuda::DecodeMass mass = mass_.args();  // now it has room for all launches
    if (l.any_decode) l.decode.mass = std::exchange(mass, mass_.without_heads());
    for (AttendWork& w : observed_) w.mass = std::exchange(mass, mass_.without_heads());
    return {};
}

Status CudaStep::prepare_decode(AttendArgs a, const AttendCall& call, int max_rows, bool observed, AttendWork& work) {
    set_p(call.settings.p, max_rows, kDecodeRangePages, a);
    a.may_lack_pages = tables_.may_lack_blocks();
    // Observed launches read all entries: attention is added up by entry, and the sums skip other ranks' blocks.
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

// The decode kernel takes all query heads of a token together.
Status CudaStep::check_group(int group, const char* what) {
    if (group <= cuda::kDecodeRows) return {};
    return fail(TA_E_UNSUPPORTED, "a GPU takes up to %d query heads per kv head in attention %s; the call has %d",
                cuda::kDecodeRows, what, group);
}

// If blocks are missing, prompts that see none of the missing ones still take a prefill kernel, in a launch of their own. If no
// option depends on the distance of keys, so do prompts that miss blocks only before their own. A captured call makes one
// launch for all prompts, since its graph is replayed with other steps. It finds its schedule if a call by hand has made it.
Status CudaStep::prepare_prompts(const AttendArgs& a, const AttendCall& call, Launches& l) {
    using Blocks = ManyRowsKey::Blocks;
    const auto only = trees() ? ManyRowsKey::Only::kChains : ManyRowsKey::Only::kAll;
    const bool packs = a.window == 0 && !a.alibi_slope && a.exp != ExpMode::kSas;
    const Blocks with = packs ? Blocks::kPacked : Blocks::kWhole, without = packs ? Blocks::kUnpacked : Blocks::kLacking;
    const bool apart = tables_.lacks_blocks() && !CaptureScope::captured() && has_prompts(a.group, only, with);
    AttendWork whole;
    if (apart) TA_RETURN_IF_ERROR(prepare_prefill(a, call, with, whole));
    const bool for_graphs = step_->is_ordinary() && a.group <= cuda::kDecodeRows;
    if (!whole.kernel || for_graphs) {
        Status all = prepare_prefill(a, call, Blocks::kAll, l.prefill);
        if (!whole.kernel) return all;  // otherwise a later capture may lack its schedule, and says so
    }
    l.prefill = whole;
    l.any_lacking = has_prompts(a.group, only, without);
    return l.any_lacking ? prepare_prefill(a, call, without, l.lacking) : Status();
}

Status CudaStep::prepare_prefill(AttendArgs a, const AttendCall& call, ManyRowsKey::Blocks blocks, AttendWork& work) {
    a.may_lack_pages = lacks_pages(blocks);
    ManyRowsKey key = choose_for_many_rows(device_, call.settings.p, a);
    key.blocks = blocks;
    if (trees()) key.only = ManyRowsKey::Only::kChains;
    if (!key.kernel) TA_RETURN_IF_ERROR(check_group(a.group, trees() ? "of a token tree" : "by this kernel"));
    // The decode kernel takes a prompt's rows in chunks; then it skips other ranks' blocks one by one.
    if (!key.kernel && (tables_.block_stride() > 1 || CaptureScope::captured())) a.may_lack_pages = tables_.may_lack_blocks();
    if (key.kernel && call.lse_of_o) a.lse_of_o = std::exchange(a.lse, nullptr);
    // A graph is replayed with other steps, so a captured call takes the kernel for all kinds of pages, which is loaded by
    // then.
    if (CaptureScope::captured()) return add_schedule(a, key, work);
    if (!key.kernel) {
        Status decode = add_schedule(a, key, work);
        bool replaced = false;
        if (a.heads) TA_RETURN_IF_ERROR(prepare_without_channels(a, call, blocks, work, &replaced));
        return replaced ? Status() : std::move(decode);
    }
    TA_RETURN_IF_ERROR(device_.check(key.kernel->load(a), "loading a kernel"));
    set_kind_of_pages(a);
    return add_schedule(a, key, work);
}

// Prompts of new sequences take the variant without channel pages; long ones take the one for long tiles.
void CudaStep::set_kind_of_pages(AttendArgs& a) const {
    const Numerics& n = pool_.numerics();
    if (!tables_.may_have_channel_blocks()) a.heads = nullptr;
    a.long_tiles = pool_.geometry().has_channel_blocks() ? n.k_page_scale : n.k_page_scale_at_8_bits;
    a.resident = true;
}

// For calls whose channel pages no prefill kernel can read. Takes one without channel pages if the step has none, or if all of
// them can be expanded. Otherwise `work` stays the decode kernel's. Graphs use that one's schedule.
Status CudaStep::prepare_without_channels(AttendArgs a, const AttendCall& call, ManyRowsKey::Blocks blocks, AttendWork& work,
                                          bool* replaced) {
    const cuda::HeadArgs* const heads = a.heads;
    a.may_lack_pages = lacks_pages(blocks);
    a.heads = nullptr;
    ManyRowsKey key = choose_for_many_rows(device_, call.settings.p, a);
    key.blocks = blocks;
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

bool CudaStep::has_prompts(int group, ManyRowsKey::Only only, ManyRowsKey::Blocks blocks) const {
    const std::vector<cuda::SequenceArgs> prompts = tables_.prompts(group, only, blocks);
    return std::any_of(prompts.begin(), prompts.end(), [](const cuda::SequenceArgs& s) { return s.n_query > 0; });
}

// For sequences that may be token trees, with more rows than the decode kernel takes at once: only that kernel can read trees.
Status CudaStep::prepare_trees(AttendArgs a, ta_p p, AttendWork& work) {
    TA_RETURN_IF_ERROR(check_group(a.group, "of a token tree"));
    set_p(p, cuda::kDecodeRows + 1, kPromptRangePages, a);
    a.may_lack_pages = tables_.may_lack_blocks();
    ManyRowsKey key{a.group, a.causal, a.window, nullptr};
    key.only = ManyRowsKey::Only::kTrees;
    key.trees = true;
    return add_schedule(a, key, work);
}

// The prefill kernel does not tell the attention of pages. So in observed layers the decode kernel attends once more with the
// observed query tokens, the last ones of each prompt, and writes their rows again. Each launch takes one chunk of each
// sequence: a page has room for the sums of one.
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

// Makes the launches read pages where they are staged. `*staged`: some are.
Status CudaStep::stage(uint32_t layer, const AttendArgs& a, Launches& l, bool* staged) {
    CudaStaging::Call like{0, a.window};
    if (l.any_prefill || l.any_trees)
        like.rows_at_once = l.prefill.kernel && !l.any_lacking ? l.prefill.kernel->rows : cuda::kDecodeRows / a.group * a.group;
    Result<const uint64_t*> table = staging_.before_attend(layer, like, staged, stream_);
    if (!table.ok()) return std::move(table).status();
    for (AttendWork* w : {&l.decode, &l.prefill, &l.lacking, &l.trees}) w->args.table = table.value();
    for (AttendWork& w : observed_) w.args.table = table.value();
    return {};
}

Status CudaStep::launch(const Launches& l) {
    uint8_t* const workspace = decode_workspace_.data();
    if (l.any_decode) TA_RETURN_IF_ERROR(launch_attend(device_, l.decode, workspace, stream_));
    if (l.any_prefill) TA_RETURN_IF_ERROR(launch_attend(device_, l.prefill, workspace, stream_));
    if (l.any_lacking) TA_RETURN_IF_ERROR(launch_attend(device_, l.lacking, workspace, stream_));
    if (l.any_trees) TA_RETURN_IF_ERROR(launch_attend(device_, l.trees, workspace, stream_));
    for (const AttendWork& w : observed_) TA_RETURN_IF_ERROR(launch_attend(device_, w, workspace, stream_));
    return {};
}

}  // namespace ta
