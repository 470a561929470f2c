// What a partitioned step asks the transport, beside calls and messages that must not wait for it.
#include "src/kv/share/exchange.h"

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <thread>

#include "kernels/format/hash.h"
#include "tests/tiering/simulated_device.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

class AskedDevice final : public ta::testing::SimulatedDevice {
  public:
    explicit AskedDevice(int ordinal) : SimulatedDevice(uint64_t(ordinal), ordinal) {}
    Result<bool> reach(std::span<const int>) override { return asked(); }
    std::function<bool()> asked = [] { return true; };
};

struct Site {
    Site(const GroupId& id, uint32_t rank) {
        Seams seams;
        auto made = std::make_unique<AskedDevice>(int(rank));
        device = made.get();
        seams.device = std::move(made);
        Context::Options options;
        options.threads = 1;
        context = Context::create(std::move(options), std::move(seams)).take();
        GroupSettings s;
        s.rank = rank;
        s.ranks = 2;
        s.generation = 5;
        group = std::make_unique<Group>(context, s, join_local_group(id, rank, 2, device, {}).take());
        exchange = std::make_unique<Exchange>(*group);
        EXPECT_TRUE(group->start({exchange.get()}).ok());
    }
    ~Site() {
        group->stop();
        exchange->stop();
    }
    // Of the rank's device, named to the peer.
    Transport::Shared share_area() {
        area = {device->allocate(kBytes), [d = device](uint8_t* p) { d->deallocate(p, kBytes); }};
        return exchange->share_memory(area, kBytes).take();
    }
    static constexpr size_t kBytes = 4096;

    AskedDevice* device;  // the context's
    std::shared_ptr<Context> context;
    std::unique_ptr<Group> group;
    std::unique_ptr<Exchange> exchange;
    std::shared_ptr<uint8_t> area;
};

struct Pair {
    Pair() {
        for (const Site* s : {&first, &second}) EXPECT_EQ(s->group->wait_connected(-1), GroupState::kReady);
    }
    GroupId id = make_id(GroupKind::kLocal);
    Site first{id, 0}, second{id, 1};
};

TEST(Exchange, NobodyWaitsForARankThatAsksTheTransport) {
    Pair p;
    std::promise<void> asked, went_on;
    p.first.device->asked = [&] {
        asked.set_value();
        return went_on.get_future().wait_for(std::chrono::seconds(5)) == std::future_status::ready;
    };
    std::thread asks([&] { EXPECT_TRUE(p.first.exchange->all_reach().value()) << "another call waited for the answer"; });
    asked.get_future().wait();
    EXPECT_TRUE(p.first.exchange->add_tag(5).ok());
    went_on.set_value();
    asks.join();
}

TEST(Exchange, TheGroupOutlivesAQuestion) {
    Pair p;
    std::promise<void> asked;
    std::atomic<bool> stopped{false};
    p.first.device->asked = [&] {
        asked.set_value();
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return !stopped;
    };
    std::thread asks([&] { EXPECT_TRUE(p.first.exchange->all_reach().value()) << "the group may be gone"; });
    asked.get_future().wait();
    p.first.exchange->stop();
    stopped = true;
    asks.join();
    EXPECT_EQ(p.first.exchange->add_tag(5).status().code(), TA_E_STATE);
}

TEST(Exchange, RanksAgreeOnAStepAndFindTheirAreas) {
    constexpr uint64_t kTag = 3;
    Pair p;
    Site* const sites[] = {&p.first, &p.second};
    Transport::Shared shared[2];
    Exchange::Agreement agreed[2];
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) shared[r] = sites[r]->share_area();
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
            Exchange& e = *sites[r]->exchange;
            std::atomic<uint64_t> given_up{0};
            EXPECT_TRUE(e.add_tag(kTag).ok());
            EXPECT_TRUE(e.begin(kTag, 7, 9, shared[r].name).ok());
            Result<Exchange::Agreement> all = e.agree(kTag, Site::kBytes, &given_up);
            EXPECT_TRUE(all.ok());
            if (all.ok()) agreed[r] = all.take();
            e.end(kTag, false);
        });
    }
    for (std::thread& t : threads) t.join();
    EXPECT_EQ(agreed[0].identity, agreed[1].identity);
    for (size_t r = 0; r < 2; ++r) {
        ASSERT_EQ(agreed[r].areas.size(), 2u);
        EXPECT_EQ(agreed[r].areas[1 - r], sites[1 - r]->area);
        EXPECT_EQ(agreed[r].areas[r], nullptr);
    }
}

// Kernels write as far as an area reaches, whatever its rank says of it.
TEST(Exchange, AnAreaThatIsTooSmallIsNotWrittenTo) {
    constexpr uint64_t kTag = 3;
    Pair p;
    Site* const sites[] = {&p.first, &p.second};
    Transport::Shared shared[2];
    for (int r = 0; r < 2; ++r) shared[r] = sites[r]->share_area();
    std::promise<void> agreed;  // rank 1; before that it would hear that rank 0 gives up
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
            Exchange& e = *sites[r]->exchange;
            std::atomic<uint64_t> given_up{0};
            EXPECT_TRUE(e.add_tag(kTag).ok());
            EXPECT_TRUE(e.begin(kTag, 7, 9, shared[r].name).ok());
            const Status s = std::move(e.agree(kTag, Site::kBytes + uint64_t(r == 0), &given_up)).status();
            EXPECT_EQ(s.code(), r == 0 ? TA_E_CORRUPT : TA_OK);
            EXPECT_TRUE(r != 0 || s.detail()->rank == 1);
            if (r == 0) {
                agreed.get_future().wait();
            } else {
                agreed.set_value();
            }
            e.end(kTag, r == 0);
        });
    }
    for (std::thread& t : threads) t.join();
}

