// The loop over most blocks of long tiles: scores of 16 bits, no LSE, no options but SAS.
#pragma once

#include "kernels/cuda/sm90/prefill/loops/consumer.cuh"

namespace ta::cuda::prefill::sm90 {

template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
TA_DEVICE void Consumer<D, kChannels, kOptions, kOfTiles>::take_long_blocks(bool may) {
    constexpr int kRange = kOptions ? int(kPromptRangePages * kPageTokens) : kSettleKeys;
    static_assert(kSettleKeys % kRange == 0);
    const int stop = end_of_own_loop(may, kRange);
    while (key < stop && __any_sync(~0u, bound < kHighest * 65536.0f)) {
        const BlockScales& scales = shared.scales[stage.slot];
        if (kOptions && !__any_sync(~0u, pages_have_scales(scales))) break;
        int32_t s[64], k_fractions[8];
        Scores scores;
        uint32_t p[4][4];
        multiply_keys(s, k_fractions);
        if constexpr (!kLooksAhead) factors = find_factors(rows, scales);
        await_scores(s, k_fractions);
        free_keys();
        fast_scores<false, kOptions>(s, factors, info, rows, scales, {false, key, Pass::kBothPages}, i, scores);
        make_p<Ex2::kQuarter, kOptions, 0, kQuarters ? 1 : 4>(scores, p);
        add_block<true>(p, scores.m, false, Sums::kOfP, [&](auto n) { make_p<Ex2::kQuarter, kOptions, n, n + 1>(scores, p); });
    }
}

}  // namespace ta::cuda::prefill::sm90
