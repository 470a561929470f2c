#include "abi/walk_judge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <sstream>

namespace ta::testing {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

// Bounds. An error is |got - truth| over a set of rows as a share of |truth|; it may be kTimes that of the CPU beside it, and
// the rest.
//
// The decode kernel does what a CPU does, but for the order of sums and ex2 in place of a polynomial: as gpu_shapes_test.
constexpr double kDecodeTimes = 1.6, kDecodeRest = 2e-3, kDecodeLse = 1e-3;
// The prefill kernel: 1.1 to 2.2 times the CPU's error with 8-bit P (docs/kernels.md, Measured), which was seen over many rows;
// over few it is a matter of luck by how much. Equal scores have P without an error on a CPU, here that of the grid: 0.01, as
// in prefill_test.cu. Of LSE half a step of the grid is 3.1e-3, and there is rounding; that of factors comes on top (doubt()).
constexpr double kPrefillTimes = 2.5, kPrefillRest = 3e-3, kFewRows = 1e-2, kEqualScores = 1e-2, kPrefillLse = 5e-3;
// Whatever the data, it may have this times the error that P of 8 bits in units of the row's largest has.
constexpr double kTimesEightBits = 1.25;
// The prefill kernel has V's codes plus 128, the decode kernel V's zero points, and both take that off in fp32: so much of what
// V's scale could hold stays.
constexpr double kOffsetRest = 0x1p-22;
// A key at SAS's threshold is in on one side and out on the other, where scores are rounded to the grid.
constexpr double kSasRest = 2e-2, kSasLse = 1.2e-2;
// A code of a query that is so near half way between two, as a share of the largest, may be either. Of a query along a key many
// codes may be so together.
constexpr double kNearHalf = 2e-6;
// A row by itself: never an error as large as O where the CPU has none of the kind.
constexpr double kFar = 0.1, kFarTimes = 10.0;
// P of 16 bits beside float64: 2^-17 of a page's largest weight for each key.
// SAS's cubic is off by up to 1.03e-3 of a weight.
constexpr double kTruth = 1e-3, kTruthLse = 2e-4, kSasCubic = 1.1e-3;

// O of 0 may be something of this size beside a V whose largest is 1, and in any case of the second: what stands for V of 0.
constexpr double kZero = 1e-12, kNothing = 1e-18;

constexpr double kGrid = 0.5 / 112.0 * 0.6931471805599453;  // half a step of the prefill kernel's scores, in nats
constexpr int64_t kPage = 64, kSetTokens = 64;

// One row in float64.
struct Row {
    int64_t begin = 0;
    std::vector<double> score, weight;  // of keys begin, begin + 1, ...; weights include the sink's part of l
    std::vector<double> o;
    double lse = kMinusInf;
    std::vector<double> product;  // of q and k, before scale, softcap and ALiBi
    double of_offset = 0.0;       // of q and K's offset, which the product of the codes is without
    double length = 0.0;          // |o|
};

double norm_of(const float* x, int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) sum += double(x[i]) * double(x[i]);
    return std::sqrt(sum);
}
double largest_of(const float* x, int64_t n) {
    double most = 0.0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, std::fabs(double(x[i])));
    return most;
}