// Ranks that make the same calls on the sequences of a tag have the same history of it, whatever they do with other tags meanwhile.
TEST(Exchange, ATagHasTheHistoryOfItsOwnSequences) {
    Pair p;
    const auto history = [](const Site& at, std::initializer_list<uint64_t> before, uint64_t idles, uint64_t given_up = 0) {
        Exchange& e = *at.exchange;
        for (uint64_t tag : before) e.remove_tag(tag, e.add_tag(tag).value(), 0);
        const uint64_t first = e.add_tag(5).value();
        for (uint64_t i = 0; i < idles; ++i) e.end_idle(5, 9);
        e.remove_tag(5, first, given_up);
        const uint64_t then = e.add_tag(5).value();
        EXPECT_NE(first, then);
        e.remove_tag(5, 7, 0);  // where the ranks met, what was before does not matter
        return then;
    };
    const uint64_t one = history(p.first, {}, 1);
    EXPECT_EQ(history(p.second, {242, 6}, 1), one) << "242 had a counter with 5";
    EXPECT_EQ(history(p.first, {6}, 2), history(p.second, {242}, 2));
    EXPECT_NE(history(p.first, {}, 1), history(p.second, {}, 0, 1)) << "one rank alone has ended a step";
}

// A rank has no memory of all tags that it ever had.
TEST(Exchange, OldTagsAreForgotten) {
    Pair p;
    Exchange& e = *p.first.exchange;
    constexpr uint64_t kRemembered = 65536;
    for (uint64_t tag = 0; tag < 2 * kRemembered; ++tag) e.remove_tag(tag, e.add_tag(tag).value(), 0);
    EXPECT_EQ(e.add_tag(0).value(), 0u);
    for (const uint64_t tag : {kRemembered, 2 * kRemembered - 1}) EXPECT_NE(e.add_tag(tag).value(), 0u);
}

struct StepPayload {
    uint64_t nonce, arguments = 7;
    MemoryName area = {};
    uint64_t nonces[2] = {};
};

// What a rank says of sequences that this one does not have takes memory up to a limit. Steps that it left and sequences that it
// released take none, even if another rank says so later.
TEST(Exchange, ARankMakesAnotherKeepSoMuch) {
    constexpr uint64_t kTags = 200000;
    enum class Then { kStays, kLeaves, kReleases };
    for (const Then then : {Then::kStays, Then::kLeaves, Then::kReleases}) {
        Pair p;
        Exchange& e = *p.first.exchange;
        EXPECT_TRUE(e.add_tag(kTags).ok() && e.begin(kTags, 7, 9, {}).ok());
        const auto say = [&](MessageType type, uint64_t tag, const PayloadWriter& what) {
            p.second.group->send(0, type, tag, what.bytes());
        };
        struct StepOver {
            uint64_t nonce = 0, ends = 0, over[2] = {};
        };
        for (uint64_t tag = 1; tag <= kTags; ++tag) {
            say(MessageType::kStep, tag, PayloadWriter().put(StepPayload{tag}));
            if (tag == kTags || !p.first.group->health().ok()) break;
            if (then == Then::kReleases) say(MessageType::kStepOver, tag, PayloadWriter().put(StepOver{}));
            if (then != Then::kStays) say(MessageType::kStepOver, tag, PayloadWriter().put(StepOver{0, 0, {0, tag}}));
        }
        const Status met = std::move(e.exchange(kTags, {1, 8, std::vector<std::vector<float>>(2), 0})).status();
        ASSERT_EQ(met.code(), then == Then::kStays ? TA_E_PEER_LOST : TA_OK);
        EXPECT_TRUE(met.ok() || met.detail()->rank == 1);
        e.end(kTags, false);
    }
}

// A part that is sent again takes the place of the first; one of an earlier call cannot come.
TEST(Exchange, PartsComeInTheOrderOfTheCalls) {
    constexpr uint64_t kTag = 3;
    for (const bool in_order : {true, false}) {
        Pair p;
        Exchange& e = *p.first.exchange;
        EXPECT_TRUE(e.add_tag(kTag).ok());
        EXPECT_TRUE(e.begin(kTag, 7, 9, {}).ok());
        const auto say = [&](MessageType type, const PayloadWriter& what) {
            p.second.group->send(0, type, kTag, what.bytes());
        };
        say(MessageType::kStep, PayloadWriter().put(StepPayload{1}));
        const uint64_t nonces[] = {1, 1}, identity = hash_bytes(nonces, sizeof nonces) | 1;
        for (const auto& [number, value] : {std::pair(1, 5.0f), {1, 6.0f}, {in_order ? 2 : 0, 7.0f}})
            say(MessageType::kPart,
                PayloadWriter().put(identity).put(uint64_t(number)).put(uint64_t{8}).put(uint64_t{1}).put(value));
        if (!in_order) {
            for (int i = 0; i < 20000 && p.first.group->health().ok(); ++i)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            const Status health = p.first.group->health();
            ASSERT_EQ(health.code(), TA_E_PEER_LOST);
            EXPECT_EQ(health.detail()->rank, 1);
        }
        for (const uint64_t number : {1, 2}) {
            if (!in_order) break;
            std::this_thread::sleep_for(std::chrono::milliseconds(number == 1 ? 50 : 0));
            Result<Exchange::Parts> got = e.exchange(kTag, {number, 8, std::vector<std::vector<float>>(2), 1});
            ASSERT_TRUE(got.ok());
            EXPECT_EQ(got.value()[1][0], number == 1 ? 6.0f : 7.0f);
        }
        e.end(kTag, false);
    }
}

}  // namespace
}  // namespace ta::share
