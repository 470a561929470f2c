// Timing of the CUDA decode kernel: random page order, cold L2, medians, the error beside each time. Pages are copies of a few
// that the codec made, so that the exact result is cheap to know.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cuda/any/decode/decode.h"
#include "kernels/format/rotation.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/pages.h"

namespace ta::cuda::testing {
namespace {

using ta::testing::Random;

constexpr double kReadBandwidth = 4.55e12;  // of an H200, measured
constexpr int kTemplates = 16, kRuns = 25, kBackToBack = 16;

struct Shape {
    const char* name;
    int batch, q_heads, kv_heads, n, d, n_query;
    double goal[3];  // us at 4, 2 and 8 bits; 0: none
};
constexpr Shape kShapes[] = {
    {"b16 h32/8 n8192", 16, 32, 8, 8192, 128, 1, {44, 0, 0}},
    {"b16 h32/8 n32768", 16, 32, 8, 32768, 128, 1, {141, 84, 249}},
    {"b1 h32/8 n131072", 1, 32, 8, 131072, 128, 1, {45, 0, 0}},
    {"b64 h32/8 n4096", 64, 32, 8, 4096, 128, 1, {78, 0, 0}},
    {"b64 h40/10 n1024", 64, 40, 10, 1024, 128, 1, {32.5, 0, 0}},
    {"b8 h32/32 n8192", 8, 32, 32, 8192, 128, 1, {74, 0, 0}},
    {"b16 h64/8 n8192", 16, 64, 8, 8192, 128, 1, {0, 0, 0}},
    {"b16 h32/8 n8192 4 queries", 16, 32, 8, 8192, 128, 4, {0, 0, 0}},
    {"b16 h32/8 n8192 d64", 16, 32, 8, 8192, 64, 1, {0, 0, 0}},
    {"b16 h32/8 n8192 d96", 16, 32, 8, 8192, 96, 1, {0, 0, 0}},
    {"b16 h16/4 n8192 d256", 16, 16, 4, 8192, 256, 1, {0, 0, 0}},
    {"b1 h32/8 n8192", 1, 32, 8, 8192, 128, 1, {0, 0, 0}},
};

__global__ void fill_slots(const uint4* templates, uint4* slots, int64_t words_per_slot, int64_t n_slots) {
    for (int64_t slot = blockIdx.x; slot < n_slots; slot += gridDim.x) {
        for (int64_t i = threadIdx.x; i < words_per_slot; i += blockDim.x) {
            slots[slot * words_per_slot + i] = templates[slot % kTemplates * words_per_slot + i];
        }
    }
}
// Replaces what the L2 cache holds, without leaving lines that must be written back.
__global__ void read_all(const uint4* p, int64_t n, uint32_t* sink) {
    uint32_t sum = 0;
    for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        const uint4 x = p[i];
        sum += x.x ^ x.y ^ x.z ^ x.w;
    }
    if (sum == 0x12345678u) *sink = sum;
}

template <class T>
T* device_copy(const std::vector<T>& v) {
    T* p;
    CHECK(cudaMalloc(&p, v.size() * sizeof(T)));
    CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}

struct Options {
    int warps = 0;
    std::string only;
    std::vector<int> bits{4, 2, 8};
    bool mass = false;
};

double median(std::vector<float> t) {
    std::sort(t.begin(), t.end());
    return t[t.size() / 2];
}

// `bits`: of K and V, or as two digits of each; 8: token pages.
void bench(const Shape& s, int bits, double goal, const Options& options) {
    const int group = s.q_heads / s.kv_heads, n_pages = s.n / kPageTokens;
    Random random(uint64_t(s.n + bits));
    const int k_bits = bits == 8 ? 4 : bits > 9 ? bits / 10 : bits, v_bits = bits == 8 ? 4 : bits % 10;
    PagePool pool({s.d, s.kv_heads, std::vector<uint8_t>(size_t(s.kv_heads), uint8_t(k_bits)),
                   std::vector<uint8_t>(size_t(s.kv_heads), uint8_t(v_bits))});
    const PageKind kind = bits == 8 ? PageKind::kToken : PageKind::kChannel;
    std::vector<uint64_t> entries;
    for (int t = 0; t < kTemplates; ++t) {
        const int64_t values = int64_t(kPageTokens) * s.kv_heads * s.d;
        const std::vector<float> k = random.normals(values), v = random.normals(values);
        entries.push_back(pool.add(kind, k.data(), v.data(), kPageTokens, false));
    }
    const int64_t slot = int64_t(pool.slot_bytes(kind)), n_slots = int64_t(s.batch) * n_pages;
    uint8_t *templates = device_copy(pool.bytes()), *slots, *flush;
    constexpr int64_t kFlushBytes = 256 << 20;
    uint32_t* sink;
    CHECK(cudaMalloc(&slots, size_t(slot * n_slots)));
    CHECK(cudaMalloc(&flush, kFlushBytes));
    CHECK(cudaMalloc(&sink, 4));
    CHECK(cudaMemset(flush, 0, kFlushBytes));
    fill_slots<<<1024, 256>>>(reinterpret_cast<uint4*>(templates), reinterpret_cast<uint4*>(slots), slot / 16, n_slots);

    std::vector<int64_t> order(size_t(n_slots), 0);
    std::iota(order.begin(), order.end(), int64_t{0});
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[size_t(random.below(int64_t(i)))]);
    std::vector<uint64_t> table;
    for (int64_t o : order) {
        table.push_back(reinterpret_cast<uint64_t>(slots) + uint64_t(o * slot) +
                        (kind == PageKind::kChannel ? kEntryChannel : 0));
    }
    std::vector<SequenceArgs> sequences;
    for (int b = 0; b < s.batch; ++b) sequences.push_back({s.n, s.n_query, b * s.n_query, b * n_pages});
    std::vector<int32_t> before(size_t(s.batch) + 1);
    count_pages(sequences, before.data());
    std::vector<float> signs;
    for (int c = 0; c < s.d; ++c) signs.push_back(random.chance(50) ? 1.0f : -1.0f);
    const int64_t rows = int64_t(s.batch) * s.n_query, q_values = rows * s.q_heads * s.d;
    std::vector<uint16_t> q;
    for (int64_t i = 0; i < q_values; ++i) q.push_back(ta::testing::float_to_bf16(random.normal()));

