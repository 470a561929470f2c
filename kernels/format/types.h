// Element types and formulas as CPU kernels, GPU kernels and the host code name them to each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/layout.h"

namespace ta {

// Element type of tensors, with the values of ta_dtype.
enum class DType : int32_t { kF16 = 1, kBf16 = 2, kF32 = 3 };
TA_HD constexpr size_t dtype_bytes(DType t) {
    return t == DType::kF32 ? 4 : 2;
}

// The exponential in P: ta_exp without its default.
enum class ExpMode : uint8_t { kPoly, kExact, kSas };

// SAS, and P in units of the running maximum, know only the maxima within a range of pages. These are the pages of a range for
// up to 16 rows per kv head, and for more. Ranges are counted from the first page that the rows see; the prefill kernel counts
// from key 0.
inline constexpr int kDecodeRangePages = 16, kPromptRangePages = 64;

}  // namespace ta
