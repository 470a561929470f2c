// Places of the callers' channels among those of blocks, where these have more: the first half of them at the beginning of the
// first half, the second at the beginning of the second. So the pairs of the rotary embedding, channels half the width apart, stay
// half the width apart, and the search for turning pairs finds it. The channels between hold zeros.
#pragma once

#include "kernels/format/layout.h"

namespace ta {

// The channel of rows of `from` channels that stands at `channel` of rows of `to`; -1: none does. One of the two is the wider.
TA_HD constexpr int channel_of(int channel, int to, int from) {
    const int half = channel >= to / 2, at = channel - half * (to / 2);
    return at < from / 2 ? half * (from / 2) + at : -1;
}

}  // namespace ta
