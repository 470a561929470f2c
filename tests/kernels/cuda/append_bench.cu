// The speed of the CUDA append.
//
// usage: append_bench [TEXT]    the cases whose name has TEXT
#include <cuda_bf16.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "kernels/cuda/any/append/append.h"
#include "kernels/format/rotation.h"
#include "tests/kernels/cuda/device_memory.h"

namespace ta::cuda {
namespace {

using testing::Device;
using testing::Stream;

struct Bench {
    const char* name;
    int d, heads, bits;
    int sequences, have, n_new;
    bool search;
    bool slope = true, k_search = true;
};

float median_us(const AppendPlan& plan, const AppendArgs& a) {
    Stream own;
    const cudaStream_t stream = own.get();
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    constexpr int kLaunches = 10;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kLaunches; ++i) CHECK(launch_append(plan, a, false, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> us;
    for (int i = 0; i < 23; ++i) {
        CHECK(cudaEventRecord(begin, stream));
        CHECK(cudaGraphLaunch(exec, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms = 0.0f;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (i >= 3) us.push_back(ms * 1000.0f / kLaunches);
    }
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
}

double copy_gb_per_s() {
    constexpr size_t kBytes = size_t(1) << 30;
    Device<uint8_t> from(kBytes), to(kBytes);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    float best = 1e9f;
    for (int i = 0; i < 5; ++i) {
        CHECK(cudaEventRecord(begin));
        CHECK(cudaMemcpyAsync(to.get(), from.get(), kBytes, cudaMemcpyDeviceToDevice));
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms = 0.0f;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        best = std::min(best, ms);
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return 2.0 * double(kBytes) / best / 1e6;
}

void bench_one(const Bench& b, double copy) {
    std::mt19937_64 random(7);
    std::normal_distribution<float> normal;
    const int rows = b.sequences * b.n_new;
    const size_t row_elements = size_t(b.heads) * size_t(b.d), elements = size_t(rows) * row_elements;
    std::vector<__nv_bfloat16> values(elements);
    std::vector<__nv_bfloat16> some(1 << 16);
    for (__nv_bfloat16& h : some) h = __float2bfloat16(normal(random));
    for (size_t i = 0; i < elements; ++i) values[i] = some[(i * 7919 + i / 65536) % some.size()];
    Device<__nv_bfloat16> k(values), v(values);
    const size_t token_page = (size_t(b.heads) * TokenLayout(b.d).bytes() + 4095) / 4096 * 4096;
    const size_t piece = ChannelLayout(b.d, b.bits, b.bits).bytes(),
                 channel_page = (size_t(b.heads) * piece + 4095) / 4096 * 4096;
    const int blocks = (b.have + b.n_new + kPageTokens - 1) / kPageTokens;
    Device<uint8_t> tokens(token_page * size_t(b.sequences * blocks) + 4096),
        channels(channel_page * size_t(b.sequences * blocks) + 4096);
    // Tokens that were there already: codes of anything, scales of 1.
    const std::vector<float> ones(2 * kPageTokens, 1.0f);
    const auto align = [](void* p) { return (reinterpret_cast<uint64_t>(p) + 4095) / 4096 * 4096; };
    std::vector<AppendTask> tasks;
    double bytes = 2.0 * 2.0 * double(elements);
    for (int s = 0; s < b.sequences; ++s) {
        for (int n = 0; n < blocks; ++n) {
            AppendTask t{};
            const size_t i = size_t(s * blocks + n);
            t.token_page = align(tokens.get()) + i * token_page;
            t.have = uint8_t(n == 0 ? b.have : 0);
            t.end = uint8_t(std::min(kPageTokens, b.have + b.n_new - n * kPageTokens));
            t.row = s * b.n_new + n * kPageTokens + t.have - b.have;
            t.sequence = s;
            if (t.end == kPageTokens) t.channel_slot = align(channels.get()) + i * channel_page;
            for (int h = 0; h < b.heads; ++h) {
                const uint64_t scales = t.token_page + size_t(h) * TokenLayout(b.d).bytes() + TokenLayout(b.d).k_scale();
                CHECK(cudaMemcpyAsync(reinterpret_cast<void*>(scales), ones.data(), ones.size() * sizeof(float),
                                      cudaMemcpyHostToDevice));
            }
            bytes += b.heads * (double(t.end - t.have) * (2.0 * b.d + 8.0) + (t.channel_slot ? double(piece) : 0.0));
            if (t.channel_slot && t.have) bytes += b.heads * double(TokenLayout(b.d).bytes());
            tasks.push_back(t);
        }
    }
    std::vector<HeadArgs> head_args;
    for (int h = 0; h < b.heads; ++h) head_args.push_back({uint32_t(size_t(h) * piece), uint8_t(b.bits), uint8_t(b.bits), 0});
    std::vector<float> sign(size_t(b.d), 1.0f);
    Device<AppendTask> device_tasks(tasks);
    Device<int32_t> n_tasks(std::vector<int32_t>{int32_t(tasks.size())});
    Device<HeadArgs> heads(head_args);
    Device<float> signs(sign);
    AppendArgs a{};
    a.head_dim = b.d;
    a.kv_heads = b.heads;
    a.tasks = device_tasks.get();
    a.n_tasks = n_tasks.get();
    a.layer.heads = heads.get();
    a.layer.k = {k.get(), int64_t(row_elements), b.d, DType::kBf16};
    a.layer.v = {v.get(), int64_t(row_elements), b.d, DType::kBf16};
    a.signs = can_rotate(b.d) ? signs.get() : nullptr;
    a.k_page_scale = a.v_page_scale = true;
    a.encode = {true, true, b.search, b.search && b.k_search, b.slope};
    AppendPlan plan;
    CHECK(plan_append(0, b.d, b.heads, int64_t(tasks.size()), &plan));
    const double us = median_us(plan, a);
    std::printf(
        "%-24s d %3d heads %d bits %d search %d slope %d K search %d  ctas %4d  %8.2f us  %7.0f GB/s  %5.1f%% of copy\n",
        b.name, b.d, b.heads, b.bits, int(b.search), int(b.slope), int(b.search && b.k_search), plan.ctas, us, bytes / us / 1e3,
        100.0 * bytes / us / 1e3 / copy);
}

void bench(const char* only) {
    const double copy = copy_gb_per_s();
    std::printf("device copy: %.0f GB/s read and written; a launch is one of 10 in a graph\n", copy);
    const Bench all[] = {
        {"decode, none closes", 128, 8, 4, 64, 20, 1, true},
        {"decode, 4 sequences", 128, 8, 4, 4, 20, 1, true},
        {"decode, all close", 128, 8, 4, 64, 63, 1, true},
        {"decode, all close", 128, 8, 4, 64, 63, 1, false},
        {"decode, all close", 128, 8, 2, 64, 63, 1, true},
        {"decode, one closes", 128, 8, 4, 1, 63, 1, true},
        {"decode, one closes", 128, 8, 2, 1, 63, 1, true},
        {"bulk 16384", 128, 8, 4, 1, 0, 16384, true},
        {"bulk 16384", 128, 8, 4, 1, 0, 16384, false},
        {"bulk 16384", 128, 8, 2, 1, 0, 16384, true},
        {"bulk 16384", 128, 8, 2, 1, 0, 16384, false},
        {"bulk 16384", 64, 8, 4, 1, 0, 16384, true},
        {"bulk 16384", 96, 8, 4, 1, 0, 16384, true},
        {"bulk 16384", 256, 8, 4, 1, 0, 16384, true},
        {"bulk 16384", 128, 8, 4, 1, 0, 16384, true, false},
        {"bulk 16384", 128, 8, 2, 1, 0, 16384, true, true, false},
        {"bulk 16384", 128, 8, 2, 1, 0, 16384, true, false, false},
        {"decode, all close", 128, 8, 4, 64, 63, 1, true, false},
        {"decode, all close", 128, 8, 2, 64, 63, 1, true, false, false},
    };
    for (const Bench& b : all) {
        if (std::strstr(b.name, only)) bench_one(b, copy);
    }
}

}  // namespace
}  // namespace ta::cuda

int main(int argc, char** argv) {
    ta::cuda::bench(argc > 1 ? argv[1] : "");
    return 0;
}
