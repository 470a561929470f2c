#include "tests/kernels/cuda/pages.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/cpu/kernels.h"
#include "kernels/format/query_rest.h"
#include "src/attend/cpu/stage1.h"

namespace ta::cuda::testing {
namespace {

const cpu::PageCodec& codec() {
    return *cpu::find_kernels(TA_CPU_ISA_AUTO)->codec;
}

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

}  // namespace

PagePool::PagePool(PoolShape shape) : shape_(std::move(shape)) {
    for (int h = 0; h < shape_.kv_heads; ++h) {
        const uint8_t kb = shape_.k_bits[size_t(h)], vb = shape_.v_bits[size_t(h)];
        heads_.push_back({uint32_t(channel_page_), kb, vb, 0});
        channel_page_ += ChannelLayout(shape_.head_dim, kb, vb).bytes();
    }
}

int PagePool::largest_channel_piece() const {
    size_t most = 0;
    for (const HeadArgs& h : heads_) most = std::max(most, ChannelLayout(shape_.head_dim, h.k_bits, h.v_bits).bytes());
    return int(most);
}

size_t PagePool::slot_bytes(PageKind kind) const {
    const size_t page = kind == PageKind::kChannel
                            ? channel_page_ + channel_layer_offset()
                            : TokenLayout(shape_.head_dim).bytes() * size_t(shape_.kv_heads) + token_layer_offset();
    return round_up(page, 4096);
}

const uint8_t* PagePool::piece(uint64_t entry, int head) const {
    const bool channel = entry & kEntryChannel;
    const uint64_t layer = entry & kEntrySingleLayer ? 0 : channel ? channel_layer_offset() : token_layer_offset();
    const size_t in_page = channel ? heads_[size_t(head)].channel_offset : TokenLayout(shape_.head_dim).bytes() * size_t(head);
    return bytes_.data() + (entry & ~kEntryFlags) + layer + in_page;
}

uint64_t PagePool::add(PageKind kind, const float* k, const float* v, int tokens, bool single_layer) {
    const int d = shape_.head_dim;
    const bool channel = kind == PageKind::kChannel;
    const uint64_t entry = bytes_.size() | (channel ? kEntryChannel : 0) | (single_layer ? kEntrySingleLayer : 0);
    bytes_.resize(bytes_.size() + slot_bytes(kind), 0xFF);
    const auto in = std::make_unique<cpu::HeadStage1>();
    std::vector<float> x(size_t(kPageTokens) * size_t(d)), amax(kPageTokens);
    for (int h = 0; h < shape_.kv_heads; ++h) {
        for (const bool is_k : {true, false}) {
            for (int t = 0; t < tokens; ++t) {
                const float* from = (is_k ? k : v) + (size_t(t) * size_t(shape_.kv_heads) + size_t(h)) * size_t(d);
                std::memcpy(x.data() + size_t(t) * size_t(d), from, size_t(d) * sizeof(float));
                amax[size_t(t)] = codec().amax(from, d);
            }
            const ScaleRule rule = !channel ? ScaleRule::kToken : is_k ? ScaleRule::kPage : ScaleRule::kPageExp;
            quantize_tokens(codec(), {x.data(), amax.data(), d, 0, tokens}, {rule}, is_k ? in->k : in->v,
                            is_k ? in->k_scale : in->v_scale);
        }
        auto* to = const_cast<uint8_t*>(piece(entry, h));
        if (channel) {
            const HeadArgs& head = heads_[size_t(h)];
            codec().encode_channel_piece(*in, ChannelLayout(d, head.k_bits, head.v_bits), {true, true, false}, to);
        } else {
            codec().store_token_piece(*in, d, 0, tokens, to);
        }
    }
    return entry;
}

QueryCodes quantize_query(const float* q, int d, const float* signs, const float* k_offset, float unit, int levels, bool rest) {
    alignas(64) float x[kMaxHeadDim];
    std::memcpy(x, q, size_t(d) * sizeof(float));
    QueryCodes out{std::vector<int8_t>(size_t(d)), std::vector<int8_t>(size_t(d)), 0.0f, 0.0f};
    if (k_offset) {
        double dot = 0.0;
        for (int c = 0; c < d; ++c) dot += double(x[c]) * double(k_offset[c]);
        out.bias = float(dot * double(unit));
    }
    if (signs) codec().rotate(x, d, signs);
    const float s1 = stage1_scale(codec().amax(x, d), levels);
    alignas(64) int8_t code[kMaxHeadDim];
    codec().quantize(x, d, s1, levels, code);
    std::memcpy(out.code.data(), code, size_t(d));
    if (rest) codec().quantize_rest(x, d, s1, levels, code, out.rest.data());
    out.scale = s1 * unit;
    return out;
}

double exact_row(const QueryCodes& q, const std::vector<const PageNumbers*>& pages, int d, const RowRules& rules, double* out,
                 double* shares) {
    constexpr double kLog2e = 1.4426950408889634;
    std::vector<double> x(pages.size() * kPageTokens);
    double top = -std::numeric_limits<double>::infinity();
    for (size_t j = 0; j < x.size(); ++j) {
        if (int64_t(j) < rules.keys.begin || int64_t(j) >= rules.keys.end || !pages[j / kPageTokens]) {
            x[j] = -std::numeric_limits<double>::infinity();
            continue;
        }
        const PageNumbers& page = *pages[j / kPageTokens];
        const int32_t* k = page.k.data() + j % kPageTokens * size_t(d);
        int64_t s = 0;  // in 128ths
        for (int c = 0; c < d; ++c)
            s += int64_t(kRestUnits * q.code[size_t(c)] + (page.k_bytes ? q.rest[size_t(c)] : 0)) * k[c];
        x[j] = double(s) / kRestUnits * double(q.scale) * page.k_scale[j % kPageTokens] + double(q.bias);
        if (rules.softcap > 0.0) x[j] = rules.softcap * kLog2e * std::tanh(x[j] / rules.softcap);
        x[j] += rules.slope * kLog2e * double(int64_t(j) - rules.position);
        top = std::max(top, x[j]);
    }
    const double sink = rules.sink ? double(*rules.sink) * kLog2e : -std::numeric_limits<double>::infinity();
    top = std::max(top, sink);
    std::fill_n(out, d, 0.0);
    if (top == -std::numeric_limits<double>::infinity()) return top;
    double sum = rules.sink ? std::exp2(sink - top) : 0.0;
    for (size_t j = 0; j < x.size(); ++j) {
        const double p = std::exp2(x[j] - top);
        if (p == 0.0) continue;
        sum += p;
        const PageNumbers& page = *pages[j / kPageTokens];
        const int32_t* v = page.v.data() + j % kPageTokens * size_t(d);
        const double w = p * page.v_scale[j % kPageTokens];
        for (int c = 0; c < d; ++c) out[c] += w * v[c];
    }
    for (int c = 0; c < d; ++c) out[c] /= sum;
    if (shares) {
        for (size_t j = 0; j < x.size(); ++j) shares[j / kPageTokens] += std::exp2(x[j] - top) / sum;
    }
    return (top + std::log2(sum)) / kLog2e;
}

void RangeSum::begin() {
    std::fill(o_.begin(), o_.end(), 0.0f);
    m = m_before_ = -std::numeric_limits<float>::infinity();
    l = l_before_ = 0.0f;
}
void RangeSum::end_page(int page) {
    if (std::isinf(m)) return;
    parts_.push_back({page, double(l) - double(l_before_) * std::exp2(double(m_before_) - double(m)), double(m)});
    m_before_ = m, l_before_ = l;
}
void RangeSum::end() {
    if (std::isinf(m)) return;
    const double top = std::max(m_, double(m)), before = std::exp2(m_ - top), factor = std::exp2(double(m) - top);
    for (size_t c = 0; c < o_.size(); ++c) sum_[c] = sum_[c] * before + double(o_[c]) * factor;
    l_ = l_ * before + double(l) * factor;
    m_ = top;
}
double RangeSum::finish(double* out, const float* sink, double* shares) const {
    if (l_ == 0.0) {
        std::fill_n(out, sum_.size(), 0.0);
        return sink ? double(*sink) : -std::numeric_limits<double>::infinity();
    }
    const double l = l_ + (sink ? std::exp2(*sink / std::log(2.0) - m_) : 0.0);
    for (size_t c = 0; c < o_.size(); ++c) out[c] = sum_[c] / l;
    for (const Part& part : parts_) {
        if (shares) shares[part.page] += part.l * std::exp2(part.m - m_) / l;
    }
    return (m_ + std::log2(l)) * std::log(2.0);
}

}  // namespace ta::cuda::testing
