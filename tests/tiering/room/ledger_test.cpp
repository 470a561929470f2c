// The promises of docs/tiers.md about begins that wait, on the ledger alone. Time passes when a test says so.
#include "tiering/room/ledger.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace ta {
namespace {

using namespace std::chrono_literals;
using Look = RoomLedger::Look;
using Found = Look::Found;
using Waits = RoomLedger::Waits;

// Stands still until it is advanced.
class SimulatedClock final : public RoomClock {
  public:
    Deadline now() const override { return now_; }
    void wait(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, Deadline) const override {
        condition_ = &condition;
        mutex_ = lock.mutex();
        ++waiting_;
        condition.wait(lock);
        --waiting_;
    }
    void advance(std::chrono::milliseconds by) {
        now_ = now_.load() + by;
        if (!mutex_) return;
        std::lock_guard lock(*mutex_);
        condition_.load()->notify_all();
    }
    int waiting() const { return waiting_; }

  private:
    std::atomic<Deadline> now_{Deadline() + 1h};
    mutable std::atomic<std::condition_variable*> condition_{nullptr};
    mutable std::atomic<std::mutex*> mutex_{nullptr};
    mutable std::atomic<int> waiting_{0};
};

class Ledger : public ::testing::Test {
  protected:
    // A begin on a thread of its own: takes its bytes once they are free.
    struct Begin {
        std::atomic<Waits> waits{Waits::kNot};
        std::atomic<int> looks{0};
        std::atomic<bool> over{false};
        bool waited = false;
        ta_status status = TA_OK;
        std::jthread thread;
    };
    std::unique_ptr<Begin> begin(uint64_t bytes, std::chrono::milliseconds patience = 1s, Found in_vain = Found::kNone) {
        auto b = std::make_unique<Begin>();
        ledger.enter_plans(1);
        b->thread = std::jthread([this, bytes, patience, in_vain, &b = *b] {
            const Deadline until = clock.now() + patience;
            const RoomLedger::Request request{bytes, 1, true, true, [&b](Waits waits) { b.waits = waits; }};
            const Status s = ledger.admit(
                request,
                [&](bool may_take) -> Look {
                    EXPECT_EQ(b.waits, Waits::kNot);
                    b.looks += may_take;
                    uint64_t here = free;
                    while (may_take && here >= bytes) {
                        if (free.compare_exchange_weak(here, here - bytes)) return {Found::kEnd, {}};
                    }
                    return {in_vain, fail(TA_E_TIER_FULL, "no room"), until};
                },
                b.waited);
            b.status = s.code();
            b.over = true;
        });
        return b;
    }
    void release(uint64_t bytes) {
        free += bytes;
        signal.notify();
    }
    // Until all that can happen at this time has.
    template <class Condition>
    static void await(Condition&& condition) {
        while (!condition()) std::this_thread::yield();
    }
    void end_plan() { ledger.leave_plans(1); }

