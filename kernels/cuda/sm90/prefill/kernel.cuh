// The prefill kernel. Persistent CTAs, which take tiles of 192 query rows of one kv head from a list. Four producer warps
// expand pages into INT8 tiles in shared memory (pages.cuh); three warpgroups of 64 rows run, per block of 128 keys,
//   S = Q K^T (s8 x s8) -> P (u8, softmax.cuh) -> O += P V (u8 x u8, int32, added to O in fp32),
// with P and O in registers. A warpgroup waits for each of its products: the other two keep the tensor cores busy meanwhile.
#pragma once

#include <type_traits>

#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm90/prefill/general_scores.cuh"
#include "kernels/cuda/sm90/prefill/join.cuh"
#include "kernels/cuda/sm90/prefill/output.cuh"
#include "kernels/cuda/sm90/prefill/pages.cuh"
#include "kernels/cuda/sm90/prefill/softmax.cuh"

namespace ta::cuda::prefill {

template <int D>
TA_DEVICE void multiply_k(const uint8_t* q, const uint8_t* k, int32_t (&s)[64]) {
    const uint64_t rows = sm90::tile_descriptor<D>(q), columns = sm90::tile_descriptor<D>(k);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) sm90::wgmma_s8_n128(s, rows + 2 * step, columns + 2 * step, step > 0);
}
// And sum(q f) of the pages for the fractions f of K's zero points: columns are pages.
template <int D>
TA_DEVICE void multiply_k_and_fractions(const uint8_t* q, const uint8_t* k, int32_t (&s)[64], int32_t (&fractions)[8]) {
    const uint64_t rows = sm90::tile_descriptor<D>(q), columns = sm90::tile_descriptor<D>(k);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) {
        sm90::wgmma_s8_n144(s, fractions, rows + 2 * step, columns + 2 * step, step > 0);
    }
}
// That of a lane's rows, [row][page], in eighths of a score's unit.
TA_DEVICE void fraction_sums(const int32_t (&product)[8], int lane, int32_t (&eighths)[2][2]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) eighths[n / 2][n % 2] = __shfl_sync(~0u, product[n], lane & ~3);
}
// To scores. kFine: their unit becomes an eighth, since of a page that an outlier made coarse a unit is many steps.
template <bool kFine>
TA_DEVICE void add_fractions(const int32_t (&eighths)[2][2], int32_t (&s)[64]) {
#pragma unroll
    for (int n = 0; n < 64; ++n) {
        const int sum = eighths[n % 4 / 2][n / 32];
        s[n] = kFine ? s[n] * 8 + sum : s[n] + ((sum + 4) >> 3);
    }
}
// 64 of V's channels or, with N = 40, the last 64 and the sums. Steps [kFrom, kTo) of four.
template <int kFrom = 0, int kTo = 4, int N>
TA_DEVICE void multiply_v(const uint32_t (&p)[4][4], const uint8_t* v, int32_t (&product)[N]) {
    const uint64_t columns = sm90::tile_descriptor<kBlockTokens>(v);
#pragma unroll
    for (int step = kFrom; step < kTo; ++step) {
        if constexpr (N == 40) {
            sm90::wgmma_u8_n80(product, p[step], columns + 2 * step, step > 0);
        } else {
            sm90::wgmma_u8_n64(product, p[step], columns + 2 * step, step > 0);
        }
    }
}

// Adds to a product with V, of the 64 rows of its tile from `row` on, what the fractions f of V's zero points do: f / 8 of a
// page's sum of P. A step more of the product; `a` is that of step_of_sums().
template <int N>
TA_DEVICE void multiply_v_fractions(const uint32_t (&a)[4], const uint8_t* v_fraction, int row, int32_t (&product)[N]) {
    const uint64_t columns = sm90::narrow_descriptor(v_fraction + v_fraction_byte(row, 0, 0));
    if constexpr (N == 40) {
        sm90::wgmma_u8_n80(product, a, columns, true);
    } else {
        sm90::wgmma_u8_n64(product, a, columns, true);
    }
}
// The same by mma.sync, to the product that is there; `a` is that of operand_of_sums().
template <int N>
TA_DEVICE void add_v_fractions(const uint32_t (&a)[2], const uint8_t* v_fraction, int row, int stage, int lane,
                               int32_t (&product)[N]) {
    const uint32_t from = sm90::base_address(v_fraction + v_fraction_byte(row + lane / 4, stage, 0));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int32_t columns[4] = {product[4 * j], product[4 * j + 1], product[4 * j + 2], product[4 * j + 3]};
        mma_u8_u8_k16(columns, a, sm90::load_word(from + v_fraction_byte(8 * j, 0, 0)));
#pragma unroll
        for (int n = 0; n < 4; ++n) product[4 * j + n] = columns[n];
    }
}

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

