// Runs before an append: finds the turning pairs of pages that begin, with the bits of src/attend/cpu/turning.cpp and step.cpp
// there. They go into the lowest bytes of the K scales of the page's tokens, where the append finds them. A CTA takes one head
// of one block. If the last block of a sequence continues the pairs of the block before it, that block's CTA takes both.
#include <cuda_runtime_api.h>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/codec_rows.cuh"
#include "kernels/cuda/any/append/launch.h"
#include "kernels/cuda/any/append/layer.cuh"
#include "kernels/cuda/common/turning.cuh"
#include "kernels/cuda/ptx/mma.cuh"

namespace ta::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
static_assert(kThreads >= kMaxHeadDim && kWarps >= kTurningPairs);

__device__ __forceinline__ float sum_of_warp(float x) {  // in the order of sum_of_32
#pragma unroll
    for (int h = 16; h >= 1; h /= 2) x = rn_add(x, __shfl_xor_sync(kWholeWarp, x, h));
    return x;
}

struct Shared {
    float square[kMaxHeadDim];
    TurningChoice choice;
    int32_t first, second;  // the pair of channels to look at; first < 0: none
};

class PageTurning {
  public:
    __device__ PageTurning(const AppendArgs& a, const AppendLayer& layer, const AppendTask& task, int head, Shared& shared,
                           float* rows)
        : a_(a),
          layer_(layer),
          task_(task),
          layout_(a.head_dim),
          head_(head),
          d_(a.head_dim),
          warp_(int(threadIdx.x) / 32),
          lane_(int(threadIdx.x) % 32),
          shared_(shared),
          rows_(rows),
          piece_(token_piece(task.token_page)) {}

    // By the whole CTA.
    __device__ void run() {
        if (task_.copied_from != 0) copy_tokens();
        if (task_.have > 0 && !task_.begins_anew) return;
        __syncthreads();  // with what the CTA did before
        if (threadIdx.x < kTurningPairs) shared_.choice.taken[threadIdx.x] = 0;
        if (threadIdx.x == 0) shared_.choice.n_taken = shared_.choice.n_left = 0;
        const bool carries = task_.have == 0 && task_.end < kPageTokens && task_.previous != 0;
        __syncthreads();
        // A page that is not its sequence's first and of which the one before is gone has none.
        if (carries) {
            carry_pairs();
        } else if ((task_.end == kPageTokens || task_.first_block) && !stored_pairs_stay()) {
            find_pairs();
        }
        __syncthreads();
        TurningPairs pairs;
        int n = 0;
        for (int i = 0; i < kTurningPairs; ++i) {
            if (shared_.choice.taken[i]) pairs.code[n++] = shared_.choice.taken[i];
        }
        if (task_.have > 0 && !(pairs == stored_pairs())) {
            __syncthreads();  // with those who read the scales
            for (int t = warp_; t < task_.have; t += kWarps) encode_row(pairs, t);
        }
        for (int t = task_.have + int(threadIdx.x); t < kPageTokens; t += kThreads) scale_words()[t] = pairs.byte(t);
    }

  private:
    __device__ uint8_t* token_piece(uint64_t page) const {
        const uint64_t layer = page & kEntrySingleLayer ? 0 : layer_.token_layer_offset;
        return reinterpret_cast<uint8_t*>((page & ~kEntryFlags) + layer + head_ * layout_.bytes());
    }
    __device__ uint32_t* scale_words() const { return reinterpret_cast<uint32_t*>(piece_ + layout_.k_scale()); }

    // The turning pairs that the page has.
    __device__ TurningPairs stored_pairs() const {
        TurningPairs out;
        for (int n = 0; n < kTurningPairs; ++n) out.code[n] = turning_of_scales(piece_ + layout_.k_scale(), n);
        return out;
    }

    __device__ void copy_tokens() const {
        const auto* from = reinterpret_cast<const uint4*>(token_piece(task_.copied_from));
        for (int n = int(threadIdx.x); n < int(layout_.bytes() / sizeof(uint4)); n += kThreads) {
            reinterpret_cast<uint4*>(piece_)[n] = from[n];
        }
    }

