#include "src/attend/plan.h"

#include <algorithm>
#include <utility>

#include "kernels/format/turning.h"
#include "src/attend/passing.h"
#include "src/attend/queries.h"
#include "src/core/profile.h"
#include "tiering/room/step_room.h"

namespace ta {
namespace {

int64_t blocks_for(int64_t tokens) {
    return (tokens + kPageTokens - 1) / kPageTokens;
}

// True if nobody else owns the block. Then former owners' reads happen before this owner's writes.
bool is_sole_owner(const BlockPtr& block) {
    if (block.use_count() != 1) return false;
    BlockPtr(block).reset();  // NOTES: use_count() orders nothing; counting up and down does
    return true;
}

// True if new tokens may be written into the block as it is. A full block that a truncate has cut is excluded: its hashes cover
// all its tokens, and must hold again if the step is aborted.
bool may_be_written(const BlockPtr& present) {
    return present->kind() == PageKind::kToken && !present->sealed() && is_sole_owner(present);
}

// Reads the step that the caller wants, without looking at its sequences.
Result<Step> read_step(size_t members, const int32_t* n_new, const int32_t* n_query) {
    Step step;
    step.members.resize(members);
    for (size_t i = 0; i < members; ++i) {
        StepMember& m = step.members[i];
        m.n_new = n_new ? n_new[i] : 0;
        m.n_query = n_query ? n_query[i] : m.n_new;
        if (m.n_new < 0)
            return fail(TA_E_INVALID, "n_new[%zu] is %lld", i, (long long)m.n_new).argument(3).sequence(int64_t(i));
        if (m.n_query < 0)
            return fail(TA_E_INVALID, "n_query[%zu] is %lld", i, (long long)m.n_query).argument(4).sequence(int64_t(i));
        m.new_row = step.total_new;
        m.query_row = step.total_query;
        step.total_new += m.n_new;
        step.total_query += m.n_query;
    }
    return step;
}

// Checks a member's tree.
Status read_tree(Step& step, size_t i, const int32_t* given) {
    StepMember& m = step.members[i];
    const int32_t* parent = given + m.new_row;
    if (m.n_query != m.n_new) {
        return fail(TA_E_INVALID, "n_query[%zu] is %lld, n_new[%zu] is %lld; with options.tree_parent they are the same", i,
                    (long long)m.n_query, i, (long long)m.n_new)
            .argument(4)
            .sequence(int64_t(i));
    }
    for (int64_t t = 0; t < m.n_new; ++t) {
        if (parent[t] < -1 || parent[t] >= t) {
            return fail(TA_E_INVALID, "options.tree_parent[%lld] is %d; token %lld of its sequence takes -1 to %lld",
                        (long long)(m.new_row + t), parent[t], (long long)t, (long long)(t - 1))
                .argument(5)
                .sequence(int64_t(i))
                .token(m.new_row + t);
        }
        m.is_tree |= parent[t] != t - 1;
    }
    if (m.is_tree && m.n_new > kTreeTokens) {
        return fail(TA_E_INVALID, "sequence %zu has a tree of %lld tokens; the limit is %d", i, (long long)m.n_new, kTreeTokens)
            .argument(5)
            .sequence(int64_t(i));
    }
    return {};
}

Status read_switch(ta_switch given, const char* name, bool& on) {
    if (given < TA_DEFAULT || given > TA_OFF)
        return fail(TA_E_INVALID, "options.%s is %d, no value of ta_switch", name, given).argument(5);
    on = given == TA_ON;
    return {};
}

// Reads all fields of ta_step_options but wait_ms.
Status read_options(const ta_step_options& o, Step& step) {
    TA_RETURN_IF_ERROR(read_switch(o.drafts, "drafts", step.drafts));
    TA_RETURN_IF_ERROR(read_switch(o.layers_in_order, "layers_in_order", step.layers_in_order));
    step.layers_in_order |= step.total_query == 0;  // nobody attends
    if (!o.tree_parent) return {};
    if (o.query_positions) {
        return fail(TA_E_INVALID,
                    "options.tree_parent and options.query_positions are given; the trees say where queries stand")
            .argument(5);
    }
    if (o.drafts == TA_OFF) return fail(TA_E_INVALID, "options.tree_parent is given, but options.drafts is off").argument(5);
    step.drafts = true;
    for (size_t i = 0; i < step.members.size(); ++i) {
        TA_RETURN_IF_ERROR(read_tree(step, i, o.tree_parent));
        step.branches |= step.members[i].is_tree;
    }
    step.parents.assign(o.tree_parent, o.tree_parent + step.total_new);
    for (const StepMember& m : step.members) {
        const auto first = step.tree.size();
        for (int32_t t = 0; t < m.n_new; ++t) {
            const int32_t parent = step.parents[first + size_t(t)];
            TreeRow row{t < kTreeTokens ? uint64_t{1} << t : ~uint64_t{0}, t, t};
            if (m.is_tree && parent < 0) row.depth = 0;
            if (parent >= 0) {
                const TreeRow& above = step.tree[first + size_t(parent)];
                row.seen |= above.seen;
                row.depth = above.depth + 1;
            }
            step.tree.push_back(row);
        }
    }
    return {};
}

}  // namespace

Plan::Plan(std::shared_ptr<Pool> pool)
    : pool_(std::move(pool)),
      backend_(make_step_backend(*pool_)),
      partitioned_(*pool_, *backend_),
      appended_(pool_->geometry().layers, 0) {}

Plan::~Plan() {
    if (open_) clear();
}

Status Plan::set_stream(ta_stream stream) {
    if (open_) return fail(TA_E_STATE, "the plan is open; end or abort it before another stream");
    return backend_->set_stream(stream);
}

// ------------------------------------------------------------------------------------------------------------------- begin

Status Plan::begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query, const ta_step_options& options) {
    const ProfileRange range("ta_plan_begin");
    if (open_) return fail(TA_E_STATE, "the plan is open; end or abort it first");
    Result<Step> step = read_step(seqs.size(), n_new, n_query);
    if (!step.ok()) return std::move(step).status();
    TA_RETURN_IF_ERROR(read_options(options, step.value()));
    Result<std::vector<Sequence*>> locked = pool_->sequences().lock_for_plan(seqs);
    if (!locked.ok()) return std::move(locked).status();
    sequences_ = locked.take();
    step_ = step.take();
    // Until begin() has succeeded, gives everything back on any way out, exceptions included.
    struct Rollback {
        Plan* plan;
        ~Rollback() {
            if (!plan) return;
            for (const Sequence* s : plan->sequences_) {  // other ranks may end this step
                if (s->partition && plan->step_.total_query == 0) ++s->partition->given_up;
            }
            plan->pool_->sequences().forget_use(plan->sequences_);
            plan->clear();
        }
    } rollback{this};
    residents_.assign(sequences_.begin(), sequences_.end());
    TA_RETURN_IF_ERROR(take_in_members(options.query_positions));
    const Residency::Lookups lookups = pool_->residency().look_up(residents_);
    TA_RETURN_IF_ERROR(find_room(pool_->tier_settings().patience.or_of(options.wait_ms)));
    pool_->residency().start_step();
    step_.turn = turn_;
    TA_RETURN_IF_ERROR(backend_->begin(step_));
    TA_RETURN_IF_ERROR(pool_->check_open());  // may have been closed while this waited
    TA_RETURN_IF_ERROR(partitioned_.begin(step_));
    pool_->residency().count_step(lookups);
    std::fill(appended_.begin(), appended_.end(), uint8_t{0});
    last_layer_ = -1;
    rollback.plan = nullptr;
    open_ = true;
    return {};
}

