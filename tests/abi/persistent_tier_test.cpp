// A disk tier that lasts: what was published and lay there is found by the next pool, also after kill -9, and nothing else is.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <thread>

#include "abi/prefix_steps.h"
#include "support/files.h"
#include "support/memory_store.h"

namespace ta::testing {
namespace {

constexpr uint64_t kTexts = 6, kBlocks = 4;

class PersistentTier : public PrefixSteps {
  protected:
    static KvPool open_pool(const Context& context, const std::string& path, uint64_t disk_bytes = uint64_t{2} << 20,
                            uint32_t bits = 4, ta_profile profile = TA_PROFILE_ACCURATE) {
        auto tiers = sized<ta_tier_options>();
        tiers.host_bytes = uint64_t{1} << 20;
        tiers.disk_bytes = disk_bytes;
        tiers.disk_path = path.c_str();
        auto numerics = sized<ta_numerics>();
        numerics.profile = profile;
        auto o = options(bits, &numerics);
        o.tiers = &tiers;
        return make_pool(context, o);
    }
    KvPool open_pool() const { return open_pool(context, file); }
    ta_tier_stats disk_stats(const KvPool& pool) const { return tier_stats(pool, TA_TIER_DISK); }

    const Folder folder;
    const std::string file = folder.file("tier");
};

TEST_F(PersistentTier, PublishedBlocksAreFoundByTheNextPool) {
    const KvPool plain = make_pool(context, options());
    const ta_seq reference = write(plain, 4 * 64, 1);
    for (const bool closed : {true, false}) {
        SCOPED_TRACE(closed ? "closed" : "destroyed");
        std::filesystem::remove(file);
        {
            const KvPool pool = open_pool();
            const ta_namespace space = make_namespace(pool, 1);
            const ta_seq seq = write(pool, 5 * 64, 1), other = write(pool, 5 * 64, 2);
            publish(pool, seq, space, 1, 4);
            EXPECT_EQ(move(pool, seq, 5, TA_TIER_DISK).moved, 5u);
            EXPECT_EQ(move(pool, other, 5, TA_TIER_DISK).moved, 5u);
            struct stat info;
            ASSERT_EQ(stat(file.c_str(), &info), 0);
            EXPECT_EQ(info.st_mode & 07777, 0600u);
            ta_error err;
            if (closed) require(ta_kv_pool_close(pool.get(), &err), err);
        }
        const KvPool pool = open_pool();
        EXPECT_EQ(stats(pool).sequences, 0u);
        const ta_namespace other = make_namespace(pool, 2), space = make_namespace(pool, 1);
        EXPECT_EQ(space_stats(pool, space).entries, 4u);
        EXPECT_EQ(space_stats(pool, other).entries, 0u);
        EXPECT_EQ(match(pool, other, 1, 4).second, 0);
        const auto [seq, n] = match(pool, space, 1, 5);
        ASSERT_EQ(n, 256);
        EXPECT_EQ(residency(pool, seq).disk_blocks, 4u);
        verify(pool, seq);
        const ta_seq fork = fork_sequence(plain, reference);
        EXPECT_TRUE(same_bits(grow(pool, seq, 70, 3), grow(plain, fork, 70, 3)));
        EXPECT_EQ(residency(pool, seq).disk_blocks, 0u);
        EXPECT_TRUE(same_values(pool, seq, plain, fork, 326));
        release(pool, seq);
    }
    // Blocks that came back from disk kept their records: a third pool finds them, though nobody wrote them again.
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    const auto [seq, n] = match(pool, space, 1, 5);
    ASSERT_EQ(n, 256);
    EXPECT_TRUE(same_values(pool, seq, plain, reference, 256));
}

// A record takes 16 keys. A flush does not say that a block has more of them on disk, and writes all that it can.
TEST_F(PersistentTier, AFlushNamesABlockWithMoreKeysThanItsRecordTakes) {
    constexpr uint64_t kOfRecord = 16, kKeys = 20;
    const auto is_published = [](const KvPool& pool, ta_namespace space, uint64_t text, size_t n) {
        const auto [seq, tokens] = match(pool, space, text, n);
        release(pool, seq);
        return tokens == int64_t(n) * 64;
    };
    {
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 2 * 64, 1), other = write(pool, 3 * 64, 2);
        publish(pool, other, space, 99, 3);  // behind the block with too many keys, by its index
        ta_error err;
        uint64_t of_four = 0;  // bytes of the blocks' records
        for (uint64_t text = 0; text < kKeys; ++text) {
            publish(pool, seq, space, 100 + text, 1);
            const ta_status s = ta_namespace_flush(pool.get(), space, &err);
            if (text == 0) of_four = disk_stats(pool).bytes_used;
            if (text < kOfRecord) {
                require(s, err);
                continue;
            }
            EXPECT_EQ(s, TA_E_LIMIT);
            EXPECT_EQ(err.block, 0);
            EXPECT_EQ(err.tier, TA_TIER_DISK);
            EXPECT_NE(std::string(err.message).find(std::to_string(text + 1)), std::string::npos) << err.message;
        }
        const auto is_all = [&] { return disk_stats(pool).bytes_used == of_four; };
        EXPECT_TRUE(soon(is_all)) << "records with fewer keys go";
        EXPECT_EQ(ta_namespace_flush(pool.get(), space, nullptr), TA_E_LIMIT);
        EXPECT_TRUE(is_all()) << "nothing is written twice";
    }
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    EXPECT_TRUE(is_published(pool, space, 99, 3));
    for (uint64_t text = 0; text < kKeys; ++text) EXPECT_EQ(is_published(pool, space, 100 + text, 1), text < kOfRecord) << text;
    ta_error err;
    require(ta_namespace_flush(pool.get(), space, &err), err);  // no block has more of them now
}

TEST_F(PersistentTier, FlushWritesWhatIsInMemory) {
    {
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 5 * 64 + 3, 1);
        move(pool, seq, 2, TA_TIER_DISK);  // before they are published: their records bear no key
        publish(pool, seq, space, 1, 5);
        ta_error err;
        require(ta_namespace_flush(pool.get(), space, &err), err);
        const uint64_t written = disk_stats(pool).bytes_used;
        require(ta_namespace_flush(pool.get(), space, &err), err);
        EXPECT_EQ(disk_stats(pool).bytes_used, written) << "nothing is written twice";
        EXPECT_EQ(residency(pool, seq).device_blocks, 4u);
        EXPECT_EQ(residency(pool, seq).disk_blocks, 2u);
        verify(pool, seq);
        grow(pool, seq, 3, 1);
    }
    {
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const auto [seq, n] = match(pool, space, 1, 6);
        EXPECT_EQ(n, 5 * 64);
        verify(pool, seq);
        ta_error err;
        require(ta_namespace_destroy(pool.get(), space, &err), err);
    }
    const KvPool pool = open_pool();
    EXPECT_EQ(match(pool, make_namespace(pool, 1), 1, 6).second, 0) << "its namespace had been ended";
    EXPECT_EQ(disk_stats(pool).blocks, 0u);
}

