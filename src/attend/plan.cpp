#include "src/attend/plan.h"

#include <algorithm>
#include <utility>

#include "kernels/format/turning.h"
#include "src/core/profile.h"
#include "tiering/room/step_room.h"

namespace ta {
namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 40;  // of a sequence

int64_t blocks_for(int64_t tokens) {
    return (tokens + kPageTokens - 1) / kPageTokens;
}

// What former owners read happened before what this one will write.
bool is_sole_owner(const BlockPtr& block) {
    if (block.use_count() != 1) return false;
    BlockPtr(block).reset();  // use_count() orders nothing, counting up and down does
    return true;
}

// A block that new tokens may be written into as it is. A full one that a truncate cut has hashes over all its tokens; they must
// hold again should the step be aborted.
bool may_be_written(const BlockPtr& present) {
    return present->kind() == PageKind::kToken && !present->sealed() && is_sole_owner(present);
}

// The step that a caller asks for, before its sequences are known.
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

Status Plan::begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query) {
    const ProfileRange range("ta_plan_begin");
    if (open_) return fail(TA_E_STATE, "the plan is open; end or abort it first");
    Result<Step> step = read_step(seqs.size(), n_new, n_query);
    if (!step.ok()) return std::move(step).status();
    Result<std::vector<Sequence*>> locked = pool_->lock_for_plan(seqs);
    if (!locked.ok()) return std::move(locked).status();
    sequences_ = locked.take();
    step_ = step.take();
    // Until the last step has succeeded, every way out of here, exceptions included, gives everything back.
    struct Rollback {
        Plan* plan;
        ~Rollback() {
            if (!plan) return;
            plan->pool_->forget_use(plan->sequences_);
            plan->clear();
        }
    } rollback{this};
    residents_.assign(sequences_.begin(), sequences_.end());
    TA_RETURN_IF_ERROR(take_in_members());
    const Residency::Lookups lookups = pool_->residency().look_up(residents_);
    TA_RETURN_IF_ERROR(find_room());
    pool_->residency().start_step();
    step_.turn = turn_;
    TA_RETURN_IF_ERROR(backend_->begin(step_));
    TA_RETURN_IF_ERROR(pool_->check_open());  // closed while this waited
    TA_RETURN_IF_ERROR(partitioned_.begin(step_));
    pool_->residency().count_step(lookups);
    std::fill(appended_.begin(), appended_.end(), uint8_t{0});
    last_layer_ = -1;
    rollback.plan = nullptr;
    open_ = true;
    return {};
}

// Once the sequences are locked: what the step is to them, and the blocks that it touches.
Status Plan::take_in_members() {
    for (size_t i = 0; i < step_.members.size(); ++i) {
        StepMember& m = step_.members[i];
        m.sequence = sequences_[i];
        m.length = m.sequence->length;
        TA_RETURN_IF_ERROR(check_member(i));
    }
    TA_RETURN_IF_ERROR(PartitionedStep::check(step_));
    TA_RETURN_IF_ERROR(check_room());
    for (StepMember& m : step_.members) list_touched(m);
    return {};
}

// Whether a step of this pool can have the member at all, whatever others hold.
Status Plan::check_member(size_t i) const {
    const StepMember& m = step_.members[i];
    const int64_t total = m.length + m.n_new;
    if (total > kMaxTokens) {
        return fail(TA_E_LIMIT, "the sequence would have %lld tokens; the limit is 2^40", (long long)total)
            .sequence(int64_t(i));
    }
    if (m.n_query > total) {
        return fail(TA_E_INVALID, "n_query[%zu] is %lld, but the sequence will have %lld tokens", i, (long long)m.n_query,
                    (long long)total)
            .argument(4)
            .sequence(int64_t(i));
    }
    return {};
}

