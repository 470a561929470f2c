// The CUDA prefill kernels against attention in float64 over the same pages, next to the CPU kernel's error on them, and their
// speed. Every kernel of kPrefillVariants that the GPU runs takes every case that it does not refuse,
// and those with channel pages also, or alone, as expanded pages.
//
// usage: prefill_test [--quick] [--only TEXT] [--sm80]   correctness; prints a line per case, exits with 1 if one fails
//        prefill_test --bench [--whole] [--only TEXT] [--sm80]   times, L2 flushed; whole: tiles are not split
// --sm80: the kernel for every GPU alone
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
#include "kernels/cuda/any/expand/expand.h"
#include "kernels/cuda/common/prefill/query.cuh"
#include "kernels/cuda/variants.h"
#include "kernels/format/fractions.h"
#include "support/data.h"
#include "support/numbers.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/cuda/pages.h"
#include "tests/kernels/cuda/prefill_cases.h"

namespace ta::cuda::testing {
namespace {

using ta::testing::AttentionData;
using ta::testing::AttentionShape;
using ta::testing::Random;

// -------------------------------------------------------------------------------------------------------------- one case

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

constexpr int kRowsToCheck = 48;  // of a case; with few of them, a bound relative to the CPU's error is a matter of luck
// Bounds: times the CPU's error, plus one of these. Where a few keys decide, a unit of P for 128 keys instead of 64 costs more.
constexpr double kTimesCpu = 1.6, kBeyondCpu = 6e-4, kPeakyBeyond = 2e-3, kGridError = 0.01, kSasError = 0.02;
// O is divided by the sum of the same rounded P, so that the rounding of a single one cancels. It does not where O is merged.
constexpr double kHalfStepOfP = 0.5 / 128;

struct Errors {
    double o = 0.0, merged_o = 0.0, cpu_o = 0.0, running_o = 0.0, norm = 0.0;  // sums of squares
    double lse = 0.0, cpu_lse = 0.0;                                           // largest
};

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), pool_(make_shape(c)), low_pool_(make_low_shape(c)) {
        Random random(c.seed);
        make_pages(random);
        make_rows(random);
        upload();
    }

    // O and LSE must be the same to the bit however many CTAs there are, wherever pages lie and whenever they arrive.
    bool run(const PrefillVariant& kernel, int rows_to_check, Errors* errors) {
        kernel_ = &kernel;
        const int all = multiprocessors();
        const auto shape_for = [&](int ctas, int cut_every) {
            return PrefillShape{c_.group, c_.causal, c_.window, c_.kv_heads, ctas, cut_every, kernel.rows};
        };
        const auto plan_for = [&](int ctas, int cut_every) {
            return PrefillPlan(sequences_, shape_for(ctas, cut_every), walks_);
        };
        if (!run(plan_for(0, 2), all, rows_to_check, errors)) return false;
        args_.resident = true;
        for (const int ctas : {1, all}) {
            if (args_.heads) break;
            const PrefillPlan plan =
                PrefillPlan::resident(sequences_, shape_for(0, 2), kernel.resident_keys(args_), ctas, walks_);
            if (!plan.tiles().empty() && !run(plan, all, rows_to_check, errors)) return false;
        }
        args_.resident = false;
        const bool sas = c_.exp == ExpMode::kSas;
        if (sas && c_.window > 0) return true;  // never split
        const PrefillPlan split = plan_for(all, sas ? kPromptRangePages : 2);
        return split.slots() == 0 || run(split, all, rows_to_check, errors);
    }