// For locked sequences: fills in the members, and lists the blocks that the step touches.
Status Plan::take_in_members(const int64_t* query_positions) {
    for (size_t i = 0; i < step_.members.size(); ++i) {
        StepMember& m = step_.members[i];
        m.sequence = sequences_[i];
        m.length = m.sequence->length;
        TA_RETURN_IF_ERROR(check_member(i));
    }
    step_.has_positions = query_positions != nullptr;
    TA_RETURN_IF_ERROR(PartitionedStep::check(step_));
    if (step_.branches && pool_->numerics().batch_invariant) {
        return fail(TA_E_UNSUPPORTED,
                    "options.tree_parent: a pool with batch_invariant takes chains alone: tokens of a branch are not in the "
                    "places that they would have alone")
            .argument(5);
    }
    if (step_.drafts && step_.total_new > 0 && pool_->numerics().universal_open_scale) {
        return fail(TA_E_UNSUPPORTED,
                    "options.drafts: with TA_OPEN_SCALE_UNIVERSAL a token's scale comes from all tokens before it, those too "
                    "that "
                    "will not stay")
            .argument(5);
    }
    TA_RETURN_IF_ERROR(check_room());
    TA_RETURN_IF_ERROR(list_queries(step_, query_positions));
    if (step_.all_rows() > INT32_MAX) {
        return fail(TA_E_LIMIT,
                    "the step has %lld query tokens, %lld with those for what is before gaps; the limit is 2^31 - 1",
                    (long long)step_.total_query, (long long)step_.all_rows());
    }
    for (StepMember& m : step_.members) list_touched(m);
    if (pool_->geometry().has_windows()) {
        for (size_t i = 0; i < step_.members.size(); ++i) {
            if (Status s = list_passing(pool_->geometry(), step_.members[i]); !s.ok()) return std::move(s).sequence(int64_t(i));
        }
    }
    return {};
}