// What is asked of the keys and values of a kv head again and again.
struct Sizes {
    Sizes(const JudgedCall& c, int64_t kv_head)
        : page_peak(size_t(c.n_keys / kPage + 2)), page_largest(size_t(c.n_keys / kPage + 2)) {
        for (int64_t j = 0; j < c.n_keys; ++j) {
            const int64_t at = (j * c.kv_heads + kv_head) * c.head_dim;
            // What is quantized is the key less K's offset, beside which the key may be small.
            std::vector<float> stored(c.k + at, c.k + at + c.head_dim);
            for (int64_t ch = 0; c.k_offset && ch < c.head_dim; ++ch)
                stored[size_t(ch)] -= c.k_offset[kv_head * c.head_dim + ch];
            peak.push_back(peak_of(c, stored.data()));
            key_length.push_back(norm_of(stored.data(), c.head_dim));
            length.push_back(norm_of(c.v + at, c.head_dim));
            largest.push_back(largest_of(c.v + at, c.head_dim));
            double &keys = page_peak[size_t(j / kPage)], &values = page_largest[size_t(j / kPage)];
            keys = std::max(keys, peak.back()), values = std::max(values, largest.back());
        }
        page_most = page_largest;
        for (size_t page = 1; page < page_most.size() && !c.v_has_token_scales; ++page)
            page_most[page] = std::max(page_most[page], page_most[page - 1]);
    }
    // The largest channel as it is quantized: a rotation leaves peaks of about 3 times the mean square root.
    static double peak_of(const JudgedCall& c, const float* x) {
        return c.rotated ? 3.2 * norm_of(x, c.head_dim) / std::sqrt(double(c.head_dim)) : largest_of(x, c.head_dim);
    }
    std::vector<double> peak, key_length;         // of a key as it is stored
    std::vector<double> length, largest;          // of a value
    std::vector<double> page_peak, page_largest;  // with a page of zeros at the end
    std::vector<double> page_most;                // what V's scale may follow, where codes of 0 hide it: of all pages so far
    // May the scales of V in a page and the next be within fourfold of each other?
    bool may_be_near(size_t page) const {
        return page_largest[page] <= 3.9 * page_most[page + 1] && page_largest[page + 1] <= 3.9 * page_most[page];
    }
};

// The queries as their codes say them, asked for when that is needed first, and how far they are off where codes may be others.
class Queries {
  public:
    explicit Queries(const JudgedCall& call) : c_(call) {}
    const float* read(int64_t row) {
        if (read_.empty()) read_ = c_.read_codes(c_.q);
        return read_.data() + row * c_.head_dim;
    }
    double off(int64_t row) {
        if (off_.empty()) find_off();
        return off_[size_t(row)];
    }

  private:
    // By queries that differ by as little: of the codes that lie half way half are others then.
    void find_off() {
        constexpr int kTries = 24;
        const int64_t rows = c_.n_query * c_.kv_heads * c_.group, d = c_.head_dim;
        std::minstd_rand random(1);
        off_.assign(size_t(rows), 0.0);
        for (int n = 0; n < kTries; ++n) {
            std::vector<float> near(c_.q, c_.q + rows * d);
            for (int64_t row = 0; row < rows; ++row) {
                const double step = kNearHalf * Sizes::peak_of(c_, c_.q + row * d);
                for (int64_t i = 0; i < d; ++i)
                    near[size_t(row * d + i)] += float(step * (double(random() % 2001) - 1000.0) / 1000.0);
            }
            near = c_.read_codes(near.data());
            for (int64_t row = 0; row < rows; ++row) {
                const float* as_read = read(row);
                double squares = 0.0;
                for (int64_t i = 0; i < d; ++i) squares += std::pow(double(near[size_t(row * d + i)]) - double(as_read[i]), 2);
                // Less than half a step is the queries' own difference.
                const double step = Sizes::peak_of(c_, c_.q + row * d) / 240.0;
                if (squares > 0.25 * step * step) off_[size_t(row)] = std::max(off_[size_t(row)], std::sqrt(2.0 * squares));
            }
        }
    }

    const JudgedCall& c_;
    std::vector<float> read_;
    std::vector<double> off_;
};

class RowJudge {
  public:
    RowJudge(const JudgedCall& call, Queries& queries, const Sizes& sizes, int64_t row)
        : c_(call),
          queries_(queries),
          sizes_(sizes),
          row_(row),
          token_(row / q_heads()),
          head_(row % q_heads()),
          q_(call.q + row * call.head_dim),
          read_(queries.read(row)) {}

