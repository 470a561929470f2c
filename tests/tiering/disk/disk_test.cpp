// The disk tier: what is written is what is read, budgets, slots, persistence, and everything a file can have wrong.
#include "tiering/disk/disk.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include "support/files.h"
#include "tiering/disk/client.h"
#include "tiering/faulty_files.h"

namespace ta {
namespace {

using namespace std::chrono_literals;
using testing::Collector;
using testing::Fault;
using testing::FaultyFiles;
using testing::Folder;
using testing::is_ok;
using testing::make_bytes;
using testing::make_identity;
using testing::read_block;
using testing::read_request;
using testing::read_status;
using testing::run;
using testing::write_block;
using testing::write_request;

constexpr size_t kTokenBytes = 20000, kChannelBytes = 9000;  // no multiples of a page
constexpr uint8_t kToken = 0, kChannel = 1;

struct Engine {
    bool uring, persistent, in_memory;
};

void PrintTo(const Engine& e, std::ostream* out) {
    *out << (e.uring ? "io_uring" : "threads") << (e.persistent ? " persistent" : " anonymous")
         << (e.in_memory ? " tmpfs" : "");
}

class Disk : public ::testing::TestWithParam<Engine> {
  protected:
    DiskTierOptions options(uint64_t budget = 1 << 20) {
        DiskTierOptions o;
        o.persistent = GetParam().persistent;
        o.path = o.persistent ? folder.file("tier") : folder.path();
        o.budget = budget;
        o.slot_bytes[0] = kTokenBytes;
        o.slot_bytes[1] = kChannelBytes;
        o.fingerprint = 0x1234;
        o.use_uring = GetParam().uring;
        o.buffer_bytes = 200000;
        o.retry_after = 20ms;
        return o;
    }
    std::unique_ptr<DiskTier> open(const DiskTierOptions& o) {
        Result<std::unique_ptr<DiskTier>> tier = DiskTier::open(files, o);
        if (tier.ok()) {
            tier.value()->keep_file();
            return tier.take();
        }
        ADD_FAILURE() << std::move(tier).status().detail()->message;
        return nullptr;
    }
    std::unique_ptr<DiskTier> open() { return open(options()); }
    static Slot take(DiskTier& tier, uint8_t slot_class) {
        Result<std::vector<Slot>> slots = tier.acquire({&slot_class, 1});
        return slots.ok() ? slots.value()[0] : Slot{};
    }
    static bool wait_until_unused(DiskTier& tier) {
        for (int i = 0; i < 5000 && tier.stats().used > 0; ++i) usleep(1000);
        return tier.stats().used == 0;
    }

    Folder folder{GetParam().in_memory};
    std::shared_ptr<FaultyFiles> files = std::make_shared<FaultyFiles>();
};

TEST_P(Disk, BlocksComeBack) {
    auto tier = open();
    ASSERT_TRUE(tier);
    EXPECT_EQ(tier->io_uring(), GetParam().uring) << (tier->degraded().empty() ? "" : tier->degraded()[0]);
    std::vector<uint8_t> wanted;
    for (int i = 0; i < 20; ++i) wanted.push_back(i % 3 ? kChannel : kToken);
    Result<std::vector<Slot>> slots = tier->acquire(wanted);
    ASSERT_TRUE(slots.ok());
    std::vector<DiskRequest> requests;
    std::vector<std::vector<uint8_t>> bytes;
    for (size_t i = 0; i < wanted.size(); ++i) {
        bytes.push_back(make_bytes(make_identity(i, 100 + i), tier->slot_bytes(wanted[i])));
        requests.push_back(write_request(slots.value()[i], make_identity(i, 100 + i), bytes[i]));
    }
    for (const auto& done : run(*tier, requests)) EXPECT_TRUE(is_ok(done.status));
    for (auto& r : requests) r.kind = DiskRequest::Kind::kRead;
    const auto written = bytes;
    for (auto& b : bytes) std::fill(b.begin(), b.end(), uint8_t(0));
    for (const auto& done : run(*tier, requests)) EXPECT_TRUE(is_ok(done.status));
    EXPECT_TRUE(bytes == written);
    // Part of a block.
    std::vector<uint8_t> part(777);
    DiskRequest r = read_request(slots.value()[4], make_identity(4, 104), part);
    r.offset = 123;
    ASSERT_TRUE(is_ok(run(*tier, {r})[0].status));
    EXPECT_EQ(std::memcmp(part.data(), written[4].data() + 123, part.size()), 0);
    const TierStats s = tier->stats();
    EXPECT_EQ(s.reads, 21u);
    EXPECT_EQ(s.writes, 20u);
    EXPECT_EQ(s.slots_used[kToken], 7u);
    EXPECT_EQ(s.slots_used[kChannel], 13u);
    EXPECT_EQ(s.failed + s.corrupt + s.stalled + s.cancelled, 0u);
}

TEST_P(Disk, WithoutIoUringThreadsDoAndItIsSaid) {
    files->has_queues = false;
    auto tier = open();
    ASSERT_TRUE(tier);
    EXPECT_FALSE(tier->io_uring());
    size_t said = 0;
    for (const std::string& reason : tier->degraded()) said += reason == "the test has no io_uring";
    EXPECT_EQ(said, GetParam().uring ? 1u : 0u);
    const Slot slot = take(*tier, kChannel);
    EXPECT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
    EXPECT_TRUE(read_block(*tier, slot, make_identity(1, 1)));
}

TEST_P(Disk, ABlockIsOnlyReadAsWhatItIs) {
    auto tier = open();
    const Slot slot = take(*tier, kChannel), other = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, slot, make_identity(1, 7)));
    BlockIdentity wrong[] = {make_identity(2, 7), make_identity(1, 8), make_identity(1, 7), make_identity(1, 7)};
    wrong[2].tokens = 63;
    wrong[3].key[5] ^= 1;
    for (const BlockIdentity& id : wrong) EXPECT_EQ(read_status(*tier, slot, id).code(), TA_E_CORRUPT);
    EXPECT_EQ(tier->stats().corrupt, 4u);
    EXPECT_TRUE(read_block(*tier, slot, make_identity(1, 7)));
    EXPECT_EQ(read_status(*tier, other, make_identity(1, 7)).code(), TA_E_STATE) << "never written";
    tier->release({&slot, 1});
    EXPECT_EQ(read_status(*tier, slot, make_identity(1, 7)).code(), TA_E_STATE) << "released";
}

