// The CUDA decode kernel against attention in float64 over the same pages, its integers against the CPU's bit by bit, and its
// speed.
//
// usage: decode_test [--quick] [--only TEXT] [--path bulk|async]   correctness; a line per case, exits with 1 if one fails
//        decode_test --bench [--bits N, 84: K 8, V 4] [--warps N] [--path bulk|async] [--only SHAPE] [--mass]
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/cpu/attend.h"
#include "kernels/cuda/any/decode/decode.h"
#include "kernels/cuda/any/decode/page.cuh"
#include "kernels/cuda/common/generation.h"
#include "support/data.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/cuda/pages.h"

namespace ta::cuda::testing {
namespace {

using ta::testing::AttentionData;
using ta::testing::AttentionShape;
using ta::testing::DataKind;
using ta::testing::Random;

// -------------------------------------------------------------------------------------------------------------- one case

enum class Mix { kSinkChannelOpen, kToken, kRandom };

struct Sequence {
    int32_t n_keys, n_query;
};

struct Case {
    std::string name;
    int d = 128, kv_heads = 2, group = 4;
    std::vector<Sequence> sequences{{1000, 1}};
    int k_bits = 4, v_bits = 4;  // kCodes and kAny: of heads in turn
    Mix mix = Mix::kSinkChannelOpen;
    DataKind data = DataKind::kNormal;
    bool causal = true, rotate = true, k_offset = false, alibi = false, sinks = false, strided = false;
    int window = 0;
    float softcap = 0.0f;
    ExpMode exp = ExpMode::kExact;
    int p_levels = 65535, q_levels = kStage1Levels;
    bool q_rest = true;
    bool p_running = false;
    int range_pages = kDecodeRangePages;
    DType q_type = DType::kF32, out_type = DType::kF32;
    int warps = 0;
    bool weighed = false;     // cut as long calls are
    int dropped = 0;          // percent of pages
    double tolerance = 1e-4;  // relative L2 of a row
    uint64_t seed = 1;
};

float load(const std::vector<uint8_t>& bytes, DType type, size_t i) {
    if (type == DType::kF32) {
        float x;
        std::memcpy(&x, bytes.data() + 4 * i, 4);
        return x;
    }
    uint16_t h;
    std::memcpy(&h, bytes.data() + 2 * i, 2);
    return type == DType::kF16 ? ta::testing::f16_to_float(h) : ta::testing::bf16_to_float(h);
}
void store(std::vector<uint8_t>& bytes, DType type, size_t i, float x) {
    if (type == DType::kF32) {
        std::memcpy(bytes.data() + 4 * i, &x, 4);
        return;
    }
    const uint16_t h = type == DType::kF16 ? ta::testing::float_to_f16(x) : ta::testing::float_to_bf16(x);
    std::memcpy(bytes.data() + 2 * i, &h, 2);
}

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), pool_(make_shape(c)) {
        Random random(c.seed);
        make_pages(random);
        make_rows(random);
        upload();
    }

    // False with a printed reason when something is wrong.
    bool run(std::vector<uint8_t>* out_bytes, double* worst_o, double* worst_lse) {
        const DecodePlan plan = make_plan();
        Device<uint8_t> workspace(plan.workspace_bytes);
        CHECK(cudaMemset(workspace.get(), 0, plan.zeroed_bytes));
        Device<uint8_t> out(out_elements_ * dtype_bytes(c_.out_type));
        Device<float> lse(size_t(rows_) * size_t(q_heads()));
        args_.out.data = out.get();
        args_.lse = lse.get();
        CHECK(launch_decode(plan, args_, workspace.get(), nullptr));
        CHECK(cudaDeviceSynchronize());
        const std::vector<uint8_t> first = out.copy();
        CHECK(cudaMemset(out.get(), 0xFF, first.size()));
        replay(plan, workspace.get());
        *out_bytes = out.copy();
        if (first != *out_bytes) {
            std::printf("    the replay of a graph differs\n");
            return false;
        }
        const std::vector<uint8_t> left = workspace.copy();
        if (std::any_of(left.begin(), left.begin() + ptrdiff_t(plan.zeroed_bytes), [](uint8_t x) { return x != 0; })) {
            std::printf("    the start of the workspace is not 0\n");
            return false;
        }
        return compare(*out_bytes, lse.copy(), worst_o, worst_lse);
    }

    // The same after run() with the kernels that say what attention pages get: they must write the same results. `worst` is of
    // a page, of what all rows and heads gave.
    bool run_mass(const std::vector<uint8_t>& want_out, double* worst) {
        const DecodePlan plan = make_plan();
        Device<uint8_t> workspace(plan.workspace_bytes);
        CHECK(cudaMemset(workspace.get(), 0, plan.zeroed_bytes));
        Device<uint8_t> out(want_out.size());
        Device<float> lse(size_t(rows_) * size_t(q_heads()));
        args_.out.data = out.get();
        args_.lse = lse.get();
        const Device<float> page_lse(table_.size() * size_t(c_.kv_heads * 4 * plan.tiles));
        const Device<uint64_t> weight(std::vector<uint64_t>(table_.size())), heads(std::vector<uint64_t>(1));
        const DecodeMass mass{page_lse.get(), uint32_t(table_.size()), weight.get(), heads.get()};
        CHECK(launch_decode(plan, args_, workspace.get(), nullptr, &mass));
        CHECK(cudaDeviceSynchronize());
        const std::vector<uint64_t> once = weight.copy();
        bool good = out.copy() == want_out;
        if (!good) std::printf("    with what pages get, results differ\n");
        replay(plan, workspace.get(), &mass);
        const std::vector<uint64_t> twice = weight.copy();
        for (size_t e = 0; e < once.size(); ++e) {
            if (twice[e] == 2 * once[e]) continue;
            std::printf("    entry %zu got %.9g, and %.9g with a replay\n", e, double(once[e]) * kMassUnit,
                        double(twice[e]) * kMassUnit);
            good = false;
            break;
        }
        if (heads.copy()[0] != uint64_t(2 * q_heads())) {
            std::printf("    %llu heads were counted\n", (unsigned long long)heads.copy()[0]);
            good = false;
        }
        return good & compare_shares(once, worst);
    }

