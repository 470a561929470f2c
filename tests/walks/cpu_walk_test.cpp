// The twin walk with two CPU contexts: two threads of the best kernels that there are beside one of the scalar ones, equal to the
// bit. It also shows that the walk of gpu_walk_test.cpp finds what is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "walks/twin_walk.h"

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

class BestCpu : public Device {
  public:
    const Context& context() const override { return context_; }
    std::unique_ptr<Placed> place(Tensor& host) override { return std::make_unique<HostPlaced>(host); }
    std::unique_ptr<PlacedFloats> place(std::vector<float>& host) override { return std::make_unique<HostFloats>(host); }
    KernelOf kernel_of() const override {
        return [](const RowsOfHead&) { return Kernel::kCpu; };
    }
    bool is_exact() const override { return true; }

  private:
    Context context_ = make_context(2);
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
    BestCpu device;
    const Context cpu = make_recorded_context(TA_CPU_ISA_SCALAR);
    const std::string wrong = run_walks(device, cpu, limits());
    EXPECT_TRUE(wrong.empty()) << wrong;
}

// The same with a fault of some kind after each call: one row of O off or not written, all of O off, or one LSE. Where a CPU's P is
// as fine as the prefill kernel's, it is judged as that kernel; the faults are then larger.
enum class Fault { kNone, kRow, kHole, kAll, kLse };
class SpoiltCpu : public BestCpu {
  public:
    SpoiltCpu(Fault fault, bool as_prefill) : fault_(fault), as_prefill_(as_prefill) {}
    bool is_exact() const override { return false; }
    KernelOf kernel_of() const override {
        if (!as_prefill_) return BestCpu::kernel_of();
        return [](const RowsOfHead& rows) {
            return rows.p_levels >= 255 && !rows.p_running ? Kernel::kHopperPrefill : Kernel::kCpu;
        };
    }
    void spoil(Tensor& out, std::vector<float>& lse) override {
        const ta_tensor shape = *out.view();
        const int64_t rows = shape.tokens * shape.heads, chosen = random_.below(rows);
        for (int64_t row = 0; row < rows; ++row) {
            if (fault_ == Fault::kNone || fault_ == Fault::kLse || (fault_ != Fault::kAll && row != chosen)) continue;
            const float off = fault_ == Fault::kRow ? 0.2f : 0.04f, factor = 1.0f + (as_prefill_ ? off : off / 100);
            for (int64_t c = 0; c < shape.head_dim; ++c) {
                const int64_t token = row / shape.heads, head = row % shape.heads;
                out.set(token, head, c, fault_ == Fault::kHole ? Tensor::kPoison : out.get(token, head, c) * factor);
            }
        }
        if (fault_ == Fault::kLse) lse[size_t(chosen)] += as_prefill_ ? 0.03f : 3e-4f;
    }

  private:
    const Fault fault_;
    const bool as_prefill_;
    Random random_{1};
};

TEST(CpuWalk, FindsWhatIsWrong) {
    const Context cpu = make_recorded_context(TA_CPU_ISA_SCALAR);
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
