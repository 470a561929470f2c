// The prefill kernel for every GPU since Ampere. Persistent CTAs of eight warps, which take tiles of query rows of one kv head from
// a list. A warp has 32 rows (16 at 256 channels). Per page of 64 keys it computes
//   S = Q K^T (s8 x s8) -> P (u8, softmax.cuh) -> O += P V (u8 x s8, int32, added to O in fp32),
// with P and O in registers, from codes in shared memory in the order in which pages store them (shared.cuh). All warps copy the
// next pages there, and expand those of fewer than 8 bits (pages.cuh); one barrier per page tells them apart.
#pragma once

#include "kernels/cuda/common/prefill/join.cuh"
#include "kernels/cuda/common/prefill/output.cuh"
#include "kernels/cuda/sm80/prefill/softmax.cuh"

namespace ta::cuda::prefill::sm80 {

// A warp's part of a tile.
template <int D, bool kChannels, bool kOptions>
struct Consumer {
    static constexpr int kTiles = kRowTiles<D>, kSteps = D / 32;

    SharedMemory<D>& shared;
    const int warp, lane;
    float o[kTiles][D / 2];
    LaneRows rows[kTiles];
    int begin, end, first_key, stop_key;  // keys that every row sees, that some row does
    float largest_scale;                  // of the rows' RowInfo::scale

    TA_DEVICE Consumer(SharedMemory<D>& shared, int warp, int lane) : shared(shared), warp(warp), lane(lane) {}

    TA_DEVICE int row_in_tile(int t) const { return (warp * kTiles + t) * 16 + lane / 4; }
    TA_DEVICE uint4 query(int t, int step) const {
        return load_chunk(shared.q + QueryOperand<D>::place(warp * kTiles + t, step, lane));
    }