// The same blocks under the keys of two texts.
// The sync and the mark of its failure may both have failed. The next process cannot tell from headers what the disk lacks.
TEST_F(PersistentTier, AFlushReadsWhatAKilledProcessLeft) {
    constexpr size_t kDiskPage = 4096, kHeaders = 2 * kDiskPage;
    std::vector<char> left;
    {
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 4 * 64, 1);
        publish(pool, seq, space, 1, 4);
        EXPECT_EQ(move(pool, seq, 4, TA_TIER_DISK).moved, 4u);
        left = read_file(file);
    }
    // The last page of the last record.
    size_t at = left.size() / kDiskPage * kDiskPage;
    do at -= kDiskPage;
    while (at > kHeaders && std::memcmp(left.data() + at, "TADR", 4) != 0);
    ASSERT_GT(at, kHeaders);
    std::fill_n(left.begin() + ptrdiff_t(at + kDiskPage), kDiskPage, char{0});
    write_file(file, left);
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    EXPECT_EQ(space_stats(pool, space).entries, 4u) << "the open reads headers only";
    ta_error err;
    EXPECT_EQ(ta_namespace_flush(pool.get(), space, &err), TA_E_CORRUPT);
    EXPECT_GE(err.block, 0);
    EXPECT_EQ(space_stats(pool, space).entries, 3u);
    EXPECT_EQ(disk_stats(pool).requests_corrupt, 1u);
    require(ta_namespace_flush(pool.get(), space, &err), err);
    const auto [seq, n] = match(pool, space, 1, 4);
    EXPECT_LT(n, 256);
    verify(pool, seq);
}

