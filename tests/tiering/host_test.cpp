// Host memory and the tier in it: what is done without when the system says no, placement, registration, slots and copies.
#include "src/tiering/host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "src/kv/blocks.h"
#include "src/tiering/block_check.h"
#include "tiering/tier_client.h"

namespace ta {
namespace {

using testing::Collector;
using testing::is_ok;
using testing::make_bytes;
using testing::make_identity;
using testing::read_block;
using testing::read_request;
using testing::read_status;
using testing::run;
using testing::write_block;
using testing::write_request;

// The system's memory where it is told nothing else.
class FakeMemory final : public MemorySystem {
  public:
    int fail_map = 0, fail_hugetlb = 0, fail_huge = 0, fail_populate = 0, fail_bind = 0, fail_nodes = 0;
    bool fail_populate_once = false;
    std::vector<int> nodes{0};  // of the pages looked at, in turn
    size_t mapped = 0, advised = 0, populated = 0;
    int bound_to = -1;

    void* map(size_t bytes, bool hugetlb, int& error) override {
        error = hugetlb ? fail_hugetlb : fail_map;
        if (error) return nullptr;
        void* p = real_->map(bytes, false, error);
        if (p) mapped += bytes;
        return p;
    }
    void unmap(void* p, size_t bytes) override {
        mapped -= bytes;
        real_->unmap(p, bytes);
    }
    int advise_huge(void*, size_t bytes) override {
        advised += bytes;
        return fail_huge;
    }
    int populate(void* p, size_t bytes) override {
        std::lock_guard lock(mutex_);
        if (fail_populate) return fail_populate_once ? std::exchange(fail_populate, 0) : fail_populate;
        populated += bytes;
        return real_->populate(p, bytes);
    }
    int prefer_node(void*, size_t, int node) override {
        bound_to = node;
        return fail_bind;
    }
    int nodes_of(std::span<void* const> pages, std::span<int> out) override {
        for (size_t i = 0; i < pages.size(); ++i) out[i] = nodes[i % nodes.size()];
        return fail_nodes;
    }

  private:
    const std::shared_ptr<MemorySystem> real_ = system_memory();
    std::mutex mutex_;
};

class Host : public ::testing::Test {
  protected:
    Host() { EXPECT_TRUE(threads.start(3).ok()); }
    std::unique_ptr<HostMemory> make(const HostMemoryOptions& o, Status* why = nullptr) {
        Result<std::unique_ptr<HostMemory>> m = HostMemory::create(fake, threads, o);
        if (m.ok()) return m.take();
        if (why) *why = std::move(m).status();
        return nullptr;
    }
    static HostMemoryOptions with_bytes(uint64_t bytes) {
        HostMemoryOptions o;
        o.bytes = bytes;
        return o;
    }
    static bool mentions(std::span<const std::string> reasons, const char* what) {
        return std::any_of(reasons.begin(), reasons.end(), [&](const auto& r) { return r.find(what) != std::string::npos; });
    }
    static HostTierOptions tier_options(uint64_t budget) {
        HostTierOptions o;
        o.budget = budget;
        o.slot_bytes[0] = 20000;
        o.slot_bytes[1] = 9000;
        return o;
    }
    std::unique_ptr<HostTier> make_tier(const HostTierOptions& o) {
        Result<std::unique_ptr<HostTier>> t = HostTier::create(fake, threads, o);
        EXPECT_TRUE(t.ok());
        return t.ok() ? t.take() : nullptr;
    }

