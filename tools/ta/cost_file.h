// A file of costs for ta calibrate: what 8, 4 and 2 bits cost in each head, and in each block of the measured text.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tools/ta/sizes.h"

namespace ta::tools {

inline constexpr int kBits[] = {8, 4, 2};  // the order of a head's costs

// Costs of K or of V, [layers, kv_heads, 3].
struct Costs {
    std::vector<float> all;
    std::vector<std::vector<double>> blocks;  // for each cost its mean in each block; empty: not measured
    static size_t place(size_t head, int bits) { return head * 3 + (bits == 8 ? 0 : bits == 4 ? 1 : 2); }
    float of(size_t head, int bits) const { return all[place(head, bits)]; }
};

struct CostFile {
    ModelShape shape;
    Costs k, v;
    std::vector<double> block_tokens;  // of each block; empty: the file has no costs of blocks
};

// Throws WrongInput. docs/numerics.md, section 5, defines the file.
CostFile read_cost_file(const std::string& path);

double weighted_mean(const std::vector<double>& values, const std::vector<double>& weights);
// Neighbouring blocks of a text cost alike. So errors and draws treat runs of this many of n blocks as one.
size_t run_of(size_t n);
// Standard error of the mean over tokens, from the means of blocks in the order of the text. docs/numerics.md, section 5.
double standard_error(const std::vector<double>& means, const std::vector<double>& tokens);

}  // namespace ta::tools