    // Pair n of the page before, 0 if there is none.
    __device__ uint64_t previous_pair(int n) const {
        const uint64_t entry = task_.previous;
        if (!(entry & kEntryChannel)) return turning_of_scales(token_piece(entry) + layout_.k_scale(), n);
        const auto* page = reinterpret_cast<const uint8_t*>(entry & ~kEntryFlags);
        if (entry & kEntryLow) {
            const ChannelLayout low(d_, 2, 2);
            return turning_of_pairs(page + layer_.low_layer_offset + head_ * low.bytes() + low.k_turning(), n);
        }
        const HeadArgs h = layer_.heads[head_];
        const ChannelLayout at(d_, h.k_bits, h.v_bits);
        const uint8_t* piece = page + layer_.channel_layer_offset + h.channel_offset;
        return h.k_bits == 8 ? turning_of_scales(piece + at.k_parameters(), n) : turning_of_pairs(piece + at.k_turning(), n);
    }

    // ---- rows, by one warp each ----

    __device__ float* row(int t) const { return rows_ + t * d_; }

    __device__ void load_row(int t) const {
        float* to = row(t);
        if (t < task_.have) {
            load_stored_row(t, to);
            return;
        }
        const int64_t at = (int64_t(task_.row) + t - task_.have) * layer_.k.stride_row + head_ * layer_.k.stride_head;
        const auto* from = static_cast<const uint8_t*>(layer_.k.data) + at * int64_t(dtype_bytes(layer_.k.dtype));
        for (int c = lane_; c < d_; c += 32) {
            const float x = value_of(layer_.k.dtype, from, c);
            to[c] = layer_.k_offset ? rn_sub(x, layer_.k_offset[head_ * d_ + c]) : x;
        }
        __syncwarp();
    }
    // As widen_rows has it; the append counts what is replaced.
    __device__ float value_of(DType type, const void* from, int c) const {
        float x;
        if (type == DType::kF32) {
            x = static_cast<const float*>(from)[c];
        } else {
            const uint16_t half = static_cast<const uint16_t*>(from)[c];
            x = type == DType::kF16 ? __half2float(__ushort_as_half(half)) : __uint_as_float(uint32_t(half) << 16);
        }
        const float limit = type == DType::kF16 ? 65504.0f : kMaxMagnitude;
        if (fabsf(x) <= limit) return x;
        return !a_.saturate || x != x ? 0.0f : copysignf(limit, x);
    }
    __device__ void load_stored_row(int t, float* to) const {
        const float scale = __uint_as_float(scale_words()[t]);
        for (int c = lane_; c < d_; c += 32) {
            to[c] = rn_mul(float(int8_t(piece_[layout_.k_codes() + k_place(d_, 8, t, c).byte])), scale);
        }
        __syncwarp();
        if (a_.signs) {
            transform(to);
            for (int c = lane_; c < d_; c += 32) to[c] = rn_mul(to[c], a_.signs[c]);
            __syncwarp();
        }
        for (int n = 0; n < kTurningPairs; ++n) {
            const uint64_t code = turning_of_scales(piece_ + layout_.k_scale(), n);
            if (code == 0) break;
            add_pair(code, t, 1.0f, to);
        }
    }
    __device__ void add_pair(uint64_t code, int t, float sign, float* x) const {
        const TurningPair p = unpack_turning(code);
        const TurningValues at = turning_values(p, t);
        if (lane_ == 0) {
            x[p.first] = rn_add(x[p.first], rn_mul(sign, at.first));
            x[p.second] = rn_add(x[p.second], rn_mul(sign, at.second));
        }
        __syncwarp();
    }
    // hadamard_in_place of rotation.h.
    __device__ void transform(float* x) const {
        for (int bit = 0; 1 << bit < d_; ++bit) {
            const int h = 1 << bit;
            for (int n = lane_; n < d_ / 2; n += 32) {
                const int i = (n >> bit << (bit + 1)) + (n & (h - 1));
                const float u = x[i], v = x[i + h];
                x[i] = rn_add(u, v);
                x[i + h] = rn_sub(u, v);
            }
            __syncwarp();
        }
        for (int c = lane_; c < d_; c += 32) x[c] = rn_mul(x[c], rotation_norm(d_));
        __syncwarp();
    }