    AttendArgs a{};
    a.head_dim = s.d, a.kv_heads = s.kv_heads, a.group = group, a.batch = s.batch;
    a.sequences = device_copy(sequences), a.pages_before = device_copy(before), a.table = device_copy(table);
    a.heads = device_copy(pool.heads());
    a.some_8_bits = has_8_bits(pool.heads());
    a.token_layer_offset = pool.token_layer_offset(), a.channel_layer_offset = pool.channel_layer_offset();
    uint16_t* d_q = device_copy(q);
    float* d_out;
    CHECK(cudaMalloc(&d_out, size_t(q_values) * sizeof(float)));
    a.q = {d_q, int64_t(s.q_heads) * s.d, s.d, DType::kBf16};
    a.out = {d_out, int64_t(s.q_heads) * s.d, s.d, DType::kF32};
    a.signs = can_rotate(s.d) ? device_copy(signs) : nullptr;
    a.q_levels = kStage1Levels;
    a.scale = float(1.0 / std::sqrt(double(s.d)));
    a.causal = true, a.exp = ExpMode::kPoly, a.p_levels = 65535;

    DecodePlan plan;
    CHECK(plan_decode(0, {s.d, s.kv_heads, group, s.batch, s.n_query * group, options.warps, true}, &plan));
    void* workspace;
    CHECK(cudaMalloc(&workspace, plan.workspace_bytes));
    CHECK(cudaMemset(workspace, 0, plan.zeroed_bytes));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    std::vector<cudaEvent_t> events(2 * kRuns + 2);
    for (cudaEvent_t& e : events) CHECK(cudaEventCreate(&e));
    CHECK(cudaDeviceSynchronize());
    // With what pages get, in turns with the others.
    DecodeMass mass{nullptr, uint32_t(n_slots), nullptr, nullptr};
    std::vector<cudaEvent_t> mass_events(options.mass ? 2 * kRuns + 2 : 0);
    for (cudaEvent_t& e : mass_events) CHECK(cudaEventCreate(&e));
    if (options.mass) {
        CHECK(cudaMalloc(&mass.page_lse, size_t(n_slots) * size_t(s.kv_heads * 4 * plan.tiles) * sizeof(float)));
        CHECK(cudaMalloc(&mass.weight, size_t(n_slots + 1) * sizeof(uint64_t)));
        CHECK(cudaMemset(mass.weight, 0, size_t(n_slots + 1) * sizeof(uint64_t)));
        mass.heads = mass.weight + n_slots;
        CHECK(cudaDeviceSynchronize());
        for (int i = 0; i < 3; ++i) CHECK(launch_decode(plan, a, workspace, stream, &mass));
    }
    for (int i = 0; i < 3; ++i) CHECK(launch_decode(plan, a, workspace, stream));
    for (int i = 0; i < kRuns; ++i) {
        if (options.mass) {
            read_all<<<1024, 256, 0, stream>>>(reinterpret_cast<uint4*>(flush), kFlushBytes / 16, sink);
            CHECK(cudaEventRecord(mass_events[size_t(2 * i)], stream));
            CHECK(launch_decode(plan, a, workspace, stream, &mass));
            CHECK(cudaEventRecord(mass_events[size_t(2 * i + 1)], stream));
        }
        read_all<<<1024, 256, 0, stream>>>(reinterpret_cast<uint4*>(flush), kFlushBytes / 16, sink);
        CHECK(cudaEventRecord(events[size_t(2 * i)], stream));
        CHECK(launch_decode(plan, a, workspace, stream));
        CHECK(cudaEventRecord(events[size_t(2 * i + 1)], stream));
    }
    CHECK(cudaEventRecord(events[2 * kRuns], stream));
    for (int i = 0; i < kBackToBack; ++i) CHECK(launch_decode(plan, a, workspace, stream));
    CHECK(cudaEventRecord(events[2 * kRuns + 1], stream));
    if (options.mass) {
        CHECK(cudaEventRecord(mass_events[2 * kRuns], stream));
        for (int i = 0; i < kBackToBack; ++i) CHECK(launch_decode(plan, a, workspace, stream, &mass));
        CHECK(cudaEventRecord(mass_events[2 * kRuns + 1], stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    std::vector<float> times, mass_times;
    for (int i = 0; i < kRuns; ++i) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, events[size_t(2 * i)], events[size_t(2 * i + 1)]));
        times.push_back(ms * 1000.0f);
    }
    float together;
    CHECK(cudaEventElapsedTime(&together, events[2 * kRuns], events[2 * kRuns + 1]));
    for (int i = 0; i < kRuns && options.mass; ++i) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, mass_events[size_t(2 * i)], mass_events[size_t(2 * i + 1)]));
        mass_times.push_back(ms * 1000.0f);
    }

    // The first row of the first sequence and the last row of the last.
    std::vector<float> out(static_cast<size_t>(q_values));
    CHECK(cudaMemcpy(out.data(), d_out, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
    double worst = 0.0;
    for (const int64_t row : {int64_t{0}, rows - 1}) {
        const int q_head = row == 0 ? 0 : s.q_heads - 1, head = q_head / group;
        std::vector<PageNumbers> numbers;
        for (uint64_t e : entries) {
            numbers.push_back(read_piece(pool.piece(e, head), kind, s.d, pool.heads()[size_t(head)].k_bits,
                                         pool.heads()[size_t(head)].v_bits, kPageTokens));
        }
        std::vector<const PageNumbers*> pages;
        const int64_t first = row / s.n_query * n_pages;
        for (int64_t n = 0; n < n_pages; ++n) pages.push_back(&numbers[size_t(order[size_t(first + n)] % kTemplates)]);
        std::vector<float> x;
        const size_t at = (size_t(row) * size_t(s.q_heads) + size_t(q_head)) * size_t(s.d);
        for (int c = 0; c < s.d; ++c) x.push_back(ta::testing::bf16_to_float(q[at + size_t(c)]));
        const QueryCodes codes = quantize_query(x.data(), s.d, a.signs ? signs.data() : nullptr, nullptr, a.scale * 1.44269504f,
                                                kStage1Levels, true);
        RowRules rules;
        rules.keys = visible_keys(true, 0, s.n, s.n - s.n_query + int32_t(row % s.n_query));
        std::vector<double> want(size_t(s.d));
        exact_row(codes, pages, s.d, rules, want.data());
        double error = 0.0, norm = 0.0;
        for (int c = 0; c < s.d; ++c) {
            error += std::pow(double(out[at + size_t(c)]) - want[size_t(c)], 2);
            norm += std::pow(want[size_t(c)], 2);
        }
        worst = std::max(worst, std::sqrt(error / norm));
    }
    const double piece = bits == 8 ? double(TokenLayout(s.d).bytes()) : double(pool.largest_channel_piece());
    const double bytes = piece * double(n_slots) * s.kv_heads, t = median(times), b2b = double(together) * 1000.0 / kBackToBack;
    std::printf("%-27s INT%d %8.1f us %6.0f GB/s %5.1f%%  b2b %8.1f us %5.1f%%  min %7.1f  goal %6.1f %-4s error %.1e  W%d\n",
                s.name, bits, t, bytes / t * 1e-3, 100.0 * bytes / t * 1e6 / kReadBandwidth, b2b,
                100.0 * bytes / b2b * 1e6 / kReadBandwidth, double(*std::min_element(times.begin(), times.end())), goal,
                goal == 0.0 ? ""
                : t <= goal ? "met"
                            : "MISS",
                worst, plan.warps);
    if (options.mass) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, mass_events[2 * kRuns], mass_events[2 * kRuns + 1]));
        const double with = median(mass_times), with_b2b = double(ms) * 1000.0 / kBackToBack;
        std::vector<uint64_t> weight(static_cast<size_t>(n_slots + 1));
        CHECK(cudaMemcpy(weight.data(), mass.weight, weight.size() * sizeof(uint64_t), cudaMemcpyDeviceToHost));
        double sum = 0.0;
        for (int64_t i = 0; i < n_slots; ++i) sum += double(weight[size_t(i)]) * double(kMassUnit);
        const double all = double(weight.back()) * double(s.batch) * s.n_query;
        std::printf("%-27s with mass %8.1f us (%+.1f%%)  b2b %8.1f us (%+.1f%%)  sum of weights off by %.1e\n", "", with,
                    100.0 * (with / t - 1.0), with_b2b, 100.0 * (with_b2b / b2b - 1.0), std::fabs(sum / all - 1.0));
        CHECK(cudaFree(mass.page_lse));
        CHECK(cudaFree(mass.weight));
        for (cudaEvent_t e : mass_events) CHECK(cudaEventDestroy(e));
    }
    std::fflush(stdout);
    for (void* p : {static_cast<void*>(templates), static_cast<void*>(slots), static_cast<void*>(flush),
                    static_cast<void*>(sink), static_cast<void*>(d_q), static_cast<void*>(d_out), workspace}) {
        CHECK(cudaFree(p));
    }
    for (cudaEvent_t e : events) CHECK(cudaEventDestroy(e));
    CHECK(cudaStreamDestroy(stream));
}

}  // namespace

int run_bench(int argc, char** argv) {
    Options options;
    for (int i = 2; i < argc; ++i) {
        if (!std::strcmp(argv[i], "--mass")) options.mass = true;
        if (i + 1 == argc) break;
        if (!std::strcmp(argv[i], "--warps")) options.warps = std::atoi(argv[i + 1]);
        if (!std::strcmp(argv[i], "--only")) options.only = argv[i + 1];
        if (!std::strcmp(argv[i], "--bits")) options.bits = {std::atoi(argv[i + 1])};
    }
    for (const Shape& s : kShapes) {
        if (!options.only.empty() && options.only != s.name) continue;
        for (int bits : options.bits) bench(s, bits, s.goal[bits == 4 ? 0 : bits == 2 ? 1 : 2], options);
    }
    return 0;
}

}  // namespace ta::cuda::testing
