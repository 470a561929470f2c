#include "walks/replay.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <sstream>

#include "kernels/cpu/kernels.h"
#include "kernels/cpu/math.h"
#include "kernels/format/codec.h"
#include "kernels/format/fractions.h"
#include "kernels/format/query_rest.h"
#include "kernels/format/rotation.h"
#include "kernels/format/turning.h"
#include "src/api/api.h"
#include "support/page_numbers.h"

namespace ta::testing {
namespace {

// The bound of everything that kernels round in fp32, relative to the magnitudes of what is summed. A score has up to five terms:
// codes, turning pairs, K's offset, softcap, ALiBi. Each term and its factors are rounded four times at the most, by 2^-24 of the
// term each time. 2^x and the sines of a GPU are good to 2^-22. Sums of a page and over pages add less, since the terms of l have one
// sign and those of P V are integers. The sum is below 2^-20; a weight depends on two scores, so it may be off by twice as much.
constexpr double kFloat = 0x1p-19;

// The largest code times step, or code plus 128, that P V sums before zero points and offsets are taken off.
constexpr double kHeld = 256.0;
// Weights so far below the row's largest underflow; SAS's table and cubic do not meet where y is an integer.
constexpr double kLeast = 0x1p-90, kSasStep = 7e-4;

// The prefill kernel of sm_90 (kernels.md). Its P cannot be replayed: which of three ways scores go, and whether two pages share a
// unit, is chosen for each warp and block. The known limits:
// - P is off by less than a unit of the 128 keys, which are the page and one of its neighbours.
// - Scores are off by a step of their grid, half of it from rounding to the grid, and by one more for each 2^17 of their codes'
//   product, from rounding of factors.
// - Where the unit is found, a V of 0 counts as kNoV of V beside it, or as kLeastV.
// - Fractions of V's zero points, up to 7/8, multiply sums of P that four lanes round to multiples of 8.
// - O loses what is below kPrefillLeast of the largest V.
constexpr double kPrefillLevels = 255.0, kGridStep = 1.0 / 112.0, kFactorStep = kGridStep * 0x1p-17;
// The prefill kernel for every GPU since sm_80: scores, l and O are fp32, P has a unit of its page's. Up to kLeft units of a page's product are
// left in O.
constexpr double kLeft = 4.0;
// Where V's tokens have scales, it adds these to scores that still hold kScoreZero: half of a last place of that, in products' units.
constexpr double kScoreStep = 12582912.0 * 0x1p-24;
// It adds some 100 to exponents of 2, several times.
constexpr double kExponent = 0x1p-17;
constexpr int64_t kShortestRange = 8 * kPageTokens;  // of batch_invariant on a GPU
constexpr double kNoV = 0x1p-30, kLeastV = 0x1p-60, kFractions = 4 * 4 * 7.0 / 8.0, kPrefillLeast = 0x1p-38;

constexpr double kMinusInf = -std::numeric_limits<double>::infinity(), kLn2 = 0.6931471805599453;

bool is_prefill(Kernel kernel) {
    return kernel == Kernel::kHopperPrefill || kernel == Kernel::kPrefill;
}

Replay* alive = nullptr;
cpu::AttendFn under = nullptr;

}  // namespace

struct Page {
    int64_t first_key = 0;
    PageNumbers numbers;
    double k_eighth = 1.0, v_eighth = 1.0;  // of numbers in a code of 8 bits
    TurningPairs turning;
    double v_scale(size_t j) const { return numbers.v_scale[j] / v_eighth; }  // of a code of 8 bits
};

// A key's share of O for each number of V, and by how much that may be off.
struct Share {
    double value, error;
};

// The row's codes, and which of them lie so near half way between two that a kernel may have either.
struct QueryRow {
    const int8_t *code, *rest;  // rest: of 15 bits, or nullptr
    std::vector<int> unsure, unsure_rests;
    double bias_size;  // of the terms of its product with K's offset, no more, in log2 units
};

namespace {

Page read_page(const cpu::AttendTask& t, int64_t n) {
    const cpu::PageRef& at = t.pages[n];
    Page page;
    page.first_key = n * kPageTokens;
    page.numbers = read_piece(at.piece, at.kind, t.head_dim, t.k_bits, t.v_bits,
                              int(std::min<int64_t>(kPageTokens, t.n_keys - page.first_key)));
    const bool channel = at.kind == PageKind::kChannel;
    page.k_eighth = page.numbers.k_bytes ? 1.0 : 0.125;
    page.v_eighth = page.numbers.v_bytes ? 1.0 : 0.125;
    if (t.q_float)
        page.turning = channel ? turning_of_channel(at.piece, ChannelLayout(t.head_dim, t.k_bits, t.v_bits))
                               : turning_of_tokens(at.piece, TokenLayout(t.head_dim));
    return page;
}

// As a GPU's prompt reads the page if it expands it first.
Page expand(const Page& page, const cpu::AttendTask& t, bool turning) {
    Page out = page;
    PageNumbers& n = out.numbers;
    for (size_t i = 0; i < n.k.size(); ++i) {
        const int token = int(i) / t.head_dim, channel = int(i) % t.head_dim;
        if (!n.k_bytes) n.k[i] = 8 * round_k(n.k[i] >> 3, n.k[i] & 7, token, channel);
        if (!n.v_bytes) n.v[i] = 8 * spread_v(n.v[i] >> 3, n.v[i] & 7, token, channel);
    }
    for (int j = 0; j < kPageTokens && turning && !n.k_bytes; ++j)
        n.k_scale[j] = double(scale_with_turning(float(8.0 * n.k_scale[j]), page.turning, j)) / 8.0;
    return out;
}

// A key as a row sees it: its score in log2 units, the magnitudes of its terms, and by how much it may be off.
struct Score {
    double x = kMinusInf, size = 0.0, error = 0.0;
};

class RowOfTask {
  public:
    RowOfTask(const cpu::AttendTask& task, int row, const QueryRow& q) : t_(task), row_(row), q_(q) {}

