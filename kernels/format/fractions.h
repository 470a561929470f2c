// K and V of channel pages as INT8, in units of the page scale and exponent: what the fractions of zero points become there.
#pragma once

#include "kernels/format/layout.h"

namespace ta {

// Of every eight of a page's tokens each has another rank. Which has which, differs between channels.
TA_HD constexpr int spread_rank(int token, int channel) {
    return (5 * token + 3 * channel) & 7;
}
// `value` is code * step + zero. As many of a page's tokens get 1 more as keeps the channel's mean. -119 <= value <= 127.
TA_HD constexpr int spread_v(int value, int eighths, int token, int channel) {
    return value + (value < 127 && spread_rank(token, channel) < eighths);
}
// To the nearest: it is nearer than V's for each token, and the error that the tokens of a page then have in common shifts their scores
// alike. Halves go up for every other token.
TA_HD constexpr int round_k(int value, int eighths, int token, int channel) {
    return spread_v(value, eighths == 4 ? 4 : eighths > 4 ? 8 : 0, token, channel);
}

}  // namespace ta
