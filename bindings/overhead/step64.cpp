// bindings/overhead/step64.c in C++.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <turboattention.hpp>

int main() {
    using Clock = std::chrono::steady_clock;
    constexpr int tokens = 64, dim = 64, rounds = 750, steps = 20;
    const auto pool = ta::Context::create({.threads = 1})
                          .create_pool({.layers = 1, .kv_heads = 1, .head_dim = dim, .bits = 8, .budget_bytes = 1 << 20});
    const auto plan = pool.create_plan();
    const auto seq = pool.create_sequence();
    std::vector<float> x(tokens * dim), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 79 % 2003) / 1001 - 1;
    double best = 1e18;
    for (int round = 0; round < rounds; ++round) {
        const auto start = Clock::now();
        for (int i = 0; i < steps; ++i) {
            const ta::View<const float> in(x.data(), tokens, 1, dim);
            auto step = plan.begin(seq, tokens);
            step.append(0, in, in);
            step.attend(0, in, ta::View(out.data(), tokens, 1, dim));
            step.end();
            seq.truncate(0);
        }
        best = std::min(best, std::chrono::duration<double, std::nano>(Clock::now() - start).count() / steps);
    }
    std::printf("%.0f\n", best);
}