  private:
    bool run(const PrefillPlan& plan, int all, int rows_to_check, Errors* errors) {
        struct Run {
            int ctas;
            bool host;  // some of the pages lie in host memory
        };
        const Run runs[] = {{all, false}, {all, true}, {1, false}, {all, false},
                            {2, true},    {all, true}, {5, false}, {all, true}};
        std::vector<uint8_t> schedule(plan.bytes());
        plan.write(schedule.data());
        Device<uint8_t> d_schedule(schedule), workspace(prefill_workspace_bytes(kernel_->rows, c_.d, all));
        Device<uint8_t> out(out_elements_ * dtype_bytes(c_.out_type));
        Device<float> lse(size_t(rows_) * size_t(q_heads()));
        args_.out.data = out.get();
        Expanded expanded(*this, plan);
        struct Kind {
            bool with_lse, long_tiles, expanded = false;
        };
        for (const auto [with_lse, long_tiles, expands] : {Kind{true, false},
                                                           {false, false},
                                                           {false, true},
                                                           {true, false, true},
                                                           {false, false, true},
                                                           {false, true, true}}) {
            if (long_tiles && ((args_.heads && !expands) || args_.resident)) continue;  // the same kernel
            if (expands ? !args_.heads : kernel_->refusal(args_) != nullptr) continue;
            args_.lse = with_lse ? lse.get() : nullptr;
            args_.lse_of_o = with_lse ? nullptr : lse.get();
            args_.long_tiles = long_tiles;
            std::vector<uint8_t> first;
            std::vector<float> first_lse;
            for (const Run& r : runs) {
                out.poison();
                lse.poison();
                workspace.poison();
                args_.table = r.host ? d_mixed_table_.get() : d_table_.get();
                AttendArgs args = args_;
                if (expands && !expanded.expand(args)) return false;
                CHECK(kernel_->launch(args, d_schedule.get(), workspace.get(), r.ctas, nullptr));
                CHECK(cudaDeviceSynchronize());
                const std::vector<uint8_t> got = out.copy();
                const std::vector<float> got_lse = lse.copy();
                if (!only_rows_written(got)) return false;
                if (first.empty()) first = got, first_lse = got_lse;
                if (first == got && std::memcmp(first_lse.data(), got_lse.data(), got_lse.size() * 4) == 0) continue;
                std::printf("    runs differ: %d CTAs, pages %s, %s LSE%s\n", r.ctas,
                            r.host ? "in both memories" : "on the device", with_lse ? "with" : "without",
                            long_tiles ? ", as long tiles"
                            : expands  ? ", expanded"
                                       : "");
                return false;
            }
            reads_ = expands ? &expanded : nullptr;
            if (!compare(first, first_lse, with_lse, rows_to_check, errors)) return false;
        }
        return true;
    }

    // The piece that an entry of table_ stands for.
    struct Piece {
        const uint8_t* bytes;
        PageKind kind;  // kChannel for low pages too, as the CPU has it
        int k_bits, v_bits;
    };
    using Place = std::tuple<size_t, int, int>;  // sequence, page, head
    class Expanded;
    // Of an entry of table_, as the kernel found it.
    Piece piece_read(size_t at, int head) const {
        const Piece p = piece_of(table_[at], head);
        const uint8_t* const expanded = reads_ && p.kind == PageKind::kChannel ? reads_->find(at, head) : nullptr;
        return expanded ? Piece{expanded, PageKind::kToken, 8, 8} : p;
    }

    // The channel pages that a plan reads as token pages.
    class Expanded {
      public:
        Expanded(const Problem& of, const PrefillPlan& plan)
            : of_(of),
              entries_(plan.entries()),
              d_entries_(entries_),
              pages_(entries_.size() * bytes_of_page() + kEntryFlags),
              table_(of.table_.size()) {}
        // And has `args` read them.
        bool expand(AttendArgs& args) {
            pages_.poison();
            table_.poison();
            const uint64_t to = (reinterpret_cast<uint64_t>(pages_.get()) + kEntryFlags) & ~kEntryFlags;
            if (!entries_.empty()) {
                const ExpandArgs e{d_entries_.get(), int32_t(entries_.size()), reinterpret_cast<uint8_t*>(to), table_.get()};
                CHECK(cudaError_t(launch_expand(args, e, nullptr)));
            }
            args.table = table_.get(), args.heads = nullptr;
            copy_ = pages_.copy();
            first_ = to - reinterpret_cast<uint64_t>(pages_.get());
            for (size_t n = 0; n < entries_.size(); ++n) {
                for (int head = 0; head < of_.c_.kv_heads; ++head) {
                    const Piece from = of_.piece_of(of_.table_[entries_[n]], head);
                    if (from.kind == PageKind::kChannel && !agrees(from, piece(n, head))) return false;
                }
            }
            return true;
        }

