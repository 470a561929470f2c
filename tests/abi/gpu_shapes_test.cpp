// Steps of a plan on a GPU beside a CPU in the types, layouts, options, settings and sizes that other tests do not take:
// everything that a call may be, one at a time and together. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "support/gpu.h"

namespace ta::testing {
namespace {

// Beside 16-bit P rounding differs by little; beside 8-bit P of prefill each of the two has its own errors. There SAS may cut off
// a key that the other keeps, where the score is rounded to a step.
constexpr double kDecodeError = 2e-3, kPrefillError = 1.5e-2, kPaperError = 3e-2, kSasError = 3e-2;
constexpr double kDecodeLse = 1e-3, kPrefillLse = 6e-3;
// A code of a query that lies half way between two may be another than the CPU's. Where a row has few keys, LSE shows it.
// Queries of the decode kernel have 15 bits, in which it does not.
constexpr double kOneCode = 4.0;  // times the tolerance
constexpr size_t kRowsToOneCode = 500;

struct Types {
    ta_dtype k = TA_DTYPE_F16, v = TA_DTYPE_F16, q = TA_DTYPE_F16, out = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
};

struct Rules {
    ta_attend_options attend = sized<ta_attend_options>();
    bool alibi = false, sinks = false;
    int64_t loud = 0;  // of the new tokens, the last so many have V 20 times as large
};

struct Tolerance {
    double o, lse;
};
Tolerance tolerance_of(int rows, bool sas = false) {
    if (rows <= 16) return {kDecodeError, kDecodeLse};
    return sas ? Tolerance{kSasError, 2 * kPrefillLse} : Tolerance{kPrefillError, kPrefillLse};
}

// A pool on each side, of the same options, that live through the same steps.
class Pair {
  public:
    Pair(const Context& gpu, const Context& cpu, const ta_kv_pool_options& options, int group, cudaStream_t stream,
         uint64_t seed)
        : layers_(options.layers),
          heads_(options.kv_heads),
          d_(options.head_dim),
          group_(group),
          gpu_pool_(make_pool(gpu, options)),
          cpu_pool_(make_pool(cpu, options)),
          gpu_plan_(make_plan(gpu_pool_)),
          cpu_plan_(make_plan(cpu_pool_)),
          stream_(stream),
          random_(seed) {
        ta_error err;
        require(ta_plan_set_stream(gpu_plan_.get(), stream, &err), err);
        for (int64_t h = 0; h < heads_ * group_; ++h) {
            slopes_.push_back(0.005f * float(h % 16 + 1));
            sinks_.push_back(0.5f * float(h % 5) - 1.0f);
        }
        gpu_slopes_ = to_device(slopes_.data(), slopes_.size() * sizeof(float));
        gpu_sinks_ = to_device(sinks_.data(), sinks_.size() * sizeof(float));
    }

    size_t add() {
        on_gpu_.push_back(make_sequence(gpu_pool_));
        on_cpu_.push_back(make_sequence(cpu_pool_));
        return on_gpu_.size() - 1;
    }
    std::vector<size_t> add_many(size_t n) {
        std::vector<size_t> all;
        for (size_t i = 0; i < n; ++i) all.push_back(add());
        return all;
    }

    void forget(size_t member, int64_t first, int64_t tokens) {
        ta_error err;
        require(ta_seq_forget(gpu_pool_.get(), on_gpu_[member], first, tokens, nullptr, &err), err);
        require(ta_seq_forget(cpu_pool_.get(), on_cpu_[member], first, tokens, nullptr, &err), err);
    }

