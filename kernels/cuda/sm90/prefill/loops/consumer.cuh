// A consumer warp of the prefill kernel: what it keeps of a tile, and what its loops over blocks have in common. There are three:
// over most blocks of long tiles (long_blocks.cuh), over most blocks with channel pages (channel_blocks.cuh), and over all others
// (other_blocks.cuh).
#pragma once

#include <type_traits>

#include "kernels/cuda/sm90/prefill/general_scores.cuh"
#include "kernels/cuda/sm90/prefill/products.cuh"
#include "kernels/cuda/sm90/prefill/softmax.cuh"

namespace ta::cuda::prefill::sm90 {

// The source of a block's part of l: P, or exact sums. kExactAndStay: the block is taken once more.
enum class Sums { kOfP, kExact, kExactAndStay };

// kChannels: there may be channel pages. kOptions: there may be softcap, ALiBi or SAS. Every member is inlined into the kernel, so
// that its state lies in registers.
template <int D, bool kChannels, bool kOptions, Tiles kOfTiles>
struct Consumer {
    static constexpr bool kLong = kOfTiles == Tiles::kLong, kResident = kOfTiles == Tiles::kResident;
    using Shared = SharedMemory<D, kChannels, kResident>;
    // A block's inputs are loaded while the previous product with V runs, or while the product with K runs: whichever was
    // measured faster.
    static constexpr bool kLooksAhead = !kChannels && D == 128;
    // If all pages have 8 bits, those with a scale per token have a way of their own.
    static constexpr bool kTokenPath = !kChannels && !kOptions;
    // Here a separate loop computes P in quarters, and multiplies V's first half by each quarter as soon as it is there.
    static constexpr bool kQuarters = kLong && D == 128 && !kOptions;
    static_assert(kOfTiles == Tiles::kAny || !kChannels, "channel blocks have a loop of their own anyway");
    // If there are two loops, all warps of a group must take the same one, since a wgmma is one instruction of all four. So
    // they share their limits.
    static constexpr bool kTwoLoops = kChannels || kLong;

    // The call's arguments are passed to each member. NOTES: if they were behind a reference here, they would be loaded again
    // at each use, at the start of a tile 64 times.
    Shared& shared;
    const int group, lane;
    const int i = lane & 3, row_in_tile;
    // Registers are for the accumulators: what else a block needs is read again from shared memory.
    RowInfo* const info = shared.rows + row_in_tile;
    LaneRows& rows;
    WarpLimits& limits;
    const uint8_t* const q = shared.q + 64 * group * D;
    Ring<Shared::kStages> stage{};

    // State of the tile.
    float o[D / 2];
    int key, key_stop;  // where the next block begins, and where the tile's keys end
    bool in_register;   // with options: in place of LaneRows::stays

    // State of the next block, if await_block() finds it.
    float bound;
    Factors factors;
    bool bare;

    TA_DEVICE Consumer(Shared& shared, int group, int warp, int lane)
        : shared(shared),
          group(group),
          lane(lane),
          row_in_tile(64 * group + 16 * warp + lane / 4),
          rows(shared.lanes[128 * group + 32 * warp + lane]),
          limits(shared.limits[4 * group + warp]) {}

    // Goes through the blocks of a tile up to a page, whose rows have been started. `all_limits`: of the group's warps.
    TA_DEVICE void take_tile(const AttendArgs& args, const Tile& tile, int page_end, WarpLimits (&all_limits)[4], int warp) {
        if (kTwoLoops) find_limits(args, info, all_limits[warp], lane);
        ptx::fence_async_proxy();
        ptx::named_barrier(1 + group, 128);
#pragma unroll
        for (int n = 0; n < D / 2; ++n) o[n] = 0.0f;
        if (kTwoLoops) {
            join_limits(all_limits, limits, lane);
        } else {
            find_limits(args, info, limits, lane);
        }
        // By a shuffle, as with the warp's number.
        key = __shfl_sync(~0u, tile.rows.page_begin, 0) * kPageTokens;
        key_stop = __shfl_sync(~0u, page_end, 0) * kPageTokens;
        in_register = bare = false;
        if (key < key_stop) await_block();
        // With kLong: whether all of the group's warps have seen that the factors' rounding does not matter. Most see it in the
        // tile's first block, but pages with scales per token do not show it.
        bool all_decided = false, all_trust = false;
        while (key < key_stop) {
            if constexpr (kLong) {
                take_long_blocks(all_trust);
                if (key >= key_stop) break;
            }
            if constexpr (kChannels) {
                take_channel_blocks(args);
                if (key >= key_stop) break;
            }
            take_other_block(args, tile);
            if (kLong && !all_decided) {
                ptx::named_barrier(1 + group, 128);
                // No warp decides anew before the next product, which takes all four.
                const WarpLimits* of = shared.limits + 4 * group;
                const float known = of[0].trusted + of[1].trusted + of[2].trusted + of[3].trusted;
                all_trust = __any_sync(~0u, known < INFINITY) && !args.lse && (!kOptions || args.exp == ExpMode::kSas);
                all_decided = __any_sync(~0u, known != INFINITY);
            }
        }
    }

    TA_DEVICE void take_long_blocks(bool may);
    TA_DEVICE void take_channel_blocks(const AttendArgs& args);
    TA_DEVICE void take_other_block(const AttendArgs& args, const Tile& tile);
    TA_DEVICE void make_general_p(const AttendArgs& args, const Tile& tile, const BlockScales& scales, float unit,
                                  const BlockMask& mask, int32_t (&s)[64], Scores& scores, uint32_t (&p)[4][4]);

