// A block that neither of the other loops takes: masks, LSE, options, scales per token, pages whose scales lie far apart.
#pragma once

#include "kernels/cuda/sm90/prefill/loops/consumer.cuh"

namespace ta::cuda::prefill::sm90 {

// To local memory and back, where the compiler cannot do without.
template <int N>
TA_DEVICE void save_registers(float (&to)[N], const float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n += 4)
        asm volatile("st.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + n), "f"(x[n]), "f"(x[n + 1]), "f"(x[n + 2]), "f"(x[n + 3])
                     : "memory");
}
template <int N>
TA_DEVICE void restore_registers(float (&x)[N], const float (&from)[N]) {
#pragma unroll
    for (int n = 0; n < N; n += 4)
        asm volatile("ld.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[n]), "=f"(x[n + 1]), "=f"(x[n + 2]), "=f"(x[n + 3])
                     : "l"(from + n)
                     : "memory");
}

// Makes P of scores in `unit`.
template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
TA_DEVICE void Consumer<D, kChannels, kOptions, kOfTiles>::make_general_p(const AttendArgs& args, const Tile& tile,
                                                                          const BlockScales& scales, float unit,
                                                                          const BlockMask& mask, int32_t (&s)[64],
                                                                          Scores& scores, uint32_t (&p)[4][4]) {
    // The compiler would rather keep parts of O in memory over the whole loop.
    alignas(16) float saved[D / 2];
    save_registers(saved, o);
    const ScoreOptions options = score_options(args);
    const LaneBlock at(info, unit, i);
    scale_scores(s, at, scales);
    if (__any_sync(~0u, has_turning(scales))) add_turning(args, tile, find_row(), scales, i, s);
    if (kOptions) apply_options(s, at, options, tile.rows.walk, mask.key);
    general_scores<kOptions>(s, at, scales, options, mask, scores, rows.exact);
    make_p(scores, p);
    restore_registers(o, saved);
}

template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
TA_DEVICE void Consumer<D, kChannels, kOptions, kOfTiles>::take_other_block(const AttendArgs& args, const Tile& tile) {
    const BlockScales& scales = shared.scales[stage.slot];
    // The block before stays: this is its second pass. Kept where it measured less.
    bool& stays = kOptions ? in_register : rows.stays;
    int32_t s[64], k_fractions[8];
    multiply_keys(s, k_fractions);
    if constexpr (!kLooksAhead) bound = fast_bound(limits, scales);
    if constexpr (!kLooksAhead && !kChannels) factors = find_factors(rows, scales);
    const bool channel = kChannels && __shfl_sync(~0u, scales.channel[0] | scales.channel[1], 0) != 0;
    const bool cut = key < limits.begin || key + kBlockTokens > limits.end;
    const bool sas = kOptions && args.exp == ExpMode::kSas;
    const bool fits = bound < kHighest * 65536.0f, fits_bare = bound < 2147000000.0f && !cut && !sas;
    if (sas && !stays && uint32_t(key) % (kPromptRangePages * kPageTokens) < kBlockTokens) {
        info[0].natural = info[8].natural = kNever;
        __syncwarp();
    }
    const bool may_be_fast = !sas || pages_have_scales(scales);
    Sums how = args.lse ? Sums::kExact : Sums::kOfP;
    await_scores(s, k_fractions);
    // Each path makes P of its own: what they would hand to a common one is more registers than P.
    Scores scores;
    uint32_t p[4][4];
    int32_t eighths[2][2];
    if (kChannels && channel) fraction_sums(k_fractions, lane, eighths);
    if ((fits || fits_bare) && may_be_fast) {
        free_keys();
        if (kChannels && channel) add_fractions<false>(eighths, s);
        if (kChannels) factors = find_factors(rows, scales);  // only now, for registers
        fast_scores<false, kOptions>(s, factors, info, rows, scales, {cut, key, Pass::kBothPages}, i, scores);
        if (kOptions && args.lse) cut_off(scores);
        if (args.lse) find_exact_sums(scales, i, scores, rows.exact);
        if (!fits) raise_lowest(scores);
        make_p<Ex2::kQuarter, kOptions>(scores, p);
    } else if (kTokenPath && (have_token_scales(scales) || !can_be_mended(rows, scales)) && takes_tokens(limits, scales) &&
               !pages_lie_apart(scales)) {
        free_keys();
        const bool exact = __any_sync(~0u, args.lse || are_wide(scales));
        how = exact ? Sums::kExact : Sums::kOfP;
        token_scores(s, info, scales, 1.0f, {cut, key, Pass::kBothPages}, i, scores);
        if (exact) find_exact_sums(scales, i, scores, rows.exact);
        make_p(scores, p);
    } else {
        // The first block of a tile, all of them if the rounding of factors shows in it, and what is rare.
        const bool wide = are_wide(scales), apart = pages_lie_apart(scales);
        const bool again = __any_sync(~0u, apart && !stays);
        stays = again;
        const Pass pass = !apart ? Pass::kBothPages : again ? Pass::kFirstPage : Pass::kSecondPage;
        if (wide) how = again ? Sums::kExactAndStay : Sums::kExact;
        if (!again) free_keys();
        const bool exact = how != Sums::kOfP;
        const BlockMask mask{cut || pass != Pass::kBothPages, key, pass};
        const float v_size = size_of_v(scales);
        const bool can = can_be_mended(rows, scales);
        if (bound_of(limits.largest, scales, v_size) < kHighest * 65536.0f && may_be_fast && can) {
            if (kChannels && channel) add_fractions<false>(eighths, s);
            factors = find_factors(rows, scales);
            const bool shows = fast_scores<true, kOptions>(s, factors, info, rows, scales, mask, i, scores);
            if (shows || !again) decide(limits, shows, lane);
            if (kOptions && exact) cut_off(scores);
            if (exact) find_exact_sums(scales, i, scores, rows.exact);
            make_p<Ex2::kQuarter, kOptions>(scores, p);
        } else {
            const float unit = kChannels && channel ? 0.125f : 1.0f;
            if (kChannels && channel) add_fractions<true>(eighths, s);
            if (!again && can && limits.trusted == INFINITY && !__any_sync(~0u, has_turning(scales)))
                decide(limits, false, lane);
            if (!kTokenPath && !sas && takes_tokens(limits, scales)) {
                token_scores(s, info, scales, unit, mask, i, scores);
                if (exact) find_exact_sums(scales, i, scores, rows.exact);
                make_p(scores, p);
            } else {
                make_general_p(args, tile, scales, unit, mask, s, scores, p);
                how = again ? Sums::kExactAndStay : Sums::kExact;
            }
        }
    }
    add_block<false>(p, scores.m, channel, how, [](auto) {});
}

}  // namespace ta::cuda::prefill::sm90
