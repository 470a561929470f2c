// A rank that cannot prove to know a namespace learns nothing of it, and gets no block.
#include "src/kv/share/spaces.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <deque>
#include <future>
#include <thread>

#include "src/attend/plan.h"
#include "src/kv/share/transfers.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

// A rank whose messages the test reads and forges.
class Liar final : public Group::Service {
  public:
    bool takes(MessageType) const override { return true; }
    Status on_message(const Message& m) override {
        const std::lock_guard lock(mutex_);
        messages_.push_back(m);
        came_.notify_all();
        return {};
    }
    Time on_time(Time) override { return Time::max(); }
    void on_end(const Status&) override {}

    // The next message within so many milliseconds; its type is 0 where none came.
    Message next(int milliseconds = 20000) {
        std::unique_lock lock(mutex_);
        Message m{};
        if (!came_.wait_for(lock, std::chrono::milliseconds(milliseconds), [this] { return !messages_.empty(); })) return m;
        m = std::move(messages_.front());
        messages_.pop_front();
        return m;
    }

  private:
    std::mutex mutex_;
    std::condition_variable came_;
    std::deque<Message> messages_;
};

struct JoinPayload {
    SpaceName name;
    std::array<uint8_t, 32> proof;
    uint32_t answers, reserved;
};

struct ReadyNothing {
    uint64_t window = 1, on_gpu = 0, blocks = 0;
};

struct World {
    World() {
        for (uint32_t r = 0; r < 2; ++r) {
            Context::Options options;
            options.threads = 1;
            contexts[r] = Context::create(std::move(options), Seams{}).take();
            GroupSettings s;
            s.rank = r;
            s.ranks = 2;
            s.generation = 77;
            groups[r] = std::make_unique<Group>(contexts[r], s, join_local_group(id, r, 2, nullptr, {}).take());
        }
        Result<Geometry> g = Geometry::make({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 4});
        ta_numerics settings{};
        Result<Numerics> n = resolve_numerics(&settings, g.value().shapes);
        pool = Pool::create(contexts[0], g.take(), n.take(), 1 << 20, 4, TierSettings{}).take();
        salt[0] = 1;
        space = pool->prefixes().create(salt, UINT64_MAX).value();
        spaces = std::make_unique<SharedSpaces>(*groups[0]);
        transfers = std::make_unique<Transfers>(*groups[0], spaces.get());
        EXPECT_TRUE(transfers->start().ok());
        EXPECT_TRUE(groups[0]->start({transfers.get(), spaces.get()}).ok());
        EXPECT_TRUE(groups[1]->start({&liar}).ok());
        for (const auto& group : groups) EXPECT_EQ(group->wait_connected(-1), GroupState::kReady);
        // A block under one key. Its bytes are of no interest.
        const PageKind kind = PageKind::kToken;
        BlockPtr block = std::move(pool->blocks().acquire({&kind, 1}).value()[0]);
        block->seal(pool->geometry(), pool->fingerprint(), 0, uint32_t(kPageTokens));
        keys = pool->prefixes().hash_keys(space, std::vector<uint8_t>(32, 5)).take();
        EXPECT_TRUE(pool->publish_blocks(space, keys, {&block, 1}).ok());
    }
    ~World() {
        for (const auto& group : groups) group->stop();
        spaces->stop();
    }
    // The honest rank's message when it joins.
    JoinPayload join() {
        EXPECT_TRUE(spaces->join(pool, space).ok());
        const Message m = liar.next();
        EXPECT_EQ(m.header.type, uint16_t(MessageType::kSpaceJoin));
        JoinPayload join{};
        EXPECT_EQ(m.payload.size(), sizeof join);
        std::memcpy(&join, m.payload.data(), std::min(m.payload.size(), sizeof join));
        return join;
    }
    void say(MessageType type, uint64_t channel, const PayloadWriter& payload) {
        groups[1]->send(0, type, channel, payload.bytes());
    }
    // The liar joins as one that knows the salt.
    void prove(JoinPayload join) {
        struct {
            char label[32] = "turboattention proof of a salt";
            uint64_t generation = 77, fingerprint = 0;
            uint32_t from = 1, to = 0;
        } signed_bytes;
        signed_bytes.fingerprint = pool->fingerprint();
        join.proof =
            pool->prefixes().sign(space, {reinterpret_cast<const uint8_t*>(&signed_bytes), sizeof signed_bytes}).value();
        say(MessageType::kSpaceJoin, 0, PayloadWriter().put(join));
        EXPECT_EQ(liar.next().header.type, uint16_t(MessageType::kSpaceJoin));  // the answer
        EXPECT_EQ(liar.next().header.type, uint16_t(MessageType::kHints));      // the table
    }
    void fetch(const SpaceName& name, uint64_t number = 1) {
        PayloadWriter p;
        say(MessageType::kFetch, uint64_t{1} << 40 | number, p.put(name).put(uint64_t{1}).put(keys[0]).put(uint64_t{0}));
    }