    bool sees(int64_t key) const { return key >= t_.key_begin[row_] && key < t_.key_end[row_]; }

    Score score(const Page& page, int j, Kernel kernel) const {
        const int d = t_.head_dim;
        const int32_t* k = page.numbers.k.data() + size_t(j) * size_t(d);
        const bool wide = q_.rest && page.numbers.k_bytes;
        int64_t s = 0, unsure = 0;
        for (int c = 0; c < d; ++c) s += int64_t(wide ? kRestUnits * q_.code[c] + q_.rest[c] : q_.code[c]) * k[c];
        for (const int c : wide ? q_.unsure_rests : q_.unsure) unsure += std::abs(k[c]);
        const double factor = double(t_.q_scale[row_]) * page.numbers.k_scale[j] / (wide ? kRestUnits : 1);
        Score score{double(s) * factor, std::fabs(double(s) * factor), double(unsure) * factor};
        if (kernel == Kernel::kHopperPrefill) score.error += kGridStep + kFactorStep * page.k_eighth * std::fabs(double(s));
        const auto add = [&](double x) { score.x += x, score.size += std::fabs(x); };
        for (const uint64_t code : page.turning.code) {
            if (!code) break;
            const TurningPair pair = unpack_turning(code);
            const TurningValues at = turning_values(pair, j);
            const float* q = t_.q_float + int64_t(row_) * d;
            add(double(q[pair.first]) * double(at.first));
            add(double(q[pair.second]) * double(at.second));
        }
        if (kernel == Kernel::kPrefill) {
            score.error += kFloat * (score.size - std::fabs(double(s) * factor));  // q and sines anew
            score.error += kScoreStep * std::min(factor / page.k_eighth, 0x1p-8);  // kCoarsest
        }
        if (t_.bias) add(double(t_.bias[row_])), score.size += q_.bias_size;
        if (t_.softcap_log2 > 0.0f) {
            score.x = double(t_.softcap_log2) * std::tanh(score.x * double(t_.softcap_inv));
            score.size += double(t_.softcap_log2), score.error *= double(cpu::kLog2e);
        }
        if (t_.slope) add(double(t_.slope[row_]) * double(page.first_key + j - t_.position[row_]));
        score.error += kFloat * score.size;
        return score;
    }