    const float* key(int64_t j) const { return c_.k + (j * c_.kv_heads + head_ / c_.group) * c_.head_dim; }
    const float* value(int64_t j) const { return c_.v + (j * c_.kv_heads + head_ / c_.group) * c_.head_dim; }
    int64_t q_heads() const { return c_.kv_heads * c_.group; }
    int64_t position() const { return c_.n_keys - c_.n_query + token_; }

    // Under SAS keys are dropped where the maximum so far drops them; those within `near` of the threshold are kept, and
    // `doubtful` gets their weight.
    Row compute(double near, double* doubtful) const {
        Row r;
        double bias = 0.0;  // K's offset multiplies q itself, not its codes
        for (int64_t ch = 0; c_.k_offset && ch < c_.head_dim; ++ch) {
            const double offset = double(c_.k_offset[head_ / c_.group * c_.head_dim + ch]);
            bias += (double(q_[ch]) - double(read_[ch])) * offset, r.of_offset += double(q_[ch]) * offset;
        }
        r.o.assign(size_t(c_.head_dim), 0.0);
        int64_t end = c_.causal ? std::min(c_.n_keys, position() + 1) : c_.n_keys;
        if (c_.window > 0) {
            r.begin = std::max<int64_t>(0, position() - c_.window + 1);
            end = std::min(end, position() + c_.window);
        }
        const double sink = c_.sinks ? double(c_.sinks[head_]) : kMinusInf;
        double top = sink;
        for (int64_t j = r.begin; j < end; ++j) {
            const float* k = key(j);
            double product = 0.0;
            for (int64_t ch = 0; ch < c_.head_dim; ++ch) product += double(read_[ch]) * double(k[ch]);
            r.product.push_back(product + bias);
            double s = r.product.back() * c_.scale;
            if (c_.softcap > 0.0) s = c_.softcap * std::tanh(s / c_.softcap);
            if (c_.slopes) s += double(c_.slopes[head_]) * double(j - position());
            r.score.push_back(s);
            top = std::max(top, s);
        }
        if (top == kMinusInf) return r;
        double l = c_.sinks ? std::exp(sink - top) : 0.0, unsure = 0.0, running = kMinusInf;
        const int64_t range = c_.n_query * c_.group <= 16 ? 16 : 64;  // pages, from the first that a row of the call sees
        const int64_t first = c_.window > 0 ? std::max<int64_t>(0, c_.n_keys - c_.n_query - c_.window + 1) / kPage : 0;
        for (size_t i = 0; i < r.score.size(); ++i) {
            const int64_t page = (r.begin + int64_t(i)) / kPage;
            if (i == 0 || (r.begin + int64_t(i)) % kPage == 0) {
                if ((page - first) % range == 0) running = kMinusInf;
                const auto page_end = std::min<size_t>(r.score.size(), size_t((page + 1) * kPage - r.begin));
                for (size_t t = i; t < page_end; ++t) running = std::max(running, r.score[t]);
            }
            const double below = running - r.score[i], p = std::exp(r.score[i] - top);
            const bool close = c_.sas && std::fabs(below - 6.0) <= near;
            if (close) unsure += p;
            r.weight.push_back(c_.sas && below > 6.0 && !close ? 0.0 : p);
            l += r.weight.back();
        }
        for (size_t i = 0; i < r.weight.size(); ++i) {
            r.weight[i] /= l;
            const float* v = value(r.begin + int64_t(i));
            for (int64_t ch = 0; r.weight[i] > 0.0 && ch < c_.head_dim; ++ch) r.o[size_t(ch)] += r.weight[i] * double(v[ch]);
        }
        for (const double x : r.o) r.length += x * x;
        r.length = std::sqrt(r.length);
        r.lse = top + std::log(l);
        if (doubtful) *doubtful = unsure / l;
        return r;
    }