    // A token that the page has, with other pairs.
    __device__ void encode_row(const TurningPairs& pairs, int t) const {
        float* x = row(t);
        for (int n = 0; n < kTurningPairs && pairs.code[n]; ++n) add_pair(pairs.code[n], t, -1.0f, x);
        if (a_.signs) {
            for (int c = lane_; c < d_; c += 32) x[c] = rn_mul(x[c], a_.signs[c]);
            __syncwarp();
            transform(x);
        }
        float amax = 0.0f;
        for (int c = lane_; c < d_; c += 32) amax = fmaxf(amax, fabsf(x[c]));
        amax = __uint_as_float(__reduce_max_sync(kWholeWarp, __float_as_uint(amax)));
        const float own = amax < kMinAmax ? 0.0f : rn_div(amax, float(kStage1Levels));
        const float scale = scale_with_turning(own, pairs, t);
        for (int c = lane_; c < d_; c += 32) {
            float code = scale > 0.0f ? rintf(rn_div(x[c], scale)) : 0.0f;
            code = fminf(fmaxf(code, -float(kStage1Levels)), float(kStage1Levels));
            piece_[layout_.k_codes() + k_place(d_, 8, t, c).byte] = uint8_t(int8_t(code));
        }
        if (lane_ == 0) scale_words()[t] = __float_as_uint(scale);
    }

    // ---- series, by one warp, whose lanes have two tokens each ----

