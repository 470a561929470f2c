// What fewer bits cost in each head, per block of a text's positions, and how certain a map is that was chosen by these costs.
#pragma once

#include <filesystem>
#include <functional>
#include <vector>

#include "attention_turbo.h"
#include "divergence.h"

namespace tinylm {

inline constexpr uint8_t kBitsOfCosts[] = {8, 4, 2};  // in the order of HeadCosts

struct MeasuredCosts {
    HeadCosts mean;
    // For each cost its mean in each block; empty: not measured.
    std::vector<std::vector<double>> k_blocks, v_blocks;
    std::vector<double> positions;  // of each block

    // Of a map: the sum of its heads' costs, and the same for each block.
    double sum(const HeadMap& map) const;
    std::vector<double> sum_of_blocks(const HeadMap& map) const;
    // Writes the file that ta calibrate reads.
    void write(const std::filesystem::path& path, const AttentionShape& shape) const;
};

// How much a map depends on the text (the block bootstrap). Each draw takes runs of neighbouring blocks from the text with
// replacement, as many blocks as the text has, and a map is chosen again by their costs. With only one block nothing is
// certain.
struct Certainty {
    std::vector<double> k_kept, v_kept;  // share of draws in which a head keeps its bits: [layers, kv heads]
    double regret = 0;                   // mean over draws: how much more a draw's map costs by the costs of the whole text
};
using Choose = std::function<std::vector<HeadMap>(const std::vector<HeadCosts>& costs)>;
Certainty certainty_of(const MeasuredCosts& costs, const HeadMap& map, const Choose& choose);

}  // namespace tinylm