// Where a block's part of l comes from. kExactAndStay: the block is taken once more.
enum class Sums { kOfP, kExact, kExactAndStay };

// Which lane of the consumers this is. At the start and the end of a tile it is asked anew: what the compiler knows of it
// before the main loop it would keep in local memory, which takes longer.
struct ConsumerLane {
    int thread, lane, row_in_tile;
    TA_DEVICE ConsumerLane() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        lane = thread % 32;
        row_in_tile = thread / 32 * 16 + lane / 4;
    }
};

// One warpgroup's share of the tiles. kChannels: there may be channel pages. kOptions: there may be softcap, ALiBi or SAS. kLong:
// tiles have many blocks, of which most take a loop of their own.
template <int D, bool kChannels, bool kOptions, bool kLong>
TA_DEVICE void consume(const AttendArgs& args, PrefillSchedule* schedule, uint8_t* workspace,
                       SharedMemory<D, kChannels>& shared, int group, int warp, int lane) {
    // What a block needs is found while the product with V before it runs, or while that with K does, whichever measured less.
    constexpr bool kLooksAhead = !kChannels && D == 128;
    // Where pages of 8 bits are all there is, those with a scale per token have a way of their own.
    constexpr bool kTokenPath = !kChannels && !kOptions;
    // A loop of its own makes P a quarter after the other there, and V's first half is multiplied by each as soon as it is made.
    constexpr bool kQuarters = kLong && D == 128 && !kOptions;
    static_assert(!(kLong && kChannels), "channel blocks have such a loop anyway");
    const int i = lane & 3, row_in_tile = 64 * group + 16 * warp + lane / 4;
    // Registers are for the accumulators: what else a block needs is read again from shared memory.
    RowInfo* info = shared.rows + row_in_tile;
    LaneRows& rows = shared.lanes[128 * group + 32 * warp + lane];
    WarpLimits& limits = shared.limits[4 * group + warp];
    const uint8_t* q = shared.q + 64 * group * D;
    Ring<kStages> stage;
    Ring<kTiles> at;
    for (;; at.next()) {
        sm90::barrier_wait(&shared.tile_full[at.slot], at.phase);
        const Tile& tile = shared.tiles[at.slot];
        if (tile.head < 0) return;
        {
            const ConsumerLane me;
            RowInfo* const of = shared.rows + me.row_in_tile;
            if constexpr (kChannels && kOptions) {
                start_rows_apart<D>(args, tile, me.row_in_tile, me.lane, shared.sign_masks, shared.q, of);
            } else {
                start_rows<D>(args, tile, me.row_in_tile, me.lane, shared.sign_masks, shared.q, of);
            }
            shared.lanes[me.thread] = {{}, {of[0].scale, of[8].scale}, {kNever, kNever}, {}};
        }
        // Where there are two loops the warps of a group take one of them together: a wgmma is one instruction of all four. So
        // they share their limits.
        constexpr bool kTwoLoops = kChannels || kLong;
        WarpLimits(&all_limits)[4] = shared.all_limits[at.slot % 2][group];
        if (kTwoLoops) find_limits(args, info, all_limits[warp], lane);
        sm90::fence_async_proxy();
        sm90::named_barrier(1 + group, 128);
        float o[D / 2];
#pragma unroll
        for (int n = 0; n < D / 2; ++n) o[n] = 0.0f;
        if (kTwoLoops) {
            join_limits(all_limits, limits, lane);
        } else {
            find_limits(args, info, limits, lane);
        }
        // By a shuffle, as with the warp's number.
        int key = __shfl_sync(~0u, tile.rows.page_begin, 0) * kPageTokens;
        const int key_stop = __shfl_sync(~0u, tile.rows.page_end, 0) * kPageTokens;
        // The block before stays: this is its second pass. Kept where it measured less.
        bool in_register = false;
        bool& stays = kOptions ? in_register : rows.stays;
        float bound;
        Factors factors;
        bool bare = false;
        // The next block's pages are there: what is needed before its scores can be packed.
        const auto await_block = [&] {
            sm90::barrier_wait(&shared.full[stage.slot], stage.phase);
            const BlockScales& scales = shared.scales[stage.slot];
            if constexpr (kChannels) bare = is_bare(limits, scales);
            if constexpr (kLooksAhead || kLong) bound = fast_bound(limits, scales);
            if constexpr (kLooksAhead) factors = find_factors(rows, scales);
        };
        const auto multiply_keys = [&](int32_t(&s)[64], int32_t(&k_fractions)[8]) {
            sm90::wgmma_fence();
            // Without a condition, which would hold up the products: blocks that have no fractions do not use theirs.
            if constexpr (kChannels) {
                multiply_k_and_fractions<D>(q, shared.k[stage.slot], s, k_fractions);
            } else {
                multiply_k<D>(q, shared.k[stage.slot], s);
            }
            sm90::wgmma_commit();
        };
        const auto await_scores = [&](int32_t(&s)[64], int32_t(&k_fractions)[8]) {
            sm90::wgmma_wait<0>();
            sm90::pin_registers(s);
            if (kChannels) sm90::pin_registers(k_fractions);
        };
        const auto free_keys = [&] {
            if (shared.kFreesKeys && lane == 0) sm90::barrier_arrive(&shared.keys_empty[stage.slot]);
        };
        // Adds the block to O and goes on to the next. m: the rows' maxima.
        // `in_own_loop`, a constant: with channels there are fractions, there are no exact sums, and O is not due to be settled.
        // With kQuarters `make_quarter(n)` makes P's n-th then.
        const auto add_block = [&](const uint32_t(&p)[4][4], const float(&m)[2], bool fractions, Sums how, auto in_own_loop,
                                   auto make_quarter) {
            float factor[2];
            const int used = stage.slot;
            const uint8_t *v = shared.v[used], *v_fraction = shared.v_fraction;
            // Every 8192 keys O is settled: the terms of 128 would cost it precision.
            const auto prepare_factors = [&] {
                float above[2] = {m[0] - rows.reference[0], m[1] - rows.reference[1]};
                const bool due = !in_own_loop && uint32_t(key) % kSettleKeys < kBlockTokens;
                if (__any_sync(~0u, fmaxf(above[0], above[1]) > kRaise) || due) {
                    settle(rows, m, o);
                    above[0] = m[0] - rows.reference[0], above[1] = m[1] - rows.reference[1];
                }
                // kOutUnit / 2^-149
                factor[0] = exp2_approx(above[0] + 100.0f), factor[1] = exp2_approx(above[1] + 100.0f);
            };
            // A half of the channels after the other where there are 128: all at once they would take the registers that the
            // producers need.
            uint32_t sums_of_p[2];
            [[maybe_unused]] uint32_t step[4];
            constexpr bool kStepOfSums = kChannels && in_own_loop;
            if constexpr (kStepOfSums) step_of_sums(p, used, i, step);
            // Of blocks that may have none: a wgmma under a condition would hold up the others.
            const bool by_mma = !in_own_loop && fractions;
            if constexpr (D == 128) {
                int32_t product[32];
                sm90::wgmma_fence();
                if constexpr (kQuarters && in_own_loop) {
                    const auto go_on = [&](auto n) {
                        sm90::wgmma_commit();
                        make_quarter(n);
                        sm90::wgmma_fence();
                        multiply_v<n, n + 1>(p, v, product);
                    };
                    multiply_v<0, 1>(p, v, product);
                    go_on(std::integral_constant<int, 1>());
                    go_on(std::integral_constant<int, 2>());
                    go_on(std::integral_constant<int, 3>());
                } else {
                    multiply_v(p, v, product);
                }
                if constexpr (kStepOfSums) multiply_v_fractions(step, v_fraction, 0, product);
                sm90::wgmma_commit();
                prepare_factors();
                if (by_mma) operand_of_sums(p, sums_of_p);
                sm90::wgmma_wait<0>();
                sm90::pin_registers(product);
                if (by_mma) add_v_fractions(sums_of_p, v_fraction, 0, used, lane, product);
                add_product(product, factor, o, 0);
            }
            constexpr int kLast = D / 64 - 1;
            int32_t product[40];
            sm90::wgmma_fence();
            multiply_v(p, v + kLast * 64 * kBlockTokens, product);
            if constexpr (kStepOfSums) multiply_v_fractions(step, v_fraction, kLast * 64, product);
            sm90::wgmma_commit();
            if (D == 64) {
                prepare_factors();
                if (by_mma) operand_of_sums(p, sums_of_p);
            }
            const float digit = shared.scales[used].digit[i];
            const uint32_t phase = stage.phase;
            // Meanwhile, what the next block needs before its scores can be packed.
            stage.next();
            key += kBlockTokens;
            if (key < key_stop) await_block();
            sm90::wgmma_wait<0>();
            sm90::pin_registers(product);
            if (by_mma) add_v_fractions(sums_of_p, v_fraction, kLast * 64, used, lane, product);
            __syncwarp();  // lane 0 speaks for what the others have read
            if (how != Sums::kExactAndStay && lane == 0) sm90::barrier_arrive(&shared.empty[used]);
            LaneSums sums = rows.sums;
            add_product(product, factor, o, 32 * kLast);
            if (how == Sums::kOfP) {
                add_sums(product, factor, digit, sums);
            } else {
                add_sums(product, factor, 0.0f, sums);
                add_exact_sums(rows.exact, factor, sums);
                if (how == Sums::kExactAndStay) {
                    stage.slot = used, stage.phase = phase;
                    key -= kBlockTokens;
                    await_block();
                }
            }
            rows.sums = sums;
        };
        if (key < key_stop) await_block();
        // With kLong, whether all of the group's warps have seen that the factors' rounding does not show. Most do in the tile's
        // first block, but of pages with scales per token nothing is seen.
        bool all_decided = false, all_trust = false;
        // How far a loop of its own may go: through blocks of which nothing is masked, to the end of a range of `range` keys. Not
        // at all where one begins: there O is due to be settled, or SAS forgets its maxima.
        const auto end_of_own_loop = [&](bool may, int range) {
            const bool begins = uint32_t(key) % range < kBlockTokens;
            return !may || begins || key < limits.begin
                       ? 0
                       : min(min(key_stop, limits.end - kBlockTokens + 1), (key / range + 1) * range);
        };
        while (key < key_stop) {
            if constexpr (kLong) {
                // Most blocks: scores of 16 bits, no LSE, no options but SAS.
                constexpr int kRange = kOptions ? int(kPromptRangePages * kPageTokens) : kSettleKeys;
                static_assert(kSettleKeys % kRange == 0);
                const int stop = end_of_own_loop(all_trust, kRange);
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
                    fast_scores<false, kOptions>(s, factors, info, rows, scales, false, key, Pass::kBothPages, i, scores);
                    make_p<Ex2::kQuarter, kOptions, 0, kQuarters ? 1 : 4>(scores, p);
                    add_block(p, scores.m, false, Sums::kOfP, std::true_type(),
                              [&](auto n) { make_p<Ex2::kQuarter, kOptions, n, n + 1>(scores, p); });
                }
                if (key >= key_stop) break;
            }
            if constexpr (kChannels) {
                // Most blocks: fractions that shift scores of 16 bits, no LSE, no options.
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
                    add_block(p, scores.m, true, Sums::kOfP, std::true_type(), [](auto) {});
                }
                if (key >= key_stop) break;
            }
            const BlockScales& scales = shared.scales[stage.slot];
            int32_t s[64], k_fractions[8];
            multiply_keys(s, k_fractions);
            bool channel = false;
            if constexpr (!kLooksAhead) bound = fast_bound(limits, scales);
            if constexpr (!kLooksAhead && !kChannels) factors = find_factors(rows, scales);
            if constexpr (kChannels) {
                channel = __shfl_sync(~0u, scales.channel[0] | scales.channel[1], 0) != 0;
            }
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
                fast_scores<false, kOptions>(s, factors, info, rows, scales, cut, key, Pass::kBothPages, i, scores);
                if (kOptions && args.lse) cut_off(scores);
                if (args.lse) find_exact_sums(scales, i, scores, rows.exact);
                if (!fits) raise_lowest(scores);
                make_p<Ex2::kQuarter, kOptions>(scores, p);
            } else if (kTokenPath && (have_token_scales(scales) || !can_be_mended(rows, scales)) &&
                       takes_tokens(limits, scales) && !pages_lie_apart(scales)) {
                free_keys();
                const bool exact = __any_sync(~0u, args.lse || are_wide(scales));
                how = exact ? Sums::kExact : Sums::kOfP;
                token_scores(s, info, scales, 1.0f, cut, key, Pass::kBothPages, i, scores);
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
                const bool exact = how != Sums::kOfP, masked = cut || pass != Pass::kBothPages;
                const float v_size = size_of_v(scales);
                const bool can = can_be_mended(rows, scales);
                if (bound_of(limits.largest, scales, v_size) < kHighest * 65536.0f && may_be_fast && can) {
                    if (kChannels && channel) add_fractions<false>(eighths, s);
                    factors = find_factors(rows, scales);
                    const bool shows =
                        fast_scores<true, kOptions>(s, factors, info, rows, scales, masked, key, pass, i, scores);
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
                        token_scores(s, info, scales, unit, masked, key, pass, i, scores);
                        if (exact) find_exact_sums(scales, i, scores, rows.exact);
                        make_p(scores, p);
                    } else {
                        // The compiler would rather keep parts of O in memory over the whole loop.
                        alignas(16) float saved[D / 2];
                        save_registers(saved, o);
                        general_scores<kOptions>(s, info, scales, score_options(args), unit, masked, key, pass, i, args, tile,
                                                 row_in_tile, scores, rows.exact);
                        make_p(scores, p);
                        restore_registers(o, saved);
                        how = again ? Sums::kExactAndStay : Sums::kExact;
                    }
                }
            }
            add_block(p, scores.m, channel, how, std::false_type(), [](auto) {});
            if (kLong && !all_decided) {
                sm90::named_barrier(1 + group, 128);
                // No warp decides anew before the next product, which takes all four.
                const WarpLimits* of = shared.limits + 4 * group;
                const float known = of[0].trusted + of[1].trusted + of[2].trusted + of[3].trusted;
                all_trust = __any_sync(~0u, known < INFINITY) && !args.lse && (!kOptions || args.exp == ExpMode::kSas);
                all_decided = __any_sync(~0u, known != INFINITY);
            }
        }
        const ConsumerLane me;
        LaneRows& mine = shared.lanes[me.thread];
        settle(mine, {kNever, kNever}, o);
        if (tile.rows.parts == 1 || join_parts<D>(schedule, workspace, tile, me.thread / 32, me.lane, mine, o)) {
            finish_rows<D>(args, tile, me.row_in_tile, me.lane, shared.rows + me.row_in_tile, mine, o,
                           shared.q + me.thread / 32 * 16 * D);
        }
        __syncwarp();  // before the next tile writes `rows`
        if (me.lane == 0) sm90::barrier_arrive(&shared.tile_empty[at.slot]);
    }
}

