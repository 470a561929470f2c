// Checked tensors of a call: rows of head_dim elements at (token, head).
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "include/turboattention.h"
#include "kernels/cpu/page_codec.h"
#include "kernels/format/types.h"
#include "src/core/status.h"

namespace ta {

struct TensorView {
    uint8_t* data = nullptr;
    DType dtype = DType::kF32;
    int64_t tokens = 0, heads = 0, head_dim = 0;
    int64_t stride_token = 0, stride_head = 0;  // in elements

    uint8_t* at(int64_t token, int64_t head) const {
        return data + (token * stride_token + head * stride_head) * int64_t(dtype_bytes(dtype));
    }
    // True if the elements have no gaps, token by token.
    bool contiguous() const { return stride_head == head_dim && stride_token == heads * head_dim; }
};

// Checks dtype, pointer, alignment and strides. Of the shape it checks only that nothing is negative. `name`: for error texts.
Result<TensorView> view_tensor(const ta_tensor& tensor, const char* name);

// TA_E_SHAPE unless the view is [tokens, heads, head_dim].
Status check_tensor_shape(const TensorView& v, const char* name, int64_t tokens, int64_t heads, int64_t head_dim);

// TA_E_NONFINITE with token and head of the first value that is NaN, Inf or above 2^56.
Status check_finite(const cpu::PageCodec& codec, const TensorView& v, const char* name);

struct NamedView {
    const char* name;
    TensorView view;
};
// [rows, n] floats without gaps; nullptr: no rows.
TensorView view_of_floats(const float* data, int64_t rows, int64_t n);
// True if the memory ranges that the tensors span overlap.
bool may_overlap(const TensorView& a, const TensorView& b);
// TA_E_INVALID: rows of `out` may share memory with each other, with an input, or with lse; or lse with an input. lse:
// [out.tokens, out.heads], may be nullptr. `argument`: of `out` in the public call; lse's is the next one.
Status check_outputs(std::initializer_list<NamedView> inputs, const TensorView& out, const float* lse, int argument);

}  // namespace ta
