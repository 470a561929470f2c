// Keys, values and queries of the twin walk: each kind is one that some quantizer or kernel was once wrong about.
#pragma once

#include <cstdint>
#include <vector>

#include "support/numbers.h"

namespace ta::testing {

enum class KeyKind {
    kNormal,
    kOutlierChannels,   // four channels with means of 10 to 40
    kConstantChannels,  // every token alike: equal scores
    kNearlyParallel,    // every channel of a token alike: dot products of codes are the largest that there are
    kPagesApart,        // magnitudes of neighbouring pages differ by 2^0 to 2^24
    kTurning,           // up to ten pairs of channels with a constant of 10 to 300, turned by the position
    kZeros,
    kZeroPages,
    kZeroTokens,
    kDenormal,
    kHuge,
    kCount
};
enum class ValueKind {
    kNormal,
    kHeavyTails,     // Student's t around a mean for each channel
    kOutlierTokens,  // single values of 1e4
    kOutlierPages,   // a channel of +-1e4 in some pages
    kConstantChannels,
    kPagesApart,
    kTokensApart,  // magnitudes of neighbouring tokens differ by up to 2^12
    kSmallSink,    // the first tokens are near 0
    kZeros,
    kZeroPages,
    kZeroTokens,
    kDenormal,
    kHuge,
    kCount
};
enum class QueryKind {
    kFlat,      // scores of deviation 0.3
    kUsual,     // 1
    kPeaky,     // 4
    kSteep,     // 40
    kSink,      // the first key has 70% of the weight
    kAlongKey,  // some key lies exactly where the query looks
    kAlike,     // all channels nearly alike
    kZeros,
    kCount
};
const char* name_of(KeyKind kind);
const char* name_of(ValueKind kind);
const char* name_of(QueryKind kind);

// The style of K and V of one layer of a sequence, from here on.
struct DataStyle {
    KeyKind keys = KeyKind::kNormal;
    ValueKind values = ValueKind::kNormal;
    uint64_t seed = 0;  // of means and of the pages' magnitudes
};
DataStyle draw_style(Random& random);

struct TokenShape {
    int64_t heads, head_dim;
    int64_t row() const { return heads * head_dim; }
};

// `n` tokens from position `first` on, [n, heads, head_dim], within what `dtype` holds. make_queries may ask less of F16.
std::vector<float> make_keys(const DataStyle& style, const TokenShape& shape, ta_dtype dtype, int64_t first, int64_t n,
                             Random& random);
std::vector<float> make_values(const DataStyle& style, const TokenShape& shape, ta_dtype dtype, int64_t first, int64_t n,
                               Random& random);

// The last `n` queries over `n_keys` keys, [n, heads * group, head_dim], scaled by the scores that they have with these keys.
std::vector<float> make_queries(QueryKind kind, const TokenShape& shape, int64_t group, double scale,
                                const std::vector<float>& keys, int64_t n_keys, int64_t n, Random& random);

}  // namespace ta::testing
