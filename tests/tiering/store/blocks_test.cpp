// Blocks under a budget: what is handed out, kept, given back; hashes and what they catch.
#include "tiering/store/blocks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kernels/format/slot.h"
#include "src/attend/step.h"
#include "support/counting_allocator.h"

namespace ta {
namespace {

constexpr uint64_t kFingerprint = 0x1234567890abcdef;

Geometry small_geometry() {
    Result<Geometry> g = Geometry::make({.layers = 2, .kv_heads = 2, .head_dim = 64, .bits = 4});
    return g.take();
}

class Blocks : public ::testing::Test {
  protected:
    BlockStore& store(uint64_t budget) {
        store_ = std::make_unique<BlockStore>(allocator_, nullptr, geometry, budget);
        return *store_;
    }
    static BlockPtr take(BlockStore& s, PageKind kind) {
        Result<std::vector<BlockPtr>> b = s.acquire({&kind, 1});
        return b.ok() ? b.take().front() : nullptr;
    }

    const Geometry geometry = small_geometry();
    const uint64_t token = geometry.token_slot_bytes, channel = geometry.channel_slot_bytes;
    testing::CountingAllocator counting;

  private:
    Allocator allocator_{counting.hooks()};
    std::unique_ptr<BlockStore> store_;
};

// A begin that drops blocks waits for the readers that it was told of.
TEST_F(Blocks, AReaderThatIsAwaitedSignals) {
    BlockStore& s = store(token);
    const uint64_t reading = s.start_reading();
    const RoomSignal::Watch watch(s.room_signal());
    ASSERT_TRUE(s.still_reading(reading));
    std::jthread([&] { s.stop_reading(reading); }).join();
    EXPECT_TRUE(watch.signalled());
}

// Moves wait for the readers of blocks that have left, and begins for the room that these keep.
TEST_F(Blocks, AReaderThatKeptAPlaceSignals) {
    BlockStore& s = store(2 * token);
    const PageKind kind = PageKind::kToken;
    const BlockPtr block = take(s, kind);
    Result<std::vector<uint8_t*>> to = s.acquire_slots({&kind, 1});
    ASSERT_TRUE(block && to.ok());
    const uint64_t reading = s.start_reading();
    ASSERT_TRUE(s.move(*block, {TierKind::kDevice, kind, to.value()[0], {}, {}}));
    ASSERT_TRUE(s.has_vacated());
    const RoomSignal::Watch watch(s.room_signal());
    std::jthread([&] { s.stop_reading(reading); }).join();
    EXPECT_TRUE(watch.signalled());
    EXPECT_FALSE(s.has_vacated());
}

// Each look of a begin for room is such a reader: where these signalled, begins in the queue woke each other without end.
TEST_F(Blocks, AReaderThatKeptNothingDoesNotSignal) {
    BlockStore& s = store(token);
    const uint64_t before = s.start_reading(), reading = s.start_reading();
    ASSERT_TRUE(s.still_reading(before));
    const RoomSignal::Watch watch(s.room_signal());
    std::jthread([&] { s.stop_reading(reading); }).join();
    EXPECT_FALSE(watch.signalled());
    std::jthread([&] { s.stop_reading(before); }).join();
    EXPECT_TRUE(watch.signalled());
}

TEST_F(Blocks, TheBudgetHoldsToTheByte) {
    BlockStore& s = store(2 * token + channel);
    const BlockPtr a = take(s, PageKind::kToken), b = take(s, PageKind::kToken), c = take(s, PageKind::kChannel);
    ASSERT_TRUE(a && b && c);
    for (PageKind kind : {PageKind::kToken, PageKind::kChannel}) {
        Result<std::vector<BlockPtr>> more = s.acquire({&kind, 1});
        ASSERT_FALSE(more.ok());
        EXPECT_EQ(std::move(more).status().code(), TA_E_TIER_FULL);
    }
    EXPECT_EQ(s.usage().used, 2 * token + channel);
    EXPECT_EQ(s.usage().token_blocks, 2u);
    EXPECT_EQ(s.usage().channel_blocks, 1u);
    EXPECT_EQ(counting.bytes_alive(), 2 * token + channel);
}

TEST_F(Blocks, AllOrNothing) {
    BlockStore& s = store(3 * token);
    const BlockPtr held = take(s, PageKind::kToken);
    take(s, PageKind::kToken).reset();
    const auto was = s.usage();
    const PageKind wanted[] = {PageKind::kToken, PageKind::kToken, PageKind::kChannel};
    size_t failed = 0;
    Result<std::vector<BlockPtr>> more = s.acquire(wanted, &failed);
    ASSERT_FALSE(more.ok());
    EXPECT_EQ(failed, 2u) << "two token blocks fit, the channel block after them does not";
    EXPECT_EQ(s.usage().used, was.used);
    EXPECT_EQ(s.usage().cached, was.cached);
    EXPECT_EQ(s.usage().peak, was.peak);
    EXPECT_TRUE(s.acquire({wanted, 2}).ok());
}

TEST_F(Blocks, FreedSlotsAreReused) {
    BlockStore& s = store(1 << 20);
    BlockPtr a = take(s, PageKind::kToken);
    const uint8_t* slot = a->slot();
    const uint64_t first_content = a->content_id();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(slot) % kSlotAlignment, 0u);
    a.reset();
    EXPECT_EQ(s.usage().used, 0u);
    EXPECT_EQ(s.usage().cached, token);
    a = take(s, PageKind::kToken);
    EXPECT_EQ(a->slot(), slot);
    EXPECT_NE(a->content_id(), first_content) << "new content in an old slot has an identity of its own";
    EXPECT_EQ(s.usage().cached, 0u);
    EXPECT_EQ(s.usage().peak, token);
    EXPECT_EQ(counting.allocations(), 1u);
}

TEST_F(Blocks, WhatIsKeptForReuseGivesWay) {
    BlockStore& s = store(4 * channel);
    {
        std::vector<BlockPtr> all;
        for (int i = 0; i < 4; ++i) all.push_back(take(s, PageKind::kChannel));
    }
    EXPECT_EQ(s.usage().cached, 4 * channel);
    const BlockPtr t = take(s, PageKind::kToken);
    ASSERT_TRUE(t) << "slots of the other kind stood in the way";
    EXPECT_LE(s.usage().used + s.usage().cached, 4 * channel);
    EXPECT_EQ(counting.bytes_alive(), s.usage().used + s.usage().cached);
}

TEST_F(Blocks, TrimGivesEverythingBack) {
    BlockStore& s = store(1 << 20);
    take(s, PageKind::kToken).reset();
    take(s, PageKind::kChannel).reset();
    const BlockPtr kept = take(s, PageKind::kToken);
    take(s, PageKind::kToken).reset();
    EXPECT_GT(s.usage().cached, 0u);
    s.trim();
    EXPECT_EQ(s.usage().cached, 0u);
    EXPECT_EQ(s.usage().used, token);
    EXPECT_EQ(counting.bytes_alive(), token);
}

TEST_F(Blocks, ManyFreedSlotsAreNotAllKept) {
    BlockStore& s = store(1 << 30);
    std::vector<BlockPtr> all;
    for (int i = 0; i < 200; ++i) all.push_back(take(s, PageKind::kChannel));
    all.clear();
    EXPECT_LE(s.usage().cached, 64 * channel);
    EXPECT_EQ(counting.bytes_alive(), s.usage().cached);
}

TEST_F(Blocks, OnlyTheLastOwnerGivesTheSlotBack) {
    BlockStore& s = store(1 << 20);
    BlockPtr a = take(s, PageKind::kToken), b = a;
    a.reset();
    EXPECT_EQ(s.usage().token_blocks, 1u);
    b.reset();
    EXPECT_EQ(s.usage().token_blocks, 0u);
}

TEST_F(Blocks, WithoutHooksSlotsLieInChunks) {
    Allocator system{ta_allocator{}};
    BlockStore s(system, nullptr, geometry, 64 << 20);
    std::vector<BlockPtr> all;
    for (int i = 0; i < 2000; ++i) {
        all.push_back(take(s, i % 3 ? PageKind::kChannel : PageKind::kToken));
        ASSERT_TRUE(all.back());
        EXPECT_EQ(reinterpret_cast<uintptr_t>(all.back()->slot()) % kSlotAlignment, 0u);
        std::memset(all.back()->slot(), i, geometry.slot_bytes(all.back()->kind()));
    }
    for (int i = 0; i < 2000; ++i) {
        const size_t bytes = geometry.slot_bytes(all[size_t(i)]->kind());
        for (size_t b = 0; b < bytes; b += 509) ASSERT_EQ(all[size_t(i)]->slot()[b], uint8_t(i)) << "slots overlap";
    }
    EXPECT_EQ(system.bytes_in_use(), s.usage().used);
    all.clear();
    s.trim();
    EXPECT_EQ(system.bytes_in_use(), 0u);
    EXPECT_TRUE(take(s, PageKind::kChannel));
}

// Host memory in the place of a GPU's.
class FakeDevice final : public Device {
  public:
    int ordinal() const override { return 0; }
    const char* name() const override { return "fake"; }
    int compute_capability() const override { return 0; }
    // Zeros, as a driver gives: what nobody has written since is taken for nobody's.
    uint8_t* allocate(size_t bytes) override {
        void* memory = std::aligned_alloc(4096, bytes);
        return static_cast<uint8_t*>(memory ? std::memset(memory, 0, bytes) : nullptr);
    }
    void deallocate(uint8_t* ptr, size_t) override { std::free(ptr); }
    Status read(void*, const uint8_t*, size_t) override { return {}; }
    Status read_rows(void*, const uint8_t*, size_t, size_t, size_t) override { return {}; }
    Status write(uint8_t*, const void*, size_t) override { return {}; }
    Status health() const override { return {}; }
    Status copy(std::span<const DeviceCopy>, bool) override { return {}; }
    Status zero(std::span<const DeviceRange> ranges) override {
        for (const DeviceRange& r : ranges) std::memset(r.memory, 0, r.bytes);
        return {};
    }
    Status wait_for_steps() override { return {}; }
    Status register_host(uint8_t*, size_t) override { return {}; }
    void unregister_host(uint8_t*) override {}
    int numa_node() const override { return -1; }
    uint32_t* allocate_counters(size_t) override { return nullptr; }
    void deallocate_counters(uint32_t*) override {}
    uint64_t bytes_in_use() const override { return 0; }
    uint64_t bytes_peak() const override { return 0; }
};
TEST_F(Blocks, ASlabServesOneKindAfterTheOther) {
    FakeDevice device;
    Allocator system{ta_allocator{}};
    BlockStore s(system, &device, geometry, 4 << 20);
    ASSERT_TRUE(s.take_slab().ok());
    for (int round = 0; round < 3; ++round) {
        for (PageKind kind : {PageKind::kChannel, PageKind::kToken}) {
            std::vector<BlockPtr> all;
            while (BlockPtr b = take(s, kind)) all.push_back(std::move(b));
            EXPECT_EQ(all.size(), (4 << 20) / geometry.slot_bytes(kind)) << "the whole budget";
        }
    }
}

// Of slots that were released all over the slab 64 of a kind are kept: their regions serve other kinds once these lack room.
TEST_F(Blocks, WhatIsKeptDoesNotFragmentASlab) {
    FakeDevice device;
    Allocator system{ta_allocator{}};
    const uint64_t budget = 32 << 20;
    BlockStore s(system, &device, geometry, budget);
    ASSERT_TRUE(s.take_slab().ok());
    std::vector<BlockPtr> all;
    for (int round = 0; round < 3; ++round) {
        for (PageKind kind : {PageKind::kToken, PageKind::kChannel}) {
            while (BlockPtr b = take(s, kind)) all.push_back(std::move(b));
            EXPECT_EQ(all.size(), budget / geometry.slot_bytes(kind)) << "the whole budget";
            std::shuffle(all.begin(), all.end(), std::minstd_rand(7));
            all.clear();
            EXPECT_LT(s.fragmentation(), 0.01);
        }
    }
    SlotCounts promise{}, to{};
    to[size_t(PageKind::kToken)] = budget / token;
    EXPECT_TRUE(s.promise(promise, to).ok());
    s.settle(promise, {});
}

// One slot in use keeps its region from other kinds.
TEST_F(Blocks, ASlabKnowsItsFragmentation) {
    FakeDevice device;
    Allocator system{ta_allocator{}};
    BlockStore s(system, &device, geometry, 32 << 20);
    ASSERT_TRUE(s.take_slab().ok());
    std::vector<BlockPtr> all, stay;
    while (BlockPtr b = take(s, PageKind::kToken)) all.push_back(std::move(b));
    EXPECT_EQ(s.fragmentation(), 0.0) << "nothing is free";
    for (size_t i = 0; i < all.size(); i += 16) stay.push_back(std::move(all[i]));
    all.clear();
    const uint64_t free = s.free_bytes(), usable = s.usable_bytes();
    EXPECT_GT(s.fragmentation(), 0.1);
    EXPECT_DOUBLE_EQ(s.fragmentation(), double(free - usable) / double(free));
    uint64_t got = 0;
    while (BlockPtr b = take(s, PageKind::kChannel)) {
        all.push_back(std::move(b));
        got += channel;
    }
    EXPECT_NEAR(double(got), double(usable), double(channel));
}

// Whatever was taken and given back, in whatever order: any mixture of blocks that is no larger than what is usable fits.
TEST_F(Blocks, WhatIsUsableFits) {
    FakeDevice device;
    Allocator system{ta_allocator{}};
    BlockStore s(system, &device, geometry, 8 << 20);
    ASSERT_TRUE(s.take_slab().ok());
    std::vector<BlockPtr> all;
    std::minstd_rand random(3);
    uint64_t fragmented = 0;
    SlotCounts promise{};
    for (int i = 0; i < 3000; ++i) {
        if (i % 10 == 0) {
            SlotCounts to{};
            for (size_t kind = 0; kind < 2; ++kind) to[kind] = random() % 20;
            (void)s.promise(promise, to);
        }
        std::shuffle(all.begin(), all.end(), random);
        all.resize(all.size() - random() % (all.size() + 1) / 2);
        const uint64_t usable = s.usable_bytes(), most = 1 + random() % 100;
        fragmented += usable < s.free_bytes();
        std::vector<PageKind> wanted;
        for (uint64_t bytes = 0; wanted.size() < most; bytes += geometry.slot_bytes(wanted.back())) {
            const PageKind kind = random() % 3 ? PageKind::kChannel : PageKind::kToken;
            if (bytes + geometry.slot_bytes(kind) > usable) break;
            wanted.push_back(kind);
        }
        Result<std::vector<BlockPtr>> more = s.acquire(wanted);
        ASSERT_TRUE(more.ok()) << i << ": " << std::move(more).status().detail()->message;
        for (BlockPtr& b : more.value()) all.push_back(std::move(b));
    }
    EXPECT_GT(fragmented, 1000u);
    s.settle(promise, {});
}

// A tenant's bytes are never seen by another, nor by nobody's blocks, in slots kept for reuse and in those that were cut anew.
TEST_F(Blocks, SlotsAreZeroedBetweenTenants) {
    FakeDevice device;
    // Memory that begins as zeros, as a system's and a driver's does, so that every byte that is not one is somebody's.
    ta_allocator zeroed{};
    zeroed.allocate = [](size_t bytes, size_t alignment, void*) -> void* {
        void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
        return memory ? std::memset(memory, 0, bytes) : nullptr;
    };
    zeroed.deallocate = [](void* memory, size_t, size_t, void*) { std::free(memory); };
    for (Device* d : {static_cast<Device*>(nullptr), static_cast<Device*>(&device)}) {
        Allocator system{zeroed};
        BlockStore s(system, d, geometry, 4 << 20);
        ASSERT_TRUE(!d || s.take_slab().ok());
        const auto acquire = [&](PageKind kind, size_t n, Tenant tenant) {
            Result<std::vector<BlockPtr>> blocks =
                s.acquire(std::vector<PageKind>(n, kind), nullptr, std::vector<Tenant>(n, tenant));
            EXPECT_TRUE(blocks.ok());
            return blocks.take();
        };
        const auto count = [&](const std::vector<BlockPtr>& blocks, uint8_t value) {
            size_t n = 0;
            for (const BlockPtr& b : blocks)
                n += size_t(std::count(b->slot(), b->slot() + geometry.slot_bytes(b->kind()), value));
            return n;
        };
        const size_t most = (4 << 20) / channel;
        for (Tenant other : {Tenant{6}, Tenant{0}}) {
            std::vector<BlockPtr> blocks = acquire(PageKind::kChannel, 3, 5);
            for (const BlockPtr& b : blocks) std::memset(b->slot(), 0xab, channel);
            blocks.clear();
            blocks = acquire(PageKind::kChannel, 3, 5);
            EXPECT_EQ(count(blocks, 0xab), 3 * channel) << "its own";
            blocks.clear();
            blocks = acquire(PageKind::kChannel, 3, other);
            EXPECT_EQ(count(blocks, 0), 3 * channel);
        }
        std::vector<BlockPtr> all = acquire(PageKind::kChannel, most, 5);
        for (const BlockPtr& b : all) std::memset(b->slot(), 0xab, channel);
        all.clear();
        all = acquire(PageKind::kToken, (4 << 20) / token, 0);
        EXPECT_EQ(count(all, 0), all.size() * token);
    }
}

TEST_F(Blocks, ScratchIsWhatRoomThereIs) {
    BlockStore& s = store(2 * token + 5 * channel);
    std::vector<BlockPtr> blocks;
    for (int i = 0; i < 2; ++i) blocks.push_back(take(s, PageKind::kToken));
    blocks.push_back(take(s, PageKind::kChannel));
    EXPECT_EQ(s.acquire_scratch(PageKind::kChannel, 0).size(), 0u);
    std::vector<BlockStore::Scratch> scratch = s.acquire_scratch(PageKind::kChannel, 100);
    EXPECT_EQ(scratch.size(), 4u);
    EXPECT_EQ(s.usage().used, s.budget());
    EXPECT_EQ(s.usage().channel_blocks, 1u);
    EXPECT_EQ(take(s, PageKind::kChannel), nullptr);
    EXPECT_TRUE(s.acquire_scratch(PageKind::kChannel, 1).empty());
    EXPECT_TRUE(s.has_scratch());
    s.release_scratch(PageKind::kChannel, scratch.back(), 0);
    EXPECT_NE(take(s, PageKind::kChannel), nullptr);
    scratch.pop_back();
    for (const BlockStore::Scratch& slot : scratch) s.release_scratch(PageKind::kChannel, slot, 0);
    EXPECT_FALSE(s.has_scratch());
    EXPECT_EQ(s.acquire_scratch(PageKind::kChannel, 3).size(), 3u);
    EXPECT_EQ(s.usage().channel_blocks, 1u);
}

// Whoever looks while scratch comes and goes counts no block.
TEST_F(Blocks, ScratchIsNoBlockForAMoment) {
    BlockStore& s = store(4 * channel);
    std::atomic<bool> over{false};
    std::vector<std::jthread> threads;
    for (int i = 0; i < 2; ++i) {
        threads.emplace_back([&] {
            while (!over) {
                for (const BlockStore::Scratch& slot : s.acquire_scratch(PageKind::kChannel, 2))
                    s.release_scratch(PageKind::kChannel, slot, 0);
            }
        });
    }
    int wrong = 0, looks = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    for (; std::chrono::steady_clock::now() < end; ++looks) wrong += s.usage().channel_blocks != 0;
    over = true;
    EXPECT_EQ(wrong, 0) << "of " << looks;
}

// Scratch is zeroed before another tenant gets the slot, and before the same one does where it was a third
// one's.
TEST_F(Blocks, ScratchIsOfTheTenantWhoseBytesAreInIt) {
    BlockStore& s = store(channel);
    const PageKind kind = PageKind::kChannel;
    const auto use = [&](Tenant tenant, uint8_t byte) {
        const std::vector<BlockStore::Scratch> scratch = s.acquire_scratch(kind, 1);
        ASSERT_EQ(scratch.size(), 1u);
        std::memset(scratch[0].slot, byte, channel);
        s.release_scratch(kind, scratch[0], tenant);
    };
    const auto first_byte_for = [&](Tenant tenant) {
        Result<std::vector<BlockPtr>> b = s.acquire({&kind, 1}, nullptr, {&tenant, 1});
        return b.ok() ? int(b.value()[0]->slot()[0]) : -1;
    };
    EXPECT_EQ(first_byte_for(5), 0);
    use(5, 0xAA);
    EXPECT_EQ(first_byte_for(5), 0xAA);
    EXPECT_EQ(first_byte_for(6), 0);
    use(5, 0xAA);  // beside what 6 may have left
    EXPECT_EQ(first_byte_for(5), 0);
    use(5, 0xAA);
    EXPECT_EQ(first_byte_for(0), 0);
}

TEST_F(Blocks, SlotsOfASlabDoNotOverlap) {
    FakeDevice device;
    Allocator system{ta_allocator{}};
    BlockStore s(system, &device, geometry, 2 << 20);
    ASSERT_TRUE(s.take_slab().ok());
    std::vector<BlockPtr> all;
    uint64_t random = 1;
    for (int i = 0; i < 20000; ++i) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        if (random >> 40 & 1 || all.empty()) {
            BlockPtr b = take(s, random >> 41 & 3 ? PageKind::kChannel : PageKind::kToken);
            if (!b) continue;
            std::memset(b->slot(), int(b->content_id()), geometry.slot_bytes(b->kind()));
            all.push_back(std::move(b));
        } else {
            const size_t n = size_t(random >> 45) % all.size();
            const size_t bytes = geometry.slot_bytes(all[n]->kind());
            for (size_t at : {size_t{0}, bytes / 2, bytes - 1}) ASSERT_EQ(all[n]->slot()[at], uint8_t(all[n]->content_id()));
            all.erase(all.begin() + std::ptrdiff_t(n));
        }
    }
}