  private:
    DecodePlan make_plan() const {
        DecodePlan plan;
        const DecodeShape shape{c_.d, c_.kv_heads, c_.group, int(c_.sequences.size()), max_rows_, c_.warps, c_.q_rest};
        CHECK(plan_decode(0, shape, &plan));
        if (c_.weighed) plan.long_pages = 0;
        return plan;
    }

    static PoolShape make_shape(const Case& c) {
        PoolShape s{c.d, c.kv_heads, {}, {}};
        for (int h = 0; h < c.kv_heads; ++h) {
            s.k_bits.push_back(k_bits_of_head(c.k_bits, h));
            s.v_bits.push_back(v_bits_of_head(c.v_bits, h));
        }
        return s;
    }
    // The same call once more, captured in a graph.
    void replay(const DecodePlan& plan, void* workspace, const DecodeMass* mass = nullptr) const {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        CHECK(launch_decode(plan, args_, workspace, stream, mass));
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(executable));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamDestroy(stream));
    }

    int q_heads() const { return c_.kv_heads * c_.group; }
    size_t q_at(int row, int head) const { return size_t(row) * size_t(stride_row_) + size_t(head) * size_t(stride_head_); }

    void make_pages(Random& random) {
        for (const Sequence& s : c_.sequences) {
            const AttentionShape shape{std::max(s.n_query, 1), s.n_keys, q_heads(), c_.kv_heads, c_.d};
            data_.push_back(ta::testing::make_data(c_.data, shape, random.bits()));
            const AttentionData& data = data_.back();
            const int n_pages = (s.n_keys + kPageTokens - 1) / kPageTokens;
            const size_t token = size_t(c_.kv_heads) * size_t(c_.d);
            for (int n = 0; n < n_pages; ++n) {
                const int tokens = std::min(kPageTokens, s.n_keys - n * kPageTokens);
                bool channel = tokens == kPageTokens && c_.mix != Mix::kToken;
                if (c_.mix == Mix::kSinkChannelOpen && n == 0) channel = false;
                if (c_.mix == Mix::kRandom && random.chance(40)) channel = false;
                const size_t at = size_t(n) * kPageTokens * token;
                if (c_.dropped > 0 && tokens == kPageTokens && random.chance(c_.dropped)) {
                    table_.push_back(kEntryDropped);
                    continue;
                }
                table_.push_back(pool_.add(channel ? PageKind::kChannel : PageKind::kToken, data.k.data() + at,
                                           data.v.data() + at, tokens, random.chance(20)));
            }
            const int32_t padding = int32_t(random.below(3));
            sequences_.push_back({s.n_keys, s.n_query, rows_, int32_t(table_.size()) - n_pages});
            for (int32_t n = 0; n < padding; ++n) table_.push_back(~uint64_t{0});  // entries of nobody
            rows_ += s.n_query;
            max_rows_ = std::max(max_rows_, s.n_query * c_.group);
        }
    }

    void make_rows(Random& random) {
        stride_head_ = c_.d + (c_.strided ? 3 : 0);
        stride_row_ = stride_head_ * q_heads() + (c_.strided ? 5 : 0);
        out_elements_ = size_t(std::max(rows_, 1)) * size_t(stride_row_);
        q_bytes_.assign(out_elements_ * dtype_bytes(c_.q_type), 0xFF);
        for (size_t s = 0; s < sequences_.size(); ++s) {
            for (int t = 0; t < sequences_[s].n_query; ++t) {
                for (int h = 0; h < q_heads(); ++h) {
                    for (int c = 0; c < c_.d; ++c) {
                        store(q_bytes_, c_.q_type, q_at(sequences_[s].row + t, h) + size_t(c),
                              data_[s].q[(size_t(t) * size_t(q_heads()) + size_t(h)) * size_t(c_.d) + size_t(c)]);
                    }
                }
            }
        }
        for (int c = 0; c < c_.d; ++c) signs_.push_back(random.chance(50) ? 1.0f : -1.0f);
        k_offset_ = random.normals(int64_t(c_.kv_heads) * c_.d, 0.1f);
        for (int h = 0; h < q_heads(); ++h) {
            alibi_.push_back(0.01f * float(h + 1));
            sinks_.push_back(2.0f * random.normal());
        }
    }

    void upload() {
        d_pool_ = Device<uint8_t>(pool_.bytes());
        std::vector<uint64_t> table = table_;
        for (uint64_t& e : table) {
            if (e != ~uint64_t{0} && e != kEntryDropped) e += reinterpret_cast<uint64_t>(d_pool_.get());
        }
        std::vector<int32_t> before(sequences_.size() + 1);
        count_pages(sequences_, before.data());
        d_table_ = Device<uint64_t>(table);
        d_sequences_ = Device<SequenceArgs>(sequences_);
        d_before_ = Device<int32_t>(before);
        d_heads_ = Device<HeadArgs>(pool_.heads());
        d_q_ = Device<uint8_t>(q_bytes_);
        d_signs_ = Device<float>(signs_);
        d_k_offset_ = Device<float>(k_offset_);
        d_alibi_ = Device<float>(alibi_);
        d_sinks_ = Device<float>(sinks_);
        AttendArgs& a = args_;
        a = {};
        a.head_dim = c_.d, a.kv_heads = c_.kv_heads, a.group = c_.group, a.batch = int32_t(sequences_.size());
        a.sequences = d_sequences_.get(), a.pages_before = d_before_.get(), a.table = d_table_.get(), a.heads = d_heads_.get();
        a.some_8_bits = has_8_bits(pool_.heads());
        a.token_layer_offset = pool_.token_layer_offset(), a.channel_layer_offset = pool_.channel_layer_offset();
        a.q = {d_q_.get(), stride_row_, stride_head_, c_.q_type};
        a.out = {nullptr, stride_row_, stride_head_, c_.out_type};
        a.signs = c_.rotate && can_rotate(c_.d) ? d_signs_.get() : nullptr;
        a.k_offset = c_.k_offset ? d_k_offset_.get() : nullptr;
        a.q_levels = c_.q_levels;
        a.scale = float(1.0 / std::sqrt(double(c_.d)));
        a.causal = c_.causal, a.window = c_.window, a.softcap = c_.softcap;
        a.alibi_slope = c_.alibi ? d_alibi_.get() : nullptr;
        a.sink = c_.sinks ? d_sinks_.get() : nullptr;
        a.exp = c_.exp, a.p_levels = c_.p_levels, a.p_running = c_.p_running, a.range_pages = c_.range_pages;
        a.may_lack_pages = c_.dropped > 0;
        shares_.assign(table_.size(), 0.0);
    }

    // The row by the CPU reference where the setting makes it differ from exact softmax by design.
    double reference_row(const QueryCodes& q, size_t s, int head, int t, int q_head, double* out) const {
        RowRules rules;
        rules.position = int64_t(sequences_[s].n_keys) - sequences_[s].n_query + t;
        rules.keys = visible_keys(c_.causal, c_.window, sequences_[s].n_keys, int32_t(rules.position));
        rules.softcap = c_.softcap;
        rules.slope = c_.alibi ? alibi_[size_t(q_head)] : 0.0;
        rules.sink = c_.sinks ? &sinks_[size_t(q_head)] : nullptr;
        const int n_pages = (sequences_[s].n_keys + kPageTokens - 1) / kPageTokens;
        double* const shares = compared_ ? nullptr : shares_.data() + sequences_[s].first_entry;
        if (c_.exp == ExpMode::kSas || c_.p_running) return scalar_row(q, s, head, rules, out, shares);
        std::vector<const PageNumbers*> pages;
        for (int n = 0; n < n_pages; ++n) pages.push_back(numbers(s, n, head));
        return exact_row(q, pages, c_.d, rules, out, shares);
    }

    double scalar_row(const QueryCodes& q, size_t s, int head, const RowRules& rules, double* out, double* shares) const {
        std::vector<cpu::PageRef> pages;
        const int n_pages = (sequences_[s].n_keys + kPageTokens - 1) / kPageTokens;
        for (int n = 0; n < n_pages; ++n) {
            const uint64_t entry = table_[size_t(sequences_[s].first_entry + n)];
            pages.push_back({pool_.piece(entry, head), entry & kEntryChannel ? PageKind::kChannel : PageKind::kToken});
        }
        cpu::AttendTask t{};
        const int64_t begin = rules.keys.begin, end = rules.keys.end;
        alignas(64) int8_t code[kMaxHeadDim], rest[kMaxHeadDim];
        std::copy(q.code.begin(), q.code.end(), code);
        std::copy(q.rest.begin(), q.rest.end(), rest);
        RangeSum sum(c_.d);
        std::vector<uint8_t> workspace(cpu::workspace_bytes(c_.d, 1) + 64);
        t.head_dim = c_.d, t.k_bits = pool_.heads()[size_t(head)].k_bits, t.v_bits = pool_.heads()[size_t(head)].v_bits;
        t.pages = pages.data(), t.n_keys = sequences_[s].n_keys, t.rows = 1;
        t.q = code, t.q_rest = c_.q_rest ? rest : nullptr, t.q_scale = &q.scale, t.key_begin = &begin, t.key_end = &end,
        t.position = &rules.position;
        t.exp = c_.exp, t.p_levels = c_.p_levels, t.p_running = c_.p_running;
        t.o = sum.o(), t.m = &sum.m, t.l = &sum.l;
        t.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
        const int64_t first_position = int64_t(sequences_[s].n_keys) - sequences_[s].n_query;
        const int first = visible_keys(c_.causal, c_.window, sequences_[s].n_keys, int32_t(first_position)).begin / kPageTokens;
        for (int n = first; n < n_pages; ++n) {
            if ((n - first) % c_.range_pages == 0) sum.end(), sum.begin();
            t.page_begin = n, t.page_end = n + 1;
            cpu::attend_scalar(t);
            sum.end_page(n);
        }
        sum.end();
        return sum.finish(out, rules.sink, shares);
    }

    const PageNumbers* numbers(size_t s, int n, int head) const {
        const auto key = std::make_tuple(s, n, head);
        const auto found = numbers_.find(key);
        if (found != numbers_.end()) return &found->second;
        const uint64_t entry = table_[size_t(sequences_[s].first_entry + n)];
        if (entry == kEntryDropped) return nullptr;
        const HeadArgs& h = pool_.heads()[size_t(head)];
        return &numbers_
                    .emplace(key, read_piece(pool_.piece(entry, head),
                                             entry & kEntryChannel ? PageKind::kChannel : PageKind::kToken, c_.d, h.k_bits,
                                             h.v_bits, std::min(kPageTokens, sequences_[s].n_keys - n * kPageTokens)))
                    .first->second;
    }

    bool compare(const std::vector<uint8_t>& out, const std::vector<float>& lse, double* worst_o, double* worst_lse) const {
        const float unit = c_.softcap > 0.0f ? args_.scale : args_.scale * cpu_log2e();
        const double tolerance = c_.tolerance + (c_.out_type == DType::kF32 ? 0.0 : c_.out_type == DType::kF16 ? 1e-3 : 6e-3);
        bool good = true;
        std::vector<double> want(size_t(c_.d));
        std::vector<float> q(size_t(c_.d));
        for (size_t s = 0; s < sequences_.size(); ++s) {
            for (int t = 0; t < sequences_[s].n_query; ++t) {
                const int row = sequences_[s].row + t;
                for (int h = 0; h < q_heads(); ++h) {
                    for (int c = 0; c < c_.d; ++c) q[size_t(c)] = load(q_bytes_, c_.q_type, q_at(row, h) + size_t(c));
                    const int head = h / c_.group;
                    const QueryCodes codes =
                        quantize_query(q.data(), c_.d, args_.signs ? signs_.data() : nullptr,
                                       c_.k_offset ? k_offset_.data() + head * c_.d : nullptr, unit, c_.q_levels, c_.q_rest);
                    const double want_lse = reference_row(codes, s, head, t, h, want.data());
                    double error = 0.0, norm = 0.0;
                    for (int c = 0; c < c_.d; ++c) {
                        const double got = load(out, c_.out_type, q_at(row, h) + size_t(c));
                        error += (got - want[size_t(c)]) * (got - want[size_t(c)]);
                        norm += want[size_t(c)] * want[size_t(c)];
                    }
                    const double relative = norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
                    const double got_lse = lse[size_t(row) * size_t(q_heads()) + size_t(h)];
                    const double lse_error = std::isinf(want_lse) ? (got_lse == want_lse ? 0.0 : 1e9)
                                                                  : std::fabs(got_lse - want_lse) / (1.0 + std::fabs(want_lse));
                    *worst_o = std::max(*worst_o, std::isnan(relative) ? 1e9 : relative);
                    *worst_lse = std::max(*worst_lse, std::isnan(lse_error) ? 1e9 : lse_error);
                    if (!(relative <= tolerance) || !(lse_error <= 3e-6)) {
                        if (good) {
                            std::printf(
                                "    sequence %zu (%d keys, %d queries), query %d, head %d: O off by %.3g, LSE %.9g, want "
                                "%.9g\n",
                                s, sequences_[s].n_keys, sequences_[s].n_query, t, h, relative, got_lse, want_lse);
                            for (int c = 0; c < 4; ++c) {
                                std::printf("      channel %d: %.9g, want %.9g\n", c,
                                            double(load(out, c_.out_type, q_at(row, h) + size_t(c))), want[size_t(c)]);
                            }
                        }
                        good = false;
                    }
                }
            }
        }
        compared_ = true;
        return good & gaps_untouched(out);
    }

    // Compares with the shares that compare() found for the pages in all rows and heads.
    bool compare_shares(const std::vector<uint64_t>& weight, double* worst) const {
        constexpr double kTolerance = 2e-5;
        bool good = true;
        for (size_t s = 0; s < sequences_.size(); ++s) {
            const double all = std::max(1, sequences_[s].n_query) * q_heads();
            const size_t end = s + 1 < sequences_.size() ? size_t(sequences_[s + 1].first_entry) : table_.size();
            for (size_t e = size_t(sequences_[s].first_entry); e < end; ++e) {  // entries of nobody are among them
                const double got = double(weight[e]) * double(kMassUnit), error = std::fabs(got - shares_[e]) / all;
                *worst = std::max(*worst, error);
                if (error <= kTolerance) continue;
                if (good)
                    std::printf("    sequence %zu, page %zu got %.9g, want %.9g\n", s, e - size_t(sequences_[s].first_entry),
                                got, shares_[e]);
                good = false;
            }
        }
        return good;
    }

    // Between rows and heads nothing may be written.
    bool gaps_untouched(const std::vector<uint8_t>& out) const {
        std::vector<uint8_t> covered(out.size(), 0);
        const size_t bytes = dtype_bytes(c_.out_type);
        for (const SequenceArgs& s : sequences_) {
            for (int t = 0; t < s.n_query; ++t) {
                for (int h = 0; h < q_heads(); ++h) {
                    std::fill_n(covered.begin() + ptrdiff_t(q_at(s.row + t, h) * bytes), size_t(c_.d) * bytes, 1);
                }
            }
        }
        for (size_t i = 0; i < out.size(); ++i) {
            if (!covered[i] && out[i] != 0xFF) {
                std::printf("    byte %zu of the output was written\n", i);
                return false;
            }
        }
        return true;
    }

    static float cpu_log2e() { return 1.44269504f; }

    Case c_;
    PagePool pool_;
    std::vector<AttentionData> data_;
    std::vector<SequenceArgs> sequences_;
    std::vector<uint64_t> table_;
    mutable std::map<std::tuple<size_t, int, int>, PageNumbers> numbers_;
    mutable std::vector<double> shares_;  // by entry of the table, of the first comparison
    mutable bool compared_ = false;
    int32_t rows_ = 0, max_rows_ = 1;
    int64_t stride_row_ = 0, stride_head_ = 0;
    size_t out_elements_ = 0;
    std::vector<uint8_t> q_bytes_;
    std::vector<float> signs_, k_offset_, alibi_, sinks_;
    Device<uint8_t> d_pool_, d_q_;
    Device<uint64_t> d_table_;
    Device<SequenceArgs> d_sequences_;
    Device<int32_t> d_before_;
    Device<HeadArgs> d_heads_;
    Device<float> d_signs_, d_k_offset_, d_alibi_, d_sinks_;
    AttendArgs args_{};
};