    struct Series {
        float x[2], y[2];
        int n;
    };
    __device__ Series series(int first, int second, int n) const {
        Series s{{0.0f, 0.0f}, {0.0f, 0.0f}, n};
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int t = lane_ + 32 * m;
            if (t < n) s.x[m] = row(t)[first], s.y[m] = row(t)[second];
        }
        return s;
    }
    __device__ TurningSum turned_back(const Series& s, uint32_t turn, int begin, int end) const {
        float re = 0.0f, im = 0.0f;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int t = lane_ + 32 * m;
            if (t < begin || t >= end) continue;
            const SinCos at = turn_sin_cos(turn * uint32_t(t));
            re = rn_add(re, rn_add(rn_mul(s.x[m], at.cos), rn_mul(s.y[m], at.sin)));
            im = rn_add(im, rn_sub(rn_mul(s.y[m], at.cos), rn_mul(s.x[m], at.sin)));
        }
        return {sum_of_warp(re), sum_of_warp(im)};
    }
    __device__ TurningPair fit(const Series& s, int first, int second, float& all) const {
        float squares = 0.0f, re = 0.0f, im = 0.0f;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int t = lane_ + 32 * m;
            if (t < s.n) squares = rn_add(squares, rn_add(rn_mul(s.x[m], s.x[m]), rn_mul(s.y[m], s.y[m])));
            if (t + 1 >= s.n) continue;
            const float x1 = row(t + 1)[first], y1 = row(t + 1)[second];
            re = rn_add(re, rn_add(rn_mul(x1, s.x[m]), rn_mul(y1, s.y[m])));
            im = rn_add(im, rn_sub(rn_mul(y1, s.x[m]), rn_mul(x1, s.y[m])));
        }
        all = sum_of_warp(squares);
        const TurningSum neighbours{sum_of_warp(re), sum_of_warp(im)};
        TurningPair p{first, second, turn_of(neighbours.re, neighbours.im), 0, 0.0f};
        if (!may_turn(neighbours, s.n, all)) return p;
        const int half = s.n / 2;
        if (half > 0) {
            const TurningSum before = turned_back(s, p.turn, 0, half), after = turned_back(s, p.turn, half, 2 * half);
            p.turn = corrected_turn(p.turn, before, after, half);
        }
        anchor(p, turned_back(s, p.turn, 0, s.n), s.n);
        return p;
    }
    __device__ static float size_of(TurningSpread spread) {
#pragma unroll
        for (int h = 16; h >= 1; h /= 2) {
            const float low = __shfl_xor_sync(kWholeWarp, spread.low, h), high = __shfl_xor_sync(kWholeWarp, spread.high, h);
            spread.see(TurningSpread{low, high});
        }
        return spread.size();
    }
    // ta::turning_helps.
    __device__ bool helps(const Series& s, const TurningPair& p) const {
        TurningSpread given[2], rest[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const int t = lane_ + 32 * m;
            if (t >= s.n) continue;
            const TurningValues at = turning_values(p, t);
            given[0].see(s.x[m]);
            given[1].see(s.y[m]);
            rest[0].see(rn_sub(s.x[m], at.first));
            rest[1].see(rn_sub(s.y[m], at.second));
        }
        return rn_add(size_of(rest[0]), size_of(rest[1])) < rn_add(size_of(given[0]), size_of(given[1]));
    }

    // ---- pairs ----

    __device__ void carry_pairs() const {
        if (previous_pair(0) == 0) return;
        const int n = task_.end;
        for (int t = warp_; t < n; t += kWarps) load_row(t);
        __syncthreads();
        const uint64_t code = warp_ < kTurningPairs ? previous_pair(warp_) : 0;
        if (code == 0) return;
        TurningPair p = unpack_turning(code);
        const Series s = series(p.first, p.second, n);
        if (!carry(p, turned_back(s, p.turn, 0, n), n)) return;
        const uint64_t now = pack_turning(p);
        if ((n < kTurningRows || helps(s, unpack_turning(now))) && lane_ == 0) shared_.choice.taken[warp_] = now;
    }

    // Does a page that closes keep the pairs that it has? If so, they are taken.
    __device__ bool stored_pairs_stay() const {
        if (task_.have == 0 || task_.first_block || !stored_pairs().any()) return false;
        const int n = task_.end;
        for (int t = warp_; t < n; t += kWarps) load_row(t);
        __syncthreads();
        const uint64_t code = warp_ < kTurningPairs ? turning_of_scales(piece_ + layout_.k_scale(), warp_) : 0;
        bool stays = true;
        if (code != 0) {
            const TurningPair p = unpack_turning(code);
            stays = helps(series(p.first, p.second, n), p);
        }
        if (!__syncthreads_and(stays)) return false;
        if (code != 0 && lane_ == 0) shared_.choice.taken[warp_] = code;
        return true;
    }

    __device__ void find_pairs() const {
        const int n = task_.end, samples = turning_samples(n);
        for (int i = warp_; i < samples; i += kWarps) load_row(turning_sample(n, i));
        __syncthreads();
        const int c = int(threadIdx.x);
        if (c < d_) {
            float square = 0.0f;
            for (int i = 0; i < samples; ++i) {
                const float x = row(turning_sample(n, i))[c];
                square = rn_add(square, rn_mul(x, x));
            }
            shared_.square[c] = square;
            shared_.choice.used[c] = false;
        }
        __syncthreads();
        TurningLimits limits(0.0f, n, d_);
        uint32_t tried = 0;
        if (warp_ == 0) {
            limits = TurningLimits(rn_div(square_without_peaks(), float(samples)), n, d_);
            next(limits.least, samples, tried);
        }
        __syncthreads();
        if (shared_.first < 0 && (task_.have == 0 || !stored_pairs().any())) return;
        for (int t = warp_; t < n; t += kWarps) load_row(t);
        __syncthreads();
        if (warp_ > 0) return;
        TurningChoice& choice = shared_.choice;
        for (int tries = 1; shared_.first >= 0; ++tries) {
            look_at(shared_.first, shared_.second, n, limits);
            __syncwarp();
            if (choice.is_full() || tries == kTurningTries) break;
            next(limits.least, samples, tried);
        }
        if (lane_ == 0) choice.take_left();
    }

    // As find_turning does, by one warp.
    __device__ void look_at(int first, int second, int n, const TurningLimits& limits) const {
        const Series s = series(first, second, n);
        float all;
        const TurningPair p = fit(s, first, second, all);
        if (!is_turning(p, n, all, limits)) return;
        const uint64_t code = pack_turning(p);
        const float rest = turning_rest(p, n, all);
        if (rest <= limits.rest) {
            if (lane_ == 0) shared_.choice.take(code);
        } else if (helps(s, unpack_turning(code))) {
            if (lane_ == 0) shared_.choice.leave(code, rest);
        }
    }

    // ta::square_without_peaks, by one warp.
    __device__ float square_without_peaks() const {
        float limit = __builtin_inff(), mean = 0.0f;
        for (int round = 0; round < 6; ++round) {
            float sum = 0.0f;
            int count = 0;
            for (int c = lane_; c < d_; c += 32) {
                if (!(shared_.square[c] <= limit)) continue;
                sum = rn_add(sum, shared_.square[c]);
                ++count;
            }
            count = __reduce_add_sync(kWholeWarp, count);
            sum = sum_of_warp(sum);
            mean = count ? rn_div(sum, float(count)) : 0.0f;
            limit = rn_mul(mean, 4.0f);
        }
        return rn_mul(mean, float(d_));
    }

    // TurningSearch::next by one warp, into shared_. Bit 8 m + k of `tried`: the pair at distance m of channel lane + 32 k.
    __device__ void next(float least, int samples, uint32_t& tried) const {
        const float enough = rn_mul(least, float(samples));
        float most = 0.0f;
        uint32_t best = ~0u;  // distance m, then channel
        for (int m = 0; m < kTurningDistances; ++m) {
            for (int k = 0; lane_ + 32 * k < d_; ++k) {
                const int c = lane_ + 32 * k;
                if (!is_first_of_pair(d_, m, c) || (tried >> (8 * m + k) & 1)) continue;
                const int other = c + turning_distance(d_, m);
                const float both = rn_add(shared_.square[c], shared_.square[other]);
                if (shared_.choice.used[c] || shared_.choice.used[other] || !(both > most && both >= enough)) continue;
                most = both, best = uint32_t(m * kMaxHeadDim + c);
            }
        }
        const uint32_t top = __reduce_max_sync(kWholeWarp, __float_as_uint(most));
        best = __reduce_min_sync(kWholeWarp, __float_as_uint(most) == top ? best : ~0u);
        if (best == ~0u) {
            if (lane_ == 0) shared_.first = -1;
        } else {
            const int m = int(best) / kMaxHeadDim, c = int(best) % kMaxHeadDim;
            if (c % 32 == lane_) tried |= 1u << (8 * m + c / 32);
            if (lane_ == 0) shared_.first = c, shared_.second = c + turning_distance(d_, m);
        }
        __syncwarp();
    }

    const AppendArgs& a_;
    const AppendLayer& layer_;
    const AppendTask& task_;
    const TokenLayout layout_;
    const int head_, d_, warp_, lane_;
    Shared& shared_;
    float* const rows_;
    uint8_t* const piece_;
};