        // Where entry `at` of the block table is expanded; nullptr: it is not.
        const uint8_t* find(size_t at, int head) const {
            const auto found = std::find(entries_.begin(), entries_.end(), uint32_t(at));
            return found == entries_.end() ? nullptr : piece(size_t(found - entries_.begin()), head);
        }

      private:
        const uint8_t* piece(size_t n, int head) const {
            return copy_.data() + first_ + n * bytes_of_page() + size_t(head) * TokenLayout(of_.c_.d).bytes();
        }
        size_t bytes_of_page() const { return expanded_page_bytes(of_.c_.d, of_.c_.kv_heads); }
        bool agrees(const Piece& from, const uint8_t* piece) const {
            const int d = of_.c_.d;
            const PageNumbers a = read_piece(from.bytes, from.kind, d, from.k_bits, from.v_bits, kPageTokens);
            const PageNumbers b = read_piece(piece, PageKind::kToken, d, 8, 8, kPageTokens);
            for (int n = 0; n < kPageTokens * d; ++n) {
                const int t = n / d, c = n % d;
                const int32_t k = a.k[size_t(n)], v = a.v[size_t(n)];
                const bool k_agrees = b.k[size_t(n)] == (a.k_bytes ? k : round_k(k >> 3, k & 7, t, c)) &&
                                      b.k_scale[t] == a.k_scale[t] * (a.k_bytes ? 1 : 8);
                const bool v_agrees = b.v[size_t(n)] == (a.v_bytes ? v : spread_v(v >> 3, v & 7, t, c)) &&
                                      b.v_scale[t] == a.v_scale[t] * (a.v_bytes ? 1 : 8);
                if (k_agrees && v_agrees) continue;
                std::printf("    expanded: token %d, channel %d: K %d, V %d times 1/%d and 1/%d became %d, %d\n", t, c,
                            a.k[size_t(n)], a.v[size_t(n)], a.k_bytes ? 1 : 8, a.v_bytes ? 1 : 8, b.k[size_t(n)],
                            b.v[size_t(n)]);
                return false;
            }
            return true;
        }

        const Problem& of_;
        const std::vector<uint32_t> entries_;
        Device<uint32_t> d_entries_;
        Device<uint8_t> pages_;
        Device<uint64_t> table_;
        std::vector<uint8_t> copy_;
        size_t first_ = 0;
    };

    bool only_rows_written(const std::vector<uint8_t>& out) const {
        if (c_.head_gap + c_.row_gap == 0) return true;
        const size_t element = dtype_bytes(c_.out_type);
        std::vector<bool> in_row(out_elements_);
        for (int row = 0; row < rows_; ++row) {
            for (int h = 0; h < q_heads(); ++h) std::fill_n(in_row.begin() + int64_t(q_at(row, h)), c_.d, true);
        }
        for (size_t i = 0; i < out.size(); ++i) {
            if (in_row[i / element] || out[i] == 0xFF) continue;
            std::printf("    byte %zu, between rows, was written\n", i);
            return false;
        }
        return true;
    }

    static PoolShape make_shape(const Case& c) {
        PoolShape s{c.d, c.kv_heads, {}, {}};
        for (int h = 0; h < c.kv_heads; ++h) {
            s.k_bits.push_back(k_bits_of_head(c.k_bits, h));
            s.v_bits.push_back(v_bits_of_head(c.v_bits, h));
        }
        return s;
    }
    static PoolShape make_low_shape(const Case& c) {
        const std::vector<uint8_t> bits(size_t(c.kv_heads), 2);
        return {c.d, c.kv_heads, bits, bits};
    }
    Piece piece_of(uint64_t entry, int head) const {
        const PagePool& pool = entry & kEntryLow ? low_pool_ : pool_;
        const HeadArgs& h = pool.heads()[size_t(head)];
        return {pool.piece(entry, head), entry & kEntryChannel ? PageKind::kChannel : PageKind::kToken, h.k_bits, h.v_bits};
    }

