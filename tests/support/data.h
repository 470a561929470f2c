// Queries, keys and values of several kinds: N(0,1) hides every known failure of a quantizer.
#pragma once

#include <cstdint>
#include <vector>

#include "support/exact_attention.h"

namespace ta::testing {

enum class DataKind {
    kNormal,            // N(0,1)
    kFlat,              // K with outlier channels, scores of deviation 0.5; V heavy-tailed around means per channel
    kSink,              // as flat, but the first token takes 70% of the mass and has a small V
    kPeaky,             // as flat with scores of deviation 3: a few keys decide
    kZeros,             // all zero
    kConstantChannels,  // each channel of K and of V has one value
    kPagesApart,        // K is 0; in every other page of 64 V has +-1e4 in a channel, which cancel
    kZerosAround,       // K is 0; V is, too, but for page 2, half of whose tokens have 1e4 in a channel
    kOneMagnitude,      // all channels of a query are alike, and of a key: products of codes are the largest that there are
    kOutliers,          // N(0,1) with 1e4 here and there in K and V
    kDenormal,          // everything below 2^-126
    kLoud,              // the last 16 tokens of 64 have scores 12 lower and V times 2^40; V of every fifth of the others is 0
    kHuge,              // finite values up to 2^50; queries so small that the scores are not
};

const char* name_of(DataKind kind);

struct AttentionData {
    AttentionShape shape;
    std::vector<float> q, k, v;
};

AttentionData make_data(DataKind kind, const AttentionShape& shape, uint64_t seed);

}  // namespace ta::testing