bool run_case(const Case& c) {
    Problem problem(c);
    double o = 0.0, lse = 0.0, mass = 0.0;
    std::vector<uint8_t> out;
    bool good = problem.run(&out, &o, &lse);
    good &= problem.run_mass(out, &mass);
    std::printf("%-4s %-58s O %.2e  LSE %.1e  mass %.1e\n", good ? "ok" : "FAIL", c.name.c_str(), o, lse, mass);
    std::fflush(stdout);
    return good;
}

std::vector<Case> make_cases(bool quick) {
    std::vector<Case> cases;
    const std::vector<Sequence> all_lengths{{0, 1},   {1, 1},   {63, 1},  {64, 1},   {65, 1},
                                            {127, 1}, {128, 1}, {129, 1}, {1000, 1}, {4097, 1}};
    const auto add = [&](std::string name, Case c) {
        c.name = name;
        c.seed = cases.size() + 1;
        cases.push_back(c);
    };
    const auto label = [](const char* what, int a, int b) {
        return std::string(what) + " " + std::to_string(a) + (b >= 0 ? "/" + std::to_string(b) : "");
    };
    for (int d : {64, 96, 128, 256}) {
        const std::string dim = "d" + std::to_string(d) + " ";
        const std::vector<Sequence> ragged{{129, 1}, {0, 1}, {64, 1}, {700, 1}};
        for (const auto& [kb, vb] : {std::pair(4, 4), std::pair(2, 2), std::pair(4, 2), std::pair(2, 4)}) {
            add(dim + label("bits", kb, vb), {.d = d, .sequences = ragged, .k_bits = kb, .v_bits = vb});
        }
        for (const auto& [kb, vb] : {std::pair(8, 4), std::pair(4, 8), std::pair(8, 2), std::pair(2, 8), std::pair(8, 8)}) {
            for (int group : {4, 8, 16}) {
                add(dim + label("bits", kb, vb) + label(", group", group, -1),
                    {.d = d, .group = group, .sequences = ragged, .k_bits = kb, .v_bits = vb, .mix = Mix::kRandom});
            }
        }
        add(dim + "any bits weighed, 9 heads, dropped",
            {.d = d, .kv_heads = 9, .sequences = ragged, .k_bits = kAny, .v_bits = kAny, .weighed = true, .dropped = 30});
        add(dim + "any bits, softcap, 6 heads", {.d = d,
                                                 .kv_heads = 6,
                                                 .sequences = ragged,
                                                 .k_bits = kAny,
                                                 .v_bits = kAny,
                                                 .mix = Mix::kRandom,
                                                 .softcap = 20.0f});
        add(dim + "any bits, queries of 8 bits, 6 heads",
            {.d = d, .kv_heads = 6, .sequences = ragged, .k_bits = kAny, .v_bits = kAny, .mix = Mix::kRandom, .q_rest = false});
        add(dim + "token pages", {.d = d, .sequences = ragged, .mix = Mix::kToken});
        add(dim + "mixed bits, mixed pages, 4 heads",
            {.d = d, .kv_heads = 4, .sequences = ragged, .k_bits = 0, .v_bits = 0, .mix = Mix::kRandom});
        add(dim + "mixed bits weighed, 4 heads",
            {.d = d, .kv_heads = 4, .sequences = ragged, .k_bits = 0, .v_bits = 0, .mix = Mix::kRandom, .weighed = true});
        for (int group : {1, 5, 8, 16}) {
            if (quick && group == 5) continue;
            add(dim + label("group", group, -1) + " mixed",
                {.d = d, .group = group, .sequences = {{200, 1}, {65, 1}}, .k_bits = 0, .v_bits = 0, .mix = Mix::kRandom});
        }
        add(dim + "4 queries x 4, causal", {.d = d, .sequences = {{200, 4}, {3, 4}, {66, 2}}, .mix = Mix::kRandom});
        add(dim + "2 queries x 4, mixed bits", {.d = d, .sequences = {{200, 2}, {1, 2}}, .k_bits = 0, .v_bits = 0});
        add(dim + "1 warp per CTA", {.d = d, .sequences = {{2000, 1}}, .k_bits = 2, .v_bits = 2, .warps = 1});
        for (int group : {4, 8, 16}) {  // the general kernels of 1, 2 and 4 tiles
            add(dim + label("softcap, ALiBi, group", group, -1), {.d = d,
                                                                  .group = group,
                                                                  .sequences = {{200, 1}, {65, 1}},
                                                                  .mix = Mix::kRandom,
                                                                  .alibi = true,
                                                                  .softcap = 20.0f});
            add(dim + label("dropped pages, group", group, -1),
                {.d = d, .group = group, .sequences = ragged, .k_bits = 0, .v_bits = 0, .mix = Mix::kRandom, .dropped = 40});
        }
        add(dim + "most pages dropped, 1 warp per CTA",
            {.d = d, .sequences = {{6000, 1}, {640, 1}, {300, 1}}, .warps = 1, .dropped = 90});
        if (quick) continue;
        add(dim + "all lengths", {.d = d, .sequences = all_lengths});
        add(dim + "all lengths, mixed bits weighed",
            {.d = d, .kv_heads = 3, .sequences = all_lengths, .k_bits = 0, .v_bits = 0, .weighed = true});
        add(dim + "mixed bits weighed, window", {.d = d,
                                                 .kv_heads = 4,
                                                 .sequences = {{5000, 1}, {0, 1}, {300, 2}, {2000, 1}},
                                                 .k_bits = 0,
                                                 .v_bits = 0,
                                                 .window = 1500,
                                                 .weighed = true});
        add(dim + "mixed bits of 36 heads, 40 sequences",
            {.d = d, .kv_heads = 36, .group = 1, .sequences = std::vector<Sequence>(40, {100, 1}), .k_bits = 0, .v_bits = 0});
        add(dim + "mixed bits weighed, 40 sequences", {.d = d,
                                                       .kv_heads = 6,
                                                       .sequences = std::vector<Sequence>(40, {330, 1}),
                                                       .k_bits = 0,
                                                       .v_bits = 0,
                                                       .weighed = true});
        add(dim + "5 whole segments to a CTA",
            {.d = d, .kv_heads = 10, .group = 2, .sequences = std::vector<Sequence>(64, {200, 1})});
        add(dim + "all lengths, mixed pages, 2 bits",
            {.d = d, .kv_heads = 1, .sequences = all_lengths, .k_bits = 2, .v_bits = 2, .mix = Mix::kRandom});
        add(dim + "softcap, ALiBi, sinks, offset, window", {.d = d,
                                                            .sequences = {{300, 4}, {64, 1}},
                                                            .k_offset = true,
                                                            .alibi = true,
                                                            .sinks = true,
                                                            .window = 100,
                                                            .softcap = 20.0f});
        add(dim + "bf16, strided",
            {.d = d, .sequences = ragged, .strided = true, .q_type = DType::kBf16, .out_type = DType::kBf16});
        add(dim + "f16", {.d = d, .sequences = ragged, .q_type = DType::kF16, .out_type = DType::kF16});
    }
    for (DataKind kind : {DataKind::kFlat, DataKind::kSink, DataKind::kPeaky, DataKind::kZeros, DataKind::kConstantChannels,
                          DataKind::kOutliers, DataKind::kDenormal, DataKind::kHuge}) {
        for (int bits : {4, 2}) {
            add(std::string("data: ") + ta::testing::name_of(kind) + label(", bits", bits, -1),
                {.sequences = {{500, 1}, {64, 1}},
                 .k_bits = bits,
                 .v_bits = bits,
                 .data = kind,
                 .rotate = kind != DataKind::kPeaky,
                 .tolerance = kind == DataKind::kOutliers ? 2e-3 : 1e-4});  // a few outliers take up the range of P
        }
    }
    for (int group : {1, 4, 5, 8}) {
        std::vector<Sequence> lengths = all_lengths;
        lengths.pop_back();
        add(label("all short lengths, group", group, -1), {.group = group, .sequences = lengths, .mix = Mix::kRandom});
        add(label("some dropped, window, sinks, group", group, -1),
            {.group = group, .sequences = lengths, .sinks = true, .window = 500, .dropped = 30});
    }
    add("all pages dropped", {.sequences = {{640, 1}, {64, 2}, {70, 1}}, .dropped = 100});
    add("dropped pages, softcap, ALiBi, full mask",
        {.sequences = {{900, 3}, {128, 1}}, .causal = false, .alibi = true, .softcap = 20.0f, .dropped = 50});
    add("softcap", {.sequences = {{300, 1}}, .softcap = 5.0f});
    add("ALiBi", {.sequences = {{300, 2}}, .alibi = true});
    add("sinks", {.sequences = {{300, 1}, {0, 1}}, .sinks = true});
    add("K offset", {.sequences = {{300, 1}}, .k_offset = true});
    add("no rotation, 127 levels", {.sequences = {{300, 1}}, .rotate = false, .q_levels = 127});
    for (int window : {1, 64, 65, 200}) {
        add(label("window", window, -1) + " causal", {.sequences = {{500, 4}, {10, 1}, {1000, 1}}, .window = window});
        add(label("window", window, -1) + " full", {.sequences = {{500, 4}, {10, 1}}, .causal = false, .window = window});
    }
    add("full mask, 4 queries", {.sequences = {{300, 4}, {2, 4}}, .causal = false});
    add("rows that see nothing", {.sequences = {{1, 4}, {2, 3}, {0, 2}}});
    add("P of 8 bits", {.sequences = {{300, 1}}, .p_levels = 255, .tolerance = 2e-2});
    add("P of 7 bits", {.sequences = {{300, 1}}, .p_levels = 119, .tolerance = 4e-2});
    add("P running, one page",
        {.sequences = {{64, 1}, {40, 1}}, .mix = Mix::kRandom, .p_levels = 127, .p_running = true, .tolerance = 2e-3});
    add("SAS, one page", {.sequences = {{64, 1}, {40, 1}}, .mix = Mix::kRandom, .exp = ExpMode::kSas});
    add("SAS and P running, one page", {.sequences = {{64, 1}, {40, 1}},
                                        .mix = Mix::kRandom,
                                        .exp = ExpMode::kSas,
                                        .p_levels = 127,
                                        .p_running = true,
                                        .tolerance = 2e-3});
    const std::vector<Sequence> ranges{{1000, 1}, {5000, 2}, {2500, 4}, {1024, 1}, {1025, 3}, {90, 1}};
    for (const DataKind kind : {DataKind::kNormal, DataKind::kPeaky}) {
        const std::string data = std::string(", ") + ta::testing::name_of(kind);
        add("SAS, ranges" + data, {.sequences = ranges, .mix = Mix::kRandom, .data = kind, .exp = ExpMode::kSas});
        add("P running, ranges" + data,
            {.sequences = ranges, .mix = Mix::kRandom, .data = kind, .p_levels = 127, .p_running = true, .tolerance = 2e-3});
    }
    add("SAS, ranges, window", {.sequences = ranges, .mix = Mix::kRandom, .window = 1500, .exp = ExpMode::kSas});
    add("SAS, ranges of 64 pages, one warp",
        {.sequences = {{9000, 2}, {4097, 1}}, .exp = ExpMode::kSas, .range_pages = kPromptRangePages, .warps = 1});
    add("poly", {.sequences = {{300, 1}}, .exp = ExpMode::kPoly});
    if (quick) return cases;
    add("long", {.kv_heads = 1, .sequences = {{40000, 1}}, .data = DataKind::kFlat});
    std::vector<Sequence> many;
    for (int n = 0; n < 70; ++n) many.push_back({n % 7 == 0 ? 0 : n * 11 % 400, 1 + n % 2});
    add("70 sequences", {.sequences = many, .k_bits = 0, .v_bits = 0});
    add("70 sequences, window", {.sequences = many, .k_bits = 0, .v_bits = 0, .window = 70});
    add("1100 sequences", {.kv_heads = 1, .group = 1, .sequences = std::vector<Sequence>(1100, {70, 1})});
    add("1100 sequences, 1 warp per CTA: many segments to a warp",
        {.kv_heads = 1, .sequences = std::vector<Sequence>(1100, {70, 1}), .k_bits = 2, .warps = 1});
    add("600 sequences, 2 warps per CTA: segments begin and end anywhere",
        {.kv_heads = 3, .sequences = std::vector<Sequence>(600, {200, 1}), .warps = 2});
    return cases;
}

