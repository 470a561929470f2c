#include "walks/walk_data.h"

#include <algorithm>
#include <cmath>

namespace ta::testing {
namespace {

// A number that belongs to the style and to `what`: the same for all calls that add to a sequence.
Random fixed(const DataStyle& style, uint64_t what) {
    return Random(style.seed * 1000003u + what);
}

double page_factor(const DataStyle& style, int64_t position, ta_dtype dtype) {
    const int reach = dtype == TA_DTYPE_F16 ? 8 : 12;
    return std::ldexp(1.0, int(fixed(style, 7000 + uint64_t(position / 64)).between(-reach, reach)));
}

bool in_chosen_page(const DataStyle& style, int64_t position) {
    return fixed(style, 9000 + uint64_t(position / 64)).chance(40);
}

void keep_within(std::vector<float>& x, ta_dtype dtype) {
    if (dtype != TA_DTYPE_F16) return;
    for (float& value : x) value = std::clamp(value, -6e4f, 6e4f);
}

struct Channels {
    std::vector<float> mean, deviation;
};
Channels channels_of(const DataStyle& style, const TokenShape& shape, uint64_t which, bool outliers) {
    Random random = fixed(style, which);
    Channels c{random.normals(shape.row(), 0.5f), std::vector<float>(size_t(shape.row()), 1.0f)};
    for (int64_t head = 0; head < shape.heads && outliers; ++head) {
        for (int i = 0; i < 4; ++i) {
            const auto at = size_t(head * shape.head_dim + random.below(shape.head_dim));
            c.mean[at] = float(random.uniform(10.0, 40.0) * (random.chance(50) ? 1.0 : -1.0));
            c.deviation[at] = 3.0f;
        }
    }
    return c;
}

// As a rotary embedding turns a bias of K: halves, and now and then neighbours; in some styles positions begin anew, which may be
// within a page, or frequencies lie close together.
void add_turning_pairs(const DataStyle& style, const TokenShape& shape, int64_t position, float* row) {
    Random random = fixed(style, 3);
    if (random.chance(40)) position %= random.between(20, 300);
    const double slowest = random.chance(30) ? 0.0 : -6.0;
    for (int64_t head = 0; head < shape.heads; ++head) {
        for (int64_t pairs = random.between(1, 10); pairs > 0; --pairs) {
            const bool neighbours = random.chance(20);
            const int64_t at = random.below(shape.head_dim / 2), c = head * shape.head_dim + (neighbours ? 2 * at : at);
            const double size = random.uniform(10.0, 300.0), turn = std::pow(10.0, random.uniform(slowest, 0.3));
            row[c] += float(size * std::cos(turn * double(position)));
            row[c + (neighbours ? 1 : shape.head_dim / 2)] += float(size * std::sin(turn * double(position)));
        }
    }
}

}  // namespace

const char* name_of(KeyKind kind) {
    static constexpr const char* kNames[] = {
        "normal", "outlier channels", "constant channels", "nearly parallel", "pages apart", "turning pairs",
        "zeros",  "zero pages",       "zero tokens",       "denormal",        "huge"};
    static_assert(std::size(kNames) == size_t(KeyKind::kCount));
    return kNames[size_t(kind)];
}
const char* name_of(ValueKind kind) {
    static constexpr const char* kNames[] = {
        "normal",     "heavy tails", "outlier tokens", "outlier pages", "constant channels", "pages apart", "tokens apart",
        "small sink", "zeros",       "zero pages",     "zero tokens",   "denormal",          "huge"};
    static_assert(std::size(kNames) == size_t(ValueKind::kCount));
    return kNames[size_t(kind)];
}
const char* name_of(QueryKind kind) {
    static constexpr const char* kNames[] = {"flat", "usual", "peaky", "steep", "sink", "along a key", "alike", "zeros"};
    static_assert(std::size(kNames) == size_t(QueryKind::kCount));
    return kNames[size_t(kind)];
}

DataStyle draw_style(Random& random) {
    DataStyle style;
    if (random.chance(75)) style.keys = KeyKind(random.below(int64_t(KeyKind::kCount)));
    if (random.chance(75)) style.values = ValueKind(random.below(int64_t(ValueKind::kCount)));
    style.seed = random.bits() >> 20;
    return style;
}

std::vector<float> make_keys(const DataStyle& style, const TokenShape& shape, ta_dtype dtype, int64_t first, int64_t n,
                             Random& random) {
    std::vector<float> x = random.normals(n * shape.row());
    const Channels channels = channels_of(style, shape, 1, style.keys == KeyKind::kOutlierChannels);
    for (int64_t t = 0; t < n; ++t) {
        float* row = x.data() + t * shape.row();
        const bool none = (style.keys == KeyKind::kZeroPages && in_chosen_page(style, first + t)) ||
                          (style.keys == KeyKind::kZeroTokens && random.chance(30)) || style.keys == KeyKind::kZeros;
        const double factor = none                                 ? 0.0
                              : style.keys == KeyKind::kPagesApart ? page_factor(style, first + t, dtype)
                              : style.keys == KeyKind::kDenormal   ? 0x1p-130
                              : style.keys == KeyKind::kHuge       ? (dtype == TA_DTYPE_F16 ? 0x1p12 : 0x1p20)
                                                                   : 1.0;
        for (int64_t i = 0; i < shape.row(); ++i) {
            if (style.keys == KeyKind::kOutlierChannels)
                row[i] = channels.mean[size_t(i)] + channels.deviation[size_t(i)] * row[i];
            if (style.keys == KeyKind::kConstantChannels) row[i] = channels.mean[size_t(i)];
            if (style.keys == KeyKind::kNearlyParallel) row[i] = 0.6f + 0.1f * row[i / shape.head_dim * shape.head_dim];
            row[i] = float(row[i] * factor);
        }
        if (style.keys == KeyKind::kTurning) add_turning_pairs(style, shape, first + t, row);
    }
    keep_within(x, dtype);
    return x;
}

std::vector<float> make_values(const DataStyle& style, const TokenShape& shape, ta_dtype dtype, int64_t first, int64_t n,
                               Random& random) {
    std::vector<float> x = random.normals(n * shape.row());
    const Channels channels = channels_of(style, shape, 2, false);
    for (int64_t t = 0; t < n; ++t) {
        float* row = x.data() + t * shape.row();
        const bool chosen = in_chosen_page(style, first + t);
        const bool none = (style.values == ValueKind::kZeroPages && chosen) ||
                          (style.values == ValueKind::kZeroTokens && random.chance(30)) || style.values == ValueKind::kZeros;
        const double factor = none                                      ? 0.0
                              : style.values == ValueKind::kPagesApart  ? page_factor(style, first + t, dtype)
                              : style.values == ValueKind::kTokensApart ? std::ldexp(1.0, int(random.between(-12, 0)))
                              : style.values == ValueKind::kSmallSink && first + t < 3 ? 0.01
                              : style.values == ValueKind::kDenormal                   ? 0x1p-130
                              : style.values == ValueKind::kHuge ? (dtype == TA_DTYPE_F16 ? 0x1p12 : 0x1p20)
                                                                 : 1.0;
        for (int64_t i = 0; i < shape.row(); ++i) {
            if (style.values == ValueKind::kHeavyTails) row[i] = channels.mean[size_t(i)] + random.student4();
            if (style.values == ValueKind::kConstantChannels) row[i] = channels.mean[size_t(i)];
            row[i] = float(row[i] * factor);
        }
        for (int64_t head = 0; head < shape.heads; ++head) {
            float* head_row = row + head * shape.head_dim;
            if (style.values == ValueKind::kOutlierTokens && random.below(150) == 0) {
                head_row[random.below(shape.head_dim)] = random.chance(50) ? 1e4f : -1e4f;
            }
            if (style.values == ValueKind::kOutlierPages && chosen) head_row[5] = t % 2 ? 1e4f : -1e4f;
        }
    }
    keep_within(x, dtype);
    return x;
}

std::vector<float> make_queries(QueryKind kind, const TokenShape& shape, int64_t group, double scale,
                                const std::vector<float>& keys, int64_t n_keys, int64_t n, Random& random) {
    constexpr int64_t kSampled = 24;
    const int64_t d = shape.head_dim, q_heads = shape.heads * group;
    const double deviation = kind == QueryKind::kFlat    ? 0.3
                             : kind == QueryKind::kPeaky ? 4.0
                             : kind == QueryKind::kSteep ? 40.0
                             : kind == QueryKind::kSink  ? 0.5
                                                         : 1.0;
    std::vector<float> q = random.normals(n * q_heads * d);
    if (kind == QueryKind::kZeros) std::fill(q.begin(), q.end(), 0.0f);
    std::vector<double> scores;
    for (int64_t i = 0; i < n; ++i) {
        const int64_t sees = std::max<int64_t>(1, n_keys - n + i + 1);
        for (int64_t h = 0; h < q_heads; ++h) {
            float* row = q.data() + (i * q_heads + h) * d;
            // Not to the bit: a rotation makes few values of a constant vector, and where they lie half way between two codes
            // either code is right, of many channels at once.
            for (int64_t c = 1; kind == QueryKind::kAlike && c < d; ++c) row[c] = row[0] * (1.0f + 0.01f * row[c]);
            const auto key = [&](int64_t j) { return keys.data() + (j * shape.heads + h / group) * d; };
            const auto dot = [&](const float* a, const float* b) {
                double sum = 0.0;
                for (int64_t c = 0; c < d; ++c) sum += double(a[c]) * double(b[c]);
                return sum;
            };
            // Add, along the key, what gives it the score.
            const auto look_at = [&](int64_t j, double score) {
                const double norm = dot(key(j), key(j));
                if (norm < 1e-4) return;
                const double step = (score / scale - dot(row, key(j))) / norm;
                for (int64_t c = 0; c < d; ++c) row[c] += float(step * key(j)[c]);
            };
            if (n_keys == 0) continue;
            scores.clear();
            double sum = 0.0, squares = 0.0, largest = 0.0;
            for (int64_t s = 0; s < std::min(kSampled, sees); ++s) {
                scores.push_back(dot(row, key(sees <= kSampled ? s : random.below(sees))) * scale);
                sum += scores.back();
                largest = std::max(largest, std::fabs(scores.back()));
            }
            const double mean = sum / double(scores.size());
            for (const double s : scores) squares += (s - mean) * (s - mean);
            const double spread = std::sqrt(squares / double(scores.size()));
            // Scores of hundreds lose their last bits in fp32, and what then decides is no kernel's fault.
            const double most = kind == QueryKind::kSteep ? 300.0 : 60.0;
            double factor = spread > 1e-6 * largest ? deviation / spread : 1.0;
            if (largest * factor > most) factor = most / largest;
            factor = std::min(factor, 1e3);
            for (int64_t c = 0; c < d; ++c) row[c] = float(row[c] * factor);
            if (kind == QueryKind::kSink) look_at(0, mean * factor + std::log(2.3 * double(sees)));
            if (kind == QueryKind::kAlongKey) look_at(random.below(sees), 14.0);
        }
    }
    return q;
}

}  // namespace ta::testing
