// The append kernel. A CTA takes one head of one block at a time. If the open page's scale is universal, the sequence's last page
// needs the largest magnitude of all pages before it: the CTA that finishes the last of those encodes it. If closed pages have no
// scale of their own either, a CTA takes one head of a sequence, block after block.
#pragma once

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/codec_page.cuh"
#include "kernels/cuda/any/append/kept_rows.cuh"
#include "kernels/cuda/any/append/launch.h"
#include "kernels/cuda/any/append/layer.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/format/quantize_rules.h"

namespace ta::cuda {

// The values of the turning pairs of a whole page at its tokens.
struct TurningTable {
    float2 value[kTurningPairs][kPageTokens];
};

template <int D>
class Appender {
    using Rows = RowShape<D>;
    using Page = PageImage<D>;
    static constexpr size_t kPieceBytes = TokenLayout(D).bytes();

  public:
    __device__ Appender(const AppendArgs& args, const AppendLayer& layer, Page& page, float (&amax)[2][kPageTokens],
                        TurningTable& turning, int head)
        : a_(args),
          layer_(layer),
          page_(page),
          amax_(amax),
          turning_(turning),
          head_(head),
          warp_(threadIdx.x / 32),
          row_in_warp_(threadIdx.x % 32 / Rows::kLanes),
          lane_(threadIdx.x % Rows::kLanes) {}

    // All tokens of a page at once, into the image and the token page. Row slot s of 16 has tokens 32 (s / 8) + 8 p + s % 8, so
    // that a lane's four rows fill whole words of V's order and half words of K's.
    __device__ void whole_page(const AppendTask& task) {
        const int slot = warp_ + Rows::kWarps * row_in_warp_, t0 = 32 * (slot / 8) + slot % 8;
        uint8_t* piece = token_piece(task);
        auto* to = reinterpret_cast<uint4*>(piece);
        if (threadIdx.x < kPageTokens) page_.v_sum[threadIdx.x] = 0;
        if (a_.encode.k_turning) make_table(piece + TokenLayout(D).k_scale());
#pragma unroll 1
        for (int tensor = 0; tensor < 2; ++tensor) {
            float x[4][8], amax[4];
            const uint8_t* turning = tensor == 0 && a_.encode.k_turning ? piece + TokenLayout(D).k_scale() : nullptr;
            read_rows({tensor, task.sequence, int64_t(task.row) + t0 - task.have, turning, t0}, active(), true, x, amax);
            const ScaleOf scale_of = page_scales(tensor, task, t0, amax);
            // Each lane finds the scale of one of the four rows.
            const int mine = lane_ % 4;
            const float given = scale_of(mine == 0 ? amax[0] : mine == 1 ? amax[1] : mine == 2 ? amax[2] : amax[3]);
            const float own = turning ? turned_scale(turning, given, t0 + 8 * mine) : given;
            if (lane_ < 4) page_.scale[tensor][t0 + 8 * mine] = own;
            const Divider divider(own);
            if (scale_of.rule == ScaleRule::kUniversal) {
#pragma unroll
                for (int p = 0; p < 4; ++p) {
                    const float scale = turning ? turned_scale(turning, scale_of.shared, t0 + 8 * p) : scale_of.shared;
                    count_clamped(clamp_row(x[p], scale));
                }
            }
            if (__any_sync(kWholeWarp, divider.up != 1.0f)) {
#pragma unroll
                for (int p = 0; p < 4; ++p) scale_up(x[p], __shfl_sync(kWholeWarp, divider.up, p, 4));
            }
            uint32_t code[4][8];
#pragma unroll
            for (int p = 0; p < 4; ++p) quantize_row(x[p], Divider(divider, p), code[p]);
            if (!active()) continue;
            if (tensor == 0) {
                const int i = 8 * lane_ / (D / 4), step = 8 * lane_ % (D / 4) / 8;
#pragma unroll
                for (int p = 0; p < 4; p += 2) {
                    const int tile = 2 * (slot / 8) + p / 2;
                    const uint4 chunk =
                        make_uint4(word(code[p], 0), word(code[p + 1], 0), word(code[p], 4), word(code[p + 1], 4));
                    page_.k[Page::k_chunk(tile, step, slot % 8, i)] = chunk;
                    to[(tile * (D / 32) + step) * 32 + slot % 8 * 4 + i] = chunk;
                }
            } else {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    page_.v_words(v_chunk(slot % 8, 8 * lane_ + j))[2 * (slot / 8) + j % 2] =
                        low_bytes(code[0][j], code[1][j], code[2][j], code[3][j]);
                }
            }
        }
        __syncthreads();
        for (int n = threadIdx.x; n < Page::kChunks; n += Rows::kThreads) to[Page::kChunks + n] = page_.v[Page::v_chunk(n)];
        if (threadIdx.x < kPageTokens) {
            auto* scales = reinterpret_cast<float*>(piece + TokenLayout(D).k_scale()) + threadIdx.x;
            scales[0] = page_.scale[0][threadIdx.x];
            scales[kPageTokens] = page_.scale[1][threadIdx.x];
        }
    }

