// How long ta_plan_begin takes where it must evict: threads whose sequences need twice the device budget, each begin takes the
// blocks of 64 new tokens. Every sequence's attention is compared, to the bit, with that of a pool that holds all of it.
//
//   bench_begin [--disk] [--seconds S] [threads ...]     default: 3 seconds, 1 4 16 threads
//
// --disk: the host tier is a quarter of what it needs, the rest goes to a disk tier in the folder of temporary files.
#include <turboattention.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/support.h"

namespace ta::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLayers = 8, kHeads = 2, kDim = 64, kGroup = 4, kBlocks = 32, kSequences = 4;  // of a thread
constexpr int64_t kTokens = 64;                                                              // of a step

template <class T>
T sized() {
    T t{};
    t.struct_size = sizeof t;
    return t;
}

ta_tensor rows(const float* data, int64_t tokens, int heads) {
    return ta_tensor_make(const_cast<float*>(data), TA_DTYPE_F32, tokens, heads, kDim);
}

struct Data {
    const size_t row = kHeads * kDim;
    const std::vector<float> k = normal_values(kBlocks * kTokens * row, 1), v = normal_values(kBlocks * kTokens * row, 2),
                             q = normal_values(row * kGroup, 3);

    void append(ta_plan* plan, int block) const {
        ta_error err;
        const size_t at = size_t(block) * kTokens * row;
        const ta_tensor kt = rows(k.data() + at, kTokens, kHeads), vt = rows(v.data() + at, kTokens, kHeads);
        for (uint32_t layer = 0; layer < kLayers; ++layer) check(ta_append(plan, layer, &kt, &vt, &err), err, "append");
    }
    std::vector<float> attend(ta_plan* plan, ta_seq seq) const {
        ta_error err;
        const int32_t none = 0, one = 1;
        std::vector<float> out(q.size());
        check(ta_plan_begin(plan, 1, &seq, &none, &one, nullptr, &err), err, "begin to attend");
        const ta_tensor qt = rows(q.data(), 1, kHeads * kGroup), ot = rows(out.data(), 1, kHeads * kGroup);
        check(ta_attend(plan, kLayers - 1, &qt, &ot, nullptr, nullptr, &err), err, "attend");
        check(ta_plan_abort(plan, &err), err, "abort");
        return out;
    }
};

ta_kv_pool* make_pool(ta_context* context, uint64_t budget, const ta_tier_options* tiers) {
    ta_error err;
    auto o = sized<ta_kv_pool_options>();
    o.layers = kLayers;
    o.kv_heads = kHeads;
    o.head_dim = kDim;
    o.bits = 4;
    o.budget_bytes = budget;
    o.tiers = tiers;
    ta_kv_pool* pool = nullptr;
    check(ta_kv_pool_create(context, &o, &pool, &err), err, "pool");
    return pool;
}

struct Worker {
    std::vector<double> microseconds;  // of each begin
    uint64_t full = 0;                 // begins that failed with TA_E_TIER_FULL
    struct Sequence {
        ta_seq id = 0;
        int blocks = 0;
    } sequences[kSequences];

    void run(ta_kv_pool* pool, const Data& data, Clock::time_point end) {
        ta_error err;
        ta_plan* plan = nullptr;
        check(ta_plan_create(pool, nullptr, &plan, &err), err, "plan");
        for (size_t i = 0; Clock::now() < end; i = (i + 1) % kSequences) {
            Sequence& s = sequences[i];
            if (s.blocks == kBlocks) check(ta_seq_release(pool, s.id, &err), err, "release");
            if (s.blocks % kBlocks == 0) check(ta_seq_create(pool, &s.id, &err), err, "sequence");
            s.blocks %= kBlocks;
            const int32_t n = kTokens, none = 0;
            const auto start = Clock::now();
            const ta_status begun = ta_plan_begin(plan, 1, &s.id, &n, &none, nullptr, &err);
            microseconds.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
            if (begun == TA_E_TIER_FULL) {
                ++full;
                continue;
            }
            check(begun, err, "begin");
            data.append(plan, s.blocks);
            check(ta_plan_end(plan, nullptr, &err), err, "end");
            ++s.blocks;
        }
        ta_plan_destroy(plan);
    }
};