// Checks that a step can have the member at all, whatever other steps use.
Status Plan::check_member(size_t i) const {
    const StepMember& m = step_.members[i];
    const int64_t total = m.length + m.n_new;
    if (total > kMaxTokens) {
        return fail(TA_E_LIMIT, "the sequence would have %lld tokens; the limit is 2^40", (long long)total)
            .sequence(int64_t(i));
    }
    return {};
}

// Checks that the device tier and the machine can have the step's new blocks at all, whatever others use. Comes before blocks
// are listed or taken: huge counts would take long to fail there.
Status Plan::check_room() const {
    const Geometry& g = pool_->geometry();
    const bool on_cpu = !pool_->context().device(), hooks = pool_->context().allocator().has_hooks();
    // Each block of drafts has a token slot until the end; those that will be closed have a channel slot, too.
    const uint64_t budget = pool_->blocks().budget(),
                   slot_bytes = g.all_8_bits || step_.drafts ? g.token_slot_bytes : g.channel_slot_bytes;
    const uint64_t workspace_bytes = step_.drafts || g.all_8_bits ? 0
                                     : step_.layers_in_order      ? g.largest_token_page_bytes
                                                                  : g.token_payload_bytes;
    // The machine's memory has the step's lists and the Block objects. On a CPU without hooks it also has the slots and the
    // INT8 pages. A GPU has these within its budget.
    const uint64_t block_bytes = sizeof(StepBlock) + sizeof(Block) + (on_cpu && !hooks ? slot_bytes + workspace_bytes : 0);
    // Any machine has this much. Asking for more than that takes system calls, which ordinary steps avoid.
    constexpr uint64_t kFewBytes = uint64_t{1} << 30;
    const auto blocks_of = [](const StepMember& m) { return uint64_t(blocks_for(m.length + m.n_new) - blocks_for(m.length)); };
    uint64_t blocks = 0;  // at most 2^32 members with 2^25 blocks each; times a block's size it may not fit
    for (const StepMember& m : step_.members) blocks += blocks_of(m);
    // Names the first member that is too much, and the bytes that all of them lack.
    const auto refuse = [&](Status&& s, uint64_t each, uint64_t there) {
        size_t i = 0;
        for (uint64_t sum = blocks_of(step_.members[0]); sum <= there / each; sum += blocks_of(step_.members[i])) ++i;
        const StepMember& m = step_.members[i];
        return std::move(s)
            .bytes(checked_mul(blocks, each).value_or(UINT64_MAX) - there)
            .sequence(int64_t(i))
            .block(blocks_for(m.length + m.n_new) - 1);
    };
    if (blocks > budget / slot_bytes) {
        return refuse(fail(TA_E_TIER_FULL, "the device tier has a budget of %llu bytes; the step needs %llu more blocks",
                           (unsigned long long)budget, (unsigned long long)blocks)
                          .tier(TA_TIER_DEVICE),
                      slot_bytes, budget);
    }
    if (blocks <= kFewBytes / block_bytes) return {};
    const uint64_t memory = machine_memory();
    if (blocks <= memory / block_bytes) return {};
    return refuse(fail(TA_E_MEMORY, "this process can have %llu bytes of memory; the step needs %llu more blocks",
                       (unsigned long long)memory, (unsigned long long)blocks),
                  block_bytes, memory);
}

// Lists the blocks that get the member's new tokens, and where their bytes come from.
void Plan::list_touched(StepMember& m) {
    if (m.n_new == 0) return;
    const Geometry& g = pool_->geometry();
    const Numerics& n = pool_->numerics();
    const int64_t sinks = int64_t(n.sink_blocks), total = m.length + m.n_new;
    m.largest_scales = m.sequence->largest_scales;
    m.recalls = n.universal_open_scale && !m.sequence->scales_known;
    m.scales_side = m.recalls ? 0 : m.sequence->scales_side;
    for (int64_t b = m.length / kPageTokens; b < blocks_for(total); ++b) {
        StepBlock t;
        t.index = b;
        t.have = int(std::clamp<int64_t>(m.length - b * kPageTokens, 0, kPageTokens));
        t.end = int(std::min<int64_t>(kPageTokens, total - b * kPageTokens));
        t.stays_8_bits = g.all_8_bits || b < sinks;
        if (!step_.drafts) plan_block(t);
        if (t.have > 0) {
            const BlockPtr& present = m.sequence->blocks[size_t(b)];
            if (may_be_written(present) && !m.recalls) t.token = present;
        }
        if (t.closes && (t.have == 0 || t.begins_anew)) t.workspace_page = step_.workspace_pages++;
        m.touched.push_back(std::move(t));
    }
}