TEST_P(Disk, WrongRequestsAreRefusedWhole) {
    auto tier = open();
    const Slot slot = take(*tier, kChannel), good = take(*tier, kChannel);
    std::vector<uint8_t> bytes(kChannelBytes), more(kTokenBytes);
    const auto code = [&](DiskRequest r) {
        Status why;
        std::vector<uint8_t> g = make_bytes(make_identity(1, 1), kChannelBytes);
        EXPECT_TRUE(run(*tier, {write_request(good, make_identity(1, 1), g), r}, &why).empty());
        return why.code();
    };
    DiskRequest r = write_request(slot, make_identity(1, 1), bytes);
    r.bytes = kChannelBytes - 1;
    EXPECT_EQ(code(r), TA_E_INVALID);
    r = write_request(slot, make_identity(1, 1), more);
    EXPECT_EQ(code(r), TA_E_INVALID);
    r = write_request(slot, make_identity(1, 1), bytes);
    r.memory = nullptr;
    EXPECT_EQ(code(r), TA_E_INVALID);
    r.memory = bytes.data();
    r.identity.tokens = 65;
    EXPECT_EQ(code(r), TA_E_INVALID);
    r.identity.tokens = 64;
    r.slot.index = 1u << 30;
    EXPECT_EQ(code(r), TA_E_STATE);
    r.slot = slot;
    r.slot.slot_class = kToken;
    EXPECT_EQ(code(r), TA_E_STATE);
    r = write_request(good, make_identity(1, 1), bytes);
    EXPECT_EQ(code(r), TA_E_BUSY) << "two writes of one slot";
    r = read_request(good, make_identity(1, 1), bytes);
    EXPECT_EQ(code(r), TA_E_BUSY) << "a read of what is being written";
    EXPECT_EQ(tier->stats().writes, 0u);
    EXPECT_TRUE(write_block(*tier, good, make_identity(1, 1))) << "a refused batch left marks";
    EXPECT_TRUE(write_block(*tier, good, make_identity(1, 2))) << "written again in place";
    EXPECT_TRUE(read_block(*tier, good, make_identity(1, 2)));
    EXPECT_EQ(read_status(*tier, good, make_identity(1, 1)).code(), TA_E_CORRUPT);
}

