#include "src/kv/calibrator.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/format/slot.h"
#include "src/kv/head_choice.h"

namespace ta {

Calibrator::Calibrator(std::shared_ptr<Context> context, Geometry geometry)
    : context_(std::move(context)),
      geometry_(std::move(geometry)),
      k_(geometry_.layers),
      v_(geometry_.layers),
      tokens_(geometry_.layers, 0),
      row_(kMaxHeadDim) {}

void Calibrator::prepare(Ranges& ranges, const TensorView& x) {
    ranges.channels = size_t(x.head_dim);
    const size_t n = size_t(x.heads) * ranges.channels;
    if (ranges.min.empty()) ranges.min.assign(n, std::numeric_limits<float>::infinity());
    if (ranges.max.empty()) ranges.max.assign(n, -std::numeric_limits<float>::infinity());
}

void Calibrator::widen(Ranges& ranges, const TensorView& x) {
    const cpu::PageCodec& codec = *context_->kernels().codec;
    for (int64_t t = 0; t < x.tokens; ++t) {
        for (int64_t h = 0; h < x.heads; ++h) {
            const size_t first = size_t(h) * ranges.channels;
            codec.to_float(x.at(t, h), x.dtype, ranges.channels, false, row_.data());
            for (size_t c = 0; c < ranges.channels; ++c) {
                ranges.min[first + c] = std::min(ranges.min[first + c], row_[c]);
                ranges.max[first + c] = std::max(ranges.max[first + c], row_[c]);
            }
        }
    }
}

namespace {

// Turns `x` into a view of a copy in host memory, which is returned.
Result<std::vector<uint8_t>> copy_to_host(Device& device, TensorView& x) {
    const int64_t element = int64_t(dtype_bytes(x.dtype));
    const bool backwards = x.stride_token < 0, one_token = x.tokens == 1;
    const bool whole_tokens =
        x.heads == 1 ||
        (x.stride_head == x.head_dim && (one_token || std::abs(x.stride_token) >= x.heads * x.head_dim));  // else copies head
                                                                                                           // by head
    const int64_t row = whole_tokens ? x.heads * x.head_dim : x.head_dim, parts = whole_tokens ? 1 : x.heads;
    const int64_t pitch = one_token ? row : std::abs(x.stride_token);
    std::vector<uint8_t> copy(size_t(x.tokens * x.heads * x.head_dim * element));
    if (copy.empty()) return copy;
    for (int64_t part = 0; part < parts; ++part) {
        TA_RETURN_IF_ERROR(device.read_rows(copy.data() + part * x.tokens * row * element,
                                            x.at(backwards ? x.tokens - 1 : 0, part), size_t(pitch * element),
                                            size_t(row * element), size_t(x.tokens)));
    }
    x.data = copy.data() + (backwards ? (x.tokens - 1) * row * element : 0);
    x.stride_token = backwards ? -row : row;
    x.stride_head = whole_tokens ? x.head_dim : x.tokens * row;
    return copy;
}

}  // namespace

Status Calibrator::observe(uint32_t layer, TensorView k, TensorView v) {
    std::vector<uint8_t> k_copy, v_copy;
    if (Device* device = context_->device()) {
        Result<std::vector<uint8_t>> of_k = copy_to_host(*device, k);
        if (!of_k.ok()) return std::move(of_k).status().argument(2).layer(layer);
        Result<std::vector<uint8_t>> of_v = copy_to_host(*device, v);
        if (!of_v.ok()) return std::move(of_v).status().argument(3).layer(layer);
        k_copy.swap(of_k.value());  // the tensors' views still point at the swapped memory
        v_copy.swap(of_v.value());
    }
    const cpu::PageCodec& codec = *context_->kernels().codec;
    if (Status s = check_finite(codec, k, "k"); !s.ok()) return std::move(s).argument(2).layer(layer);
    if (Status s = check_finite(codec, v, "v"); !s.ok()) return std::move(s).argument(3).layer(layer);
    prepare(k_[layer], k);
    prepare(v_[layer], v);
    widen(k_[layer], k);
    widen(v_[layer], v);
    tokens_[layer] += uint64_t(k.tokens);
    return {};
}

void Calibrator::rank(const std::vector<Ranges>& ranges, uint32_t n_low, uint8_t* bits, float* priority) const {
    std::vector<double> score(geometry_.most_kv_heads);
    std::vector<uint32_t> order(geometry_.most_kv_heads);
    for (uint32_t layer = 0; layer < geometry_.layers; ++layer) {
        const uint32_t heads = geometry_.shape(layer).kv_heads;
        const size_t n = ranges[layer].channels;
        for (uint32_t h = 0; h < heads; ++h) {
            const float* min = ranges[layer].min.data() + size_t(h) * n;
            const float* max = ranges[layer].max.data() + size_t(h) * n;
            double mean = 0.0, variance = 0.0;
            for (size_t c = 0; c < n; ++c) mean += (double(max[c]) - double(min[c])) / double(n);
            for (size_t c = 0; c < n; ++c) {
                const double off = double(max[c]) - double(min[c]) - mean;
                variance += off * off / double(n);
            }
            const double range = double(*std::max_element(max, max + n)) - double(*std::min_element(min, min + n));
            score[h] = range * std::sqrt(variance);
        }
        std::iota(order.begin(), order.begin() + heads, 0u);
        std::stable_sort(order.begin(), order.begin() + heads, [&](uint32_t a, uint32_t b) { return score[a] < score[b]; });
        const size_t first = geometry_.index(layer, 0);
        for (uint32_t i = 0; i < heads; ++i) bits[first + order[i]] = i < n_low ? 2 : 4;
        for (uint32_t h = 0; h < heads; ++h) priority[first + h] = float(score[h]);
    }
}

Status Calibrator::finish(uint32_t n_low, uint8_t* k_bits, uint8_t* v_bits, float* k_priority, float* v_priority) const {
    uint32_t fewest = UINT32_MAX;
    for (const LayerShape& s : geometry_.shapes) fewest = std::min(fewest, s.kv_heads);
    if (n_low > fewest) {
        return fail(TA_E_INVALID, "n_low is %u; it takes 0..%u, the kv heads of the layer that has fewest", n_low, fewest)
            .argument(1);
    }
    for (uint32_t layer = 0; layer < geometry_.layers; ++layer) {
        if (tokens_[layer] == 0) return fail(TA_E_STATE, "layer %u was never observed", layer).layer(layer);
    }
    // Takes all memory before it writes the first output.
    const size_t heads = geometry_.heads();
    std::vector<uint8_t> k(heads), v(heads);
    std::vector<float> k_score(heads), v_score(heads);
    rank(k_, n_low, k.data(), k_score.data());
    rank(v_, n_low, v.data(), v_score.data());
    std::copy(k.begin(), k.end(), k_bits);
    std::copy(v.begin(), v.end(), v_bits);
    if (k_priority) std::copy(k_score.begin(), k_score.end(), k_priority);
    if (v_priority) std::copy(v_score.begin(), v_score.end(), v_priority);
    return {};
}

namespace {

// Checks the costs of one head for 8, 4 and 2 bits.
Status check_cost(const float* cost, const char* name, uint32_t layer, uint32_t head) {
    bool some = false;
    for (unsigned i = 0; i < 3; ++i) {
        some |= std::isfinite(cost[i]);
        if (std::isfinite(cost[i]) || cost[i] > 0.0f) continue;
        return fail(TA_E_INVALID, "%s[%u, %u, %u] is %s; costs are finite or +Inf", name, layer, head, i,
                    std::isnan(cost[i]) ? "NaN" : "-Inf");
    }
    if (some) return {};
    return fail(TA_E_INVALID, "%s[%u, %u] is +Inf with 8, 4 and 2 bits", name, layer, head);
}

Status check_costs(const Geometry& g, const float* costs, const char* name, int argument) {
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        for (uint32_t head = 0; head < g.shape(layer).kv_heads; ++head) {
            Status s = check_cost(costs + 3 * g.index(layer, head), name, layer, head);
            if (!s.ok()) return std::move(s).argument(argument).layer(layer).head(head);
        }
    }
    return {};
}

}  // namespace

