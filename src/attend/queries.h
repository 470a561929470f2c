// Which keys the queries of a step see, if the caller gave positions or sequences have closed gaps. docs/shift.md.
#pragma once

#include <vector>

#include "kernels/format/joined_row.h"
#include "src/attend/call.h"
#include "src/attend/step.h"

namespace ta {

// Fills in what the step says of queries. The members' sequences are known. `positions`: [total_query]; nullptr: each member's
// queries are its last tokens.
Status list_queries(Step& step, const int64_t* positions);

// [total_query]: where the turned results of each query row are.
std::vector<JoinedRow> list_joined(const Step& step);

// All rows of such a step as packed floats, with the heads and channels of `like`.
TensorView float_rows(const Step& step, const TensorView& like, uint8_t* data);
inline size_t float_bytes(const Step& step, const TensorView& like) {
    return size_t(step.all_rows() * like.heads * like.head_dim) * sizeof(float);
}

}  // namespace ta