TEST_P(Disk, TheBudgetHolds) {
    for (const uint64_t budget : {uint64_t{50000}, uint64_t{300001}, uint64_t{1} << 20}) {
        DiskTierOptions o = options(budget);
        if (o.persistent) o.path += std::to_string(budget);
        auto tier = open(o);
        ASSERT_TRUE(tier);
        EXPECT_LE(tier->stats().taken, budget);
        EXPECT_GE(tier->stats().taken, budget * 8 / 10 - 30000);
        const uint64_t room = tier->stats().slots_free[kChannel];
        std::vector<Slot> slots;
        for (Slot s = take(*tier, kChannel); s.index != Slot::kNone; s = take(*tier, kChannel)) slots.push_back(s);
        EXPECT_EQ(slots.size(), room);
        std::set<uint32_t> distinct;
        for (const Slot s : slots) distinct.insert(s.index);
        EXPECT_EQ(distinct.size(), slots.size());
        EXPECT_EQ(take(*tier, kToken).index, Slot::kNone);
        for (const Slot s : slots) tier->release({&s, 1});
        EXPECT_EQ(tier->stats().used, 0u);
        EXPECT_NE(take(*tier, kToken).index, Slot::kNone) << "a region serves the other class when it is empty";
    }
    DiskTierOptions o = options(20000);
    Result<std::unique_ptr<DiskTier>> none = DiskTier::open(files, o);
    EXPECT_EQ(std::move(none).status().code(), TA_E_INVALID);
}

TEST_P(Disk, NothingIsLeftBehind) {
    {
        auto tier = open();
        const Slot slot = take(*tier, kChannel);
        ASSERT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
        EXPECT_EQ(folder.entries(), GetParam().persistent ? 1u : 0u);
    }
    EXPECT_EQ(files->open_files(), 0);
    if (!GetParam().persistent) return;
    struct stat s;
    ASSERT_EQ(stat(folder.file("tier").c_str(), &s), 0);
    EXPECT_EQ(s.st_mode & 07777, 0600u);
    EXPECT_GE(uint64_t(s.st_blocks) * 512, uint64_t(s.st_size)) << "not preallocated";
}

TEST_P(Disk, ItsFolderMayBeASymbolicLink) {
    const Folder other;
    ASSERT_EQ(symlink(folder.path().c_str(), other.file("link").c_str()), 0);
    DiskTierOptions o = options();
    for (const bool nameless : {true, false}) {
        files->has_nameless = nameless;
        o.path = other.file(o.persistent ? "link/tier" : "link");
        auto tier = open(o);
        ASSERT_TRUE(tier);
        ASSERT_TRUE(write_block(*tier, take(*tier, kChannel), make_identity(1, 1)));
        EXPECT_EQ(folder.entries(), o.persistent ? 1u : 0u);
    }
}

TEST_P(Disk, AStallEndsWithItsDeadline) {
    DiskTierOptions o = options();
    o.deadline = 200ms;
    o.retry_after = 10s;
    auto tier = open(o);
    const Slot a = take(*tier, kChannel), b = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    files->break_now(Fault::kStall, true);
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(read_status(*tier, a, make_identity(1, 1)).code(), TA_E_IO);
    EXPECT_FALSE(write_block(*tier, b, make_identity(2, 2)));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    EXPECT_EQ(tier->stats().stalled, 2u);
    // Others need not find out for themselves: nothing is written for a while, and the reason is there.
    EXPECT_EQ(tier->health().state, TierState::kReadOnly);
    EXPECT_NE(std::string(tier->health().reason).find("has not been answered"), std::string::npos);
    const uint8_t kinds[] = {kChannel};
    EXPECT_EQ(tier->acquire(kinds).status().code(), TA_E_TIER_FULL);
    // More than there are buffers: the rest is not tried, and in the end the tier says that it is dead.
    std::vector<std::vector<uint8_t>> bytes(80, std::vector<uint8_t>(kChannelBytes));
    std::vector<DiskRequest> reads;
    for (auto& x : bytes) reads.push_back(read_request(a, make_identity(1, 1), x));
    for (const auto& done : run(*tier, reads)) EXPECT_EQ(done.status.code(), TA_E_IO);
    EXPECT_EQ(tier->health().state, TierState::kFailed);
    EXPECT_NE(std::string(tier->health().reason), "");
    EXPECT_EQ(read_status(*tier, a, make_identity(1, 1)).code(), TA_E_IO);
    // The slot is not for others while the write may still land.
    tier->release({&b, 1});
    EXPECT_EQ(tier->stats().slots_used[kChannel], 2u);
    files->heal();
    for (int i = 0; i < 5000 && tier->stats().in_flight > 0; ++i) usleep(1000);
    EXPECT_EQ(tier->health().state, TierState::kOk);
    EXPECT_TRUE(read_block(*tier, a, make_identity(1, 1)));
    for (int i = 0; i < 5000 && tier->stats().slots_used[kChannel] > 1; ++i) usleep(1000);
    EXPECT_EQ(tier->stats().slots_used[kChannel], 1u);
}