    // What P's units may do to O. A unit is 1/levels of the largest weight times V's scale in a page; of the prefill kernel in
    // 128 keys, or a page where two pages' scales are more than fourfold apart. V's scale is one of the page or, in the judge's
    // eyes as well, the token's own, within a power of two, or, where codes are 0, more than they show. A page whose largest is
    // below 2^-60 of what its largest V would have is nothing to a row (docs/numerics.md, 8.6).
    double by_units(const Row& r) const {
        if (!c_.by_prefill_kernel) return by_units(r, c_.p_levels, false, false);
        // Under a window the 128 keys begin at whichever page the first row of some others sees first.
        return std::max(by_units(r, 255.0, true, false), c_.window > 0 ? by_units(r, 255.0, true, true) : 0.0);
    }
    double by_units_of_truth(const Row& r) const { return by_units(r, 65535.0, false, false); }
    double by_units(const Row& r, double levels, bool prefill, bool begins_odd) const {
        // The prefill kernel may round up for some keys and down for others of the same weight: a unit, not half of one.
        constexpr double kUnitOfHalf = 1.0 / 0.55;
        const double half = 0.55 / levels, grid = prefill ? kGrid : 1e-5;
        const int64_t end = r.begin + int64_t(r.weight.size()), block_tokens = prefill ? 2 * kPage : kPage;
        double gone = 0.0, squares = 0.0;
        const auto look_at = [&](int64_t from, int64_t to, double largest_of_page) {
            from = std::max(from, r.begin), to = std::min(to, end);
            double by_tokens = 0.0, by_pages = 0.0, unscaled = 0.0;  // the largest weight times V's scale
            for (int64_t j = from; j < to; ++j) {
                const double w = r.weight[size_t(j - r.begin)];
                unscaled = std::max(unscaled, w);
                by_tokens = std::max(by_tokens, w * sizes_.largest[size_t(j)]);
                by_pages = std::max(by_pages, w * sizes_.page_largest[size_t(j / kPage)]);
            }
            const bool nothing = by_tokens < 0x1p-58 * largest_of_page;
            for (int64_t j = from; j < to; ++j) {
                const double w = r.weight[size_t(j - r.begin)], length = sizes_.length[size_t(j)];
                const double own = sizes_.largest[size_t(j)], of_page = sizes_.page_largest[size_t(j / kPage)];
                double unsure = half * std::max({of_page > 0.0 ? by_pages / of_page : 0.0,
                                                 own > 0.0 ? 2.0 * by_tokens / own : 0.0, unscaled});
                // One page may have a scale, the tokens of the other theirs.
                if (!c_.v_has_token_scales && own > 0.0) unsure = std::max(unsure, half * by_pages / own);
                if (nothing || w <= unsure) {
                    gone += w * (length + (prefill && !c_.with_lse ? r.length : 0.0));
                } else if (prefill) {
                    squares += std::pow((kUnitOfHalf * unsure + grid * w) * length, 2);
                } else {
                    gone += (unsure + grid * w) * length;
                }
            }
        };
        const int64_t first = r.begin / block_tokens * block_tokens + (begins_odd ? kPage - block_tokens : 0);
        for (int64_t from = first; from < end; from += block_tokens) {
            const int64_t page = from / kPage;
            const double a = from < 0 ? 0.0 : sizes_.page_largest[size_t(page)];
            const double b = prefill ? sizes_.page_largest[size_t(page + 1)] : 0.0;
            if (prefill && from >= 0 && sizes_.may_be_near(size_t(page))) {
                look_at(from, from + block_tokens, std::max(a, b));
            } else {
                look_at(from, from + kPage, a);
                if (prefill) look_at(from + kPage, from + 2 * kPage, b);
            }
        }
        return gone + 2.0 * std::sqrt(squares);
    }