Status Calibrator::choose(const float* k_cost, const float* v_cost, uint64_t block_bytes, uint8_t* k_bits,
                          uint8_t* v_bits) const {
    TA_RETURN_IF_ERROR(check_costs(geometry_, k_cost, "k_cost", 1));
    TA_RETURN_IF_ERROR(check_costs(geometry_, v_cost, "v_cost", 2));
    const size_t heads = geometry_.heads();
    std::vector<HeadChoice::Sizes> sizes;
    for (const LayerShape& shape : geometry_.shapes) {
        HeadChoice::Sizes units;
        for (size_t i = 0; i < units.size(); ++i) {
            const ChannelLayout layout(int(shape.head_dim), kBitChoices[i / 3], kBitChoices[i % 3]);
            units[i] = uint32_t(layout.bytes() / kPieceAlignment);
        }
        sizes.insert(sizes.end(), shape.kv_heads, units);
    }
    const HeadChoice choice({k_cost, 3 * heads}, {v_cost, 3 * heads}, sizes);
    const auto block = [&](uint64_t all_units) { return slot_bytes(all_units * kPieceAlignment, geometry_.layers); };
    // A pool of 8 bits for all heads uses token blocks, which are a little smaller.
    const std::vector<uint8_t> eights(heads, 0);
    const uint64_t token_block = geometry_.token_slot_bytes;
    const double cost_of_eights = choice.cost(eights);
    const uint64_t least = block(choice.least_units());
    const bool eights_fit = std::isfinite(cost_of_eights) && token_block <= block_bytes;
    if (block_bytes < least && !eights_fit) {
        const uint64_t needed = std::isfinite(cost_of_eights) ? std::min(least, token_block) : least;
        return fail(TA_E_INVALID, "block_bytes is %llu; the smallest block that the costs allow has %llu",
                    (unsigned long long)block_bytes, (unsigned long long)needed)
            .argument(3)
            .bytes(needed - block_bytes);
    }
    std::vector<uint8_t> options = eights;
    if (block_bytes >= least) {
        options = choice.within((block_bytes - block(0)) / kPieceAlignment);
        const double cost = choice.cost(options);
        if (eights_fit && (cost_of_eights < cost || (cost_of_eights == cost && token_block < block(choice.units(options)))))
            options = eights;
    }
    for (size_t i = 0; i < heads; ++i) {
        k_bits[i] = uint8_t(kBitChoices[options[i] / 3]);
        v_bits[i] = uint8_t(kBitChoices[options[i] % 3]);
    }
    return {};
}

}  // namespace ta