  private:
    const cpu::AttendTask& t_;
    const int row_;
    const QueryRow& q_;
};

// True if ranges of pages show: weights depend on the largest score so far.
bool depends_on_range(const cpu::AttendTask& t) {
    return t.exp == ExpMode::kSas || t.p_running;
}

// A key's weight beside the largest so far, by how much of itself it may be off, and whether SAS may as well drop it.
struct Weight {
    double p = 0.0, off = 0.0;
    bool doubtful = false;
    double error() const { return off + (doubtful ? 1.0 : 0.0); }
};

Weight weigh(const cpu::AttendTask& t, Kernel kernel, const Score& score, const Score& largest) {
    Weight weight;
    if (score.x == kMinusInf) return weight;
    const bool sas = t.exp == ExpMode::kSas, prefill = is_prefill(kernel);
    const double u = largest.x - score.x, y = u * kLn2, error = score.error + (prefill ? 0.0 : largest.error);
    weight.off = std::min(std::expm1(kLn2 * error) + kFloat, 1e9);  // no infinity times 0
    if (kernel == Kernel::kPrefill) weight.off += kExponent;
    weight.doubtful = sas && std::fabs(y - double(cpu::kSasCutoff)) <= kLn2 * (score.error + largest.error) + kFloat;
    if (sas && std::fabs(y - std::round(y)) <= kLn2 * error + kFloat) weight.off += kSasStep;
    if (sas && !weight.doubtful && y > double(cpu::kSasCutoff)) return weight;
    const bool by_definition = sas ? !prefill && !weight.doubtful : kernel == Kernel::kCpu;
    weight.p = by_definition ? double(cpu::exp2_neg(float(u), t.exp)) : u < kExpCutoff ? std::exp2(-u) : 0.0;
    return weight;
}

// Of a prefill kernel, for each page: the unit of P times V's scale, beside weights of 2^x less `top`. Hopper's may have it of a
// neighbour.
std::vector<double> prefill_units(const std::vector<Page>& pages, const std::vector<Score>& scores, double top, Kernel kernel) {
    const size_t reach = kernel == Kernel::kHopperPrefill ? 1 : 0;
    const auto with_neighbours = [&](auto of_page) {
        std::vector<double> most(pages.size());
        for (size_t n = 0; n < pages.size(); ++n) {
            for (size_t near = n - std::min(n, reach); near < std::min(n + reach + 1, pages.size()); ++near)
                most[n] = std::max(most[n], of_page(near));
        }
        return most;
    };
    const std::vector<double> scale = with_neighbours([&](size_t n) { return pages[n].numbers.v_unit / pages[n].v_eighth; });
    std::vector<double> units = with_neighbours([&](size_t n) {
        double most = 0.0;
        for (size_t j = 0; j < kPageTokens; ++j) {
            const double v = pages[n].v_scale(j);
            most = std::max(
                most, std::exp2(scores[n * kPageTokens + j].x - top) * (v > 0.0 ? v : std::max(kLeastV, kNoV * scale[n])));
        }
        return most;
    });
    for (size_t n = 0; n < pages.size(); ++n) units[n] *= pages[n].v_eighth / kPrefillLevels;
    return units;
}

// By its P, an integer: RNE(w / unit). Where that is near half way, by both. The unit may be off by unit_off of itself.
Share share_by_code(double w, const Weight& weight, double unit, double unit_off, double levels) {
    const auto code = [&](double x) { return std::min(std::nearbyint(x), levels); };
    const double y = w / unit, off = weight.off + unit_off, p = code(y), most = code(y * (1.0 + off));
    const double least = weight.doubtful ? 0.0 : code(y * std::max(0.0, 1.0 - off));
    return {unit * p, unit * (1.0 + off) * std::max(most - p, p - least) + unit * p * off};
}
// Codes under a V scale of 0, as a universal scale may be, count for a little.
Share share_within_unit(double w, const Weight& weight, double unit) {
    if (w == 0.0) return {0.0, weight.p * (1.0 + weight.off) * kLeastV};
    return {w, std::min(w, unit) + w * weight.error()};
}

void recorded_attend(const cpu::AttendTask& task) {
    if (alive) alive->take(task);
    under(task);
}

}  // namespace

const char* name_of(Kernel kernel) {
    static constexpr const char* kNames[] = {"CPU", "decode", "Hopper's prefill", "prefill"};
    return kNames[int(kernel)];
}

Context make_recorded_context(ta_cpu_isa isa) {
    static cpu::Kernels kernels;
    kernels = *cpu::find_kernels(isa);
    under = kernels.attend;
    kernels.attend = recorded_attend;
    ta::Context::Options options;
    options.threads = 1;
    Seams seams;
    seams.kernels = &kernels;
    return Context(new ta_context{ta::Context::create(std::move(options), std::move(seams)).take()});
}

Replay::Replay(const ReplayedCall& call, KernelOf kernel_of) : call_(call), kernel_of_(kernel_of) {
    int64_t rows = 0;
    for (const ReplayedCall::Member& m : call.members) rows += m.n_query;
    rows_[0].assign(size_t(rows * call.kv_heads * call.group), Row(size_t(call.head_dim)));
    while (member_ < call.members.size() && call.members[member_].n_query == 0) ++member_;
    alive = this;
}
Replay::~Replay() {
    alive = nullptr;
}

// Tasks come sequence after sequence, tile of rows after tile, kv head after kv head, range of pages after range; and under
// batch_invariant, where a range is taken for a few rows at a time, rows after rows.
int64_t Replay::find_place(const cpu::AttendTask& t) {
    const int64_t row = head_ < 0 ? 0 : t.position - positions_;
    if (head_ >= 0 && (row > 0 || (t.position[0] == position_ && t.page_begin == page_))) {
        page_ = t.page_end;
        tile_rows_ = std::max(tile_rows_, row + t.rows);
        return row;
    }
    positions_ = t.position, position_ = t.position[0], page_ = t.page_end;
    if (++head_ == call_.kv_heads) {
        head_ = 0;
        first_row_ += tile_rows_;
    }
    if (first_row_ == call_.members[member_].n_query * call_.group) {
        first_row_ = 0;
        first_query_ += call_.members[member_].n_query;
        do ++member_;
        while (call_.members[member_].n_query == 0);
    }
    tile_rows_ = head_ == 0 ? t.rows : tile_rows_;
    return 0;
}

// The codes must be those of the query; that of a value half way between two codes may be either.
QueryRow Replay::read_query(const cpu::AttendTask& t, int row, int64_t at) {
    const int d = call_.head_dim;
    float x[kMaxHeadDim], most = 0.0f;
    std::copy_n(call_.q + at * d, d, x);
    double squares = 0.0, of_offset = 0.0;
    for (int c = 0; c < d; ++c) {
        squares += double(x[c]) * double(x[c]);
        if (call_.k_offset) of_offset += std::pow(double(call_.k_offset[head_ * d + c]), 2);
    }
    if (call_.numerics->hadamard == TA_ON) rotate(x, d, call_.numerics->hadamard_seed);
    for (int c = 0; c < d; ++c) most = std::max(most, std::fabs(x[c]));
    const double scale = stage1_scale(most, kStage1Levels);
    QueryRow q{t.q + int64_t(row) * d,
               t.q_rest ? t.q_rest + int64_t(row) * d : nullptr,
               {},
               {},
               std::sqrt(squares * of_offset) * call_.scale / kLn2};
    for (int c = 0; c < d; ++c) {
        const double exact = scale > 0.0 ? double(x[c]) / scale : 0.0, off = std::fabs(exact - double(q.code[c]));
        if (off > 0.5 - kFloat * kStage1Levels) q.unsure.push_back(c);
        if (off > 0.5 + kFloat * kStage1Levels) wrong_ = "a code of a query is not the nearest";
        if (!q.rest) continue;
        constexpr double kRoom = kFloat * kStage1Levels * kRestUnits;
        const double rest_off = std::fabs(exact * kRestUnits - double(kRestUnits * q.code[c] + q.rest[c]));
        if (rest_off > 0.5 - kRoom) q.unsure_rests.push_back(c);
        if (rest_off > 0.5 + kRoom) wrong_ = "the rest of a query's code is not the nearest";
    }
    return q;
}

void Replay::take(const cpu::AttendTask& t) {
    const int64_t in_tile = find_place(t), first_row = first_row_ + in_tile;
    const ReplayedCall::Member& member = call_.members[member_];
    std::vector<Page> pages, expanded;
    for (int64_t n = t.page_begin; n < t.page_end; ++n) pages.push_back(read_page(t, n));
    const bool alone = call_.numerics->batch_invariant == TA_ON;
    const Kernel kernel = kernel_of_({t.head_dim, member.n_query * call_.group, t.p_levels, t.p_running, alone});
    if (is_prefill(kernel) && call_.channel_pages) {
        for (const Page& page : pages) expanded.push_back(expand(page, t, call_.numerics->k_turning == TA_ON));
        if (rows_[1].empty()) rows_[1].assign(rows_[0].size(), Row(size_t(call_.head_dim)));
    }
    const bool by_range = t.exp == ExpMode::kSas || (t.p_running && !is_prefill(kernel));
    for (int r = 0; r < t.rows; ++r) {
        const int64_t token = (first_row + r) / call_.group, position = member.n_keys - member.n_query + token;
        const int64_t at =
            (first_query_ + token) * call_.kv_heads * call_.group + head_ * call_.group + (first_row + r) % call_.group;
        Row& row = rows_[0][size_t(at)];
        row.kernel = kernel;
        // A GPU's ranges begin at other pages than a CPU's under a window, and are shorter where queries go alone (gpu.md).
        row.judged =
            kernel == Kernel::kCpu || !by_range ||
            (alone ? member.n_keys <= kShortestRange : call_.options.window == 0 || member.n_query * call_.group <= 16);
        int64_t begin = 0, end = call_.options.mask == TA_MASK_CAUSAL ? position + 1 : member.n_keys;
        if (call_.options.window > 0) {
            begin = std::max<int64_t>(0, position - call_.options.window + 1);
            end = std::min({end, member.n_keys, position + call_.options.window});
        }
        if (t.key_begin[r] != begin || t.key_end[r] != end || t.position[r] != position)
            wrong_ = "a row sees other keys than it should";
        if (!row.judged) continue;
        const QueryRow query = read_query(t, r, at);
        if (!expanded.empty()) {
            Row& of_expanded = rows_[1][size_t(at)];
            of_expanded.kernel = kernel;
            add(t, r, query, expanded, of_expanded);
        }
        add(t, r, query, pages, row);
    }
}

// The pages of a range, whose maxima begin anew where the task's do, to what the row has.
void Replay::add(const cpu::AttendTask& t, int r, const QueryRow& query, const std::vector<Page>& pages, Row& row) {
    const RowOfTask keys(t, r, query);
    const bool prefill = is_prefill(row.kernel), by_page = row.kernel == Kernel::kDecode && !depends_on_range(t);
    std::vector<Score> scores(pages.size() * kPageTokens);
    double top = row.m;
    for (size_t i = 0; i < scores.size(); ++i) {
        const Page& page = pages[i / kPageTokens];
        if (!keys.sees(page.first_key + int64_t(i % kPageTokens))) continue;
        scores[i] = keys.score(page, int(i % kPageTokens), row.kernel);
        if (scores[i].x > top - 1.0) row.size = std::max(row.size, scores[i].size);
        top = std::max(top, scores[i].x);
    }
    if (top == kMinusInf) return;
    row.scale_to(top);
    const std::vector<double> units = prefill ? prefill_units(pages, scores, top, row.kernel) : std::vector<double>();
    Score largest;  // of the range so far, or of the page where a GPU's kernel looks at the page alone
    if (t.m[r] > cpu::kMinusInf) largest.x = row.range_top, largest.error = row.range_top_error;
    for (size_t n = 0; n < pages.size(); ++n) {
        const Page& page = pages[n];
        const std::span<const Score> of_page(scores.data() + n * kPageTokens, kPageTokens);
        if (by_page) largest = {};
        bool seen = false;
        for (const Score& s : of_page) largest.x = std::max(largest.x, s.x), seen |= s.x > kMinusInf;
        if (!seen) continue;  // alpha is 1, P is 0
        for (const Score& s : of_page) {
            if (s.x > largest.x - 1.0) largest.error = std::max(largest.error, s.error);
        }
        Weight weights[kPageTokens];
        double a = 0.0, a_off = 0.0, all = 0.0;
        for (int j = 0; j < kPageTokens; ++j) {
            weights[j] = weigh(t, row.kernel, of_page[size_t(j)], largest);
            const double w = weights[j].p * page.numbers.v_scale[j];
            a = std::max(a, w), all += w;
        }
        for (int j = 0; j < kPageTokens; ++j) {
            const double w = weights[j].p * page.numbers.v_scale[j];
            if (w * (1.0 + weights[j].off) >= a) a_off = std::max(a_off, weights[j].off);
        }
        if (t.p_running) a = page.numbers.v_unit, a_off = 0.0;
        const double factor = std::exp2(largest.x - top);
        const double unit = prefill ? units[n] / factor : a / double(t.p_levels);
        const bool counts = prefill || (page.numbers.v_unit > 0.0 && a >= 0x1p-60 * page.numbers.v_unit);
        if (row.kernel == Kernel::kPrefill) row.left = std::max(row.left, factor * kLeft * unit / page.v_eighth);
        if (prefill && page.v_eighth < 1.0) row.held += factor * std::min(2.0 * all, kFractions * unit) / page.v_eighth;
        for (int j = 0; j < kPageTokens; ++j) {
            const Weight& weight = weights[j];
            if (weight.p == 0.0) continue;
            const double w = weight.p * page.numbers.v_scale[j];
            row.l += factor * weight.p;
            row.l_error += factor * weight.p * weight.error();
            // If LSE is not asked for, l is the sum of the same P.
            if (row.kernel == Kernel::kHopperPrefill && !call_.with_lse)
                row.l_error += factor * weight.p * (w > unit ? unit / w : 1.0);
            const Share share = prefill  ? share_within_unit(w, weight, unit)
                                : counts ? share_by_code(w, weight, unit, a_off, double(t.p_levels))
                                         : Share{0.0, std::min(w * (1.0 + weight.off), 0x1p-59 * page.numbers.v_unit)};
            row.add(page, j, t.head_dim, {share.value * factor, share.error * factor});
            row.note({page.first_key + j, of_page[size_t(j)].x, page.numbers.v_scale[j], unit * std::exp2(largest.x)});
        }
    }
    row.range_top = largest.x, row.range_top_error = largest.error;
}

void Replay::Row::scale_to(double top) {
    const double factor = std::exp2(m - top);
    m = top;
    for (double* x : {&l, &l_error, &held, &left}) *x *= factor;
    for (std::vector<double>* x : {&o, &o_error}) {
        for (double& value : *x) value *= factor;
    }
}

void Replay::Row::add(const Page& page, int j, int head_dim, const Share& share) {
    held += kFloat * share.value * kHeld / page.v_eighth;
    v_largest = std::max(v_largest, page.v_scale(size_t(j)));
    const int32_t* v = page.numbers.v.data() + j * head_dim;
    const double scale = is_prefill(kernel) ? std::max(page.numbers.v_scale[j], kLeastV) : page.numbers.v_scale[j];
    for (int c = 0; c < head_dim; ++c) {
        const double number = v[c], most = std::fabs(number);
        o.data()[c] += share.value * number;
        o_error.data()[c] += share.error * most;
        v_most.data()[c] = std::max(v_most.data()[c], most * scale);
    }
}

void Replay::Row::note(const Key& key) {
    constexpr size_t kMost = 6;
    const auto at = std::find_if(heaviest.begin(), heaviest.end(), [&](const Key& k) { return k.size() < key.size(); });
    if (at == heaviest.end() && heaviest.size() == kMost) return;
    heaviest.insert(at, key);
    if (heaviest.size() > kMost) heaviest.pop_back();
}
std::string Replay::Row::keys() const {
    std::ostringstream text;
    text << "\n  m " << m << ", l " << l << "; of O most are";
    for (const Key& k : heaviest)
        text << "\n    key " << k.key << ": score " << k.score << ", V's scale " << k.v_scale << " in " << k.unit;
    return text.str();
}

ReplayedRow Replay::finish(int64_t at, bool expanded) const {
    const Row& row = rows_[expanded][size_t(at)];
    const auto d = size_t(call_.head_dim);
    ReplayedRow out{row.kernel, std::vector<double>(d), std::vector<double>(d), kMinusInf, 0.0, row.judged};
    const float* sinks = call_.options.sinks;
    const double sink = sinks ? double(sinks[at % (call_.kv_heads * call_.group)]) / kLn2 : kMinusInf,
                 top = std::max(row.m, sink);
    if (top == kMinusInf) return out;
    const double factor = std::exp2(row.m - top), l = row.l * factor + std::exp2(sink - top), off = row.l_error * factor / l;
    out.lse = (top + std::log2(l)) * kLn2;
    out.lse_error = (off < 1.0 ? -std::log1p(-off) : 1e30) + kFloat * (1.0 + std::fabs(out.lse) + row.size);
    const double least = is_prefill(row.kernel) ? kPrefillLeast * row.v_largest + kLeastV : kLeast * row.v_largest;
    for (size_t c = 0; c < d; ++c) {
        out.o[c] = row.o[c] * factor / l;
        const double error = (row.o_error[c] * factor / l + off * std::fabs(out.o[c])) / std::max(1.0 - off, 1e-9);
        // O is between the values, but for what rounding leaves of what was taken off.
        out.o_error[c] = std::min(error, 2.01 * row.v_most[c]) + (row.held + row.left) * factor / l + least;
    }
    return out;
}

std::string Replay::judge(const std::vector<float>& out, ta_dtype type, const std::vector<float>& lse, Shares& shares) {
    const int64_t q_heads = call_.kv_heads * call_.group;
    for (int64_t at = 0; at < int64_t(rows_[0].size()) && wrong_.empty(); ++at) {
        const float* const o = out.data() + at * call_.head_dim;
        const float* const l = call_.with_lse ? &lse[size_t(at)] : nullptr;
        const Kernel kernel = rows_[0][size_t(at)].kernel;
        shares.rows[int(kernel)] += rows_[0][size_t(at)].judged;
        std::string text = judge_row(finish(at, false), o, type, l, shares);
        // Whether pages were expanded, the kernel chose.
        if (!text.empty() && !rows_[1].empty() && rows_[1][size_t(at)].kernel != Kernel::kCpu) {
            const std::string expanded = judge_row(finish(at, true), o, type, l, shares);
            text = expanded.empty() ? "" : text + "; of expanded pages " + expanded;
        }
        if (text.empty()) continue;
        wrong_ = "row " + std::to_string(at / q_heads) + ", head " + std::to_string(at % q_heads) + " (" + name_of(kernel) +
                 " kernel): " + text + rows_[0][size_t(at)].keys();
    }
    return wrong_;
}

std::string Replay::judge_row(const ReplayedRow& row, const float* out, ta_dtype type, const float* lse, Shares& shares) const {
    const double rounding = type == TA_DTYPE_F16 ? 0x1p-11 : type == TA_DTYPE_BF16 ? 0x1p-8 : 0x1p-23;
    const double least = type == TA_DTYPE_F16 ? 0x1p-24 : 0.0;
    double of_o = 0.0, of_lse = 0.0;
    std::ostringstream text;
    text.precision(9);
    for (int c = 0; c < call_.head_dim; ++c) {
        const double got = out[c], want = row.o[size_t(c)];
        const double bound = row.o_error[size_t(c)] + rounding * (std::fabs(want) + row.o_error[size_t(c)]) + least;
        const bool right = row.judged ? std::fabs(got - want) <= bound : std::isfinite(got);
        if (right && row.judged && bound > 0.0) of_o = std::max(of_o, std::fabs(got - want) / bound);
        if (right) continue;
        text << "channel " << c << " of O is " << got << ", not " << want << " +- " << bound;
        return text.str();
    }
    if (lse && row.judged) {
        const double got = *lse, error = got == row.lse ? 0.0 : std::fabs(got - row.lse);
        if (!(error <= row.lse_error)) {
            text << "LSE is " << got << ", not " << row.lse << " +- " << row.lse_error;
            return text.str();
        }
        if (error > 0.0) of_lse = error / row.lse_error;
    }
    shares.o[int(row.kernel)] = std::max(shares.o[int(row.kernel)], of_o);
    shares.lse[int(row.kernel)] = std::max(shares.lse[int(row.kernel)], of_lse);
    return {};
}

}  // namespace ta::testing