    // What P of 8 bits in units of the row's largest does to O.
    double by_eight_bits(const Row& r) const {
        double most = 0.0;
        for (const double w : r.weight) most = std::max(most, w);
        if (most == 0.0) return 0.0;
        std::vector<double> off(size_t(c_.head_dim));
        for (size_t i = 0; i < r.weight.size(); ++i) {
            const double rounding = std::round(255.0 * r.weight[i] / most) * most / 255.0 - r.weight[i];
            const float* v = value(r.begin + int64_t(i));
            for (size_t ch = 0; ch < off.size(); ++ch) off[ch] += rounding * double(v[ch]);
        }
        return std::sqrt(std::inner_product(off.begin(), off.end(), off.begin(), 0.0));
    }
    // What is left of the 128 that V's codes are stored plus.
    double by_offset(const Row& r) const {
        double sum = 0.0;
        for (size_t i = 0; i < r.weight.size(); ++i)
            sum += r.weight[i] * std::max(c_.v_most, sizes_.page_most[size_t(r.begin + int64_t(i)) / size_t(kPage)]);
        return kOffsetRest * sum * std::sqrt(double(c_.head_dim));
    }

    // The keys that matter most to O, for the text of a failure. `got`: O, from which what they seem to weigh.
    std::string keys_text(const float* got) const {
        const Row r = compute(0.0, nullptr);
        std::vector<size_t> order(r.weight.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = i;
        const auto part = [&](size_t i) { return std::exp(r.score[i] - r.lse) * sizes_.length[size_t(r.begin) + i]; };
        const size_t n = std::min<size_t>(6, order.size());
        std::partial_sort(order.begin(), order.begin() + int64_t(n), order.end(),
                          [&](size_t a, size_t b) { return part(a) > part(b); });
        std::ostringstream text;
        text.precision(5);
        text << "\n  LSE " << r.lse << ", |O| " << r.length
             << "; key: score, weight, what that seems to be, |v|, largest of v, of its page";
        for (size_t i = 0; i < n; ++i) {
            const size_t at = order[i], j = size_t(r.begin) + at;
            double along = 0.0;  // O less all other keys, along v
            for (int64_t ch = 0; ch < c_.head_dim; ++ch)
                along += (double(got[ch]) - r.o[size_t(ch)]) * double(value(int64_t(j))[ch]);
            text << "\n  " << j << ": " << r.score[at] << ", " << r.weight[at] << ", "
                 << r.weight[at] + along / std::pow(sizes_.length[j], 2) << ", " << sizes_.length[j] << ", "
                 << sizes_.largest[j] << ", " << sizes_.page_largest[j / size_t(kPage)];
        }
        return text.str();
    }

    double largest_product() const {  // what a score would be if q and the longest key were parallel
        double longest = 0.0;
        for (int64_t j = 0; j < c_.n_keys; ++j) longest = std::max(longest, norm_of(key(j), c_.head_dim));
        return longest * norm_of(q_, c_.head_dim) * c_.scale;
    }

    double without_cancelling(const Row& r) const {  // O if all values pointed the same way
        double sum = 0.0;
        for (size_t i = 0; i < r.weight.size(); ++i) sum += r.weight[i] * sizes_.length[size_t(r.begin) + i];
        return sum;
    }

    struct Doubt {
        double o = 0.0, lse = 0.0;
    };
    // What docs/gpu.md says may come on top in this row. Only asked for where the plain bounds do not hold.
    Doubt doubt() const {
        const Row r = compute(0.0, nullptr);
        const double q_step = Sizes::peak_of(c_, q_) / 119.0, codes_off = queries_.off(row_);
        double off = 0.0, largest_of_codes = 0.0, top = kMinusInf;
        for (const double score : r.score) top = std::max(top, score);
        for (size_t i = 0; i < r.weight.size(); ++i) {
            const auto j = size_t(r.begin) + i;
            const double step = q_step * sizes_.page_peak[j / size_t(kPage)] / 119.0;
            if (step > 0.0) largest_of_codes = std::max(largest_of_codes, std::fabs(r.product[i] - r.of_offset) / step);
            // Scores of hundreds have few bits after the point.
            const double of_score = codes_off * sizes_.key_length[j] * c_.scale + std::fabs(r.score[i]) * 4e-7;
            if (r.score[i] + of_score > top - 9.2) off = std::max(off, of_score);
        }
        double unsure = 0.0;  // at SAS's threshold
        const Row read = c_.sas ? compute((c_.by_prefill_kernel ? 2 * kGrid : 1e-4) + off, &unsure) : r;
        double about_mean = 0.0, longest = 0.0;
        for (size_t i = 0; i < read.weight.size(); ++i) {
            const float* v = value(read.begin + int64_t(i));
            double apart = 0.0;
            for (int64_t ch = 0; ch < c_.head_dim; ++ch) apart += std::pow(double(v[ch]) - read.o[size_t(ch)], 2);
            about_mean += read.weight[i] * std::sqrt(apart);
            longest = std::max(longest, sizes_.length[size_t(read.begin) + i]);
        }
        Doubt d;
        d.o = by_units(read) + by_units_of_truth(read);
        if (about_mean > 0.0) d.o += std::expm1(off) * about_mean;
        if (c_.by_prefill_kernel) d.o += kTimesEightBits * by_eight_bits(read);
        d.lse = off;
        if (c_.sas) d.o += unsure * (longest + read.length), d.lse += 2.0 * unsure;
        // Factors of scores are rounded: a step of the grid for products of the codes of 2^17. Where queries and keys are nearly
        // parallel, weights may be off by up to a tenth.
        if (c_.by_prefill_kernel) d.lse += 2.0 * kGrid * largest_of_codes * 0x1p-17;
        if (c_.by_prefill_kernel && largest_of_codes > 110000.0) d.o += 0.1 * about_mean, d.lse += 0.1;
        const double most = 2.0 * longest;  // O is between the values, whatever the weights
        if (!(d.o <= most)) d.o = most;     // nor is it no number
        d.o += 2.0 * by_offset(read);       // the truth's, too
        return d;
    }

  private:
    const JudgedCall& c_;
    Queries& queries_;
    const Sizes& sizes_;
    const int64_t row_, token_, head_;
    const float *q_, *read_;
};

struct Difference {
    double error = 0.0, beside = 0.0, norm = 0.0;  // squares
};
Difference row_difference(const JudgedCall& c, int64_t row) {
    Difference x;
    for (int64_t i = row * c.head_dim; i < (row + 1) * c.head_dim; ++i) {
        const double truth = c.truth[i], e = double(c.got[i]) - truth, b = double(c.beside[i]) - truth;
        x.error += std::isfinite(e) ? e * e : 1e300;
        x.beside += b * b;
        x.norm += truth * truth;
    }
    return x;
}

std::string row_text(const JudgedCall& c, int64_t row, const Difference& x) {
    const int64_t q_heads = c.kv_heads * c.group;
    int64_t worst = 0;
    double most = -1.0;
    for (int64_t ch = 0; ch < c.head_dim; ++ch) {
        const double e = std::fabs(double(c.got[row * c.head_dim + ch]) - double(c.truth[row * c.head_dim + ch]));
        if (!(e <= most)) worst = ch, most = std::isnan(e) ? 1e300 : e;
    }
    std::ostringstream text;
    text.precision(7);
    text << "query " << row / q_heads << " of " << c.n_query << " over " << c.n_keys << " keys, head " << row % q_heads
         << ": O off by " << std::sqrt(x.error / x.norm) << " of itself, the CPU's by " << std::sqrt(x.beside / x.norm)
         << "; worst in channel " << worst << ": " << c.got[row * c.head_dim + worst] << ", not "
         << c.truth[row * c.head_dim + worst] << " (CPU: " << c.beside[row * c.head_dim + worst] << ")";
    return text.str();
}

// What is known of rows, found when it is needed first.
class Rows {
  public:
    explicit Rows(const JudgedCall& call) : call_(call), queries_(call) {}
    RowJudge row(int64_t row) {
        const int64_t kv_head = row % (call_.kv_heads * call_.group) / call_.group;
        const auto [sizes, added] = sizes_.try_emplace(kv_head, call_, kv_head);
        return {call_, queries_, sizes->second, row};
    }