// A block that goes on with the pairs of the one before it, which the step brings, too.
__device__ bool is_chained(const AppendTask& task) {
    return task.index > 0 && task.have == 0 && task.end < kPageTokens;
}

__global__ void __launch_bounds__(kThreads) turning_kernel(const __grid_constant__ AppendArgs a) {
    extern __shared__ __align__(16) float rows[];
    grid_launch_dependents();
    __shared__ Shared shared;
    __shared__ AppendLayer shared_layer;
    const AppendLayer& layer = take_layer(a, shared_layer);
    const int tasks = *a.n_tasks, items = tasks * a.kv_heads;
    for (int item = int(blockIdx.x); item < items; item += int(gridDim.x)) {
        const int n = item / a.kv_heads, head = item % a.kv_heads;
        const AppendTask task = a.tasks[n];
        if (is_chained(task)) continue;
        PageTurning(a, layer, task, head, shared, rows).run();
        if (n + 1 == tasks) continue;
        const AppendTask following = a.tasks[n + 1];
        if (!is_chained(following)) continue;
        __syncthreads();
        PageTurning(a, layer, following, head, shared, rows).run();
    }
}

size_t rows_bytes(int head_dim) {
    return size_t(kPageTokens) * size_t(head_dim) * sizeof(float);
}

}  // namespace

int prepare_turning(int head_dim, int* ctas_per_multiprocessor) {
    const auto* const kernel = reinterpret_cast<const void*>(&turning_kernel);
    const cudaError_t e =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(rows_bytes(kMaxHeadDim)));
    if (e != cudaSuccess) return e;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(ctas_per_multiprocessor, kernel, kThreads, rows_bytes(head_dim));
}

int launch_turning(const AppendPlan& plan, const AppendArgs& args, CUstream_st* stream) {
    AppendArgs copy = args;
    void* parameters[] = {&copy};
    return cudaLaunchKernel(reinterpret_cast<const void*>(&turning_kernel),
                            dim3(ctas_of(plan.turning_ctas, args), layers_of(args)), dim3(kThreads), parameters,
                            rows_bytes(args.head_dim), stream);
}

}  // namespace ta::cuda
