#include "src/attend/plan.h"

#include <algorithm>
#include <cstring>

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

}  // namespace

Plan::Plan(std::shared_ptr<Pool> pool)
    : pool_(std::move(pool)),
      appended_(pool_->geometry().layers, 0),
      workspace_(pool_->context().allocator()),
      append_scratch_(pool_->context().allocator()),
      executor_(pool_->context()) {}

Plan::~Plan() {
    if (open_) (void)abort();
}

// ------------------------------------------------------------------------------------------------------------------- begin

Status Plan::begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query) {
    if (open_) return fail(TA_E_STATE, "the plan is open; end or abort it first");
    std::vector<Member> members(seqs.size());
    int64_t total_new = 0, total_query = 0;
    for (size_t i = 0; i < seqs.size(); ++i) {
        Member& m = members[i];
        m.n_new = n_new ? n_new[i] : 0;
        m.n_query = n_query ? n_query[i] : m.n_new;
        if (m.n_new < 0)
            return fail(TA_E_INVALID, "n_new[%zu] is %lld", i, (long long)m.n_new).argument(3).sequence(int64_t(i));
        if (m.n_query < 0)
            return fail(TA_E_INVALID, "n_query[%zu] is %lld", i, (long long)m.n_query).argument(4).sequence(int64_t(i));
        m.new_row = total_new;
        m.query_row = total_query;
        total_new += m.n_new;
        total_query += m.n_query;
    }
    Result<std::vector<Sequence*>> locked = pool_->lock_for_plan(seqs);
    if (!locked.ok()) return std::move(locked).status();
    sequences_ = locked.take();
    members_ = std::move(members);
    // Until the last step has succeeded, every way out of here, exceptions included, gives everything back.
    struct Rollback {
        Plan* plan;
        ~Rollback() {
            if (plan) plan->clear();
        }
    } rollback{this};
    workspace_pages_ = 0;
    const Geometry& g = pool_->geometry();
    const uint64_t most_blocks = pool_->blocks().budget() / (g.all_8_bits ? g.token_slot_bytes : g.channel_slot_bytes);
    for (size_t i = 0; i < members_.size(); ++i) {
        Member& m = members_[i];
        m.sequence = sequences_[i];
        m.length = m.sequence->length;
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
        const int64_t grows_by = blocks_for(total) - blocks_for(m.length);
        if (uint64_t(grows_by) > most_blocks) {
            return fail(TA_E_TIER_FULL, "the device tier has a budget of %llu bytes; the sequence needs %lld more blocks",
                        (unsigned long long)pool_->blocks().budget(), (long long)grows_by)
                .sequence(int64_t(i))
                .block(blocks_for(total) - 1);
        }
        list_touched(m);
    }
    TA_RETURN_IF_ERROR(reserve_blocks());
    const size_t workspace_bytes = size_t(workspace_pages_) * g.token_page_bytes;
    if (!workspace_.reserve(workspace_bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the step's INT8 pages", workspace_bytes);
    }
    make_append_tasks();
    std::fill(appended_.begin(), appended_.end(), uint8_t{0});
    last_layer_ = -1;
    total_new_ = total_new;
    total_query_ = total_query;
    saturated_ = clamped_ = 0;
    rollback.plan = nullptr;
    open_ = true;
    return {};
}

// The blocks that the member's new tokens come into, and where their bytes will come from.
void Plan::list_touched(Member& m) {
    if (m.n_new == 0) return;
    const Geometry& g = pool_->geometry();
    const int64_t sinks = int64_t(pool_->numerics().sink_blocks), total = m.length + m.n_new;
    m.open_amax = m.sequence->open_amax;
    for (int64_t b = m.length / kPageTokens; b < blocks_for(total); ++b) {
        Touched t;
        t.index = b;
        t.have = int(std::clamp<int64_t>(m.length - b * kPageTokens, 0, kPageTokens));
        t.end = int(std::min<int64_t>(kPageTokens, total - b * kPageTokens));
        t.stays_8_bits = g.all_8_bits || b < sinks;
        t.closes = t.end == kPageTokens && !t.stays_8_bits;
        if (t.have > 0) {
            const BlockPtr& present = m.sequence->blocks[size_t(b)];
            // A full block that a truncate cut has hashes over all its tokens; they must hold again should the step be aborted.
            if (present->kind() == PageKind::kToken && !present->sealed() && is_sole_owner(present)) t.token = present;
        } else if (t.closes) {
            t.workspace_page = workspace_pages_++;
        }
        m.touched.push_back(std::move(t));
    }
}

// Takes all blocks of the step at once: a step that does not fit takes none from others.
Status Plan::reserve_blocks() {
    std::vector<PageKind> wanted;
    std::vector<std::pair<size_t, Touched*>> owner;  // of wanted: member and touched block
    for (size_t i = 0; i < members_.size(); ++i) {
        for (Touched& t : members_[i].touched) {
            const auto want = [&](PageKind kind) {
                wanted.push_back(kind);
                owner.emplace_back(i, &t);
            };
            if (!t.token && t.workspace_page < 0) want(PageKind::kToken);
            if (t.closes) want(PageKind::kChannel);
        }
        // So that end cannot fail. A larger capacity may stay behind after a failure.
        Sequence& s = *members_[i].sequence;
        s.blocks.reserve(size_t(blocks_for(members_[i].length + members_[i].n_new)));
    }
    size_t failed = wanted.size();
    Result<std::vector<BlockPtr>> taken = pool_->blocks().acquire(wanted, &failed);
    if (!taken.ok()) {
        Status s = std::move(taken).status();
        if (failed == wanted.size()) return s;
        return std::move(s).sequence(int64_t(owner[failed].first)).block(owner[failed].second->index);
    }
    std::vector<BlockPtr> blocks = taken.take();
    for (size_t i = 0; i < blocks.size(); ++i) {
        Touched& t = *owner[i].second;
        (wanted[i] == PageKind::kToken ? t.token : t.channel) = std::move(blocks[i]);
    }
    for (Member& m : members_) {
        for (Touched& t : m.touched) {
            if (t.have == 0) continue;
            const BlockPtr& present = m.sequence->blocks[size_t(t.index)];
            if (t.token == present) continue;
            copy_tokens(*present, t.have, *t.token);
            ++(present->sealed() ? m.reopened : m.copied);
        }
    }
    return {};
}

// The first `tokens` tokens of a block, which may be shared, closed, or both, into a token block of our own.
void Plan::copy_tokens(const Block& from, int tokens, Block& to) {
    const Geometry& g = pool_->geometry();
    if (from.kind() == PageKind::kToken) {
        std::memcpy(to.slot(), from.slot(), g.token_payload_bytes);
        return;
    }
    const cpu::PageCodec& codec = *pool_->context().kernels().codec;
    pool_->context().threads().parallel_for(g.layers, 1, [&](int64_t layer, int) {
        cpu::HeadStage1 values;
        for (uint32_t head = 0; head < g.kv_heads; ++head) {
            const auto piece_of = [&](PageKind kind) {
                return g.page_offset(kind, uint32_t(layer)) + g.head_offset(kind, uint32_t(layer), head);
            };
            codec.decode_channel_piece(from.slot() + piece_of(PageKind::kChannel), g.channel_layout(uint32_t(layer), head),
                                       tokens, values);
            codec.store_token_piece(values, int(g.head_dim), 0, tokens, to.slot() + piece_of(PageKind::kToken));
        }
    });
}

// ------------------------------------------------------------------------------------------------------------------ attend

Status Plan::check_layer(uint32_t layer) const {
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    const uint32_t layers = pool_->geometry().layers;
    if (layer >= layers) return fail(TA_E_INVALID, "layer is %u; the pool has %u", layer, layers).argument(1);
    return {};
}

uint8_t* Plan::token_page(const Touched& t, uint32_t layer) const {
    const Geometry& g = pool_->geometry();
    if (t.token) return t.token->slot() + g.page_offset(PageKind::kToken, layer);
    return const_cast<uint8_t*>(workspace_.data()) + size_t(t.workspace_page) * g.token_page_bytes;
}

// Where attention reads each block of the batch in this layer: new tokens at stage 1, older ones as they are stored.
void Plan::list_pages(uint32_t layer) {
    const Geometry& g = pool_->geometry();
    pages_.clear();
    attend_sequences_.clear();
    size_t total = 0;
    for (const Member& m : members_) total += size_t(blocks_for(m.length + m.n_new));
    pages_.reserve(total);
    for (const Member& m : members_) {
        const PageBase* first = pages_.data() + pages_.size();
        const int64_t touched_from = m.touched.empty() ? blocks_for(m.length) : m.touched.front().index;
        for (int64_t b = 0; b < touched_from; ++b) {
            const Block& block = *m.sequence->blocks[size_t(b)];
            pages_.push_back({block.slot() + g.page_offset(block.kind(), layer), block.kind()});
        }
        for (const Touched& t : m.touched) pages_.push_back({token_page(t, layer), PageKind::kToken});
        attend_sequences_.push_back({first, m.length + m.n_new, m.n_query, m.query_row});
    }
}

Status Plan::attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options) {
    TA_RETURN_IF_ERROR(check_layer(layer));
    const Geometry& g = pool_->geometry();
    const Numerics& n = pool_->numerics();
    if (total_new_ > 0 && !appended_[layer]) {
        return fail(TA_E_STATE, "layer %u has new tokens that were not appended; ta_append belongs first", layer).layer(layer);
    }
    if (total_new_ > 0 && last_layer_ != int64_t(layer)) {
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
    if (Status s = check_tensor_shape(q, "q", total_query_, q.heads, g.head_dim); !s.ok())
        return std::move(s).argument(2).layer(layer);
    if (Status s = check_tensor_shape(out, "out", q.tokens, q.heads, q.head_dim); !s.ok())
        return std::move(s).argument(3).layer(layer);
    if (Status s = check_outputs({{"q", q}}, out, lse, 3); !s.ok()) return std::move(s).layer(layer);
    Result<AttendSettings> settings = resolve_attend(options, q.heads, int(g.head_dim), n.exp, n.p);
    if (!settings.ok()) return std::move(settings).status().argument(5).layer(layer);
    const cpu::PageCodec& codec = *pool_->context().kernels().codec;
    if (!n.saturate) {
        if (Status s = check_finite(codec, q, "q"); !s.ok()) return std::move(s).argument(2).layer(layer);
    }
    list_pages(layer);
    AttendCall call;
    call.head_dim = int(g.head_dim);
    call.kv_heads = int(g.kv_heads);
    call.group = int(q.heads / g.kv_heads);
    if (!g.all_8_bits) {
        call.k_bits = g.k_bits.data() + g.index(layer, 0);
        call.v_bits = g.v_bits.data() + g.index(layer, 0);
        call.channel_head_offset = g.channel_head_offset.data() + g.index(layer, 0);
    }
    call.sequences = attend_sequences_;
    call.q = q;
    call.out = out;
    call.lse = lse;
    call.settings = settings.value();
    call.rotation_signs = n.hadamard ? pool_->rotation_signs() : nullptr;
    call.k_offset = n.k_offset.empty() ? nullptr : n.k_offset.data() + g.index(layer, 0) * g.head_dim;
    call.saturate = n.saturate;
    uint64_t saturated = 0;
    TA_RETURN_IF_ERROR(executor_.run(call, &saturated));
    if (saturated) pool_->counters().saturated_values += saturated;
    return {};
}

// --------------------------------------------------------------------------------------------------------------------- end

Status Plan::end() {
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    const Geometry& g = pool_->geometry();
    if (total_new_ > 0) {
        for (uint32_t layer = 0; layer < g.layers; ++layer) {
            if (!appended_[layer])
                return fail(TA_E_STATE, "layer %u lacks its ta_append; the plan stays open", layer).layer(layer);
        }
    }
    struct Sealing {
        Block* block;
        const Touched* touched;
    };
    std::vector<Sealing> sealings;
    for (Member& m : members_) {
        for (Touched& t : m.touched) sealings.push_back({t.channel ? t.channel.get() : t.token.get(), &t});
    }
    pool_->context().threads().parallel_for(int64_t(sealings.size()), 1, [&](int64_t i, int) {
        const Touched& t = *sealings[size_t(i)].touched;
        sealings[size_t(i)].block->seal(g, pool_->fingerprint(), uint64_t(t.index), uint32_t(t.end));
    });
    Pool::Counters& counters = pool_->counters();
    for (Member& m : members_) {
        for (const Touched& t : m.touched) counters.closed_pages += t.channel ? g.layers : 0;
        counters.copied_blocks += m.copied;
        counters.reopened_blocks += m.reopened;
    }
    counters.appended_tokens += uint64_t(total_new_);
    counters.saturated_values += saturated_.load();
    counters.clamped_values += clamped_.load();
    pool_->commit_plan([this] {
        for (Member& m : members_) {
            Sequence& s = *m.sequence;
            for (Touched& t : m.touched) {
                BlockPtr& now = t.channel ? t.channel : t.token;
                if (size_t(t.index) < s.blocks.size()) {
                    s.blocks[size_t(t.index)].swap(now);
                } else {
                    s.blocks.push_back(std::move(now));
                }
            }
            s.length = m.length + m.n_new;
            if (!m.open_amax.empty()) s.open_amax.swap(m.open_amax);
        }
    });
    clear();
    return {};
}

Status Plan::abort() {
    if (!open_) return fail(TA_E_STATE, "the plan is not open; ta_plan_begin belongs first");
    clear();
    return {};
}

// Gives back whatever is still reserved, then the sequences.
void Plan::clear() {
    for (Member& m : members_) m.touched.clear();
    members_.clear();
    pool_->unlock_for_plan(sequences_);
    sequences_.clear();
    open_ = false;
}

}  // namespace ta