    // The honest rank's group ends for what the liar said.
    void await_end() const {
        for (int i = 0; i < 5000 && groups[0]->health().ok(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(groups[0]->health().code(), TA_E_PEER_LOST);
    }
    ta_seq add_sequence(int32_t tokens) const {
        const ta_seq seq = pool->sequences().create().value();
        Plan plan(pool);
        const int32_t none = 0;
        EXPECT_TRUE(plan.begin({&seq, 1}, &tokens, &none).ok());
        std::vector<float> x(size_t(tokens) * 64, 0.5f);
        ta_tensor t{};
        t.struct_size = sizeof t;
        t.dtype = TA_DTYPE_F32;
        t.data = x.data();
        t.tokens = tokens;
        t.heads = 1;
        t.head_dim = 64;
        const TensorView view = view_tensor(t, "x").value();
        EXPECT_TRUE(plan.append(0, view, view).ok());
        EXPECT_TRUE(plan.end().ok());
        return seq;
    }

    GroupId id = make_id(GroupKind::kLocal);
    std::shared_ptr<Context> contexts[2];
    std::unique_ptr<Group> groups[2];
    std::shared_ptr<Pool> pool;
    Salt salt{};
    Tenant space = 0;
    std::vector<BlockKey> keys;
    std::unique_ptr<SharedSpaces> spaces;
    std::unique_ptr<Transfers> transfers;
    Liar liar;
};

// While it lives another thread has the lock of the pool's published entries: who looks for blocks there waits.
class HeldEntries {
  public:
    explicit HeldEntries(World& w) {
        const auto feed = std::make_shared<PrefixFeed>([this] {
            held_.set_value();
            released_.get_future().wait();
        });
        EXPECT_TRUE(w.pool->prefixes().follow(w.space, feed).ok());
        holds_ = std::thread([&w] { EXPECT_TRUE(w.pool->prefixes().destroy(w.space).ok()); });
        held_.get_future().wait();
    }
    ~HeldEntries() {
        released_.set_value();
        holds_.join();
    }

  private:
    std::promise<void> held_, released_;
    std::thread holds_;
};

TEST(Spaces, WhoHasNotProvedTheSaltGetsNothing) {
    World w;
    const JoinPayload join = w.join();
    // It knows the name from that, and even the hashed key.
    w.fetch(join.name);
    const Message answer = w.liar.next();
    EXPECT_EQ(answer.header.type, uint16_t(MessageType::kOffer));
    EXPECT_TRUE(answer.payload.empty()) << "a block is offered to a rank that may not have it";
    EXPECT_EQ(w.liar.next(300).header.type, 0) << "a rank is told what it may not know";
    EXPECT_TRUE(w.groups[0]->health().ok());
}

// Neither a guess nor the proof that the other rank gave.
TEST(Spaces, ProofsCannotBeMadeUpOrRepeated) {
    for (const bool repeated : {false, true}) {
        for (const uint32_t answers : {0u, 1u}) {
            World w;
            JoinPayload forged = w.join();
            if (!repeated) forged.proof[7] ^= 1;
            forged.answers = answers;
            w.say(MessageType::kSpaceJoin, 0, PayloadWriter().put(forged));
            w.await_end();
            const Status why = w.groups[0]->health();
            EXPECT_EQ(why.detail()->rank, 1);
            EXPECT_EQ(w.liar.next(50).header.type, 0);
        }
    }
}

TEST(Spaces, NamesTellNothingOfTheSaltAndDifferByGroup) {
    World w;
    const JoinPayload join = w.join();
    uint64_t tag = w.pool->prefixes().tag_of(w.space), name;
    std::memcpy(&name, join.name.data(), sizeof name);
    EXPECT_NE(name, tag);
    EXPECT_EQ(std::search(join.proof.begin(), join.proof.end(), w.salt.begin(), w.salt.begin() + 4), join.proof.end());
    // Of the rank that proves it, a fetch is served.
    w.prove(join);
    w.fetch(join.name);
    const Message offer = w.liar.next();
    EXPECT_EQ(offer.header.type, uint16_t(MessageType::kOffer));
    EXPECT_FALSE(offer.payload.empty());
}

// Messages that no healthy rank sends end the group.
TEST(Spaces, MessagesThatAreNoneEndTheGroup) {
    const auto ends = [](auto say) {
        World w;
        const JoinPayload join = w.join();
        say(w, join);
        w.await_end();
    };
    ends([](World& w, const JoinPayload&) { w.say(MessageType::kSpaceJoin, 0, PayloadWriter().put(uint8_t{1})); });
    ends([](World& w, const JoinPayload& join) {
        JoinPayload odd = join;
        odd.answers = 2;
        w.say(MessageType::kSpaceJoin, 0, PayloadWriter().put(odd));
    });
    for (const MessageType type :
         {MessageType::kSpaceAbsent, MessageType::kSpaceLeave, MessageType::kHints, MessageType::kFetch})
        ends([type](World& w, const JoinPayload&) { w.say(type, uint64_t{1} << 40, PayloadWriter().put(uint32_t{1})); });
    // More hints than there are, a tier that is none.
    ends([](World& w, const JoinPayload& join) {
        w.say(MessageType::kHints, 0,
              PayloadWriter().put(join.name).put(uint64_t{2}).put(uint64_t{1}).put(w.keys[0]).put(uint64_t{1}));
    });
    ends([](World& w, const JoinPayload& join) {
        w.say(MessageType::kHints, 0,
              PayloadWriter().put(join.name).put(uint64_t{1}).put(uint64_t{1}).put(w.keys[0]).put(uint64_t{0x0401}));
    });
    // A fetch on a channel of another rank, one whose blocks are not in order, one of more blocks than it names.
    const auto fetch = [](uint64_t channel, uint64_t blocks, std::vector<uint64_t> indices) {
        return [=](World& w, const JoinPayload& join) {
            PayloadWriter p;
            p.put(join.name).put(blocks);
            for (const uint64_t i : indices) p.put(w.keys[0]).put(i);
            w.say(MessageType::kFetch, channel, p);
        };
    };
    ends(fetch(1, 1, {0}));
    ends(fetch(uint64_t{1} << 40 | 1, 2, {1, 1}));
    ends(fetch(uint64_t{1} << 40 | 1, UINT64_MAX, {1}));
    // Blocks are asked for before they can have been offered.
    for (const MessageType type : {MessageType::kReady, MessageType::kAskLease}) {
        ends([type](World& w, const JoinPayload& join) {
            w.prove(join);
            const HeldEntries held(w);
            w.fetch(join.name);
            PayloadWriter nothing;
            w.say(type, uint64_t{1} << 40 | 1,
                  type == MessageType::kReady ? nothing.put(ReadyNothing{}) : nothing.put(uint64_t{0}));
            w.await_end();
        });
    }
}

// A rank that serves as many fetches as it may has nothing to give: whoever asks goes on elsewhere.
TEST(Spaces, AFetchBeyondTheLimitIsAnsweredWithNothing) {
    constexpr uint64_t kMostServed = 1024;
    World w;
    const JoinPayload join = w.join();
    w.prove(join);
    for (uint64_t n = 1; n <= kMostServed + 1; ++n) w.fetch(join.name, n);
    for (uint64_t n = 1; n <= kMostServed + 1; ++n) {
        const Message m = w.liar.next();
        ASSERT_EQ(m.header.type, uint16_t(MessageType::kOffer)) << n;
        EXPECT_EQ(m.payload.empty(), (m.header.channel & UINT32_MAX) > kMostServed) << m.header.channel;
    }
    EXPECT_TRUE(w.groups[0]->health().ok());
}

// A source keeps what it moves if the destination cannot have it: it has asked for nothing, or for nothing that was offered.
TEST(Spaces, NothingArrivesThatWasNotSent) {
    for (const bool full : {false, true}) {
        World w;
        const ta_seq seq = w.add_sequence(full ? 128 : 130);
        const uint64_t ticket = w.transfers->send(w.pool, seq, 1, 5, true).value();
        const Message offer = w.liar.next();
        ASSERT_EQ(offer.header.type, uint16_t(MessageType::kOffer));
        w.say(MessageType::kArrived, offer.header.channel, PayloadWriter());
        // Full blocks may be there already.
        EXPECT_EQ(w.transfers->wait(ticket, -1).value().state, full ? TA_MOVE_DONE : TA_MOVE_FAILED);
        EXPECT_EQ(w.pool->sequences().snapshot(seq).ok(), !full);
        EXPECT_EQ(w.groups[0]->health().ok(), full);
    }
    // Nothing arrives before the offer.
    World w;
    const JoinPayload join = w.join();
    w.prove(join);
    const HeldEntries held(w);
    w.fetch(join.name);
    w.say(MessageType::kArrived, uint64_t{1} << 40 | 1, PayloadWriter());
    w.await_end();
}

// A rank begins each transfer on a channel of its own.
TEST(Spaces, AChannelServesOneTransfer) {
    for (const bool again : {false, true}) {
        World w;
        const JoinPayload join = w.join();
        w.prove(join);
        w.fetch(join.name, 7);
        EXPECT_EQ(w.liar.next().header.type, uint16_t(MessageType::kOffer));
        w.say(MessageType::kOffer, uint64_t{1} << 40 | (again ? 7 : 8), PayloadWriter().put(std::array<uint64_t, 16>{}));
        w.fetch(join.name, 9);
        if (again) {
            w.await_end();
            ASSERT_FALSE(w.groups[0]->health().ok());
            EXPECT_EQ(w.groups[0]->health().detail()->rank, 1);
        } else {
            EXPECT_EQ(w.liar.next().header.type, uint16_t(MessageType::kOffer));
        }
    }
}

// A rank asks for as many blocks as fit in a leg, so that what a fetch takes of memory has a limit.
TEST(Spaces, AFetchOfMoreThanALegEndsTheGroup) {
    for (const bool over : {false, true}) {
        World w;
        const JoinPayload join = w.join();
        w.prove(join);
        const uint64_t n = kMostAsked + over;
        PayloadWriter many;
        many.put(join.name).put(n);
        for (uint64_t i = 0; i < n; ++i) many.put(w.keys[0]).put(i);
        w.say(MessageType::kFetch, uint64_t{1} << 40 | 1, many);
        if (over) {
            w.await_end();
            ASSERT_FALSE(w.groups[0]->health().ok());
            EXPECT_EQ(w.groups[0]->health().detail()->rank, 1);
        } else {
            EXPECT_EQ(w.liar.next().header.type, uint16_t(MessageType::kOffer));
        }
    }
}

// Entries of a rank that were too many to keep are never told again: a lookup must not wait for them.
TEST(Spaces, LookupsDoNotWaitForARankThatHasToldAll) {
    World w;
    const JoinPayload join = w.join();
    w.prove(join);
    struct {
        BlockKey key{};
        uint64_t there = 1;
    } hint;
    constexpr uint64_t kAll = (1 << 20) + 1, kAtOnce = 1 << 17;
    for (uint64_t i = 0; i < kAll;) {
        const uint64_t n = std::min(kAtOnce, kAll - i);
        PayloadWriter p;
        p.put(join.name).put(n).put(uint32_t(i == 0)).put(uint32_t(i + n == kAll));
        for (uint64_t k = 0; k < n; ++k, ++i) {
            std::memcpy(hint.key.data() + 8, &i, sizeof i);
            p.put(hint);
        }
        w.say(MessageType::kHints, 0, p);
    }
    std::atomic<bool> over{false};
    std::thread waits([&] {
        Result<std::vector<PrefixPlace>> found = w.spaces->lookup(*w.pool, w.space, std::vector<uint8_t>(32, 9), -1);
        EXPECT_TRUE(found.ok() && found.value()[0].answer == PrefixPlace::Answer::kUnknown);
        over = true;
    });
    for (int i = 0; i < 2000 && !over; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_TRUE(over);
    if (!over) w.groups[1]->stop();
    waits.join();
}

// A lookup may wait for long: meanwhile nobody uses the blocks that it has found.
TEST(Spaces, ALookupThatWaitsUsesNoBlocks) {
    World w;
    w.prove(w.join());  // and tells nothing
    std::vector<uint8_t> keys(64, 5);
    keys[32] = 9;  // of a block that nobody has told of
    std::atomic<bool> over{false};
    std::thread waits([&] {
        Result<std::vector<PrefixPlace>> found = w.spaces->lookup(*w.pool, w.space, keys, 200'000'000);
        EXPECT_TRUE(found.ok() && found.value()[0].answer == PrefixPlace::Answer::kYes &&
                    found.value()[1].answer == PrefixPlace::Answer::kUnknown);
        over = true;
    });
    uint64_t most = 0;
    while (!over) {
        most = std::max(most, w.pool->prefixes().stats(w.space).value().bytes_shared);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    waits.join();
    EXPECT_EQ(most, 0u);
}

}  // namespace
}  // namespace ta::share
