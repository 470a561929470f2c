// The arguments that all calls of dense attention share.
#pragma once

#include <vector>

#include "src/api/api.h"
#include "src/attend/dense/dense.h"

namespace ta::api {

struct DenseArguments {
    DenseCall call;  // its offsets point to the vectors below
    std::vector<int64_t> q_offsets, k_offsets;
};

// Checks the arguments as documented for ta_attend_dense, except for what check_dense() checks. Arguments 1 to 6 of the call
// are q, k, v, out, lse, options.
Status read_dense(const Context& context, const ta_tensor* const (&tensors)[4], float* lse, const ta_dense_options* options,
                  DenseArguments& to);

}  // namespace ta::api