    std::shared_ptr<FakeMemory> fake = std::make_shared<FakeMemory>();
    ThreadPool threads;
};

TEST_F(Host, AllOfItIsTouchedAndGivenBack) {
    {
        auto m = make(with_bytes(100 << 20));
        ASSERT_TRUE(m);
        EXPECT_EQ(fake->populated, m->bytes());
        EXPECT_EQ(m->pages(), HostMemoryOptions::Pages::kTransparent);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(m->data()) % (2 << 20), 0u);
        EXPECT_TRUE(m->degraded().empty()) << m->degraded()[0];
        EXPECT_TRUE(std::all_of(m->data(), m->data() + m->bytes(), [](uint8_t b) { return b == 0; }));
    }
    EXPECT_EQ(fake->mapped, 0u);
}

TEST_F(Host, RealMemory) {
    Result<std::unique_ptr<HostMemory>> m = HostMemory::create(system_memory(), threads, with_bytes(10 << 20));
    ASSERT_TRUE(m.ok());
    std::fill_n(m.value()->data(), m.value()->bytes(), uint8_t(1));
    double all = 0;
    for (const double share : m.value()->share_of_nodes()) all += share;
    if (!m.value()->share_of_nodes().empty()) {
        EXPECT_NEAR(all, 1, 1e-9);
    }
    HostMemoryOptions o = with_bytes(10 << 20);
    o.node = 900;  // there is none
    o.pages = HostMemoryOptions::Pages::kHugeTlb;
    m = HostMemory::create(system_memory(), threads, o);
    ASSERT_TRUE(m.ok()) << "what cannot be had is done without";
    EXPECT_TRUE(mentions(m.value()->degraded(), "node 900"));
}

TEST_F(Host, EachThingThatIsMissingIsNamed) {
    HostMemoryOptions o = with_bytes(10 << 20);
    o.pages = HostMemoryOptions::Pages::kHugeTlb;
    o.node = 1;
    fake->nodes = {1};
    {
        auto m = make(o);
        ASSERT_TRUE(m);
        EXPECT_TRUE(m->degraded().empty());
        EXPECT_EQ(m->pages(), HostMemoryOptions::Pages::kHugeTlb);
        EXPECT_EQ(fake->bound_to, 1);
    }
    fake->fail_hugetlb = -ENOMEM;
    fake->fail_huge = -EINVAL;
    fake->fail_bind = -EPERM;
    fake->fail_nodes = -ENOSYS;
    auto m = make(o);
    ASSERT_TRUE(m);
    EXPECT_EQ(m->pages(), HostMemoryOptions::Pages::kSmall);
    for (const char* what : {"pool for the host tier: ENOMEM", "transparent huge pages", "EPERM", "could not be verified"})
        EXPECT_TRUE(mentions(m->degraded(), what)) << what;
    EXPECT_EQ(m->degraded().size(), 4u);
}

TEST_F(Host, HugePagesThatCannotBeTouchedAreReplaced) {
    HostMemoryOptions o = with_bytes(10 << 20);
    o.pages = HostMemoryOptions::Pages::kHugeTlb;
    fake->fail_populate = -ENOMEM;
    fake->fail_populate_once = true;
    {
        auto m = make(o);
        ASSERT_TRUE(m);
        EXPECT_EQ(m->pages(), HostMemoryOptions::Pages::kTransparent);
        EXPECT_TRUE(mentions(m->degraded(), "cannot be used"));
        m->data()[m->bytes() - 1] = 1;
    }
    EXPECT_EQ(fake->mapped, 0u);
}

TEST_F(Host, NoMemoryIsAFailureThatLeavesNothing) {
    Status why;
    fake->fail_populate = -ENOMEM;
    EXPECT_FALSE(make(with_bytes(100 << 20), &why));
    EXPECT_EQ(why.code(), TA_E_MEMORY);
    fake->fail_populate = 0;
    fake->fail_map = -ENOMEM;
    EXPECT_FALSE(make(with_bytes(10 << 20), &why));
    EXPECT_EQ(why.code(), TA_E_MEMORY);
    EXPECT_EQ(fake->mapped, 0u);
}

TEST_F(Host, PlacementIsVerified) {
    HostMemoryOptions o = with_bytes(64 << 20);
    o.node = 2;
    fake->nodes = {2, 2, 2, 0};
    auto m = make(o);
    ASSERT_TRUE(m);
    ASSERT_EQ(m->share_of_nodes().size(), 3u);
    EXPECT_NEAR(m->share_of_nodes()[2], 0.75, 1e-9);
    EXPECT_TRUE(mentions(m->degraded(), "75.0% of the host tier lies on NUMA node 2"));
    fake->nodes = {2};
    EXPECT_TRUE(make(o)->degraded().empty());
    fake->nodes = {-ENOENT};
    EXPECT_TRUE(mentions(make(o)->degraded(), "0.0%"));
}

TEST_F(Host, RegistrationGoesChunkByChunk) {
    std::vector<std::pair<uint8_t*, size_t>> chunks;
    int fail_at = -1;
    HostMemoryOptions o = with_bytes((20 << 20) + 4096);
    o.chunk_bytes = 8 << 20;
    o.register_chunk = [&](void* p, size_t n) -> Status {
        if (int(chunks.size()) == fail_at) return fail(TA_E_DEVICE, "cudaHostRegister said no");
        chunks.emplace_back(static_cast<uint8_t*>(p), n);
        return {};
    };
    o.unregister_chunk = [&](void* p, size_t n) {
        const auto found = std::find(chunks.begin(), chunks.end(), std::pair(static_cast<uint8_t*>(p), n));
        ASSERT_NE(found, chunks.end()) << "unregistered what was not registered";
        chunks.erase(found);
    };
    {
        auto m = make(o);
        ASSERT_TRUE(m);
        EXPECT_TRUE(m->registered());
        ASSERT_EQ(chunks.size(), 3u);
        EXPECT_EQ(chunks[2].first, m->data() + (16 << 20));
        EXPECT_EQ(chunks[2].second, m->bytes() - (16u << 20));
    }
    EXPECT_TRUE(chunks.empty());
    for (fail_at = 0; fail_at < 3; ++fail_at) {
        auto m = make(o);
        ASSERT_TRUE(m);
        EXPECT_FALSE(m->registered());
        EXPECT_TRUE(mentions(m->degraded(), "cudaHostRegister said no"));
        EXPECT_TRUE(chunks.empty()) << "half registered";
        o.needs_registration = true;
        Status why;
        EXPECT_FALSE(make(o, &why));
        EXPECT_EQ(why.code(), TA_E_DEVICE);
        EXPECT_TRUE(chunks.empty());
        o.needs_registration = false;
    }
}

TEST_F(Host, TheBudgetCountsTheIndex) {
    for (const uint64_t budget : {uint64_t{100000}, uint64_t{1} << 20, uint64_t{50} << 20, (uint64_t{64} << 20) + 12345}) {
        for (const auto pages : {HostMemoryOptions::Pages::kSmall, HostMemoryOptions::Pages::kHugeTlb}) {
            HostTierOptions o = tier_options(budget);
            o.memory.pages = pages;
            if (pages == HostMemoryOptions::Pages::kHugeTlb && budget < 4 << 20) continue;
            auto tier = make_tier(o);
            ASSERT_TRUE(tier);
            EXPECT_LE(tier->stats().taken, budget);
            EXPECT_EQ(tier->stats().taken, tier->memory().bytes() + tier->stats().memory);
        }
    }
    EXPECT_EQ(HostTier::create(fake, threads, tier_options(20000)).ok(), false);
}

TEST_F(Host, BlocksComeBack) {
    auto tier = make_tier(tier_options(4 << 20));
    std::vector<uint8_t> wanted;
    for (int i = 0; i < 60; ++i) wanted.push_back(i % 3 != 0);
    Result<std::vector<Slot>> slots = tier->acquire(wanted);
    ASSERT_TRUE(slots.ok());
    for (size_t i = 0; i < wanted.size(); ++i) ASSERT_TRUE(write_block(*tier, slots.value()[i], make_identity(i, i)));
    for (size_t i = 0; i < wanted.size(); ++i) {
        const Slot s = slots.value()[i];
        EXPECT_TRUE(read_block(*tier, s, make_identity(i, i)));
        const auto bytes = make_bytes(make_identity(i, i), tier->slot_bytes(s.slot_class));
        EXPECT_EQ(reinterpret_cast<uintptr_t>(tier->address(s)) % 4096, 0u);
        EXPECT_EQ(std::memcmp(tier->address(s), bytes.data(), bytes.size()), 0);
    }
    std::vector<uint8_t> part(100, 7);
    TierRequest r = write_request(slots.value()[0], make_identity(0, 0), part);
    r.offset = 19900;
    ASSERT_TRUE(is_ok(run(*tier, {r})[0].status));
    EXPECT_EQ(tier->address(slots.value()[0])[19999], 7);
    r.offset = 19901;
    EXPECT_TRUE(run(*tier, {r}).empty());
    tier->release(slots.value());
    EXPECT_EQ(tier->stats().used, 0u);
}

TEST_F(Host, ABlockIsCheckedBeforeItIsSeen) {
    Geometry g = Geometry::make(2, 1, 64, 4, nullptr, nullptr).take();
    HostTierOptions o;
    o.budget = 4 << 20;
    o.slot_bytes[0] = g.token_slot_bytes;
    o.slot_bytes[1] = g.channel_slot_bytes;
    o.check = make_block_check(g, 42);
    auto tier = make_tier(o);
    Allocator allocator{ta_allocator{}};
    BlockStore store(allocator, nullptr, g, 1 << 20);
    const PageKind kind = PageKind::kChannel;
    BlockPtr block = store.acquire({&kind, 1}).take()[0];
    for (size_t i = 0; i < g.channel_payload_bytes; ++i) block->slot()[i] = uint8_t(i * 7);
    block->seal(g, 42, 5, 64);
    BlockIdentity id;
    id.block_index = 5;
    id.content_id = block->content_id();
    id.tokens = 64;
    const uint8_t slot_class = 1;
    const Slot slot = tier->acquire({&slot_class, 1}).value()[0];
    std::vector<uint8_t> bytes(block->slot(), block->slot() + g.channel_slot_bytes), out(bytes.size());
    ASSERT_TRUE(is_ok(run(*tier, {write_request(slot, id, bytes)})[0].status));
    ASSERT_TRUE(is_ok(run(*tier, {read_request(slot, id, out)})[0].status));
    EXPECT_TRUE(out == bytes);
    // Every page and every field of the trailer that names the block.
    for (size_t at = 0; at < bytes.size(); at += at < g.channel_payload_bytes ? 511 : 1) {
        const size_t trailer = g.channel_payload_bytes;
        if (at >= trailer + 7 && at < trailer + 8) continue;    // reserved
        if (at >= trailer + 40 && at < trailer + 64) continue;  // reserved
        if (at >= trailer + 64 + 8 * g.layers) break;           // padding
        tier->address(slot)[at] ^= 0x10;
        std::fill(out.begin(), out.end(), uint8_t(0xee));
        EXPECT_EQ(run(*tier, {read_request(slot, id, out)})[0].status.code(), TA_E_CORRUPT) << "at byte " << at;
        EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](uint8_t b) { return b == 0xee; }));
        tier->address(slot)[at] ^= 0x10;
    }
    id.content_id ^= 1;
    EXPECT_EQ(run(*tier, {read_request(slot, id, out)})[0].status.code(), TA_E_CORRUPT);
    EXPECT_EQ(run(*tier, {write_request(slot, id, bytes)})[0].status.code(), TA_E_CORRUPT) << "checked on arrival too";
}

