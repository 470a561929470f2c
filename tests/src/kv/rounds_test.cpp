// Calls in rounds between a rank and one that is no more than its transport, or whose messages say what cannot be.
#include "src/kv/share/rounds.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <thread>

#include "src/attend/dense/scatter_parts.h"
#include "tests/tiering/share/lying_transport.h"
#include "tiering/share/local.h"

namespace ta::share {
namespace {

// Where a call fails is said as it came, by whomever it comes.
TEST(Rounds, AFailureGoesOnAsItCame) {
    Context::Options options;
    options.threads = 1;
    const GroupId id = make_id(GroupKind::kLocal);
    GroupSettings s;
    s.ranks = 4;
    s.generation = 1;
    Group group(Context::create(std::move(options), Seams{}).take(), s, join_local_group(id, 0, 4, nullptr, {}).take());
    Rounds rounds(group);
    const std::unique_ptr<Transport> peer = join_local_group(id, 1, 4, nullptr, {}).take();
    ASSERT_TRUE(group.start({&rounds}).ok());
    ASSERT_TRUE(rounds.begin({}).ok());

    uint64_t number = 0;
    const auto say = [&](MessageType type, const PayloadWriter& payload) {
        MessageHeader h{};
        h.type = uint16_t(type);
        h.generation = h.from = 1;
        h.number = ++number;
        peer->send(0, pack(h, payload.bytes()), false);
    };
    struct Over {
        uint64_t nonce, other;
        Ending ending;
        uint64_t over[4];
    };
    const Ending ending = Ending::of(fail(TA_E_IO, "a disk")).relayed(3);  // from rank 3 by way of rank 1
    say(MessageType::kRoundsBegin, PayloadWriter().put(uint64_t{1}).put(Rounds::Begin{}));
    say(MessageType::kRoundsOver, PayloadWriter().put(Over{1, 1, ending, {}}));
    for (bool told = false; !told;) {
        const std::optional<Transport::Received> got = peer->receive(Clock::now() + std::chrono::seconds(5));
        ASSERT_TRUE(got.has_value());
        const Message m = unpack(got->packet, 1, 0, 1).take();
        if (MessageType(m.header.type) != MessageType::kRoundsOver) continue;
        Over over{};
        ASSERT_TRUE(PayloadReader(m.payload).get(over));
        EXPECT_EQ(std::memcmp(&over.ending, &ending, sizeof ending), 0) << over.ending.text;
        told = true;
    }
    const Status failed = std::move(rounds.wait_for_all()).status();
    EXPECT_EQ(failed.code(), TA_E_IO);
    EXPECT_STREQ(failed.detail()->message, "rank 3: a disk");
    group.stop();
    rounds.stop();
}

using ta::scatter::CallHeader;
using ta::testing::LyingTransport;

// A rank of a group of two, on a CPU.
struct ScatterRank {
    ScatterRank(const GroupId& id, uint32_t rank, LyingTransport::Lie lie) {
        Context::Options options;
        options.threads = 1;
        context = Context::create(std::move(options), Seams{}).take();
        GroupSettings s;
        s.rank = rank;
        s.ranks = 2;
        s.generation = 1;
        std::unique_ptr<Transport> transport = join_local_group(id, rank, 2, nullptr, {}).take();
        if (lie) transport = std::make_unique<LyingTransport>(std::move(transport), std::move(lie));
        group = std::make_unique<Group>(context, s, std::move(transport));
        scatter = std::make_unique<DenseScatter>(*group);
        EXPECT_TRUE(group->start({&scatter->rounds()}).ok());
    }
    ~ScatterRank() {
        group->stop();
        scatter->rounds().stop();
    }
    std::shared_ptr<Context> context;
    std::unique_ptr<Group> group;
    std::unique_ptr<DenseScatter> scatter;
};

// Two kv heads, one for each rank; what the root and the other say of it. The second message of a rank may be a lie.
std::pair<Status, Status> scatter_heads(const LyingTransport::Lie& of_root, const LyingTransport::Lie& of_other) {
    const GroupId id = make_id(GroupKind::kLocal);
    ScatterRank root(id, 0, of_root), other(id, 1, of_other);
    for (const ScatterRank* r : {&root, &other}) EXPECT_EQ(r->group->wait_connected(-1), GroupState::kReady);
    constexpr int64_t kTokens = 8, kHeads = 2, kDim = 64;
    std::vector<float> x(size_t(kTokens * kHeads * kDim), 0.5f), out(x.size());
    const std::vector<int64_t> offsets{0, kTokens};
    DenseCall call;
    const auto view = [&](std::vector<float>& v) {
        return TensorView{reinterpret_cast<uint8_t*>(v.data()), DType::kF32, kTokens, kHeads, kDim, kHeads * kDim, kDim};
    };
    call.q = call.k = call.v = view(x);
    call.out = view(out);
    call.q_offsets = call.k_offsets = offsets;
    call.group_size = 2;
    call.settings = resolve_attend(nullptr, kHeads, int(kDim), ExpMode::kPoly, TA_P_U8, true).take();
    ScatterSettings settings;
    settings.root = 0;
    std::pair<Status, Status> ends;
    std::thread takes([&] {
        ScatterStats stats;
        ends.second = other.scatter->take(settings, stats);
    });
    ScatterStats stats;
    ends.first = root.scatter->give(call, settings, stats);
    takes.join();
    for (size_t i = 0; i < out.size() && ends.first.ok(); ++i) EXPECT_NEAR(out[i], x[i], 0.01f);
    return ends;
}

TEST(Rounds, ACallThatCannotBeEndsTheGroup) {
    const struct {
        const char* what;
        std::function<void(CallHeader&)> change;
    } lies[] = {{"nothing", [](CallHeader&) {}},
                {"variant", [](CallHeader& h) { h.variant = 4; }},
                {"a variant below all", [](CallHeader& h) { h.variant = -1; }},
                {"head_dim", [](CallHeader& h) { h.head_dim = 63; }},
                {"granularity", [](CallHeader& h) { h.v_granularity = 4; }},
                {"group size", [](CallHeader& h) { h.group_size = 0; }},
                {"mask", [](CallHeader& h) { h.mask = 2; }},
                {"exp", [](CallHeader& h) { h.exp = 3; }},
                {"p", [](CallHeader& h) { h.p = 100; }},
                {"scale", [](CallHeader& h) { h.scale = NAN; }},
                {"softcap", [](CallHeader& h) { h.softcap = -1.0f; }},
                {"window", [](CallHeader& h) { h.window = -1; }},
                {"heads", [](CallHeader& h) { h.kv_heads = INT32_MAX; }},
                {"tokens", [](CallHeader& h) { h.k_tokens = INT64_MAX; }},
                {"offsets", [](CallHeader& h) { h.offsets = UINT64_MAX; }},
                {"slopes", [](CallHeader& h) { h.has_slopes = 1; }}};
    for (const auto& lie : lies) {
        SCOPED_TRACE(lie.what);
        const bool honest = lie.what == std::string("nothing");
        const auto [first, second] = scatter_heads(
            [&](uint32_t, MessageHeader& m, std::vector<uint8_t>& payload) {
                if (MessageType(m.type) != MessageType::kRoundsCall) return true;
                CallHeader h{};
                uint8_t* const at = payload.data() + 2 * sizeof(uint64_t);  // behind the nonces
                std::memcpy(&h, at, sizeof h);
                lie.change(h);
                std::memcpy(at, &h, sizeof h);
                return true;
            },
            {});
        EXPECT_EQ(second.code(), honest ? TA_OK : TA_E_PEER_LOST) << (second.detail() ? second.detail()->message : "");
        EXPECT_EQ(first.code(), honest ? TA_OK : TA_E_PEER_LOST) << (first.detail() ? first.detail()->message : "");
    }
}

// Bytes go in a way that both ranks have: nobody waits for what goes nowhere.
TEST(Rounds, AWayThatTheRootDoesNotHaveEndsTheGroup) {
    struct Note {
        uint64_t from, to;
        Rounds::Note what;
        uint32_t way;
    };
    for (const uint32_t way : {0u, 1u, 2u, 3u, UINT32_MAX}) {
        SCOPED_TRACE(way);
        const auto [first, second] = scatter_heads({}, [way](uint32_t, MessageHeader& m, std::vector<uint8_t>& payload) {
            Note note;
            if (MessageType(m.type) != MessageType::kRoundsNote || payload.size() < sizeof note) return true;
            std::memcpy(&note, payload.data(), sizeof note);
            if (note.what != Rounds::Note::kReady) return true;
            note.way = way;
            std::memcpy(payload.data(), &note, sizeof note);
            return true;
        });
        EXPECT_EQ(first.code(), way == 0 ? TA_OK : TA_E_PEER_LOST) << (first.detail() ? first.detail()->message : "");
        EXPECT_TRUE(way == 0 || first.detail()->rank == 1);
        EXPECT_EQ(second.code(), way == 0 ? TA_OK : TA_E_PEER_LOST);
    }
}

}  // namespace
}  // namespace ta::share