    TA_DEVICE void start(const AttendArgs& args, const Tile& tile) {
#pragma unroll 1
        for (int t = 0; t < kTiles; ++t)
            start_rows<D>(args, tile, row_in_tile(t), lane, shared.sign_masks, QueryOperand<D>{shared.q},
                          shared.rows + row_in_tile(t));
        begin = 0, end = INT32_MAX, first_key = INT32_MAX, stop_key = 0;
        largest_scale = 0.0f;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const RowInfo& row = shared.rows[row_in_tile(t) + 8 * r];
                begin = max(begin, row.key_begin), end = min(end, row.key_end);
                // A row that does not exist sees all keys (start_rows): it must not have them computed.
                const RowPlace at(args, tile, row_in_tile(t) + 8 * r);
                if (at.token < tile.rows.n_query && row.key_begin < row.key_end) {
                    first_key = min(first_key, row.key_begin), stop_key = max(stop_key, row.key_end);
                }
                largest_scale = fmaxf(largest_scale, row.scale);
                rows[t].sums.l[r] = 0.0f, rows[t].reference[r] = kNever, rows[t].zero[r] = 0.0f;
            }
#pragma unroll
            for (int n = 0; n < D / 2; ++n) o[t][n] = 0.0f;
        }
        begin = __reduce_max_sync(~0u, begin), end = __reduce_min_sync(~0u, end);
        first_key = __reduce_min_sync(~0u, first_key), stop_key = __reduce_max_sync(~0u, stop_key);
        largest_scale = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(largest_scale)));
    }

    TA_DEVICE void multiply_keys(const PageSlot<D>& slot, int32_t (&s)[kTiles][8][4]) const {
#pragma unroll
        for (int n = 0; n < kTiles * 32; ++n) s[n / 32][n / 4 % 8][n % 4] = kScoreZero;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            uint32_t a[kTiles][4];
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 w = query(t, step);
                a[t][0] = w.x, a[t][1] = w.y, a[t][2] = w.z, a[t][3] = w.w;
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const uint4 k = load_chunk(slot.k + ((n * kSteps + step) * 32 + lane) * 16);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma_s8_s8(s[t][2 * n], a[t], k.x, k.y);
                    mma_s8_s8(s[t][2 * n + 1], a[t], k.z, k.w);
                }
            }
        }
    }
    // The rows' products with the fractions of K's zero points, in units of a score.
    TA_DEVICE void multiply_fractions(const PageSlot<D>& slot, uint32_t flags, float (&fraction)[kTiles][2]) const {
        int32_t sum[kTiles][4] = {};
        const bool two = flags & PageInfo::kK2;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint2 bytes = *reinterpret_cast<const uint2*>(slot.k_channels.step + D / 4 * (lane & 3) + 8 * step);
            const uint32_t mask = two ? 0x04040404u : 0x07070707u;
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 w = query(t, step);
                const uint32_t a[4] = {w.x, w.y, w.z, w.w};
                mma_s8_s8(sum[t], a, bytes.x >> 5 & mask, bytes.y >> 5 & mask);
            }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) fraction[t][0] = 0.125f * float(sum[t][0]), fraction[t][1] = 0.125f * float(sum[t][2]);
    }

    // kFractions: V's zero points have fractions.
    template <bool kFractions>
    TA_DEVICE void multiply_values(const PageSlot<D>& slot, uint32_t flags, const Weights (&w)[kTiles],
                                   const float (&factor)[kTiles][2]) {
        uint32_t digits[kTiles][2];
#pragma unroll
        for (int t = 0; t < kTiles && kFractions; ++t)
            digits[t][0] = digits_of_sum(w[t].p, 0), digits[t][1] = digits_of_sum(w[t].p, 1);
        const uint8_t* const v_step = slot.v_channels.step + D / 8 * (lane >> 2);
        const uint32_t mask = flags & PageInfo::kV2 ? 0x0404 : 0x0707;
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            int32_t u[kTiles][2][4];
#pragma unroll
            for (int m = 0; m < kTiles * 8; ++m) u[m / 8][m / 4 % 2][m % 4] = kValueZero;
#pragma unroll
            for (int step = 0; step < 2; ++step) {
                const uint4 v = load_chunk(slot.v + ((n * 2 + step) * 32 + lane) * 16);
#pragma unroll
                for (int t = 0; t < kTiles; ++t) {
                    mma_u8_s8(u[t][0], w[t].p[step], v.x, v.y);
                    mma_u8_s8(u[t][1], w[t].p[step], v.z, v.w);
                }
            }
            if (kFractions) {
                const uint32_t f = *reinterpret_cast<const uint16_t*>(v_step + 2 * n) >> 5 & mask;
                const uint32_t first = (f & 0xff) * 0x1001u, second = (f >> 8) * 0x1001u;
#pragma unroll
                for (int t = 0; t < kTiles; ++t)
                    mma_u8_u8_k16(u[t][0], digits[t], first), mma_u8_u8_k16(u[t][1], digits[t], second);
            }
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
#pragma unroll
                for (int m = 0; m < 8; ++m) add_term(u[t][m / 4][m % 4], factor[t][m / 2 % 2], o[t][8 * n + m]);
            }
        }
    }

    // Products of a page with K to weights.
    TA_DEVICE void weigh(const AttendArgs& args, const Tile& tile, const PageSlot<D>& slot, const PageKeys& keys,
                         int32_t (&s)[kTiles][8][4], Weights (&w)[kTiles]) {
        const uint32_t flags = keys.flags;
        const float k_scale = slot.info.k_scale;
        const bool sas = kOptions && args.exp == ExpMode::kSas;
        float fraction[kTiles][2] = {};
        if (kChannels && (flags & PageInfo::kKFraction)) multiply_fractions(slot, flags, fraction);
        const bool cut = keys.key < begin || keys.key + kPageTokens > end;
        const bool general = kOptions && (args.softcap > 0.0f || args.alibi_slope || (sas && (flags & PageInfo::kVTokens)));
        const bool plain =
            !cut && !general && !(flags & (PageInfo::kKTokens | PageInfo::kTurning)) && largest_scale * k_scale <= kCoarsest;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            RowInfo* const info = shared.rows + row_in_tile(t);
            if (__any_sync(~0u, plain)) {
                const float scale[2] = {info[0].scale * k_scale, info[8].scale * k_scale};
                const float added[2] = {fraction[t][0] * scale[0], fraction[t][1] * scale[1]};
                if (flags & PageInfo::kVTokens) {
                    plain_weights<true, false, kChannels>(s[t], scale, added, info, slot, flags, lane & 3, w[t]);
                } else if (kOptions && sas) {
                    plain_weights<false, kOptions, kChannels>(s[t], scale, added, info, slot, flags, lane & 3, w[t]);
                } else {
                    plain_weights<false, false, kChannels>(s[t], scale, added, info, slot, flags, lane & 3, w[t]);
                }
            } else {
                general_weights<kOptions, kChannels>(s[t], args, tile, {row_in_tile(t), info, lane & 3}, fraction[t], slot,
                                                     keys, w[t]);
            }
        }
    }

    // Adds a page's weights to l, and finds the factors of its product with V. Settles O when that is due. v_log2: PageInfo's.
    TA_DEVICE void add_weights(const Weights (&w)[kTiles], float v_log2, float (&factor)[kTiles][2]) {
        bool settles = false;
        // Beside a score of millions V's scale is rounded.
        const auto above_reference = [&](int t, int r) { return w[t].top[r] + v_log2 - rows[t].reference[r]; };
        const auto find_factor = [&](int t, int r) {
            const float above = above_reference(t, r);
            factor[t][r] = w[t].top[r] == kNever ? 0.0f : ex2(fminf(above, 27.0f) + 100.0f);  // kOutUnit / 2^-149
            return above;
        };
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float above = find_factor(t, r);
                const bool holds_much =
                    rows[t].zero[r] > factor[t][r] * (kMostZero * kValueZero * 0x1p-149f) && above > kBeyond;
                settles |= w[t].top[r] != kNever && (above > kRaise || holds_much);
            }
        }
        if (__any_sync(~0u, settles)) {
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const float m[2] = {w[t].top[0] == kNever ? kNever : w[t].top[0] + v_log2,
                                    w[t].top[1] == kNever ? kNever : w[t].top[1] + v_log2};
                settle(rows[t], m, o[t]);
                find_factor(t, 0), find_factor(t, 1);
            }
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                // Twice the root of the factor, kOutUnit's too: V's scale, which the reference has, may be anything. From the
                // factor, and what was rounded in that, or O would not lie between V's values.
                const float root = w[t].top[r] == kNever ? 0.0f : ex2(0.5f * (above_reference(t, r) - v_log2) - 24.5f);
                rows[t].sums.l[r] = fmaf(w[t].sum[r] * kSumUnit * root, root, rows[t].sums.l[r]);
                add_term(kValueZero, factor[t][r], rows[t].zero[r]);
            }
        }
    }

    TA_DEVICE void take_page(const AttendArgs& args, const Tile& tile, const PageSlot<D>& slot, int page) {
        const int key = page * kPageTokens, place = tile.rows.walk.block(page) * kPageTokens;
        if (key >= stop_key || key + kPageTokens <= first_key) return;
        const PageKeys keys{key, place, __shfl_sync(~0u, slot.info.flags, 0)};
        const float v_log2 = slot.info.v_log2;
        const bool sas = kOptions && args.exp == ExpMode::kSas;
        if (sas && key % (kPromptRangePages * kPageTokens) == 0) {
            __syncwarp();
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                shared.rows[row_in_tile(t)].natural = kNever;
                shared.rows[row_in_tile(t) + 8].natural = kNever;
            }
            __syncwarp();
        }
        int32_t s[kTiles][8][4];
        multiply_keys(slot, s);
        Weights w[kTiles];
        weigh(args, tile, slot, keys, s, w);
        float factor[kTiles][2];
        add_weights(w, v_log2, factor);
        if (kChannels && (keys.flags & PageInfo::kVFraction)) {
            multiply_values<true>(slot, keys.flags, w, factor);
        } else {
            multiply_values<false>(slot, keys.flags, w, factor);
        }
    }

    TA_DEVICE void finish(const AttendArgs& args, PrefillSchedule* schedule, uint8_t* workspace, const Tile& tile) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const float never[2] = {kNever, kNever};
            settle(rows[t], never, o[t]);
            const int unit = warp * kTiles + t;
            if (tile.rows.parts > 1 && !join_parts<D, kRows<D> / 16>(schedule, workspace, tile, unit, lane, rows[t], o[t]))
                continue;
            finish_rows<D>(args, tile, row_in_tile(t), lane, shared.rows + row_in_tile(t), rows[t], o[t],
                           shared.q + unit * 16 * D);
        }
    }
};

