// TA_DENSE_DISTR on a CPU. A job is a block of query rows of one head; it walks over the keys that it sees in tiles of 64.
#pragma once

#include "src/attend/dense/dense.h"

namespace ta {

// The caller has checked the inputs, also for values that are not finite, unless these are to be saturated.
Status attend_distr(Context& context, const DenseCall& call);

}  // namespace ta