// Whether the device tier and the machine can have the step's new blocks at all, whatever others hold. Before anything is taken
// or listed for them: counts near the limit of their type would take long to fail.
Status Plan::check_room() const {
    const Geometry& g = pool_->geometry();
    const bool on_cpu = !pool_->context().device(), hooks = pool_->context().allocator().has_hooks();
    const uint64_t budget = pool_->blocks().budget(), slot_bytes = g.all_8_bits ? g.token_slot_bytes : g.channel_slot_bytes;
    // The lists of a step and the blocks themselves are the machine's; so are the slots and the INT8 pages on a CPU, unless they
    // come from hooks. A GPU's are in its budget.
    const uint64_t block_bytes = sizeof(StepBlock) + sizeof(Block) + (on_cpu && !hooks ? slot_bytes + g.token_page_bytes : 0);
    // Any machine has as many; to ask it takes system calls, which ordinary steps do not make.
    constexpr uint64_t kFewBytes = uint64_t{1} << 30;
    const auto blocks_of = [](const StepMember& m) { return uint64_t(blocks_for(m.length + m.n_new) - blocks_for(m.length)); };
    uint64_t blocks = 0;  // at most 2^32 members with 2^25 blocks: times the size of one it may not fit
    for (const StepMember& m : step_.members) blocks += blocks_of(m);
    // Names the first member that is too much, and what all of them lack.
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

// The blocks that the member's new tokens come into, and where their bytes will come from.
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
        t.closes = t.end == kPageTokens && !t.stays_8_bits;
        t.begins_anew = n.encode.k_turning && !n.universal_open_scale && t.have > 0 &&
                        (t.closes || (b == 0 && turning_begins_anew(t.have, t.end)));
        if (t.have > 0) {
            const BlockPtr& present = m.sequence->blocks[size_t(b)];
            if (may_be_written(present) && !m.recalls) t.token = present;
        }
        if (t.closes && (t.have == 0 || t.begins_anew)) t.workspace_page = step_.workspace_pages++;
        m.touched.push_back(std::move(t));
    }
}

// Open blocks that somebody held when they were listed, such as a save, and that are the step's alone now: they need no copy.
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
        for (StepBlock& t : m.touched) {
            const auto want = [&](PageKind kind) {
                wanted.kinds.push_back(kind);
                wanted.tenants.push_back(m.sequence->tenant);
                wanted.owners.emplace_back(i, &t);
            };
            if (!t.token && (t.have > 0 || !t.closes)) want(PageKind::kToken);
            if (t.closes) want(PageKind::kChannel);
        }
    }
    return wanted;
}

// Brings the step's blocks to where the device reads them, and takes its new ones. From then on, until clear(), none of them
// changes its bytes at the address that it has.
Status Plan::find_room() {
    const uint64_t failed = pool_->residency().failed_evictions();
    for (;;) {
        const Wanted wanted = list_wanted();
        bool fewer = false;
        const auto reserve = [&]() -> Status {
            fewer = take_back_open_blocks();
            return fewer ? fail(TA_E_STATE, "the step wants fewer blocks than before") : reserve_blocks(wanted);
        };
        Status found = find_room_for_step(pool_->residency(), residents_, wanted.kinds, reserve, reading_);
        if (!found.ok() && fewer) continue;
        return found.code() == TA_E_TIER_FULL ? pool_->residency().with_cause(std::move(found), failed) : std::move(found);
    }
}

// Takes all blocks of the step at once: a step that does not fit takes none from others.
Status Plan::reserve_blocks(const Wanted& wanted) {
    // So that end cannot fail. A larger capacity may stay behind after a failure. Others look at the blocks under the lock.
    pool_->commit_plan([this] {
        for (StepMember& m : step_.members) {
            m.sequence->blocks.reserve(size_t(blocks_for(m.length + m.n_new)));
            if (m.sequence->partition) m.left.reserve(m.touched.size() + 1);
        }
    });
    size_t failed = wanted.kinds.size();
    Result<std::vector<BlockPtr>> taken = pool_->blocks().acquire(wanted.kinds, &failed, wanted.tenants);
    if (!taken.ok()) {
        Status s = std::move(taken).status();
        if (failed == wanted.owners.size()) return s;
        return std::move(s).sequence(int64_t(wanted.owners[failed].first)).block(wanted.owners[failed].second->index);
    }
    std::vector<BlockPtr> blocks = taken.take();
    for (size_t i = 0; i < blocks.size(); ++i) {
        StepBlock& t = *wanted.owners[i].second;
        (wanted.kinds[i] == PageKind::kToken ? t.token : t.channel) = std::move(blocks[i]);
    }
    for (StepMember& m : step_.members) {
        for (StepBlock& t : m.touched) {
            if (t.have == 0) continue;
            const BlockPtr& present = m.sequence->blocks[size_t(t.index)];
            if (t.token == present) continue;
            TA_RETURN_IF_ERROR(backend_->copy_tokens(*present, t.have, *t.token));
            ++(present->stored().kind != PageKind::kToken || present->sealed() ? m.reopened : m.copied);
        }
    }
    return {};
}

