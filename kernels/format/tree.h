// Token trees: what the query of a new token sees of the step's new tokens, for CPU and GPU.
#pragma once

#include <cstdint>

namespace ta {

inline constexpr int kTreeTokens = 64;  // of a sequence whose new tokens are no chain

// A new token of a sequence. It sees the tokens before the step as any query at its position does, and of the new ones those
// that its bits name. All of these are at its own place or before it.
struct alignas(16) TreeRow {
    uint64_t
        seen;  // bit i: new token i is an ancestor of it or itself. All bits of a chain that is longer: those before it are
    int32_t index;  // of the token among the sequence's new ones
    int32_t depth;  // its position is that of the first new token plus this
};

}  // namespace ta