TEST_P(Disk, ClosingDoesNotWaitForAStall) {
    DiskTierOptions o = options();
    o.deadline = 200ms;
    auto tier = open(o);
    const Slot a = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    files->break_now(Fault::kStall, true);
    Collector collector;
    std::vector<uint8_t> bytes(kChannelBytes, 0xee);
    std::vector<DiskRequest> reads(30, read_request(a, make_identity(1, 1), bytes));
    for (size_t i = 0; i < reads.size(); ++i) reads[i].tag = i;
    collector.expect(reads.size());
    ASSERT_TRUE(tier->submit(reads, collector).ok());
    const auto start = std::chrono::steady_clock::now();
    tier.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    EXPECT_EQ(collector.pending(), 0u) << "the destructor tells every client";
    EXPECT_TRUE(bytes == std::vector<uint8_t>(kChannelBytes, 0xee));
    files->heal();
    EXPECT_TRUE(files->wait_until_closed());
}

// One whose close() does not come back until it may.
class HangingClose final : public FaultyFiles {
  public:
    int close(int fd) override {
        if (hangs) hangs.wait(true);
        return FaultyFiles::close(fd);
    }
    void go_on() {
        hangs = false;
        hangs.notify_all();
    }
    std::atomic<bool> hangs{false};
};

TEST_P(Disk, ClosingDoesNotWaitForAFileThatDoesNotClose) {
    const auto hanging = std::make_shared<HangingClose>();
    files = hanging;
    DiskTierOptions o = options();
    o.deadline = 200ms;
    auto tier = open(o);
    const Slot a = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    hanging->hangs = true;
    std::atomic<bool> destroyed{false};
    std::thread destroys([&] {
        tier.reset();
        destroyed = true;
    });
    for (int i = 0; i < 5000 && !destroyed; ++i) usleep(1000);
    EXPECT_TRUE(destroyed);
    EXPECT_GT(files->open_files(), 0);
    hanging->go_on();
    destroys.join();
    EXPECT_TRUE(files->wait_until_closed());
}

TEST_P(Disk, CancelledRequestsLeaveMemoryAlone) {
    auto tier = open();
    const Slot a = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    const auto expected = make_bytes(make_identity(1, 1), kChannelBytes);
    for (int round = 0; round < 20; ++round) {
        Collector collector;
        std::vector<std::vector<uint8_t>> bytes(40, std::vector<uint8_t>(kChannelBytes, 0xee));
        std::vector<DiskRequest> reads;
        for (size_t i = 0; i < bytes.size(); ++i) {
            reads.push_back(read_request(a, make_identity(1, 1), bytes[i]));
            reads.back().tag = i;
        }
        collector.expect(reads.size());
        Result<DiskBatch> batch = tier->submit(reads, collector);
        ASSERT_TRUE(batch.ok());
        usleep(useconds_t(round * 20));
        tier->cancel(batch.value());
        ASSERT_TRUE(collector.wait());
        for (size_t i = 0; i < bytes.size(); ++i) {
            const DiskCompletion c = collector.take(i);
            EXPECT_EQ(c.cancelled, !c.status.ok());
            EXPECT_TRUE(bytes[i] == (c.cancelled ? std::vector<uint8_t>(kChannelBytes, 0xee) : expected));
        }
    }
    // In flight and stuck: cancelled all the same.
    files->break_now(Fault::kStall, true);
    Collector collector;
    std::vector<uint8_t> bytes(kChannelBytes, 0xee);
    collector.expect(1);
    Result<DiskBatch> batch = tier->submit({{read_request(a, make_identity(1, 1), bytes)}}, collector);
    ASSERT_TRUE(batch.ok());
    usleep(5000);
    const auto start = std::chrono::steady_clock::now();
    tier->cancel(batch.value());
    ASSERT_TRUE(collector.wait());
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
    EXPECT_TRUE(collector.take(0).cancelled);
    files->heal();
    EXPECT_TRUE(read_block(*tier, a, make_identity(1, 1)));
    EXPECT_TRUE(bytes == std::vector<uint8_t>(kChannelBytes, 0xee));
}