    // `spoil`: some of the new values are not finite.
    void step(const std::vector<size_t>& members, const std::vector<int32_t>& n_new, const std::vector<int32_t>& n_query,
              const Tolerance& tolerance, const Rules& rules = {}, const Types& types = {}, bool spoil = false) {
        std::vector<ta_seq> a, b;
        for (const size_t m : members) a.push_back(on_gpu_[m]), b.push_back(on_cpu_[m]);
        const int64_t rows = std::accumulate(n_new.begin(), n_new.end(), int64_t{0}), q_heads = heads_ * group_;
        const int64_t queries = std::accumulate(n_query.begin(), n_query.end(), int64_t{0});
        begin(gpu_plan_, a, n_new, n_query);
        begin(cpu_plan_, b, n_new, n_query);
        for (uint32_t layer = 0; layer < layers_; ++layer) {
            Tensor k(normals(rows * heads_ * d_), rows, heads_, d_, types.k, types.layout),
                v(normals(rows * heads_ * d_), rows, heads_, d_, types.v, types.layout),
                q(normals(queries * q_heads * d_, 1.5f), queries, q_heads, d_, types.q, types.layout),
                cpu_out(queries, q_heads, d_), out(queries, q_heads, d_, types.out, types.layout);
            for (int64_t row = 0; spoil && row < rows; row += 3) {
                k.set(row, row % heads_, row % d_, row % 2 ? NAN : INFINITY);
                v.set(row, row % heads_, (row + 7) % d_, row % 2 ? -INFINITY : NAN);
            }
            for (int64_t row = std::max<int64_t>(0, rows - rules.loud); row < rows; ++row) {
                for (int64_t i = 0; i < heads_ * d_; ++i) v.set(row, i / d_, i % d_, 20.0f * v.get(row, i / d_, i % d_));
            }
            const DeviceCopy gk(k), gv(v), gq(q), gout(out);
            std::vector<float> lse(size_t(queries * q_heads) + 1, -777.0f), got_lse = lse;
            const DeviceMemory glse = to_device(lse.data(), lse.size() * sizeof(float));
            auto options = rules.attend, gpu_options = rules.attend;
            if (rules.alibi) options.alibi_slopes = slopes_.data(), gpu_options.alibi_slopes = on_device(gpu_slopes_);
            if (rules.sinks) options.sinks = sinks_.data(), gpu_options.sinks = on_device(gpu_sinks_);
            ta_error err;
            if (rows > 0) require(ta_append(gpu_plan_.get(), layer, gk.view(), gv.view(), &err), err);
            require(
                ta_attend(gpu_plan_.get(), layer, gq.view(), gout.view(), static_cast<float*>(glse.get()), &gpu_options, &err),
                err);
            if (rows > 0) append(cpu_plan_, layer, k, v);
            attend(cpu_plan_, layer, q, cpu_out, lse.data(), &options);
            ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
            if (queries > 0) gout.fetch();
            EXPECT_TRUE(out.gaps_poison());
            ASSERT_EQ(cudaMemcpy(got_lse.data(), glse.get(), lse.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
            compare(out.values(), cpu_out.values(), tolerance.o + (types.out == TA_DTYPE_BF16 ? 4e-3 : 0.0), layer);
            compare_lse(got_lse, lse, tolerance.lse);
            if (::testing::Test::HasFatalFailure()) return;
        }
        end(gpu_plan_);
        end(cpu_plan_);
    }

    // Compares the stored pages of both: they are the same.
    void compare_pages() const {
        for (size_t s = 0; s < on_gpu_.size(); ++s) {
            const int64_t n = length(cpu_pool_, on_cpu_[s]);
            ASSERT_EQ(length(gpu_pool_, on_gpu_[s]), n);
            ta_error err;
            require(ta_seq_verify(gpu_pool_.get(), on_gpu_[s], &err), err);
            for (uint32_t layer = 0; layer < layers_ && n > 0; ++layer) {
                ASSERT_TRUE(dequantize(gpu_pool_, on_gpu_[s], layer, 0, n, heads_ * d_) ==
                            dequantize(cpu_pool_, on_cpu_[s], layer, 0, n, heads_ * d_))
                    << "sequence " << s << ", layer " << layer;
            }
        }
    }

  private:
    static const float* on_device(const DeviceMemory& m) { return static_cast<const float*>(m.get()); }
    std::vector<float> normals(int64_t n, float scale = 1.0f) { return random_.normals(n, scale); }
    static void compare(const std::vector<float>& got, const std::vector<float>& want, double tolerance, uint32_t layer) {
        double error = 0.0, norm = 0.0;
        for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_TRUE(std::isfinite(got[i]) && got[i] != Tensor::kPoison) << "element " << i << " was not written";
            error += (double(got[i]) - want[i]) * (double(got[i]) - want[i]);
            norm += double(want[i]) * want[i];
        }
        ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 1e-12) << "layer " << layer;
    }
    static void compare_lse(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
        const double most = tolerance < kPrefillLse ? tolerance : kOneCode * tolerance;
        size_t beyond = 0;
        for (size_t i = 0; i < want.size(); ++i) {
            if (std::isinf(want[i])) {
                ASSERT_EQ(got[i], want[i]) << "lse " << i;
            } else {
                ASSERT_NEAR(got[i], want[i], most) << "lse " << i;
                beyond += std::abs(double(got[i]) - want[i]) > tolerance;
            }
        }
        ASSERT_LE(beyond, 1 + want.size() / kRowsToOneCode) << "rows whose lse is off by more than " << tolerance;
    }