// ------------------------------------------------------------------------------------------------------------------ attend

Status Plan::check_layer(uint32_t layer) const {
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    const uint32_t layers = pool_->geometry().layers;
    if (layer >= layers) return fail(TA_E_INVALID, "layer is %u; the pool has %u", layer, layers).argument(1);
    return {};
}

// Of a failure that names a row of a tensor: whose it is. `first`: of a member's rows.
Status Plan::name_row(Status s, int64_t StepMember::*first) const {
    if (!s.detail() || s.detail()->token < 0) return s;
    const int64_t row = s.detail()->token;
    const auto behind = std::upper_bound(step_.members.begin(), step_.members.end(), row,
                                         [&](int64_t r, const StepMember& m) { return r < m.*first; });
    return std::move(s).sequence(behind - step_.members.begin() - 1);
}

Status Plan::append(uint32_t layer, const TensorView& k, const TensorView& v) {
    const ProfileRange range("ta_append");
    TA_RETURN_IF_ERROR(check_layer(layer));
    const Geometry& g = pool_->geometry();
    if (appended_[layer]) return fail(TA_E_STATE, "layer %u was appended already in this step", layer).layer(layer);
    if (Status s = check_tensor_shape(k, "k", step_.total_new, g.kv_heads, g.head_dim); !s.ok())
        return std::move(s).argument(2).layer(layer);
    if (Status s = check_tensor_shape(v, "v", step_.total_new, g.kv_heads, g.head_dim); !s.ok())
        return std::move(s).argument(3).layer(layer);
    if (Status s = backend_->append(layer, k, v); !s.ok()) return name_row(std::move(s), &StepMember::new_row).layer(layer);
    appended_[layer] = 1;
    last_layer_ = layer;
    return {};
}

Status Plan::attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options) {
    const ProfileRange range("ta_attend");
    TA_RETURN_IF_ERROR(check_layer(layer));
    const Geometry& g = pool_->geometry();
    const Numerics& n = pool_->numerics();
    if (step_.total_new > 0 && !appended_[layer]) {
        return fail(TA_E_STATE, "layer %u has new tokens that were not appended; ta_append belongs first", layer).layer(layer);
    }
    if (step_.total_new > 0 && last_layer_ != int64_t(layer)) {
        return fail(TA_E_STATE, "layer %lld was appended after layer %u; attend to a layer before the next one's append",
                    (long long)last_layer_, layer)
            .layer(layer);
    }
    if (q.heads % g.kv_heads != 0 || q.heads / g.kv_heads > kMaxGroup) {
        return fail(TA_E_SHAPE, "q has %lld heads; it takes 1..%d times the %u kv heads", (long long)q.heads, kMaxGroup,
                    g.kv_heads)
            .argument(2)
            .layer(layer);
    }
    if (Status s = check_tensor_shape(q, "q", step_.total_query, q.heads, g.head_dim); !s.ok())
        return std::move(s).argument(2).layer(layer);
    if (Status s = check_tensor_shape(out, "out", q.tokens, q.heads, q.head_dim); !s.ok())
        return std::move(s).argument(3).layer(layer);
    const NamedView slopes{"options.alibi_slopes", view_of_floats(options ? options->alibi_slopes : nullptr, 1, q.heads)};
    const NamedView sinks{"options.sinks", view_of_floats(options ? options->sinks : nullptr, 1, q.heads)};
    if (Status s = check_outputs({{"q", q}, slopes, sinks}, out, lse, 3); !s.ok()) return std::move(s).layer(layer);
    Result<AttendSettings> settings = resolve_attend(options, q.heads, int(g.head_dim), n.exp, n.p, !pool_->context().device());
    if (!settings.ok()) return std::move(settings).status().argument(5).layer(layer);
    AttendCall call;
    call.head_dim = int(g.head_dim);
    call.kv_heads = int(g.kv_heads);
    call.group = int(q.heads / g.kv_heads);
    if (g.has_channel_blocks()) {
        call.k_bits = g.k_bits.data() + g.index(layer, 0);
        call.v_bits = g.v_bits.data() + g.index(layer, 0);
        call.channel_head_offset = g.channel_head_offset.data() + g.index(layer, 0);
    }
    call.q = q;
    call.out = out;
    call.lse = lse;
    call.settings = settings.value();
    call.rotation_signs = n.hadamard ? pool_->rotation_signs() : nullptr;
    call.k_offset = n.k_offset.empty() ? nullptr : n.k_offset.data() + g.index(layer, 0) * g.head_dim;
    call.k_turning = n.encode.k_turning;
    call.saturate = n.saturate;
    Status s = partitioned_.open() ? partitioned_.attend(layer, call) : backend_->attend(layer, call);
    if (!s.ok()) return name_row(std::move(s), &StepMember::query_row).layer(layer);
    return {};
}

