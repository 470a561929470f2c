// The twin walk with two CPU contexts: one thread of the scalar kernels beside two of the best that there are, equal to the
// bit. It keeps the walk of gpu_walk_test.cpp itself in order, also that it finds what is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "abi/twin_walk.h"

namespace ta::testing {
namespace {

class HostPlaced : public Placed {
  public:
    explicit HostPlaced(Tensor& host) : view_(host.view()) {}
    const ta_tensor* view() const override { return view_; }
    void fetch() const override {}

  private:
    const ta_tensor* view_;
};
class HostFloats : public PlacedFloats {
  public:
    explicit HostFloats(std::vector<float>& host) : data_(host.data()) {}
    float* data() const override { return data_; }
    void fetch() const override {}

  private:
    float* data_;
};

// One thread of the scalar kernels.
class ScalarCpu : public Device {
  public:
    const Context& context() const override { return context_; }
    std::unique_ptr<Placed> place(Tensor& host) override { return std::make_unique<HostPlaced>(host); }
    std::unique_ptr<PlacedFloats> place(std::vector<float>& host) override { return std::make_unique<HostFloats>(host); }
    bool is_exact() const override { return true; }

  private:
    Context context_ = make_context(1, TA_CPU_ISA_SCALAR);
};

WalkLimits limits() {
    WalkLimits l;
    l.most_tokens = 1200;
    l.most_products = 2e8;
    l.seconds = 7.0;
    l.budget_bytes = uint64_t{1} << 30;
    return l;
}

TEST(CpuWalk, AgreesWithAnotherCpu) {
    ScalarCpu device;
    const Context cpu = make_context(2);
    const std::string wrong = run_walks(device, cpu, limits());
    EXPECT_TRUE(wrong.empty()) << wrong;
}

// The same with a fault of some kind after each call, judged by the bounds that a GPU has: one row of O off by a fifth or not
// written, all of O by 4%, or one LSE by 0.03.
enum class Fault { kNone, kRow, kHole, kAll, kLse };
class SpoiltCpu : public ScalarCpu {
  public:
    SpoiltCpu(Fault fault, bool as_prefill) : fault_(fault), as_prefill_(as_prefill) {}
    bool is_exact() const override { return false; }
    bool has_prefill_kernel() const override { return as_prefill_; }
    bool stands_in() const override { return as_prefill_; }
    void spoil(Tensor& out, std::vector<float>& lse) override {
        const ta_tensor shape = *out.view();
        const int64_t rows = shape.tokens * shape.heads, chosen = random_.below(rows);
        for (int64_t row = 0; row < rows; ++row) {
            if (fault_ == Fault::kNone || fault_ == Fault::kLse || (fault_ != Fault::kAll && row != chosen)) continue;
            const float factor = fault_ == Fault::kRow ? 1.2f : 1.04f;
            for (int64_t c = 0; c < shape.head_dim; ++c) {
                const int64_t token = row / shape.heads, head = row % shape.heads;
                out.set(token, head, c, fault_ == Fault::kHole ? Tensor::kPoison : out.get(token, head, c) * factor);
            }
        }
        if (fault_ == Fault::kLse) lse[size_t(chosen)] += 0.03f;
    }

  private:
    const Fault fault_;
    const bool as_prefill_;
    Random random_{1};
};

TEST(CpuWalk, FindsWhatIsWrong) {
    const Context cpu = make_context(2);
    WalkLimits small = limits();
    small.most_tokens = 400;
    small.most_products = 2e7;
    for (const bool as_prefill : {false, true}) {
        for (const Fault fault : {Fault::kNone, Fault::kRow, Fault::kHole, Fault::kAll, Fault::kLse}) {
            SCOPED_TRACE("fault " + std::to_string(int(fault)) + (as_prefill ? ", prefill" : ""));
            bool found = false;
            for (uint64_t seed = 1; seed <= 3 && !found; ++seed) {
                SpoiltCpu device(fault, as_prefill);
                const std::string wrong = run_walk(device, cpu, small, seed);
                found = !wrong.empty();
                if (fault == Fault::kNone) {
                    EXPECT_EQ(wrong, "");
                }
            }
            EXPECT_EQ(found, fault != Fault::kNone);
        }
    }
}

}  // namespace
}  // namespace ta::testing