// ------------------------------------------------------------------------------------------------ integers, bit by bit

// By one warp: the stage-1 codes of the rows of sequence 0, words in the order of the channels, and their scales; the scores of
// a piece.
template <int D, int kTiles>
__global__ void score_probe(const __grid_constant__ DecodeParams p, const uint8_t* piece, bool channel, int k_bits, int v_bits,
                            uint32_t* codes, float* scales, int* scores) {
    constexpr int kRows = 4 * kTiles;
    __shared__ WarpMemory<D, kRows> memory;
    const int lane = int(threadIdx.x);
    for (int row = 0; row < kRows; ++row) {
        RowPart<D> signs, part;
        signs.load(p.a.signs, DType::kF32, lane);
        part.load(query_row(p, p.a.sequences[0], 0, row), p.a.q.dtype, lane);
        const QueryRow<D> q = prepare_query<D>(p, part, signs, 0, nullptr, lane);
        store_query<D>(q, row, memory.queries[0], lane);  // with rests, if p asks for them
        for (int j = 0; j < QueryRow<D>::W; ++j) {
            if (lane + 32 * j < D / 4) codes[row * (D / 4) + lane + 32 * j] = q.codes[j];
        }
        if (lane == 0) scales[row] = q.scale;
    }
    __syncwarp();
    const auto scale_all = [&](auto bits, const uint8_t* k_step) {
        for (int n = 0; n < kTiles; ++n) {
            HalfQueries<D, 4> q;
            q.load(memory, 4 * n, lane);
            scale_queries<D, decltype(bits)::value>(k_step, q, memory, 4 * n, lane);
        }
        __syncwarp();
    };
    int s[kTiles][8];
    const uint8_t* k_step = piece + ChannelLayout(D, k_bits, v_bits).k_step();
    if (!channel) {
        token_scores<D>(piece, memory, 0, s, lane);
    } else if (k_bits == 4) {
        scale_all(std::integral_constant<int, 4>(), k_step);
        channel_scores<D, 4>(piece, k_step, memory, 0, s, lane);
    } else {
        scale_all(std::integral_constant<int, 2>(), k_step);
        channel_scores<D, 2>(piece, k_step, memory, 0, s, lane);
    }
    for (int n = 0; n < kTiles; ++n) {
        for (int k = 0; k < 8; ++k) {
            const int shift = !channel ? 0 : k_bits == 4 ? score_shift<4>(k) : score_shift<2>(k);
            const int score = (s[n][k] & ((1 << shift) - 1)) == 0 ? s[n][k] >> shift : INT_MAX;  // else not a multiple
            scores[(4 * n + lane % 4) * kPageTokens + lane / 4 + 8 * k] = score;
        }
    }
}