TEST_F(Host, CancelAndClose) {
    HostTierOptions o = tier_options(4 << 20);
    o.threads = 1;
    auto tier = make_tier(o);
    const uint8_t slot_class = 0;
    const Slot slot = tier->acquire({&slot_class, 1}).value()[0];
    ASSERT_TRUE(write_block(*tier, slot, make_identity(1, 1)));
    const auto expected = make_bytes(make_identity(1, 1), 20000);
    for (int round = 0; round < 30; ++round) {
        Collector collector;
        std::vector<std::vector<uint8_t>> bytes(50, std::vector<uint8_t>(20000, 0xee));
        std::vector<TierRequest> reads;
        for (size_t i = 0; i < bytes.size(); ++i) {
            reads.push_back(read_request(slot, make_identity(1, 1), bytes[i]));
            reads.back().tag = i;
        }
        collector.expect(reads.size());
        Result<TierBatch> batch = tier->submit(reads, collector);
        ASSERT_TRUE(batch.ok());
        if (round % 2) tier->cancel(batch.value());
        if (round == 29) {
            tier->release({&slot, 1});
            tier.reset();
            EXPECT_EQ(collector.pending(), 0u);
        }
        ASSERT_TRUE(collector.wait());
        for (size_t i = 0; i < bytes.size(); ++i) {
            const TierCompletion c = collector.take(i);
            EXPECT_EQ(c.cancelled, !c.status.ok());
            EXPECT_TRUE(bytes[i] == (c.cancelled ? std::vector<uint8_t>(20000, 0xee) : expected));
        }
    }
}

}  // namespace
}  // namespace ta
