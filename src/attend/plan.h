// A plan: one batch step over all layers, from reserving its blocks to committing them. The backend runs the work.
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
    Status begin(std::span<const ta_seq> seqs, const int32_t* n_new, const int32_t* n_query,
                 const ta_step_options& options = {});
    Status append(uint32_t layer, const TensorView& k, const TensorView& v);
    Status attend(uint32_t layer, const TensorView& q, const TensorView& out, float* lse, const ta_attend_options* options);
    Status end(const int32_t* keep = nullptr);
    Status abort();

  private:
    Status take_in_members(const int64_t* query_positions);
    Status check_member(size_t i) const;
    Status check_room() const;
    void list_touched(StepMember& member);
    void leave_to_other_ranks(StepMember& member);
    // The new blocks that a step wants.
    struct Wanted {
        std::vector<PageKind> kinds;
        std::vector<PageKind> unpromised;  // those for which room must be found
        SlotCounts promised{};             // the number of others, which come out of the sequences' promises
        std::vector<bool> is_promised;     // for each of `kinds`
        std::vector<Tenant> tenants;
        struct Owner {
            size_t member;
            StepBlock* touched;
            PassingBlock* passing;  // this or `touched`
            int64_t index() const { return touched ? touched->index : passing->index; }
        };
        std::vector<Owner> owners;
    };
    Status find_room(Patience patience);
    bool take_back_open_blocks();
    bool lose_suspended_blocks();
    Wanted list_wanted();
    Status reserve_blocks(const Wanted& wanted);
    Status check_layer(uint32_t layer) const;
    Result<TensorView> widen(StepBackend::Wide use, const TensorView& x, uint32_t layer, int argument);
    Status check_turn(uint32_t layer) const;
    Status check_attend(uint32_t layer, const TensorView& q, const TensorView& out, const float* lse,
                        const ta_attend_options* options) const;
    Status check_places(const AttendSettings& settings) const;
    Result<AttendSettings> settings_of(uint32_t layer, int64_t q_heads, const ta_attend_options* options) const;
    AttendCall call_of(uint32_t layer, const AttendSettings& settings, int64_t q_heads) const;
    Status attend_once(uint32_t layer, AttendCall& call);
    Status attend_turned(uint32_t layer, const AttendCall& call);
    Status name_row(Status s, int64_t StepMember::*first) const;
    // For each member, the indices of its tokens that stay.
    using Kept = std::vector<std::vector<int32_t>>;
    Status read_keep(const int32_t* keep, Kept& kept) const;
    void keep_tokens(StepMember& member, std::vector<int32_t>& kept);
    bool commit(StepMember& member);
    void plan_block(StepBlock& t) const;
    static SlotCounts count_freed(const StepMember& member);
    void give_back_promised();
    void clear();

    std::shared_ptr<Pool> pool_;
    std::unique_ptr<StepBackend> backend_;
    PartitionedStep partitioned_;
    bool open_ = false;
    Step step_;
    std::vector<Sequence*> sequences_;
    std::vector<Resident*> residents_;  // the same sequences
    std::optional<uint64_t> reading_;   // while blocks might move
    std::vector<uint8_t> appended_;     // [layers]
    int64_t last_layer_ = -1;
    uint64_t turn_ = 0;  // counts ended steps with queries: chooses the layers to observe
};

}  // namespace ta
