// Whom a rank takes for lost, what it says of that, and who may join.
#include "tiering/share/group.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>

#include "kernels/format/hash.h"
#include "tests/tiering/share/lying_transport.h"
#include "tests/tiering/simulated_device.h"
#include "tiering/share/host.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

using std::chrono::milliseconds;
using ta::testing::LyingTransport;

// Holds up the thread that takes in messages.
class Slow final : public Group::Service {
  public:
    explicit Slow(milliseconds pause) : pause_(pause) {}
    bool takes(MessageType type) const override { return type == MessageType::kPart; }
    Status on_message(const Message&) override {
        std::this_thread::sleep_for(pause_);
        ++calls;
        return {};
    }
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status&) override {}
    std::atomic<int> calls{0};

  private:
    const milliseconds pause_;
};

std::shared_ptr<Context> cpu_context() {
    Context::Options options;
    options.threads = 1;
    return Context::create(std::move(options), Seams{}).take();
}

GroupSettings settings_of(uint32_t rank, uint32_t ranks, milliseconds silence = milliseconds(10000)) {
    GroupSettings s;
    s.rank = rank;
    s.ranks = ranks;
    s.generation = 1;
    s.silence = silence;
    return s;
}

// All ranks of a local group; ready.
std::vector<std::unique_ptr<Group>> make_groups(uint32_t n, milliseconds silence_of_0, Group::Service& service) {
    const std::shared_ptr<Context> context = cpu_context();
    const GroupId id = make_id(GroupKind::kLocal);
    std::vector<std::unique_ptr<Group>> groups;
    for (uint32_t r = 0; r < n; ++r) {
        const GroupSettings s = settings_of(r, n, r == 0 ? silence_of_0 : milliseconds(10000));
        groups.push_back(std::make_unique<Group>(context, s, join_local_group(id, r, n, nullptr, {}).take()));
        EXPECT_TRUE(groups[r]->start({&service}).ok());
    }
    for (const auto& group : groups) EXPECT_EQ(group->wait_connected(-1), GroupState::kReady);
    return groups;
}

// Until the group has ended, or some seconds are over.
Status end_of(const Group& group) {
    for (int i = 0; i < 5000 && group.health().ok(); ++i) std::this_thread::sleep_for(milliseconds(1));
    return group.health();
}