    // Brings the rows of a whole page that comes next for this CTA into L2.
    __device__ void prefetch(const AppendTask& task, int head) const {
        if (!active() || task.end - task.have != kPageTokens) return;
        const int slot = warp_ + Rows::kWarps * row_in_warp_, t0 = 32 * (slot / 8) + slot % 8;
#pragma unroll
        for (int tensor = 0; tensor < 2; ++tensor) {
            const TensorArgs& from = tensor ? layer_.v : layer_.k;
            const int64_t bytes = int64_t(dtype_bytes(from.dtype));
            const int64_t at = (int64_t(task.row) + t0) * from.stride_row + head * from.stride_head + 8 * lane_;
            const auto* p = static_cast<const uint8_t*>(from.data) + at * bytes;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
                p += 8 * from.stride_row * bytes;
            }
        }
    }

    // Fewer tokens. Of `warps` warps, this one being number `warp`, one half takes K and the other V. A team that is not the
    // whole CTA can have neither a page that closes nor universal scales.
    __device__ void some_tokens(const AppendTask& task, int warp, int warps) {
        uint8_t* piece = token_piece(task);
        const bool closes = task.channel_slot != 0, universal = a_.universal_open_scale;
        if (closes) {
            const auto* from = reinterpret_cast<const uint4*>(piece);
            uint4 k[2], v[2];
            static_assert(Page::kChunks <= 2 * Rows::kThreads);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int n = threadIdx.x + m * Rows::kThreads;
                if (n >= Page::kChunks) break;
                k[m] = from[n];
                v[m] = from[Page::kChunks + n];
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const int n = threadIdx.x + m * Rows::kThreads;
                if (n >= Page::kChunks) break;
                page_.k[Page::k_chunk(n)] = k[m];
                page_.v[Page::v_chunk(n)] = v[m];
            }
            if (threadIdx.x < kPageTokens) page_.v_sum[threadIdx.x] = 0;
        }
        if ((closes || universal) && threadIdx.x < task.have) {
            const auto* scales = reinterpret_cast<const float*>(piece + TokenLayout(D).k_scale()) + threadIdx.x;
            page_.scale[0][threadIdx.x] = scales[0];
            page_.scale[1][threadIdx.x] = scales[kPageTokens];
        }
        if (universal && threadIdx.x < kPageTokens) {
            amax_[0][threadIdx.x] = amax_[1][threadIdx.x] = 0.0f;
            const bool present = threadIdx.x < task.have;
            for (int which = 0; which < 2; ++which)
                page_.own[which][threadIdx.x] = present ? own_scales(task, which)[threadIdx.x] : 0.0f;
        }
        if (closes || universal) __syncthreads();
        const int tensor = warp >= warps / 2, first = task.have + warp % (warps / 2);
        const uint8_t* turning = tensor == 0 && a_.encode.k_turning ? piece + TokenLayout(D).k_scale() : nullptr;
        float shared = 0.0f;
        // If the page's scale depends on the rows, they are read twice.
