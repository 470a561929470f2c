// The kernels that attend for DistrAttention, each that runs on this GPU, against float64 attention of queries whose channels stand for
// their groups; and the times of the three launches of a call.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "kernels/cuda/common/generation.h"
#include "kernels/cuda/variants.h"
#include "support/distr.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/device_memory.h"

namespace ta::cuda::testing {

int attend_distr(bool bench);

namespace {

using ta::testing::f16_to_float;
using ta::testing::float_to_f16;
using ta::testing::Random;

struct Shape {
    int n_query, n_keys, d, group_size;
    bool causal;
    int q_heads = 2, kv_heads = 1, window = 0;
};

// Of many, the same few again and again.
std::vector<uint16_t> random_halves(Random& random, int64_t n) {
    std::vector<uint16_t> x;
    for (const float value : random.normals(std::min<int64_t>(n, 1000003))) x.push_back(float_to_f16(value));
    while (int64_t(x.size()) < n) x.push_back(x[x.size() - 1000003]);
    return x;
}

std::vector<float> floats(const std::vector<uint16_t>& halves) {
    std::vector<float> x;
    for (const uint16_t h : halves) x.push_back(f16_to_float(h));
    return x;
}

class Attend {
  public:
    Attend(const Shape& s, Random& random)
        : s_(s),
          q_host_(random_halves(random, int64_t(s.n_query) * s.q_heads * s.d)),
          k_host_(random_halves(random, int64_t(s.n_keys) * s.kv_heads * s.d)),
          v_host_(random_halves(random, int64_t(s.n_keys) * s.kv_heads * s.d)),
          q_(q_host_),
          k_(k_host_),
          v_(v_host_),
          out_(q_host_.size()),
          lse_(size_t(s.n_query) * size_t(s.q_heads)) {
        std::vector<DistrKeys> tiles;
        std::vector<DistrRows> blocks;
        for (int first = 0; first < s.n_keys; first += kDistrKeyTile)
            tiles.push_back({first, std::min(kDistrKeyTile, s.n_keys - first)});
        for (int first = 0; first < s.n_query; first += kDistrRows) blocks.push_back({0, first});
        std::reverse(blocks.begin(), blocks.end());  // the longest first
        const size_t of_keys = tiles.size() * size_t(s.kv_heads), of_rows = blocks.size() * size_t(s.q_heads);
        sequences_ = Device<SequenceArgs>(std::vector<SequenceArgs>{{s.n_keys, s.n_query, 0, 0}});
        tiles_ = Device<DistrKeys>(tiles);
        blocks_ = Device<DistrRows>(blocks);
        k_tiles_ = Device<uint8_t>(of_keys * size_t(distr_tile_bytes(s.d)));
        v_tiles_ = Device<uint8_t>(of_keys * size_t(distr_tile_bytes(s.d)));
        k_unit_ = Device<float>(of_keys), v_log2_ = Device<float>(of_keys);
        order_ = Device<uint8_t>(of_rows * size_t(s.d));
        q_rows_ = Device<uint8_t>(of_rows * size_t(kDistrRows * 2 * distr_stored_groups(s.d, s.group_size)));
        q_unit_ = Device<float>(of_rows * kDistrRows);
        DistrArgs& a = args_;
        a.attend.head_dim = s.d;
        a.attend.kv_heads = s.kv_heads;
        a.attend.group = s.q_heads / s.kv_heads;
        a.attend.batch = 1;
        a.attend.sequences = sequences_.get();
        a.attend.q = {q_.get(), int64_t(s.q_heads) * s.d, s.d, DType::kF16};
        a.attend.out = {out_.get(), int64_t(s.q_heads) * s.d, s.d, DType::kF16};
        a.attend.lse = lse_.get();
        a.attend.scale = float(1.0 / std::sqrt(double(s.d)));
        a.attend.causal = s.causal;
        a.attend.window = s.window;
        a.attend.exp = ExpMode::kExact;
        a.k = {k_.get(), int64_t(s.kv_heads) * s.d, s.d, DType::kF16};
        a.v = {v_.get(), int64_t(s.kv_heads) * s.d, s.d, DType::kF16};
        a.group_size = s.group_size;
        a.n_tiles = int32_t(tiles.size()), a.n_blocks = int32_t(blocks.size());
        a.tiles = tiles_.get(), a.blocks = blocks_.get();
        a.k_tiles = k_tiles_.get(), a.v_tiles = v_tiles_.get(), a.k_unit = k_unit_.get(), a.v_log2 = v_log2_.get();
        a.order = order_.get(), a.q_rows = q_rows_.get(), a.q_unit = q_unit_.get();
    }
    const DistrArgs& args() const { return args_; }
    void prepare() {
        CHECK(launch_distr_keys(args_, nullptr));
        CHECK(launch_distr_rows(args_, nullptr));
    }
    // The relative L2 error; infinite if LSE is off or something was not written.
    double run(const DistrVariant& kernel) {
        const auto [out, lse] = launch(kernel);
        const ta::testing::AttentionShape shape{s_.n_query, s_.n_keys, s_.q_heads, s_.kv_heads, s_.d};
        ta::testing::AttentionRules rules;
        rules.causal = s_.causal;
        rules.window = s_.window;
        const std::vector<float> q = ta::testing::distr_queries(shape, floats(q_host_).data(), s_.group_size);
        return error_of(exact_attention(shape, rules, q.data(), floats(k_host_).data(), floats(v_host_).data()), out, lse);
    }
    // The same of a row of the last block and head of a call with a full mask and as many kv heads.
    double run_last_row(const DistrVariant& kernel) {
        const auto [out, lse] = launch(kernel);
        const int head = s_.q_heads - 1, rows = (s_.n_query - 1) % kDistrRows + 1, first = s_.n_query - rows;
        const auto of_head = [&](const std::vector<uint16_t>& x, int from, int n) {
            std::vector<float> y;
            for (int64_t r = from; r < from + n; ++r) {
                for (int c = 0; c < s_.d; ++c) y.push_back(f16_to_float(x[size_t((r * s_.q_heads + head) * s_.d + c)]));
            }
            return y;
        };
        const ta::testing::AttentionShape block{rows, s_.n_keys, 1, 1, s_.d};
        const std::vector<float> q = ta::testing::distr_queries(block, of_head(q_host_, first, rows).data(), s_.group_size),
                                 k = of_head(k_host_, 0, s_.n_keys), v = of_head(v_host_, 0, s_.n_keys);
        ta::testing::AttentionRules rules;
        rules.causal = false;
        const ta::testing::AttentionShape row{1, s_.n_keys, 1, 1, s_.d};
        return error_of(exact_attention(row, rules, q.data() + (rows - 1) * s_.d, k.data(), v.data()),
                        {out.end() - s_.d, out.end()}, {lse.back()});
    }

