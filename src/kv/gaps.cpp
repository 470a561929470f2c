#include "src/kv/gaps.h"

#include <algorithm>
#include <utility>

namespace ta {

std::vector<Gap> with_gap(std::span<const Gap> gaps, Gap gap) {
    std::vector<Gap> all;
    all.reserve(gaps.size() + 1);
    bool placed = false;
    for (const Gap& g : gaps) {
        if (g.end >= gap.first && g.first <= gap.end) {
            gap = {std::min(g.first, gap.first), std::max(g.end, gap.end)};
            continue;
        }
        if (g.first > gap.end && !std::exchange(placed, true)) all.push_back(gap);
        all.push_back(g);
    }
    if (!placed) all.push_back(gap);
    if (all.front().first == 0) all.erase(all.begin());
    return all;
}

void cut_gaps(std::vector<Gap>& gaps, int64_t blocks) {
    while (!gaps.empty() && gaps.back().first >= blocks) gaps.pop_back();
    if (!gaps.empty()) gaps.back().end = std::min(gaps.back().end, blocks);
}

}  // namespace ta
