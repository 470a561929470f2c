// The products of the prefill kernel: Q K^T, P V, and what the fractions of zero points add to either.
#pragma once

#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sm90/prefill/shared.cuh"

namespace ta::cuda::prefill::sm90 {

template <int D>
TA_DEVICE void multiply_k(const uint8_t* q, const uint8_t* k, int32_t (&s)[64]) {
    const uint64_t rows = ptx::tile_descriptor<D>(q), columns = ptx::tile_descriptor<D>(k);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) ptx::wgmma_s8_n128(s, rows + 2 * step, columns + 2 * step, step > 0);
}
// And sum(q f) of the pages for the fractions f of K's zero points: columns are pages.
template <int D>
TA_DEVICE void multiply_k_and_fractions(const uint8_t* q, const uint8_t* k, int32_t (&s)[64], int32_t (&fractions)[8]) {
    const uint64_t rows = ptx::tile_descriptor<D>(q), columns = ptx::tile_descriptor<D>(k);
#pragma unroll
    for (int step = 0; step < D / 32; ++step) {
        ptx::wgmma_s8_n144(s, fractions, rows + 2 * step, columns + 2 * step, step > 0);
    }
}
// The product with the fractions for a lane's rows, [row][page], in eighths of a score's unit.
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
    const uint64_t columns = ptx::tile_descriptor<kBlockTokens>(v);
#pragma unroll
    for (int step = kFrom; step < kTo; ++step) {
        if constexpr (N == 40) {
            ptx::wgmma_u8_n80(product, p[step], columns + 2 * step, step > 0);
        } else {
            ptx::wgmma_u8_n64(product, p[step], columns + 2 * step, step > 0);
        }
    }
}

// Adds to a product with V, of the 64 rows of its tile from `row` on, what the fractions f of V's zero points do: f / 8 of a
// page's sum of P. A step more of the product; `a` is that of step_of_sums().
template <int N>
TA_DEVICE void multiply_v_fractions(const uint32_t (&a)[4], const uint8_t* v_fraction, int row, int32_t (&product)[N]) {
    const uint64_t columns = ptx::narrow_descriptor(v_fraction + v_fraction_byte(row, 0, 0));
    if constexpr (N == 40) {
        ptx::wgmma_u8_n80(product, a, columns, true);
    } else {
        ptx::wgmma_u8_n64(product, a, columns, true);
    }
}
// The same by mma.sync, to the product that is there; `a` is that of operand_of_sums().
template <int N>
TA_DEVICE void add_v_fractions(const uint32_t (&a)[2], const uint8_t* v_fraction, int row, int stage, int lane,
                               int32_t (&product)[N]) {
    const uint32_t from = ptx::base_address(v_fraction + v_fraction_byte(row + lane / 4, stage, 0));
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        int32_t columns[4] = {product[4 * j], product[4 * j + 1], product[4 * j + 2], product[4 * j + 3]};
        mma_u8_u8_k16(columns, a, ptx::load_word(from + v_fraction_byte(8 * j, 0, 0)));
#pragma unroll
        for (int n = 0; n < 4; ++n) product[4 * j + n] = columns[n];
    }
}

}  // namespace ta::cuda::prefill::sm90
