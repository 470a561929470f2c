// ta_attend_dense on a GPU context beside a CPU context. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/gpu.h"

namespace ta::testing {
namespace {

// Both are judged by the CPU's result with 16-bit P: with the P that is asked for, the GPU may be off by kTimesCpu times as
// much as the CPU is, whose units of P are smaller, and by what rounding differs. LSE beside 8-bit P is summed from scores on a
// grid of 1/112 octave.
constexpr double kTimesCpu = 1.6, kFine = 2e-3, kLse = 5e-3;

struct Item {
    int64_t n_query, n_keys;
};

struct Problem {
    std::vector<Item> items;
    int64_t kv_heads = 2, group = 4, head_dim = 128;
    ta_dense_variant variant = TA_DENSE_INT8_PAGE;
    ta_granularity v_granularity = TA_GRANULARITY_DEFAULT;
    ta_nonfinite nonfinite = TA_NONFINITE_DEFAULT;
    ta_attend_options attend = sized<ta_attend_options>();
    bool slopes = false, sinks = false;
    ta_dtype dtype = TA_DTYPE_F16, out_dtype = TA_DTYPE_F32;
    Layout layout = Layout::kPlain;
    uint64_t seed = 1;
};

// The inputs of a problem on both sides, and the CPU's results.
class Twin {
  public:
    explicit Twin(const Problem& p) : p_(p), random_(p.seed), slopes_(16, 0.02f), sinks_(16, 1.5f) {
        for (const Item& item : p.items) {
            q_offsets_.push_back(q_offsets_.back() + item.n_query);
            k_offsets_.push_back(k_offsets_.back() + item.n_keys);
        }
        const int64_t n_query = q_offsets_.back(), n_keys = k_offsets_.back(), q_heads = p.kv_heads * p.group;
        q_.emplace(random_.normals(n_query * q_heads * p.head_dim, 1.5f), n_query, q_heads, p.head_dim, p.dtype, p.layout);
        k_.emplace(random_.normals(n_keys * p.kv_heads * p.head_dim), n_keys, p.kv_heads, p.head_dim, p.dtype, p.layout);
        v_.emplace(random_.normals(n_keys * p.kv_heads * p.head_dim), n_keys, p.kv_heads, p.head_dim, p.dtype, p.layout);
    }
    Tensor& q() { return *q_; }
    Tensor& k() { return *k_; }
    Tensor& v() { return *v_; }

    void run_cpu(const Context& cpu) {
        const ta_p asked = p_.attend.p;
        for (const bool fine : {false, true}) {
            Result& r = fine ? fine_ : expected_;
            Tensor out = out_tensor();
            r.lse.assign(lse_size(), kNothing);
            if (fine && !p_is_float()) p_.attend.p = TA_P_U16;
            ta_error err;
            require(call(cpu, *q_->view(), *k_->view(), *v_->view(), *out.view(), r.lse.data(), slopes_.data(), sinks_.data(),
                         nullptr, &err),
                    err);
            r.out = out.values();
        }
        p_.attend.p = asked;
    }

    // Enqueues the GPU's call. Its results come with check().
    ta_status enqueue(const Context& gpu, cudaStream_t stream, ta_error* err) {
        got_.emplace(out_tensor());
        got_lse_.assign(lse_size(), kNothing);
        gq_.emplace(*q_), gk_.emplace(*k_), gv_.emplace(*v_), gout_.emplace(*got_);
        glse_ = to_device(got_lse_.data(), got_lse_.size() * sizeof(float));
        gslopes_ = to_device(slopes_.data(), slopes_.size() * sizeof(float));
        gsinks_ = to_device(sinks_.data(), sinks_.size() * sizeof(float));
        return again(gpu, stream, err);
    }
    ta_status again(const Context& gpu, cudaStream_t stream, ta_error* err) {
        return call(gpu, *gq_->view(), *gk_->view(), *gv_->view(), *gout_->view(), static_cast<float*>(glse_.get()),
                    static_cast<const float*>(gslopes_.get()), static_cast<const float*>(gsinks_.get()), stream, err);
    }

