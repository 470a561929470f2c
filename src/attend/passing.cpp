#include "src/attend/passing.h"

#include <algorithm>
#include <utility>

#include "src/kv/blocks_to_come.h"

namespace ta {

Status list_passing(const Geometry& g, StepMember& m) {
    const std::vector<BlockPtr>& blocks = m.sequence->blocks;
    const int64_t seen = g.first_needed(std::min(m.length, m.first_query));
    for (int64_t b = seen; b < std::min<int64_t>(g.first_needed(m.length), Step::untouched_blocks(m)); ++b) {
        // Counted alike on all ranks of a partitioned sequence.
        const bool counts_as_passed = m.sequence->partition && b < m.sequence->passed_to;
        if (counts_as_passed || is_passed(blocks[size_t(b)]->kind()))
            return fail(TA_E_STATE, "the step's queries see block %lld, which windows have passed", (long long)b).block(b);
    }
    for (int64_t b = g.first_kept(m.length); b < g.first_kept(m.length + m.n_new); ++b) {
        if (b >= Step::untouched_blocks(m) || may_pass(blocks[size_t(b)])) m.passing.push_back({b, nullptr});
    }
    return {};
}

bool PassingHold::take(const BlockPtr& block) {
    if (!may_pass(block)) return false;
    held_.push_back(block.get());
    if (block->start_move()) {
        if (may_pass(block)) return true;  // again, now that no move can start
        block->end_move();
    }
    held_.pop_back();
    return false;
}

void PassingHold::choose(Pool& pool, Step& step) {
    const Geometry& g = pool.geometry();
    if (!g.has_windows()) return;
    for (StepMember& m : step.members) {
        Sequence& s = *m.sequence;
        const int64_t kept = g.first_kept(m.length + m.n_new), untouched = Step::untouched_blocks(m);
        // What follows moves blocks out of the list before it is cut: it takes no memory.
        m.spared.reserve(m.spared.size() + m.passing.size());
        held_.reserve(held_.size() + m.passing.size());
        std::erase_if(m.passing, [&](PassingBlock& p) {
            if (p.index < kept && (p.index >= untouched || take(s.blocks[size_t(p.index)]))) return false;
            m.spared.push_back(std::move(p.to));
            return true;
        });
        const int64_t first = std::min(untouched, m.passing.empty() ? kept : m.passing.front().index);
        for (int64_t b = s.whole_from; kept > s.passed_to && b < first; ++b) {
            const BlockPtr& block = s.blocks[size_t(b)];
            if (!may_pass(block)) continue;
            const PageKind kind = passed_kind(block->kind());
            const Tenant tenant = s.tenant_of(b);
            Result<std::vector<BlockPtr>> to = pool.blocks().acquire({&kind, 1}, nullptr, {&tenant, 1});
            if (!to.ok() || !take(block)) break;
            m.passing.push_back({b, std::move(to.value()[0])});
        }
        for (const PassingBlock& p : m.passing) p.to->stand_for(m.block(p.index));
    }
}

}  // namespace ta
