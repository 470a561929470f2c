// Drafts at the end of a step: which tokens stay, and what becomes of its blocks.
#include <algorithm>
#include <vector>

#include "src/attend/plan.h"

namespace ta {

// Lists the tokens that stay, for each member. Nothing, if the step has no drafts.
Status Plan::read_keep(const int32_t* keep, Kept& kept) const {
    if (keep && !step_.drafts)
        return fail(TA_E_INVALID, "keep is given, but the step was begun without ta_step_options.drafts").argument(1);
    if (!step_.drafts) return {};
    kept.resize(step_.members.size());
    for (size_t i = 0; i < step_.members.size(); ++i) {
        const StepMember& m = step_.members[i];
        if (!keep && m.is_tree) {
            return fail(TA_E_INVALID, "keep is null, but the new tokens of sequence %zu are no chain: say which branch stays",
                        i)
                .argument(1)
                .sequence(int64_t(i));
        }
        const int64_t n = keep ? keep[i] : m.n_new;
        if (n < 0 || n > m.n_new) {
            return fail(TA_E_INVALID, "keep[%zu] is %lld; the sequence has %lld new tokens", i, (long long)n,
                        (long long)m.n_new)
                .argument(1)
                .sequence(int64_t(i));
        }
        for (int64_t t = n - 1; t >= 0; t = m.is_tree ? step_.parents[size_t(m.new_row + t)] : t - 1)
            kept[i].push_back(int32_t(t));
        std::reverse(kept[i].begin(), kept[i].end());
    }
    return {};
}

// Reduces the step to the tokens that stay. Sets `redone` for blocks whose bytes differ from what these tokens alone would have
// given.
void Plan::keep_tokens(StepMember& m, std::vector<int32_t>& kept) {
    const bool turning = pool_->numerics().encode.k_turning;
    size_t moved = 0;  // index of the first one that changes its position
    while (moved < kept.size() && kept[moved] == int32_t(moved)) ++moved;
    const int64_t in_place = m.length + int64_t(moved), total = m.length + int64_t(kept.size());
    m.n_new = int64_t(kept.size());
    if (m.n_new == 0) m.copied = m.reopened = 0;
    if (moved != kept.size()) m.path.swap(kept);
    while (!m.touched.empty() && (m.n_new == 0 || m.touched.back().index * kPageTokens >= total)) {
        m.rejected.insert(m.rejected.begin(), std::move(m.touched.back()));
        m.touched.pop_back();
    }
    for (StepBlock& t : m.touched) {
        const bool was_whole = t.end - t.have == kPageTokens;
        t.end = int(std::min<int64_t>(kPageTokens, total - t.index * kPageTokens));
        plan_block(t);
        if (t.closes) t.channel = std::move(t.later);
        t.redone =
            t.closes || t.begins_anew || (t.have == 0 && (turning || was_whole)) || t.index * kPageTokens + t.end > in_place;
    }
}

}  // namespace ta