    void check(cudaStream_t stream, double rounding = kFine) {
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        gout_->fetch();
        EXPECT_TRUE(got_->gaps_poison());
        ASSERT_EQ(cudaMemcpy(got_lse_.data(), glse_.get(), got_lse_.size() * sizeof(float), cudaMemcpyDeviceToHost),
                  cudaSuccess);
        const std::vector<float> got = got_->values();
        const int64_t row = p_.kv_heads * p_.group * p_.head_dim;
        for (size_t b = 0; b < p_.items.size(); ++b) {
            double error = 0.0, cpu_error = 0.0, norm = 0.0;
            for (auto i = size_t(q_offsets_[b] * row); i < size_t(q_offsets_[b + 1] * row); ++i) {
                const double x = got[i], cpu = expected_.out[i], fine = fine_.out[i];
                ASSERT_TRUE(std::isfinite(x) && x != double(Tensor::kPoison)) << "sequence " << b << ", element " << i;
                error += (x - fine) * (x - fine);
                cpu_error += (cpu - fine) * (cpu - fine);
                norm += fine * fine;
            }
            ASSERT_LE(std::sqrt(error), kTimesCpu * std::sqrt(cpu_error) + rounding * std::sqrt(norm) + 1e-12)
                << "sequence " << b << ": " << p_.items[b].n_query << " queries, " << p_.items[b].n_keys
                << " keys; the CPU's: " << std::sqrt(cpu_error) << " of " << std::sqrt(norm);
        }
        for (size_t i = 0; i < got_lse_.size(); ++i) {
            const float fine = fine_.lse[i];
            if (std::isinf(fine) || fine == kNothing) {
                ASSERT_EQ(got_lse_[i], fine) << "lse " << i;
            } else {
                const double cpu_error = std::abs(double(expected_.lse[i]) - double(fine));
                const bool few_bits = p_.attend.p != TA_P_U16 && !p_is_float();
                // The sums of K's channels, rounded to F16, show in LSE more than in O, and as much more as scores are larger.
                const double sharper = p_.attend.scale > 0.0f ? p_.attend.scale * std::sqrt(double(p_.head_dim)) : 1.0;
                const double near = few_bits ? kLse : p_.variant == TA_DENSE_DISTR ? 2 * sharper * rounding : rounding;
                ASSERT_NEAR(got_lse_[i], fine, kTimesCpu * cpu_error + near) << "lse " << i;
            }
        }
    }

    // The GPU's results are those of `other`.
    void check_same(const Twin& other, cudaStream_t stream) {
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        gout_->fetch();
        EXPECT_TRUE(got_->values() == other.got_->values());
    }

  private:
    static constexpr float kNothing = -777.0f;
    struct Result {
        std::vector<float> out, lse;
    };
    bool p_is_float() const { return p_.variant == TA_DENSE_INT_FLASH_HALF || p_.variant == TA_DENSE_DISTR; }
    size_t lse_size() const { return size_t(q_offsets_.back() * p_.kv_heads * p_.group) + 1; }
    Tensor out_tensor() const { return {q_offsets_.back(), p_.kv_heads * p_.group, p_.head_dim, p_.out_dtype, p_.layout}; }
    ta_status call(const Context& context, const ta_tensor& q, const ta_tensor& k, const ta_tensor& v, const ta_tensor& out,
                   float* lse, const float* slopes, const float* sinks, cudaStream_t stream, ta_error* err) {
        ta_attend_options attend = p_.attend;
        if (p_.slopes) attend.alibi_slopes = slopes;
        if (p_.sinks) attend.sinks = sinks;
        auto options = sized<ta_dense_options>();
        options.variant = p_.variant;
        options.v_granularity = p_.v_granularity;
        options.nonfinite = p_.nonfinite;
        options.batch = uint32_t(p_.items.size());
        options.q_offsets = q_offsets_.data();
        options.k_offsets = k_offsets_.data();
        options.attend = &attend;
        options.stream = stream;
        return ta_attend_dense(context.get(), &q, &k, &v, &out, lse, &options, err);
    }