  private:
    std::pair<std::vector<uint16_t>, std::vector<float>> launch(const DistrVariant& kernel) {
        out_.poison(), lse_.poison();
        CHECK(kernel.launch(args_, nullptr));
        CHECK(cudaDeviceSynchronize());
        return {out_.copy(), lse_.copy()};
    }
    static double error_of(const ta::testing::Attention& exact, const std::vector<uint16_t>& out,
                           const std::vector<float>& lse) {
        double error = 0.0, norm = 0.0;
        for (size_t i = 0; i < out.size(); ++i) {
            const double x = f16_to_float(out[i]), expected = exact.out[i];
            if (!std::isfinite(x)) return INFINITY;
            error += (x - expected) * (x - expected), norm += expected * expected;
        }
        for (size_t i = 0; i < lse.size(); ++i) {
            const double expected = exact.lse[i];
            if (std::isinf(expected) ? lse[i] != expected : !(std::fabs(lse[i] - expected) < 2e-3)) return INFINITY;
        }
        return norm > 0.0 ? std::sqrt(error / norm) : error;
    }

    Shape s_;
    std::vector<uint16_t> q_host_, k_host_, v_host_;
    Device<uint16_t> q_, k_, v_, out_;
    Device<float> lse_, k_unit_, v_log2_, q_unit_;
    Device<SequenceArgs> sequences_;
    Device<DistrKeys> tiles_;
    Device<DistrRows> blocks_;
    Device<uint8_t> k_tiles_, v_tiles_, order_, q_rows_;
    DistrArgs args_{};
};

// Of the variants, those that run here and take the call.
std::vector<const DistrVariant*> kernels_for(const DistrArgs& args) {
    cudaDeviceProp properties{};
    CHECK(cudaGetDeviceProperties(&properties, 0));
    int generation = 0;
    CHECK(kernel_generation(&generation));
    std::vector<const DistrVariant*> kernels;
    for (const DistrVariant& v : kDistrVariants) {
        if (generation >= v.generation && (v.major == 0 || properties.major == v.major) && !v.refusal(args))
            kernels.push_back(&v);
    }
    return kernels;
}

template <class Call>
double median_us(const Call& call) {
    cudaEvent_t start, stop;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int n = 0; n < 14; ++n) {
        CHECK(cudaEventRecord(start));
        call();
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (n >= 3) times.push_back(ms * 1e3f);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    std::nth_element(times.begin(), times.begin() + 5, times.end());
    return times[5];
}

int bench_kernels() {
    std::printf("%-42s %9s %9s %9s %9s %10s %10s %9s\n", "case", "keys us", "rows us", "grouping", "prepared", "sm90 us",
                "sm80 us", "error");
    Random random(1);
    bool failed = false;
    for (const int d : {128, 64}) {
        for (const int n : {16384, 20480}) {
            for (const int group_size : {2, 4}) {
                const Shape s{n, n, d, group_size, false, 32, 32};
                Attend problem(s, random);
                problem.prepare();
                const double keys = median_us([&] { CHECK(launch_distr_keys(problem.args(), nullptr)); }),
                             rows = median_us([&] { CHECK(launch_distr_rows(problem.args(), nullptr)); });
                double us[2] = {}, worst = 0.0;
                for (const DistrVariant* kernel : kernels_for(problem.args())) {
                    us[kernel->launch == distr::sm80::launch] =
                        median_us([&] { CHECK(kernel->launch(problem.args(), nullptr)); });
                    worst = std::max(worst, problem.run_last_row(*kernel));
                }
                const double total = keys + rows + (us[0] > 0 ? us[0] : us[1]);
                std::printf("d%-3d n%d full h32/32, groups of %-9d %9.1f %9.1f %8.2f%% %8.2f%% %10.1f %10.1f %9.1e\n", d, n,
                            group_size, keys, rows, 100 * rows / total, 100 * (keys + rows) / total, us[0], us[1], worst);
                failed |= !(worst < 2e-3);
            }
        }
    }
    return failed;
}

}  // namespace

int attend_distr(bool bench) {
    if (bench) return bench_kernels();
    Random random(2);
    int cases = 0, failed = 0;
    for (const int d : {32, 64, 128}) {
        for (const int group_size : {2, 3, 4}) {
            const Shape shapes[] = {{140, 300, d, group_size, true},
                                    {129, 140, d, group_size, false, 4, 2},
                                    {200, 170, d, group_size, true, 1, 1, 40}};
            for (const Shape& s : shapes) {
                Attend problem(s, random);
                problem.prepare();
                for (const DistrVariant* kernel : kernels_for(problem.args())) {
                    ++cases;
                    const double error = problem.run(*kernel);
                    if (error < 2e-3) continue;
                    ++failed;
                    std::printf("FAIL %s: d %d, groups of %d, %d x %d, %s, window %d: relative error %g\n",
                                kernel->launch == distr::sm80::launch ? "sm80" : "sm90", d, group_size, s.n_query, s.n_keys,
                                s.causal ? "causal" : "full", s.window, error);
                }
            }
        }
    }
    std::printf("distr_attend: %d cases, %d failed\n", cases, failed);
    return failed != 0;
}

}  // namespace ta::cuda::testing
