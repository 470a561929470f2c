// Appends of a step, and the copies that other tokens or channels need before them.
#include <algorithm>
#include <utility>

#include "kernels/cuda/any/channels/channels.h"
#include "src/attend/cuda/step.h"

namespace ta {

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

// Names of tensors for error texts, by Wide.
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
    // In a step with drafts the end counts, for the kept tokens only.
    a.nonfinite = step_->drafts ? nullptr : pool_.sequences().records().nonfinite();
    const bool pages_turn = capture.captured() || tables_.pages_begin();
    TA_RETURN_IF_ERROR(
        device_.check(cudaError_t(cuda::launch_append(append_plan(layer), a, pages_turn, stream_)), "an append"));
    tables_are_last_ = false;
    see_call();
    return {};
}

// An append's arguments for a layer, without K and V.
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
        a.largest_scales = pool_.sequences().records().largest_scales() + g.index(layer, 0) * 2;
        a.token_own_scales = g.own_scales_offset(layer, 0);
    }
    return a;
}

// An append's arguments, without tasks and what these read.
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
        a.scales_stride = int64_t(AppendRecords::scales_of(pool_.geometry()));
        static_assert(sizeof(cuda::AppendProgress) == AppendRecords::kProgressBytes);
        a.progress = reinterpret_cast<cuda::AppendProgress*>(pool_.sequences().records().progress());
    }
    a.clamped = pool_.sequences().records().clamped();
    return a;
}

// Appends the kept tokens again to blocks whose scales or pairs the rejected tokens have changed. One launch has all adjacent
// layers of one shape. With universal scales each layer needs a launch, since all layers count their tasks in one place
// (AppendProgress). After a failure the next call continues at the failed layer: a layer redone twice would have other bytes.
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
    if (redone_to_ == 0) TA_RETURN_IF_ERROR(keep_anew(*step_));
    for (uint32_t end = 0; redone_to_ < g.layers && redone.blocks > 0; redone_to_ = end) {
        const uint32_t layer = redone_to_;
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

}  // namespace ta
