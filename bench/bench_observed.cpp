// The cost of observing attention for TA_EVICT_ATTENTION in decode attention on a CPU: the same pages in the same memory with and
// without, in turns, in time of this thread's CPU. 32 query heads, 8 kv heads, head_dim 128, one thread.
//
//   bench_observed [tokens ...]
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "src/attend/cpu/executor.h"

namespace ta {
namespace {

constexpr int kHeads = 8, kGroup = 4, kDim = 128,
              kLayers = 4;  // layers in turn, so that a call finds nothing in the near caches

double cpu_seconds() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return double(t.tv_sec) + 1e-9 * double(t.tv_nsec);
}

void run(int64_t tokens, int bits) {
    Context::Options options;
    options.threads = 1;
    const std::shared_ptr<Context> context = Context::create(std::move(options)).take();
    const cpu::PageCodec& codec = *context->kernels().codec;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;

    // Pages of normal values: one of each head, at all places.
    const ChannelLayout layout(kDim, bits, bits);
    const size_t page_bytes = layout.bytes() * kHeads, pages = size_t(tokens) / kPageTokens;
    std::vector<uint8_t> model(page_bytes + 128);
    uint8_t* first = model.data() + (128 - reinterpret_cast<uintptr_t>(model.data()) % 128);
    const auto stage1 = std::make_unique<cpu::HeadStage1>();
    for (int head = 0; head < kHeads; ++head) {
        for (int j = 0; j < kPageTokens; ++j) {
            for (int c = 0; c < kDim; ++c) {
                stage1->k[j * kDim + c] = int8_t(std::clamp(normal(random) * 35.0f, -119.0f, 119.0f));
                stage1->v[j * kDim + c] = int8_t(std::clamp(normal(random) * 35.0f, -119.0f, 119.0f));
            }
            stage1->k_scale[j] = stage1->v_scale[j] = 1.0f / 35.0f;
        }
        codec.encode_channel_piece(*stage1, layout, {true, true, true}, first + size_t(head) * layout.bytes());
    }
    const size_t total = page_bytes * pages * kLayers;
    auto* memory = static_cast<uint8_t*>(std::aligned_alloc(4096, (total + 4095) / 4096 * 4096));
    std::vector<StoredPage> bases;
    for (size_t p = 0; p < pages * kLayers; ++p) {
        std::memcpy(memory + p * page_bytes, first, page_bytes);
        bases.push_back({memory + p * page_bytes, PageKind::kChannel});
    }

    const std::vector<uint8_t> head_bits(kHeads, uint8_t(bits));
    std::vector<size_t> offsets;
    for (int head = 0; head < kHeads; ++head) offsets.push_back(size_t(head) * layout.bytes());
    std::vector<float> q(kHeads * kGroup * kDim), out(q.size()), mass(pages);
    for (float& x : q) x = normal(random);
    const auto view = [](std::vector<float>& x) {
        return view_tensor(ta_tensor_make(x.data(), TA_DTYPE_F32, 1, kHeads * kGroup, kDim), "q").value();
    };
    AttendCall call;
    call.head_dim = kDim;
    call.kv_heads = kHeads;
    call.group = kGroup;
    call.k_bits = call.v_bits = head_bits.data();
    call.channel_head_offset = offsets.data();
    call.q = view(q);
    call.out = view(out);
    call.settings = resolve_attend(nullptr, kHeads * kGroup, kDim, ExpMode::kPoly, TA_P_AUTO).value();
    AttendExecutor executor(*context);
    const auto timed = [&](size_t layer, float* observe) {
        const AttendSequence sequence{bases.data() + layer * pages, tokens, 1, 0, nullptr, observe, nullptr, 1};
        call.sequences = {&sequence, 1};
        uint64_t saturated = 0;
        const double start = cpu_seconds();
        if (!executor.run(call, &saturated).ok()) std::abort();
        return cpu_seconds() - start;
    };
    std::vector<double> without, with;
    for (size_t i = 0; i < 20 + 4'000'000 / size_t(tokens); ++i) {
        const size_t layer = i % kLayers;
        if (i / kLayers % 2 == 0) without.push_back(timed(layer, nullptr));
        with.push_back(timed(layer, mass.data()));
        if (i / kLayers % 2 == 1) without.push_back(timed(layer, nullptr));
    }
    const auto quantile = [](std::vector<double> x, double part) {
        std::sort(x.begin(), x.end());
        return x[size_t(part * double(x.size() - 1))];
    };
    std::printf("%lld tokens, %d bits: %.0f us without; observed: %+.2f%% (least), %+.2f%% (lower quarter), %+.2f%% (median)\n",
                (long long)tokens, bits, quantile(without, 0.5) * 1e6, 100 * (quantile(with, 0.0) / quantile(without, 0.0) - 1),
                100 * (quantile(with, 0.25) / quantile(without, 0.25) - 1),
                100 * (quantile(with, 0.5) / quantile(without, 0.5) - 1));
    std::fflush(stdout);
    std::free(memory);
}

}  // namespace
}  // namespace ta

int main(int argc, char** argv) {
    CLI::App app{"what observing attention costs in decode attention on a CPU", "bench_observed"};
    std::vector<int64_t> tokens = {1024, 4096, 32768};
    app.add_option("tokens", tokens, "of the sequence, rounded down to a multiple of 64")
        ->check(CLI::Range(64, 1 << 24))
        ->capture_default_str();
    CLI11_PARSE(app, argc, argv);
    for (const int64_t n : tokens) {
        for (const int bits : {4, 2}) ta::run(n / 64 * 64, bits);
    }
}