    SimulatedClock clock;
    RoomSignal signal{clock};
    std::atomic<uint64_t> free{0};
    std::atomic<bool> held{false};
    RoomLedger ledger{signal, [this] { return free.load(); }, [this] { return held.load(); }};
};

TEST_F(Ledger, ABeginThatFindsRoomTellsNobody) {
    free = 10;
    const auto b = begin(10);
    b->thread.join();
    EXPECT_EQ(b->status, TA_OK);
    EXPECT_EQ(b->looks, 1);
    EXPECT_FALSE(b->waited);
}

TEST_F(Ledger, ABeginFailsAtOnceIfNobodyHoldsRoom) {
    const auto b = begin(1);
    b->thread.join();
    EXPECT_EQ(b->status, TA_E_TIER_FULL);
    EXPECT_FALSE(b->waited);
}

TEST_F(Ledger, BeginsAreAdmittedInOrder) {
    ledger.enter_plans(1);  // somebody else's, which stays open
    std::vector<std::unique_ptr<Begin>> begins;
    for (int i = 0; i < 4; ++i) {
        begins.push_back(begin(10));
        await([&] { return clock.waiting() == i + 1; });
    }
    for (int i = 0; i < 4; ++i) {
        for (int later = i; later < 4; ++later) EXPECT_FALSE(begins[size_t(later)]->over);
        release(10);
        begins[size_t(i)]->thread.join();
        EXPECT_EQ(begins[size_t(i)]->status, TA_OK);
        EXPECT_TRUE(begins[size_t(i)]->waited);
        end_plan();
    }
}

// A begin that waits for 10 bytes and is due, beside an open plan.
class BehindOneThatIsDue : public Ledger {
  protected:
    BehindOneThatIsDue() {
        ledger.enter_plans(1);
        first = begin(10, 10s);
        await([&] { return clock.waiting() == 1; });
        clock.advance(RoomLedger::kDue);
        await([&] { return clock.waiting() == 1; });
    }
    ~BehindOneThatIsDue() override { release(10); }
    std::unique_ptr<Begin> first;
};

TEST_F(BehindOneThatIsDue, NobodyTakesWhatItNeeds) {
    free = 9;
    const auto small = begin(1);
    await([&] { return small->waits == Waits::kGivesWay && clock.waiting() == 2; });
    EXPECT_EQ(small->looks, 0) << "it may make room, and take none";
    release(1);
    first->thread.join();
    EXPECT_EQ(first->status, TA_OK);
    EXPECT_EQ(free, 0u);
    release(1);
    small->thread.join();
    EXPECT_EQ(small->status, TA_OK);
}

// One that waits for moves has not looked in vain: others are held up for its bytes alone.
TEST_F(Ledger, BytesAreReservedForOneThatWaitsForMoves) {
    held = true;
    const auto first = begin(10, 10s, Found::kSoon);
    await([&] { return clock.waiting() == 1; });
    clock.advance(RoomLedger::kDue);
    await([&] { return clock.waiting() == 1; });
    free = 9;
    const auto small = begin(1);
    await([&] { return small->over || (small->waits == Waits::kGivesWay && clock.waiting() == 2); });
    EXPECT_EQ(free, 9u) << "the first one's";
    const auto fresh = begin(0);
    fresh->thread.join();
    EXPECT_FALSE(fresh->waited) << "it takes none of them";
    release(2);
    first->thread.join();
    small->thread.join();
    EXPECT_EQ(free, 0u);
}

TEST_F(BehindOneThatIsDue, ABeginThatNeedsNothingIsHeldUpToo) {
    const auto fresh = begin(0);
    await([&] { return fresh->waits == Waits::kGivesWay; });
    release(10);
    first->thread.join();
    fresh->thread.join();
    EXPECT_EQ(fresh->looks, 1);
}

TEST_F(BehindOneThatIsDue, NobodyIsHeldUpForLong) {
    free = 9;
    const auto held_up = begin(1);
    await([&] { return held_up->waits == Waits::kGivesWay && clock.waiting() == 2; });
    clock.advance(RoomLedger::kGiveWay - 1ms);
    await([&] { return clock.waiting() == 2; });
    EXPECT_EQ(held_up->looks, 0);
    clock.advance(1ms);
    held_up->thread.join();
    EXPECT_EQ(held_up->status, TA_OK);
    // Behind one that waits in vain not at all.
    clock.advance(RoomLedger::kInVain);
    const auto later = begin(1);
    later->thread.join();
    EXPECT_FALSE(later->waited);
}

TEST_F(Ledger, NobodyIsHeldUpByOneThatHasJustCome) {
    ledger.enter_plans(1);
    const auto first = begin(10);
    await([&] { return clock.waiting() == 1; });
    free = 9;
    const auto small = begin(1);
    small->thread.join();
    EXPECT_EQ(small->status, TA_OK);
    EXPECT_FALSE(small->waited);
    release(2);
}

TEST_F(Ledger, ADeadlineIsADeadline) {
    ledger.enter_plans(1);
    const auto b = begin(10, 300ms);
    await([&] { return clock.waiting() == 1; });
    clock.advance(299ms);
    await([&] { return clock.waiting() == 1; });
    EXPECT_FALSE(b->over);
    clock.advance(1ms);
    b->thread.join();
    EXPECT_EQ(b->status, TA_E_TIER_FULL);
    EXPECT_EQ(b->waits, Waits::kNot);
}

// Others signal all the time: a begin in the queue ends in time all the same, and so does one that is held up.
TEST_F(BehindOneThatIsDue, SignalsDoNotMoveADeadline) {
    const auto queued = begin(5, 300ms);
    await([&] { return clock.waiting() == 2; });
    clock.advance(RoomLedger::kGiveWay);
    await([&] { return queued->waits == Waits::kQueued && clock.waiting() == 2; });
    std::jthread others([this](const std::stop_token& stop) {
        while (!stop.stop_requested()) signal.notify();
    });
    clock.advance(300ms);
    queued->thread.join();
    EXPECT_EQ(queued->status, TA_E_TIER_FULL);
    const auto held_up = begin(0);
    await([&] { return held_up->waits == Waits::kGivesWay; });
    clock.advance(RoomLedger::kGiveWay);
    held_up->thread.join();
    EXPECT_EQ(held_up->status, TA_OK);
}

// Once the last plan that is no begin's ends, the first one fails, and so do the others.
TEST_F(Ledger, BeginsDoNotWaitForEachOther) {
    ledger.enter_plans(1);
    std::vector<std::unique_ptr<Begin>> begins;
    for (int i = 0; i < 3; ++i) {
        begins.push_back(begin(10, 1h));
        await([&] { return clock.waiting() == i + 1; });
    }
    for (const auto& b : begins) await([&] { return b->waits == Waits::kQueued; });
    end_plan();
    for (const auto& b : begins) {
        await([&] { return b->over.load(); });
        end_plan();
        EXPECT_EQ(b->status, TA_E_TIER_FULL);
    }
}

TEST_F(Ledger, ABeginWaitsForMovesAndCalls) {
    held = true;
    const auto b = begin(10, 1s, Found::kSoon);
    await([&] { return clock.waiting() == 1; });
    EXPECT_EQ(b->waits, Waits::kNot) << "what it has of its step stays";
    release(10);
    b->thread.join();
    EXPECT_EQ(b->status, TA_OK);
}

// A signal between the look and the wait is not missed, and a thread's own are none.
TEST_F(Ledger, AWatchSeesWhatOthersSignal) {
    RoomSignal::Watch watch(signal);
    signal.notify();
    EXPECT_FALSE(watch.wait(clock.now()));
    std::jthread([this] { signal.notify(); }).join();
    EXPECT_TRUE(watch.signalled());
    EXPECT_FALSE(watch.wait(clock.now())) << "the time has come";
    EXPECT_TRUE(watch.wait(clock.now() + 1ms));
    EXPECT_FALSE(watch.signalled());
}

}  // namespace
}  // namespace ta
