#include "tiering/room/step_room.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ta {
namespace {

class StepRoom {
  public:
    StepRoom(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted, Patience patience,
             const std::function<Status()>& reserve);

    // To be called once.
    Status find(std::optional<uint64_t>& reading);

  private:
    using Look = RoomLedger::Look;
    using Found = Look::Found;

    Look look(bool may_take, std::optional<uint64_t>& reading);
    // nullopt: the step's blocks are in tiers that the device reads.
    std::optional<Look> promote_blocks();
    Look take_new_blocks(std::optional<uint64_t>& reading);
    Look make_room(Status full, bool held);
    Look drop(Status full);
    Look again(Status s) const { return {Found::kAgain, std::move(s), patience_ends_}; }
    Look soon(Status s, Deadline until) const { return {Found::kSoon, std::move(s), until}; }
    Look none(Status s) const { return {Found::kNone, std::move(s), patience_ends_}; }
    static Look end(Status s) { return {Found::kEnd, std::move(s)}; }
    // Memory that readers keep in use, or in which steps stage pages, becomes free when they end.
    bool readers_keep_room() const { return may_wait() && store_.has_vacated(); }
    bool steps_stage() const { return may_wait() && store_.has_scratch(); }
    // True if all of the step's room was promised.
    bool have_promises() const {
        const auto has = [](const Resident* s) { return s->promised_tokens > 0; };
        return wanted_.empty() && std::all_of(sequences_.begin(), sequences_.end(), has);
    }
    Deadline now() const { return store_.room_signal().now(); }
    bool may_wait() const { return now() < patience_ends_; }
    using BlockOfStep = Residency::BlockOfStep;
    std::optional<BlockOfStep> first_on_disk() const;
    static Status name(Status s, const BlockOfStep& b) {
        return std::move(s).sequence(int64_t(b.sequence)).block(int64_t(b.block));
    }

