// A plan: one batch step over all layers, from the reservation of blocks to their commit. Where the work runs is the backend's.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/attend/backend.h"
#include "src/attend/partition.h"

namespace ta {

class Plan {
  public:
    explicit Plan(std::shared_ptr<Pool> pool);
    ~Plan();
    Plan(const Plan&) = delete;
    Plan& operator=(const Plan&) = delete;

    Pool& pool() const { return *pool_; }

    Status set_stream(ta_stream stream);
    Status begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query);
    Status append(uint32_t layer, const TensorView& k, const TensorView& v);
    Status attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options);
    Status end();
    Status abort();

  private:
    Status take_in_members();
    Status check_member(size_t i) const;
    Status check_room() const;
    void list_touched(StepMember& member);
    void leave_to_other_ranks(StepMember& member);
    // The new blocks of a step.
    struct Wanted {
        std::vector<PageKind> kinds;
        std::vector<Tenant> tenants;
        std::vector<std::pair<size_t, StepBlock*>> owners;  // member, and its touched block
    };
    Status find_room();
    bool take_back_open_blocks();
    Wanted list_wanted();
    Status reserve_blocks(const Wanted& wanted);
    Status check_layer(uint32_t layer) const;
    Status name_row(Status s, int64_t StepMember::*first) const;
    void clear();

    std::shared_ptr<Pool> pool_;
    std::unique_ptr<StepBackend> backend_;
    PartitionedStep partitioned_;
    bool open_ = false;
    Step step_;
    std::vector<Sequence*> sequences_;
    std::vector<Resident*> residents_;  // the same
    std::optional<uint64_t> reading_;   // of blocks that might move
    std::vector<uint8_t> appended_;     // [layers]
    int64_t last_layer_ = -1;
    uint64_t turn_ = 0;  // of layers to be observed: steps with queries that were ended
};

}  // namespace ta