    const uint32_t layers_;
    const int64_t heads_, d_;
    const int group_;
    const KvPool gpu_pool_, cpu_pool_;
    const Plan gpu_plan_, cpu_plan_;
    const cudaStream_t stream_;
    Random random_;
    std::vector<float> slopes_, sinks_;
    DeviceMemory gpu_slopes_, gpu_sinks_;
    std::vector<ta_seq> on_gpu_, on_cpu_;
};

class GpuShapes : public GpuTest {
  protected:
    static ta_kv_pool_options pool(uint32_t layers, uint32_t heads, uint32_t d, uint32_t bits,
                                   const ta_numerics* numerics = nullptr) {
        auto options = pool_options(layers, heads, d, bits, numerics);
        options.budget_bytes = uint64_t{256} << 20;
        return options;
    }
};

TEST_F(GpuShapes, TypesAndLayouts) {
    struct Shape {
        uint32_t heads, d, bits;
        int group;
    };
    for (const Shape& s : {Shape{2, 128, 4, 4}, Shape{3, 64, 2, 5}, Shape{2, 96, 4, 3}, Shape{1, 256, 8, 2}}) {
        for (const Layout layout : kLayouts) {
            for (size_t t = 0; t < 4; ++t) {
                SCOPED_TRACE("d " + std::to_string(s.d) + ", layout " + std::to_string(int(layout)) + ", types " +
                             std::to_string(t));
                // All alike, or each another.
                const Types types = t < 3 ? Types{kDtypes[t], kDtypes[t], kDtypes[t], kDtypes[t], layout}
                                          : Types{TA_DTYPE_F32, TA_DTYPE_BF16, TA_DTYPE_F16, TA_DTYPE_BF16, layout};
                Pair pair(gpu, cpu, pool(2, s.heads, s.d, s.bits), s.group, stream, 3 + t);
                const size_t a = pair.add(), b = pair.add();
                pair.step({a, b}, {150, 60}, {150, 60}, tolerance_of(99), {}, types);
                pair.step({b, a}, {3, 1}, {3, 1}, tolerance_of(3), {}, types);
                pair.step({a, b}, {1, 64}, {1, 20}, tolerance_of(99), {}, types);
                pair.compare_pages();
                if (HasFatalFailure()) return;
            }
        }
    }
}

// Each number of rows that the decode kernel takes, and the first that it does not.
TEST_F(GpuShapes, GroupsAndQueryTokens) {
    for (int group = 1; group <= 16; ++group) {
        SCOPED_TRACE("group " + std::to_string(group));
        Pair pair(gpu, cpu, pool(1, 2, group % 2 ? 128 : 64, group % 3 ? 4 : 2), group, stream, uint64_t(group));
        const size_t a = pair.add(), b = pair.add(), c = pair.add();
        pair.step({a, b, c}, {200, 65, 500}, {1, 1, 1}, tolerance_of(1));
        for (int n = 1; n <= 16 / group + 1; ++n) {
            SCOPED_TRACE(std::to_string(n) + " query tokens");
            pair.step({a, b, c}, {n, n, 0}, {n, 1, n}, tolerance_of(n * group));
            if (HasFatalFailure()) return;
        }
        pair.compare_pages();
    }
}

TEST_F(GpuShapes, OptionsTogether) {
    std::vector<float> offsets;
    {
        Random random(77);
        offsets = random.normals(2 * 2 * 128, 0.5f);
    }
    for (const bool with_offset : {false, true}) {
        auto numerics = sized<ta_numerics>();
        numerics.k_offset = with_offset ? offsets.data() : nullptr;
        Pair pair(gpu, cpu, pool(2, 2, 128, 4, &numerics), 4, stream, 5);
        const size_t a = pair.add(), b = pair.add(), c = pair.add();
        pair.step({a, b, c}, {500, 64, 130}, {1, 1, 1}, tolerance_of(1));
        for (const int32_t n : {1, 4, 60}) {
            for (int which = 0; which < 128; ++which) {
                Rules rules;
                if (which & 1) rules.attend.window = 100;
                if (which & 2) rules.attend.softcap = 5.0f;
                if (which & 4) rules.attend.mask = TA_MASK_FULL;
                if (which & 8) rules.alibi = true;
                if (which & 16) rules.sinks = true;
                if (which & 32) rules.attend.exp = TA_EXP_SAS;
                if (which & 64) rules.attend.p = TA_P_U16;
                SCOPED_TRACE((with_offset ? "K offset, " : "") + std::to_string(n) + " queries, options " +
                             std::to_string(which));
                pair.step({a, b, c}, {0, 0, 0}, {n, 1, n}, tolerance_of(n * 4, (which & 32) != 0), rules);
                if (HasFatalFailure()) return;
            }
        }
    }
}

// If P is in units of the running maximum, it takes V's scale in a page from all tokens there. Under a window a prompt that sees a
// forgotten block goes to the decode kernel, 16 rows at a time, which finds that scale also where no row of the chunk sees them. The other pages are of
// 8 bits: a sink block, and an open one.
TEST_F(GpuShapes, TokensThatNoRowSeesHaveAPartInAPagesScale) {
    for (const int64_t window : {1000, 25}) {
        SCOPED_TRACE("window " + std::to_string(window));
        Pair pair(gpu, cpu, pool(1, 2, 96, 4), 3, stream, 21);
        const size_t loud = pair.add();
        pair.step({loud}, {128}, {1}, tolerance_of(1));
        pair.forget(loud, 64, 64);
        Rules rules;
        rules.attend.p = TA_P_S8_127_RUNNING;
        rules.attend.exp = TA_EXP_EXACT;  // by the cubic one of 127 levels is often another
        rules.attend.window = window;
        rules.loud = 3;
        pair.step({loud}, {60}, {60}, {2 * kDecodeError, kDecodeLse}, rules);
        if (HasFatalFailure()) return;
    }
}

// Each setting of a pool alone, over blocks that close at once, piece by piece and not at all.
// Beside scores of 10^8, fp32 has no room for V's scale: O is one token's V all the same.
TEST_F(GpuShapes, OneKeyIsAllOfAttention) {
    for (const uint32_t d : {64u, 96u, 128u, 256u}) {
        for (const uint32_t bits : {8u, 4u, 2u}) {
            SCOPED_TRACE(::testing::Message() << "d " << d << ", " << bits << " bits");
            const auto options = pool_options(1, 1, d, bits);
            const KvPool pools[] = {make_pool(gpu, options), make_pool(cpu, options)};
            const Plan plans[] = {make_plan(pools[0]), make_plan(pools[1])};
            const ta_seq seqs[] = {make_sequence(pools[0]), make_sequence(pools[1])};
            Random random(d + bits);
            for (const int32_t n : {128, 70}) {
                std::vector<float> k = random.normals(n * d), v = random.normals(n * d), q = random.normals(4 * n * d);
                if (n == 128) k[70 * d + 1] = 3e4f;
                for (int i = 0; i < 4 * n; ++i) q[size_t(i) * d + 1] = 3e4f;
                for (float& x : v) x *= 1e-2f;
                const DeviceTensor gk(n, 1, d, &k), gv(n, 1, d, &v), gq(n, 4, d, &q), gout(n, 4, d);
                Tensor ck(k, n, 1, d, TA_DTYPE_F16), cv(v, n, 1, d, TA_DTYPE_F16), cq(q, n, 4, d, TA_DTYPE_F16), cout(n, 4, d);
                begin(plans[0], {seqs[0]}, {n});
                begin(plans[1], {seqs[1]}, {n});
                ta_error err;
                require(ta_append(plans[0].get(), 0, gk.view(), gv.view(), &err), err);
                require(ta_attend(plans[0].get(), 0, gq.view(), gout.view(), nullptr, nullptr, &err), err);
                append(plans[1], 0, ck, cv);
                attend(plans[1], 0, cq, cout);
                end(plans[0]);
                end(plans[1]);
                ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                if (n == 128) continue;  // half of its queries do not see the key
                const std::vector<float> got = gout.get(), want = cout.values();
                // A prompt's V of 4 and 2 bits may be rounded to INT8 (numerics.md, 8).
                EXPECT_LT(relative_l2(got, std::vector<double>(want.begin(), want.end())), bits == 8 ? 1e-2 : 2e-2);
            }
        }
    }
}

TEST_F(GpuShapes, SettingsOfPools) {
    std::vector<float> offsets;
    {
        Random random(78);
        offsets = random.normals(2 * 2 * 64, 0.5f);
    }
    for (const ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
        for (const uint32_t bits : {4u, 2u, 8u}) {
            for (int which = 0; which < 17; ++which) {
                SCOPED_TRACE("profile " + std::to_string(profile) + ", " + std::to_string(bits) + " bits, setting " +
                             std::to_string(which));
                auto n = sized<ta_numerics>();
                n.profile = profile;
                if (which == 1) n.k_granularity = TA_GRANULARITY_TOKEN;
                if (which == 2) n.v_granularity = TA_GRANULARITY_TOKEN;
                if (which == 3) n.k_granularity = n.v_granularity = TA_GRANULARITY_TOKEN;
                if (which == 4) n.k_granularity = n.v_granularity = TA_GRANULARITY_PAGE;
                if (which == 5) n.open_scale = profile == TA_PROFILE_PAPER ? TA_OPEN_SCALE_TOKEN : TA_OPEN_SCALE_UNIVERSAL;
                if (which == 6) n.v_exponents = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 7) n.fractional_zero = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 8) n.v_search = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 9) n.hadamard = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 10) n.sink_blocks = profile == TA_PROFILE_PAPER ? 3 : -1;
                if (which == 11) n.hadamard_seed = 12345, n.hadamard = TA_ON;
                if (which == 12) n.k_offset = offsets.data();
                if (which == 13) n.nonfinite = TA_NONFINITE_SATURATE;
                if (which == 14) n.k_search = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 15) n.unit_slope = profile == TA_PROFILE_PAPER ? TA_ON : TA_OFF;
                if (which == 16) n.q_bits = profile == TA_PROFILE_PAPER ? 15 : 8;
                Pair pair(gpu, cpu, pool(2, 2, 64, bits, &n), 4, stream, uint64_t(which + 1));
                const size_t a = pair.add(), b = pair.add();
                const bool paper = profile == TA_PROFILE_PAPER;
                const Tolerance few = tolerance_of(1),
                                many = paper ? Tolerance{kPaperError, 2 * kPrefillLse} : tolerance_of(99);
                pair.step({a, b}, {330, 7}, {330, 7}, many);
                pair.step({a, b}, {1, 57}, {1, 1}, few);
                for (int i = 0; i < 3; ++i) pair.step({b, a}, {1, 30}, {1, 1}, few);
                pair.step({a, b}, {64, 128}, {64, 2}, many);
                if (which == 13) {
                    // Values of 65504 leave no room for others: what is stored must be the CPU's, results need not be near.
                    const Tolerance any{1e30, 1e30};
                    pair.step({a, b}, {70, 3}, {1, 1}, any, {}, {}, true);
                }
                pair.compare_pages();
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(GpuShapes, ManyHeads) {
    for (const uint32_t bits : {4u, 2u, 8u}) {
        for (const bool mixed : {false, true}) {
            if (mixed && bits == 8) continue;
            SCOPED_TRACE(std::to_string(bits) + " bits" + (mixed ? ", mixed" : ""));
            constexpr uint32_t kHeads = 300;
            auto options = pool(1, kHeads, 64, bits);
            std::vector<uint8_t> k_bits(kHeads), v_bits(kHeads);
            constexpr uint8_t kBits[] = {4, 2, 8};
            for (uint32_t h = 0; h < kHeads; ++h) k_bits[h] = kBits[h % 3], v_bits[h] = kBits[h / 3 % 3];
            if (mixed) options.k_bits = k_bits.data(), options.v_bits = v_bits.data();
            Pair pair(gpu, cpu, options, 2, stream, bits);
            const size_t a = pair.add(), b = pair.add(), c = pair.add();
            pair.step({a, b, c}, {200, 1, 64}, {1, 1, 1}, tolerance_of(1));
            pair.step({c, a, b}, {1, 3, 1}, {1, 3, 1}, tolerance_of(6));
            pair.step({a, b, c}, {20, 0, 12}, {20, 1, 12}, tolerance_of(40));
            pair.compare_pages();
            if (HasFatalFailure()) return;
        }
    }
}

// Members without keys, without new tokens, without queries, in every order, beside prompts.
TEST_F(GpuShapes, ManySequences) {
    for (const int64_t window : {0, 90}) {
        SCOPED_TRACE("window " + std::to_string(window));
        Pair pair(gpu, cpu, pool(1, 2, 64, 4), 2, stream, 9);
        const std::vector<size_t> all = pair.add_many(1500);
        Random random(19);
        Rules rules;
        rules.attend.window = window;
        std::vector<int64_t> lengths(all.size(), 0);
        for (int step = 0; step < 6; ++step) {
            std::vector<int32_t> n_new, n_query;
            bool many = false;
            for (size_t i = 0; i < all.size(); ++i) {
                const int kind = int(random.below(8));
                const int64_t added = kind < 3 ? 0 : kind < 6 ? 1 : random.below(step < 4 ? 20 : 130);
                lengths[i] += added;
                const int64_t asked =
                    kind % 2 ? std::min<int64_t>(lengths[i], 1) : random.below(std::min<int64_t>(added, 12) + 1);
                many |= asked * 2 > 16;
                n_new.push_back(int32_t(added));
                n_query.push_back(int32_t(asked));
            }
            pair.step(all, n_new, n_query, tolerance_of(many ? 99 : 1), rules);
            if (HasFatalFailure()) return;
        }
        pair.compare_pages();
    }
}

// ------------------------------------------------------------------------------------------------- what a CPU is too slow for

// Keys of zeros: LSE is the logarithm of how many keys a row sees, O the mean of their values, which are one number in each
// block.
TEST_F(GpuShapes, AMillionKeys) {
    constexpr int64_t kDim = 64, kChunk = 1 << 17, kChunks = 9, kGroup = 4;
    auto options = pool(1, 1, kDim, 2);
    options.budget_bytes = uint64_t{512} << 20;
    const KvPool p = make_pool(gpu, options);
    const Plan plan = make_plan(p);
    ta_error err;
    require(ta_plan_set_stream(plan.get(), stream, &err), err);
    const ta_seq seq = make_sequence(p);
    const auto value_of = [](int64_t key) { return key < kChunk * kChunks ? float(1 + key % kChunk / 64 % 7) : 2.0f; };
    std::vector<float> values(size_t(kChunk * kDim));
    for (int64_t i = 0; i < kChunk * kDim; ++i) values[size_t(i)] = value_of(i / kDim);
    const DeviceTensor k(kChunk, 1, kDim), v(kChunk, 1, kDim, &values);
    ASSERT_EQ(cudaMemset(k.view()->data, 0, size_t(kChunk * kDim * 2)), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    for (int64_t c = 0; c < kChunks; ++c) {
        begin(plan, {seq}, {int32_t(kChunk)}, {0});
        require(ta_append(plan.get(), 0, k.view(), v.view(), &err), err);
        end(plan);
    }
    Random random(20);
    for (const int32_t n : {1, 4, 60}) {
        for (const int64_t window : {int64_t{0}, int64_t{1} << 20, int64_t{100000}}) {
            SCOPED_TRACE(std::to_string(n) + " queries, window " + std::to_string(window));
            const int64_t before = length(p, seq), total = before + n;
            const std::vector<float> twos(size_t(n * kDim), 2.0f);
            const DeviceTensor zeros(n, 1, kDim), of_two(n, 1, kDim, &twos);
            ASSERT_EQ(cudaMemset(zeros.view()->data, 0, size_t(n * kDim * 2)), cudaSuccess);
            const std::vector<float> qv = random.normals(n * kGroup * kDim);
            const DeviceTensor q(n, kGroup, kDim, &qv), out(n, kGroup, kDim);
            std::vector<float> lse(size_t(n * kGroup));
            const DeviceMemory glse = to_device(lse.data(), lse.size() * sizeof(float));
            auto attend = sized<ta_attend_options>();
            attend.window = window;
            begin(plan, {seq}, {n});
            require(ta_append(plan.get(), 0, zeros.view(), of_two.view(), &err), err);
            require(ta_attend(plan.get(), 0, q.view(), out.view(), static_cast<float*>(glse.get()), &attend, &err), err);
            end(plan);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            ASSERT_EQ(cudaMemcpy(lse.data(), glse.get(), lse.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
            const std::vector<float> got = out.get();
            for (int64_t row = 0; row < n; ++row) {
                const int64_t position = total - n + row, first = window ? std::max<int64_t>(0, position - window + 1) : 0;
                double sum = 0.0;
                for (int64_t key = first; key <= position; ++key) sum += double(value_of(key));
                const double seen = double(position - first + 1);
                for (int64_t h = 0; h < kGroup; ++h) {
                    ASSERT_NEAR(lse[size_t(row * kGroup + h)], std::log(seen), 6e-3) << "row " << row;
                    for (int64_t c = 0; c < kDim; ++c) {
                        ASSERT_NEAR(got[size_t((row * kGroup + h) * kDim + c)], sum / seen,
                                    (n * kGroup <= 16 ? 2e-3 : 1.2e-2) * sum / seen)
                            << "row " << row << ", channel " << c;
                    }
                }
            }
        }
    }
}

// The same rows where the last ones lie more than 2^31 elements from the first give the same bits.
TEST_F(GpuShapes, OffsetsBeyond2To31) {
    constexpr int64_t kTokens = 20, kHeads = 2, kGroup = 4, kQHeads = kHeads * kGroup, kDim = 128;
    constexpr int64_t kElements = (kTokens - 1) * (int64_t{1} << 27) + 4096;
    void *in = nullptr, *to = nullptr;
    const cudaError_t first = cudaMalloc(&in, size_t(kElements) * 2), second = cudaMalloc(&to, size_t(kElements) * 2);
    const DeviceMemory in_owner(in), to_owner(to);
    if (first != cudaSuccess || second != cudaSuccess) {
        (void)cudaGetLastError();
        GTEST_SKIP() << "no room for two tensors of " << kElements * 2 << " bytes";
    }
    Random random(21);
    const std::vector<float> kv = random.normals(kTokens * kHeads * kDim), vv = random.normals(kTokens * kHeads * kDim),
                             qv = random.normals(kTokens * kQHeads * kDim, 1.5f);
    const DeviceTensor k(kTokens, kHeads, kDim, &kv), v(kTokens, kHeads, kDim, &vv), q(kTokens, kQHeads, kDim, &qv),
        out(kTokens, kQHeads, kDim);
    for (const bool by_head : {false, true}) {
        // Tokens 2^27 elements apart, forwards or backwards, or the heads of q and out 5 * 2^26.
        for (const bool backwards : {false, true}) {
            if (by_head && backwards) continue;
            SCOPED_TRACE(by_head ? "heads" : backwards ? "tokens, backwards" : "tokens");
            const auto spread = [&](const DeviceTensor& like, void* memory, int64_t offset) {
                ta_tensor t = *like.view();
                t.stride_head = by_head ? int64_t{5} << 26 : kDim;
                t.stride_token = by_head ? kDim : backwards ? -(int64_t{1} << 27) : int64_t{1} << 27;
                t.data = static_cast<uint16_t*>(memory) + offset + (backwards ? (kTokens - 1) << 27 : 0);
                return t;
            };
            const auto each_row = [&](const ta_tensor& from, const ta_tensor& into) {
                const auto row_of = [](const ta_tensor& t, int64_t token, int64_t head) {
                    const int64_t token_stride = t.stride_token ? t.stride_token : t.heads * t.head_dim,
                                  head_stride = t.stride_head ? t.stride_head : t.head_dim;
                    return static_cast<uint16_t*>(t.data) + token * token_stride + head * head_stride;
                };
                for (int64_t token = 0; token < from.tokens; ++token) {
                    for (int64_t head = 0; head < from.heads; ++head) {
                        ASSERT_EQ(cudaMemcpy(row_of(into, token, head), row_of(from, token, head), size_t(kDim) * 2,
                                             cudaMemcpyDeviceToDevice),
                                  cudaSuccess);
                    }
                }
            };
            // By head, rows of the tensors take turns: 20 tokens of 128 elements each.
            const int64_t apart = by_head ? kTokens * kDim : kQHeads * kDim;
            const ta_tensor far_k = spread(k, in, 0), far_v = spread(v, in, apart), far_q = spread(q, in, 2 * apart),
                            far_out = spread(out, to, 0);
            each_row(*k.view(), far_k);
            each_row(*v.view(), far_v);
            each_row(*q.view(), far_q);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            for (const bool prompt : {true, false}) {  // one sequence by prefill, or one for each token by decode
                SCOPED_TRACE(prompt ? "prompt" : "decode");
                std::vector<float> results[2];
                for (const bool far : {false, true}) {
                    const KvPool p = make_pool(gpu, pool(1, kHeads, kDim, 4));
                    const Plan plan = make_plan(p);
                    ta_error err;
                    require(ta_plan_set_stream(plan.get(), stream, &err), err);
                    std::vector<ta_seq> seqs;
                    for (int64_t s = 0; s < (prompt ? 1 : kTokens); ++s) seqs.push_back(make_sequence(p));
                    begin(plan, seqs, std::vector<int32_t>(seqs.size(), prompt ? int32_t(kTokens) : 1));
                    require(ta_append(plan.get(), 0, far ? &far_k : k.view(), far ? &far_v : v.view(), &err), err);
                    require(
                        ta_attend(plan.get(), 0, far ? &far_q : q.view(), far ? &far_out : out.view(), nullptr, nullptr, &err),
                        err);
                    end(plan);
                    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
                    if (far) each_row(far_out, *out.view());
                    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                    results[far] = out.get();
                    ASSERT_EQ(cudaMemset(out.view()->data, 0xFF, size_t(kTokens * kQHeads * kDim) * 2), cudaSuccess);
                    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
                }
                EXPECT_TRUE(results[0] == results[1]);
                EXPECT_TRUE(std::isfinite(results[0][0]));
            }
        }
    }
}

// Tensors, LSE and the arrays of options in every kind of memory that a GPU reads: the same bits.
TEST_F(GpuShapes, KindsOfMemory) {
    constexpr int64_t kHeads = 2, kGroup = 4, kDim = 128, kMost = 150;
    enum class Kind { kDevice, kPinned, kManaged, kPool };
    struct Memory {
        Kind kind = Kind::kDevice;
        void* data = nullptr;
        Memory() = default;
        Memory(const Memory&) = delete;
        Memory& operator=(const Memory&) = delete;
        ~Memory() {
            if (kind == Kind::kPinned) {
                cudaFreeHost(data);
            } else {
                cudaFree(data);
            }
        }
        void take(Kind which, size_t bytes) {
            kind = which;
            const cudaError_t e = kind == Kind::kDevice    ? cudaMalloc(&data, bytes)
                                  : kind == Kind::kPinned  ? cudaHostAlloc(&data, bytes, cudaHostAllocDefault)
                                  : kind == Kind::kManaged ? cudaMallocManaged(&data, bytes)
                                                           : cudaMallocAsync(&data, bytes, nullptr);
            ASSERT_EQ(e, cudaSuccess);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        }
    };
    Random random(22);
    const auto halves = [&](int64_t n) {
        std::vector<uint16_t> h;
        for (const float x : random.normals(n)) h.push_back(float_to_f16(x));
        return h;
    };
    const std::vector<uint16_t> kv = halves(kMost * kHeads * kDim), qv = halves(kMost * kHeads * kGroup * kDim);
    const std::vector<float> slopes(size_t(kHeads * kGroup), 0.01f);
    std::vector<uint8_t> results[4];
    for (const Kind kind : {Kind::kDevice, Kind::kPinned, Kind::kManaged, Kind::kPool}) {
        SCOPED_TRACE(int(kind));
        Memory k, q, out, lse, arrays;
        const size_t lse_bytes = size_t(kMost * kHeads * kGroup) * sizeof(float);
        k.take(kind, kv.size() * 2), q.take(kind, qv.size() * 2), out.take(kind, qv.size() * 2), lse.take(kind, lse_bytes);
        arrays.take(kind, slopes.size() * sizeof(float));
        if (HasFatalFailure()) return;
        ASSERT_EQ(cudaMemcpy(k.data, kv.data(), kv.size() * 2, cudaMemcpyDefault), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(q.data, qv.data(), qv.size() * 2, cudaMemcpyDefault), cudaSuccess);
        ASSERT_EQ(cudaMemcpy(arrays.data, slopes.data(), slopes.size() * sizeof(float), cudaMemcpyDefault), cudaSuccess);
        const KvPool p = make_pool(gpu, pool(1, kHeads, kDim, 4));
        const Plan plan = make_plan(p);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        const ta_seq seq = make_sequence(p);
        for (const int64_t n : {kMost, int64_t{1}}) {
            const auto view = [n](const Memory& m, int64_t heads) {
                auto t = sized<ta_tensor>();
                t.dtype = TA_DTYPE_F16;
                t.data = m.data;
                t.tokens = n;
                t.heads = heads;
                t.head_dim = kDim;
                return t;
            };
            const ta_tensor of_k = view(k, kHeads), of_q = view(q, kHeads * kGroup), of_out = view(out, kHeads * kGroup);
            auto attend = sized<ta_attend_options>();
            attend.alibi_slopes = static_cast<const float*>(arrays.data);
            attend.sinks = attend.alibi_slopes;
            begin(plan, {seq}, {int32_t(n)});
            require(ta_append(plan.get(), 0, &of_k, &of_k, &err), err);
            require(ta_attend(plan.get(), 0, &of_q, &of_out, static_cast<float*>(lse.data), &attend, &err), err);
            end(plan);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            std::vector<uint8_t> bytes(size_t(n * kHeads * kGroup) * (size_t(kDim) * 2 + sizeof(float)));
            const size_t out_bytes = size_t(n * kHeads * kGroup * kDim) * 2;
            ASSERT_EQ(cudaMemcpy(bytes.data(), out.data, out_bytes, cudaMemcpyDefault), cudaSuccess);
            ASSERT_EQ(cudaMemcpy(bytes.data() + out_bytes, lse.data, bytes.size() - out_bytes, cudaMemcpyDefault), cudaSuccess);
            std::vector<uint8_t>& all = results[size_t(kind)];
            all.insert(all.end(), bytes.begin(), bytes.end());
        }
        EXPECT_TRUE(results[size_t(kind)] == results[0]);
    }
}

// ------------------------------------------------------------------------------------------------------- threads and streams

// Prompts and decode steps of some sequences; the results of all steps. `before_step`: called with the number of each.
template <class BeforeStep>
std::vector<float> run_steps(const KvPool& pool, const Plan& plan, int steps, uint64_t seed, cudaStream_t wait_for,
                             BeforeStep before_step) {
    constexpr int64_t kHeads = 2, kGroup = 4, kDim = 128;
    Random random(seed);
    const std::vector<ta_seq> seqs{make_sequence(pool), make_sequence(pool)};
    std::vector<std::unique_ptr<DeviceTensor>> kept;  // until all work is over
    std::vector<const DeviceTensor*> outs;
    const auto make = [&](int64_t rows, int64_t heads, bool filled) {
        const std::vector<float> x = filled ? random.normals(rows * heads * kDim) : std::vector<float>();
        kept.push_back(std::make_unique<DeviceTensor>(rows, heads, kDim, filled ? &x : nullptr));
        return kept.back().get();
    };
    for (int step = 0; step < steps; ++step) {
        const int32_t a = step % 5 == 0 ? 600 : 1, b = step % 7 == 3 ? 70 : 1;
        const DeviceTensor* k[2] = {make(a + b, kHeads, true), make(a + b, kHeads, true)};
        const DeviceTensor* q[2] = {make(a + b, kHeads * kGroup, true), make(a + b, kHeads * kGroup, true)};
        before_step(step);
        begin(plan, seqs, {a, b});
        ta_error err;
        for (uint32_t layer = 0; layer < 2; ++layer) {
            outs.push_back(make(a + b, kHeads * kGroup, false));
            require(ta_append(plan.get(), layer, k[layer]->view(), k[1 - layer]->view(), &err), err);
            require(ta_attend(plan.get(), layer, q[layer]->view(), outs.back()->view(), nullptr, nullptr, &err), err);
        }
        end(plan);
    }
    // A last step waits for all before it.
    ta_error err;
    require(ta_plan_set_stream(plan.get(), wait_for, &err), err);
    begin(plan, seqs, {0, 0});
    end(plan);
    EXPECT_EQ(cudaStreamSynchronize(wait_for), cudaSuccess);
    std::vector<float> all;
    for (const DeviceTensor* out : outs) {
        const std::vector<float> x = out->get();
        all.insert(all.end(), x.begin(), x.end());
    }
    return all;
}

TEST_F(GpuShapes, PlansOfThreadsShareAPool) {
    constexpr int kThreads = 4, kSteps = 30;
    const auto options = pool(2, 2, 128, 4);
    std::vector<float> alone[kThreads], together[kThreads];
    for (int t = 0; t < kThreads; ++t) {
        const KvPool p = make_pool(gpu, options);
        const Plan plan = make_plan(p);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        alone[t] = run_steps(p, plan, kSteps, uint64_t(t) + 50, stream, [](int) {});
    }
    const KvPool p = make_pool(gpu, options);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            cudaStream_t own = nullptr;
            EXPECT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
            try {
                const Plan plan = make_plan(p);
                ta_error err;
                require(ta_plan_set_stream(plan.get(), own, &err), err);
                together[t] = run_steps(p, plan, kSteps, uint64_t(t) + 50, own, [](int) {});
            } catch (const std::exception& e) {
                ADD_FAILURE() << e.what();
            }
            cudaStreamDestroy(own);
        });
    }
    for (std::thread& t : threads) t.join();
    for (int t = 0; t < kThreads; ++t) EXPECT_TRUE(alone[t] == together[t]) << "thread " << t;
}

// Each step on another stream than the one before it, which may still be at work.
TEST_F(GpuShapes, TheStreamChangesFromStepToStep) {
    constexpr int kSteps = 40;
    const auto options = pool(2, 2, 128, 4);
    cudaStream_t streams[3] = {stream, nullptr, nullptr};  // the last is the legacy default stream
    ASSERT_EQ(cudaStreamCreateWithFlags(&streams[1], cudaStreamNonBlocking), cudaSuccess);
    std::vector<float> results[2];
    for (const bool changes : {false, true}) {
        const KvPool p = make_pool(gpu, options);
        const Plan plan = make_plan(p);
        ta_error err;
        require(ta_plan_set_stream(plan.get(), stream, &err), err);
        results[changes] = run_steps(p, plan, kSteps, 60, stream, [&](int step) {
            if (changes) require(ta_plan_set_stream(plan.get(), streams[step % 3], &err), err);
        });
    }
    EXPECT_TRUE(results[0] == results[1]);
    cudaStreamDestroy(streams[1]);
}

// Two contexts of one GPU, each with a pool of another shape, take turns within one thread's steps.
TEST_F(GpuShapes, ContextsTakeTurns) {
    auto options = sized<ta_context_options>();
    options.device = TA_DEVICE_CUDA;
    const Context other = make_context(options);
    Pair one(gpu, cpu, pool(2, 2, 128, 4), 4, stream, 70), two(other, cpu, pool(1, 3, 96, 2), 5, stream, 71);
    const size_t a = one.add(), b = two.add();
    for (int i = 0; i < 6; ++i) {
        one.step({a}, {i % 3 ? 1 : 90}, {i % 3 ? 1 : 90}, tolerance_of(i % 3 ? 1 : 99));
        // At head_dim 96 closed pages are rounded to INT8 for a prompt (numerics.md, 8).
        two.step({b}, {i % 2 ? 1 : 70}, {i % 2 ? 1 : 70},
                 i % 2 ? tolerance_of(1) : Tolerance{2 * kPrefillError, 2 * kPrefillLse});
        if (HasFatalFailure()) return;
    }
    one.compare_pages();
    two.compare_pages();
}

}  // namespace
}  // namespace ta::testing
