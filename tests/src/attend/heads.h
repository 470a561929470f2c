// The heads of a problem, and the widths of its rows.
#pragma once

#include <cstdint>

namespace ta::testing {

struct Heads {
    uint32_t kv_heads = 2, q_heads = 4, head_dim = 64;
    int64_t row() const { return int64_t(kv_heads) * head_dim; }
    int64_t q_row() const { return int64_t(q_heads) * head_dim; }
};

}  // namespace ta::testing