TEST(Group, ARankThatWasHeldUpHearsItsPeersFirst) {
    Slow slow(milliseconds(700));
    const std::vector<std::unique_ptr<Group>> groups = make_groups(3, milliseconds(500), slow);
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

TEST(Group, ASilentRankIsFoundWhileAnotherOneTalks) {
    Slow slow(milliseconds(1));
    const std::vector<std::unique_ptr<Group>> groups = make_groups(3, milliseconds(200), slow);
    constexpr int kMessages = 3000;
    for (int i = 0; i < kMessages; ++i) groups[1]->send(0, MessageType::kPart, 0, {});
    const Status s = end_of(*groups[0]);
    EXPECT_LT(slow.calls, kMessages) << "all was taken in before";
    ASSERT_EQ(s.code(), TA_E_PEER_LOST);
    EXPECT_EQ(s.detail()->rank, 2) << s.detail()->message;
    for (const auto& group : groups) group->stop();
}

TEST(Group, AllRanksSayTheSameOfTheEnd) {
    Slow slow(milliseconds(0));
    const std::vector<std::unique_ptr<Group>> groups = make_groups(4, milliseconds(10000), slow);
    groups[2]->end(fail(TA_E_MEMORY, "nothing is left").rank(2));
    for (const uint32_t r : {0u, 1u, 3u}) {
        const Status s = end_of(*groups[r]);
        ASSERT_EQ(s.code(), TA_E_PEER_LOST);
        EXPECT_STREQ(s.detail()->message, "the group ended at rank 2: nothing is left");
        EXPECT_EQ(s.detail()->rank, 2);
    }
    for (const auto& group : groups) group->stop();
}

// A rank that is no more than its transport.
struct Raw {
    explicit Raw(Group::Service& service, milliseconds connect = milliseconds(5000), uint32_t ranks = 2)
        : peer(join_local_group(id, 1, ranks, nullptr, {}).take()) {
        GroupSettings s = settings_of(0, ranks);
        s.connect = connect;
        group = std::make_unique<Group>(cpu_context(), s, join_local_group(id, 0, ranks, nullptr, {}).take());
        EXPECT_TRUE(group->start({&service}).ok());
    }
    const GroupId id = make_id(GroupKind::kLocal);
    std::unique_ptr<Transport> peer;
    std::unique_ptr<Group> group;
};

// A message of rank 1 for rank 0; the first one.
Packet message(MessageType type, std::span<const uint8_t> payload, uint64_t number = 1) {
    MessageHeader h{};
    h.type = uint16_t(type);
    h.generation = h.from = 1;
    h.number = number;
    return pack(h, payload);
}

TEST(Group, AnEndGoesOnAsItCame) {
    Slow slow(milliseconds(0));
    const Raw raw(slow, milliseconds(5000), 4);
    const Ending ending = Ending::of(fail(TA_E_IO, "a disk")).relayed(3);  // from rank 3 by way of rank 1
    const std::vector<uint8_t> payload = PayloadWriter().put(ending).bytes();
    raw.peer->send(0, message(MessageType::kEnded, payload), false);
    EXPECT_STREQ(end_of(*raw.group).detail()->message, "the group ended at rank 3: a disk");
    for (;;) {
        const std::optional<Transport::Received> got = raw.peer->receive(Clock::now() + std::chrono::seconds(5));
        ASSERT_TRUE(got.has_value());
        const Message m = unpack(got->packet, 1, 0, 1).take();
        if (MessageType(m.header.type) != MessageType::kEnded) continue;
        EXPECT_TRUE(m.payload == payload);
        break;
    }
}

// What no rank of this group says of an end ends it all the same, and is not passed on.
TEST(Group, AnEndThatCannotBeIsNotBelieved) {
    const struct {
        const char* what;
        std::function<void(Ending&)> change;
    } lies[] = {{"no failure", [](Ending& e) { e.status = TA_OK; }},
                {"no status", [](Ending& e) { e.status = 0x0109; }},
                {"a status of no kind", [](Ending& e) { e.status = -7; }},
                {"a rank that is none", [](Ending& e) { e.rank = 2; }},
                {"a rank below all", [](Ending& e) { e.rank = INT32_MIN; }},
                {"an origin that is none", [](Ending& e) { e.origin = INT32_MAX; }},
                {"an origin below all", [](Ending& e) { e.origin = -2; }},
                {"a block below all", [](Ending& e) { e.block = -2; }},
                {"a bit of a later version", [](Ending& e) { e.reserved = 1; }},
                {"a text without end", [](Ending& e) { std::memset(e.text, 'x', sizeof e.text); }}};
    for (const auto& lie : lies) {
        SCOPED_TRACE(lie.what);
        Slow slow(milliseconds(0));
        const Raw raw(slow);
        Ending ending = Ending::of(fail(TA_E_IO, "a disk").rank(1));
        ASSERT_TRUE(ending.is_valid(2));
        lie.change(ending);
        raw.peer->send(0, message(MessageType::kEnded, PayloadWriter().put(ending).bytes()), false);
        const Status s = end_of(*raw.group);
        EXPECT_EQ(s.code(), TA_E_PEER_LOST);
        EXPECT_EQ(s.detail()->rank, 1);
        EXPECT_STREQ(s.detail()->message, "rank 1 sent what is no message of the protocol");
    }
}

// Messages that wait for one that is missing are kept up to a limit; the next one has none.
TEST(Group, WhatOvertakesOthersTakesSoMuchMemory) {
    constexpr size_t kMost = size_t{64} << 20;
    const std::vector<uint8_t> large(kMost / 8);
    for (const bool in_order : {true, false}) {
        Slow slow(milliseconds(0));
        const Raw raw(slow);
        const uint64_t first = in_order ? 1 : 2;
        for (uint64_t i = 0; i < 10; ++i) raw.peer->send(0, message(MessageType::kPart, large, first + i), false);
        if (in_order) {
            for (int i = 0; i < 5000 && slow.calls < 10; ++i) std::this_thread::sleep_for(milliseconds(1));
            EXPECT_EQ(slow.calls, 10);
            EXPECT_TRUE(raw.group->health().ok());
        } else {
            const Status s = end_of(*raw.group);
            ASSERT_EQ(s.code(), TA_E_PEER_LOST);
            EXPECT_EQ(s.detail()->rank, 1);
        }
    }
}

TEST(Message, ValuesThatAreNotThereTakeNoMemory) {
    const PayloadWriter payload = PayloadWriter().put(uint32_t{1}).put(uint32_t{2}).put(uint32_t{3});
    PayloadReader reader(payload.bytes());
    std::vector<uint32_t> values;
    EXPECT_FALSE(reader.get_all(uint64_t{1} << 62, values));
    EXPECT_FALSE(reader.get_all(4, values));
    EXPECT_EQ(values.capacity(), 0u);
    EXPECT_TRUE(reader.get_all(2, values));
    EXPECT_EQ(values, (std::vector<uint32_t>{1, 2}));
    EXPECT_FALSE(reader.at_end());
    EXPECT_TRUE(reader.get_all(1, values));
    EXPECT_EQ(values, std::vector<uint32_t>{3});
    EXPECT_TRUE(reader.at_end());
}

// A transport whose peer writes its last words, and then ends, between this rank's looks for messages and for the living.
class EndsMeanwhile final : public LyingTransport {
  public:
    EndsMeanwhile(std::unique_ptr<Transport> real, std::function<void()> last_words)
        : LyingTransport(std::move(real), [](auto&&...) { return true; }), last_words_(std::move(last_words)) {}
    bool alive(uint32_t) const override {
        if (!std::exchange(said_, true)) last_words_();
        return false;
    }

  private:
    const std::function<void()> last_words_;
    mutable bool said_ = false;  // by the thread that takes in messages
};

TEST(Group, LastWordsAreHeardBeforeARankIsGivenUp) {
    const GroupId id = make_id(GroupKind::kLocal);
    const std::unique_ptr<Transport> peer = join_local_group(id, 1, 2, nullptr, {}).take();
    const auto say = [&] {  // more than one: the first does not end the group
        peer->send(0, message(MessageType::kWelcome, {}), false);
        const Ending ending = Ending::of(fail(TA_E_MEMORY, "nothing is left").rank(1));
        peer->send(0, message(MessageType::kEnded, PayloadWriter().put(ending).bytes(), 2), false);
    };
    Group group(cpu_context(), settings_of(0, 2),
                std::make_unique<EndsMeanwhile>(join_local_group(id, 0, 2, nullptr, {}).take(), say));
    ASSERT_TRUE(group.start({}).ok());
    EXPECT_STREQ(end_of(group).detail()->message, "the group ended at rank 1: nothing is left");
    group.stop();
}

// One that says nothing is found all the same.
TEST(Group, ARankThatEndsWithoutAWordIsFound) {
    const GroupId id = make_id(GroupKind::kLocal);
    Group group(cpu_context(), settings_of(0, 2),
                std::make_unique<EndsMeanwhile>(join_local_group(id, 0, 2, nullptr, {}).take(), [] {}));
    ASSERT_TRUE(group.start({}).ok());
    EXPECT_STREQ(end_of(group).detail()->message, "rank 1 has ended: its process is gone");
    group.stop();
}

TEST(Group, AnotherVersionIsAMismatch) {
    Slow slow(milliseconds(0));
    const Raw raw(slow);
    Packet forged = message(MessageType::kHello, {});
    forged[offsetof(MessageHeader, version)] += 1;
    const uint64_t hash = hash_bytes(forged.data(), offsetof(MessageHeader, hash));
    std::memcpy(forged.data() + offsetof(MessageHeader, hash), &hash, sizeof hash);
    raw.peer->send(0, std::move(forged), false);
    const Status s = end_of(*raw.group);
    EXPECT_EQ(s.code(), TA_E_MISMATCH);
    EXPECT_EQ(s.detail()->rank, 1) << s.detail()->message;
    EXPECT_NE(std::strstr(s.detail()->message, "version"), nullptr) << s.detail()->message;
}

TEST(Group, WhoJoinedAndDoesNotAnswerIsNoAbsentRank) {
    Slow slow(milliseconds(0));
    const Raw raw(slow, milliseconds(50));
    EXPECT_EQ(raw.group->wait_connected(-1), GroupState::kEnded);
    EXPECT_STREQ(raw.group->health().detail()->message, "rank 1 did not answer within 50 ms");
}

TEST(Group, OneThatIsNeverStartedLeaves) {
    Slow slow(milliseconds(0));
    Raw raw(slow);
    Group(cpu_context(), settings_of(1, 2), std::move(raw.peer)).stop();
    const Status s = end_of(*raw.group);
    EXPECT_EQ(s.code(), TA_E_PEER_LOST);
    EXPECT_STREQ(s.detail()->message, "rank 1 left the group");
}

TEST(Group, NobodyJoinsWhatHasEnded) {
    const GroupId id = make_id(GroupKind::kLocal);
    const auto join = [&id](uint32_t rank) { return join_local_group(id, rank, 2, nullptr, {}); };
    ASSERT_TRUE(join(0).ok());
    for (const uint32_t rank : {0u, 1u}) EXPECT_EQ(std::move(join(rank)).status().code(), TA_E_STALE);
    const uint64_t name = uint64_t(Clock::now().time_since_epoch().count());
    {
        const auto a = join_host_group(name, 0, 2, nullptr).take(), b = join_host_group(name, 1, 2, nullptr).take();
        // All have joined: the name is gone.
        while (!a->is_warm() || !b->is_warm()) (void)a->receive(Time::min()), (void)b->receive(Time::min());
    }
    EXPECT_EQ(std::move(join_host_group(name, 0, 2, nullptr)).status().code(), TA_E_STALE);
    EndedGroups ended;
    for (uint64_t n = 1; n <= EndedGroups::kMost + 1; ++n) ended.add(n);
    EXPECT_TRUE(!ended.has(1) && ended.has(2) && ended.has(EndedGroups::kMost + 1));
}

// More than a ring holds, from a rank that leaves at once.
TEST(Group, LastWordsOfAFullRingArrive) {
    const uint64_t name = uint64_t(Clock::now().time_since_epoch().count()) + 1;
    std::unique_ptr<Transport> a = join_host_group(name, 0, 2, nullptr).take(), b = join_host_group(name, 1, 2, nullptr).take();
    while (!a->is_warm() || !b->is_warm()) (void)a->receive(Time::min()), (void)b->receive(Time::min());
    const Packet large(size_t{4} << 20, 7), last(100, 9);
    a->send(1, large, false);
    a->send(1, last, false);
    std::thread leaves([&] { a.reset(); });
    std::vector<Packet> got;
    while (got.size() < 2) {
        std::optional<Transport::Received> received = b->receive(Clock::now() + std::chrono::seconds(2));
        if (!received) break;
        got.push_back(std::move(received->packet));
    }
    leaves.join();
    ASSERT_EQ(got.size(), 2u);
    EXPECT_TRUE(got[0] == large && got[1] == last);
}

// What another process would find it by.
class SharedDevice final : public ta::testing::SimulatedDevice {
  public:
    explicit SharedDevice(int ordinal) : SimulatedDevice(uint64_t(ordinal), ordinal) {}
    Result<ExportedMemory> export_memory(const uint8_t*) override { return ExportedMemory{}; }
    Result<bool> reach(std::span<const int>) override { return false; }
};

// However much of it a message says that there is.
TEST(Group, OfSharedMemoryThereIsWhatItsRankShared) {
    constexpr uint64_t kBytes = 4096;
    const uint64_t name = uint64_t(Clock::now().time_since_epoch().count()) + 2;
    const GroupId id = make_id(GroupKind::kLocal);
    for (const bool host : {false, true}) {
        SCOPED_TRACE(host ? "host" : "local");
        std::vector<std::shared_ptr<SharedDevice>> devices;
        std::vector<std::unique_ptr<Transport>> ranks;
        for (uint32_t r = 0; r < 3; ++r) {
            devices.push_back(std::make_shared<SharedDevice>(int(r)));
            ranks.push_back(host ? join_host_group(name, r, 3, devices[r]).take()
                                 : join_local_group(id, r, 3, devices[r].get(), {}).take());
        }
        std::shared_ptr<uint8_t> memory(devices[1]->allocate(kBytes), [&](uint8_t* p) { devices[1]->deallocate(p, kBytes); });
        Transport::Shared shared = ranks[1]->share_memory(memory, kBytes).take();
        EXPECT_EQ(ranks[0]->find_memory(1, shared.name, kBytes).value(), memory);
        const Status s = std::move(ranks[0]->find_memory(1, shared.name, kBytes + 1)).status();
        EXPECT_EQ(s.code(), TA_E_CORRUPT);
        EXPECT_EQ(s.detail()->rank, 1);
        EXPECT_EQ(ranks[0]->find_memory(2, shared.name, kBytes).value(), nullptr) << "it is another rank's";
        shared = {};
        memory = {};
        EXPECT_EQ(ranks[0]->find_memory(1, shared.name, kBytes).value(), nullptr);
        ranks.clear();
    }
}

}  // namespace
}  // namespace ta::share
