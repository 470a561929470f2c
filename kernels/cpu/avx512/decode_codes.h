// The orders of channels that the codes path works in, and the preparation of codes for its products.
#pragma once

#include "kernels/cpu/avx512/vec.h"
#include "kernels/cpu/prefetch.h"

namespace ta::cpu {
namespace {

inline constexpr int kMaxQVectors = kMaxHeadDim / 64;
inline constexpr int kLoadBytes = 512;

// The order of q and of K's steps: qword 4 step + i = channels (d/4) i + 8 step .., so that dword 8 step + j belongs to
// vector j of load `step` after transpose_qwords. Padded with zeros to a multiple of 64.
struct KOrder {
    int vectors;
    __mmask8 valid[kMaxQVectors];
    alignas(64) int64_t qword[kMaxQVectors][8];  // where in the natural order

    explicit KOrder(int d) : vectors((d + 63) / 64) {
        const int steps = d / 32;
        for (int n = 0; n < 8 * vectors; ++n) {
            const int step = n / 4, i = n % 4;
            if (n % 8 == 0) valid[n / 8] = 0;
            if (step < steps) valid[n / 8] = __mmask8(valid[n / 8] | 1u << n % 8);
            qword[n / 8][n % 8] = step < steps ? i * steps + step : 0;
        }
    }

    // Reads up to 63 bytes beyond the d that it uses: for arrays within a page's piece.
    [[gnu::always_inline]] __m512i load(const uint8_t* bytes, int v) const {
        const __m512i index = load_i(qword[v]);
        const __m512i first = _mm512_loadu_si512(bytes), second = vectors > 1 ? _mm512_loadu_si512(bytes + 64) : first;
        const __m512i low = _mm512_permutex2var_epi64(first, index, second);
        if (vectors <= 2) return _mm512_maskz_mov_epi64(valid[v], low);
        const __m512i high = _mm512_permutex2var_epi64(_mm512_loadu_si512(bytes + 128), index, _mm512_loadu_si512(bytes + 192));
        return _mm512_mask_mov_epi64(low, _mm512_cmpgt_epi64_mask(index, _mm512_set1_epi64(15)), high);
    }
};

// The order of O: vector `tile`, lane 2 r + w = channel (d'/8) r + 2 tile + w. Channels of d.. up to d' are zero.
struct VOrder {
    int d, stored, tiles;
    __mmask32 valid[kMaxHeadDim / 64];
    alignas(64) int16_t pair[kMaxHeadDim / 64][32];  // pairs of channels [tile][r], as indices in the natural order

    VOrder(int head_dim, int stored_channels) : d(head_dim), stored(stored_channels), tiles(stored_channels / 16) {
        for (int v = 0; v < kMaxHeadDim / 64; ++v) {
            valid[v] = 0;
            for (int n = 0; n < 32; ++n) {
                const int p = stored / 16 * (n % 8) + 4 * v + n / 8;
                const bool held = 4 * v + n / 8 < tiles && 2 * p < d;
                if (held) valid[v] |= 1u << n;
                pair[v][n] = int16_t(held ? p : 0);
            }
        }
    }

    // Vector v: tiles 4 v.. of an array within a page's piece, [tile][r][w]. Reads up to 64 bytes beyond the d that it uses.
    [[gnu::always_inline]] __m512i load(const uint8_t* bytes, int v) const {
        const __m512i index = load_i(pair[v]);
        const __m512i low = _mm512_permutex2var_epi16(_mm512_loadu_si512(bytes), index, _mm512_loadu_si512(bytes + 64));
        if (d <= 128) return _mm512_maskz_mov_epi16(valid[v], low);
        const __m512i high = _mm512_permutex2var_epi16(_mm512_loadu_si512(bytes + 128), index, _mm512_loadu_si512(bytes + 192));
        return _mm512_mask_mov_epi16(low, _mm512_cmpgt_epi16_mask(index, _mm512_set1_epi16(63)), high);
    }
    [[gnu::always_inline]] __m512i channels(int tile) const {
        const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512i r = _mm512_srli_epi32(lane, 1), w = _mm512_and_si512(lane, _mm512_set1_epi32(1));
        return _mm512_add_epi32(_mm512_mullo_epi32(r, _mm512_set1_epi32(stored / 8)),
                                _mm512_add_epi32(w, _mm512_set1_epi32(2 * tile)));
    }
    void gather(const float* o, float* ordered) const {
        for (int tile = 0; tile < tiles; ++tile) {
            const __m512i channel = channels(tile);
            const __mmask16 held = _mm512_cmplt_epi32_mask(channel, _mm512_set1_epi32(d));
            _mm512_store_ps(ordered + 16 * tile, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), held, channel, o, 4));
        }
    }
    void scatter(const float* ordered, float* o) const {
        for (int tile = 0; tile < tiles; ++tile) {
            const __m512i channel = channels(tile);
            const __mmask16 held = _mm512_cmplt_epi32_mask(channel, _mm512_set1_epi32(d));
            _mm512_mask_i32scatter_ps(o, held, channel, _mm512_load_ps(ordered + 16 * tile), 4);
        }
    }
};

enum class Matrix { kK, kV };

// Brings codes into the order of the products, one load of 512 bytes at a time. A unit is 4 channels (K) or 4 tokens (V); for
// each unit there is a vector of codes for each tile group of 8 / bits tiles (16 tokens or 16 channels each).
// K: [unit][group]; V: [4 tiles][unit][group], where codes below 8 bits change their top bit: the product takes V as s8.
class Preparation {
  public:
    Preparation() : codes_(nullptr), out_(nullptr), left_(0), steps_(1), step_(0), group_(0), groups_(1), flip_(0) {}
    Preparation(const uint8_t* codes, int bits, int loads, int steps, uint8_t* out)
        : codes_(codes),
          out_(out),
          left_(loads),
          steps_(steps),
          step_(0),
          group_(0),
          groups_(bits / 2),
          flip_(bits == 8 ? 0 : -128) {}

    [[gnu::always_inline]] int left() const { return left_; }
    [[gnu::always_inline]] int per_block(int blocks) const { return (left_ + blocks - 1) / blocks; }

    template <Matrix MATRIX>
    [[gnu::always_inline]] void run(int loads) {
        for (; loads > 0 && left_ > 0; --loads) prepare<MATRIX>();
    }

  private:
    template <Matrix MATRIX>
    [[gnu::always_inline]] void prepare() {
        __m512i x[8];
#pragma GCC unroll 8
        for (int r = 0; r < 8; ++r) x[r] = load_i(codes_ + 64 * r);
        transpose_qwords(x);
        const ptrdiff_t unit = 64 * groups_;
        uint8_t* out = out_ + step_ * (MATRIX == Matrix::kK ? 8 : 2) * unit + 64 * group_;
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            if constexpr (MATRIX == Matrix::kV) x[j] = _mm512_xor_si512(x[j], _mm512_set1_epi8(flip_));
            store_i(out, x[j]);
            out += MATRIX == Matrix::kK || j % 2 == 0 ? unit : 3 * unit;  // V: unit 2 (2 i + step) + h, as PForm in softmax.h
        }
        codes_ += kLoadBytes;
        --left_;
        if (++step_ < steps_) return;
        step_ = 0;
        if (++group_ < groups_ || MATRIX == Matrix::kK) return;
        group_ = 0;
        out_ += 16 * unit;
    }

    const uint8_t* codes_;
    uint8_t* out_;
    int left_;
    int steps_, step_;    // loads of a tile group; the next one of them
    int group_, groups_;  // tile groups in 4 tiles
    char flip_;
};

}  // namespace
}  // namespace ta::cpu