// Decides how a block changes. Its tokens [have, end) are final.
void Plan::plan_block(StepBlock& t) const {
    const Numerics& n = pool_->numerics();
    t.closes = t.end == kPageTokens && !t.stays_8_bits;
    t.begins_anew = n.encode.k_turning && !n.universal_open_scale && t.have > 0 &&
                    (t.closes || (t.index == 0 && turning_begins_anew(t.have, t.end)));
}

// Finds open blocks that somebody else (a save, say) owned when they were listed, but that only the step's sequence owns now:
// they need no copy.
bool Plan::take_back_open_blocks() {
    bool some = false;
    for (StepMember& m : step_.members) {
        for (StepBlock& t : m.touched) {
            if (t.have == 0 || t.token || m.recalls) continue;
            const BlockPtr& present = m.sequence->blocks[size_t(t.index)];
            if (!may_be_written(present)) continue;
            t.token = present;
            some = true;
        }
    }
    return some;
}

Plan::Wanted Plan::list_wanted() {
    Wanted wanted;
    for (size_t i = 0; i < step_.members.size(); ++i) {
        StepMember& m = step_.members[i];
        SlotCounts promise = m.sequence->promise;
        const auto want = [&](PageKind kind, StepBlock* touched, PassingBlock* passing) {
            const bool promised = promise[size_t(kind)] > 0;
            wanted.is_promised.push_back(promised);
            wanted.kinds.push_back(kind);
            if (promised) {
                --promise[size_t(kind)];
                ++wanted.promised[size_t(kind)];
            } else {
                wanted.unpromised.push_back(kind);
            }
            wanted.tenants.push_back(m.sequence->tenant_of(touched ? touched->index : passing->index));
            wanted.owners.push_back({i, touched, passing});
        };
        for (StepBlock& t : m.touched) {
            if (!t.token && (t.have > 0 || !t.closes)) want(PageKind::kToken, &t, nullptr);
            if (t.end == kPageTokens && !t.stays_8_bits) want(PageKind::kChannel, &t, nullptr);
        }
        for (PassingBlock& p : m.passing) {
            const StepBlock* const touched = m.touched_at(p.index);
            const bool at_8_bits =
                touched ? touched->stays_8_bits : m.sequence->blocks[size_t(p.index)]->kind() == PageKind::kToken;
            want(at_8_bits ? PageKind::kPassedToken : PageKind::kPassedChannel, nullptr, &p);
        }
    }
    return wanted;
}

// Promotes the step's blocks, and takes its new ones. From then on, until clear(), each block keeps its bytes at its address.
Status Plan::find_room(Patience patience) {
    const uint64_t failed = pool_->residency().failed_evictions();
    for (;;) {
        const Wanted wanted = list_wanted();
        bool others = false;
        const auto reserve = [&]() -> Status {
            others = take_back_open_blocks() || lose_suspended_blocks();
            return others ? fail(TA_E_STATE, "the step wants other blocks than before") : reserve_blocks(wanted);
        };
        Status found = find_room_for_step(pool_->residency(), residents_, wanted.unpromised, patience, reserve, reading_);
        if (!found.ok() && others) continue;
        return found.code() == TA_E_TIER_FULL ? pool_->residency().with_cause(std::move(found), failed) : std::move(found);
    }
}

// Finds open blocks that were listed to be written in place, but were suspended while the begin waited: the step copies them.
bool Plan::lose_suspended_blocks() {
    bool some = false;
    for (StepMember& m : step_.members) {
        for (StepBlock& t : m.touched) {
            if (t.have == 0 || !t.token || !t.token->sealed()) continue;
            t.token.reset();
            some = true;
        }
    }
    return some;
}