TEST_F(PersistentTier, BlocksAreFoundUnderEveryKey) {
    const KvPool plain = make_pool(context, options());
    const ta_seq reference = write(plain, 4 * 64, 1);
    const auto expect_both = [&](const KvPool& pool, ta_namespace space) {
        for (const uint64_t text : {1, 11}) {
            const auto [seq, n] = match(pool, space, text, 5);
            EXPECT_EQ(n, 256) << "text " << text;
            EXPECT_TRUE(same_values(pool, seq, plain, reference, n)) << "text " << text;
            release(pool, seq);
        }
    };
    enum class Written { kByMove, kByFlush, kBetween };
    for (const Written how : {Written::kByMove, Written::kByFlush, Written::kBetween}) {
        SCOPED_TRACE(int(how));
        std::filesystem::remove(file);
        {
            const KvPool pool = open_pool();
            const ta_namespace space = make_namespace(pool, 1);
            const ta_seq seq = write(pool, 4 * 64, 1);
            publish(pool, seq, space, 1, 4);
            // Records that bear the first key alone: of blocks that stay on disk, and of some that come back.
            if (how == Written::kBetween) {
                move(pool, seq, 4, TA_TIER_DISK);
                move_now(pool, seq, 0, 2, TA_TIER_DEVICE);
            }
            publish(pool, seq, space, 11, 4);
            if (how == Written::kByMove) {
                EXPECT_EQ(move(pool, seq, 4, TA_TIER_DISK).moved, 4u);
                EXPECT_EQ(disk_stats(pool).blocks, 4u) << "one record for both";
            } else {
                ta_error err;
                require(ta_namespace_flush(pool.get(), space, &err), err);
                const uint64_t written = disk_stats(pool).bytes_used;
                require(ta_namespace_flush(pool.get(), space, &err), err);
                EXPECT_EQ(disk_stats(pool).bytes_used, written) << "nothing is written twice";
            }
            verify(pool, seq);
            expect_both(pool, space);
            EXPECT_EQ(move(pool, seq, 4, TA_TIER_DEVICE).failed, 0u);
            verify(pool, seq);
        }
        for (int again = 0; again < 2; ++again) {  // nobody writes it again
            const KvPool pool = open_pool();
            const ta_namespace space = make_namespace(pool, 1);
            EXPECT_EQ(space_stats(pool, space).entries, 8u);
            EXPECT_EQ(disk_stats(pool).blocks, 4u) << "one record for both";
            expect_both(pool, space);
            const ta_seq seq = match(pool, space, 11, 4).first;
            grow(pool, seq, 1, 1);
            expect_both(pool, space);
        }
    }
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    ta_error err;
    require(ta_namespace_destroy(pool.get(), space, &err), err);
    for (int i = 0; i < 2000 && disk_stats(pool).blocks > 0; ++i) usleep(1000);
    EXPECT_EQ(disk_stats(pool).blocks, 0u);
}

TEST_F(PersistentTier, BlocksAreFoundUnderTheKeysThatAreLeft) {
    {
        const KvPool pool = open_pool();
        const ta_namespace sized = make_namespace(pool, 2);
        const ta_seq probe = write(pool, 4 * 64, 1);
        publish(pool, probe, sized, 1, 4);
        const uint64_t bytes = space_stats(pool, sized).bytes;
        const ta_namespace space = make_namespace(pool, 1, 2 * bytes);
        const ta_seq seq = write(pool, 4 * 64, 1), other = write(pool, 4 * 64, 2);
        publish(pool, seq, space, 1, 4);
        publish(pool, seq, space, 11, 4);
        ta_error err;
        require(ta_namespace_flush(pool.get(), space, &err), err);
        release(pool, seq);
        publish(pool, other, space, 2, 4);  // the quota drops the entries that were not asked for longest
        EXPECT_EQ(match(pool, space, 1, 4).second, 0);
        EXPECT_EQ(match(pool, space, 11, 4).second, 256);
        require(ta_namespace_flush(pool.get(), space, &err), err);
    }
    const KvPool plain = make_pool(context, options());
    const ta_seq reference = write(plain, 4 * 64, 1);
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    EXPECT_EQ(match(pool, space, 1, 4).second, 0);
    EXPECT_EQ(match(pool, space, 2, 4).second, 256);
    const auto [seq, n] = match(pool, space, 11, 4);
    EXPECT_EQ(n, 256);
    EXPECT_TRUE(same_values(pool, seq, plain, reference, n));
}

