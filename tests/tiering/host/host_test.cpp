// Host memory and the tier in it: what is done without when the system says no, placement, registration, slots.
#include "tiering/host/host.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace ta {
namespace {

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

// Near the sizes at which the regions become others, too.
TEST_F(Host, SmallBudgetsAreUsedAndNotExceeded) {
    for (uint64_t budget = 5 * 20480; budget < 100 * 20480; budget += 4096 + budget % 4096 / 2 + 331) {
        auto tier = make_tier(tier_options(budget));
        ASSERT_TRUE(tier);
        const TierStats s = tier->stats();
        EXPECT_LE(s.taken, budget);
        EXPECT_EQ(s.used + s.free + s.memory, s.taken);
        if (budget < 20 * 20480) continue;
        EXPECT_GE(s.slots_free[0] * 20480, (budget - 4096) * 8 / 10) << budget;
        EXPECT_GE(s.slots_free[1] * 12288, (budget - 4096) * 8 / 10) << budget;
    }
}

TEST_F(Host, SlotsLieApart) {
    auto tier = make_tier(tier_options(4 << 20));
    std::vector<uint8_t> wanted;
    for (int i = 0; i < 60; ++i) wanted.push_back(i % 3 != 0);
    Result<std::vector<Slot>> slots = tier->acquire(wanted);
    ASSERT_TRUE(slots.ok());
    const auto bytes_of = [](Slot s) { return tier_options(0).slot_bytes[s.slot_class]; };
    for (size_t i = 0; i < wanted.size(); ++i) {
        const Slot s = slots.value()[i];
        EXPECT_EQ(s.slot_class, wanted[i]);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(tier->address(s)) % 4096, 0u);
        std::memset(tier->address(s), int(i + 1), bytes_of(s));
    }
    for (size_t i = 0; i < wanted.size(); ++i) {
        const Slot s = slots.value()[i];
        const uint8_t* const data = tier->address(s);
        EXPECT_TRUE(std::all_of(data, data + bytes_of(s), [&](uint8_t b) { return b == i + 1; })) << "slot " << i;
    }
    EXPECT_EQ(tier->stats().slots_used[0], 20u);
    EXPECT_EQ(tier->stats().slots_used[1], 40u);
    tier->release(slots.value());
    EXPECT_EQ(tier->stats().used, 0u);
}

}  // namespace
}  // namespace ta