TEST_F(Blocks, AnAllocatorWithoutMemoryIsNotAFullTier) {
    counting.fails = [] { return true; };
    const PageKind kind = PageKind::kToken;
    Result<std::vector<BlockPtr>> b = store(1 << 20).acquire({&kind, 1});
    ASSERT_FALSE(b.ok());
    EXPECT_EQ(std::move(b).status().code(), TA_E_MEMORY);
}

// ---------------------------------------------------------------------------------------------------------------- hashes

class Sealed : public Blocks, public ::testing::WithParamInterface<PageKind> {
  protected:
    BlockPtr sealed(BlockStore& s, uint64_t index) {
        BlockPtr b = take(s, GetParam());
        for (size_t i = 0; i < geometry.payload_bytes(GetParam()); ++i) b->slot()[i] = uint8_t(i * 7 + i / 251);
        b->seal(geometry, kFingerprint, index, 64);
        return b;
    }
};

TEST_P(Sealed, EveryByteOfPagesHashesAndIdentityCounts) {
    BlockStore& s = store(1 << 20);
    const BlockPtr b = sealed(s, 5);
    ASSERT_TRUE(b->sealed());
    ASSERT_TRUE(b->verify(geometry, kFingerprint, 5, b->slot(), b->kind()).ok());
    const size_t payload = geometry.payload_bytes(GetParam()), trailer = sizeof(SlotTrailer), hashes = 2 * sizeof(uint64_t);
    for (size_t i = 0; i < payload + trailer + hashes; i += i < payload ? 61 : 1) {
        const size_t in_trailer = i - payload;
        // Reserved bytes of the trailer are in no hash.
        if (i >= payload && (in_trailer == offsetof(SlotTrailer, reserved0) ||
                             (in_trailer >= offsetof(SlotTrailer, reserved) && in_trailer < trailer)))
            continue;
        for (uint8_t flip : {uint8_t{1}, uint8_t{128}}) {
            b->slot()[i] ^= flip;
            const Status status = b->verify(geometry, kFingerprint, 5, b->slot(), b->kind());
            ASSERT_EQ(status.code(), TA_E_CORRUPT) << "byte " << i;
            ASSERT_EQ(status.detail()->block, 5);
            if (i < payload) {
                ASSERT_EQ(status.detail()->layer, i < geometry.page_offset(GetParam(), 1) ? 0 : 1) << "byte " << i;
            }
            b->slot()[i] ^= flip;
        }
    }
    EXPECT_TRUE(b->verify(geometry, kFingerprint, 5, b->slot(), b->kind()).ok());
}