// Takes all new blocks of the step at once. A step that does not fit takes none from others.
Status Plan::reserve_blocks(const Wanted& wanted) {
    // Reserves capacity, so that the end cannot fail; it may remain after a failure. Under the lock, since others look at the
    // blocks.
    pool_->sequences().commit_plan([this] {
        for (StepMember& m : step_.members) {
            m.sequence->blocks.reserve(size_t(blocks_for(m.length + m.n_new)));
            if (m.sequence->partition) m.left.reserve(m.touched.size() + 1);
            if (step_.drafts) m.rejected.reserve(m.touched.size());
        }
    });
    size_t failed = wanted.kinds.size();
    Result<std::vector<BlockPtr>> taken = pool_->blocks().acquire(wanted.kinds, &failed, wanted.tenants, wanted.promised);
    if (!taken.ok()) {
        Status s = std::move(taken).status();
        if (failed == wanted.owners.size()) return s;
        return std::move(s).sequence(int64_t(wanted.owners[failed].member)).block(wanted.owners[failed].index());
    }
    std::vector<BlockPtr> blocks = taken.take();
    pool_->sequences().commit_plan([&] {
        for (size_t i = 0; i < blocks.size(); ++i) {
            if (!wanted.is_promised[i]) continue;
            StepMember& m = step_.members[wanted.owners[i].member];
            --m.sequence->promise[size_t(wanted.kinds[i])];
            ++m.of_promise[size_t(wanted.kinds[i])];
        }
    });
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (PassingBlock* passing = wanted.owners[i].passing) {
            passing->to = std::move(blocks[i]);
            continue;
        }
        StepBlock& t = *wanted.owners[i].touched;
        BlockPtr& full = step_.drafts ? t.later : t.channel;
        (wanted.kinds[i] == PageKind::kToken ? t.token : full) = std::move(blocks[i]);
    }
    for (StepMember& m : step_.members) {
        for (StepBlock& t : m.touched) {
            if (t.have == 0) continue;
            const BlockPtr& present = m.sequence->blocks[size_t(t.index)];
            if (t.token == present) continue;
            TA_RETURN_IF_ERROR(backend_->copy_tokens(*present, t.have, *t.token));
            ++(present->stored().kind != PageKind::kToken || present->full() ? m.reopened : m.copied);
        }
    }
    return {};
}

// ------------------------------------------------------------------------------------------------------------------ attend

Status Plan::check_layer(uint32_t layer) const {
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    if (step_.kept)
        return fail(TA_E_STATE, "a ta_plan_end has taken drafts off and failed; end again with the same keep, or abort");
    const uint32_t layers = pool_->geometry().layers;
    if (layer >= layers) return fail(TA_E_INVALID, "layer is %u; the pool has %u", layer, layers).argument(1);
    return {};
}

// If an error names a row of a tensor, adds the sequence that the row belongs to. `first`: a member's first row.
Status Plan::name_row(Status s, int64_t StepMember::*first) const {
    if (!s.detail() || s.detail()->token < 0) return s;
    const int64_t row = s.detail()->token;
    const auto behind = std::upper_bound(step_.members.begin(), step_.members.end(), row,
                                         [&](int64_t r, const StepMember& m) { return r < m.*first; });
    return std::move(s).sequence(behind - step_.members.begin() - 1);
}

// Returns the tensor for the backend in place of a caller's tensor, which may have fewer channels than blocks.
Result<TensorView> Plan::widen(StepBackend::Wide use, const TensorView& x, uint32_t layer, int argument) {
    const int64_t channels = pool_->geometry().shape(layer).head_dim;
    if (x.head_dim == channels) return x;
    Result<TensorView> wide = backend_->wide_tensor(use, x, channels);
    if (!wide.ok()) return std::move(wide).status().argument(argument);
    if (use == StepBackend::Wide::kOut) return wide;
    if (Status s = backend_->copy_channels(use, x, wide.value()); !s.ok()) return std::move(s).argument(argument);
    return wide;
}

Status Plan::append(uint32_t layer, const TensorView& k, const TensorView& v) {
    const ProfileRange range("ta_append");
    TA_RETURN_IF_ERROR(check_layer(layer));
    const LayerShape& shape = pool_->geometry().shape(layer);
    if (appended_[layer]) return fail(TA_E_STATE, "layer %u was appended already in this step", layer).layer(layer);
    if (Status s = check_tensor_shape(k, "k", step_.total_new, shape.kv_heads, shape.k_channels); !s.ok())
        return std::move(s).argument(2).layer(layer);
    if (Status s = check_tensor_shape(v, "v", step_.total_new, shape.kv_heads, shape.v_channels); !s.ok())
        return std::move(s).argument(3).layer(layer);
    const auto append = [&]() -> Status {
        Result<TensorView> wide_k = widen(StepBackend::Wide::kK, k, layer, 2);
        if (!wide_k.ok()) return std::move(wide_k).status();
        Result<TensorView> wide_v = widen(StepBackend::Wide::kV, v, layer, 3);
        if (!wide_v.ok()) return std::move(wide_v).status();
        return backend_->append(layer, wide_k.value(), wide_v.value());
    };
    if (Status s = append(); !s.ok()) return name_row(std::move(s), &StepMember::new_row).layer(layer);
    appended_[layer] = 1;
    last_layer_ = layer;
    return {};
}

