#include "tiering/room/step_room.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "tiering/room/room_retry.h"

namespace ta {
namespace {

// Others may take the room that was made, or moves that were asked for earlier take blocks away again.
constexpr int kMostAttempts = 64, kMostTurns = 8;
constexpr std::chrono::milliseconds kPause{20};

class StepRoom {
  public:
    StepRoom(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
             const std::function<Status()>& reserve);
    // Counts what find() waited for.
    ~StepRoom();
    StepRoom(const StepRoom&) = delete;
    StepRoom& operator=(const StepRoom&) = delete;

    // Once.
    Status find(std::optional<uint64_t>& reading);

  private:
    using Clock = std::chrono::steady_clock;

    Status find_on_device();
    // Nothing: all is to be tried again.
    std::optional<Status> bring_blocks();
    std::optional<Status> take_new_blocks(std::optional<uint64_t>& reading);
    bool make_or_await_room(uint64_t seen);
    bool drop();
    struct Others {
        bool hold_room;
        uint64_t changes;  // of plans, before
    };
    Others look_at_others() const;
    bool await_others(const Others& before);
    bool may_wait() const { return Clock::now() < patience_ends_; }
    // Where one may wait: until something may have changed.
    std::chrono::milliseconds pause() const {
        return std::min(kPause, std::chrono::ceil<std::chrono::milliseconds>(patience_ends_ - Clock::now()));
    }
    struct BlockOfStep {
        size_t sequence, block;
    };
    std::optional<BlockOfStep> first_on_disk() const;
    static Status name(Status s, const BlockOfStep& b) {
        return std::move(s).sequence(int64_t(b.sequence)).block(int64_t(b.block));
    }

