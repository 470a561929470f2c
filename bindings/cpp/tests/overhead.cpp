// What turboattention.hpp adds to a step of 64 tokens, against the same calls in C. Prints nanoseconds; takes turns, so that both
// see the same machine. usage: hpp_overhead [rounds]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <turboattention.hpp>

namespace {

using Clock = std::chrono::steady_clock;

double median(std::vector<double>& x) {
    std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
    return x[x.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
    const long rounds = argc > 1 ? std::atol(argv[1]) : 2000;
    constexpr int64_t tokens = 64, heads = 1, dim = 64;
    const auto pool = ta::Context::create({.threads = 1})
                          .create_pool({.layers = 1, .kv_heads = heads, .head_dim = dim, .bits = 8, .budget_bytes = 1 << 20});
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    std::vector<float> x(tokens * heads * dim, 0.5f), out(x.size());
    const ta_seq id = seq.id();
    std::vector<double> c, cpp;
    for (long i = 0; i < 2 * rounds; ++i) {
        seq.truncate(0);
        const auto start = Clock::now();
        if (i % 2 == 0) {
            const ta_tensor in = ta_tensor_make(x.data(), TA_DTYPE_F32, tokens, heads, dim);
            const ta_tensor to = ta_tensor_make(out.data(), TA_DTYPE_F32, tokens, heads, dim);
            const int32_t n = tokens;
            ta_error err;
            if (ta_plan_begin(plan.get(), 1, &id, &n, nullptr, &err) != TA_OK ||
                ta_append(plan.get(), 0, &in, &in, &err) != TA_OK ||
                ta_attend(plan.get(), 0, &in, &to, nullptr, nullptr, &err) != TA_OK || ta_plan_end(plan.get(), &err) != TA_OK)
                return 1;
        } else {
            auto step = plan.begin(seq, tokens);
            const ta::View<const float> in(x.data(), tokens, heads, dim);
            step.append(0, in, in);
            step.attend(0, in, ta::View(out.data(), tokens, heads, dim));
            step.end();
        }
        (i % 2 == 0 ? c : cpp).push_back(std::chrono::duration<double, std::nano>(Clock::now() - start).count());
    }
    const double c_ns = median(c), cpp_ns = median(cpp);
    std::printf("step of 64 tokens, 1 layer, 1 head of 64: C %.0f ns, C++ %.0f ns, difference %+.0f ns\n", c_ns, cpp_ns,
                cpp_ns - c_ns);
}
