// TA_DENSE_DISTR on a CPU: a job is a block of query rows of one head, which goes through the keys that it sees in tiles of 64.
#pragma once

#include "src/attend/dense/dense.h"

namespace ta {

// Inputs are checked already, finite values too unless they are to be saturated.
Status attend_distr(Context& context, const DenseCall& call);

}  // namespace ta
