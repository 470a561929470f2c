// Finds a page's turning pairs (kernels/format/turning.h) on a CPU.
#pragma once

#include "kernels/format/turning.h"

namespace ta {

// The turning pairs that the first n rows k [n, d] of a page show.
TurningPairs find_turning(const float* k, int n, int d);

// The turning pairs of the page before, carried on to a page of which k [n, d] are the first n rows.
TurningPairs carry_turning(const TurningPairs& before, const float* k, int n, int d);

// Do the n rows k [n, d] of a page spread less without each of its pairs?
bool all_turning_helps(const TurningPairs& pairs, const float* k, int n, int d);

// Takes the pairs out of rows k [n, d], the tokens from `first` on, or puts them back.
void take_out_turning(const TurningPairs& pairs, int first, int n, int d, float* k);
void put_back_turning(const TurningPairs& pairs, int first, int n, int d, float* k);

}  // namespace ta