TEST_F(PersistentTier, AnEndedNamespaceHasNoRecords) {
    const KvPool pool = open_pool();
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 4 * 64, 1);
    publish(pool, seq, space, 1, 4);
    ta_error err;
    require(ta_namespace_flush(pool.get(), space, &err), err);
    EXPECT_EQ(disk_stats(pool).blocks, 4u);
    require(ta_namespace_destroy(pool.get(), space, &err), err);
    for (int i = 0; i < 1000 && disk_stats(pool).blocks > 0; ++i) usleep(1000);
    EXPECT_EQ(disk_stats(pool).blocks, 0u) << "though a sequence has the blocks";
    verify(pool, seq);
}

TEST_F(PersistentTier, RecordsOfAnEndedNamespaceGiveWay) {
    const KvPool pool = open_pool(context, file, uint64_t{1} << 19);
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 40 * 64, 1), other = write(pool, 40 * 64, 2);
    publish(pool, seq, space, 1, 40);
    const uint64_t fit = move(pool, seq, 40, TA_TIER_DISK).moved;
    ASSERT_GT(fit, 5u);
    ASSERT_LT(fit, 40u);
    ta_error err;
    require(ta_namespace_destroy(pool.get(), space, &err), err);
    EXPECT_EQ(move(pool, seq, 40, TA_TIER_DEVICE).moved, fit);
    for (int i = 0; i < 2000 && disk_stats(pool).blocks > 0; ++i) usleep(1000);
    EXPECT_EQ(disk_stats(pool).blocks, 0u) << "the blocks are elsewhere, and no pool may find them";
    EXPECT_EQ(move(pool, other, 40, TA_TIER_DISK).moved, fit);
}

// A block has one record, whoever writes it: a flush, or a move at the same time.
TEST_F(PersistentTier, AFlushBesideMoves) {
    constexpr uint64_t kRounds = 24;
    const KvPool pool = open_pool(context, file, uint64_t{8} << 20);
    const ta_namespace space = make_namespace(pool, 1);
    std::vector<ta_seq> seqs;
    for (uint64_t round = 0; round < kRounds; ++round) {
        seqs.push_back(write(pool, 5 * 64, round));
        publish(pool, seqs.back(), space, round, 5);
        std::thread mover([&, usleep_for = useconds_t(round % 8 * 100)] {
            usleep(usleep_for);
            EXPECT_EQ(move(pool, seqs.back(), 5, TA_TIER_DISK).moved, 5u);
            EXPECT_EQ(move(pool, seqs.back(), 5, TA_TIER_DEVICE).moved, 5u);
        });
        ta_error err;
        const ta_status s = ta_namespace_flush(pool.get(), space, &err);
        mover.join();
        EXPECT_EQ(s, TA_OK) << err.message;
    }
    const auto blocks_are = [&](uint64_t n) {
        for (int i = 0; i < 2000 && disk_stats(pool).blocks != n; ++i) usleep(1000);
        return disk_stats(pool).blocks == n;
    };
    EXPECT_TRUE(blocks_are(kRounds * 5)) << disk_stats(pool).blocks;
    for (ta_seq s : seqs) verify(pool, s);
    ta_error err;
    require(ta_namespace_destroy(pool.get(), space, &err), err);
    EXPECT_TRUE(blocks_are(0)) << disk_stats(pool).blocks << " records are nobody's";
}