template <int D>
bool check_integers(DataKind kind, bool rotate) {
    constexpr int kRows = 8;
    int wrong_codes = 0, wrong_scores = 0;
    Random random(uint64_t(D) + uint64_t(kind));
    const AttentionData data = ta::testing::make_data(kind, {1, kPageTokens, kRows, 1, D}, random.bits());
    std::vector<float> signs;
    for (int c = 0; c < D; ++c) signs.push_back(random.chance(50) ? 1.0f : -1.0f);
    const Device<float> q(data.q), d_signs(signs);
    const Device<SequenceArgs> sequence(std::vector<SequenceArgs>{{kPageTokens, 1, 0, 0}});
    DecodeParams p{};
    p.a.head_dim = D, p.a.kv_heads = 1, p.a.group = kRows, p.a.batch = 1;
    p.a.sequences = sequence.get();
    p.a.q = {q.get(), kRows * D, D, DType::kF32};
    p.a.signs = rotate ? d_signs.get() : nullptr;
    p.a.q_levels = kStage1Levels;
    p.q_rest = true;
    p.unit = 0.1f;
    p.group_inverse = (65536 + kRows - 1) / kRows;
    const Device<uint32_t> codes(kRows * D / 4);
    const Device<float> scales(kRows);
    std::vector<QueryCodes> want;
    for (int row = 0; row < kRows; ++row) {
        want.push_back(
            quantize_query(data.q.data() + row * D, D, rotate ? signs.data() : nullptr, nullptr, p.unit, kStage1Levels, true));
    }
    for (int k_bits : {4, 2, 8}) {
        const int v_bits = 4;
        PagePool pool({D, 1, {uint8_t(k_bits == 8 ? 4 : k_bits)}, {uint8_t(v_bits)}});
        const PageKind page_kind = k_bits == 8 ? PageKind::kToken : PageKind::kChannel;
        const uint64_t entry = pool.add(page_kind, data.k.data(), data.v.data(), kPageTokens, true);
        const Device<uint8_t> pages(pool.bytes());
        const Device<int> scores(kRows * kPageTokens);
        score_probe<D, 2><<<1, 32>>>(p, pages.get() + (entry & ~kEntryFlags), k_bits != 8, k_bits, v_bits, codes.get(),
                                     scales.get(), scores.get());
        CHECK(cudaDeviceSynchronize());
        const std::vector<uint32_t> got_words = codes.copy();
        const auto* got_codes = reinterpret_cast<const int8_t*>(got_words.data());
        const std::vector<float> got_scales = scales.copy();
        for (int row = 0; row < kRows; ++row) {
            wrong_codes += got_scales[size_t(row)] != want[size_t(row)].scale;
            for (int c = 0; c < D; ++c) wrong_codes += got_codes[row * D + c] != want[size_t(row)].code[size_t(c)];
        }
        const std::vector<int> got = scores.copy();
        const PageNumbers numbers = read_piece(pool.piece(entry, 0), page_kind, D, k_bits, v_bits, kPageTokens);
        for (int row = 0; row < kRows; ++row) {
            for (int t = 0; t < kPageTokens; ++t) {
                int sum = 0;
                for (int c = 0; c < D; ++c) {
                    const QueryCodes& q = want[size_t(row)];
                    const int code = numbers.k_bytes ? kRestUnits * q.code[size_t(c)] + q.rest[size_t(c)] : q.code[size_t(c)];
                    sum += code * numbers.k[size_t(t * D + c)];
                }
                wrong_scores += sum != got[size_t(row * kPageTokens + t)];
            }
        }
    }
    const bool good = wrong_codes == 0 && wrong_scores == 0;
    std::printf("%-4s d%d integers, %s%s: %d wrong query codes or scales, %d wrong scores\n", good ? "ok" : "FAIL", D,
                ta::testing::name_of(kind), rotate ? ", rotated" : "", wrong_codes, wrong_scores);
    return good;
}