#pragma unroll 1
        for (int pass = universal ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
            for (int n = first; n < task.end; n += warps / 2 * Rows::kWarpRows) {
                const int t = n + warps / 2 * row_in_warp_;
                const bool valid = t < task.end && active();
                float x[1][8], amax[1];
                read_rows({tensor, task.sequence, int64_t(task.row) + t - task.have, turning, t}, valid, pass == 1, x, amax);
                if (!valid) continue;
                if (pass == 0) {
                    if (lane_ != 0) continue;
                    amax_[tensor][t] = amax[0];
                    own_scales(task, tensor)[t] = page_.own[tensor][t] = page_stage1_scale(amax[0]);
                    continue;
                }
                float scale = universal ? shared : page_stage1_scale(amax[0]);
                if (turning) scale = turned_scale(turning, scale, t);
                if (universal) count_clamped(clamp_row(x[0], scale));
                const Divider divider(scale);
                scale_up(x[0], divider.up);
                uint32_t code[8];
                quantize_row(x[0], divider, code);
                store_row(tensor, piece, t, code, closes);
                if (lane_ != 0) continue;
                reinterpret_cast<float*>(piece + TokenLayout(D).k_scale())[tensor * kPageTokens + t] = scale;
                if (closes) page_.scale[tensor][t] = scale;
            }
            if (pass == 0) {
                __syncthreads();
                shared = universal_scale_of(tensor, task.have);
            }
        }
        if (closes) __syncthreads();
    }

    __device__ void close(const AppendTask& task) {
        const HeadArgs h = layer_.heads[head_];
        auto* piece =
            reinterpret_cast<uint8_t*>((task.channel_slot & ~kEntryFlags) + layer_.channel_layer_offset + h.channel_offset);
        close_page(page_, h.k_bits, h.v_bits, a_.encode, layer_.token_own_scales != 0, piece);
    }

    // Universal scales: takes up the sequence's largest ones before the step.
    __device__ void begin(const AppendTask& task) {
        if (task.scales_side == kNothingSeen) return;
        k_largest_ = record(task, task.scales_side)[0];
        v_largest_ = record(task, task.scales_side)[1];
    }

    // This CTA has done its part of task number n. Returns the number of the sequence's last task to the CTA that completes
    // what that one waits for, which then knows all scales, and -1 to the others.
    __device__ int arrive(const AppendTask& task, int n, bool last) {
        __shared__ int last_task;
        __shared__ float largest[2];
        __syncthreads();  // with the reads of an earlier call
        if (threadIdx.x == 0) {
            AppendProgress& p = a_.progress[int64_t(task.sequence) * a_.kv_heads + head_];
            atomicMax(&p.k_scale, __float_as_uint(k_largest_));
            atomicMax(&p.v_scale, __float_as_uint(v_largest_));
            if (last) p.last = n;
            __threadfence();
            const int change = last ? task.index : -1;  // the last one says how many come before it
            last_task = -1;
            if (atomicAdd(&p.left, change) + change == 0) {
                __threadfence();
                last_task = __ldcg(&p.last);
                largest[0] = __uint_as_float(atomicExch(&p.k_scale, 0u));
                largest[1] = __uint_as_float(atomicExch(&p.v_scale, 0u));
            }
        }
        __syncthreads();
        if (last_task >= 0) {
            k_largest_ = largest[0];
            v_largest_ = largest[1];
        }
        return last_task;
    }

    __device__ void end(const AppendTask& task) {
        if (threadIdx.x != 0) return;
        float* after = record(task, task.scales_side == 0 ? 1 : 0);
        after[0] = k_largest_;
        after[1] = v_largest_;
    }

  private:
    __device__ float* record(const AppendTask& task, int side) const {
        return layer_.largest_scales + (2 * int64_t(task.sequence) + side) * a_.scales_stride + 2 * head_;
    }

    struct ScaleOf {
        ScaleRule rule;
        float shared;
        // The scale of a token with this largest magnitude.
        __device__ float operator()(float amax) const {
            const float own = page_stage1_scale(amax);
            if (rule == ScaleRule::kToken) return own;
            if (rule != ScaleRule::kPageExp) return shared;
            return own > 0.0f ? times_pow2(shared, -exponent_below_normal(own, shared)) : 0.0f;  // exponent_scale of codec.h
        }
    };

    __device__ bool active() const {
        return 8 * lane_ < D;
    }

    __device__ static uint32_t word(const uint32_t (&code)[8], int c) {
        return low_bytes(code[c], code[c + 1], code[c + 2], code[c + 3]);
    }

    __device__ uint8_t* token_piece(const AppendTask& task) const {
        const uint64_t layer = task.token_page & kEntrySingleLayer ? 0 : layer_.token_layer_offset;
        return reinterpret_cast<uint8_t*>((task.token_page & ~kEntryFlags) + layer + head_ * kPieceBytes);
    }

    // [64] of K or V in the block's slot, which is there but for a page that closes in the step that opens it.
    __device__ float* own_scales(const AppendTask& task, int tensor) const {
        return reinterpret_cast<float*>((task.token_page & ~kEntryFlags) + layer_.token_own_scales) +
               (2 * head_ + tensor) * kPageTokens;
    }

    // The chunk of V with channel `channel` and a token that is `t` modulo 8.
    __device__ static int v_chunk(int t, int channel) {
        return Page::v_chunk(channel % (D / 8) / 2, t % 2, channel / (D / 8), t / 2);
    }

    // scale_with_turning of turning.h for token t of a page. `turning`: its K scales, whose lowest bytes are there before.
    __device__ static float turned_scale(const uint8_t* turning, float scale, int t) {
        if (scale == 0.0f && turning_of_scales(turning, 0) != 0) scale = page_stage1_scale(kMinAmax);
        return __uint_as_float((__float_as_uint(scale) & ~255u) | turning[4 * t]);
    }

    // Rows `first`, first + 8, ... of K or V, the first being token t of its page. `turning`, if not null: the page's K scales.
    struct PageRows {
        int tensor, sequence;
        int64_t first;
        const uint8_t* turning;
        int t;
    };

    // Reads the head's rows, prepared for stage 1, and their largest magnitudes. All lanes of the warp; those that are not `valid` get
    // zeros. `count`: what is replaced is counted.
    template <int kRows>
    __device__ void read_rows(const PageRows& rows, bool valid, bool count, float (&x)[kRows][8], float (&amax)[kRows]) const {
        const DType type = rows.tensor ? layer_.v.dtype : layer_.k.dtype;
        if (type == DType::kBf16) {
            read_rows_of<DType::kBf16>(rows, valid, count, x, amax);
        } else if (type == DType::kF16) {
            read_rows_of<DType::kF16>(rows, valid, count, x, amax);
        } else {
            read_rows_of<DType::kF32>(rows, valid, count, x, amax);
        }
    }

    template <DType kType, int kRows>
    __device__ void read_rows_of(const PageRows& rows, bool valid, bool count, float (&x)[kRows][8],
                                 float (&amax)[kRows]) const {
        const TensorArgs& from = rows.tensor ? layer_.v : layer_.k;
        const bool rotated = rows.tensor == 0 && can_rotate(D) && a_.signs != nullptr;
        RawRow<kType> raw[kRows] = {};
        load_rows({from, rows.first, 8, head_, valid ? kRows : 0}, lane_, raw);
        float sign[8];
        if (rotated) {
#pragma unroll
            for (int j = 0; j < 8; ++j) sign[j] = __ldg(a_.signs + 8 * lane_ + j);
        }
        const int replaced = widen_rows(raw, a_.saturate, x, amax);
        if (replaced && count && a_.nonfinite) atomicAdd(a_.nonfinite + rows.sequence, uint32_t(replaced));
        if (rows.tensor == 0 && layer_.k_offset && valid) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float offset = __ldg(layer_.k_offset + head_ * D + 8 * lane_ + j);
#pragma unroll
                for (int p = 0; p < kRows; ++p) x[p][j] = __fsub_rn(x[p][j], offset);
            }