// --------------------------------------------------------------------------------------------------------------------- end

// Blocks of other ranks that have one behind them now, under the pool's lock. They go with the step.
void Plan::leave_to_other_ranks(StepMember& m) {
    std::vector<BlockPtr>& blocks = m.sequence->blocks;
    for (size_t b = size_t(std::max<int64_t>(0, Step::untouched_blocks(m) - 1)); b + 1 < blocks.size(); ++b) {
        if (m.sequence->partition->owns(int64_t(b))) continue;
        m.left.push_back(pool_->blocks().absent());
        blocks[b].swap(m.left.back());
    }
}

Status Plan::end() {
    const ProfileRange range("ta_plan_end");
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    const Geometry& g = pool_->geometry();
    if (step_.total_new > 0 && !backend_->replays()) {
        for (uint32_t layer = 0; layer < g.layers; ++layer) {
            if (!appended_[layer])
                return fail(TA_E_STATE, "layer %u lacks its ta_append; the plan stays open", layer).layer(layer);
        }
    }
    TA_RETURN_IF_ERROR(backend_->may_end());
    TA_RETURN_IF_ERROR(partitioned_.settle());
    TA_RETURN_IF_ERROR(backend_->seal());
    // Steps without queries in between, and steps that are done again, must not make some layers miss their turns.
    if (step_.total_query > 0) ++turn_;
    Pool::Counters& counters = pool_->counters();
    bool filled = false;
    pool_->commit_plan([&] {
        for (StepMember& m : step_.members) {
            Sequence& s = *m.sequence;
            if (s.released) continue;  // its blocks go with the step
            const auto first = std::max<int64_t>(m.length / kPageTokens, pool_->numerics().sink_blocks);
            filled = filled || (m.length + m.n_new) / kPageTokens > first;
            counters.appended_tokens += uint64_t(m.n_new);
            counters.copied_blocks += m.copied;
            counters.reopened_blocks += m.reopened;
            ++s.version;
            for (StepBlock& t : m.touched) {
                counters.closed_pages += t.channel ? g.layers : 0;
                BlockPtr& now = t.channel ? t.channel : t.token;
                if (size_t(t.index) < s.blocks.size()) {
                    s.blocks[size_t(t.index)].swap(now);
                } else {
                    s.blocks.push_back(std::move(now));
                }
            }
            s.length = m.length + m.n_new;
            if (s.partition) leave_to_other_ranks(m);
            if (m.touched.empty()) continue;
            s.largest_scales.swap(m.largest_scales);
            s.scales_side = m.scales_side == 0 ? 1 : 0;
            s.scales_known = true;
        }
    });
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

// Gives back whatever is still reserved, then the sequences.
void Plan::clear() {
    partitioned_.end(true);
    backend_->finish();
    step_ = Step{};
    if (reading_) pool_->blocks().stop_reading(*reading_);
    reading_.reset();
    pool_->unlock_for_plan(sequences_);
    open_ = false;
}

}  // namespace ta
