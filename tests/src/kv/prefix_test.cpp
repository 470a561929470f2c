// Quotas beside moves, and what files bring along for namespaces that nobody has created: bounded in memory and in number.
#include "src/kv/prefix.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "src/kv/pool.h"
#include "support/files.h"
#include "support/stopped.h"
#include "tiering/faulty_files.h"

namespace ta {
namespace {

constexpr size_t kMostUnclaimed = 65536;

class Prefix : public ::testing::Test {
  protected:
    void SetUp() override {
        Context::Options options;
        options.threads = 1;
        Seams seams;
        seams.files = files;
        Result<std::shared_ptr<Context>> context = Context::create(std::move(options), std::move(seams));
        Result<Geometry> g = Geometry::make({.layers = 1, .kv_heads = 1, .head_dim = 64, .bits = 4});
        const ta_numerics plain{};
        Result<Numerics> n = resolve_numerics(&plain, g.value().shapes);
        Result<std::shared_ptr<Pool>> p = Pool::create(context.take(), g.take(), n.take(), uint64_t{1} << 24, 16, tiers);
        ASSERT_TRUE(p.ok());
        pool = p.take();
        const PageKind kind[] = {PageKind::kToken};
        Result<std::vector<BlockPtr>> blocks = pool->blocks().acquire(kind);
        ASSERT_TRUE(blocks.ok());
        block = blocks.value()[0];
    }
    // So many entries of one block in each of so many namespaces.
    std::vector<PrefixStore::Record> records(uint64_t namespaces, uint64_t each) const {
        std::vector<PrefixStore::Record> all;
        for (uint64_t i = 0; i < namespaces * each; ++i) {
            const uint64_t tag = 1 + i / each, key_of = i * 16 + each;
            BlockKey key{};
            std::memcpy(key.data(), &tag, sizeof tag);
            std::memcpy(key.data() + sizeof tag, &key_of, sizeof key_of);
            all.push_back({key, i % each, block});
        }
        return all;
    }
    static size_t memory() {
        const struct mallinfo2 now = mallinfo2();
        return now.uordblks + now.hblkhd;
    }

    uint64_t block_bytes() const { return pool->geometry().slot_bytes(PageKind::kToken); }
    // Of one full block.
    ta_seq add_sequence() {
        const PageKind kind[] = {PageKind::kToken};
        Sequences::Snapshot s;
        s.blocks = pool->blocks().acquire(kind).value();
        s.blocks[0]->seal(pool->geometry(), pool->fingerprint(), 0, uint32_t(kPageTokens));
        s.length = kPageTokens;
        return pool->sequences().adopt(std::move(s)).value();
    }

