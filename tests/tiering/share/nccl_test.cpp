// Groups over NCCL without a GPU: how they connect, what they carry, and that they end where a peer never comes.
#include <gtest/gtest.h>

#if __has_include(<cuda_runtime_api.h>)
#include "tiering/share/simulated_nccl.h"
#include "tiering/simulated_device.h"
// The class is in there.
#include "tiering/share/group.h"
#include "tiering/share/nccl.cpp"

namespace ta::share {

Result<const nccl::Library*> nccl::Library::open() {
    return &testing::simulated_nccl();
}

namespace {

using std::chrono::milliseconds;
using testing::world;

std::shared_ptr<Context> cpu_context() {
    Context::Options options;
    options.threads = 1;
    return Context::create(std::move(options), Seams{}).take();
}

// Each on a host of its own.
std::unique_ptr<Group> make_group(const GroupId& id, uint32_t rank, uint32_t ranks, milliseconds connect,
                                  nccl::Comm adopted = nullptr) {
    GroupSettings s;
    s.rank = rank;
    s.ranks = ranks;
    s.generation = hash_bytes(id.data(), id.size());
    s.connect = connect;
    NcclOptions options{adopted, true, s.silence, s.connect};
    auto transport = std::make_unique<NcclTransport>(testing::simulated_nccl(), id, rank, ranks,
                                                     std::make_shared<testing::SimulatedDevice>(rank, int(rank)), 0, options);
    EXPECT_TRUE(transport->start().ok());
    auto group = std::make_unique<Group>(cpu_context(), s, std::move(transport));
    EXPECT_TRUE(group->start({}).ok());
    return group;
}

nccl::Comm adopted_comm(const GroupId& id, int rank, bool blocking) {
    return world().join("the caller's" + std::string(id.begin(), id.end()), 2, rank, blocking);
}

// A communicator whose other rank has gone, in the first call or in the kernel: nobody waits for it for ever.
TEST(Nccl, AnAdoptedCommunicatorWithoutItsPeerIsAborted) {
    for (const bool blocking : {true, false}) {
        SCOPED_TRACE(blocking);
        const GroupId id = make_nccl_id().take();
        const nccl::Comm comm = adopted_comm(id, 0, blocking);
        ++comm->room->joined;  // once the peer was there
        std::unique_ptr<Group> group = make_group(id, 0, 2, milliseconds(200), comm);
        EXPECT_EQ(group->wait_connected(-1), GroupState::kEnded);
        EXPECT_EQ(group->health().code(), TA_E_TIMEOUT);
        group.reset();
        EXPECT_TRUE(comm->aborted);
    }
}

// Several ranks, of which none can be told to be missing.
TEST(Nccl, NobodyKnowsWhoDidNotJoin) {
    const std::unique_ptr<Group> group = make_group(make_nccl_id().take(), 0, 3, milliseconds(50));
    EXPECT_EQ(group->wait_connected(-1), GroupState::kEnded);
    EXPECT_EQ(group->health().detail()->rank, -1) << group->health().detail()->message;
}

TEST(Nccl, AnotherVersionIsAMismatch) {
    world().on_gather = [](int rank, testing::Bytes& card) { card[0] = uint8_t(card[0] + rank); };
    const GroupId id = make_nccl_id().take();
    const std::unique_ptr<Group> a = make_group(id, 0, 2, milliseconds(5000)), b = make_group(id, 1, 2, milliseconds(200));
    ASSERT_EQ(a->wait_connected(-1), GroupState::kEnded);
    ASSERT_EQ(a->health().code(), TA_E_MISMATCH);
    EXPECT_EQ(a->health().detail()->rank, 1);
    EXPECT_EQ(b->wait_connected(-1), GroupState::kEnded);
    world().on_gather = nullptr;
}

// Bytes go from GPU to GPU while another thread takes memory for that and the group ends.
TEST(Nccl, BytesArriveAndTheCallersCommunicatorsStay) {
    constexpr size_t kBytes = size_t{3} << 20, kPiece = 65536;
    const GroupId id = make_nccl_id().take();
    const nccl::Comm comms[] = {adopted_comm(id, 0, false), adopted_comm(id, 1, true)};
    std::unique_ptr<Group> groups[2];
    for (const uint32_t r : {0u, 1u}) groups[r] = make_group(id, r, 2, milliseconds(20000), comms[r]);
    for (const auto& g : groups) ASSERT_EQ(g->wait_connected(-1), GroupState::kReady);
    std::vector<uint8_t> from(kBytes), to(kBytes);
    for (size_t i = 0; i < kBytes; ++i) from[i] = uint8_t(i * 2654435761u >> 13);
    Transport &a = groups[0]->transport(), &b = groups[1]->transport();
    ASSERT_TRUE(a.may_write_gpu(1) && b.may_write_gpu(0));
    b.open_window(7, 0, WindowMemory({std::span(to)}, true));
    std::vector<RemoteCopy> copies;
    for (size_t at = 0; at < kBytes; at += kPiece) copies.push_back({at, from.data() + at, kPiece});
    EXPECT_TRUE(a.write(1, 7, copies, true).ok());
    b.close_window(7);
    EXPECT_TRUE(from == to);
    for (auto& g : groups) g.reset();
    for (const nccl::Comm c : comms) EXPECT_FALSE(c->aborted);
}

TEST(Nccl, TheGroupEndsWhileALaneTakesMemory) {
    const GroupId id = make_nccl_id().take();
    const std::unique_ptr<Group> a = make_group(id, 0, 2, milliseconds(20000)), b = make_group(id, 1, 2, milliseconds(20000));
    for (const auto* g : {&a, &b}) ASSERT_EQ((*g)->wait_connected(-1), GroupState::kReady);
    std::thread lane([&] { (void)a->transport().may_write_gpu(1); });
    a->end(fail(TA_E_CANCELLED, "test"));
    lane.join();
}

// Heartbeats wait for a round, which takes an eighth of the time after which a silent rank is lost. The first one, of a network that
// nobody knows, has a chunk.
TEST(Nccl, ARoundIsAsLongAsTheNetworkAllows) {
    constexpr size_t kPart = size_t{4} << 20, kParts = 3 * kGpuChunk / kPart;
    const GroupId id = make_nccl_id().take();
    std::unique_ptr<Group> a = make_group(id, 0, 2, milliseconds(20000)), b = make_group(id, 1, 2, milliseconds(20000));
    for (const auto* g : {&a, &b}) ASSERT_EQ((*g)->wait_connected(-1), GroupState::kReady);
    ASSERT_TRUE(a->transport().may_write_gpu(1) && b->transport().may_write_gpu(0));
    std::vector<uint8_t> from(kPart), to(kPart);
    b->transport().open_window(7, 0, WindowMemory(std::vector(kParts, std::span(to)), true));
    std::vector<RemoteCopy> copies;
    for (size_t i = 0; i < kParts; ++i) copies.push_back({i * kPart, from.data(), kPart});
    EXPECT_TRUE(a->transport().write(1, 7, copies, true).ok());
    b->transport().close_window(7);
    a.reset(), b.reset();
    for (const nccl::Communicator& c : world().comms) {
        const auto chunk = std::find(c.sent.begin(), c.sent.end(), kGpuChunk);
        if (chunk == c.sent.end()) continue;
        EXPECT_EQ(std::count(chunk, c.sent.end(), kGpuChunk), 3);
        EXPECT_NE(chunk[1], kGpuChunk) << "of the same round";
    }
    using std::chrono::seconds;
    EXPECT_EQ(bytes_of_round(kGpuChunk, seconds(5), seconds(1)), kGpuChunk);
    EXPECT_EQ(bytes_of_round(kGpuChunk, seconds(1), seconds(4)), 4 * kGpuChunk);
    EXPECT_EQ(bytes_of_round(kGpuChunk / 2, seconds(1), seconds(3)), kGpuChunk);
    EXPECT_EQ(bytes_of_round(kGpuBytes, milliseconds(10), seconds(1)), kGpuBytes);
    EXPECT_EQ(bytes_of_round(2, seconds(0), seconds(1)), kGpuBytes);
}

}  // namespace
}  // namespace ta::share
#else
TEST(Nccl, AnAdoptedCommunicatorWithoutItsPeerIsAborted) {
    GTEST_SKIP() << "CUDA's headers are not installed";
}
#endif
