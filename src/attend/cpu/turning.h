// Finds a page's turning pairs (kernels/format/turning.h) on a CPU.
#pragma once

#include "kernels/format/turning.h"

namespace ta {

// The turning pairs that the first n rows k [n, d] of a page show.
TurningPairs find_turning(const float* k, int n, int d);

// The previous page's turning pairs, continued on a page whose first n rows are k [n, d].
TurningPairs carry_turning(const TurningPairs& before, const float* k, int n, int d);

// True if the n rows k [n, d] of a page spread less without each of its pairs.
bool all_turning_helps(const TurningPairs& pairs, const float* k, int n, int d);

// Take the pairs out of rows k [n, d], which are tokens from `first` on, or put them back.
void take_out_turning(const TurningPairs& pairs, int first, int n, int d, float* k);
void put_back_turning(const TurningPairs& pairs, int first, int n, int d, float* k);

}  // namespace ta
