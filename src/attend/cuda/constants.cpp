#include "src/attend/cuda/constants.h"

#include <cstring>
#include <vector>

#include "src/core/checked.h"

namespace ta {

using cuda::HeadArgs;

Status CudaConstants::upload() {
    if (uploaded_) return {};
    const Geometry& g = pool_.geometry();
    const Numerics& n = pool_.numerics();
    k_offset_at_ = kMaxHeadDim * sizeof(float);
    token_layers_at_ = k_offset_at_ + round_up(n.k_offset.size() * sizeof(float), 16);
    heads_at_ = token_layers_at_ + round_up(g.layers * sizeof(uint64_t), 16);
    layers_at_ = heads_at_ + round_up(g.heads() * sizeof(HeadArgs), 16);
    table_bytes_ = round_up(layers_at_ + g.layers * sizeof(uint64_t), 16) - heads_at_;
    rotary_at_ = heads_at_ + (g.falls ? 2 : 1) * table_bytes_;
    std::vector<uint8_t> bytes(rotary_at_ + n.rotary.turns.size() * sizeof(double));
    std::memcpy(bytes.data(), pool_.rotation_signs(), k_offset_at_);
    if (!n.k_offset.empty()) {
        std::memcpy(bytes.data() + k_offset_at_, n.k_offset.data(), n.k_offset.size() * sizeof(float));
    }
    const auto write_offsets = [&](PageKind kind, uint8_t* to) {
        for (uint32_t layer = 0; layer < g.layers; ++layer) {
            const uint64_t offset = g.page_offset(kind, layer);
            std::memcpy(to + layer * sizeof offset, &offset, sizeof offset);
        }
    };
    write_offsets(PageKind::kToken, bytes.data() + token_layers_at_);
    for (const PageKind kind : {PageKind::kChannel, PageKind::kLow}) {
        if (g.slot_bytes(kind) == 0) continue;
        uint8_t* to = bytes.data() + (kind == PageKind::kLow ? table_bytes_ : 0);
        for (uint32_t layer = 0; layer < g.layers; ++layer) {
            for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
                const ChannelLayout layout = g.channel_layout(kind, layer, head);
                const HeadArgs h{uint32_t(g.head_offset(kind, layer, head)), uint8_t(layout.k_bits), uint8_t(layout.v_bits), 0};
                std::memcpy(to + heads_at_ + g.index(layer, head) * sizeof h, &h, sizeof h);
            }
        }
        write_offsets(kind, to + layers_at_);
    }
    if (n.rotary.given()) std::memcpy(bytes.data() + rotary_at_, n.rotary.turns.data(), bytes.size() - rotary_at_);
    TA_RETURN_IF_ERROR(memory_.reserve(bytes.size(), "a plan's constants"));
    TA_RETURN_IF_ERROR(device_.write(memory_.data(), bytes.data(), bytes.size()));
    uploaded_ = true;
    return {};
}

}  // namespace ta
