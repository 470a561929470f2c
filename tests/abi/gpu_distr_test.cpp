// TA_DENSE_DISTR on a GPU against float64 attention of queries whose channels are those that stand for their groups, within a bound
// that follows from the roundings of docs/numerics.md, section 8. gpu_dense_test has what it shares with the other variants.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/data.h"
#include "support/distr.h"
#include "support/gpu.h"

namespace ta::testing {
namespace {

constexpr double kHalf = 0x1p-11;    // relative rounding of F16
constexpr double kFloor = 0x1p-37;   // what is below F16's normal numbers, of the largest of a tile or row
constexpr double kLeast = 0x1p-74;   // the same where everything is tiny
constexpr double kFloat = 0x1p-24;   // relative rounding of fp32
constexpr double kSmallP = 0x1p-33;  // what P of a key is rounded by, of the largest V, where its weight is small

struct Problem {
    std::vector<AttentionData> items;
    AttentionRules rules;
    int group_size = 2;
    ta_dtype dtype = TA_DTYPE_F32, v_dtype = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
};

double largest_of(const std::vector<float>& x) {
    double most = 0.0;
    for (const float v : x) most = std::max(most, std::fabs(double(v)));
    return most;
}

// How far scores of a query row may be off, natural units: of q [d] as its groups have it.
double score_error(const Problem& p, const AttentionData& x, const float* q, int64_t q_head, int64_t row) {
    const AttentionShape& s = x.shape;
    const double scale = p.rules.scale > 0.0 ? p.rules.scale : 1.0 / std::sqrt(double(s.head_dim));
    const double most_k = largest_of(x.k), levels = p.group_size == 2 ? 1.0 : 2.0;
    double most_q = 0.0, worst = 0.0;
    for (int64_t c = 0; c < s.head_dim; ++c) most_q = std::max(most_q, std::fabs(double(q[c])));
    for (int64_t j = 0; j < s.n_keys; ++j) {
        const float* k = x.k.data() + (j * s.kv_heads + q_head / s.group()) * s.head_dim;
        double sum = 0.0, floors = 0.0;
        for (int64_t c = 0; c < s.head_dim; ++c) {
            const double of_q = std::fabs(double(q[c])), of_k = std::fabs(double(k[c]));
            sum += of_q * of_k;
            floors += of_q * (most_k * kFloor + kLeast) + of_k * (most_q * kFloor + kLeast);
        }
        double error = scale * (sum * (1.02 * (2.0 + levels) * kHalf + double(s.head_dim + 8) * kFloat) + floors);
        if (p.rules.alibi_slopes) {
            const double distance = double(std::max(s.n_keys, s.n_query) + row);
            error += 4 * kFloat * std::fabs(double(p.rules.alibi_slopes[q_head])) * distance;
        }
        worst = std::max(worst, error);
    }
    return worst + 4 * kFloat * p.rules.softcap;
}

class GpuDistr : public GpuTest {
  protected:
    void check(Problem p) {
        std::vector<int64_t> q_offsets = {0}, k_offsets = {0};
        std::vector<float> q_values, k_values, v_values;
        for (AttentionData& x : p.items) {
            const auto append = [](std::vector<float>& from, ta_dtype dtype, std::vector<float>& to) {
                for (float& value : from) value = round_to(value, dtype);
                to.insert(to.end(), from.begin(), from.end());
            };
            append(x.q, p.dtype, q_values), append(x.k, p.dtype, k_values), append(x.v, p.v_dtype, v_values);
            q_offsets.push_back(q_offsets.back() + x.shape.n_query);
            k_offsets.push_back(k_offsets.back() + x.shape.n_keys);
        }
        const AttentionShape& s = p.items.front().shape;
        const int64_t n_query = q_offsets.back(), n_keys = k_offsets.back(), d = s.head_dim;
        Tensor q(q_values, n_query, s.q_heads, d, p.dtype, p.layout), k(k_values, n_keys, s.kv_heads, d, p.dtype, p.layout),
            v(v_values, n_keys, s.kv_heads, d, p.v_dtype, p.layout), out(n_query, s.q_heads, d, TA_DTYPE_F32, p.layout);
        const DeviceCopy gq(q), gk(k), gv(v), gout(out);
        std::vector<float> lse(size_t(n_query * s.q_heads) + 1, -777.0f);
        const size_t array = size_t(s.q_heads) * sizeof(float);
        const DeviceMemory glse = to_device(lse.data(), lse.size() * sizeof(float)),
                           slopes = p.rules.alibi_slopes ? to_device(p.rules.alibi_slopes, array) : nullptr,
                           sinks = p.rules.sinks ? to_device(p.rules.sinks, array) : nullptr;
        auto attend = sized<ta_attend_options>();
        attend.mask = p.rules.causal ? TA_MASK_CAUSAL : TA_MASK_FULL;
        attend.scale = float(p.rules.scale);
        attend.softcap = float(p.rules.softcap);
        attend.window = p.rules.window;
        attend.alibi_slopes = static_cast<const float*>(slopes.get());
        attend.sinks = static_cast<const float*>(sinks.get());
        auto options = sized<ta_dense_options>();
        options.variant = TA_DENSE_DISTR;
        options.group_size = uint32_t(p.group_size);
        options.attend = &attend;
        options.batch = uint32_t(p.items.size());
        options.q_offsets = q_offsets.data();
        options.k_offsets = k_offsets.data();
        options.stream = stream;
        ta_error err;
        ASSERT_EQ(ta_attend_dense(gpu.get(), gq.view(), gk.view(), gv.view(), gout.view(), static_cast<float*>(glse.get()),
                                  &options, &err),
                  TA_OK)
            << err.message;
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        gout.fetch();
        ASSERT_EQ(cudaMemcpy(lse.data(), glse.get(), lse.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
        EXPECT_TRUE(out.gaps_poison());
        EXPECT_EQ(lse.back(), -777.0f);
        const std::vector<float> got = out.values();
        for (size_t b = 0; b < p.items.size(); ++b) {
            const AttentionData& x = p.items[b];
            judge(p, x, got.data() + q_offsets[b] * s.q_heads * d, lse.data() + q_offsets[b] * s.q_heads);
            if (HasFatalFailure()) return;
        }
    }

  private:
    void judge(const Problem& p, const AttentionData& x, const float* out, const float* lse) {
        const AttentionShape& s = x.shape;
        const int64_t d = s.head_dim;
        const std::vector<float> q = distr_queries(s, x.q.data(), p.group_size);
        std::vector<float> magnitudes(x.v.size());
        for (size_t i = 0; i < x.v.size(); ++i) magnitudes[i] = std::fabs(x.v[i]);
        const Attention exact = exact_attention(s, p.rules, q.data(), x.k.data(), x.v.data()),
                        size = exact_attention(s, p.rules, q.data(), x.k.data(), magnitudes.data());
        const double most_v = largest_of(x.v);
        for (int64_t i = 0; i < s.n_query * s.q_heads; ++i) {
            const double of_scores = score_error(p, x, q.data() + i * d, i % s.q_heads, i / s.q_heads);
            const double relative = std::expm1(2 * of_scores) + 1.02 * 2 * kHalf + double(s.n_keys + 64) * kFloat +
                                    4 * kFloat * std::fabs(exact.lse[i]);
            for (int64_t c = i * d; c < (i + 1) * d; ++c) {
                const double bound = std::isinf(exact.lse[size_t(i)])
                                         ? 0.0
                                         : relative * size.out[size_t(c)] + double(s.n_keys + 4) * kSmallP * most_v + kLeast;
                ASSERT_NEAR(out[c], exact.out[size_t(c)], bound)
                    << s.n_query << " x " << s.n_keys << ", d " << d << ", groups of " << p.group_size << ", row "
                    << i / s.q_heads << ", head " << i % s.q_heads << ", channel " << c % d;
            }
            if (std::isinf(exact.lse[size_t(i)])) {
                ASSERT_EQ(lse[i], -std::numeric_limits<float>::infinity());
            } else {
                ASSERT_NEAR(lse[i], exact.lse[size_t(i)],
                            of_scores + 1e-6 + 8 * kFloat * std::fabs(exact.lse[size_t(i)]) + double(s.n_keys) * kFloat)
                    << "row " << i / s.q_heads << ", head " << i % s.q_heads;
            }
        }
    }
};

using Lengths = std::vector<std::pair<int64_t, int64_t>>;

Problem batch_of(const Lengths& lengths, int64_t q_heads, int64_t kv_heads, int64_t d, DataKind kind, uint64_t seed) {
    Problem p;
    for (const auto& [n_query, n_keys] : lengths)
        p.items.push_back(make_data(kind, {n_query, n_keys, q_heads, kv_heads, d}, seed++));
    return p;
}

TEST_F(GpuDistr, RaggedBatchesOfEveryGroupSize) {
    for (const int group_size : {2, 3, 4}) {
        for (const int64_t d : {32, 64, 128}) {
            for (const bool causal : {true, false}) {
                Problem p = batch_of({{1, 1},
                                      {0, 70},
                                      {127, 127},
                                      {128, 128},
                                      {129, 300},
                                      {63, 64},
                                      {7, 0},
                                      {0, 0},
                                      {70, 65},
                                      {300, 129},
                                      {2, 513}},
                                     2, 1, d, DataKind::kNormal, uint64_t(group_size * 1000 + d));
                p.group_size = group_size;
                p.rules.causal = causal;
                check(p);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(GpuDistr, DataOfEveryKind) {
    for (int kind = 0; kind <= int(DataKind::kHuge); ++kind) {
        for (const int64_t d : {64, 128}) {
            for (const bool causal : {true, false}) {
                SCOPED_TRACE(std::string(name_of(DataKind(kind))) + ", d " + std::to_string(d));
                Problem p = batch_of({{200, 200}, {3, 260}}, 2, 1, d, DataKind(kind), uint64_t(kind));
                p.group_size = 2 + kind % 3;
                p.rules.causal = causal;
                check(p);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(GpuDistr, HeadsTypesAndStrides) {
    uint64_t seed = 50;
    for (const int64_t group : {1, 4, 5, 8}) {
        for (const ta_dtype dtype : kDtypes) {
            Problem p = batch_of({{130, 200}, {1, 65}}, 2 * group, 2, 64, DataKind::kNormal, seed);
            p.dtype = dtype;
            p.v_dtype = group % 4 == 0 ? dtype : kDtypes[seed % 3];
            p.layout = kLayouts[seed++ % 4];
            check(p);
            if (HasFatalFailure()) return;
        }
    }
}

TEST_F(GpuDistr, MasksWindowsAndBiases) {
    const float slopes[] = {0.5f, 0.0f, -0.03f, 0.01f}, sinks[] = {1.0f, -3.0f, 8.0f, 0.0f};
    Random random(6);
    for (int i = 0; i < 60; ++i) {
        SCOPED_TRACE(i);
        Lengths lengths;
        for (int64_t n = random.between(1, 3); n > 0; --n) lengths.push_back({random.between(0, 300), random.between(0, 400)});
        Problem p = batch_of(lengths, 4, 2, random.pick<int64_t>({32, 64, 128}), DataKind::kNormal, 200 + uint64_t(i));
        p.rules.causal = random.chance(50);
        p.rules.window = random.pick<int64_t>({0, 1, 2, 63, 64, 65, 1000, INT64_MAX});
        p.rules.softcap = random.pick<double>({0.0, 0.0, 2.0, 30.0});
        p.rules.scale = random.pick<double>({0.0, 0.25});
        p.group_size = random.pick<int>({2, 3, 4});
        if (random.chance(40)) p.rules.alibi_slopes = slopes;
        if (random.chance(40)) p.rules.sinks = sinks;
        check(p);
        if (HasFatalFailure()) return;
    }
}

}  // namespace
}  // namespace ta::testing