// The places of a page in a ring of depth + 1 slots and one of depth - 1 for codes as they came.
struct Ring {
    int depth, slot = 0, raw = 0;
    TA_DEVICE explicit Ring(int depth) : depth(depth) {}
    TA_DEVICE void next() {
        slot = slot == depth ? 0 : slot + 1;
        raw = raw + 2 >= depth ? 0 : raw + 1;
    }
};

// Thread 0 takes the next item.
TA_DEVICE void take_tile(const AttendArgs& args, PrefillSchedule* schedule, Tile& t) {
    const int item = atomicAdd(&schedule->taken, 1), heads = args.kv_heads;
    if (item >= __ldg(&schedule->tiles) * heads) {
        t.head = -1;
        if (atomicAdd(&schedule->finished, 1) == int(gridDim.x) - 1) schedule->taken = schedule->finished = 0;
        return;
    }
    constexpr int kWords = sizeof(PrefillTile) / sizeof(int4);
    const int4* const from = reinterpret_cast<const int4*>(schedule + 1) + kWords * (item / heads);
    int4* const words = reinterpret_cast<int4*>(&t.rows);
#pragma unroll
    for (int n = 0; n < kWords; ++n) words[n] = __ldg(from + n);
    t.head = item % heads;
    t.head_of_first = uint32_t(t.rows.first_row - t.rows.first_token * args.group);
    t.per_group = kReciprocal / uint32_t(args.group) + 1;
}