TEST_F(PersistentTier, AFlushBesideTheEndOfItsNamespace) {
    const KvPool pool = open_pool(context, file, uint64_t{8} << 20);
    std::vector<ta_seq> seqs;
    for (uint8_t round = 1; round <= 24; ++round) {
        const ta_namespace space = make_namespace(pool, round);
        seqs.push_back(write(pool, 5 * 64, round));
        publish(pool, seqs.back(), space, round, 5);
        std::thread ends([&, usleep_for = useconds_t(round % 8 * 100)] {
            usleep(usleep_for);
            ta_error err;
            EXPECT_EQ(ta_namespace_destroy(pool.get(), space, &err), TA_OK);
        });
        ta_error err;
        const ta_status s = ta_namespace_flush(pool.get(), space, &err);
        ends.join();
        EXPECT_TRUE(s == TA_OK || s == TA_E_STALE) << err.message;
    }
    for (int i = 0; i < 2000 && disk_stats(pool).blocks > 0; ++i) usleep(1000);
    EXPECT_EQ(disk_stats(pool).blocks, 0u) << "the next pool would find them";
    for (ta_seq s : seqs) verify(pool, s);
}

TEST_F(PersistentTier, AFullDiskWithLittleToDropDoesNotWait) {
    const KvPool pool = open_pool(context, file, uint64_t{1} << 19);
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 64 * 64, 1);
    publish(pool, seq, space, 1, 1);
    ta_error err;
    require(ta_namespace_flush(pool.get(), space, &err), err);  // one record is all that can be dropped
    const auto start = std::chrono::steady_clock::now();
    EXPECT_GT(move(pool, seq, 64, TA_TIER_DISK).failed, 0u);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(900)) << "erasures may take a second";
}

TEST_F(PersistentTier, AFullDiskDropsWhatNobodyAskedForLongest) {
    const Context own = make_context(1);
    {
        const KvPool pool = open_pool(own, file, uint64_t{1} << 19);
        const ta_namespace space = make_namespace(pool, 1);
        for (uint64_t text = 0; text < 20; ++text) {
            const ta_seq seq = write(pool, 4 * 64, text);
            publish(pool, seq, space, text, 4);
            const ta_move_info info = move(pool, seq, 4, TA_TIER_DISK);
            EXPECT_EQ(info.failed, 0u) << text << ": " << ta_status_name(info.status);
            release(pool, seq);
        }
        EXPECT_GT(space_stats(pool, space).evicted, 10u);
    }
    const KvPool pool = open_pool(own, file, uint64_t{1} << 19);
    const ta_namespace space = make_namespace(pool, 1);
    EXPECT_EQ(match(pool, space, 19, 4).second, 256);
    EXPECT_EQ(match(pool, space, 0, 4).second, 0);
}

TEST_F(PersistentTier, WrongFilesAndDamage) {
    {
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 5 * 64, 1);
        publish(pool, seq, space, 1, 5);
        move(pool, seq, 5, TA_TIER_DISK);
        EXPECT_THROW(open_pool(), std::runtime_error) << "it is in use";
    }
    EXPECT_THROW(open_pool(context, file, uint64_t{2} << 20, 2), std::runtime_error) << "of another pool";
    // Bits flipped everywhere: what is found is right, or refused.
    const KvPool plain = make_pool(context, options());
    const ta_seq reference = write(plain, 5 * 64, 1);
    const auto size = std::filesystem::file_size(file);
    const std::string good = folder.file("good");
    const std::vector<char> bytes = read_file(file);
    std::filesystem::copy(file, good);
    Random random(5);
    int refused = 0;
    for (int round = 0; round < 12; ++round) {
        std::filesystem::copy(good, file, std::filesystem::copy_options::overwrite_existing);
        {
            std::fstream f(file, std::ios::in | std::ios::out | std::ios::binary);
            for (int flips = 0; flips < 3;) {
                const auto at = uint64_t(random.between(8192, int64_t(size) - 1));
                if (bytes[at] == 0) continue;  // mostly where nothing is
                ++flips;
                f.seekg(std::streamoff(at));
                const char x = char(f.get());
                f.seekp(std::streamoff(at));
                f.put(char(x ^ (1 << random.below(8))));
            }
        }
        const KvPool pool = open_pool();
        const ta_namespace space = make_namespace(pool, 1);
        const auto [seq, n] = match(pool, space, 1, 5);
        ta_error err;
        const int32_t one = 1;
        const Plan plan = make_plan(pool);
        const ta_status s = ta_plan_begin(plan.get(), 1, &seq, &one, nullptr, nullptr, &err);
        if (s == TA_OK) {
            require(ta_plan_abort(plan.get(), &err), err);
            EXPECT_TRUE(same_values(pool, seq, plain, reference, n));
            continue;
        }
        ++refused;
        EXPECT_EQ(s, TA_E_CORRUPT) << err.message;
        ASSERT_GE(err.block, 0);
        // The damaged entry is gone with the next match.
        EXPECT_LE(match(pool, space, 1, 5).second, err.block * 64);
    }
    EXPECT_GT(refused, 0);
    auto tiers = sized<ta_tier_options>();
    const std::string none = folder.file("none");
    tiers.disk_path = none.c_str();
    auto o = options();
    o.tiers = &tiers;
    ta_kv_pool* out = nullptr;
    ta_error err;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &o, &out, &err), TA_E_INVALID) << err.message;
    EXPECT_FALSE(std::filesystem::exists(none));
}