  private:
    const JudgedCall& call_;
    Queries queries_;
    std::map<int64_t, Sizes> sizes_;
};

std::string judge_lse(const JudgedCall& c, Rows& known_rows, Shares& shares) {
    const int64_t q_heads = c.kv_heads * c.group;
    for (int64_t row = 0; row < c.n_query * q_heads; ++row) {
        const double got = c.got_lse[row], truth = c.truth_lse[row];
        ++shares.lse_rows;
        if (got == truth) continue;
        const double plain = !c.by_prefill_kernel ? kDecodeLse : c.sas ? kSasLse : kPrefillLse;
        const double error = std::fabs(got - truth);
        double bound = plain + 1e-6 * std::fabs(truth);
        if (std::isfinite(truth) && !(error <= bound)) {
            bound += known_rows.row(row).doubt().lse;
            ++shares.lse_excused;
        }
        if (!(error <= bound)) {
            std::ostringstream text;
            text.precision(9);
            text << "query " << row / q_heads << " of " << c.n_query << " over " << c.n_keys << " keys, head " << row % q_heads
                 << ": LSE " << got << ", not " << truth << "; it may be off by " << bound
                 << known_rows.row(row).keys_text(c.got + row * c.head_dim);
            return text.str();
        }
        double& share = c.by_prefill_kernel ? shares.lse_prefill : shares.lse_decode;
        share = std::max(share, error / bound);
    }
    return {};
}

}  // namespace

