// Rows of results that belong together: src/attend/queries.h.
#pragma once

#include <cstdint>

namespace ta {

// The place of a query row's further results, beside its own: `count` of them from row `first` on, each `stride` rows behind the
// one before.
struct JoinedRow {
    int32_t first, stride, count;
};

}  // namespace ta
