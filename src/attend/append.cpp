// ta_append: stage 1 of the new tokens, and the closing of pages that they fill.
#include <algorithm>
#include <cstring>

#include "src/attend/plan.h"
#include "src/attend/stage1.h"

namespace ta {
namespace {

constexpr int64_t kAloneElements = 1 << 14;

}  // namespace

// One worker's buffers for one page of one head.
struct Plan::AppendScratch {
    cpu::HeadStage1 codes;
    alignas(64) float k[kPageTokens * kMaxHeadDim];
    alignas(64) float v[kPageTokens * kMaxHeadDim];
    float k_amax[kPageTokens], v_amax[kPageTokens];
};

// One task per (sequence, kv head, block), except where the scale of a block depends on the blocks before it.
void Plan::make_append_tasks() {
    append_tasks_.clear();
    const bool in_order = pool_->numerics().universal_open_scale;
    for (size_t i = 0; i < members_.size(); ++i) {
        const size_t blocks = members_[i].touched.size();
        const size_t step = in_order ? std::max<size_t>(blocks, 1) : 1;
        for (size_t first = 0; first < blocks; first += step) {
            for (uint32_t head = 0; head < pool_->geometry().kv_heads; ++head) {
                append_tasks_.push_back({i, head, first, std::min(first + step, blocks)});
            }
        }
    }
}

Status Plan::append(uint32_t layer, const TensorView& k, const TensorView& v) {
    TA_RETURN_IF_ERROR(check_layer(layer));
    const Geometry& g = pool_->geometry();
    if (appended_[layer]) return fail(TA_E_STATE, "layer %u was appended already in this step", layer).layer(layer);
    if (Status s = check_tensor_shape(k, "k", total_new_, g.kv_heads, g.head_dim); !s.ok())
        return std::move(s).argument(2).layer(layer);
    if (Status s = check_tensor_shape(v, "v", total_new_, g.kv_heads, g.head_dim); !s.ok())
        return std::move(s).argument(3).layer(layer);
    if (!pool_->numerics().saturate) {
        const cpu::PageCodec& codec = *pool_->context().kernels().codec;
        if (Status s = check_finite(codec, k, "k"); !s.ok()) return std::move(s).argument(2).layer(layer);
        if (Status s = check_finite(codec, v, "v"); !s.ok()) return std::move(s).argument(3).layer(layer);
    }
    ThreadPool& threads = pool_->context().threads();
    if (!append_scratch_.reserve(sizeof(AppendScratch) * size_t(threads.threads()))) {
        return fail(TA_E_MEMORY, "the allocator has no memory for the append workspace").layer(layer);
    }
    // A decode step's few tokens are done before another thread would wake up.
    const int64_t tasks = int64_t(append_tasks_.size());
    const bool alone = total_new_ * g.kv_heads * g.head_dim < kAloneElements;
    threads.parallel_for(tasks, alone ? tasks : 1, [&](int64_t i, int worker) {
        const AppendTask& task = append_tasks_[size_t(i)];
        Member& m = members_[task.member];
        auto& scratch = reinterpret_cast<AppendScratch*>(append_scratch_.data())[worker];
        for (size_t b = task.first; b < task.last; ++b) append_block(m, m.touched[b], layer, task.head, k, v, scratch);
    });
    appended_[layer] = 1;
    last_layer_ = layer;
    return {};
}

// Widens n rows of one head from `row` on, prepared for stage 1, and takes their largest magnitudes.
void Plan::read_rows(const TensorView& x, int64_t row, int n, uint32_t head, const float* offset, bool rotate, float* out,
                     float* amax) {
    const cpu::PageCodec& codec = *pool_->context().kernels().codec;
    const int d = int(x.head_dim);
    int64_t replaced = 0;
    for (int t = 0; t < n; ++t) {
        float* to = out + t * d;
        replaced += codec.to_float(x.at(row + t, head), x.dtype, d, pool_->numerics().saturate, to);
        if (offset) {
            for (int c = 0; c < d; ++c) to[c] -= offset[c];
        }
        if (rotate) codec.rotate(to, d, pool_->rotation_signs());
        amax[t] = codec.amax(to, d);
    }
    if (replaced) saturated_.fetch_add(uint64_t(replaced), std::memory_order_relaxed);
}

namespace {

ScaleRule rule_for(bool whole_page, bool page_scale, bool exponents, bool universal) {
    if (whole_page && page_scale) return exponents ? ScaleRule::kPageExp : ScaleRule::kPage;
    return universal ? ScaleRule::kUniversal : ScaleRule::kToken;
}

// The universal scale of a page: fixed when its first token that is not zero comes, from the largest magnitude of the head so
// far. Tokens of zeros before it keep the scale 0: an aborted step must not leave them another.
float universal_scale(const float* page_scales, int have, float seen, const float* amax, int n) {
    const float fixed = have > 0 ? *std::max_element(page_scales, page_scales + have) : 0.0f;
    if (fixed > 0.0f) return fixed;
    for (int t = 0; t < n; ++t) seen = std::max(seen, amax[t]);
    return stage1_scale(seen, kStage1Levels);
}

}  // namespace

void Plan::append_block(Member& m, Touched& t, uint32_t layer, uint32_t head, const TensorView& k, const TensorView& v,
                        AppendScratch& s) {
    const Geometry& g = pool_->geometry();
    const Numerics& num = pool_->numerics();
    const cpu::PageCodec& codec = *pool_->context().kernels().codec;
    const int d = int(g.head_dim), n = t.end - t.have;
    const int64_t row = m.new_row + t.index * kPageTokens + t.have - m.length;
    const float* offset = num.k_offset.empty() ? nullptr : num.k_offset.data() + g.index(layer, head) * g.head_dim;
    read_rows(k, row, n, head, offset, num.hadamard, s.k, s.k_amax);
    read_rows(v, row, n, head, nullptr, false, s.v, s.v_amax);

    uint8_t* piece = token_page(t, layer) + g.head_offset(PageKind::kToken, layer, head);
    if (t.have > 0 && (t.channel || num.universal_open_scale)) codec.load_token_piece(piece, d, t.have, s.codes);

    float k_universal = 0.0f, v_universal = 0.0f;
    if (num.universal_open_scale) {
        float* seen = m.open_amax.data() + g.index(layer, head) * 2;
        k_universal = universal_scale(s.codes.k_scale, t.have, seen[0], s.k_amax, n);
        v_universal = universal_scale(s.codes.v_scale, t.have, seen[1], s.v_amax, n);
        for (int i = 0; i < n; ++i) {
            seen[0] = std::max(seen[0], s.k_amax[i]);
            seen[1] = std::max(seen[1], s.v_amax[i]);
        }
    }
    const bool whole = n == kPageTokens;
    const ScaleRule k_rule =
        rule_for(whole && (!t.stays_8_bits || num.k_page_scale_at_8_bits), num.k_page_scale, false, num.universal_open_scale);
    const ScaleRule v_rule = rule_for(whole && (!t.stays_8_bits || num.v_page_scale_at_8_bits), num.v_page_scale,
                                      num.v_exponents && !t.stays_8_bits, num.universal_open_scale);
    const int64_t clamped =
        quantize_tokens(codec, s.k, s.k_amax, d, t.have, t.end, k_rule, k_universal, kStage1Levels, s.codes.k,
                        s.codes.k_scale) +
        quantize_tokens(codec, s.v, s.v_amax, d, t.have, t.end, v_rule, v_universal, kStage1Levels, s.codes.v, s.codes.v_scale);
    if (clamped) clamped_.fetch_add(uint64_t(clamped), std::memory_order_relaxed);
    codec.store_token_piece(s.codes, d, t.have, t.end, piece);

    if (!t.channel) return;
    uint8_t* closed =
        t.channel->slot() + g.page_offset(PageKind::kChannel, layer) + g.head_offset(PageKind::kChannel, layer, head);
    const cpu::EncodeOptions options{num.v_exponents, num.fractional_zero, num.v_search};
    codec.encode_channel_piece(s.codes, g.channel_layout(layer, head), options, closed);
}

}  // namespace ta
