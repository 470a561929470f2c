// Blocks that windows pass in a step: which ones, and what becomes of them. docs/internals/tiers.md.
#pragma once

#include <vector>

#include "src/attend/step.h"

namespace ta {

// At begin: lists the blocks that windows pass because of the member's new tokens; the step takes room for their replacements.
// TA_E_STATE: a query sees a passed block.
Status list_passing(const Geometry& geometry, StepMember& member);

// At the end of a step: holds the blocks that pass, so that nothing moves them. If the end fails, releases them.
class PassingHold {
  public:
    PassingHold() = default;
    ~PassingHold() {
        for (Block* block : held_) block->end_move();
    }
    PassingHold(const PassingHold&) = delete;
    PassingHold& operator=(const PassingHold&) = delete;

    // To be called when it is known which tokens stay. Of the blocks that begin() listed, keeps those that still pass. Adds
    // older blocks that could not pass before, if there is room.
    void choose(Pool& pool, Step& step);
    void committed() { held_.clear(); }

  private:
    bool take(const BlockPtr& block);

    std::vector<Block*> held_;  // blocks of the step's sequences
};

}  // namespace ta
