// What single heads cost with fewer bits, in each block of a text's positions, and how sure a map is that is chosen by that.
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
    // Of each cost its mean in each block; empty if the cost was not measured.
    std::vector<std::vector<double>> k_blocks, v_blocks;
    std::vector<double> positions;  // of each block

    // Of the map: the sum of its heads' costs, and the same in each block.
    double sum(const HeadMap& map) const;
    std::vector<double> sum_of_blocks(const HeadMap& map) const;
    // As ta calibrate reads them.
    void write(const std::filesystem::path& path, const AttentionShape& shape) const;
};

// How much a map depends on the text: it is chosen again by the costs of blocks that are drawn from the text with replacement, as many
// as the text has (the bootstrap). With one block nothing is certain.
struct Certainty {
    std::vector<double> k_kept, v_kept;  // of the draws, those in which a head's bits are the same: [layers, kv heads]
    double regret = 0;                   // what a draw's map costs more by the costs of the whole text, the mean over draws
};
using Choose = std::function<std::vector<HeadMap>(const std::vector<HeadCosts>& costs)>;
Certainty certainty_of(const MeasuredCosts& costs, const HeadMap& map, const Choose& choose);

}  // namespace tinylm
