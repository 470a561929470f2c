// Where the callers' channels lie if blocks have more channels than callers: the first half of the callers' channels at the
// beginning of the block's first half, the second half at the beginning of the block's second half. Pairs of the rotary
// embedding are half the width apart. So they stay half the width apart, and the search for turning pairs finds them. The other
// channels hold zeros.
#pragma once

#include "kernels/format/layout.h"

namespace ta {

// Which channel of a row of `from` channels lies at `channel` of a row of `to` channels; -1: none. Either may be the wider one.
TA_HD constexpr int channel_of(int channel, int to, int from) {
    const int half = channel >= to / 2, at = channel - half * (to / 2);
    return at < from / 2 ? half * (from / 2) + at : -1;
}

}  // namespace ta