    bool is_own(size_t s, int page) const { return page % walks_[s].stride == walks_[s].first; }
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
            walks_.push_back({int32_t(walks_.size()) % c_.ranks, c_.ranks});
            for (int n = 0; n < n_pages; ++n) {
                if (!is_own(walks_.size() - 1, n)) {
                    table_.push_back(~uint64_t{0});
                    continue;
                }
                const int tokens = std::min(kPageTokens, s.n_keys - n * kPageTokens);
                const bool low = c_.low > 0 && tokens == kPageTokens && random.chance(c_.low);
                const bool channel = low || is_channel(s, n, tokens, random);
                const float *k = data.k.data() + size_t(n) * kPageTokens * token,
                            *v = data.v.data() + size_t(n) * kPageTokens * token;
                table_.push_back((low ? low_pool_ : pool_)
                                     .add(channel ? PageKind::kChannel : PageKind::kToken, k, v, tokens, random.chance(20)) |
                                 (low ? kEntryLow : 0));
                const bool prompt = c_.pages == Pages::kPrompt;
                if (!channel && c_.pages != Pages::kTokenOwnScale && !(c_.pages == Pages::kRandom && random.chance(50)) &&
                    !(prompt && n == 0))
                    give_page_scales(pool_, table_.back(), k, v, tokens, prompt ? ScaleRule::kPageExp : ScaleRule::kPage);
            }
            const int32_t padding = int32_t(random.below(3));
            sequences_.push_back({s.n_keys, s.n_query, rows_, int32_t(table_.size()) - n_pages});
            for (int32_t n = 0; n < padding; ++n) table_.push_back(~uint64_t{0});  // entries of nobody
            rows_ += s.n_query;
        }
    }

    void make_rows(Random& random) {
        stride_head_ = c_.d + c_.head_gap;
        stride_row_ = stride_head_ * q_heads() + c_.row_gap;
        out_elements_ = size_t(std::max(rows_, 1)) * size_t(stride_row_);
        q_bytes_.assign(out_elements_ * dtype_bytes(c_.q_type), 0xFF);
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
        // Low slots come behind the others. Their layers begin further in, so that no other kind's offset will do for them.
        constexpr uint64_t kFurther = 4096;
        std::vector<uint8_t> slots = pool_.bytes();
        slots.resize((slots.size() + kFurther - 1) / kFurther * kFurther, 0xFF);
        const uint64_t first_low = slots.size();
        slots.resize(slots.size() + kFurther, 0xFF);
        slots.insert(slots.end(), low_pool_.bytes().begin(), low_pool_.bytes().end());
        const auto entry_in = [&](uint64_t memory, uint64_t entry) {
            if (entry == ~uint64_t{0}) return entry;
            if (entry & kEntryLow) memory += first_low + (entry & kEntrySingleLayer ? kFurther : 0);
            return memory + entry;
        };
        d_pool_ = DevicePool(slots);
        std::vector<uint64_t> table = table_;
        for (uint64_t& e : table) e = entry_in(d_pool_.address(), e);
        d_table_ = Device<uint64_t>(table);
        h_pool_ = HostCopy(slots);
        for (size_t n = 0; n < table.size(); n += 1 + n % 2)
            table[n] = entry_in(reinterpret_cast<uint64_t>(h_pool_.get()), table_[n]);
        d_mixed_table_ = Device<uint64_t>(table);
        d_heads_ = Device<HeadArgs>(pool_.heads());
        d_q_ = Device<uint8_t>(q_bytes_);
        d_signs_ = Device<float>(signs_);
        d_k_offset_ = Device<float>(k_offset_);
        d_alibi_ = Device<float>(alibi_);
        d_sinks_ = Device<float>(sinks_);
        AttendArgs& a = args_;
        a = {};
        a.head_dim = c_.d, a.kv_heads = c_.kv_heads, a.group = c_.group, a.batch = int32_t(sequences_.size());
        const bool all_token = are_token_pages(c_.pages) && c_.low == 0;
        a.heads = all_token ? nullptr : d_heads_.get();
        a.some_8_bits = has_8_bits(pool_.heads());
        a.token_layer_offset = pool_.token_layer_offset(), a.channel_layer_offset = pool_.channel_layer_offset();
        a.low_layer_offset = low_pool_.channel_layer_offset() + kFurther, a.has_low = c_.low > 0;
        a.q = {d_q_.get(), stride_row_, stride_head_, c_.q_type};
        a.out = {nullptr, stride_row_, stride_head_, c_.out_type};
        a.signs = c_.rotate && can_rotate(c_.d) ? d_signs_.get() : nullptr;
        a.k_offset = c_.k_offset ? d_k_offset_.get() : nullptr;
        a.q_levels = kStage1Levels;
        a.scale = float(1.0 / std::sqrt(double(c_.d)));
        a.causal = c_.causal, a.window = c_.window, a.softcap = c_.softcap;
        a.alibi_slope = c_.alibi ? d_alibi_.get() : nullptr;
        a.sink = c_.sinks ? d_sinks_.get() : nullptr;
        a.exp = c_.exp, a.p_levels = c_.p_levels;
    }

    // A row by the CPU's kernel with the same P of 8 bits, in units of a page's largest or of the running maximum.
    double cpu_row(const QueryCodes& q, size_t s, int head, const RowRules& rules, bool running, double* out) const {
        constexpr float kLog2eF = 1.44269504f;
        const int n_pages = (sequences_[s].n_keys + kPageTokens - 1) / kPageTokens;
        std::vector<Piece> pieces;
        std::vector<cpu::PageRef> pages;
        for (int n = 0; n < n_pages; ++n) {
            pieces.push_back(is_own(s, n) ? piece_read(size_t(sequences_[s].first_entry + n), head) : Piece{});
            pages.push_back({pieces.back().bytes, pieces.back().kind});
        }
        cpu::AttendTask t{};
        const int64_t begin = rules.keys.begin, end = rules.keys.end;
        alignas(64) int8_t code[kMaxHeadDim];
        std::copy(q.code.begin(), q.code.end(), code);
        RangeSum sum(c_.d);
        const float slope = float(rules.slope) * kLog2eF;
        std::vector<uint8_t> workspace(cpu::workspace_bytes(c_.d, 1) + 64);
        t.head_dim = c_.d, t.pages = pages.data(), t.n_keys = sequences_[s].n_keys, t.rows = 1;
        t.q = code, t.q_scale = &q.scale, t.key_begin = &begin, t.key_end = &end, t.position = &rules.position;
        t.bias = &q.bias;
        if (c_.alibi) t.slope = &slope;
        if (c_.softcap > 0.0f) t.softcap_log2 = c_.softcap * kLog2eF, t.softcap_inv = 1.0f / c_.softcap;
        t.exp = c_.exp, t.p_levels = c_.p_levels, t.p_running = running;
        t.o = sum.o(), t.m = &sum.m, t.l = &sum.l;
        t.workspace = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
        int own = 0;
        for (int n = 0; n < n_pages; ++n) {  // a task's channel pages have the same bits; the next goes on where it left O
            if (!is_own(s, n)) continue;
            if (own++ % kPromptRangePages == 0) sum.end(), sum.begin();
            t.page_begin = n, t.page_end = n + 1, t.k_bits = pieces[size_t(n)].k_bits, t.v_bits = pieces[size_t(n)].v_bits;
            cpu::attend_scalar(t);
        }
        sum.end();
        return sum.finish(out, rules.sink);
    }

    const PageNumbers& numbers(size_t s, int n, int head) const {
        const Place key(s, n, head);
        std::map<Place, PageNumbers>& known = numbers_[reads_ != nullptr];
        const auto found = known.find(key);
        if (found != known.end()) return found->second;
        const Piece p = piece_read(size_t(sequences_[s].first_entry + n), head);
        const int valid = std::min(kPageTokens, sequences_[s].n_keys - n * kPageTokens);
        return known.emplace(key, read_piece(p.bytes, p.kind, c_.d, p.k_bits, p.v_bits, valid)).first->second;
    }

    // A step of V's codes at the key that is heaviest by P and V's scale. Where that key's own values are 0 beside its page's
    // largest and O is the little that other keys add, O has no more bits than this.
    static double step_of_v(const QueryCodes& q, const std::vector<const PageNumbers*>& pages, const RowRules& rules,
                            double lse) {
        double largest = 0.0;
        for (int64_t t = rules.keys.begin; t < rules.keys.end; ++t) {
            if (!pages[size_t(t / kPageTokens)]) continue;
            const PageNumbers& page = *pages[size_t(t / kPageTokens)];
            const size_t at = size_t(t % kPageTokens), d = q.code.size();
            double dot = 0.0;
            for (size_t c = 0; c < d; ++c) dot += double(q.code[c]) * double(page.k[at * d + c]);
            const double log2_p = dot * page.k_scale[at] * double(q.scale) + double(q.bias) - lse / std::log(2.0);
            largest = std::max(largest, std::exp2(log2_p) * page.v_scale[at]);
        }
        return largest;
    }

    // The right values of a row, and the values that the CPU computes.
    struct Expected {
        std::vector<double> o, cpu_o, running_o;
        double lse, cpu_lse;
    };

    // `exact`: the LSE is. Else it is that of O's sums, and O times them is what a merge takes: that must be as good as O.
    bool compare(const std::vector<uint8_t>& out, const std::vector<float>& lse, bool exact, int rows_to_check,
                 Errors* e) const {
        *e = {};
        const float unit = c_.softcap > 0.0f ? args_.scale : args_.scale * 1.44269504f;
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
                    Expected& expected = expected_[reads_ != nullptr][{row, h}];
                    std::vector<double>&want = expected.o, &cpu = expected.cpu_o;
                    const bool known = !want.empty();
                    want.resize(size_t(c_.d)), cpu.resize(size_t(c_.d));
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
                    for (int n = 0; n < n_pages; ++n) pages.push_back(is_own(s, n) ? &numbers(s, n, head) : nullptr);
                    if (!known) {
                        expected.lse = exact_row(codes, pages, c_.d, rules, want.data());
                        expected.cpu_lse = cpu_row(codes, s, head, rules, false, cpu.data());
                        expected.running_o.resize(size_t(c_.d));
                        cpu_row(codes, s, head, rules, true, expected.running_o.data());
                        if (c_.exp == ExpMode::kSas) want = cpu, expected.lse = expected.cpu_lse;  // wrong by design
                    }
                    const double want_lse = expected.lse, cpu_lse = expected.cpu_lse;
                    const double got_lse = lse[size_t(row) * size_t(q_heads()) + size_t(h)];
                    const double lse_error = got_lse == want_lse ? 0.0 : std::fabs(got_lse - want_lse);
                    const bool merges = !exact && lse_error > 0.0 && c_.lse_tolerance < 1e-2;
                    const double weight = merges ? std::exp(got_lse - want_lse) : 1.0;
                    double error = 0.0, norm = 0.0, cpu_error = 0.0;
                    for (int c = 0; c < c_.d; ++c) {
                        const double got = load(out, c_.out_type, q_at(row, h) + size_t(c));
                        error += (got - want[size_t(c)]) * (got - want[size_t(c)]);
                        e->merged_o += std::pow(got * weight - want[size_t(c)], 2);
                        cpu_error += (cpu[size_t(c)] - want[size_t(c)]) * (cpu[size_t(c)] - want[size_t(c)]);
                        e->running_o += std::pow(expected.running_o[size_t(c)] - want[size_t(c)], 2);
                        norm += want[size_t(c)] * want[size_t(c)];
                    }
                    e->o += error;
                    e->cpu_o += cpu_error;
                    e->norm += norm;
                    if (exact) e->lse = std::max(e->lse, std::isnan(lse_error) ? 1e9 : lse_error);
                    if (cpu_lse != want_lse) e->cpu_lse = std::max(e->cpu_lse, std::fabs(cpu_lse - want_lse));
                    const bool far = error > 0.25 * norm + 1e-30 &&
                                     error > std::pow(step_of_v(codes, pages, rules, want_lse), 2) * double(c_.d);
                    if (far || !(lse_error <= (exact ? c_.lse_tolerance : 1.0))) {
                        std::printf(
                            "    sequence %zu (%d keys, %d queries), query %d, head %d: O off by %.3g (the CPU's by %.3g), LSE "
                            "%.9g, want %.9g\n",
                            s, sequences_[s].n_keys, sequences_[s].n_query, t, h, std::sqrt(error / norm),
                            std::sqrt(cpu_error / norm), got_lse, want_lse);
                        return false;
                    }
                }
            }
        }
        // Over the rows that are looked at, relative L2. The CPU has a unit of P for every page, this kernel one for two of
        // them, and scores on a grid of 1/112 octave. SAS is compared with the CPU's SAS, which then has no error of its own to
        // go by.
        // Equal scores have P without an error on the CPU; here l has that of the grid.
        const bool equal = c_.data == DataKind::kPagesApart || c_.data == DataKind::kZerosAround;
        const double beyond = equal ? kGridError : c_.data == DataKind::kPeaky ? kPeakyBeyond : kBeyondCpu;
        const double bound = c_.exp == ExpMode::kSas ? kSasError * std::sqrt(e->norm)
                                                     : kTimesCpu * std::sqrt(e->cpu_o) + beyond * std::sqrt(e->norm);
        return std::sqrt(e->o) <= bound && std::sqrt(e->merged_o) <= bound + kHalfStepOfP * std::sqrt(e->norm);
    }

    Case c_;
    const PrefillVariant* kernel_ = nullptr;
    PagePool pool_, low_pool_;  // low pages are the channel pages of a pool of 2 bits
    std::vector<AttentionData> data_;
    std::vector<uint64_t> table_;
    std::vector<SequenceArgs> sequences_;
    std::vector<BlockWalk> walks_;
    int32_t rows_ = 0;
    int64_t stride_row_ = 0, stride_head_ = 0;
    size_t out_elements_ = 0;
    std::vector<uint8_t> q_bytes_;
    std::vector<float> signs_, k_offset_, alibi_, sinks_;
    DevicePool d_pool_;
    Device<uint8_t> d_q_;
    Device<uint64_t> d_table_, d_mixed_table_;
    HostCopy h_pool_;
    Device<HeadArgs> d_heads_;
    Device<float> d_signs_, d_k_offset_, d_alibi_, d_sinks_;
    AttendArgs args_{};
    const Expanded* reads_ = nullptr;  // the pages that the kernel read
    // By whether it read expanded ones.
    mutable std::map<Place, PageNumbers> numbers_[2];
    mutable std::map<std::pair<int, int>, Expected> expected_[2];
};