Status Plan::attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options) {
    const ProfileRange range("ta_attend");
    TA_RETURN_IF_ERROR(check_turn(layer));
    if (Status s = check_attend(layer, q, out, lse, options); !s.ok()) return std::move(s).layer(layer);
    Result<AttendSettings> settings = settings_of(layer, q.heads, options);
    if (!settings.ok()) return std::move(settings).status().argument(5).layer(layer);
    AttendCall call = call_of(layer, settings.value(), q.heads);
    call.lse = lse;
    const auto attend = [&]() -> Status {
        Result<TensorView> all_q = step_.turned.empty() ? Result<TensorView>(q) : backend_->turn(layer, q);
        if (!all_q.ok()) return std::move(all_q).status();
        Result<TensorView> wide_q = widen(StepBackend::Wide::kQ, all_q.value(), layer, 2);
        if (!wide_q.ok()) return std::move(wide_q).status();
        Result<TensorView> wide_out = widen(StepBackend::Wide::kOut, out, layer, 3);
        if (!wide_out.ok()) return std::move(wide_out).status();
        call.q = wide_q.value();
        call.out = wide_out.value();
        TA_RETURN_IF_ERROR(step_.turned.empty() ? attend_once(layer, call) : attend_turned(layer, call));
        if (out.data == call.out.data) return {};
        const TensorView written = partitioned_.written(out);
        if (written.heads == 0) return {};
        return backend_->copy_channels(StepBackend::Wide::kOut, partitioned_.written(call.out), written);
    };
    if (Status s = attend(); !s.ok()) return name_row(std::move(s), &StepMember::query_row).layer(layer);
    return {};
}

// Checks that the layer's append came before, and with layers_in_order that the next layer's did not.
Status Plan::check_turn(uint32_t layer) const {
    TA_RETURN_IF_ERROR(check_layer(layer));
    if (step_.total_new > 0 && !appended_[layer])
        return fail(TA_E_STATE, "layer %u has new tokens that were not appended; ta_append belongs first", layer).layer(layer);
    if (step_.layers_in_order && step_.total_new > 0 && step_.total_query > 0 && last_layer_ != int64_t(layer)) {
        return fail(TA_E_STATE,
                    "layer %lld was appended after layer %u; with layers_in_order attend to a layer before the next one's "
                    "append",
                    (long long)last_layer_, layer)
            .layer(layer);
    }
    return {};
}

// Checks the shapes of a call's tensors, and that no output overlaps another tensor.
Status Plan::check_attend(uint32_t layer, const TensorView& q, const TensorView& out, const float* lse,
                          const ta_attend_options* options) const {
    const LayerShape& shape = pool_->geometry().shape(layer);
    if (q.heads % shape.kv_heads != 0 || q.heads / shape.kv_heads > kMaxStepGroup) {
        return fail(TA_E_SHAPE, "q has %lld heads; it takes 1..%d times the %u kv heads", (long long)q.heads, kMaxStepGroup,
                    shape.kv_heads)
            .argument(2);
    }
    if (Status s = check_tensor_shape(q, "q", step_.total_query, q.heads, shape.k_channels); !s.ok())
        return std::move(s).argument(2);
    if (Status s = check_tensor_shape(out, "out", q.tokens, q.heads, shape.v_channels); !s.ok())
        return std::move(s).argument(3);
    const NamedView slopes{"options.alibi_slopes", view_of_floats(options ? options->alibi_slopes : nullptr, 1, q.heads)};
    const NamedView sinks{"options.sinks", view_of_floats(options ? options->sinks : nullptr, 1, q.heads)};
    return check_outputs({{"q", q}, slopes, sinks}, out, lse, 3);
}

// The settings of a call with so many query heads: its options, completed by the pool and the layer's group.
Result<AttendSettings> Plan::settings_of(uint32_t layer, int64_t q_heads, const ta_attend_options* options) const {
    const Numerics& n = pool_->numerics();
    Result<AttendSettings> settings = resolve_attend(options, q_heads, int(pool_->geometry().shape(layer).k_channels), n.exp,
                                                     n.p, !pool_->context().device());
    if (!settings.ok()) return settings;
    AttendSettings& a = settings.value();
    if (n.batch_invariant && a.mask != TA_MASK_CAUSAL)
        return fail(TA_E_UNSUPPORTED, "options.mask is TA_MASK_FULL; a pool with batch_invariant takes TA_MASK_CAUSAL");
    TA_RETURN_IF_ERROR(check_places(a));
    if (const int64_t most = pool_->geometry().window(layer); most > 0) {
        if (a.window == 0) a.window = most;
        if (a.window > most) {
            return fail(TA_E_INVALID, "options.window is %lld; the layer's group has %lld", (long long)a.window,
                        (long long)most);
        }
    }
    if (!step_.parents.empty()) a.mask = TA_MASK_CAUSAL;  // a tree's query sees its ancestors under any mask
    return settings;
}