bool check_all_integers() {
    bool good = true;
    for (DataKind kind :
         {DataKind::kNormal, DataKind::kOutliers, DataKind::kPeaky, DataKind::kZeros, DataKind::kConstantChannels}) {
        good &= check_integers<64>(kind, true);
        good &= check_integers<96>(kind, false);
        good &= check_integers<128>(kind, true);
        good &= check_integers<128>(kind, false);
        good &= check_integers<256>(kind, true);
    }
    return good;
}

}  // namespace

int run_bench(int argc, char** argv);  // decode_bench.cu

int run(int argc, char** argv) {
    bool quick = false;
    const char* only = "";
    for (int i = 1; i < argc; ++i) {
        if (!std::strcmp(argv[i], "--bench")) return run_bench(argc, argv);
        if (!std::strcmp(argv[i], "--quick")) quick = true;
        if (!std::strcmp(argv[i], "--only") && i + 1 < argc) only = argv[i + 1];
    }
    int failed = *only ? 0 : !check_all_integers();
    for (const Case& c : make_cases(quick)) {
        if (c.name.find(only) != std::string::npos) failed += !run_case(c);
    }
    std::printf("%d failed\n", failed);
    return failed ? 1 : 0;
}

}  // namespace ta::cuda::testing

int main(int argc, char** argv) {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    return ta::cuda::testing::run(argc, argv);
}