    Residency& residency_;
    BlockStore& store_;
    const std::span<Resident* const> sequences_;
    const std::span<const PageKind> wanted_;
    const std::function<Status()>& reserve_;
    const Deadline start_ = now();
    const std::chrono::milliseconds plans_patience_;
    Deadline patience_ends_;      // for plans
    const Deadline moves_end_;    // for moves and calls
    bool is_possible_ = false;    // there may be room; decided before anything is lost
    bool may_drop_below_ = true;  // false: room that was made below did not help the device
    bool dropped_below_ = false;
    bool was_free_ = false;            // the last drop() found enough free bytes
    std::optional<uint64_t> readers_;  // the last reader when drop() was called first
    bool waited_for_blocks_ = false, waited_for_room_ = false;
};

StepRoom::StepRoom(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
                   Patience patience, const std::function<Status()>& reserve)
    : residency_(residency),
      store_(residency.store()),
      sequences_(sequences),
      wanted_(wanted),
      reserve_(reserve),
      plans_patience_(patience.plans),
      patience_ends_(start_ + plans_patience_),
      moves_end_(start_ + (residency.mover() ? patience.moves : plans_patience_)) {}

Status StepRoom::find(std::optional<uint64_t>& reading) {
    const RoomLedger::Request request{residency_.bytes_of(wanted_), sequences_.size(),
                                      residency_.mover() || residency_.may_drop(),
                                      plans_patience_.count() > 0 && !have_promises(),
                                      [this](RoomLedger::Waits waits) { residency_.set_waiting(sequences_, waits); }};
    Status s = residency_.ledger().admit(
        request, [&](bool may_take) { return look(may_take, reading); }, waited_for_room_);
    if (!waited_for_blocks_ && !waited_for_room_) return s;
    Residency::Counters& counters = residency_.counters();
    counters.waits_for_blocks += waited_for_blocks_;
    counters.waits_for_room += waited_for_room_;
    counters.wait_nanoseconds += uint64_t(std::chrono::nanoseconds(now() - start_).count());
    return s;
}

StepRoom::Look StepRoom::look(bool may_take, std::optional<uint64_t>& reading) {
    if (Status s = residency_.check_open(); !s.ok()) return end(std::move(s));
    if (Status s = residency_.check_not_lost(sequences_); !s.ok()) return end(std::move(s));
    if (std::optional<Look> missing = promote_blocks()) return std::move(*missing);
    if (may_take) return take_new_blocks(reading);
    return make_room(fail(TA_E_TIER_FULL, "others go first"), residency_.blocks_are_held());
}

std::optional<StepRoom::Look> StepRoom::promote_blocks() {
    const std::optional<BlockOfStep> on_disk = first_on_disk();
    if (!on_disk) return {};
    waited_for_blocks_ = true;
    const bool held = residency_.blocks_are_held();
    const uint64_t before = residency_.bytes_on_disk(sequences_);
    Status s;
    uint64_t lacking = 0;
    const bool possible = is_possible_ || residency_.may_make_room(wanted_, sequences_, &lacking);
    if (possible) {
        s = residency_.make_resident(sequences_, patience_ends_, moves_end_);
        if (s.ok()) return {};
        if (s.code() != TA_E_TIER_FULL) return end(std::move(s));
    } else {
        const bool host = residency_.tier(TierKind::kHost), peer = residency_.tier(TierKind::kPeer);
        const ta_tier above = host ? TA_TIER_HOST : peer ? TA_TIER_PEER : TA_TIER_DEVICE;
        s = name(
            fail(TA_E_TIER_FULL, "the tiers have no room for the step's blocks that are on disk").tier(above).bytes(lacking),
            *on_disk);
    }
    waited_for_room_ = true;
    if (residency_.bytes_on_disk(sequences_) < before) return again(std::move(s));  // some came up, so more may now
    if (readers_keep_room() || steps_stage()) return soon(std::move(s), patience_ends_);
    if (held || residency_.blocks_are_held()) return soon(std::move(s), moves_end_);
    return residency_.drop_to_be_resident(wanted_, sequences_) ? again(std::move(s)) : none(std::move(s));
}

StepRoom::Look StepRoom::take_new_blocks(std::optional<uint64_t>& reading) {
    const bool held = residency_.blocks_are_held();
    reading = store_.start_reading();
    const std::optional<BlockOfStep> on_disk = first_on_disk();
    Status s = on_disk
                   ? name(fail(TA_E_BUSY, "blocks of the step are moved to disk as fast as they are brought back"), *on_disk)
                   : reserve_();
    if (s.ok()) return end(std::move(s));
    store_.stop_reading(*reading);
    reading.reset();
    if (s.code() == TA_E_TIER_FULL) return make_room(std::move(s), held);
    return s.code() == TA_E_BUSY && now() < moves_end_ ? again(std::move(s)) : end(std::move(s));
}

// `held`: a move or a call held blocks when no room was found.
StepRoom::Look StepRoom::make_room(Status full, bool held) {
    if (!is_possible_ && !(is_possible_ = residency_.may_make_room(wanted_, sequences_))) {
        if (steps_stage()) return soon(std::move(full), patience_ends_);
        return held || residency_.blocks_are_held() ? soon(std::move(full), patience_ends_) : none(std::move(full));
    }
    waited_for_room_ |= residency_.mover() != nullptr;
    if (readers_keep_room()) return soon(std::move(full), patience_ends_);
    if (residency_.make_room(TierKind::kDevice, wanted_, true, patience_ends_)) return again(std::move(full));
    if ((held || residency_.blocks_are_held()) && now() < moves_end_) return soon(std::move(full), moves_end_);
    may_drop_below_ &= !dropped_below_;
    if (steps_stage()) return soon(std::move(full), patience_ends_);
    return drop(std::move(full));
}

// Drops the coldest blocks, where some may go.
StepRoom::Look StepRoom::drop(Status full) {
    if (!readers_) readers_ = store_.last_reading();
    const bool in_time = may_wait();
    const bool below = may_drop_below_ && (in_time || (!dropped_below_ && !store_.still_reading(store_.last_reading())));
    const Residency::Drop dropped = residency_.drop_coldest(wanted_, sequences_, {below, *readers_}, was_free_);
    was_free_ = dropped == Residency::Drop::kFree;
    switch (dropped) {
        case Residency::Drop::kNothing:
            return none(std::move(full));
        case Residency::Drop::kLater:
            return in_time ? soon(std::move(full), patience_ends_) : none(std::move(full));
        case Residency::Drop::kBelow:
            if (!dropped_below_) patience_ends_ = now() + plans_patience_;
            dropped_below_ = true;
            break;
        case Residency::Drop::kFree:
        case Residency::Drop::kHere:
            break;
    }
    return again(std::move(full));
}

std::optional<StepRoom::BlockOfStep> StepRoom::first_on_disk() const {
    if (store_.blocks_on_disk() == 0) return {};
    for (size_t i = 0; i < sequences_.size(); ++i) {
        const std::vector<BlockPtr>& blocks = sequences_[i]->blocks;
        for (size_t b = 0; b < blocks.size(); ++b) {
            if (blocks[b]->tier() == TierKind::kDisk) return BlockOfStep{i, b};
        }
    }
    return {};
}

}  // namespace

Status find_room_for_step(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
                          Patience patience, const std::function<Status()>& reserve, std::optional<uint64_t>& reading) {
    return StepRoom(residency, sequences, wanted, patience, reserve).find(reading);
}

}  // namespace ta