// Attention over 1, 2, ... blocks, all on the device.
std::vector<std::vector<float>> expected(ta_context* context, const Data& data) {
    ta_error err;
    ta_kv_pool* pool = make_pool(context, uint64_t{1} << 30, nullptr);
    ta_plan* plan = nullptr;
    ta_seq seq = 0;
    check(ta_plan_create(pool, nullptr, &plan, &err), err, "plan");
    check(ta_seq_create(pool, &seq, &err), err, "sequence");
    std::vector<std::vector<float>> outs(1);
    for (int block = 0; block < kBlocks; ++block) {
        const int32_t n = kTokens, none = 0;
        check(ta_plan_begin(plan, 1, &seq, &n, &none, nullptr, &err), err, "begin");
        data.append(plan, block);
        check(ta_plan_end(plan, nullptr, &err), err, "end");
        outs.push_back(data.attend(plan, seq));
    }
    ta_plan_destroy(plan);
    ta_kv_pool_destroy(pool);
    return outs;
}

void run(size_t threads, double seconds, bool disk) {
    ta_error err;
    auto co = sized<ta_context_options>();
    co.threads = 1;
    ta_context* context = nullptr;
    check(ta_context_create(&co, &context, &err), err, "context");
    const Data data;
    const auto outs = expected(context, data);
    constexpr uint64_t kBlockBytes = uint64_t{kLayers} * kHeads * kDim * 64 * 2 / 2 * 9 / 8;  // about
    const uint64_t all = threads * kSequences * kBlocks * kBlockBytes / 2;
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = disk ? all / 4 : 4 * all;
    tiers.disk_bytes = disk ? 8 * all : 0;
    tiers.high_percent = 100;  // nothing is demoted in the background
    ta_kv_pool* pool = make_pool(context, all / 2, &tiers);

    std::vector<Worker> workers(threads);
    {
        const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        std::vector<std::jthread> running;
        for (Worker& w : workers) running.emplace_back([&] { w.run(pool, data, end); });
    }
    auto stats = sized<ta_tier_stats>();
    check(ta_kv_pool_get_tier_stats(pool, TA_TIER_DEVICE, &stats, &err), err, "statistics");
    auto moves = sized<ta_move_stats>();
    check(ta_kv_pool_get_move_stats(pool, &moves, &err), err, "statistics");
    ta_plan* plan = nullptr;
    check(ta_plan_create(pool, nullptr, &plan, &err), err, "plan");
    uint64_t wrong = 0, full = 0;
    std::vector<double> times;
    for (const Worker& w : workers) {
        for (const Worker::Sequence& s : w.sequences) {
            const std::vector<float>& want = outs[size_t(s.blocks)];
            wrong += s.blocks > 0 && std::memcmp(data.attend(plan, s.id).data(), want.data(), 4 * want.size()) != 0;
        }
        times.insert(times.end(), w.microseconds.begin(), w.microseconds.end());
        full += w.full;
    }
    ta_plan_destroy(plan);
    ta_kv_pool_destroy(pool);
    ta_context_destroy(context);
    std::sort(times.begin(), times.end());
    const auto at = [&](double part) { return times[size_t(part * double(times.size() - 1))]; };
    std::printf("| %7zu | %7zu | %7llu | %7llu | %6llu | %8.1f | %8.1f | %9.1f | %8.0f | %s |\n", threads, times.size(),
                (unsigned long long)stats.evicted_blocks, (unsigned long long)moves.waits_for_room, (unsigned long long)full,
                at(0.5), at(0.99), at(1.0), double(times.size()) / seconds, wrong == 0 ? "equal" : "WRONG");
    std::fflush(stdout);
    if (wrong > 0) std::exit(1);
}

}  // namespace
}  // namespace ta::bench

int main(int argc, char** argv) {
    CLI::App app{"how long ta_plan_begin takes where it must evict", "bench_begin"};
    bool disk = false;
    double seconds = 3;
    std::vector<size_t> threads = {1, 4, 16};
    app.add_flag("--disk", disk, "the host tier is a quarter of what it needs, the rest goes to a disk tier");
    app.add_option("--seconds", seconds, "of each row")->check(CLI::Range(0.01, 86400.0))->capture_default_str();
    app.add_option("threads", threads, "a row for each of these numbers")->check(CLI::Range(1, 1024))->capture_default_str();
    CLI11_PARSE(app, argc, argv);
    std::printf(
        "| threads | begins  | evicted | waited  | failed | p50 us   | p99 us   | most us   | begins/s | attention |\n"
        "|---|---|---|---|---|---|---|---|---|---|\n");
    for (const size_t n : threads) ta::bench::run(n, seconds, disk);
}
