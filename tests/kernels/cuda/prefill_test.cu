// The CUDA prefill kernel against attention in float64 over the same pages, next to the CPU kernel's error on them, and its
// speed.
//
// usage: prefill_test [--quick] [--only TEXT]    correctness; prints a line per case, exits with 1 if one fails
//        prefill_test --bench [--only TEXT]      times, L2 flushed
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/sm90/prefill/prefill.h"
#include "kernels/cuda/sm90/prefill/query.cuh"
#include "src/attend/stage1.h"
#include "support/data.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/cuda/pages.h"

namespace ta::cuda::testing {
namespace {

using ta::testing::AttentionData;
using ta::testing::AttentionShape;
using ta::testing::DataKind;
using ta::testing::Random;

void check(cudaError_t e, const char* what) {
    if (e == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
    std::exit(2);
}
#define CHECK(x) check(x, #x)

// Device memory of its own, so that compute-sanitizer sees accesses beyond it. Poisoned.
template <class T>
class Device {
  public:
    explicit Device(size_t n = 0) : n_(n) {
        CHECK(cudaMalloc(&p_, std::max<size_t>(1, n) * sizeof(T)));
        poison();
    }
    explicit Device(const std::vector<T>& v) : Device(v.size()) {
        CHECK(cudaMemcpy(p_, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device&) = delete;
    Device& operator=(Device&& o) noexcept {
        std::swap(p_, o.p_);
        std::swap(n_, o.n_);
        return *this;
    }
    ~Device() { cudaFree(p_); }
    void poison() { CHECK(cudaMemset(p_, 0xFF, std::max<size_t>(1, n_) * sizeof(T))); }
    T* get() const { return p_; }
    std::vector<T> copy() const {
        std::vector<T> v(n_);
        CHECK(cudaMemcpy(v.data(), p_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }

  private:
    T* p_ = nullptr;
    size_t n_ = 0;
};

int multiprocessors() {
    int n = 0;
    CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
    return n;
}

// -------------------------------------------------------------------------------------------------------------- one case

enum class Pages {
    kToken,          // 8 bits, one scale per page
    kTokenOwnScale,  // 8 bits, a scale per token
    kPrefix,         // channel pages below the chunk but for the first page, then kToken
    kChannel,        // channel pages wherever a page is full, the first too
    kRandom,
};

struct Sequence {
    int32_t n_keys, n_query;
};

struct Case {
    std::string name;
    std::vector<Sequence> sequences{{1000, 1000}};
    Pages pages = Pages::kToken;
    int d = 128, kv_heads = 2, group = 4;
    int k_bits = 4, v_bits = 4;  // of even heads; 0: mixed
    DataKind data = DataKind::kNormal;
    bool causal = true, rotate = true, k_offset = false, alibi = false, sinks = false, strided = false;
    int window = 0;
    float softcap = 0.0f, q_factor = 1.0f;
    ExpMode exp = ExpMode::kPoly;
    DType q_type = DType::kF32, out_type = DType::kF32;
    double lse_tolerance = 0.01;
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

// Writes all heads of a token page again, with one scale for K and one for V.
void give_page_scales(PagePool& pool, uint64_t entry, const float* k, const float* v, int tokens) {
    const cpu::PageCodec& codec = *cpu::find_kernels(TA_CPU_ISA_AUTO)->codec;
    const size_t d = size_t(pool.shape().head_dim), heads = size_t(pool.shape().kv_heads);
    const auto in = std::make_unique<cpu::HeadStage1>();
    std::vector<float> x(kPageTokens * d), amax(kPageTokens);
    for (size_t h = 0; h < heads; ++h) {
        for (const bool is_k : {true, false}) {
            for (size_t t = 0; t < size_t(tokens); ++t) {
                std::memcpy(x.data() + t * d, (is_k ? k : v) + (t * heads + h) * d, d * sizeof(float));
                amax[t] = codec.amax(x.data() + t * d, int64_t(d));
            }
            quantize_tokens(codec, x.data(), amax.data(), int(d), 0, tokens, ScaleRule::kPage, 0.0f, kStage1Levels,
                            is_k ? in->k : in->v, is_k ? in->k_scale : in->v_scale);
        }
        codec.store_token_piece(*in, int(d), 0, tokens, const_cast<uint8_t*>(pool.piece(entry, int(h))));
    }
}

constexpr double kTimesCpu = 1.6, kBeyondCpu = 2e-3, kSasError = 0.02;  // bounds: times the CPU's error, plus this

struct Errors {
    double o = 0.0, cpu_o = 0.0, norm = 0.0;  // sums of squares
    double lse = 0.0, cpu_lse = 0.0;          // largest
};

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), pool_(make_shape(c)) {
        Random random(c.seed);
        make_pages(random);
        make_rows(random);
        upload();
    }

    bool run(int rows_to_check, Errors* errors) {
        const int ctas = multiprocessors();
        std::vector<uint8_t> schedule(prefill_schedule_bytes(count_prefill_tiles(sequences_, c_.group)));
        plan_prefill(sequences_, c_.group, c_.causal, c_.window, schedule.data());
        Device<uint8_t> d_schedule(schedule), out(out_elements_ * cpu::dtype_bytes(c_.out_type));
        Device<float> lse(size_t(rows_) * size_t(q_heads()));
        args_.out.data = out.get();
        args_.lse = lse.get();
        std::vector<uint8_t> first;
        for (int n = 0; n < 2; ++n) {
            out.poison();
            lse.poison();
            CHECK(launch_prefill(args_, d_schedule.get(), ctas, nullptr));
            CHECK(cudaDeviceSynchronize());
            if (n == 0) first = out.copy();
        }
        const std::vector<uint8_t> got = out.copy();
        if (first != got) {
            std::printf("    two runs differ\n");
            return false;
        }
        return compare(got, lse.copy(), rows_to_check, errors);
    }

  private:
    static PoolShape make_shape(const Case& c) {
        PoolShape s{c.d, c.kv_heads, {}, {}};
        for (int h = 0; h < c.kv_heads; ++h) {
            s.k_bits.push_back(uint8_t(c.k_bits ? c.k_bits : h % 2 ? 2 : 4));
            s.v_bits.push_back(uint8_t(c.v_bits ? c.v_bits : h / 2 % 2 ? 4 : 2));
        }
        return s;
    }
    int q_heads() const { return c_.kv_heads * c_.group; }
    size_t q_at(int row, int head) const { return size_t(row) * size_t(stride_row_) + size_t(head) * size_t(stride_head_); }

    bool is_channel(const Sequence& s, int n, int tokens, Random& random) const {
        if (tokens < kPageTokens) return false;
        switch (c_.pages) {
            case Pages::kPrefix:
                return n > 0 && (n + 1) * kPageTokens <= s.n_keys - s.n_query;
            case Pages::kChannel:
                return true;
            case Pages::kRandom:
                return random.chance(60);
            default:
                return false;
        }
    }

    void make_pages(Random& random) {
        for (const Sequence& s : c_.sequences) {
            const AttentionShape shape{std::max(s.n_query, 1), s.n_keys, q_heads(), c_.kv_heads, c_.d};
            data_.push_back(ta::testing::make_data(c_.data, shape, random.bits()));
            const AttentionData& data = data_.back();
            const int n_pages = (s.n_keys + kPageTokens - 1) / kPageTokens;
            const size_t token = size_t(c_.kv_heads) * size_t(c_.d);
            for (int n = 0; n < n_pages; ++n) {
                const int tokens = std::min(kPageTokens, s.n_keys - n * kPageTokens);
                const bool channel = is_channel(s, n, tokens, random);
                const float *k = data.k.data() + size_t(n) * kPageTokens * token,
                            *v = data.v.data() + size_t(n) * kPageTokens * token;
                table_.push_back(pool_.add(channel ? PageKind::kChannel : PageKind::kToken, k, v, tokens, random.chance(20)));
                if (!channel && c_.pages != Pages::kTokenOwnScale && !(c_.pages == Pages::kRandom && random.chance(50)))
                    give_page_scales(pool_, table_.back(), k, v, tokens);
            }
            const int32_t padding = int32_t(random.below(3));
            sequences_.push_back({s.n_keys, s.n_query, rows_, int32_t(table_.size()) - n_pages});
            for (int32_t n = 0; n < padding; ++n) table_.push_back(~uint64_t{0});  // entries of nobody
            rows_ += s.n_query;
        }
    }

    void make_rows(Random& random) {
        stride_head_ = c_.d + (c_.strided ? 3 : 0);
        stride_row_ = stride_head_ * q_heads() + (c_.strided ? 5 : 0);
        out_elements_ = size_t(std::max(rows_, 1)) * size_t(stride_row_);
        q_bytes_.assign(out_elements_ * cpu::dtype_bytes(c_.q_type), 0xFF);
        for (size_t s = 0; s < sequences_.size(); ++s) {
            for (int t = 0; t < sequences_[s].n_query; ++t) {
                for (int h = 0; h < q_heads(); ++h) {
                    for (int c = 0; c < c_.d; ++c) {
                        store(q_bytes_, c_.q_type, q_at(sequences_[s].row + t, h) + size_t(c),
                              c_.q_factor * data_[s].q[(size_t(t) * size_t(q_heads()) + size_t(h)) * size_t(c_.d) + size_t(c)]);
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
            if (e != ~uint64_t{0}) e += reinterpret_cast<uint64_t>(d_pool_.get());
        }
        d_table_ = Device<uint64_t>(table);
        d_heads_ = Device<HeadArgs>(pool_.heads());
        d_q_ = Device<uint8_t>(q_bytes_);
        d_signs_ = Device<float>(signs_);
        d_k_offset_ = Device<float>(k_offset_);
        d_alibi_ = Device<float>(alibi_);
        d_sinks_ = Device<float>(sinks_);
        AttendArgs& a = args_;
        a = {};
        a.head_dim = c_.d, a.kv_heads = c_.kv_heads, a.group = c_.group, a.batch = int32_t(sequences_.size());
        a.table = d_table_.get();
        a.heads = c_.pages == Pages::kToken || c_.pages == Pages::kTokenOwnScale ? nullptr : d_heads_.get();
        a.token_layer_offset = pool_.token_layer_offset(), a.channel_layer_offset = pool_.channel_layer_offset();
        a.q = {d_q_.get(), stride_row_, stride_head_, c_.q_type};
        a.out = {nullptr, stride_row_, stride_head_, c_.out_type};
        a.signs = c_.rotate && can_rotate(c_.d) ? d_signs_.get() : nullptr;
        a.k_offset = c_.k_offset ? d_k_offset_.get() : nullptr;
        a.q_levels = kStage1Levels;
        a.scale = float(1.0 / std::sqrt(double(c_.d)));
        a.causal = c_.causal, a.window = c_.window, a.softcap = c_.softcap;
        a.alibi_slope = c_.alibi ? d_alibi_.get() : nullptr;
        a.sink = c_.sinks ? d_sinks_.get() : nullptr;
        a.exp = c_.exp, a.p_levels = 255;
    }

    // A row by the CPU's kernel with the same P of 8 bits.
    double cpu_row(const QueryCodes& q, size_t s, int head, const RowRules& rules, double* out) const {
        constexpr float kLog2eF = 1.44269504f;
        std::vector<cpu::PageRef> pages;
        const int n_pages = (sequences_[s].n_keys + kPageTokens - 1) / kPageTokens;
        for (int n = 0; n < n_pages; ++n) {
            const uint64_t entry = table_[size_t(sequences_[s].first_entry + n)];
            pages.push_back({pool_.piece(entry, head), entry & kEntryChannel ? PageKind::kChannel : PageKind::kToken});
        }
        cpu::AttendTask t{};
        const int64_t begin = rules.keys.begin, end = rules.keys.end;
        alignas(64) float o[kMaxHeadDim] = {};
        alignas(64) int8_t code[kMaxHeadDim];
        std::copy(q.code.begin(), q.code.end(), code);
        float m = -std::numeric_limits<float>::infinity(), l = 0.0f;
        const float slope = float(rules.slope) * kLog2eF;
        std::vector<uint8_t> workspace(cpu::workspace_bytes(c_.d, 1) + 64);
        t.head_dim = c_.d, t.k_bits = pool_.heads()[size_t(head)].k_bits, t.v_bits = pool_.heads()[size_t(head)].v_bits;
        t.pages = pages.data(), t.page_end = n_pages, t.n_keys = sequences_[s].n_keys, t.rows = 1;
        t.q = code, t.q_scale = &q.scale, t.key_begin = &begin, t.key_end = &end, t.position = &rules.position;
        t.bias = &q.bias;
        if (c_.alibi) t.slope = &slope;
        if (c_.softcap > 0.0f) t.softcap_log2 = c_.softcap * kLog2eF, t.softcap_inv = 1.0f / c_.softcap;
        t.exp = c_.exp, t.p_levels = 255;
        t.o = o, t.m = &m, t.l = &l;
        t.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
        cpu::attend_scalar(t);
        if (rules.sink) l += std::exp2(*rules.sink * kLog2eF - m);
        for (int c = 0; c < c_.d; ++c) out[c] = l > 0.0f ? double(o[c]) / double(l) : 0.0;
        return (double(m) + std::log2(double(l))) * std::log(2.0);
    }

    const PageNumbers& numbers(size_t s, int n, int head) const {
        const auto key = std::make_tuple(s, n, head);
        const auto found = numbers_.find(key);
        if (found != numbers_.end()) return found->second;
        const uint64_t entry = table_[size_t(sequences_[s].first_entry + n)];
        const HeadArgs& h = pool_.heads()[size_t(head)];
        return numbers_
            .emplace(key, read_piece(pool_.piece(entry, head), entry & kEntryChannel ? PageKind::kChannel : PageKind::kToken,
                                     c_.d, h.k_bits, h.v_bits, std::min(kPageTokens, sequences_[s].n_keys - n * kPageTokens)))
            .first->second;
    }

    bool compare(const std::vector<uint8_t>& out, const std::vector<float>& lse, int rows_to_check, Errors* e) const {
        const float unit = c_.softcap > 0.0f ? args_.scale : args_.scale * 1.44269504f;
        std::vector<double> want(size_t(c_.d)), cpu(size_t(c_.d));
        std::vector<float> q(size_t(c_.d));
        // Every value must be written and be a number; some rows are compared, a fixed stride apart.
        for (int row = 0; row < rows_; ++row) {
            for (int h = 0; h < q_heads(); ++h) {
                for (int c = 0; c < c_.d; ++c) {
                    if (std::isfinite(load(out, c_.out_type, q_at(row, h) + size_t(c)))) continue;
                    std::printf("    row %d, head %d, channel %d is not a number\n", row, h, c);
                    return false;
                }
            }
        }
        const int64_t all = int64_t(rows_) * q_heads(), stride = std::max<int64_t>(1, all / rows_to_check) | 1;
        int64_t next = 0, at = 0;
        for (size_t s = 0; s < sequences_.size(); ++s) {
            for (int t = 0; t < sequences_[s].n_query; ++t) {
                for (int h = 0; h < q_heads(); ++h, ++at) {
                    const bool last = t == sequences_[s].n_query - 1 && h == q_heads() - 1;
                    if (at < next && !last) continue;
                    next = at + stride;
                    const int row = sequences_[s].row + t, head = h / c_.group;
                    for (int c = 0; c < c_.d; ++c) q[size_t(c)] = load(q_bytes_, c_.q_type, q_at(row, h) + size_t(c));
                    const QueryCodes codes =
                        quantize_query(q.data(), c_.d, args_.signs ? signs_.data() : nullptr,
                                       c_.k_offset ? k_offset_.data() + head * c_.d : nullptr, unit, kStage1Levels);
                    RowRules rules;
                    rules.position = int64_t(sequences_[s].n_keys) - sequences_[s].n_query + t;
                    rules.keys = visible_keys(c_.causal, c_.window, sequences_[s].n_keys, int32_t(rules.position));
                    rules.softcap = c_.softcap;
                    rules.slope = c_.alibi ? alibi_[size_t(h)] : 0.0;
                    rules.sink = c_.sinks ? &sinks_[size_t(h)] : nullptr;
                    const int n_pages = (sequences_[s].n_keys + kPageTokens - 1) / kPageTokens;
                    std::vector<const PageNumbers*> pages;
                    for (int n = 0; n < n_pages; ++n) pages.push_back(&numbers(s, n, head));
                    double want_lse = exact_row(codes, pages, c_.d, rules, want.data());
                    const double cpu_lse = cpu_row(codes, s, head, rules, cpu.data());
                    if (c_.exp == ExpMode::kSas) want = cpu, want_lse = cpu_lse;  // wrong by design
                    double error = 0.0, norm = 0.0;
                    for (int c = 0; c < c_.d; ++c) {
                        const double got = load(out, c_.out_type, q_at(row, h) + size_t(c));
                        error += (got - want[size_t(c)]) * (got - want[size_t(c)]);
                        e->cpu_o += (cpu[size_t(c)] - want[size_t(c)]) * (cpu[size_t(c)] - want[size_t(c)]);
                        norm += want[size_t(c)] * want[size_t(c)];
                    }
                    e->o += error;
                    e->norm += norm;
                    const double got_lse = lse[size_t(row) * size_t(q_heads()) + size_t(h)];
                    const double lse_error = got_lse == want_lse ? 0.0 : std::fabs(got_lse - want_lse);
                    e->lse = std::max(e->lse, std::isnan(lse_error) ? 1e9 : lse_error);
                    if (cpu_lse != want_lse) e->cpu_lse = std::max(e->cpu_lse, std::fabs(cpu_lse - want_lse));
                    if (error > 0.25 * norm + 1e-30 || !(lse_error <= c_.lse_tolerance)) {
                        std::printf(
                            "    sequence %zu (%d keys, %d queries), query %d, head %d: O off by %.3g, LSE %.9g, want %.9g\n",
                            s, sequences_[s].n_keys, sequences_[s].n_query, t, h, std::sqrt(error / norm), got_lse, want_lse);
                        return false;
                    }
                }
            }
        }
        // Over the rows that are looked at, relative L2. The CPU has a unit of P for every page, this kernel one for two of
        // them, and scores on a grid of 1/112 octave. SAS is compared with the CPU's SAS, which then has no error of its own to
        // go by.
        const double bound = c_.exp == ExpMode::kSas ? kSasError * std::sqrt(e->norm)
                                                     : kTimesCpu * std::sqrt(e->cpu_o) + kBeyondCpu * std::sqrt(e->norm);
        return std::sqrt(e->o) <= bound;
    }

    Case c_;
    PagePool pool_;
    std::vector<AttentionData> data_;
    std::vector<uint64_t> table_;
    std::vector<SequenceArgs> sequences_;
    int32_t rows_ = 0;
    int64_t stride_row_ = 0, stride_head_ = 0;
    size_t out_elements_ = 0;
    std::vector<uint8_t> q_bytes_;
    std::vector<float> signs_, k_offset_, alibi_, sinks_;
    Device<uint8_t> d_pool_, d_q_;
    Device<uint64_t> d_table_;
    Device<HeadArgs> d_heads_;
    Device<float> d_signs_, d_k_offset_, d_alibi_, d_sinks_;
    AttendArgs args_{};
    mutable std::map<std::tuple<size_t, int, int>, PageNumbers> numbers_;
};

std::vector<Case> all_cases(bool quick) {
    std::vector<Case> cases;
    const auto add = [&](std::string name, auto change) {
        Case c;
        c.name = std::move(name);
        change(c);
        c.seed = cases.size() + 1;
        cases.push_back(c);
    };
    for (int n : quick ? std::vector<int>{1, 65, 300} : std::vector<int>{1, 63, 64, 65, 127, 128, 129, 1000, 4097}) {
        for (const bool causal : {false, true}) {
            add("n" + std::to_string(n) + (causal ? " causal" : " full"), [&](Case& c) {
                c.sequences = {{n, n}};
                c.causal = causal;
            });
        }
    }
    for (int group : {1, 5, 8}) {
        add("group " + std::to_string(group), [&](Case& c) {
            c.sequences = {{333, 200}};
            c.group = group;
        });
    }
    for (int n : {47, 48, 49, 96, 97}) {  // 192 rows are 48 tokens of a group of 4
        add("tiles, " + std::to_string(n) + " queries", [&](Case& c) { c.sequences = {{n + 200, n}, {n, n}}; });
    }
    add("tiles, 191 ... 193 rows", [](Case& c) { c.sequences = {{300, 191}, {300, 192}, {300, 193}}, c.group = 1; });
    add("V outlier in a sink's shadow", [](Case& c) {
        c.sequences = {{1500, 300}}, c.data = DataKind::kOutliers, c.causal = false;
    });
    add("ragged", [](Case& c) { c.sequences = {{700, 700}, {1, 1}, {65, 3}, {512, 130}, {64, 64}, {40, 0}, {900, 33}}; });
    add("token scales", [](Case& c) { c.sequences = {{600, 300}, {77, 77}}, c.pages = Pages::kTokenOwnScale; });
    for (const auto& [kb, vb] : {std::pair{4, 4}, {2, 2}, {4, 2}, {0, 0}}) {
        const std::string bits = "k" + std::to_string(kb) + "v" + std::to_string(vb);
        add("prefix " + bits, [&](Case& c) {
            c.sequences = {{1100, 300}, {2048, 100}};
            c.pages = Pages::kPrefix, c.k_bits = kb, c.v_bits = vb, c.kv_heads = kb ? 2 : 4;
        });
        add("channel pages, sink, " + bits, [&](Case& c) {
            c.sequences = {{1000, 200}};
            c.pages = Pages::kChannel, c.k_bits = kb, c.v_bits = vb, c.data = DataKind::kSink, c.kv_heads = kb ? 2 : 4;
        });
    }
    add("random pages", [](Case& c) { c.sequences = {{1500, 400}, {130, 130}}, c.pages = Pages::kRandom; });
    for (const DataKind data : {DataKind::kFlat, DataKind::kSink, DataKind::kPeaky, DataKind::kZeros,
                                DataKind::kConstantChannels, DataKind::kOutliers, DataKind::kDenormal, DataKind::kHuge}) {
        add(std::string("data ") + ta::testing::name_of(data), [&](Case& c) {
            c.sequences = {{800, 300}};
            c.data = data;
        });
    }
    add("logits of hundreds", [](Case& c) { c.sequences = {{800, 300}}, c.q_factor = 100.0f; });
    add("logits of thousands", [](Case& c) { c.sequences = {{800, 300}}, c.q_factor = 2000.0f, c.lse_tolerance = 1.0; });
    add("window", [](Case& c) { c.sequences = {{1500, 700}}, c.window = 200; });
    add("window, full", [](Case& c) { c.sequences = {{1500, 1500}}, c.window = 150, c.causal = false; });
    add("softcap, k offset", [](Case& c) { c.sequences = {{500, 300}}, c.softcap = 5.0f, c.k_offset = true; });
    add("k offset, sinks", [](Case& c) { c.sequences = {{500, 300}}, c.sinks = true, c.k_offset = true; });
    add("alibi", [](Case& c) { c.sequences = {{500, 300}}, c.alibi = true; });
    add("more queries than keys", [](Case& c) { c.sequences = {{100, 300}}; });
    add("no keys", [](Case& c) { c.sequences = {{0, 70}, {100, 100}, {0, 5}, {0, 200}}; });
    add("more queries than keys, sinks", [](Case& c) { c.sequences = {{100, 300}}, c.sinks = true; });
    add("f16, strided, unrotated", [](Case& c) {
        c.sequences = {{500, 300}}, c.strided = true, c.rotate = false, c.q_type = DType::kF16, c.out_type = DType::kBf16;
    });
    add("bf16", [](Case& c) { c.sequences = {{500, 300}}, c.q_type = DType::kBf16, c.out_type = DType::kF16; });
    add("exact", [](Case& c) { c.sequences = {{500, 300}}, c.exp = ExpMode::kExact; });
    add("sas", [](Case& c) { c.sequences = {{500, 300}}, c.exp = ExpMode::kSas; });
    add("d64", [](Case& c) { c.sequences = {{700, 500}}, c.d = 64; });
    add("d64 prefix", [](Case& c) {
        c.sequences = {{1100, 300}}, c.d = 64, c.pages = Pages::kPrefix, c.k_bits = c.v_bits = 0;
    });
    add("d64 full", [](Case& c) { c.sequences = {{700, 500}}, c.d = 64, c.causal = false; });
    return cases;
}

// ------------------------------------------------------------------------------------------------------------- stage 1

__global__ void quantize_kernel(const __grid_constant__ AttendArgs args, prefill::Tile tile, uint8_t* codes, float* scales) {
    constexpr int kD = 128;
    __shared__ alignas(1024) uint8_t q[16 * kD];
    __shared__ uint4 masks[kD / 8];
    __shared__ prefill::RowInfo info[16];
    const int lane = int(threadIdx.x);
    if (lane < kD / 8) masks[lane] = prefill::sign_mask(args.signs, lane);
    __syncwarp();
    prefill::start_rows<kD>(args, tile, lane / 4, lane, masks, q, info + lane / 4);
    for (int row = 0; row < 16; ++row) {
        for (int c = lane; c < kD; c += 32)
            codes[row * kD + c] = q[row * kD + sm90::swizzled_chunk<kD>(row, prefill::k_chunk(c / 16)) * 16 + c % 16];
        scales[row] = info[row].scale;
    }
}

// The codes of queries: where a value lies half way between two of them, either will do.
bool stage1_agrees(DType type) {
    constexpr int kRows = 16, kD = 128;
    Random random(7);
    std::vector<float> q = random.normals(kRows * kD, 1.0f), signs;
    for (int c = 0; c < kD; ++c) signs.push_back(random.chance(50) ? 1.0f : -1.0f);
    for (int c = 0; c < kD; c += 17) q[size_t(c)] *= 1000.0f;
    for (int c = 0; c < kD; ++c) q[size_t(kD + c)] = 0.0f;
    std::vector<uint8_t> bytes(q.size() * cpu::dtype_bytes(type));
    for (size_t n = 0; n < q.size(); ++n) {
        store(bytes, type, n, q[n]);
        q[n] = load(bytes, type, n);
    }
    Device<uint8_t> d_q(bytes), codes(kRows * kD);
    Device<float> d_signs(signs), scales(kRows);
    AttendArgs a{};
    a.head_dim = kD, a.kv_heads = a.group = a.batch = 1, a.q = {d_q.get(), kD, kD, type};
    a.signs = d_signs.get(), a.q_levels = kStage1Levels, a.scale = 0.1f;
    prefill::Tile tile{};
    tile.rows.n_query = kRows;
    quantize_kernel<<<1, 32>>>(a, tile, codes.get(), scales.get());
    CHECK(cudaDeviceSynchronize());
    const std::vector<uint8_t> got = codes.copy();
    const std::vector<float> got_scales = scales.copy();
    int differ = 0;
    for (int row = 0; row < kRows; ++row) {
        const QueryCodes want =
            quantize_query(q.data() + row * kD, kD, signs.data(), nullptr, a.scale * 1.44269504f, kStage1Levels);
        if (std::fabs(want.scale - got_scales[size_t(row)]) > 1e-6f * want.scale) return false;
        for (int c = 0; c < kD; ++c) {
            const int off = std::abs(int(want.code[size_t(c)]) - int(int8_t(got[size_t(row * kD + c)])));
            if (off > 1) return false;
            differ += off;
        }
    }
    return differ <= 2;
}

int test(bool quick, const std::string& only) {
    int failed = 0;
    for (const auto& [type, name] : {std::pair{DType::kF32, "f32"}, {DType::kF16, "f16"}, {DType::kBf16, "bf16"}}) {
        const bool agrees = stage1_agrees(type);
        std::printf("stage 1 of queries, %-14s %s\n", name, agrees ? "ok" : "FAILED");
        failed += !agrees;
    }
    std::printf("%-34s %9s %9s %9s %9s\n", "case", "O", "CPU's O", "LSE", "CPU's LSE");
    for (const Case& c : all_cases(quick)) {
        if (c.name.find(only) == std::string::npos) continue;
        AttendArgs probe{};
        probe.head_dim = c.d, probe.p_levels = 255;
        if (const char* why = prefill_refusal(probe)) {
            std::printf("%-34s refused: %s\n", c.name.c_str(), why);
            continue;
        }
        Problem problem(c);
        Errors e;
        const bool good = problem.run(quick ? 12 : 48, &e);
        const double norm = std::max(e.norm, 1e-300);
        std::printf("%-34s %9.2e %9.2e %9.2e %9.2e %s\n", c.name.c_str(), std::sqrt(e.o / norm), std::sqrt(e.cpu_o / norm),
                    e.lse, e.cpu_lse, good ? "ok" : "FAILED");
        std::fflush(stdout);
        failed += !good;
    }
    std::printf(failed ? "%d FAILED\n" : "all ok\n", failed);
    return failed ? 1 : 0;
}

// --------------------------------------------------------------------------------------------------------------- speed

struct Shape {
    const char* name;
    int batch, n_keys, n_query;
    bool causal;
    Pages pages;
    int bits;
    int d = 128;
};

// Pages repeat after kDistinct; addresses do not.
class Bench {
  public:
    explicit Bench(const Shape& s)
        : s_(s),
          pool_({s.d, kKvHeads, std::vector<uint8_t>(kKvHeads, uint8_t(s.bits)),
                 std::vector<uint8_t>(kKvHeads, uint8_t(s.bits))}) {
        constexpr int kDistinct = 16;
        Random random(1);
        const size_t page = size_t(kPageTokens) * kKvHeads * size_t(s.d);
        std::vector<float> k = random.normals(int64_t(page) * kDistinct, 1.0f),
                           v = random.normals(int64_t(page) * kDistinct, 1.0f);
        const int pages = (s.n_keys + 63) / 64, cached = s.pages == Pages::kPrefix ? (s.n_keys - s.n_query) / 64 : 0;
        std::vector<uint64_t> models[2];
        for (int n = 0; n < kDistinct; ++n) {
            const float *pk = k.data() + n * page, *pv = v.data() + n * page;
            models[0].push_back(pool_.add(PageKind::kToken, pk, pv, 64, false));
            if (s.pages != Pages::kTokenOwnScale) give_page_scales(pool_, models[0].back(), pk, pv, 64);
            if (cached) models[1].push_back(pool_.add(PageKind::kChannel, pk, pv, 64, false));
        }
        std::vector<uint8_t> bytes;
        std::vector<uint64_t> table;
        std::vector<SequenceArgs> sequences;
        for (int b = 0; b < s.batch; ++b) {
            sequences.push_back({s.n_keys, s.n_query, b * s.n_query, int32_t(table.size())});
            for (int n = 0; n < pages; ++n) {
                const bool channel = n > 0 && n < cached;
                const uint64_t from = models[channel][size_t(n % kDistinct)];
                const size_t size = pool_.slot_bytes(channel ? PageKind::kChannel : PageKind::kToken);
                table.push_back(bytes.size() | (from & kEntryFlags));
                const auto* slot = pool_.bytes().data() + (from & ~kEntryFlags);
                bytes.insert(bytes.end(), slot, slot + size);
            }
        }
        d_pool_ = Device<uint8_t>(bytes);
        for (uint64_t& e : table) e += reinterpret_cast<uint64_t>(d_pool_.get());
        d_table_ = Device<uint64_t>(table);
        d_heads_ = Device<HeadArgs>(pool_.heads());
        const size_t row = size_t(kKvHeads) * kGroup * size_t(s.d), rows = size_t(s.batch) * size_t(s.n_query);
        std::vector<float> normals = random.normals(int64_t(row) * 64 + 7919, 1.0f);
        std::vector<uint16_t> q(rows * row);
        for (size_t n = 0; n < q.size(); ++n) q[n] = ta::testing::float_to_f16(normals[n % normals.size()]);
        d_q_ = Device<uint16_t>(q);
        d_out_ = Device<uint16_t>(q.size());
        d_lse_ = Device<float>(rows * kKvHeads * kGroup);
        d_signs_ = Device<float>(std::vector<float>(size_t(s.d), 1.0f));
        ctas_ = multiprocessors();
        std::vector<uint8_t> schedule(prefill_schedule_bytes(count_prefill_tiles(sequences, kGroup)));
        plan_prefill(sequences, kGroup, s.causal, 0, schedule.data());
        d_schedule_ = Device<uint8_t>(schedule);
        AttendArgs& a = args_;
        a.head_dim = s.d, a.kv_heads = kKvHeads, a.group = kGroup, a.batch = s.batch, a.table = d_table_.get();
        a.heads = cached ? d_heads_.get() : nullptr;
        a.token_layer_offset = pool_.token_layer_offset(), a.channel_layer_offset = pool_.channel_layer_offset();
        a.q = {d_q_.get(), int64_t(row), s.d, DType::kF16}, a.out = {d_out_.get(), int64_t(row), s.d, DType::kF16};
        a.lse = d_lse_.get(), a.signs = d_signs_.get(), a.q_levels = kStage1Levels,
        a.scale = float(1.0 / std::sqrt(double(s.d)));
        a.causal = s.causal, a.exp = ExpMode::kPoly, a.p_levels = 255;
    }

    void run(Device<uint8_t>& flush, size_t flush_bytes, int runs) {
        cudaEvent_t begin, end;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        std::vector<float> times;
        for (int n = 0; n < runs + 2; ++n) {
            CHECK(cudaMemsetAsync(flush.get(), n, flush_bytes));
            CHECK(cudaEventRecord(begin));
            CHECK(launch_prefill(args_, d_schedule_.get(), ctas_, nullptr));
            CHECK(cudaEventRecord(end));
            CHECK(cudaEventSynchronize(end));
            float ms = 0.0f;
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            if (n >= 2) times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        const double ms = times[times.size() / 2];
        const double keys = s_.causal ? s_.n_keys - (s_.n_query - 1) / 2.0 : s_.n_keys;
        const double operations = 4.0 * s_.batch * kKvHeads * kGroup * double(s_.n_query) * keys * s_.d;
        std::printf("%-36s %8.4f ms  %6.0f TOPS  (min %.4f)\n", s_.name, ms, operations / ms * 1e-9, double(times[0]));
        std::fflush(stdout);
        CHECK(cudaEventDestroy(begin));
        CHECK(cudaEventDestroy(end));
    }

  private:
    static constexpr int kKvHeads = 8, kGroup = 4;
    Shape s_;
    PagePool pool_;
    int ctas_ = 0;
    Device<uint8_t> d_pool_, d_schedule_;
    Device<uint64_t> d_table_;
    Device<HeadArgs> d_heads_;
    Device<uint16_t> d_q_, d_out_;
    Device<float> d_lse_, d_signs_;
    AttendArgs args_{};
};

int bench(const std::string& only) {
    constexpr size_t kFlush = size_t(256) << 20;
    Device<uint8_t> flush(kFlush);
    const Shape shapes[] = {
        {"b1 h32/8 n16384 full", 1, 16384, 16384, false, Pages::kToken, 4},
        {"b1 h32/8 n16384 causal", 1, 16384, 16384, true, Pages::kToken, 4},
        {"b4 h32/8 n4096 causal", 4, 4096, 4096, true, Pages::kToken, 4},
        {"b16 h32/8 n1024 causal", 16, 1024, 1024, true, Pages::kToken, 4},
        {"chunk 2048 on 30720 INT4", 1, 32768, 2048, true, Pages::kPrefix, 4},
        {"chunk 2048 on 30720 INT2", 1, 32768, 2048, true, Pages::kPrefix, 2},
        {"chunk 2048 on 30720 INT8", 1, 32768, 2048, true, Pages::kToken, 4},
        {"n16384 causal, token scales", 1, 16384, 16384, true, Pages::kTokenOwnScale, 4},
        {"b1 h32/8 n16384 causal d64", 1, 16384, 16384, true, Pages::kToken, 4, 64},
    };
    for (const Shape& s : shapes) {
        if (std::string(s.name).find(only) == std::string::npos) continue;
        AttendArgs probe{};
        probe.head_dim = s.d, probe.p_levels = 255;
        if (prefill_refusal(probe)) continue;
        Bench(s).run(flush, kFlush, 15);
    }
    return 0;
}

}  // namespace
}  // namespace ta::cuda::testing

int main(int argc, char** argv) {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    bool quick = false, is_bench = false;
    std::string only;
    for (int n = 1; n < argc; ++n) {
        const std::string a = argv[n];
        if (a == "--quick") quick = true;
        if (a == "--bench") is_bench = true;
        if (a == "--only" && n + 1 < argc) only = argv[++n];
    }
    return is_bench ? ta::cuda::testing::bench(only) : ta::cuda::testing::test(quick, only);
}