// Writes a block, reads it back, gives the slot back, over and over, each step from the completion of the one before.
class Chain final : public DiskClient {
  public:
    Chain(DiskTier& tier, uint64_t id, int rounds) : tier_(tier), id_(id), rounds_(rounds) {}
    void start() { next(); }
    bool wait() {
        for (int i = 0; i < 20000 && !finished; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return finished;
    }
    std::atomic<bool> finished{false};
    std::atomic<int> wrong{0};

    void on_done(DiskCompletion c) noexcept override {
        if (!c.status.ok() || c.cancelled || c.tag != tag_) ++wrong;
        if (reading_) {
            if (bytes_ != expected_) ++wrong;
            tier_.release({&slot_, 1});
            return next();
        }
        reading_ = true;
        std::fill(bytes_.begin(), bytes_.end(), uint8_t(0xee));
        submit(read_request(slot_, identity_, bytes_));
    }

  private:
    void next() {
        reading_ = false;
        if (rounds_-- == 0) {
            finished = true;
            return;
        }
        const auto slot_class = uint8_t((id_ + uint64_t(rounds_)) % 2);
        Result<std::vector<Slot>> slots = tier_.acquire({&slot_class, 1});
        if (!slots.ok()) {
            ++wrong;
            finished = true;
            return;
        }
        slot_ = slots.value()[0];
        identity_ = make_identity(id_, uint64_t(rounds_) + 1);
        bytes_ = expected_ = make_bytes(identity_, tier_.slot_bytes(slot_class));
        submit(write_request(slot_, identity_, bytes_));
    }
    void submit(DiskRequest r) {
        r.tag = ++tag_;
        if (tier_.submit({&r, 1}, *this).ok()) return;
        ++wrong;
        finished = true;
    }
    DiskTier& tier_;
    const uint64_t id_;
    int rounds_;
    bool reading_ = false;
    uint64_t tag_ = 0;
    Slot slot_;
    BlockIdentity identity_;
    std::vector<uint8_t> bytes_, expected_;
};

TEST_P(Disk, CompletionsMayCallTheTier) {
    auto tier = open();
    ASSERT_TRUE(tier);
    std::vector<std::unique_ptr<Chain>> chains;
    for (uint64_t i = 0; i < 6; ++i) chains.push_back(std::make_unique<Chain>(*tier, i, 40));
    for (auto& chain : chains) chain->start();
    for (auto& chain : chains) {
        EXPECT_TRUE(chain->wait());
        EXPECT_EQ(chain->wrong, 0);
    }
    EXPECT_TRUE(wait_until_unused(*tier));
}

TEST_P(Disk, WithoutSpaceItIsReadOnlyUntilThereIsSome) {
    auto tier = open();
    const Slot a = take(*tier, kChannel), b = take(*tier, kChannel);
    ASSERT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    files->break_now(Fault::kEnospc, true);
    std::vector<uint8_t> bytes = make_bytes(make_identity(2, 2), kChannelBytes);
    auto done = run(*tier, {write_request(b, make_identity(2, 2), bytes)});
    ASSERT_EQ(done.size(), 1u);
    EXPECT_EQ(done[0].status.code(), TA_E_TIER_FULL);
    EXPECT_EQ(tier->health().state, TierState::kReadOnly);
    EXPECT_NE(std::string(tier->health().reason).find("ENOSPC"), std::string::npos) << tier->health().reason;
    Status why;
    const auto before = files->operations();
    EXPECT_TRUE(run(*tier, {write_request(b, make_identity(2, 2), bytes)}, &why).empty());
    EXPECT_EQ(why.code(), TA_E_TIER_FULL);
    EXPECT_EQ(files->operations(), before) << "it does not try again at once";
    EXPECT_EQ(take(*tier, kChannel).index, Slot::kNone);
    EXPECT_TRUE(read_block(*tier, a, make_identity(1, 1))) << "reading goes on";
    std::this_thread::sleep_for(25ms);
    EXPECT_FALSE(write_block(*tier, b, make_identity(2, 2))) << "the probe fails";
    EXPECT_EQ(tier->health().state, TierState::kReadOnly);
    files->heal();
    std::this_thread::sleep_for(25ms);
    EXPECT_TRUE(write_block(*tier, b, make_identity(2, 2)));
    EXPECT_EQ(tier->health().state, TierState::kOk);
    EXPECT_TRUE(read_block(*tier, b, make_identity(2, 2)));
}

TEST_P(Disk, FailuresBetweenGoodWritesDoNotAddUp) {
    auto tier = open();
    const Slot a = take(*tier, kChannel);
    for (int i = 0; i < 4; ++i) {
        files->break_now(Fault::kEio, false);
        EXPECT_FALSE(write_block(*tier, a, make_identity(1, 1)));
        EXPECT_EQ(tier->health().state, TierState::kOk) << tier->health().reason;
        EXPECT_TRUE(write_block(*tier, a, make_identity(1, 1)));
    }
}

INSTANTIATE_TEST_SUITE_P(Engines, Disk,
                         ::testing::Values(Engine{true, false, true}, Engine{true, true, true}, Engine{false, false, true},
                                           Engine{false, true, true}, Engine{true, false, false}, Engine{true, true, false}));

}  // namespace
}  // namespace ta