// A call without tensors.
AttendCall Plan::call_of(uint32_t layer, const AttendSettings& settings, int64_t q_heads) const {
    const Geometry& g = pool_->geometry();
    const LayerShape& shape = g.shape(layer);
    const Numerics& n = pool_->numerics();
    AttendCall call;
    call.head_dim = int(shape.head_dim);
    call.kv_heads = int(shape.kv_heads);
    call.group = int(q_heads / shape.kv_heads);
    if (g.has_channel_blocks()) {
        call.k_bits = g.k_bits.data() + g.index(layer, 0);
        call.v_bits = g.v_bits.data() + g.index(layer, 0);
        call.channel_head_offset = g.channel_head_offset.data() + g.index(layer, 0);
    }
    call.settings = settings;
    call.rotation_signs = n.hadamard ? pool_->rotation_signs() : nullptr;
    call.k_offset = n.k_offset.empty() ? nullptr : n.k_offset.data() + g.channel_index(layer, 0);
    call.k_turning = n.encode.k_turning;
    call.q_rest = n.q_rest;
    call.batch_invariant = n.batch_invariant;
    call.saturate = n.saturate;
    return call;
}

// For steps with query positions or gaps: checks that the options allow queries that are not simply the last tokens.
Status Plan::check_places(const AttendSettings& a) const {
    if (step_.is_ordinary()) return {};
    const char* const why = step_.turned.empty() ? "options.query_positions was given" : "a sequence of the step was shifted";
    if (a.mask != TA_MASK_CAUSAL && step_.parents.empty())
        return fail(TA_E_UNSUPPORTED, "options.mask is TA_MASK_FULL, and %s", why);
    if (step_.turned.empty()) return {};
    if (a.window > 0) return fail(TA_E_UNSUPPORTED, "options.window is given, and %s", why);
    if (a.alibi_slopes) return fail(TA_E_UNSUPPORTED, "options.alibi_slopes is given, and %s", why);
    return {};
}

Status Plan::attend_once(uint32_t layer, AttendCall& call) {
    return partitioned_.open() ? partitioned_.attend(layer, call) : backend_->attend(layer, call);
}

// Attends with the queries and their turned copies, which see the keys before gaps, and joins the results of both.
Status Plan::attend_turned(uint32_t layer, const AttendCall& call) {
    AttendCall all = call;
    TA_RETURN_IF_ERROR(backend_->hold_turned(call, all.out, all.lse));
    all.settings.sinks = nullptr;
    TA_RETURN_IF_ERROR(backend_->attend(layer, all));
    return backend_->join_turned(all.out, all.lse, call);
}

// --------------------------------------------------------------------------------------------------------------------- end

// Drops blocks of other ranks that have a block behind them now. They are freed with the step. Under the pool's lock.
void Plan::leave_to_other_ranks(StepMember& m) {
    std::vector<BlockPtr>& blocks = m.sequence->blocks;
    for (size_t b = size_t(std::max<int64_t>(0, Step::untouched_blocks(m) - 1)); b + 1 < blocks.size(); ++b) {
        if (m.sequence->partition->owns(int64_t(b))) continue;
        m.left.push_back(pool_->blocks().absent());
        pool_->sequences().put_block(*m.sequence, b, m.left.back());
    }
}

// Makes the step part of a sequence. Returns true if a block became full that may be demoted. Under the pool's lock.
bool Plan::commit(StepMember& m) {
    Sequence& s = *m.sequence;
    if (s.released) return false;  // its blocks are freed with the step
    const Geometry& g = pool_->geometry();
    Pool::Counters& counters = pool_->counters();
    counters.appended_tokens += uint64_t(m.n_new);
    counters.copied_blocks += m.copied;
    counters.reopened_blocks += m.reopened;
    ++s.version;
    for (StepBlock& t : m.touched) {
        counters.closed_pages += t.channel ? g.layers : 0;
        pool_->sequences().put_block(s, size_t(t.index), t.channel ? t.channel : t.token);
    }
    for (PassingBlock& p : m.passing) {
        pool_->sequences().put_block(s, size_t(p.index), p.to);
        if (StepBlock* t = m.touched_at(p.index); t && t->token == p.to) t->token.reset();
    }
    s.length = m.length + m.n_new;
    if (g.has_windows()) pool_->sequences().note_passed(s);
    pool_->sequences().keep_promise(s, m.n_new, count_freed(m));
    m.of_promise = {};
    if (s.partition) leave_to_other_ranks(m);
    if (s.partition && m.n_new > 0) s.shared_block = int64_t(s.blocks.size()) - 1;
    if (!m.touched.empty()) {
        s.largest_scales.swap(m.largest_scales);
        s.scales_side = m.scales_side == 0 ? 1 : 0;
        s.scales_known = true;
    }
    return s.length / kPageTokens > std::max<int64_t>(m.length / kPageTokens, pool_->numerics().sink_blocks);
}