std::string judge(const JudgedCall& c, Shares& shares) {
    const int64_t q_heads = c.kv_heads * c.group;
    const double rounding = c.out_type == TA_DTYPE_F16 ? 6e-4 : c.out_type == TA_DTYPE_BF16 ? 4e-3 : 0.0;
    const double least = std::max(c.out_type == TA_DTYPE_F16 ? 1e-7 : kNothing,
                                  kZero * largest_of(c.v, c.n_keys * c.kv_heads * c.head_dim));  // of an element
    struct Of {
        int64_t row;
        Difference x;
    };
    std::vector<Of> rows;
    Rows known_rows(c);
    for (int64_t first = 0; first < c.n_query; first += kSetTokens) {
        for (int64_t kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
            rows.clear();
            Difference all;
            for (int64_t t = first; t < std::min(c.n_query, first + kSetTokens); ++t) {
                for (int64_t g = 0; g < c.group; ++g) {
                    const int64_t row = t * q_heads + kv_head * c.group + g;
                    const Difference x = row_difference(c, row);
                    rows.push_back({row, x});
                    all.error += x.error, all.beside += x.beside, all.norm += x.norm;
                }
            }
            std::sort(rows.begin(), rows.end(), [](const Of& a, const Of& b) { return a.x.error > b.x.error; });
            const double norm = std::sqrt(all.norm), beside = std::sqrt(all.beside), n = double(rows.size());
            const double few = kFewRows / std::sqrt(n), zero = least * std::sqrt(n * double(c.head_dim));
            const double rest = !c.by_prefill_kernel   ? kDecodeRest
                                : c.sas                ? kSasRest
                                : beside < 2e-3 * norm ? kEqualScores + few
                                                       : kPrefillRest + few;
            const double bound =
                (c.by_prefill_kernel ? kPrefillTimes : kDecodeTimes) * beside + (rest + rounding) * norm + zero;
            ++shares.o_sets;
            double left = all.error;
            bool excused = false;
            const auto known = [&](const Of& of) {  // the error that is left when what is known of the row is taken off
                excused = true;
                const double doubt = known_rows.row(of.row).doubt().o;
                return std::max(0.0, std::sqrt(of.x.error) - doubt);
            };
            for (size_t i = 0; i < rows.size() && !(std::sqrt(left) <= bound); ++i) {
                const double e = known(rows[i]);
                left += e * e - rows[i].x.error;
            }
            if (!(std::sqrt(std::max(0.0, left)) <= bound)) {
                std::ostringstream text;
                text << "O of kv head " << kv_head << ", queries " << first << " to "
                     << std::min(c.n_query, first + kSetTokens) - 1 << " is off by " << std::sqrt(all.error) / norm
                     << " of itself, the CPU's by " << beside / norm << "; the bound is " << bound / norm << ", and "
                     << (std::sqrt(all.error) - std::sqrt(left)) / norm
                     << " for what is known of rows\n  the worst row: " << row_text(c, rows[0].row, rows[0].x)
                     << known_rows.row(rows[0].row).keys_text(c.got + rows[0].row * c.head_dim);
                return text.str();
            }
            for (const Of& of : rows) {
                const double far = std::max(kFar * std::sqrt(of.x.norm), kFarTimes * std::sqrt(of.x.beside)) +
                                   least * std::sqrt(double(c.head_dim));
                if (std::sqrt(of.x.error) <= far || known(of) <= far) continue;
                std::ostringstream text;
                text << "a row is far off: " << row_text(c, of.row, of.x) << "; what is known of it explains "
                     << (std::sqrt(of.x.error) - known(of)) / std::sqrt(of.x.norm)
                     << known_rows.row(of.row).keys_text(c.got + of.row * c.head_dim);
                return text.str();
            }
            shares.o_excused += excused;
            double& share = c.by_prefill_kernel ? shares.o_prefill : shares.o_decode;
            share = std::max(share, std::sqrt(std::max(0.0, left)) / bound);
        }
    }
    return c.with_lse ? judge_lse(c, known_rows, shares) : std::string();
}

