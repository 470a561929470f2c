// Pages for the CUDA kernel tests, made by the CPU codec in host memory that is then copied to the device as it is, and
// attention in float64 over the numbers they stand for.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cpu/page_codec.h"
#include "kernels/cuda/common/attend_args.h"
#include "support/page_numbers.h"
#include "tests/kernels/cuda/head_bits.h"

namespace ta::cuda::testing {

using ta::testing::PageNumbers;
using ta::testing::read_piece;

struct PoolShape {
    int head_dim = 128, kv_heads = 1;
    std::vector<uint8_t> k_bits, v_bits;  // [kv_heads] of channel pages: 8, 4 or 2
};

// Slots of one layer's pages, 4096-byte aligned, in the order they were added. Everything that is not written is 0xFF: padding,
// scales and codes of slots without a token, and what lies around the layer's page.
class PagePool {
  public:
    explicit PagePool(PoolShape shape);

    const PoolShape& shape() const { return shape_; }
    const std::vector<HeadArgs>& heads() const { return heads_; }
    const std::vector<uint8_t>& bytes() const { return bytes_; }
    uint64_t token_layer_offset() const { return kLayerOffset; }
    uint64_t channel_layer_offset() const { return 2 * kLayerOffset; }
    int largest_channel_piece() const;
    size_t slot_bytes(PageKind kind) const;

    // k, v [tokens, kv_heads, head_dim]. Returns a block table entry whose address is relative to the start of bytes().
    uint64_t add(PageKind kind, const float* k, const float* v, int tokens, bool single_layer);
    // The piece of a head in the page of such an entry.
    const uint8_t* piece(uint64_t entry, int head) const;

  private:
    static constexpr uint64_t kLayerOffset = 640;
    PoolShape shape_;
    std::vector<HeadArgs> heads_;
    size_t channel_page_ = 0;
    std::vector<uint8_t> bytes_;
};

// Stage 1 of a query row as the runtime does it.
struct QueryCodes {
    std::vector<int8_t> code;
    std::vector<int8_t> rest;  // against K at 8 bits: what the codes leave in 128ths, or zeros
    float scale;
    float bias;  // of a K offset
};
QueryCodes quantize_query(const float* q, int head_dim, const float* signs, const float* k_offset, float unit, int levels,
                          bool rest = false);

struct RowRules {
    KeyRange keys;
    int64_t position = 0;
    double unit = 1.0;     // of scores in log2 units, or in natural ones under a softcap
    double softcap = 0.0;  // natural units
    double slope = 0.0;
    const float* sink = nullptr;
};
// Attention of one row over pages in float64: out [head_dim] and the LSE. Keys of a page that is nullptr are seen by nobody.
// `shares` [pages] grow by the weights of pages.
double exact_row(const QueryCodes& q, const std::vector<const PageNumbers*>& pages, int head_dim, const RowRules& rules,
                 double* out, double* shares = nullptr);

// One row of a CPU's kernel over its pages, a range after the other, whose maxima do not count in the others.
class RangeSum {
  public:
    explicit RangeSum(int head_dim) : o_(size_t(head_dim)), sum_(size_t(head_dim)) { begin(); }
    // Of a range: what the kernel goes on from.
    void begin();
    // Once the kernel has gone on by one page.
    void end_page(int page);
    void end();
    // `out` [head_dim]; returns the LSE. `sink`: a learned one, or nullptr. `shares` as exact_row() has it.
    double finish(double* out, const float* sink, double* shares = nullptr) const;

    float* o() { return o_.data(); }
    float m, l;

  private:
    struct Part {
        int page;
        double l, m;
    };
    std::vector<float> o_;
    std::vector<double> sum_;
    std::vector<Part> parts_;
    double m_ = -std::numeric_limits<double>::infinity(), l_ = 0.0;
    float m_before_, l_before_;
};

}  // namespace ta::cuda::testing