Status Plan::end(const int32_t* keep) {
    const ProfileRange range("ta_plan_end");
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    const Geometry& g = pool_->geometry();
    if (step_.total_new > 0 && !backend_->replays()) {
        for (uint32_t layer = 0; layer < g.layers; ++layer) {
            if (!appended_[layer])
                return fail(TA_E_STATE, "layer %u lacks its ta_append; the plan stays open", layer).layer(layer);
        }
    }
    Kept kept;
    std::optional<std::vector<int32_t>> given;
    if (step_.drafts && keep) given.emplace(keep, keep + step_.members.size());
    if (!step_.kept) {
        TA_RETURN_IF_ERROR(read_keep(keep, kept));
    } else if (given != step_.keep) {
        return fail(TA_E_STATE,
                    "a ta_plan_end with another keep has taken drafts off and failed; end again with that one, or abort")
            .argument(1);
    }
    TA_RETURN_IF_ERROR(backend_->may_end());
    TA_RETURN_IF_ERROR(backend_->may_commit());
    TA_RETURN_IF_ERROR(partitioned_.settle());
    if (step_.drafts) {
        if (!step_.kept) {
            for (StepMember& m : step_.members) m.rejected.reserve(m.touched.size());
            for (size_t i = 0; i < step_.members.size(); ++i) keep_tokens(step_.members[i], kept[i]);
            step_.keep = std::move(given);
            step_.kept = true;
        }
        if (!step_.redone) TA_RETURN_IF_ERROR(backend_->redo());
        step_.redone = true;
    }
    PassingHold passing;
    passing.choose(*pool_, step_);
    TA_RETURN_IF_ERROR(backend_->seal());
    // Counts only committed steps with queries: otherwise some layers would miss their turn to be observed.
    if (step_.total_query > 0) ++turn_;
    bool filled = false;
    pool_->sequences().commit_plan([&] {
        for (StepMember& m : step_.members) filled |= commit(m);
    });
    passing.committed();
    partitioned_.end(false);
    clear();
    try {
        pool_->residency().keep_room(filled);
    } catch (const std::bad_alloc&) {
        // The step is committed; the next one makes room.
    }
    return {};
}

Status Plan::abort() {
    if (!open_) TA_RETURN_IF_ERROR(pool_->check_open());
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    TA_RETURN_IF_ERROR(backend_->may_end());
    clear();
    return {};
}

// Counts device blocks that are freed with the step after its commit.
SlotCounts Plan::count_freed(const StepMember& m) {
    SlotCounts freed{};
    const auto count = [&](const BlockPtr& b, long owners) {
        if (b && b.use_count() == owners && b->tier() == TierKind::kDevice) ++freed[size_t(b->kind())];
    };
    for (const PassingBlock& p : m.passing) count(p.to, 1);
    for (const BlockPtr& b : m.spared) count(b, 1);
    for (const std::vector<StepBlock>* blocks : {&m.touched, &m.rejected}) {
        for (const StepBlock& t : *blocks) {
            count(t.token, t.token == t.channel ? 2 : 1);
            if (t.channel != t.token) count(t.channel, 1);
            count(t.later, 1);
        }
    }
    return freed;
}

// Gives blocks that came out of promises, and do not stay, back to the promises. This happens before the blocks are freed, so
// that nobody else takes them.
void Plan::give_back_promised() {
    pool_->sequences().commit_plan([this] {
        for (StepMember& m : step_.members) {
            if (m.of_promise == SlotCounts{}) continue;
            pool_->blocks().settle(m.sequence->promise, sum_of(m.sequence->promise, m.of_promise));
        }
    });
}

// Gives back whatever is still reserved, then the sequences.
void Plan::clear() {
    partitioned_.end(true);
    backend_->finish();
    give_back_promised();
    step_ = Step{};
    if (reading_) pool_->blocks().stop_reading(*reading_);
    reading_.reset();
    pool_->sequences().unlock_for_plan(sequences_);
    open_ = false;
}

}  // namespace ta
