// Which keys the queries of a step see, where callers say their positions or gaps were closed. docs/shift.md.
#pragma once

#include <vector>

#include "kernels/format/joined_row.h"
#include "src/attend/call.h"
#include "src/attend/step.h"

namespace ta {

// Once the members' sequences are known and their new tokens have room. `positions`: [total_query], or nullptr for the last tokens of
// each. Fills in what the step says of queries.
Status list_queries(Step& step, const int64_t* positions);

// [total_query] of a step with turned queries.
std::vector<JoinedRow> list_joined(const Step& step);

// All rows of such a step, with the heads and channels of `like`, as floats one behind the other.
TensorView float_rows(const Step& step, const TensorView& like, uint8_t* data);
inline size_t float_bytes(const Step& step, const TensorView& like) {
    return size_t(step.all_rows() * like.heads * like.head_dim) * sizeof(float);
}

}  // namespace ta