// A file that became shorter stands for sectors that cannot be read. The blocks are still those of a sequence.
TEST_F(PersistentTier, ABlockThatCannotBeReadIsNotMatchedAndGivesWay) {
    const KvPool pool = open_pool(), plain = make_pool(context, options());
    const ta_namespace space = make_namespace(pool, 1);
    const ta_seq seq = write(pool, 300, 1), reference = write(plain, 300, 1);
    publish(pool, seq, space, 1, 4);
    EXPECT_EQ(move(pool, seq, 4, TA_TIER_DISK).moved, 4u);
    std::filesystem::resize_file(file, 4096);
    const auto [unlucky, n] = match(pool, space, 1, 4);
    EXPECT_EQ(n, 256);
    ta_error err;
    const int32_t one = 1;
    const Plan plan = make_plan(pool);
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &unlucky, &one, nullptr, nullptr, &err), TA_E_IO) << err.message;
    EXPECT_LE(match(pool, space, 1, 4).second, err.block * 64);
    publish(pool, write(pool, 300, 1), space, 1, 4);
    const auto [lucky, all] = match(pool, space, 1, 4);
    EXPECT_EQ(all, 256);
    require(ta_plan_begin(plan.get(), 1, &lucky, &one, nullptr, nullptr, &err), err);
    require(ta_plan_abort(plan.get(), &err), err);
    EXPECT_TRUE(same_values(pool, lucky, plain, reference, 256));
}

// Universal scales follow from the blocks.
TEST_F(PersistentTier, ProfilePaper) {
    const auto open = [&] { return open_pool(context, file, uint64_t{2} << 20, 4, TA_PROFILE_PAPER); };
    std::vector<float> expected;
    {
        const KvPool pool = open();
        const ta_namespace space = make_namespace(pool, 1);
        const ta_seq seq = write(pool, 300, 1);
        publish(pool, seq, space, 1, 4);
        EXPECT_EQ(move(pool, seq, 4, TA_TIER_DISK).moved, 4u);
        truncate(pool, seq, 256);
        expected = grow(pool, seq, 70, 3);
    }
    const KvPool pool = open();
    const auto [seq, n] = match(pool, make_namespace(pool, 1), 1, 4);
    ASSERT_EQ(n, 256);
    EXPECT_TRUE(same_bits(grow(pool, seq, 70, 3), expected));
}

// The child's promises before it was killed.
struct Notes {
    std::atomic<uint64_t> published[kTexts];  // blocks of a text that are published and on disk
    std::atomic<uint64_t> done;
};

