// K and V of channel pages as INT8, in units of the page scale and exponent: how the fractions of zero points are rounded.
#pragma once

#include "kernels/format/layout.h"

namespace ta {

// Each of eight tokens in a row has another rank. Which token has which rank differs between channels.
TA_HD constexpr int spread_rank(int token, int channel) {
    return (5 * token + 3 * channel) & 7;
}
// `value` is code * step + zero, -119 <= value <= 127. Just so many of a page's tokens get 1 more that the channel's mean
// stays.
TA_HD constexpr int spread_v(int value, int eighths, int token, int channel) {
    return value + (value < 127 && spread_rank(token, channel) < eighths);
}
// Rounds to the nearest, with halves up for every other token. For each token this is nearer than V's rule. The common error of
// a page's tokens shifts all their scores alike.
TA_HD constexpr int round_k(int value, int eighths, int token, int channel) {
    return spread_v(value, eighths == 4 ? 4 : eighths > 4 ? 8 : 0, token, channel);
}

}  // namespace ta