    Residency& residency_;
    BlockStore& store_;
    const std::span<Resident* const> sequences_;
    const std::span<const PageKind> wanted_;
    const std::function<Status()>& reserve_;
    const Clock::time_point start_ = Clock::now();
    const std::chrono::milliseconds plans_patience_;
    Clock::time_point patience_ends_;
    RoomRetry looks_, brief_looks_;
    int made_ = 0;                // room, in whatever way
    int turns_ = 0;               // that blocks took
    bool is_possible_ = false;    // room, without a loss
    bool moving_ = false;         // somebody was when this last began to look
    bool may_drop_below_ = true;  // false where room that was made below does not come up to the device
    bool dropped_below_ = false;
    RoomQueue::Turn turn_;
    std::optional<uint64_t> readers_;  // when blocks were to be dropped first
    bool waited_for_blocks_ = false, waited_for_room_ = false;
};

StepRoom::StepRoom(Residency& residency, std::span<Resident* const> sequences, std::span<const PageKind> wanted,
                   const std::function<Status()>& reserve)
    : residency_(residency),
      store_(residency.store()),
      sequences_(sequences),
      wanted_(wanted),
      reserve_(reserve),
      plans_patience_(residency.settings().plans_patience),
      patience_ends_(start_ + plans_patience_),
      looks_(residency.mover() ? residency.settings().moves_patience : plans_patience_),
      brief_looks_(std::min(residency.settings().moves_patience, kBriefly)),
      turn_(residency.room_queue(), [this](RoomQueue::Waits waits) { residency_.set_waiting(sequences_, waits); }) {}

StepRoom::~StepRoom() {
    if (!waited_for_blocks_ && !waited_for_room_) return;
    Residency::Counters& counters = residency_.counters();
    counters.waits_for_blocks += waited_for_blocks_;
    counters.waits_for_room += waited_for_room_;
    counters.wait_nanoseconds += uint64_t(std::chrono::nanoseconds(Clock::now() - start_).count());
}

Status StepRoom::find(std::optional<uint64_t>& reading) {
    if (!residency_.mover()) return find_on_device();
    turn_.give_way();
    for (;;) {
        TA_RETURN_IF_ERROR(residency_.check_open());
        const Others others = look_at_others();
        std::optional<Status> s = bring_blocks();
        if (s && s->ok()) s = take_new_blocks(reading);
        if (s && (s->code() != TA_E_TIER_FULL || !await_others(others))) return *std::move(s);
    }
}

// Without tiers below.
Status StepRoom::find_on_device() {
    for (;;) {
        TA_RETURN_IF_ERROR(residency_.check_open());
        const Others others = look_at_others();
        const bool held = residency_.blocks_are_held();
        Status s = reserve_();
        if (s.code() != TA_E_TIER_FULL || ++made_ > kMostAttempts) return s;
        if (residency_.drop_unused(TierKind::kDevice, wanted_, true)) continue;
        if ((held || residency_.blocks_are_held()) && looks_.again()) {
            --made_;
            continue;
        }
        if (residency_.drop_coldest(wanted_, sequences_, {}) == Residency::Drop::kNothing && !await_others(others)) return s;
    }
}

// Whether there are blocks that may be room later: when other plans end, or calls let go of them. Begins that are queued behind
// this one wait for it: they end when it does.
StepRoom::Others StepRoom::look_at_others() const {
    Others o{false, residency_.plan_changes()};
    if (!residency_.mover() && !residency_.may_drop()) return o;  // none that this step could have
    o.hold_room = residency_.blocks_are_held() ||
                  (residency_.others_in_plans(sequences_) && (!turn_.is_first() || residency_.others_make_room(sequences_)));
    return o;
}

// False: there are none, nor were there since this last began to look (`before`), or it is too late.
bool StepRoom::await_others(const Others& before) {
    if (!may_wait()) return false;
    const Others now = look_at_others();
    const bool changed = (residency_.mover() || residency_.may_drop()) && residency_.plan_changes() != before.changes;
    if (!before.hold_room && !now.hold_room && !changed) return false;
    waited_for_room_ = true;
    turn_.wait(patience_ends_, [this] { residency_.await_readers(); });
    made_ = turns_ = 0;
    return true;
}

std::optional<Status> StepRoom::bring_blocks() {
    const std::optional<BlockOfStep> on_disk = first_on_disk();
    waited_for_blocks_ |= on_disk.has_value();
    moving_ = residency_.mover()->busy();
    const uint64_t seen = store_.changes();
    Status s;
    uint64_t lacking = 0;
    if (!is_possible_ && on_disk && !residency_.may_make_room(wanted_, sequences_, &lacking)) {
        if ((residency_.blocks_are_held() || store_.changes() != seen) && brief_looks_.again()) return {};
        Status full = fail(TA_E_TIER_FULL, "the tiers have no room for the step's blocks that are on disk");
        const int32_t above = residency_.tier(TierKind::kHost) ? TA_TIER_HOST : TA_TIER_DEVICE;
        s = name(std::move(full).tier(above).bytes(lacking), *on_disk);
    } else {
        s = residency_.make_resident(sequences_, wanted_, patience_ends_);
    }
    if (s.code() != TA_E_TIER_FULL) return s;
    waited_for_room_ = true;
    if (may_wait() && (store_.wait_for_left(pause()) || store_.wait_for_scratch(pause()))) return {};
    // Others may be making the room. Where blocks took turns, more of them may come now.
    if (moving_ || residency_.mover()->busy() ? brief_looks_.again() : store_.changes() != seen && ++turns_ <= kMostTurns)
        return {};
    if (++made_ <= kMostAttempts && residency_.drop_to_be_resident(wanted_, sequences_)) return {};
    return s;
}

std::optional<Status> StepRoom::take_new_blocks(std::optional<uint64_t>& reading) {
    const uint64_t seen = store_.changes();
    reading = store_.start_reading();
    Status s;
    if (const std::optional<BlockOfStep> on_disk = first_on_disk()) {
        s = name(fail(TA_E_BUSY, "blocks of the step are moved to disk as fast as they are brought back"), *on_disk);
    } else {
        s = reserve_();
    }
    if (s.ok()) return s;
    store_.stop_reading(*reading);
    reading.reset();
    const bool again = s.code() == TA_E_TIER_FULL ? make_or_await_room(seen) : s.code() == TA_E_BUSY && looks_.again();
    return again ? std::nullopt : std::optional(std::move(s));
}

// True: there may be some now. `seen`: the store's changes before there was found to be none.
bool StepRoom::make_or_await_room(uint64_t seen) {
    if (!is_possible_ && !(is_possible_ = residency_.may_make_room(wanted_, sequences_))) {
        // Where other steps stage is room when they end.
        if (may_wait() && store_.wait_for_scratch(pause())) {
            waited_for_room_ = true;
            return true;
        }
        const bool soon = residency_.blocks_are_held() && may_wait();
        return (soon || store_.changes() != seen) && looks_.again();
    }
    waited_for_room_ = true;
    // What blocks have left is room as soon as those are done who read there.
    if (may_wait() && store_.wait_for_left(pause())) return true;
    if (residency_.make_room(TierKind::kDevice, wanted_, true, patience_ends_)) return ++made_ <= kMostAttempts;
    if (residency_.blocks_are_held() && brief_looks_.again()) return true;
    // What others move, or what changed while this looked for room, may be room in a moment.
    if (moving_ || store_.changes() != seen) return looks_.again();
    may_drop_below_ &= !dropped_below_;
    return (may_wait() && store_.wait_for_scratch(pause())) || drop();
}

// Drops the coldest blocks; false when none may go.
bool StepRoom::drop() {
    if (!readers_) readers_ = store_.last_reading();
    const bool in_time = may_wait();
    const bool below = may_drop_below_ && (in_time || (!dropped_below_ && !store_.still_reading(store_.last_reading())));
    switch (residency_.drop_coldest(wanted_, sequences_, {below, *readers_})) {
        case Residency::Drop::kNothing:
            return false;
        case Residency::Drop::kLater:
            (void)store_.still_reading(*readers_, kPause);
            return in_time;
        case Residency::Drop::kBelow:
            if (!dropped_below_) patience_ends_ = Clock::now() + plans_patience_;
            dropped_below_ = true;
            break;
        case Residency::Drop::kHere:
            break;
    }
    return ++made_ <= kMostAttempts;
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
                          const std::function<Status()>& reserve, std::optional<uint64_t>& reading) {
    return StepRoom(residency, sequences, wanted, reserve).find(reading);
}

}  // namespace ta
