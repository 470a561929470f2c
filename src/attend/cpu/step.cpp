// Steps on a CPU: stage 1 of the new tokens, closing of the pages that they fill, attention. All of it is synchronous.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "src/attend/backend.h"
#include "src/attend/cpu/executor.h"
#include "src/attend/cpu/parts.h"
#include "src/attend/cpu/stage1.h"
#include "src/attend/cpu/turned.h"
#include "src/attend/cpu/turning.h"
#include "src/kv/partition.h"

namespace ta {
namespace {

// Elements: a smaller append is done before another thread would wake up.
constexpr int64_t kAloneElements = 1 << 14;

constexpr auto kNoSigns = [] {
    std::array<float, kMaxHeadDim> ones{};
    ones.fill(1.0f);
    return ones;
}();

// One worker's buffers for one page of one head.
struct AppendScratch {
    cpu::HeadStage1 codes;
    alignas(64) float k[kPageTokens * kMaxHeadDim];
    alignas(64) float v[kPageTokens * kMaxHeadDim];
    float k_amax[kPageTokens], v_amax[kPageTokens];
};

class CpuStep final : public StepBackend {
  public:
    explicit CpuStep(Pool& pool)
        : pool_(pool),
          workspace_(pool.context().allocator()),
          append_scratch_(pool.context().allocator()),
          kept_(pool.context().allocator()),
          drafts_(pool.context().allocator()),
          wide_{Buffer(pool.context().allocator()), Buffer(pool.context().allocator()), Buffer(pool.context().allocator()),
                Buffer(pool.context().allocator())},
          executor_(pool.context()),
          turned_(pool),
          parts_(pool.context()) {}

    Status set_stream(ta_stream) override {
        return fail(TA_E_UNSUPPORTED, "a CPU has no streams: calls return when their work is done");
    }
    Status begin(Step& step) override;
    Status copy_tokens(const Block& from, int tokens, Block& to) override;
    Result<TensorView> wide_tensor(Wide use, const TensorView& x, int64_t channels) override;
    Status copy_channels(Wide use, const TensorView& from, const TensorView& to) override;
    Result<TensorView> turn(uint32_t layer, const TensorView& q) override { return turned_.turn(*step_, layer, q); }
    Status hold_turned(const AttendCall& call, TensorView& out, float*& lse) override {
        return turned_.hold(*step_, call, out, lse);
    }
    Status join_turned(const TensorView& out, const float* lse, const AttendCall& call) override {
        turned_.join(out, lse, call);
        return {};
    }
    Status append(uint32_t layer, const TensorView& k, const TensorView& v) override;
    Status attend(uint32_t layer, AttendCall& call) override;
    bool replays() const override { return false; }
    Status redo() override;
    Status seal() override;
    void finish() override;
    PartPath& parts() override { return parts_; }

  private:
    struct AppendTask {
        size_t member;
        uint32_t head;       // only in layers with so many heads
        size_t first, last;  // [first, last) of `touched`
    };

    Status reserve_append_scratch();
    AppendScratch& append_scratch(int worker) { return reinterpret_cast<AppendScratch*>(append_scratch_.data())[worker]; }
    void make_append_tasks();
    Status recall_scales(StepMember& m);
    uint8_t* token_page(const StepBlock& t, uint32_t layer);
    // The head's own scales (those that tokens would have alone), in a token block.
    float* own_scales(const Block& block, uint32_t layer, uint32_t head) const {
        return reinterpret_cast<float*>(block.slot() + pool_.geometry().own_scales_offset(layer, head));
    }
    // Scales of a page. own: the largest that its tokens would have alone, for K and V. k, v: those that its new tokens get.
    struct UniversalScales {
        float own[2] = {0.0f, 0.0f};
        float k = 0.0f, v = 0.0f;
    };
    UniversalScales take_own_scales(StepMember& m, const StepBlock& t, uint32_t layer, uint32_t head, const AppendScratch& s);
    void append_block(StepMember& member, StepBlock& t, uint32_t layer, uint32_t head, const TensorView& k, const TensorView& v,
                      AppendScratch& scratch);
    void read_rows(const TensorView& x, int64_t row, int n, uint32_t head, const float* offset, float* out);
    void read_stored_rows(const uint8_t* piece, int d, int n, AppendScratch& scratch);
    TurningPairs turning_before(const StepMember& member, const StepBlock& t, uint32_t layer, uint32_t head);
    static bool may_be_redone(const StepMember& m, bool turning);
    size_t draft_row_bytes() const { return pool_.geometry().most_channels * sizeof(float); }
    TensorView drafts_of(const TensorView& x, uint32_t layer, bool v);
    void keep_drafts(const TensorView& from, const TensorView& to);
    void close_up(const StepMember& m, const TensorView& rows);
    Status keep_anew(const Step& step);
    void list_pages(uint32_t layer, bool observed);
    void list_blocks(const StepQueries& q, uint32_t layer, const StoredPage* pages, float* mass);
    void add_masses();