TEST_P(Sealed, APageIsThePageThatWasAskedFor) {
    BlockStore& s = store(1 << 20);
    const BlockPtr a = sealed(s, 5), b = sealed(s, 5);
    EXPECT_EQ(a->verify(geometry, kFingerprint, 6, a->slot(), a->kind()).code(), TA_E_CORRUPT)
        << "another place in the sequence";
    EXPECT_EQ(a->verify(geometry, kFingerprint + 1, 5, a->slot(), a->kind()).code(), TA_E_CORRUPT) << "another pool";
    // The same bytes under another identity are another page.
    std::memcpy(a->slot(), b->slot(), geometry.slot_bytes(GetParam()));
    EXPECT_EQ(a->verify(geometry, kFingerprint, 5, a->slot(), a->kind()).code(), TA_E_CORRUPT) << "another content";
    // A page of another layer is, too.
    const BlockPtr c = sealed(s, 5);
    ASSERT_EQ(geometry.page_bytes(GetParam(), 0), geometry.page_bytes(GetParam(), 1));
    uint8_t* second = c->slot() + geometry.page_offset(GetParam(), 1);
    std::swap_ranges(c->slot(), second, second);
    auto* hashes = reinterpret_cast<uint64_t*>(c->slot() + geometry.payload_bytes(GetParam()) + sizeof(SlotTrailer));
    std::swap(hashes[0], hashes[1]);
    EXPECT_EQ(c->verify(geometry, kFingerprint, 5, c->slot(), c->kind()).code(), TA_E_CORRUPT)
        << "layers exchanged with their hashes";
}

TEST_P(Sealed, ABlockThatIsNotFullHasNoHashes) {
    BlockStore& s = store(1 << 20);
    const BlockPtr b = take(s, GetParam());
    b->seal(geometry, kFingerprint, 0, 63);
    EXPECT_FALSE(b->sealed());
}

INSTANTIATE_TEST_SUITE_P(Kinds, Sealed, ::testing::Values(PageKind::kToken, PageKind::kChannel),
                         [](const auto& i) { return i.param == PageKind::kToken ? "Token" : "Channel"; });

}  // namespace
}  // namespace ta