std::string judge_truth(const JudgedCall& c, Shares& shares) {
    const int64_t q_heads = c.kv_heads * c.group, all = c.n_query * q_heads, step = std::max<int64_t>(1, all / 24) | 1;
    Rows known_rows(c);
    for (int64_t row = 0; row < all; row += step) {
        double unsure = 0.0;
        const RowJudge judge = known_rows.row(row);
        const Row r = judge.compute(1e-3, &unsure);
        if (unsure > 0.0) continue;
        double error = 0.0;
        for (int64_t ch = 0; ch < c.head_dim; ++ch)
            error += std::pow(double(c.truth[row * c.head_dim + ch]) - r.o[size_t(ch)], 2);
        error = std::sqrt(error);
        const double times = c.sas ? 10.0 : 1.0, lse_error = std::fabs(double(c.truth_lse[row]) - r.lse);
        double bound = times * kTruth * r.length + 0x1p-100;
        // fp32 in the scores, and in the rotation of q there and back
        const double lse_bound = times * kTruthLse + 2e-6 * std::max(std::fabs(r.lse), judge.largest_product());
        ++shares.exact_rows;
        if (!(error <= bound)) {
            bound += judge.by_units_of_truth(r);
            if (c.sas) bound += kSasCubic * judge.without_cancelling(r);
            ++shares.exact_excused;
        }
        const bool same_lse = double(c.truth_lse[row]) == r.lse || lse_error <= lse_bound;  // both may be -inf
        if (error <= bound && same_lse) {
            shares.exact = std::max(shares.exact, error / bound);
            continue;
        }
        std::ostringstream text;
        text.precision(9);
        text << "a CPU with P of 16 bits beside float64, query " << row / q_heads << " of " << c.n_query << " over " << c.n_keys
             << " keys, head " << row % q_heads << ": O off by " << error / r.length << " of itself, LSE " << c.truth_lse[row]
             << ", not " << r.lse;
        return text.str();
    }
    return {};
}

}  // namespace ta::testing