    const cpu::PageCodec& codec() const { return *pool_.context().kernels().codec; }

    Pool& pool_;
    Step* step_ = nullptr;
    std::vector<AppendTask> append_tasks_;
    std::atomic<uint64_t> saturated_{0}, clamped_{0};
    std::vector<StoredPage> slots_;              // where the members' untouched blocks were at begin
    std::vector<size_t> first_slot_;             // of each member
    std::vector<StoredPage> pages_;              // the blocks' pages in one layer
    std::vector<const StoredPage*> first_page_;  // each member's first entry in pages_
    std::vector<AttendSequence> attend_sequences_;
    std::vector<float> masses_;   // by block of all members: its weight in all observed calls
    int64_t heads_observed_ = 0;  // heads of these calls: each gave a weight of 1 to every observed token
    Buffer workspace_, append_scratch_;
    std::vector<const StepBlock*> anew_;  // blocks whose tokens the step changes, until seal()
    Buffer kept_;                         // the old tokens of all of anew_
    // In a step with drafts that may be redone: K and V of the new tokens as the caller gave them, [layers, 2, total_new] rows.
    Buffer drafts_;
    bool keeps_drafts_ = false;
    std::vector<std::array<TensorView, 2>> draft_rows_;  // [layers]
    Buffer wide_[4];                                     // by Wide
    AttendExecutor executor_;
    CpuTurned turned_;
    CpuParts parts_;
};

Status CpuStep::begin(Step& step) {
    const Geometry& g = pool_.geometry();
    const size_t workspace_bytes =
        size_t(step.workspace_pages) * (step.layers_in_order ? g.largest_token_page_bytes : g.token_payload_bytes);
    if (!workspace_.reserve(workspace_bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the step's INT8 pages", workspace_bytes)
            .bytes(workspace_bytes);
    }
    turned_.begin(step);
    TA_RETURN_IF_ERROR(keep_anew(step));
    slots_.clear();
    first_slot_.clear();
    for (const StepMember& m : step.members) {
        first_slot_.push_back(slots_.size());
        for (int64_t b = 0; b < Step::untouched_blocks(m); ++b) {
            const Block& block = *m.sequence->blocks[size_t(b)];
            const Block::Stored at = block.stored();
            slots_.push_back({at.slot, at.kind});
        }
    }
    keeps_drafts_ = step.drafts && std::any_of(step.members.begin(), step.members.end(), [&](const StepMember& m) {
                        return may_be_redone(m, pool_.numerics().encode.k_turning);
                    });
    draft_rows_.assign(keeps_drafts_ ? g.layers : 0, {});
    const size_t draft_bytes = keeps_drafts_ ? 2 * size_t(g.layers) * size_t(step.total_new) * draft_row_bytes() : 0;
    if (!drafts_.reserve(draft_bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the step's drafts", draft_bytes).bytes(draft_bytes);
    }
    masses_.clear();
    heads_observed_ = 0;
    if (pool_.residency().observes_attention()) {
        size_t blocks = 0;
        for (const StepMember& m : step.members) blocks += size_t(Step::untouched_blocks(m)) + m.touched.size();
        masses_.resize(blocks);
    }
    step_ = &step;
    for (StepMember& m : step.members) {
        if (m.recalls) TA_RETURN_IF_ERROR(recall_scales(m));
    }
    make_append_tasks();
    saturated_ = clamped_ = 0;
    return {};
}

// Finds the member's largest scales from its blocks (numerics.md section 2). The first block that the step touches is a copy:
// sets its present tokens to the codes and scales that they would have had.
Status CpuStep::recall_scales(StepMember& m) {
    TA_RETURN_IF_ERROR(reserve_append_scratch());
    const Geometry& g = pool_.geometry();
    const cpu::PageCodec& codec = this->codec();
    const int d = int(g.common.head_dim);  // the same in all layers, under universal scales
    std::fill(m.largest_scales.begin(), m.largest_scales.end(), 0.0f);
    pool_.context().threads().parallel_for(int64_t(g.heads()), 1, [&](int64_t i, int worker) {
        const auto layer = uint32_t(i / g.common.kv_heads), head = uint32_t(i % g.common.kv_heads);
        float* largest = m.largest_scales.data() + 2 * i;
        // `own`: [64] of K, then of V; or one of each.
        const auto take = [&](const uint8_t* at, int each, int n) {
            const auto* own = reinterpret_cast<const float*>(at);
            for (int which = 0; which < 2; ++which, own += each)
                largest[which] = std::max(largest[which], *std::max_element(own, own + n));
        };
        for (int64_t b = 0; b < Step::untouched_blocks(m); ++b) {
            const Block::Stored at = m.sequence->blocks[size_t(b)]->stored();
            if (!at.slot) continue;  // dropped
            if (at.kind == PageKind::kToken) {
                take(at.slot + g.own_scales_offset(layer, head), kPageTokens, kPageTokens);
            } else {
                take(at.slot + g.page_offset(at.kind, layer) + g.head_offset(at.kind, layer, head) +
                         g.channel_layout(at.kind, layer, head).own_scales(),
                     1, 1);
            }
        }
        const StepBlock& t = m.touched.front();
        if (t.have == 0) return;
        take(t.token->slot() + g.own_scales_offset(layer, head), kPageTokens, t.have);
        uint8_t* piece = token_page(t, layer) + g.head_offset(PageKind::kToken, layer, head);
        cpu::HeadStage1& codes = append_scratch(worker).codes;
        codec.load_token_piece(piece, d, t.have, codes);
        const TurningPairs turning =
            pool_.numerics().encode.k_turning ? turning_of_tokens(piece, TokenLayout(d)) : TurningPairs{};
        settle_page(codes.k, codes.k_scale, d, t.have, largest[0], pool_.numerics().encode.k_turning ? &turning : nullptr);
        settle_page(codes.v, codes.v_scale, d, t.have, largest[1]);
        codec.store_token_piece(codes, d, 0, t.have, piece);
    });
    return {};
}

// Makes one task for each (sequence, kv head, block). One task has several blocks if a block's scale depends on the blocks
// before it, or the last block's turning pairs depend on the block before it.
void CpuStep::make_append_tasks() {
    append_tasks_.clear();
    const bool in_order = pool_.numerics().universal_open_scale, turning = pool_.numerics().encode.k_turning;
    for (size_t i = 0; i < step_->members.size(); ++i) {
        const size_t blocks = step_->members[i].touched.size();
        size_t last = 0;
        for (size_t first = 0; first < blocks; first = last) {
            last = in_order || (turning && first + 2 == blocks) ? blocks : first + 1;
            for (uint32_t head = 0; head < pool_.geometry().most_kv_heads; ++head)
                append_tasks_.push_back({i, head, first, last});
        }
    }
}

Status CpuStep::reserve_append_scratch() {
    const size_t bytes = sizeof(AppendScratch) * size_t(pool_.context().thread_count());
    if (append_scratch_.reserve(bytes)) return {};
    return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the append workspace", bytes).bytes(bytes);
}

Result<TensorView> CpuStep::wide_tensor(Wide use, const TensorView& x, int64_t channels) {
    TensorView wide = x;
    wide.head_dim = wide.stride_head = channels;
    wide.stride_token = x.heads * wide.head_dim;
    const size_t bytes = size_t(x.tokens * wide.stride_token) * dtype_bytes(x.dtype);
    Buffer& buffer = wide_[size_t(use)];
    if (!buffer.reserve(bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for a tensor with the channels of blocks", bytes).bytes(bytes);
    }
    wide.data = buffer.data();
    return wide;
}

Status CpuStep::copy_channels(Wide use, const TensorView& from, const TensorView& to) {
    static const char* const kNames[] = {"q", "k", "v", "out"};
    // Checks here, so that errors name the caller's channels.
    if (use != Wide::kOut && !pool_.numerics().saturate) TA_RETURN_IF_ERROR(check_finite(codec(), from, kNames[size_t(use)]));
    const size_t element = dtype_bytes(from.dtype);
    // Copies half by half: see channel_of().
    const int64_t half = std::min(from.head_dim, to.head_dim) / 2, rest = to.head_dim / 2 - half;
    for (int64_t t = 0; t < from.tokens; ++t) {
        for (int64_t h = 0; h < from.heads; ++h) {
            const uint8_t* source = from.at(t, h);
            uint8_t* target = to.at(t, h);
            for (int part = 0; part < 2; ++part) {
                std::memcpy(target, source, size_t(half) * element);
                if (rest > 0) std::memset(target + size_t(half) * element, 0, size_t(rest) * element);
                source += size_t(from.head_dim / 2) * element;
                target += size_t(to.head_dim / 2) * element;
            }
        }
    }
    return {};
}

Status CpuStep::append(uint32_t layer, const TensorView& k, const TensorView& v) {
    if (!pool_.numerics().saturate) {
        if (Status s = check_finite(codec(), k, "k"); !s.ok()) return std::move(s).argument(2);
        if (Status s = check_finite(codec(), v, "v"); !s.ok()) return std::move(s).argument(3);
    }
    TA_RETURN_IF_ERROR(reserve_append_scratch());
    if (keeps_drafts_) {
        draft_rows_[layer] = {drafts_of(k, layer, false), drafts_of(v, layer, true)};
        keep_drafts(k, draft_rows_[layer][0]);
        keep_drafts(v, draft_rows_[layer][1]);
    }
    // A decode step's few tokens are done before another thread would wake up.
    const int64_t tasks = int64_t(append_tasks_.size());
    const bool alone = step_->total_new * k.heads * k.head_dim < kAloneElements;
    pool_.context().threads().parallel_for(tasks, alone ? tasks : 1, [&](int64_t i, int worker) {
        const AppendTask& task = append_tasks_[size_t(i)];
        if (task.head >= k.heads) return;
        StepMember& m = step_->members[task.member];
        AppendScratch& scratch = append_scratch(worker);
        for (size_t b = task.first; b < task.last; ++b) append_block(m, m.touched[b], layer, task.head, k, v, scratch);
    });
    return {};
}

// ------------------------------------------------------------------------------------------------------------------ drafts

// True if the end may find blocks that the kept tokens alone would have written differently: blocks that it closes, blocks
// whose turning pairs or scale were chosen by their first tokens, and blocks whose tokens change places.
bool CpuStep::may_be_redone(const StepMember& m, bool turning) {
    return m.is_tree || std::any_of(m.touched.begin(), m.touched.end(), [turning](const StepBlock& t) {
               return t.later || t.end - t.have == kPageTokens || (turning && (t.have == 0 || t.index == 0));
           });
}

// Saves the blocks whose tokens the step is about to change, so that an abort can restore them.
Status CpuStep::keep_anew(const Step& step) {
    std::vector<const StepBlock*> anew = step.blocks_begun_anew();
    const size_t payload = pool_.geometry().token_payload_bytes, bytes = anew.size() * payload;
    if (!kept_.reserve(bytes))
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the blocks that the step begins anew", bytes).bytes(bytes);
    for (size_t i = 0; i < anew.size(); ++i) std::memcpy(kept_.data() + i * payload, anew[i]->token->slot(), payload);
    anew_.swap(anew);
    return {};
}

// Where the rows of `x` are kept, without gaps.
TensorView CpuStep::drafts_of(const TensorView& x, uint32_t layer, bool v) {
    TensorView rows = x;
    rows.data = drafts_.data() + (2 * size_t(layer) + v) * size_t(x.tokens) * draft_row_bytes();
    rows.stride_head = x.head_dim;
    rows.stride_token = x.heads * x.head_dim;
    return rows;
}

void CpuStep::keep_drafts(const TensorView& from, const TensorView& to) {
    for (int64_t t = 0; t < from.tokens; ++t) {
        for (int64_t h = 0; h < from.heads; ++h)
            std::memcpy(to.at(t, h), from.at(t, h), size_t(from.head_dim) * dtype_bytes(from.dtype));
    }
}

// Moves the rows of the kept tokens to the front of the member's rows.
void CpuStep::close_up(const StepMember& m, const TensorView& rows) {
    const size_t bytes = size_t(rows.stride_token) * dtype_bytes(rows.dtype);
    for (size_t i = 0; i < m.path.size(); ++i) {
        if (size_t(m.path[i]) != i) std::memcpy(rows.at(m.new_row + int64_t(i), 0), rows.at(m.new_row + m.path[i], 0), bytes);
    }
}

// Appends again to the blocks that need it, this time without the rejected tokens.
Status CpuStep::redo() {
    if (!keeps_drafts_) return {};
    const Geometry& g = pool_.geometry();
    make_append_tasks();
    std::erase_if(append_tasks_, [this](const AppendTask& task) {
        const std::vector<StepBlock>& touched = step_->members[task.member].touched;
        return std::none_of(touched.begin() + int64_t(task.first), touched.begin() + int64_t(task.last),
                            [](const StepBlock& t) { return t.redone; });
    });
    if (append_tasks_.empty()) return {};
    TA_RETURN_IF_ERROR(reserve_append_scratch());
    TA_RETURN_IF_ERROR(keep_anew(*step_));
    const uint64_t saturated = saturated_.load();  // the appends have counted them
    pool_.context().threads().parallel_for(g.layers, 1, [&](int64_t layer, int worker) {
        const auto& [k, v] = draft_rows_[size_t(layer)];
        for (const StepMember& m : step_->members) {
            close_up(m, k);
            close_up(m, v);
        }
        for (const AppendTask& task : append_tasks_) {
            if (task.head >= k.heads) continue;
            StepMember& m = step_->members[task.member];
            for (size_t b = task.first; b < task.last; ++b) {
                if (m.touched[b].redone)
                    append_block(m, m.touched[b], uint32_t(layer), task.head, k, v, append_scratch(worker));
            }
        }
    });
    saturated_ = saturated;
    return {};
}

// Converts n rows of one head from `row` on to fp32, and subtracts the offset.
void CpuStep::read_rows(const TensorView& x, int64_t row, int n, uint32_t head, const float* offset, float* out) {
    const cpu::PageCodec& codec = this->codec();
    const int d = int(x.head_dim);
    int64_t replaced = 0;
    for (int t = 0; t < n; ++t) {
        float* to = out + t * d;
        replaced += codec.to_float(x.at(row + t, head), x.dtype, d, pool_.numerics().saturate, to);
        if (offset) {
            for (int c = 0; c < d; ++c) to[c] -= offset[c];
        }
    }
    if (replaced) saturated_.fetch_add(uint64_t(replaced), std::memory_order_relaxed);
}

// Updates own scales by the new tokens, whose largest magnitudes are in `s`.
CpuStep::UniversalScales CpuStep::take_own_scales(StepMember& m, const StepBlock& t, uint32_t layer, uint32_t head,
                                                  const AppendScratch& s) {
    UniversalScales result;
    float* largest = m.largest_scales.data() + pool_.geometry().index(layer, head) * 2;
    float* to = t.token ? own_scales(*t.token, layer, head) : nullptr;
    for (int which = 0; which < 2; ++which) {
        const float* amax = which ? s.v_amax : s.k_amax;
        float& own = result.own[which];
        for (int i = 0; i < t.have; ++i) own = std::max(own, to[which * kPageTokens + i]);
        for (int i = 0; i < t.end - t.have; ++i) {
            const float scale = stage1_scale(amax[i], kStage1Levels);
            own = std::max(own, scale);
            if (to) to[which * kPageTokens + t.have + i] = scale;
        }
        largest[which] = std::max(largest[which], own);
    }
    result.k = universal_scale(s.codes.k_scale, t.have, largest[0]);
    result.v = universal_scale(s.codes.v_scale, t.have, largest[1]);
    return result;
}

void CpuStep::append_block(StepMember& m, StepBlock& t, uint32_t layer, uint32_t head, const TensorView& k, const TensorView& v,
                           AppendScratch& s) {
    const Geometry& g = pool_.geometry();
    const Numerics& num = pool_.numerics();
    const cpu::PageCodec& codec = this->codec();
    const int d = int(g.shape(layer).head_dim), n = t.end - t.have;
    const int64_t row = m.new_row + t.index * kPageTokens + t.have - m.length;
    const float* offset = num.k_offset.empty() ? nullptr : num.k_offset.data() + g.channel_index(layer, head);
    uint8_t* piece = token_page(t, layer) + g.head_offset(PageKind::kToken, layer, head);
    // The tokens that the block already has.
    const uint8_t* stored =
        t.have == 0 ? nullptr
                    : t.token->slot() + g.page_offset(PageKind::kToken, layer) + g.head_offset(PageKind::kToken, layer, head);
    if (t.begins_anew) read_stored_rows(stored, d, t.have, s);
    read_rows(k, row, n, head, offset, s.k + (t.begins_anew ? t.have * d : 0));
    read_rows(v, row, n, head, nullptr, s.v);
    TurningPairs turning;
    int first_k = t.have;  // K is encoded from this token on
    if (num.encode.k_turning) {
        if (stored) turning = turning_of_tokens(stored, TokenLayout(d));
        if (t.begins_anew) {
            const bool stays = t.index > 0 && turning.any() && all_turning_helps(turning, s.k, t.end, d);
            const TurningPairs found = stays ? turning : find_turning(s.k, t.end, d);
            if (found == turning) {
                std::memmove(s.k, s.k + t.have * d, size_t(n) * size_t(d) * sizeof(float));
            } else {
                turning = found;
                first_k = 0;
            }
        } else if (t.have == 0) {
            turning = n < kPageTokens && t.index > 0 ? carry_turning(turning_before(m, t, layer, head), s.k, n, d)
                                                     : find_turning(s.k, n, d);
        }
        take_out_turning(turning, first_k, t.end - first_k, d, s.k);
    }
    const int n_k = t.end - first_k;
    for (int i = 0; i < n_k; ++i) {
        if (num.hadamard) codec.rotate(s.k + i * d, d, pool_.rotation_signs());
        s.k_amax[i] = codec.amax(s.k + i * d, d);
    }
    for (int i = 0; i < n; ++i) s.v_amax[i] = codec.amax(s.v + i * d, d);

    Block* const channel = t.closed_by_append(num.batch_invariant);
    if (stored && (channel || num.universal_open_scale || t.begins_anew)) codec.load_token_piece(stored, d, t.have, s.codes);

    UniversalScales universal_scales;
    if (num.universal_open_scale) universal_scales = take_own_scales(m, t, layer, head, s);
    const bool whole = n == kPageTokens;
    const bool universal = num.universal_open_scale;
    const ChannelLayout closed_layout = g.channel_layout(PageKind::kChannel, layer, head);
    const ScaleRule k_rule = scale_rule(whole, t.stays_8_bits || closed_layout.k_bits == 8,
                                        {num.k_page_scale, num.k_page_scale_at_8_bits, false, universal});
    const ScaleRule v_rule = scale_rule(whole, t.stays_8_bits || closed_layout.v_bits == 8,
                                        {num.v_page_scale, num.v_page_scale_at_8_bits, num.encode.v_exponents, universal});
    const TokenScaling k_scaling{k_rule, universal_scales.k, num.encode.k_turning ? &turning : nullptr};
    const TokenScaling v_scaling{v_rule, universal_scales.v};
    const int64_t clamped = quantize_tokens(codec, {s.k, s.k_amax, d, first_k, t.end}, k_scaling, s.codes.k, s.codes.k_scale) +
                            quantize_tokens(codec, {s.v, s.v_amax, d, t.have, t.end}, v_scaling, s.codes.v, s.codes.v_scale);
    if (clamped) clamped_.fetch_add(uint64_t(clamped), std::memory_order_relaxed);
    codec.store_token_piece(s.codes, d, t.workspace_page < 0 ? first_k : 0, t.end, piece);
    if (num.encode.k_turning && first_k == 0) store_turning_of_missing(turning, t.end, TokenLayout(d), piece);

    if (!channel) return;
    uint8_t* closed =
        channel->slot() + g.page_offset(PageKind::kChannel, layer) + g.head_offset(PageKind::kChannel, layer, head);
    codec.encode_channel_piece(s.codes, closed_layout, num.encode, closed);
    if (num.universal_open_scale)
        std::memcpy(closed + closed_layout.own_scales(), universal_scales.own, sizeof universal_scales.own);
}

// Restores K of the first n tokens of a page as it was given, but for its rounding.
void CpuStep::read_stored_rows(const uint8_t* piece, int d, int n, AppendScratch& s) {
    const cpu::PageCodec& codec = this->codec();
    codec.load_token_piece(piece, d, n, s.codes);
    for (int t = 0; t < n; ++t) {
        float* row = s.k + t * d;
        for (int c = 0; c < d; ++c) row[c] = float(s.codes.k[t * d + c]) * s.codes.k_scale[t];
        if (!pool_.numerics().hadamard) continue;
        codec.rotate(row, d, kNoSigns.data());
        for (int c = 0; c < d; ++c) row[c] *= pool_.rotation_signs()[c];
    }
    put_back_turning(turning_of_tokens(piece, TokenLayout(d)), 0, n, d, s.k);
}

void CpuStep::finish() {
    const size_t bytes = pool_.geometry().token_payload_bytes;
    for (size_t i = 0; i < anew_.size(); ++i) std::memcpy(anew_[i]->token->slot(), kept_.data() + i * bytes, bytes);
    anew_.clear();
    step_ = nullptr;
    workspace_.trim();
    drafts_.trim();
    executor_.trim();
    turned_.trim();
}

// The turning pairs of the page before block `t`. If the step touches that page, the same task has written it.
TurningPairs CpuStep::turning_before(const StepMember& m, const StepBlock& t, uint32_t layer, uint32_t head) {
    const Geometry& g = pool_.geometry();
    const TokenLayout token = g.token_layout(layer);
    const auto n = size_t(t.index - m.touched.front().index);
    if (n > 0)
        return turning_of_tokens(token_page(m.touched[n - 1], layer) + g.head_offset(PageKind::kToken, layer, head), token);
    if (!m.sequence->all_ranks_have(t.index - 1)) return {};
    const StoredPage& at = slots_[first_slot_[size_t(&m - step_->members.data())] + size_t(t.index) - 1];
    if (!at.page) return {};
    const uint8_t* piece = at.page + g.page_offset(at.kind, layer) + g.head_offset(at.kind, layer, head);
    return page_format(at.kind) == PageKind::kToken ? turning_of_tokens(piece, token)
                                                    : turning_of_channel(piece, g.channel_layout(at.kind, layer, head));
}

Status CpuStep::copy_tokens(const Block& from, int tokens, Block& to) {
    const Geometry& g = pool_.geometry();
    const Block::Stored at = from.stored();
    if (at.kind == PageKind::kToken) {
        std::memcpy(to.slot(), at.slot, g.token_slot_bytes);
        return {};
    }
    TA_RETURN_IF_ERROR(reserve_append_scratch());
    const cpu::PageCodec& codec = this->codec();
    pool_.context().threads().parallel_for(g.layers, 1, [&](int64_t i, int worker) {
        const auto layer = uint32_t(i);
        const int d = int(g.shape(layer).head_dim);
        cpu::HeadStage1& values = append_scratch(worker).codes;
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            const auto piece_of = [&](PageKind kind) { return g.page_offset(kind, layer) + g.head_offset(kind, layer, head); };
            const ChannelLayout closed = g.channel_layout(at.kind, layer, head);
            codec.decode_channel_piece(at.slot + piece_of(at.kind), closed, tokens, values);
            uint8_t* piece = to.slot() + piece_of(PageKind::kToken);
            codec.store_token_piece(values, d, 0, tokens, piece);
            if (g.keeps_own_scales) {
                float* own = own_scales(to, layer, head);
                reopen_own_scales(values.k, values.k_scale, d, tokens, own);
                reopen_own_scales(values.v, values.v_scale, d, tokens, own + kPageTokens);
            }
            if (!pool_.numerics().encode.k_turning) continue;
            const TurningPairs turning = turning_of_channel(at.slot + piece_of(at.kind), closed);
            store_turning_of_missing(turning, tokens, TokenLayout(d), piece);
        }
    });
    return {};
}

// ------------------------------------------------------------------------------------------------------------------ attend

uint8_t* CpuStep::token_page(const StepBlock& t, uint32_t layer) {
    const Geometry& g = pool_.geometry();
    if (t.workspace_page < 0) return t.token->slot() + g.page_offset(PageKind::kToken, layer);
    if (step_->layers_in_order) return workspace_.data() + size_t(t.workspace_page) * g.largest_token_page_bytes;
    return workspace_.data() + size_t(t.workspace_page) * g.token_payload_bytes + g.page_offset(PageKind::kToken, layer);
}

// Lists where attention reads each block of the batch in this layer: new tokens at stage 1, older ones as stored.
void CpuStep::list_pages(uint32_t layer, bool observed) {
    const Geometry& g = pool_.geometry();
    pages_.clear();
    first_page_.clear();
    attend_sequences_.clear();
    size_t total = 0;
    for (const StepMember& m : step_->members) total += size_t(Step::untouched_blocks(m)) + m.touched.size();
    pages_.reserve(total);
    const StoredPage* slot = slots_.data();
    for (const StepMember& m : step_->members) {
        first_page_.push_back(pages_.data() + pages_.size());
        const Partition* partition = m.sequence->partition.get();
        const auto is_here = [partition](int64_t b) { return !partition || partition->owns(b); };
        for (int64_t b = 0; b < Step::untouched_blocks(m); ++b, ++slot) {
            const bool there = slot->page && is_here(b) && g.has_page(slot->kind, layer);
            pages_.push_back({there ? slot->page + g.page_offset(slot->kind, layer) : nullptr, page_format(slot->kind)});
        }
        for (const StepBlock& t : m.touched) {
            const Block* const closed = pool_.numerics().batch_invariant ? t.closed_by_append(true) : nullptr;
            const PageKind kind = closed ? closed->kind() : PageKind::kToken;
            uint8_t* const page = closed ? closed->slot() + g.page_offset(kind, layer) : token_page(t, layer);
            pages_.push_back({is_here(t.index) ? page : nullptr, page_format(kind)});
        }
    }
    for (const StepQueries& q : step_->queries) {
        const StepMember& m = step_->members[q.member];
        const StoredPage* const pages = first_page_[q.member] + q.first_block;
        float* const mass = observed ? masses_.data() + (pages - pages_.data()) : nullptr;
        if (pool_.numerics().batch_invariant) {
            list_blocks(q, layer, pages, mass);
            continue;
        }
        AttendSequence& s = attend_sequences_.emplace_back(AttendSequence{pages, q.n_keys, q.n_query, q.row});
        if (m.is_tree && q.row == m.query_row) s.tree = step_->tree.data() + m.new_row;
        s.mass = mass;
        s.n_observed = std::min(q.n_query, kObservedTokens);
    }
}

// For batch_invariant: lists the queries of each block separately. They see earlier blocks as later steps will, and their own
// block at stage 1, as a decode does.
void CpuStep::list_blocks(const StepQueries& q, uint32_t layer, const StoredPage* pages, float* mass) {
    const StepMember& m = step_->members[q.member];
    const int64_t n_keys = q.n_keys, first_query = n_keys - q.n_query, untouched = Step::untouched_blocks(m);
    const int64_t first_observed = n_keys - std::min(q.n_query, kObservedTokens);
    if (first_query < 0) attend_sequences_.push_back({pages, 0, std::min(-first_query, q.n_query), q.row});
    for (int64_t begin = std::max<int64_t>(first_query, 0), end = 0; begin < n_keys; begin = end) {
        const int64_t block = begin / kPageTokens;
        end = std::min((block + 1) * kPageTokens, n_keys);
        AttendSequence s{pages, end, end - begin, q.row + begin - first_query};
        s.mass = mass;
        s.n_observed = std::max<int64_t>(0, end - std::max(begin, first_observed));
        s.own = block < untouched ? pages[block]
                                  : StoredPage{token_page(m.touched[size_t(block - untouched)], layer), PageKind::kToken};
        attend_sequences_.push_back(s);
    }
}

Status CpuStep::attend(uint32_t layer, AttendCall& call) {
    if (!call.saturate) {
        if (Status s = check_finite(codec(), call.q, "q"); !s.ok()) return std::move(s).argument(2);
    }
    const bool observed = step_->is_ordinary() && pool_.residency().observes(layer, step_->turn);
    list_pages(layer, observed);
    call.sequences = attend_sequences_;
    uint64_t saturated = 0;
    TA_RETURN_IF_ERROR(executor_.run(call, &saturated));
    if (observed) heads_observed_ += call.kv_heads * call.group;
    if (saturated) pool_.counters().saturated_values += saturated;
    return {};
}

Status CpuStep::seal() {
    const Geometry& g = pool_.geometry();
    std::vector<const StepBlock*> blocks;
    for (const StepMember& m : step_->members) {
        for (const StepBlock& t : m.touched) blocks.push_back(&t);
    }
    pool_.context().threads().parallel_for(int64_t(blocks.size()), 1, [&](int64_t i, int) {
        const StepBlock& t = *blocks[size_t(i)];
        (t.channel ? t.channel : t.token)->seal(g, pool_.fingerprint(), uint64_t(t.index), uint32_t(t.end));
    });
    for (StepMember& m : step_->members) {
        for (const PassingBlock& p : m.passing) {
            const Block& whole = m.block(p.index);
            copy_lasting_pages(g, whole.kind(), whole.slot(), p.to->slot());
            p.to->mark_sealed();
        }
    }
    anew_.clear();
    pool_.counters().saturated_values += saturated_.load();
    pool_.counters().clamped_values += clamped_.load();
    add_masses();
    return {};
}

// Adds to each block its mean weight in a row of this step. A block that replaces another takes over its attention.
void CpuStep::add_masses() {
    if (masses_.empty()) return;
    Decay decay = pool_.residency().decay();
    const float* mass = masses_.data();
    for (const StepMember& m : step_->members) {
        const int64_t observed = std::min(m.n_query, kObservedTokens) * heads_observed_;
        const float each = observed > 0 ? 1.0f / float(observed) : 0.0f;
        for (int64_t b = 0; b < Step::untouched_blocks(m); ++b, ++mass) {
            if (observed > 0) m.sequence->blocks[size_t(b)]->add_mass(*mass * each, decay.now(), decay);
        }
        for (const StepBlock& t : m.touched) {
            Block& block = t.channel ? *t.channel : *t.token;
            if (t.have > 0 && m.sequence->blocks[size_t(t.index)].get() != &block)
                block.take_mass(*m.sequence->blocks[size_t(t.index)]);
            block.add_mass(*mass++ * each, decay.now(), decay);
        }
        mass += m.rejected.size();
    }
}

}  // namespace

std::unique_ptr<StepBackend> make_cpu_step(Pool& pool) {
    return std::make_unique<CpuStep>(pool);
}

}  // namespace ta