#pragma unroll
            for (int p = 0; p < kRows; ++p) amax[p] = lane_amax(x[p]);
        }
        if (rows.turning && valid) take_out_turning(rows.turning, rows.t, x, amax);
        if constexpr (can_rotate(D)) {
            if (rotated) {
#pragma unroll
                for (int p = 0; p < kRows; ++p) {
                    rotate_row<D>(x[p], sign, lane_);
                    amax[p] = lane_amax(x[p]);
                }
            }
        }
#pragma unroll
        for (int p = 0; p < kRows; ++p) amax[p] = row_amax<D>(amax[p]);
    }

    // By the whole CTA.
    __device__ void make_table(const uint8_t* turning) const {
        if (turning_of_scales(turning, 0) == 0) return;
        for (int n = int(threadIdx.x); n < kTurningPairs * kPageTokens; n += Rows::kThreads) {
            const uint64_t code = turning_of_scales(turning, n / kPageTokens);
            if (code == 0) break;
            const TurningValues at = turning_values(unpack_turning(code), n % kPageTokens);
            turning_.value[n / kPageTokens][n % kPageTokens] = make_float2(at.first, at.second);
        }
        __syncthreads();
    }

    // A lane's channels of tokens t, t + 8, ...: of a whole page by its table.
    template <int kRows>
    __device__ void take_out_turning(const uint8_t* turning, int t, float (&x)[kRows][8], float (&amax)[kRows]) const {
        bool any = false;
#pragma unroll 1
        for (int n = 0; n < kTurningPairs; ++n) {
            const uint64_t code = turning_of_scales(turning, n);
            if (code == 0) break;
            const TurningPair pair = unpack_turning(code);
            const int first = pair.first - 8 * lane_, second = pair.second - 8 * lane_;
            if (unsigned(first) >= 8 && unsigned(second) >= 8) continue;
            any = true;
#pragma unroll
            for (int p = 0; p < kRows; ++p) {
                float2 at;
                if constexpr (kRows > 1) {
                    at = turning_.value[n][t + 8 * p];
                } else {
                    const TurningValues v = turning_values(pair, t);
                    at = make_float2(v.first, v.second);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    if (j == first) x[p][j] = __fsub_rn(x[p][j], at.x);
                    if (j == second) x[p][j] = __fsub_rn(x[p][j], at.y);
                }
            }
        }
        if (!any) return;
#pragma unroll
        for (int p = 0; p < kRows; ++p) amax[p] = lane_amax(x[p]);
    }

    __device__ static void scale_up(float (&x)[8], float up) {
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], up);
    }

    __device__ void count_clamped(int n) const {
        if (n && a_.clamped) atomicAdd(reinterpret_cast<unsigned long long*>(a_.clamped), (unsigned long long)(n));
    }

    // True if the head's K or V has 8 bits in channel pages.
    __device__ bool has_8_bits(int tensor) const {
        return layer_.heads && (tensor ? layer_.heads[head_].v_bits : layer_.heads[head_].k_bits) == 8;
    }

    // The scales of a whole page whose rows have these largest magnitudes.
    __device__ ScaleOf page_scales(int tensor, const AppendTask& task, int t0, const float (&amax)[4]) {
        const bool universal = a_.universal_open_scale;
        const ScaleOptions options =
            tensor ? ScaleOptions{a_.v_page_scale, a_.v_page_scale_at_8_bits, a_.encode.v_exponents, universal}
                   : ScaleOptions{a_.k_page_scale, a_.k_page_scale_at_8_bits, false, universal};
        ScaleOf s{scale_rule(true, task.stays_8_bits || has_8_bits(tensor), options), 0.0f};
        if (s.rule == ScaleRule::kToken) return s;
        if (lane_ == 0) {
#pragma unroll
            for (int p = 0; p < 4; ++p) amax_[tensor][t0 + 8 * p] = amax[p];
        }
        __syncthreads();
        if (universal && threadIdx.x < kPageTokens) {
            const float of_token = page_stage1_scale(amax_[tensor][threadIdx.x]);
            page_.own[tensor][threadIdx.x] = of_token;
            if (!(task.token_page & kEntrySingleLayer)) own_scales(task, tensor)[threadIdx.x] = of_token;
        }
        const float own = page_stage1_scale(page_max(amax_[tensor], threadIdx.x % 32));
        const float largest = fmaxf(tensor ? v_largest_ : k_largest_, own);
        k_largest_ = tensor ? k_largest_ : largest;
        v_largest_ = tensor ? largest : v_largest_;
        s.shared = s.rule == ScaleRule::kUniversal ? largest : own;
        return s;
    }

    // The universal scale of the page, whose new tokens' magnitudes are known.
    __device__ float universal_scale_of(int tensor, int have) {
        const int lane = threadIdx.x % 32;
        k_largest_ = fmaxf(k_largest_, page_stage1_scale(page_max(amax_[0], lane)));
        v_largest_ = fmaxf(v_largest_, page_stage1_scale(page_max(amax_[1], lane)));
        const auto present = [&](int t) { return t < have ? page_.scale[tensor][t] : 0.0f; };
        const float fixed = warp_max(fmaxf(present(lane), present(lane + 32)));
        return universal_scale(fixed, tensor ? v_largest_ : k_largest_);
    }

    // Codes of one token into its page, and into the image where the page closes.
    __device__ void store_row(int tensor, uint8_t* piece, int t, const uint32_t (&code)[8], bool closes) {
        if (tensor == 0) {
            const int tile = t / 16, r = t % 8, w0 = t % 16 / 8, i = 8 * lane_ / (D / 4), step = 8 * lane_ % (D / 4) / 8;
            auto* to = reinterpret_cast<uint32_t*>(piece) + ((tile * (D / 32) + step) * 32 + 4 * r + i) * 4 + w0;
            uint32_t* image = page_.k_words(Page::k_chunk(tile, step, r, i)) + w0;
#pragma unroll
            for (int w1 = 0; w1 < 2; ++w1) {
                to[2 * w1] = word(code, 4 * w1);
                if (closes) image[2 * w1] = word(code, 4 * w1);
            }
            return;
        }
        uint8_t* to = piece + TokenLayout(D).v_codes();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int channel = 8 * lane_ + j;
            to[v_place(D, 8, t, channel).byte] = uint8_t(code[j]);
            if (!closes) continue;
            auto* image = reinterpret_cast<uint8_t*>(page_.v_words(v_chunk(t % 8, channel)));
            image[(2 * (t / 32) + channel % 2) * 4 + t % 32 / 8] = uint8_t(code[j]);
        }
    }

    const AppendArgs& a_;
    const AppendLayer& layer_;
    Page& page_;
    float (&amax_)[2][kPageTokens];
    TurningTable& turning_;
    float k_largest_ = 0.0f, v_largest_ = 0.0f;  // scales of the sequence's head so far
    const int head_, warp_, row_in_warp_, lane_;
};

