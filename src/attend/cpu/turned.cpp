#include "src/attend/cpu/turned.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <numbers>

#include "kernels/format/codec.h"
#include "src/attend/queries.h"

namespace ta {
namespace {

// The rotation of a head's pairs by so many positions.
struct Turn {
    std::array<float, kMaxHeadDim / 2> cos, sin;
    Turn(const Rotary& rotary, uint32_t layer, int64_t positions) {
        for (uint32_t i = 0; i < rotary.channels / 2; ++i) {
            const double turns = rotary.of_layer(layer)[i] * double(positions);
            const double angle = 2.0 * std::numbers::pi * (turns - std::rint(turns));
            cos[i] = float(std::cos(angle));
            sin[i] = float(std::sin(angle));
        }
    }
};

// Clamps: a pair of the largest magnitudes can turn into a larger value.
float within_range(float x) {
    return std::clamp(x, -kMaxMagnitude, kMaxMagnitude);
}

void turn_row(const Rotary& rotary, const Turn& by, const float* from, int64_t channels, float* to) {
    std::copy_n(from, channels, to);
    for (int i = 0; i < int(rotary.channels / 2); ++i) {
        const auto [x, y] = rotary_pair(rotary.pairs, i, int(rotary.channels));
        to[x] = within_range(from[x] * by.cos[size_t(i)] - from[y] * by.sin[size_t(i)]);
        to[y] = within_range(from[x] * by.sin[size_t(i)] + from[y] * by.cos[size_t(i)]);
    }
}

Status no_memory(size_t bytes) {
    return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the queries of sequences that were shifted", bytes)
        .bytes(bytes);
}

}  // namespace

void CpuTurned::begin(const Step& step) {
    joined_.clear();
    if (!step.turned.empty()) joined_ = list_joined(step);
}

Result<TensorView> CpuTurned::turn(const Step& step, uint32_t layer, const TensorView& q) {
    const Rotary& rotary = pool_.numerics().rotary;
    const bool saturate = pool_.numerics().saturate;
    if (!saturate) {
        if (Status s = check_finite(codec(), q, "q"); !s.ok()) return std::move(s).argument(2);
    }
    const int64_t d = q.head_dim;
    if (const size_t bytes = float_bytes(step, q); !q_.reserve(bytes)) return no_memory(bytes);
    const TensorView all = float_rows(step, q, q_.data());
    const auto row_at = [&](int64_t token, int64_t head) { return reinterpret_cast<float*>(all.at(token, head)); };
    auto& threads = pool_.context().threads();
    std::atomic<uint64_t> replaced{0};
    threads.parallel_for(q.tokens, 1, [&](int64_t token, int) {
        int64_t n = 0;
        for (int64_t head = 0; head < q.heads; ++head)
            n += codec().to_float(q.at(token, head), q.dtype, int(d), saturate, row_at(token, head));
        if (n > 0) replaced.fetch_add(uint64_t(n), std::memory_order_relaxed);
    });
    if (replaced > 0) pool_.counters().saturated_values += replaced.load();
    threads.parallel_for(int64_t(step.turned.size()), 1, [&](int64_t n, int) {
        const TurnedQueries& t = step.turned[size_t(n)];
        const Turn by(rotary, layer, -t.back);
        for (int64_t i = 0; i < t.n_query; ++i) {
            for (int64_t head = 0; head < q.heads; ++head)
                turn_row(rotary, by, row_at(t.from_row + i, head), d, row_at(t.row + i, head));
        }
    });
    return all;
}

Status CpuTurned::hold(const Step& step, const AttendCall& call, TensorView& out, float*& lse) {
    const size_t o_bytes = float_bytes(step, call.out), lse_bytes = size_t(step.all_rows() * call.out.heads) * sizeof(float);
    if (!o_.reserve(o_bytes) || !lse_.reserve(lse_bytes)) return no_memory(o_bytes + lse_bytes);
    out = float_rows(step, call.out, o_.data());
    lse = reinterpret_cast<float*>(lse_.data());
    return {};
}

void CpuTurned::join(const TensorView& out, const float* lse, const AttendCall& call) const {
    const int64_t heads = out.heads, d = out.head_dim;
    const float* const sinks = call.settings.sinks;
    pool_.context().threads().parallel_for(int64_t(joined_.size()), 1, [&](int64_t token, int) {
        const JoinedRow& joined = joined_[size_t(token)];
        const auto part = [&](int n) { return n == 0 ? token : joined.first + int64_t(n - 1) * joined.stride; };
        for (int64_t head = 0; head < heads; ++head) {
            double top = sinks ? double(sinks[head]) : -INFINITY;
            for (int n = 0; n <= joined.count; ++n) top = std::max(top, double(lse[part(n) * heads + head]));
            std::array<double, kMaxHeadDim> sum{};
            double denominator = sinks ? std::exp(double(sinks[head]) - top) : 0.0;
            for (int n = 0; n <= joined.count && top > -INFINITY; ++n) {
                const double weight = std::exp(double(lse[part(n) * heads + head]) - top);
                const auto* const o = reinterpret_cast<const float*>(out.at(part(n), head));
                denominator += weight;
                for (int64_t c = 0; c < d; ++c) sum[size_t(c)] += weight * double(o[c]);
            }
            std::array<float, kMaxHeadDim> row{};
            for (int64_t c = 0; c < d && denominator > 0.0; ++c) row[size_t(c)] = float(sum[size_t(c)] / denominator);
            codec().from_float(row.data(), int(d), call.out.dtype, call.out.at(token, head));
            if (call.lse) call.lse[token * heads + head] = float(top + std::log(denominator));
        }
    });
}

void CpuTurned::trim() {
    q_.trim();
    o_.trim();
    lse_.trim();
}

}  // namespace ta
