// The loop over most blocks with channel pages: fractions that shift scores of 16 bits, no LSE, no options.
#pragma once

#include "kernels/cuda/sm90/prefill/loops/consumer.cuh"

namespace ta::cuda::prefill::sm90 {

template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
TA_DEVICE void Consumer<D, kChannels, kOptions, kOfTiles>::take_channel_blocks(const AttendArgs& args) {
    const int stop = end_of_own_loop(!kOptions && !args.lse, kSettleKeys);
    while (key < stop && bare) {
        const BlockScales& scales = shared.scales[stage.slot];
        int32_t s[64], k_fractions[8], eighths[2][2];
        Scores scores;
        uint32_t p[4][4];
        multiply_keys(s, k_fractions);
        await_scores(s, k_fractions);
        free_keys();
        fraction_sums(k_fractions, lane, eighths);
        factors = find_factors(rows, scales);
        shifted_scores(s, factors, shifts_of(eighths, factors), scales, i, scores);
        make_p<Ex2::kAll>(scores, p);
        add_block<true>(p, scores.m, true, Sums::kOfP, [](auto) {});
    }
}

}  // namespace ta::cuda::prefill::sm90