template <int D, bool kChannels, bool kOptions, bool kLong>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendArgs args, PrefillSchedule* schedule, uint8_t* workspace) {
    extern __shared__ __align__(1024) uint8_t memory[];
    SharedMemory<D, kChannels>& shared = *reinterpret_cast<SharedMemory<D, kChannels>*>(memory);
    // By a shuffle, so that the compiler knows it to be the same in all lanes.
    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int n = 0; n < kRawBlocks; ++n) {
            sm90::barrier_init(&shared.raw_full[n], 1);
            sm90::barrier_init(&shared.raw_empty[n], kProducerWarps);
        }
        for (int n = 0; n < kStages; ++n) {
            sm90::barrier_init(&shared.full[n], kProducerWarps);
            sm90::barrier_init(&shared.empty[n], 4 * kConsumerGroups);
            sm90::barrier_init(&shared.keys_empty[n], 4 * kConsumerGroups);
        }
        for (int n = 0; n < kTiles; ++n) {
            sm90::barrier_init(&shared.tile_full[n], 1);
            sm90::barrier_init(&shared.tile_empty[n], kProducerWarps + 4 * kConsumerGroups);
        }
        sm90::fence_barrier_init();
    }
    if (args.signs && threadIdx.x < D / 8) shared.sign_masks[threadIdx.x] = sign_mask(args.signs, threadIdx.x);
    prepare_tiles(shared, int(threadIdx.x));
    sm90::fence_async_proxy();
    __syncthreads();
    // The CTA starts with 128 registers a thread, 512 for a thread of each warpgroup. NOTES: to ask for more hangs.
    // Producers are the last warps: as the first ones they take 1% longer.
    if (warp >= 4 * kConsumerGroups) {
        sm90::shrink_registers<kProducerRegisters>();
        produce<D, kChannels>(args, schedule, shared, warp - 4 * kConsumerGroups, lane);
    } else {
        sm90::grow_registers<kConsumerRegisters>();
        consume<D, kChannels, kOptions, kLong>(args, schedule, workspace, shared, warp / 4, warp % 4, lane);
    }
}

}  // namespace ta::cuda::prefill