    Problem p_;
    Random random_;
    std::vector<int64_t> q_offsets_{0}, k_offsets_{0};
    std::vector<float> slopes_, sinks_, got_lse_;
    Result expected_, fine_;
    std::optional<Tensor> q_, k_, v_, got_;
    std::optional<DeviceCopy> gq_, gk_, gv_, gout_;
    DeviceMemory glse_, gslopes_, gsinks_;
};

class GpuDense : public GpuTest {
  protected:
    void compare(const Problem& p, double rounding = kFine) {
        Twin twin(p);
        twin.run_cpu(cpu);
        ta_error err;
        ASSERT_EQ(twin.enqueue(gpu, stream, &err), TA_OK) << err.message;
        twin.check(stream, rounding);
    }
};

const std::vector<Item> kRagged = {{1, 1}, {0, 70},  {130, 130}, {5, 300}, {3, 64},  {7, 0},
                                   {0, 0}, {70, 65}, {1, 129},   {20, 7},  {64, 200}};
const ta_dense_variant kVariants[] = {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH, TA_DENSE_INT_FLASH_HALF, TA_DENSE_DISTR};

TEST_F(GpuDense, RaggedBatchesOfEveryVariant) {
    for (ta_dense_variant variant : kVariants) {
        for (ta_granularity v : {TA_GRANULARITY_DEFAULT, TA_GRANULARITY_TOKEN, TA_GRANULARITY_PAGE, TA_GRANULARITY_TENSOR}) {
            for (ta_mask mask : {TA_MASK_CAUSAL, TA_MASK_FULL}) {
                for (ta_p p : {TA_P_DEFAULT, TA_P_U16}) {
                    SCOPED_TRACE("variant " + std::to_string(variant) + ", V " + std::to_string(v) + ", mask " +
                                 std::to_string(mask) + ", P " + std::to_string(p));
                    Problem problem;
                    problem.items = kRagged;
                    problem.variant = variant;
                    problem.v_granularity = v;
                    problem.attend.mask = mask;
                    problem.attend.p = p;
                    problem.seed = uint64_t(variant * 100 + v * 10 + mask);
                    compare(problem);
                    if (HasFatalFailure()) return;
                }
            }
        }
    }
}

TEST_F(GpuDense, HeadsTypesAndLayouts) {
    struct Heads {
        int64_t kv_heads, group, head_dim;
    };
    for (const Heads& h : {Heads{2, 4, 64}, Heads{3, 5, 96}, Heads{1, 16, 128}, Heads{4, 1, 256}}) {
        for (ta_dense_variant variant : kVariants) {
            for (ta_dtype dtype : kDtypes) {
                for (Layout layout : kLayouts) {
                    SCOPED_TRACE("d " + std::to_string(h.head_dim) + ", variant " + std::to_string(variant) + ", type " +
                                 std::to_string(dtype) + ", layout " + std::to_string(int(layout)));
                    Problem p;
                    p.items = {{1, 100}, {40, 70}, {2, 64}};
                    p.kv_heads = h.kv_heads;
                    p.group = h.group;
                    p.head_dim = h.head_dim;
                    p.variant = variant;
                    if (variant == TA_DENSE_DISTR && h.head_dim == 96) p.head_dim = 32;
                    if (variant == TA_DENSE_DISTR && h.head_dim == 256) p.head_dim = 128;
                    p.dtype = p.out_dtype = dtype;
                    p.layout = layout;
                    p.attend.p = TA_P_U16;
                    p.seed = uint64_t(h.head_dim) + uint64_t(dtype);
                    compare(p, dtype == TA_DTYPE_BF16 ? 2 * kFine : kFine);
                    if (HasFatalFailure()) return;
                }
            }
        }
    }
}

TEST_F(GpuDense, OptionsOfAttend) {
    for (ta_dense_variant variant : kVariants) {
        for (int64_t n_query : {2, 60}) {
            for (int which = 0; which < 9; ++which) {
                SCOPED_TRACE("variant " + std::to_string(variant) + ", " + std::to_string(n_query) + " queries, options " +
                             std::to_string(which));
                Problem p;
                p.items = {{n_query, 400}, {n_query, 70}};
                p.variant = variant;
                p.attend.p = TA_P_U16;
                if (which == 0) p.attend.window = 100;
                if (which == 1) p.attend.softcap = 5.0f;
                if (which == 2) p.attend.exp = TA_EXP_SAS;
                if (which == 3) p.attend.scale = 0.3f;
                if (which == 4) p.sinks = true;
                if (which == 5) p.slopes = true;
                if (which == 6) p.attend.p = TA_P_S8_119;
                if (which == 7) p.attend.p = TA_P_U8_RUNNING;
                if (which == 8) p.attend.mask = TA_MASK_FULL, p.attend.window = 30, p.slopes = true;
                compare(p, kFine);
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_F(GpuDense, ManyRowsOfTheRunningMaximum) {
    for (int64_t d : {64, 128}) {
        Problem p;
        p.items = {{700, 700}, {65, 200}, {30, 10}, {1, 50}};
        p.head_dim = d;
        p.attend.p = TA_P_U8_RUNNING;
        compare(p);
    }
}

// All magnitudes are alike, as those of ones() are and those of a rotated vector of one channel: dot products are as large as
// codes allow, and what a factor of theirs is rounded to shows. Half of the keys may point away from the queries, and have no
// values.
TEST_F(GpuDense, RowsOfOneMagnitude) {
    for (const int64_t d : {64, 96, 128, 256}) {
        for (const ta_dense_variant variant : {TA_DENSE_INT8_PAGE, TA_DENSE_INT_FLASH}) {
            for (const float x : {0.125f, 0.1875f, 0.2265625f, 0.28125f, 0.375f, 0.5f, 1.0f}) {
                for (const bool opposed : {false, true}) {
                    SCOPED_TRACE("d " + std::to_string(d) + ", variant " + std::to_string(variant) + ", magnitude " +
                                 std::to_string(x) + (opposed ? ", opposed keys" : ""));
                    Problem p;
                    p.items = {{40, 256}, {1, 1}, {40, 1}};
                    p.head_dim = d;
                    p.variant = variant;
                    p.attend.mask = TA_MASK_FULL;
                    p.attend.p = TA_P_U8;
                    Twin twin(p);
                    const auto fill = [&](Tensor& t, int64_t rows, int64_t heads, float even, float odd) {
                        for (int64_t row = 0; row < rows; ++row) {
                            for (int64_t head = 0; head < heads; ++head) {
                                for (int64_t c = 0; c < d; ++c) t.set(row, head, c, row % 2 ? odd : even);
                            }
                        }
                    };
                    fill(twin.q(), 81, p.kv_heads * p.group, x, x);
                    fill(twin.k(), 258, p.kv_heads, x, opposed ? -x : x);
                    fill(twin.v(), 258, p.kv_heads, 1.0f, opposed ? 0.0f : 1.0f);
                    twin.run_cpu(cpu);
                    ta_error err;
                    ASSERT_EQ(twin.enqueue(gpu, stream, &err), TA_OK) << err.message;
                    // Half a step of P, 0.2%, and a step and a half of its scores, 0.9%: up to half of that in O.
                    twin.check(stream, 6e-3);
                    if (HasFatalFailure()) return;
                }
            }
        }
    }
}

// As far below zero as inputs allow: a row still is the mean of what it sees, by any kernel.
TEST_F(GpuDense, ScoresFarBelowZero) {
    for (const auto& [variant, n_query] : {std::pair(TA_DENSE_INT8_PAGE, 1), {TA_DENSE_INT8_PAGE, 40}, {TA_DENSE_DISTR, 40}}) {
        for (const float x : {0x1p10f, 0x1p40f, 0x1p52f, 0x1p56f}) {
            SCOPED_TRACE("variant " + std::to_string(variant) + ", " + std::to_string(n_query) + " queries, magnitude " +
                         std::to_string(x));
            constexpr int64_t kHeads = 2, kGroup = 4, kDim = 128, kKeys = 70;
            const std::vector<float> qv(size_t(n_query * kHeads * kGroup * kDim), x), kv(size_t(kKeys * kHeads * kDim), -x),
                vv(kv.size(), 3.0f);
            Tensor q(qv, n_query, kHeads * kGroup, kDim), k(kv, kKeys, kHeads, kDim), v(vv, kKeys, kHeads, kDim),
                out(n_query, kHeads * kGroup, kDim);
            const DeviceCopy gq(q), gk(k), gv(v), gout(out);
            std::vector<float> lse(size_t(n_query * kHeads * kGroup));
            const DeviceMemory glse = to_device(lse.data(), lse.size() * sizeof(float));
            auto attend = sized<ta_attend_options>();
            attend.mask = TA_MASK_FULL;
            auto options = sized<ta_dense_options>();
            options.variant = variant;
            options.attend = &attend;
            options.stream = stream;
            ta_error err;
            require(ta_attend_dense(gpu.get(), gq.view(), gk.view(), gv.view(), gout.view(), static_cast<float*>(glse.get()),
                                    &options, &err),
                    err);
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            gout.fetch();
            ASSERT_EQ(cudaMemcpy(lse.data(), glse.get(), lse.size() * sizeof(float), cudaMemcpyDeviceToHost), cudaSuccess);
            const double score = -double(x) * double(x) * std::sqrt(double(kDim)), want = score + std::log(double(kKeys));
            for (const float o : out.values()) ASSERT_NEAR(o, 3.0f, 0.03f);
            for (const float l : lse) ASSERT_NEAR(double(l), want, 1e-3 * std::fabs(want));
        }
    }
}

TEST_F(GpuDense, ValuesThatAreNotFinite) {
    for (ta_dense_variant variant : kVariants) {
        for (ta_dtype dtype : kDtypes) {
            SCOPED_TRACE("variant " + std::to_string(variant) + ", type " + std::to_string(dtype));
            Problem p;
            p.items = {{2, 70}, {40, 130}};
            p.variant = variant;
            p.dtype = dtype;
            p.attend.p = TA_P_U16;
            const auto spoil = [](Twin& t, bool zeros) {
                t.q().set(1, 3, 5, zeros ? 0.0f : NAN);
                t.k().set(69, 1, 127, zeros ? 0.0f : INFINITY);
                t.v().set(100, 0, 64, zeros ? 0.0f : -INFINITY);
            };
            Twin bad(p), zeroed(p);
            spoil(bad, false);
            spoil(zeroed, true);
            zeroed.run_cpu(cpu);
            ta_error err;
            ASSERT_EQ(zeroed.enqueue(gpu, stream, &err), TA_OK) << err.message;
            zeroed.check(stream);
            ASSERT_EQ(bad.enqueue(gpu, stream, &err), TA_OK) << err.message;
            ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            // The next call says so, whatever its stream, and only that one.
            Problem nothing = p;
            nothing.items = {{0, 0}};
            Twin none(nothing);
            EXPECT_EQ(none.enqueue(gpu, nullptr, &err), TA_E_NONFINITE);
            EXPECT_NE(std::string(err.message).find("3 values"), std::string::npos) << err.message;
            EXPECT_EQ(none.again(gpu, nullptr, &err), TA_OK) << err.message;
            bad.check_same(zeroed, stream);

            p.nonfinite = TA_NONFINITE_SATURATE;
            Twin saturated(p);
            saturated.q().set(1, 3, 5, NAN);
            saturated.k().set(69, 1, 127, NAN);
            saturated.v().set(100, 0, 64, dtype == TA_DTYPE_F16 ? 60000.0f : 1e17f);
            saturated.run_cpu(cpu);
            ASSERT_EQ(saturated.enqueue(gpu, stream, &err), TA_OK) << err.message;
            saturated.check(stream);
            EXPECT_EQ(none.again(gpu, nullptr, &err), TA_OK) << err.message;
            if (HasFatalFailure()) return;
        }
    }
}

TEST_F(GpuDense, WrongMemoryAndStreams) {
    for (const ta_dense_variant variant : {TA_DENSE_INT8_PAGE, TA_DENSE_DISTR}) {
        Problem p;
        p.items = {{3, 70}};
        p.variant = variant;
        Twin twin(p);
        ta_error err;
        ASSERT_EQ(twin.enqueue(gpu, stream, &err), TA_OK) << err.message;
        const int64_t q_heads = p.kv_heads * p.group;
        Tensor out(3, q_heads, p.head_dim);
        DeviceCopy q(twin.q()), k(twin.k()), v(twin.v()), o(out);
        auto attend = sized<ta_attend_options>();
        auto options = sized<ta_dense_options>();
        options.variant = variant;
        options.stream = stream;
        std::vector<float> array(64, 1.0f);
        for (int which = 1; which <= 7; ++which) {
            attend.alibi_slopes = which == 6 ? array.data() : nullptr;
            attend.sinks = which == 7 ? array.data() : nullptr;
            options.attend = which > 5 ? &attend : nullptr;
            EXPECT_EQ(ta_attend_dense(gpu.get(), which == 1 ? twin.q().view() : q.view(),
                                      which == 2 ? twin.k().view() : k.view(), which == 3 ? twin.v().view() : v.view(),
                                      which == 4 ? out.view() : o.view(), which == 5 ? array.data() : nullptr, &options, &err),
                      TA_E_INVALID);
            EXPECT_EQ(err.argument, std::min(which, 6)) << err.message;
            EXPECT_NE(std::string(err.message).find("pageable"), std::string::npos) << err.message;
        }
        options.attend = nullptr;
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        EXPECT_EQ(ta_attend_dense(gpu.get(), q.view(), k.view(), v.view(), o.view(), nullptr, &options, &err), TA_E_STATE);
        cudaGraph_t graph = nullptr;
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess) << "the capture was disturbed";
        cudaGraphDestroy(graph);
        EXPECT_EQ(
            ta_attend_dense(cpu.get(), twin.q().view(), twin.k().view(), twin.v().view(), out.view(), nullptr, &options, &err),
            TA_E_UNSUPPORTED);
        EXPECT_EQ(err.argument, 6);
        EXPECT_TRUE(out.all_poison());
    }
}

// Memory goes from call to call and from stream to stream while others are still at work with theirs.
TEST_F(GpuDense, StreamsAndThreadsAtOnce) {
    constexpr int kThreads = 3;
    std::vector<std::unique_ptr<Twin>> twins;
    for (int t = 0; t < 2 * kThreads; ++t) {
        Problem p;
        p.items = {{1 + 30 * t, 200 + 300 * t}, {3, 64}};
        p.variant = kVariants[t % 4];
        p.attend.p = TA_P_U16;
        p.seed = uint64_t(t) + 5;
        twins.push_back(std::make_unique<Twin>(p));
        twins.back()->run_cpu(cpu);
    }
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
            cudaStream_t own = nullptr;
            ASSERT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
            Twin &a = *twins[size_t(t)], &b = *twins[size_t(t + kThreads)];
            ta_error err;
            ASSERT_EQ(a.enqueue(gpu, own, &err), TA_OK) << err.message;
            ASSERT_EQ(b.enqueue(gpu, own, &err), TA_OK) << err.message;
            for (int n = 0; n < 100; ++n) {
                ASSERT_EQ((n % 2 ? a : b).again(gpu, own, &err), TA_OK) << err.message;
            }
            a.check(own);
            b.check(own);
            cudaStreamDestroy(own);
        });
    }
    for (std::thread& t : threads) t.join();
    const ta_context_info after = info(gpu);
    EXPECT_GT(after.device_bytes_in_use, 0u);
    EXPECT_GE(after.device_bytes_peak, after.device_bytes_in_use);
    // A context may go while its last call runs.
    ta_error err;
    ASSERT_EQ(twins[5]->again(gpu, stream, &err), TA_OK) << err.message;
    gpu.reset();
    twins[5]->check(stream);
}

}  // namespace
}  // namespace ta::testing