// Publishes texts block by block, sends them to disk, brings them back, goes on with them; until it is killed.
[[noreturn]] void work(const std::string& path, uint64_t seed, Notes& notes, const ta_namespace_options& name,
                       KvPool (*open)(const Context&, const std::string&),
                       ta_move_info (*to)(const KvPool&, ta_seq, uint64_t, ta_tier),
                       std::vector<float> (*go_on)(const KvPool&, ta_seq, int32_t, uint64_t),
                       std::vector<uint8_t> (*key)(uint64_t, size_t)) {
    try {
        const Context context = make_context(1);
        const KvPool pool = open(context, path);
        ta_namespace space = 0;
        ta_error err;
        require(ta_namespace_create(pool.get(), &name, &space, &err), err);
        Random random(seed);
        for (;;) {
            const auto text = uint64_t(random.below(int64_t(kTexts)));
            const auto wanted = uint64_t(random.between(1, int64_t(kBlocks)));
            ta_seq seq = 0;
            int64_t n = 0;
            require(ta_seq_match_prefix(pool.get(), space, key(text, kBlocks).data(), kBlocks, &seq, &n, &err), err);
            if (n < int64_t(wanted) * 64) {
                go_on(pool, seq, int32_t(int64_t(wanted) * 64 - n), text);
            } else if (n < int64_t(kBlocks) * 64) {
                go_on(pool, seq, 1, text);
            }
            const uint64_t blocks = std::max(wanted, uint64_t(n) / 64);
            require(ta_seq_publish(pool.get(), seq, space, key(text, blocks).data(), blocks, &err), err);
            const ta_move_info info = to(pool, seq, blocks, TA_TIER_DISK);
            if (info.state != TA_MOVE_DONE) _exit(4);
            if (notes.published[text].load() < blocks) notes.published[text] = blocks;
            if (random.below(3) == 0) to(pool, seq, blocks, TA_TIER_DEVICE);
            if (random.below(4) == 0) require(ta_namespace_flush(pool.get(), space, &err), err);
            require(ta_seq_release(pool.get(), seq, &err), err);
            ++notes.done;
        }
    } catch (...) {
        _exit(3);
    }
}

TEST_F(PersistentTier, WhatWasPromisedSurvivesKill9) {
    context.reset();  // its threads would not be in the children
    const std::string path = file;
    void* shared = mmap(nullptr, sizeof(Notes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(shared, MAP_FAILED);
    Notes& notes = *new (shared) Notes{};
    const auto rounds = int(number_from("TA_KILL_ROUNDS", 50));
    Random random(11);
    int64_t kept = 0;
    const auto open = [](const Context& c, const std::string& p) { return open_pool(c, p); };
    for (int round = 0; round < rounds; ++round) {
        const auto seed = uint64_t(random.below(1 << 30));
        const pid_t child = fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            const auto to = [](const KvPool& pool, ta_seq seq, uint64_t n, ta_tier tier) { return move(pool, seq, n, tier); };
            const auto go_on = [](const KvPool& pool, ta_seq seq, int32_t n, uint64_t text) {
                return grow(pool, seq, n, text);
            };
            const auto key = [](uint64_t text, size_t n) { return keys(text, n); };
            work(path, seed, notes, namespace_options(1), open, to, go_on, key);
        }
        // Sometimes before there is anything, mostly in the middle of the work, however slow the machine is.
        const uint64_t done = notes.done.load();
        for (int i = 0; round % 4 != 0 && notes.done.load() == done && i < 20000; ++i) usleep(1000);
        usleep(useconds_t(random.below(round % 4 == 0 ? 20000 : 60000)));
        kill(child, SIGKILL);
        int status = 0;
        ASSERT_EQ(waitpid(child, &status, 0), child);
        ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself with " << WEXITSTATUS(status);
        const Context own = make_context(1);
        const KvPool pool = open_pool(own, path), plain = make_pool(own, options());
        const ta_namespace space = make_namespace(pool, 1);
        for (uint64_t text = 0; text < kTexts; ++text) {
            const auto [seq, n] = match(pool, space, text, kBlocks);
            ASSERT_GE(n, int64_t(notes.published[text].load()) * 64) << "text " << text << " in round " << round;
            kept += n / 64;
            if (n == 0) continue;
            verify(pool, seq);
            const ta_seq reference = write(plain, int32_t(n), text);
            ASSERT_TRUE(same_values(pool, seq, plain, reference, n)) << "text " << text << " in round " << round;
            // Steps that bring it back give what they give where it was never away.
            ASSERT_TRUE(same_bits(grow(pool, seq, 3, 90 + text), grow(plain, reference, 3, 90 + text))) << "round " << round;
        }
    }
    std::printf("%d kills, %llu texts acknowledged, %lld blocks found again\n", rounds, (unsigned long long)notes.done.load(),
                (long long)kept);
    EXPECT_GT(kept, rounds);
    EXPECT_GT(notes.done.load(), uint64_t(rounds / 2));
    munmap(shared, sizeof(Notes));
}

}  // namespace
}  // namespace ta::testing
