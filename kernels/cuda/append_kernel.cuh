// The append kernel. A CTA takes one head of one block at a time; where scales are universal, one head of a sequence, block after
// block.
#pragma once

#include "kernels/cuda/append.h"
#include "kernels/cuda/append_launch.h"
#include "kernels/cuda/codec_page.cuh"

namespace ta::cuda {

// Four rows of a lane as they stand before stage 1, and their largest magnitudes. A CTA holds a page: row slot s of 16 has tokens
// 32 (s / 8) + 8 p + s % 8, so that the lane's four rows fill whole words of V's order and half words of K's.
struct PageRows {
    float x[4][8];
    float amax[4];
};

template <int D>
class Appender {
    using Rows = RowShape<D>;
    using Page = PageImage<D>;
    static constexpr size_t kPieceBytes = TokenLayout(D).bytes();

  public:
    __device__ Appender(const AppendArgs& args, Page& page, float (&amax)[2][kPageTokens], int head)
        : a_(args),
          page_(page),
          amax_(amax),
          head_(head),
          warp_(threadIdx.x / 32),
          row_in_warp_(threadIdx.x % 32 / Rows::kLanes),
          lane_(threadIdx.x % Rows::kLanes) {}

    // All tokens of a page at once.
    __device__ void whole_page(const AppendTask& task) {
        uint8_t* piece = token_piece(task);
        const bool at_8 = task.stays_8_bits;
        const bool k_page = a_.k_page_scale && (!at_8 || a_.k_page_scale_at_8_bits);
        const bool v_page = a_.v_page_scale && (!at_8 || a_.v_page_scale_at_8_bits);
        if (threadIdx.x < kPageTokens) page_.v_sum[threadIdx.x] = 0;
        const int slot = warp_ + Rows::kWarps * row_in_warp_, r = slot % 8;
        uint32_t code[4][8];
        quantize_page(0, task, slot, k_page, false, code);
        if (active()) {
            const int i = 8 * lane_ / (D / 4), step = 8 * lane_ % (D / 4) / 8;
#pragma unroll
            for (int p = 0; p < 4; p += 2) {
                const auto word = [&](int row, int c) {
                    return low_bytes(code[row][c], code[row][c + 1], code[row][c + 2], code[row][c + 3]);
                };
                page_.k[Page::k_chunk(2 * (slot / 8) + p / 2, step, r, i)] =
                    make_uint4(word(p, 0), word(p + 1, 0), word(p, 4), word(p + 1, 4));
            }
        }
        quantize_page(1, task, slot, v_page, a_.v_exponents && !at_8, code);
        if (active()) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int channel = 8 * lane_ + j, chunk = v_chunk(slot % 8, channel);
                page_.v_words(chunk)[2 * (slot / 8) + j % 2] = low_bytes(code[0][j], code[1][j], code[2][j], code[3][j]);
            }
        }
        __syncthreads();
        auto* to = reinterpret_cast<uint4*>(piece);
        for (int n = threadIdx.x; n < Page::kChunks; n += Rows::kThreads) {
            to[n] = page_.k[Page::k_chunk(n)];
            to[Page::kChunks + n] = page_.v[Page::v_chunk(n)];
        }
        auto* scales = reinterpret_cast<float*>(piece + TokenLayout(D).k_scale());
        if (threadIdx.x < kPageTokens) {
            scales[threadIdx.x] = page_.scale[0][threadIdx.x];
            scales[kPageTokens + threadIdx.x] = page_.scale[1][threadIdx.x];
        }
        if (task.channel_slot) close(task);
    }

    // Fewer tokens: half of the warps take K, the others V, 8 rows at a time.
    __device__ void some_tokens(const AppendTask& task) {
        uint8_t* piece = token_piece(task);
        const bool closes = task.channel_slot != 0, universal = a_.universal_open_scale;
        if (closes) {
            const auto* from = reinterpret_cast<const uint4*>(piece);
            for (int n = threadIdx.x; n < Page::kChunks; n += Rows::kThreads) {
                page_.k[Page::k_chunk(n)] = from[n];
                page_.v[Page::v_chunk(n)] = from[Page::kChunks + n];
            }
            if (threadIdx.x < kPageTokens) page_.v_sum[threadIdx.x] = 0;
        }
        if ((closes || universal) && threadIdx.x < task.have) {
            const auto* scales = reinterpret_cast<const float*>(piece + TokenLayout(D).k_scale());
            page_.scale[0][threadIdx.x] = scales[threadIdx.x];
            page_.scale[1][threadIdx.x] = scales[kPageTokens + threadIdx.x];
        }
        const int tensor = warp_ >= Rows::kWarps / 2;
        const int first = task.have + warp_ % (Rows::kWarps / 2) + Rows::kWarps / 2 * row_in_warp_;
        if (universal) {
            if (threadIdx.x < kPageTokens) amax_[0][threadIdx.x] = amax_[1][threadIdx.x] = 0.0f;
            __syncthreads();
            each_row(tensor, task, first, false, [&](int t, const float(&)[8], float amax) {
                if (lane_ == 0) amax_[tensor][t] = amax;
            });
        }
        __syncthreads();
        const float shared = universal ? universal_scale(tensor, task.have) : 0.0f;
        each_row(tensor, task, first, true, [&](int t, const float(&x)[8], float amax) {
            const float scale = universal ? shared : stage1_scale(amax, kStage1Levels);
            uint32_t code[8];
            count_clamped(quantize_row(x, scale, universal, code));
            store_row(tensor, piece, t, code, closes);
            if (lane_ != 0) return;
            reinterpret_cast<float*>(piece + TokenLayout(D).k_scale())[tensor * kPageTokens + t] = scale;
            page_.scale[tensor][t] = scale;
        });
        __syncthreads();
        if (closes) close(task);
    }

    // The largest magnitudes of the sequence's head so far.
    float seen[2] = {0.0f, 0.0f};

  private:
    __device__ bool active() const {
        return 8 * lane_ < D;
    }

    __device__ uint8_t* token_piece(const AppendTask& task) const {
        const uint64_t layer = task.token_page & kEntrySingleLayer ? 0 : a_.token_layer_offset;
        return reinterpret_cast<uint8_t*>((task.token_page & ~kEntryFlags) + layer + head_ * kPieceBytes);
    }

    __device__ void close(const AppendTask& task) {
        const HeadArgs h = a_.heads[head_];
        auto* piece =
            reinterpret_cast<uint8_t*>((task.channel_slot & ~kEntryFlags) + a_.channel_layer_offset + h.channel_offset);
        close_page(page_, h.k_bits, h.v_bits, a_, piece);
    }

    // Of channel `channel` and a token that is `t` modulo 8.
    __device__ static int v_chunk(int t, int channel) {
        return Page::v_chunk(channel % (D / 8) / 2, t % 2, channel / (D / 8), t / 2);
    }

    __device__ const TensorArgs& tensor_args(int tensor) const {
        return tensor ? a_.v : a_.k;
    }

    __device__ static bool is_aligned(const TensorArgs& x) {
        const int64_t size = int64_t(cpu::dtype_bytes(x.dtype));
        return ((int64_t(reinterpret_cast<uintptr_t>(x.data)) | x.stride_row * size | x.stride_head * size) & 15) == 0;
    }

    __device__ RawRow load(int tensor, int64_t row) const {
        const TensorArgs& x = tensor_args(tensor);
        return load_raw(x, is_aligned(x), row * x.stride_row + head_ * x.stride_head + 8 * lane_);
    }

    // Makes a row of what was loaded; returns its largest magnitude. All lanes of the warp; a row that is not `valid` is zeros.
    __device__ float prepare(int tensor, const AppendTask& task, const RawRow& raw, bool valid, bool count,
                             float (&x)[8]) const {
        const DType type = tensor_args(tensor).dtype;
        widen(raw, type, x);
        const int replaced = replace_nonfinite(x, type, a_.saturate);
        if (count && replaced && a_.nonfinite) atomicAdd(a_.nonfinite + task.sequence, uint32_t(replaced));
        if (tensor == 0) {
            if (a_.k_offset && valid && active()) {
                const float* offset = a_.k_offset + head_ * D + 8 * lane_;
#pragma unroll
                for (int j = 0; j < 8; ++j) x[j] = __fsub_rn(x[j], __ldg(offset + j));
            }
            if constexpr (can_rotate(D)) {
                if (a_.signs) {
                    float sign[8];
#pragma unroll
                    for (int j = 0; j < 8; ++j) sign[j] = __ldg(a_.signs + 8 * lane_ + j);
                    rotate_row<D>(x, sign, lane_);
                }
            }
        }
        return row_amax<D>(x);
    }

    __device__ void count_clamped(int n) const {
        if (n && a_.clamped) atomicAdd(reinterpret_cast<unsigned long long*>(a_.clamped), (unsigned long long)(n));
    }

    // The universal scale of the page, and the sequence's largest magnitudes with it: src/attend/append.cpp.
    __device__ float universal_scale(int tensor, int have) {
        const int lane = threadIdx.x % 32;
        float mine = 0.0f;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const auto fixed = [&](int t) { return t < have ? page_.scale[n][t] : 0.0f; };
            const float scale = warp_max(fmaxf(fixed(lane), fixed(lane + 32)));
            seen[n] = fmaxf(seen[n], page_max(amax_[n], lane));
            if (n == tensor) mine = scale > 0.0f ? scale : stage1_scale(seen[n], kStage1Levels);
        }
        return mine;
    }

    // Stage 1 of the lane's four rows of a whole page.
    __device__ void quantize_page(int tensor, const AppendTask& task, int slot, bool page_scale, bool exponents,
                                  uint32_t (&code)[4][8]) {
        const int t0 = 32 * (slot / 8) + slot % 8, lane = threadIdx.x % 32;
        PageRows rows;
        RawRow raw[4] = {};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            if (active()) raw[p] = load(tensor, int64_t(task.row) + t0 + 8 * p);
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            rows.amax[p] = prepare(tensor, task, raw[p], true, true, rows.x[p]);
            if (lane_ == 0) amax_[tensor][t0 + 8 * p] = rows.amax[p];
        }
        float shared = 0.0f;
        if (page_scale || a_.universal_open_scale) {
            __syncthreads();
            const float most = page_max(amax_[tensor], lane);
            seen[tensor] = fmaxf(seen[tensor], most);
            shared = stage1_scale(page_scale ? most : seen[tensor], kStage1Levels);
        }
        const bool universal = !page_scale && a_.universal_open_scale;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const float own = stage1_scale(rows.amax[p], kStage1Levels);
            float scale = page_scale || universal ? shared : own;
            if (page_scale && exponents) scale = times_pow2(shared, -exponent_below_normal(own, shared));
            if (lane_ == 0) page_.scale[tensor][t0 + 8 * p] = scale;
            count_clamped(quantize_row(rows.x[p], scale, universal, code[p]));
        }
    }

    // Calls f(token, row, its largest magnitude) for the rows first, first + 8, ...; f is for lanes that hold a part of a row.
    template <class F>
    __device__ void each_row(int tensor, const AppendTask& task, int first, bool count, F f) const {
        constexpr int kStep = 8;
        const int from = task.have + warp_ % (Rows::kWarps / 2);  // the warp's first row
        for (int n = 0; from + n < task.end; n += kStep) {
            const int t = first + n;
            const bool valid = t < task.end;
            RawRow raw{};
            if (valid && active()) raw = load(tensor, int64_t(task.row) + t - task.have);
            float x[8];
            const float amax = prepare(tensor, task, raw, valid, count, x);
            if (valid && active()) f(t, x, amax);
        }
    }

    // Codes of one token into its page, and into the image where the page closes.
    __device__ void store_row(int tensor, uint8_t* piece, int t, const uint32_t (&code)[8], bool closes) {
        if (tensor == 0) {
            const int tile = t / 16, r = t % 8, w0 = t % 16 / 8, i = 8 * lane_ / (D / 4), step = 8 * lane_ % (D / 4) / 8;
            auto* to = reinterpret_cast<uint32_t*>(piece) + ((tile * (D / 32) + step) * 32 + 4 * r + i) * 4;
            uint32_t* image = page_.k_words(Page::k_chunk(tile, step, r, i));
#pragma unroll
            for (int w1 = 0; w1 < 2; ++w1) {
                const uint32_t word = low_bytes(code[4 * w1], code[4 * w1 + 1], code[4 * w1 + 2], code[4 * w1 + 3]);
                to[2 * w1 + w0] = word;
                if (closes) image[2 * w1 + w0] = word;
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
    Page& page_;
    float (&amax_)[2][kPageTokens];
    const int head_, warp_, row_in_warp_, lane_;
};

template <int D>
__global__ void __launch_bounds__(RowShape<D>::kThreads, 768 / RowShape<D>::kThreads)
    append_kernel(const __grid_constant__ AppendArgs a) {
    __shared__ PageImage<D> page;
    __shared__ float amax[2][kPageTokens];
    const int tasks = *a.n_tasks, items = tasks * a.kv_heads;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int first = item / a.kv_heads, head = item % a.kv_heads;
        const int sequence = a.tasks[first].sequence;
        if (a.universal_open_scale && first > 0 && a.tasks[first - 1].sequence == sequence) continue;
        Appender<D> append(a, page, amax, head);
        const int64_t state = (int64_t(sequence) * a.kv_heads + head) * 2;
        if (a.universal_open_scale) {
            append.seen[0] = a.open_amax[state];
            append.seen[1] = a.open_amax[state + 1];
        }
        for (int n = first; n < tasks; ++n) {
            const AppendTask task = a.tasks[n];
            if (task.sequence != sequence) break;
            __syncthreads();  // with the page that was last in the image
            if (task.end - task.have == kPageTokens) {
                append.whole_page(task);
            } else {
                append.some_tokens(task);
            }
            if (!a.universal_open_scale) break;
        }
        if (a.universal_open_scale && threadIdx.x == 0) {
            a.open_amax_out[state] = append.seen[0];
            a.open_amax_out[state + 1] = append.seen[1];
        }
    }
}

}  // namespace ta::cuda
