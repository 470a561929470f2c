// Whom a rank takes for lost.
#include "tiering/share/group.h"

#include <gtest/gtest.h>

#include <thread>

#include "tiering/share/local.h"

namespace ta::share {
namespace {

using std::chrono::milliseconds;

// Holds up the thread that takes in messages.
class Slow final : public Group::Service {
  public:
    bool takes(MessageType type) const override { return type == MessageType::kPart; }
    Status on_message(const Message&) override {
        std::this_thread::sleep_for(milliseconds(700));
        ++calls;
        return {};
    }
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status&) override {}
    std::atomic<int> calls{0};
};

TEST(Group, ARankThatWasHeldUpHearsItsPeersFirst) {
    Context::Options options;
    options.threads = 1;
    const std::shared_ptr<Context> context = Context::create(std::move(options), Seams{}).take();
    const GroupId id = make_id(GroupKind::kLocal);
    Slow slow;
    std::vector<std::unique_ptr<Group>> groups;
    for (uint32_t r = 0; r < 3; ++r) {
        GroupSettings s;
        s.rank = r;
        s.ranks = 3;
        s.generation = 1;
        if (r == 0) s.silence = milliseconds(500);
        groups.push_back(std::make_unique<Group>(context, s, join_local_group(id, r, 3, nullptr, {}).take()));
        ASSERT_TRUE(groups[r]->start({&slow}).ok());
    }
    for (const auto& group : groups) ASSERT_EQ(group->wait_connected(-1), GroupState::kReady);
    const auto talk = [&](uint32_t from) { groups[from]->send(0, MessageType::kAlive, 0, {}); };
    groups[1]->send(0, MessageType::kPart, 0, {});
    for (int i = 0; i < 15; ++i) {
        std::this_thread::sleep_for(milliseconds(100));
        for (const uint32_t r : {1u, 2u}) talk(r);
    }
    EXPECT_EQ(slow.calls, 1);
    EXPECT_TRUE(groups[0]->health().ok()) << groups[0]->health().detail()->message;
    for (int i = 0; i < 20; ++i) {  // one that is silent is found all the same
        std::this_thread::sleep_for(milliseconds(100));
        talk(1);
    }
    EXPECT_EQ(groups[0]->health().detail()->rank, 2);
    for (const auto& group : groups) group->stop();
}

}  // namespace
}  // namespace ta::share