    // The next block's pages are there: what is needed before its scores can be packed.
    TA_DEVICE void await_block() {
        ptx::barrier_wait(&shared.full[stage.slot], stage.phase);
        const BlockScales& scales = shared.scales[stage.slot];
        if constexpr (kChannels) bare = is_bare(limits, scales);
        if constexpr (kLooksAhead || kLong) bound = fast_bound(limits, scales);
        if constexpr (kLooksAhead) factors = find_factors(rows, scales);
    }
    TA_DEVICE void multiply_keys(int32_t (&s)[64], int32_t (&k_fractions)[8]) {
        ptx::wgmma_fence();
        // Without a condition, which would delay the products: blocks without fractions ignore the result.
        if constexpr (kChannels) {
            multiply_k_and_fractions<D>(q, shared.k[stage.slot], s, k_fractions);
        } else {
            multiply_k<D>(q, shared.k[stage.slot], s);
        }
        ptx::wgmma_commit();
    }
    TA_DEVICE void await_scores(int32_t (&s)[64], int32_t (&k_fractions)[8]) {
        ptx::wgmma_wait<0>();
        ptx::pin_registers(s);
        if (kChannels) ptx::pin_registers(k_fractions);
    }
    // The index in the tile of the lane's first row.
    TA_DEVICE int find_row() const {
        return row_in_tile + (kResident ? shared.first_of_part[row_in_tile / 16] - 64 * group : 0);
    }
    TA_DEVICE void free_keys() {
        if (shared.kFreesKeys && lane == 0) ptx::barrier_arrive(&shared.keys_empty[stage.slot]);
    }

    // How far the separate loop may go: through blocks in which nothing is masked, to the end of a range of `range` keys. Not
    // at all where a range begins: there O must be settled, or SAS forgets its maxima.
    TA_DEVICE int end_of_own_loop(bool may, int range) {
        const bool begins = uint32_t(key) % range < kBlockTokens;
        return !may || begins || key < limits.begin
                   ? 0
                   : min(min(key_stop, limits.end - kBlockTokens + 1), (key / range + 1) * range);
    }

    // Adds the block to O and goes on to the next. m: the rows' maxima.
    // kOwnLoop: with channels there are fractions, there are no exact sums, and O is not due to be settled. With kQuarters
    // `make_quarter(n)` makes P's n-th then.
    template <bool kOwnLoop, class MakeQuarter>
    TA_DEVICE void add_block(const uint32_t (&p)[4][4], const float (&m)[2], bool fractions, Sums how,
                             MakeQuarter make_quarter) {
        float factor[2];
        const int used = stage.slot;
        const uint8_t *v = shared.v[used], *v_fraction = shared.v_fraction;
        // If there are 128 channels, one half after the other: all at once they would take the registers that the producers
        // need.
        uint32_t sums_of_p[2];
        [[maybe_unused]] uint32_t step[4];
        constexpr bool kStepOfSums = kChannels && kOwnLoop;
        if constexpr (kStepOfSums) step_of_sums(p, used, i, step);
        // Also for blocks that have none: a wgmma under a condition would hold up the others.
        const bool by_mma = !kOwnLoop && fractions;
        if constexpr (D == 128) {
            int32_t product[32];
            ptx::wgmma_fence();
            if constexpr (kQuarters && kOwnLoop) {
                const auto go_on = [&](auto n) {
                    ptx::wgmma_commit();
                    make_quarter(n);
                    ptx::wgmma_fence();
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
            ptx::wgmma_commit();
            prepare_factors<kOwnLoop>(m, factor);
            if (by_mma) operand_of_sums(p, sums_of_p);
            ptx::wgmma_wait<0>();
            ptx::pin_registers(product);
            if (by_mma) add_v_fractions(sums_of_p, v_fraction, 0, used, lane, product);
            add_product(product, factor, o, 0);
        }
        constexpr int kLast = D / 64 - 1;
        int32_t product[40];
        ptx::wgmma_fence();
        multiply_v(p, v + kLast * 64 * kBlockTokens, product);
        if constexpr (kStepOfSums) multiply_v_fractions(step, v_fraction, kLast * 64, product);
        ptx::wgmma_commit();
        if (D == 64) {
            prepare_factors<kOwnLoop>(m, factor);
            if (by_mma) operand_of_sums(p, sums_of_p);
        }
        const float digit = shared.scales[used].digit[i];
        const uint32_t phase = stage.phase;
        // Meanwhile, what the next block needs before its scores can be packed.
        stage.next();
        key += kBlockTokens;
        if (key < key_stop) await_block();
        ptx::wgmma_wait<0>();
        ptx::pin_registers(product);
        if (by_mma) add_v_fractions(sums_of_p, v_fraction, kLast * 64, used, lane, product);
        __syncwarp();  // lane 0 speaks for what the others have read
        if (!kResident && how != Sums::kExactAndStay && lane == 0) ptx::barrier_arrive(&shared.empty[used]);
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
    }
    // The factors of a product when it is added to O. Every 8192 keys O is settled: the terms of 128 would cost it
    // precision.
    template <bool kOwnLoop>
    TA_DEVICE void prepare_factors(const float (&m)[2], float (&factor)[2]) {
        float above[2] = {m[0] - rows.reference[0], m[1] - rows.reference[1]};
        const bool due = !kOwnLoop && uint32_t(key) % kSettleKeys < kBlockTokens;
        if (__any_sync(~0u, fmaxf(above[0], above[1]) > kRaise) || due) {
            settle(rows, m, o);
            above[0] = m[0] - rows.reference[0], above[1] = m[1] - rows.reference[1];
        }
        // kOutUnit / 2^-149
        factor[0] = exp2_approx(above[0] + 100.0f), factor[1] = exp2_approx(above[1] + 100.0f);
    }
};

}  // namespace ta::cuda::prefill::sm90