    TierSettings tiers;
    const std::shared_ptr<testing::FaultyFiles> files = std::make_shared<testing::FaultyFiles>();
    std::shared_ptr<Pool> pool;
    BlockPtr block;
};

TEST_F(Prefix, RecoveredEntriesTakeMemoryByTheirNumber) {
    constexpr uint64_t kNamespaces = 4000, kEach = 4;
    std::vector<PrefixStore::Record> all = records(kNamespaces, kEach);
    const size_t before = memory();
    pool->prefixes().recover(std::move(all));
    EXPECT_EQ(pool->prefixes().records().size(), kNamespaces * kEach);
    EXPECT_LT(memory(), before + kNamespaces * kEach * 1024);
}

TEST_F(Prefix, RecoveredEntriesNameSoManyNamespaces) {
    PrefixStore& store = pool->prefixes();
    store.recover(records(kMostUnclaimed + 10, 1));
    EXPECT_EQ(store.records().size(), kMostUnclaimed);
    EXPECT_EQ(block->entries(), kMostUnclaimed);
    EXPECT_EQ(PrefixStore::Named(store).tenant_of(kMostUnclaimed + 11), kUnknownTenant);
    Result<Tenant> fresh = store.create(Salt{7}, UINT64_MAX);
    EXPECT_TRUE(fresh.ok());
    store.recover(records(kMostUnclaimed + 10, 2));  // those that are there already get more
    EXPECT_EQ(store.records().size(), 3 * kMostUnclaimed);
}

TEST_F(Prefix, NamesEndWithTheLastLoadThatFails) {
    PrefixStore& store = pool->prefixes();
    const auto known = [&](Tenant id) { return store.tag_of(id) != kEndedSpace; };
    Tenant a = 0, b = 0, c = 0;
    {
        PrefixStore::Named one(store);
        a = one.tenant_of(1);
        b = one.tenant_of(2);
        c = one.tenant_of(3);
        EXPECT_EQ(one.tenant_of(1), a);
        EXPECT_EQ(one.tenant_of(0), 0u);
        EXPECT_EQ(one.tenant_of(kEndedSpace), kUnknownTenant);
        PrefixStore::Named good(store);
        EXPECT_EQ(good.tenant_of(2), b);
        good.keep();
        store.recover(records(1, 1));
    }
    EXPECT_TRUE(known(a)) << "it has an entry";
    EXPECT_TRUE(known(b)) << "another load kept it";
    EXPECT_FALSE(known(c));
    PrefixStore::Named first(store);
    {
        PrefixStore::Named second(store);
        c = second.tenant_of(3);
        EXPECT_EQ(first.tenant_of(3), c);
    }
    EXPECT_TRUE(known(c)) << "the first goes on";
}

// As many as files may name, all of sequences that are gone but for those that something still has.
TEST_F(Prefix, NamespacesThatNothingIsOfAreForgottenForOthers) {
    PrefixStore& store = pool->prefixes();
    const auto known = [&](Tenant id) { return store.tag_of(id) != kEndedSpace; };
    Tenant of_sequence = 0, of_block = 0, of_entry = 0, of_none = 0;
    {
        PrefixStore::Named loaded(store);
        for (SpaceTag tag = 1; tag <= kMostUnclaimed - 1; ++tag) ASSERT_NE(loaded.tenant_of(tag), kUnknownTenant);
        of_entry = loaded.tenant_of(1);
        of_sequence = loaded.tenant_of(2);
        of_block = loaded.tenant_of(3);
        of_none = loaded.tenant_of(4);
        loaded.keep();
    }
    store.recover(records(1, 1));
    Sequences::Snapshot s;
    s.tenant = of_sequence;
    ASSERT_TRUE(pool->sequences().adopt(std::move(s)).ok());
    pool->sequences().snapshot(add_sequence()).value().blocks[0]->set_tenant(of_block);
    pool->end_forgotten_namespaces();
    EXPECT_TRUE(known(of_none)) << "there is room for one more";

    PrefixStore::Named now(store);
    const Tenant of_load = now.tenant_of(kMostUnclaimed);
    EXPECT_TRUE(now.complete().ok());
    {
        PrefixStore::Named full(store);
        EXPECT_EQ(full.tenant_of(kMostUnclaimed + 1), kUnknownTenant);
        EXPECT_EQ(full.complete().code(), TA_E_LIMIT);
    }
    pool->end_forgotten_namespaces();
    PrefixStore::Named next(store);
    EXPECT_NE(next.tenant_of(kMostUnclaimed + 1), kUnknownTenant);
    EXPECT_TRUE(next.complete().ok());
    for (const Tenant id : {of_entry, of_sequence, of_block, of_load}) EXPECT_TRUE(known(id)) << id;
    EXPECT_FALSE(known(of_none));
    EXPECT_EQ(next.tenant_of(2), of_sequence);
}

TEST_F(Prefix, NamespacesThatEntriesAreOfAreNotForgotten) {
    PrefixStore& store = pool->prefixes();
    store.recover(records(kMostUnclaimed, 1));
    pool->end_forgotten_namespaces();
    PrefixStore::Named loaded(store);
    EXPECT_NE(loaded.tenant_of(kMostUnclaimed), kUnknownTenant);
    EXPECT_TRUE(loaded.complete().ok());
    EXPECT_EQ(loaded.tenant_of(kMostUnclaimed + 1), kUnknownTenant);
    EXPECT_EQ(loaded.complete().code(), TA_E_LIMIT);
}

// A reader of a disk learns nothing of what another namespace has published, even if it is the same.
TEST_F(Prefix, HashedKeysDependOnTheSecret) {
    PrefixStore& store = pool->prefixes();
    const std::array<uint8_t, kPrefixKeyBytes> key{1};
    std::array<BlockKey, 2> hashed;
    for (uint8_t i = 0; i < 2; ++i) {
        const Tenant space = store.create(Salt{uint8_t(i + 1)}, UINT64_MAX).value();
        ASSERT_TRUE(pool->publish(add_sequence(), space, key).ok());
        hashed[i] = store.records(space).at(0).key;
    }
    for (size_t word = 0; word < sizeof(BlockKey); word += 8)
        EXPECT_NE(std::memcmp(hashed[0].data() + word, hashed[1].data() + word, 8), 0) << "from byte " << word;
}

TEST_F(Prefix, ADamagedBlockIsNotMatchedAndGivesWay) {
    PrefixStore& store = pool->prefixes();
    const Tenant space = store.create(Salt{1}, UINT64_MAX).value();
    const std::array<uint8_t, kPrefixKeyBytes> key{1};
    const auto matched = [&] { return store.match(space, key).value().matched; };
    const ta_seq a = add_sequence();
    ASSERT_TRUE(pool->publish(a, space, key).ok());
    EXPECT_EQ(matched(), 1u);
    pool->sequences().snapshot(a).value().blocks[0]->set_stuck();
    EXPECT_EQ(matched(), 0u);
    EXPECT_EQ(store.stats(space).value().entries, 0u);
    ASSERT_TRUE(pool->publish(add_sequence(), space, key).ok());
    EXPECT_EQ(matched(), 1u);
}

TEST_F(Prefix, APublishWaitsForWhoHoldsBlocksForAMoment) {
    const Tenant space = pool->prefixes().create(Salt{1}, block_bytes()).value();
    const std::array<uint8_t, kPrefixKeyBytes> first{1}, second{2};
    const ta_seq a = add_sequence();
    BlockPtr held = pool->sequences().snapshot(a).value().blocks[0];
    ASSERT_TRUE(pool->publish(a, space, first).ok());
    ASSERT_TRUE(pool->sequences().release(a).ok());

    const ta_seq b = add_sequence();
    EXPECT_EQ(pool->publish(b, space, second).code(), TA_E_LIMIT) << "who holds it says nothing of letting go";
    EXPECT_FALSE(pool->sequences().snapshot(b).value().blocks[0]->keeps_kind()) << "it was not published";
    std::atomic<bool> holds = false;
    std::thread mover([&] {
        const Residency::BlockHold now(pool->residency());
        holds = true;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        held.reset();
    });
    while (!holds) std::this_thread::yield();
    EXPECT_TRUE(pool->publish(b, space, second).ok());
    mover.join();
    EXPECT_EQ(pool->prefixes().stats(space).value().evicted, 1u);
}

class PrefixOnDisk : public Prefix {
  protected:
    void SetUp() override {
        tiers.disk_budget = uint64_t{1} << 24;
        tiers.disk_path = folder.file("tier");
        Prefix::SetUp();
    }
    MoveProgress demote(ta_seq seq) {
        const MoveItem item{pool->sequences().snapshot(seq).value().blocks[0], 0};
        return pool->residency().mover()->run({&item, 1}, TierKind::kDisk, MoveReason::kAsked, kNoDeadline);
    }
    const testing::Folder folder;
};

TEST_F(PrefixOnDisk, WhatIsPublishedStaysWhileTheDiskIsReadOnly) {
    const Tenant space = pool->prefixes().create(Salt{1}, UINT64_MAX).value();
    const ta_seq published = add_sequence(), other = add_sequence();
    ASSERT_TRUE(pool->publish(published, space, std::array<uint8_t, kPrefixKeyBytes>{1}).ok());
    ASSERT_EQ(demote(published).moved, 1u);
    ASSERT_TRUE(pool->sequences().release(published).ok());
    files->break_now(testing::Fault::kEnospc, true);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(demote(other).status.code(), TA_E_TIER_FULL);
    EXPECT_EQ(pool->residency().disk()->health().state, TierState::kReadOnly);
    EXPECT_EQ(pool->prefixes().stats(space).value().entries, 1u);
    files->heal();
}

// The pool has as many sequences as it may have, so the match lets go of what it has found.
TEST_F(Prefix, APublishWaitsForAMatchThatFails) {
    const std::array<uint8_t, kPrefixKeyBytes> first{1}, second{2};
    for (int i = 0; i < 15; ++i) ASSERT_TRUE(pool->sequences().create().ok());
    int64_t n = 0;
    for (bool stopped = true; stopped && !HasFailure(); n += stopped) {
        SCOPED_TRACE("allocation " + std::to_string(n));
        ASSERT_LT(n, 200);
        Salt salt{};
        std::memcpy(salt.data(), &n, sizeof n);
        const Tenant space = pool->prefixes().create(salt, block_bytes()).value();
        const ta_seq a = add_sequence();
        ASSERT_TRUE(pool->publish(a, space, first).ok());
        ASSERT_TRUE(pool->sequences().release(a).ok());
        const ta_seq last = pool->sequences().create().value();
        const std::vector<BlockKey> key = pool->prefixes().hash_keys(space, second).take();
        const PageKind kind[] = {PageKind::kToken};
        const std::vector<BlockPtr> fresh = pool->blocks().acquire(kind).take();
        fresh[0]->mark_sealed();
        stopped = testing::stop_at(
            n, [&] { EXPECT_EQ((pool->match_prefix(space, first)).status().code(), TA_E_LIMIT); },
            [&] { EXPECT_TRUE(pool->publish_blocks(space, key, fresh).ok()); });
        ASSERT_TRUE(pool->sequences().release(last).ok());
    }
    EXPECT_TRUE(HasFailure() || n >= 3) << n;
}

// Who waits for others to let go of blocks waits neither for holds of its own nor for those of one that waits as well.
TEST_F(Prefix, AHolderWaitsForThoseAloneWhoLetGo) {
    const Residency& r = pool->residency();
    const int a = 0, b = 0;
    const Residency::HolderWait nobodys(r, nullptr);
    EXPECT_FALSE(nobodys.others_hold());
    const Residency::BlockHold first(r, &a), second(r, &a);
    EXPECT_TRUE(r.blocks_are_held());
    EXPECT_TRUE(nobodys.others_hold());
    {
        const Residency::HolderWait as(r, &a);
        EXPECT_FALSE(as.others_hold());
        EXPECT_FALSE(nobodys.others_hold());
        std::optional<Residency::BlockHold> bs(std::in_place, r, &b);
        EXPECT_TRUE(as.others_hold());
        {
            const Residency::HolderWait waits(r, &b), again(r, &b);
            EXPECT_FALSE(as.others_hold());
            EXPECT_FALSE(waits.others_hold());
        }
        EXPECT_TRUE(as.others_hold());
        bs.reset();
        EXPECT_FALSE(as.others_hold());
        const Residency::BlockHold unnamed(r);
        EXPECT_TRUE(as.others_hold());
    }
    EXPECT_TRUE(nobodys.others_hold());
    EXPECT_TRUE(r.blocks_are_held());
}

}  // namespace
}  // namespace ta