template <int D, bool kChannels, bool kOptions>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendArgs args, PrefillSchedule* schedule, uint8_t* workspace, int depth) {
    extern __shared__ __align__(128) uint8_t memory[];
    SharedMemory<D>& shared = *reinterpret_cast<SharedMemory<D>*>(memory);
    const int thread = int(threadIdx.x), warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    if (args.signs && thread < D / 8) shared.sign_masks[thread] = sign_mask(args.signs, thread);
    if (thread == 0) take_tile(args, schedule, shared.tiles[0]);
    __syncthreads();
    Consumer<D, kChannels, kOptions> consumer(shared, warp, lane);
    for (int n = 0;; n ^= 1) {
        const Tile& tile = shared.tiles[n];
        const int head = __shfl_sync(~0u, tile.head, 0);
        if (head < 0) return;
        const int page_begin = __shfl_sync(~0u, tile.rows.page_begin, 0), page_end = __shfl_sync(~0u, tile.rows.page_end, 0);
        const auto entry_at = [&](int page) { return args.table + tile.rows.first_entry + tile.rows.walk.block(page); };
        const auto keep_place = [&](int page, uint64_t entry) {
            shared.places[page % kPlaces] = find_page<D>(args, head, kChannels ? args.heads + head : nullptr, entry);
        };
        if (thread < kPlaces && page_begin + thread < page_end)
            keep_place(page_begin + thread, __ldg(entry_at(page_begin + thread)));
        __syncthreads();
        // Rings: the places of the next page to copy and of the next to expand, and the slot of the next to multiply.
        Ring copied(depth), expanded(depth);
        int multiplied = 0;
        const auto copy = [&](int page) {
            if (page < page_end)
                copy_page<D, kChannels>(shared.places[uint32_t(page) % kPlaces], shared.slots[copied.slot],
                                        shared.raw(depth, copied.raw), thread);
            cp_async_commit();
            copied.next();
        };
        for (int page = page_begin; page < page_begin + depth - 1; ++page) copy(page);
        consumer.start(args, tile);
#pragma unroll 1
        for (int page = page_begin - 1; page < page_end; ++page) {
            if (depth == kMostDepth) {
                cp_async_wait<kMostDepth - 2>();
            } else {
                cp_async_wait<0>();
            }
            // The next page's copies are complete, and all warps are done with the page before.
            __syncthreads();
            const int next = page + 1;
            if (next < page_end) {
                PageSlot<D>& slot = shared.slots[expanded.slot];
                const uint32_t bits =
                    kChannels ? __shfl_sync(~0u, shared.places[uint32_t(next) % kPlaces].piece & 0xffff, 0) : 0;
                if (kChannels && bits) expand_page<D>(bits, shared.raw(depth, expanded.raw), slot, thread);
                if (warp == int(uint32_t(next) % kWarps))
                    describe_page<D, kChannels>(slot, bits, tile.rows.own_keys - next * kPageTokens, args.k_turning, lane);
            }
            // The places of pages that are done make room for later ones.
            constexpr int kBatch = kPlaces / 2;
            if (thread < kBatch && page - page_begin >= kBatch && (page - page_begin) % (kBatch / 2) == 0) {
                const int after = (page - page_begin) % kBatch, later = page - after + kBatch + thread;
                if (later < page_end) {
                    if (after == 0) {
                        cp_async_8(smem_address(shared.entries + thread), entry_at(later));
                    } else {
                        keep_place(later, shared.entries[thread]);
                    }
                }
            }
            expanded.next();
            copy(page + depth);
            if (page >= page_begin) {
                consumer.take_page(args, tile, shared.slots[multiplied], page);
                multiplied = multiplied == depth ? 0 : multiplied + 1;
            }
        }
        if (thread == 0) take_tile(args, schedule, shared.tiles[n ^ 1]);
        consumer.finish(args, schedule, workspace, tile);
        __syncthreads();
    }
}

}  // namespace ta::cuda::prefill::sm80
