#include "tiering/room/room_queue.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

namespace ta {
namespace {

using namespace std::chrono_literals;
using Clock = RoomQueue::Clock;

using Waits = RoomQueue::Waits;

class Rooms : public ::testing::Test {
  protected:
    // A begin that notes whether others may take its blocks, and how often it paused.
    struct Begin {
        explicit Begin(RoomQueue& queue) {
            turn.emplace(queue, [this](Waits waits) {
                EXPECT_NE(waits == Waits::kNot, waiting == Waits::kNot);
                waiting = waits;
                changes += waits != Waits::kNot;
                ways_given += waits == Waits::kGivesWay;
            });
        }
        void wait(Clock::duration most) {
            turn->wait(Clock::now() + most, [this] {
                EXPECT_EQ(waiting, Waits::kQueued);
                ++pauses;
                std::this_thread::sleep_for(1ms);
            });
            EXPECT_EQ(waiting, Waits::kNot);
        }
        Waits waiting = Waits::kNot;
        int changes = 0, ways_given = 0, pauses = 0;
        std::optional<RoomQueue::Turn> turn;
    };
    static Clock::duration time_of(const std::function<void()>& work) {
        const auto start = Clock::now();
        work();
        return Clock::now() - start;
    }

    RoomQueue queue;
};

TEST_F(Rooms, WhoCameFirstGoesFirst) {
    std::optional<Begin> a(queue);
    Begin b(queue);
    EXPECT_FALSE(a->turn->is_first());
    a->wait(10s);
    EXPECT_EQ(a->pauses, 1) << "nobody is before it";
    b.wait(20ms);
    EXPECT_TRUE(a->turn->is_first());
    EXPECT_FALSE(b.turn->is_first());
    EXPECT_GT(b.pauses, 1) << "it is not its turn until the first one is through";
    a->wait(10s);
    EXPECT_EQ(a->pauses, 2) << "its place is its own until then";
    std::thread ends([&] {
        std::this_thread::sleep_for(30ms);
        a.reset();
    });
    EXPECT_LT(time_of([&] { b.wait(10s); }), 5s);
    ends.join();
    EXPECT_EQ(b.changes, 2);
    EXPECT_TRUE(b.turn->is_first());
}

TEST_F(Rooms, NobodyWaitsLongerThanItMay) {
    Begin a(queue), b(queue);
    a.wait(0s);
    EXPECT_EQ(a.pauses, 1) << "a moment at least";
    EXPECT_LT(time_of([&] { b.wait(10ms); }), 5s);
}

TEST_F(Rooms, WhoHasWaitedForLongIsLetGoFirst) {
    Begin fresh(queue);
    fresh.turn->give_way();
    EXPECT_EQ(fresh.changes, 0) << "to nobody";
    std::optional<Begin> a(queue);
    a->wait(0s);
    fresh.turn->give_way();
    EXPECT_EQ(fresh.changes, 0) << "it has just come";
    std::this_thread::sleep_for(25ms);
    EXPECT_GE(time_of([&] { fresh.turn->give_way(); }), 50ms);
    EXPECT_EQ(fresh.changes, 1);
    EXPECT_EQ(fresh.ways_given, 1);
    EXPECT_EQ(fresh.waiting, Waits::kNot);
    std::thread ends([&] {
        std::this_thread::sleep_for(5ms);
        a.reset();
    });
    fresh.turn->give_way();
    ends.join();
    EXPECT_EQ(fresh.changes, 2);
    fresh.turn->give_way();
    EXPECT_EQ(fresh.changes, 2) << "nobody is left";
}

TEST_F(Rooms, AWayIsGivenAFewTimesOnly) {
    Begin stuck(queue), busy(queue);
    stuck.wait(0s);
    std::this_thread::sleep_for(25ms);
    for (int i = 0; i < 12; ++i) busy.turn->give_way();
    EXPECT_EQ(busy.changes, 8) << "it may wait for what it cannot have";
}

}  // namespace
}  // namespace ta