// ------------------------------------------------------------------------------------------------------------- stage 1

struct PlainRows {
    uint8_t* codes;  // [rows, 128]
    TA_DEVICE void store(int, int at, int i, const uint32_t (&w)[2][4]) const {
        for (int n = 0; n < 8; ++n)
            *reinterpret_cast<uint32_t*>(codes + at * 128 + 32 * (n / 2) + 8 * i + n % 2 * 4) = w[n % 2][n / 2];
    }
};

__global__ void quantize_kernel(const __grid_constant__ AttendArgs args, prefill::Tile tile, uint8_t* codes, float* scales) {
    constexpr int kD = 128;
    __shared__ uint4 masks[kD / 8];
    __shared__ prefill::RowInfo info[16];
    const int lane = int(threadIdx.x);
    if (lane < kD / 8) masks[lane] = prefill::sign_mask(args.signs, lane);
    __syncwarp();
    prefill::start_rows<kD>(args, tile, lane / 4, lane, masks, PlainRows{codes}, info + lane / 4);
    if (lane < 16) scales[lane] = info[lane].scale;
}

// The codes of queries: where a value lies half way between two of them, either will do.
bool stage1_agrees(DType type) {
    constexpr int kRows = 16, kD = 128;
    Random random(7);
    std::vector<float> q = random.normals(kRows * kD, 1.0f), signs;
    for (int c = 0; c < kD; ++c) signs.push_back(random.chance(50) ? 1.0f : -1.0f);
    for (int c = 0; c < kD; c += 17) q[size_t(c)] *= 1000.0f;
    for (int c = 0; c < kD; ++c) q[size_t(kD + c)] = 0.0f;
    std::vector<uint8_t> bytes(q.size() * dtype_bytes(type));
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

// `part` of `parts`: every so-manieth case, for compute-sanitizer, which takes long.
int test(bool quick, const std::string& only, int part, int parts, const std::vector<const PrefillVariant*>& kernels) {
    int failed = 0;
    for (const auto& [type, name] : {std::pair{DType::kF32, "f32"}, {DType::kF16, "f16"}, {DType::kBf16, "bf16"}}) {
        const bool agrees = stage1_agrees(type);
        std::printf("stage 1 of queries, %-14s %s\n", name, agrees ? "ok" : "FAILED");
        failed += !agrees;
    }
    std::printf("%-34s %-4s %9s %9s %9s %9s %9s\n", "case", "", "O", "CPU's O", "running", "LSE", "CPU's LSE");
    int n = 0;
    for (const Case& c : all_cases(quick)) {
        if (n++ % parts != part || c.name.find(only) == std::string::npos) continue;
        std::unique_ptr<Problem> problem;
        for (const PrefillVariant* kernel : kernels) {
            AttendArgs probe{};
            probe.head_dim = c.d, probe.p_levels = c.p_levels;
            if (kernel->refusal(probe)) continue;  // channel pages, too
            if (!problem) problem = std::make_unique<Problem>(c);
            Errors e;
            const bool good = problem->run(*kernel, kRowsToCheck, &e);
            const double norm = std::max(e.norm, 1e-300);
            std::printf("%-34s %-4s %9.2e %9.2e %9.2e %9.2e %9.2e %s\n", c.name.c_str(), kernel->major ? "sm90" : "sm80",
                        std::sqrt(e.o / norm), std::sqrt(e.cpu_o / norm), std::sqrt(e.running_o / norm), e.lse, e.cpu_lse,
                        good ? "ok" : "FAILED");
            std::fflush(stdout);
            failed += !good;
        }
        if (!problem) std::printf("%-34s refused by all\n", c.name.c_str());
    }
    std::printf(failed ? "%d FAILED\n" : "all ok\n", failed);
    return failed ? 1 : 0;
}

}  // namespace

int bench(const std::string& only, bool whole, const std::vector<const PrefillVariant*>& kernels);  // prefill_bench.cu

}  // namespace ta::cuda::testing

int main(int argc, char** argv) {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    bool quick = false, is_bench = false, whole = false, sm80 = false;
    std::string only;
    int part = 0, parts = 1;
    for (int n = 1; n < argc; ++n) {
        const std::string a = argv[n];
        if (a == "--quick") quick = true;
        if (a == "--bench") is_bench = true;
        if (a == "--whole") whole = true;
        if (a == "--sm80") sm80 = true;
        if (a == "--only" && n + 1 < argc) only = argv[++n];
        if (a == "--part" && n + 1 < argc && (std::sscanf(argv[++n], "%d/%d", &part, &parts) != 2 || part < 0 || part >= parts))
            return std::fprintf(stderr, "--part is N/OF, N from 0\n"), 2;
    }
    const auto kernels = ta::cuda::testing::kernels_here(sm80);
    return is_bench ? ta::cuda::testing::bench(only, whole, kernels)
                    : ta::cuda::testing::test(quick, only, part, parts, kernels);
}
