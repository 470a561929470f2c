// A ta_tensor with its own storage, in every element type and layout that the ABI takes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "support/numbers.h"
#include "turboattention.h"

namespace ta::testing {

enum class Layout {
    kPlain,      // [tokens, heads, head_dim] without gaps, strides left at 0
    kPadded,     // gaps between heads and between tokens
    kHeadMajor,  // [heads, tokens, head_dim]
    kBackwards,  // negative strides: the last token and head come first in memory
};

inline constexpr Layout kLayouts[] = {Layout::kPlain, Layout::kPadded, Layout::kHeadMajor, Layout::kBackwards};
inline constexpr ta_dtype kDtypes[] = {TA_DTYPE_F16, TA_DTYPE_BF16, TA_DTYPE_F32};

// A view of floats that somebody else owns.
ta_tensor view_of(const float* data, int64_t tokens, int64_t heads, int64_t head_dim);

class Tensor {
  public:
    // All elements, gaps included, are kPoison.
    Tensor(int64_t tokens, int64_t heads, int64_t head_dim, ta_dtype dtype = TA_DTYPE_F32, Layout layout = Layout::kPlain);
    // The same with values [tokens, heads, head_dim], rounded to the element type.
    Tensor(std::span<const float> values, int64_t tokens, int64_t heads, int64_t head_dim, ta_dtype dtype = TA_DTYPE_F32,
           Layout layout = Layout::kPlain);

    static constexpr float kPoison = -12345.0f;  // in bf16: -12352

    // Points into this object: it must not be copied meanwhile.
    const ta_tensor* view();
    float get(int64_t token, int64_t head, int64_t channel) const { return load(place(token, head, channel)); }
    void set(int64_t token, int64_t head, int64_t channel, float x) { store(place(token, head, channel), x); }
    std::vector<float> values() const;  // [tokens, heads, head_dim]
    bool all_poison() const;            // nothing was written
    bool gaps_poison() const;           // nothing was written between the elements

  private:
    size_t place(int64_t token, int64_t head, int64_t channel) const;
    float load(size_t place) const;
    void store(size_t place, float x);

    ta_tensor view_{};
    int64_t stride_token_, stride_head_;
    size_t first_ = 0;            // element [0, 0, 0] in elements from the start
    std::vector<uint8_t> bytes_;  // 8 bytes of slack at the end, so that there is always an address
};

}  // namespace ta::testing