// A few tokens of a page that does not close: what two warps do on their own.
__device__ inline bool is_small(const AppendArgs& a, const AppendTask& task) {
    return !a.universal_open_scale && task.channel_slot == 0 && task.end - task.have <= 4;
}

// A page whose scale depends on the sequence's others of this step.
__device__ inline bool waits_for_others(const AppendTask& task, bool last) {
    return last && task.index > 0 && task.end - task.have < kPageTokens;
}

inline constexpr int kNone = -1, kDone = -2;  // in place of a task's number

// 512 threads per SM have 128 registers each. With 768 they spill, and take a fifth longer on an H200.
template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads, 512 / RowShape<D>::kThreads)
    append_kernel(const __grid_constant__ AppendArgs a) {
    using Rows = RowShape<D>;
    __shared__ PageImage<D> page;
    __shared__ float amax[2][kPageTokens];
    __shared__ TurningTable turning;
    __shared__ AppendLayer shared_layer;
    const AppendLayer& layer = take_layer(a, shared_layer);
    const int tasks = *a.n_tasks, items = tasks * a.kv_heads, warp = threadIdx.x / 32;
    if (a.kept_k) {
        keep_rows(a, layer.k, a.kept_k);
        keep_rows(a, layer.v, a.kept_v);
    }
    grid_dependency_wait();  // for the search for turning pairs
    for (int item = int(warp / 2 * gridDim.x + blockIdx.x); item < items; item += int(Rows::kWarps / 2 * gridDim.x)) {
        const AppendTask task = a.tasks[item / a.kv_heads];
        if (!is_small(a, task)) continue;
        Appender<D> append(a, layer, page, amax, turning, item % a.kv_heads);
        append.some_tokens(task, warp % 2, 2);
    }
    const bool universal = a.universal_open_scale;
    // Whole pages do not depend on each other.
    const bool in_order =
        universal && !(a.k_page_scale && a.v_page_scale && a.k_page_scale_at_8_bits && a.v_page_scale_at_8_bits);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int n = item / a.kv_heads, head = item % a.kv_heads;
        const AppendTask task = a.tasks[n];
        if (is_small(a, task) || (in_order && task.index > 0)) continue;
        Appender<D> append(a, layer, page, amax, turning, head);
        if (universal) append.begin(task);
        const auto is_last = [&](int m) { return m + 1 == tasks || a.tasks[m + 1].sequence != task.sequence; };
        bool arrived = in_order;
        // One task; with universal scales also those that this CTA has to do after it. One loop, so that the code of a page
        // exists only once.
        for (int now = !in_order && universal && waits_for_others(task, is_last(n)) ? kNone : n; now != kDone;) {
            if (now != kNone) {
                const AppendTask doing = a.tasks[now];
                __syncthreads();  // with the page that was last in the image
                if (doing.end - doing.have == kPageTokens) {
                    append.whole_page(doing);
                } else {
                    append.some_tokens(doing, warp, Rows::kWarps);
                }
                const int next = item + int(gridDim.x);
                if (!in_order && next < items) append.prefetch(a.tasks[next / a.kv_heads], next % a.kv_heads);
                if (doing.channel_slot) append.close(doing);
            }
            if (!universal) break;
            if (!arrived) {
                arrived = true;
                const int last_task = append.arrive(task, n, is_last(n));
                if (last_task < 0) break;
                now = waits_for_others(a.tasks[last_task], true) ? last_task : kDone;
            } else {
                now = in_order && !is_last(now) ? now + 1 : kDone;
            }
            if (now == kDone) append.end(task);
        }
    }
}

}  // namespace ta::cuda
