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

// SAS, and P in units of the running maximum, know the maxima of a range of pages alone: of as many as these, counted from the
// first that the rows see (by the prefill kernel from key 0), for up to 16 rows per kv head and for more.
inline constexpr int kDecodeRangePages = 16, kPromptRangePages = 64;

}  // namespace ta
