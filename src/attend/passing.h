// Blocks that windows pass with a step: which these are, and what they become. docs/internals/tiers.md.
#pragma once

#include <vector>

#include "src/attend/step.h"

namespace ta {

// At begin: the blocks that the member's new tokens make windows pass, for which the step takes room. TA_E_STATE: its queries see
// what has passed.
Status list_passing(const Geometry& geometry, StepMember& member);

// At the end: the blocks that pass. Nothing moves them from then on. Where the end fails, they may move again.
class PassingHold {
  public:
    PassingHold() = default;
    ~PassingHold() {
        for (Block* block : held_) block->end_move();
    }
    PassingHold(const PassingHold&) = delete;
    PassingHold& operator=(const PassingHold&) = delete;

    // Once it is known which tokens stay: of the blocks that begin() listed those that pass, and those that could not before, where
    // there is room.
    void choose(Pool& pool, Step& step);
    void committed() { held_.clear(); }

  private:
    bool take(const BlockPtr& block);

    std::vector<Block*> held_;  // that sequences of the step have
};

}  // namespace ta
