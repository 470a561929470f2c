// Power failures and kills: a pool with a persistent disk tier publishes, moves, flushes, drops and ends namespaces on a file of
// which a power failure at any moment leaves any of the 4 KiB pages written since the last sync, and whose syncs and reads fail
// now and then, at opens too. Every image is opened: what a flush acknowledged is there, and what is served under a key is what
// was published under it, bit for bit. TA_POWER_IMAGES says how many images, TA_POWER_SEED with which file to begin.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <thread>
#include <tuple>

#include "abi/prefix_steps.h"
#include "src/api/api.h"
#include "support/failing_memory.h"
#include "support/files.h"
#include "tiering/disk/disk.h"
#include "tiering/power_files.h"

namespace ta::testing {
namespace {

constexpr uint64_t kTexts = 4, kBlocks = 3, kSecond = 100;  // text t is published as t, and as t + kSecond
constexpr uint64_t kKeys[] = {0, 1, 2, 3, 100, 101, 102, 103};
constexpr uint8_t kSalts[] = {1, 2};
constexpr uint64_t kImagesOfAFile = 100;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kImages = 400;
#else
constexpr uint64_t kImages = 2000;
#endif

class Power : public PrefixSteps {
  protected:
    using Image = PowerFiles::Image;
    using Promises = std::set<std::tuple<uint8_t, uint64_t, size_t>>;  // salt, key, block
    struct Written {
        ta_seq seq;
        uint64_t text;
        uint8_t salt;
    };

    Power() {
        const KvPool plain = make_pool(context, options());
        const ta_kv_pool_stats s = stats(plain);
        slot_bytes = s.token_block_bytes;
        for (uint64_t text = 0; text < kTexts; ++text) {
            const ta_seq seq = write(plain, kBlocks * 64, text);
            for (size_t b = 0; b < kBlocks; ++b) {
                const BlockPtr block = block_of(plain, seq, b);
                expected[text][b].assign(block->slot(), block->slot() + payload_bytes(plain, *block));
            }
        }
    }

    // A file of its own, with its pools.
    void start_file(uint64_t seed) {
        random.seed(seed);
        files = std::make_shared<PowerFiles>(seed);
        syncs_fail = random() % 3 == 0 ? 5 : 0;
        reads_fail = random() % 3 == 0 ? 4 : 0;
        ta::Seams seams;
        seams.files = files;
        ta::Context::Options o;
        o.threads = 1;
        recorded.reset(new ta_context{ta::Context::create(std::move(o), std::move(seams)).take()});
        std::filesystem::remove(file);
        owed.clear();
        // With little room records of blocks that are elsewhere give way, and what nobody uses is dropped.
        disk_bytes = (random() % 2 ? 12 : 40) * (slot_bytes + 8192);
        start_pool();
    }
    void end_file() {
        files->watch(0);
        files->fail_reads(0);
        written.clear();
        pool.reset();
        recorded.reset();
        failed_syncs += files->failed_syncs();
    }
    KvPool open_pool(const Context& on, const std::string& path) const {
        auto tiers = sized<ta_tier_options>();
        tiers.disk_bytes = disk_bytes;
        tiers.disk_path = path.c_str();
        auto o = options();
        o.budget_bytes = uint64_t{4} << 20;
        o.tiers = &tiers;
        return make_pool(on, o);
    }
    // Syncs may fail at the open, too. Then another one follows.
    void start_pool(bool power_failed = false) {
        files->fail_reads(0);
        bool may_lack = false;
        for (int tries = 0; !pool; ++tries) {
            may_lack |= files->lacks_mark() && !power_failed;
            files->fail_syncs(tries < 3 && syncs_fail > 0 ? 3 : 0);
            try {
                pool = open_pool(recorded, file);
            } catch (const std::exception&) {
                if (syncs_fail == 0 || tries >= 3) throw;
            }
        }
        files->fail_syncs(0);
        for (const uint8_t salt : kSalts) {
            spaces[salt] = make_namespace(pool, salt);
            // Where nothing tells of a sync that failed in a process that was killed, the first flush finds out what is whole.
            for (int tries = 0; may_lack && ta_namespace_flush(pool.get(), spaces[salt], nullptr) != TA_OK; ++tries)
                ASSERT_LT(tries, 10);
        }
        judge(pool, spaces, owed);
        files->fail_syncs(syncs_fail);
        files->fail_reads(reads_fail);
        files->watch(30);
    }
    void restart() {
        files->watch(0);
        const uint64_t end = random() % 3;  // the power fails, a kill, or an ordinary end
        Image image = files->image();
        files->keep_for_kill();
        written.clear();
        pool.reset();
        if (end == 2) image = files->image();
        judge(image, owed);
        if (end == 0) {
            store(file, image);
            files->restart(image);
        } else if (end == 1) {
            store(file, files->restore());
        }
        start_pool(end == 0);
    }
    static void store(const std::string& path, const Image& image) {
        std::filesystem::remove(path);
        write_file(path, {image.begin(), image.end()});
        chmod(path.c_str(), 0600);
    }

    void step() {
        if (random() % (files->lacks_mark() ? 3 : 30) == 0) return restart();
        const Promises before = owed;
        const uint64_t dropped = pool->impl->blocks().dropped_records();
        act();
        // For room the pool may have erased any record of a block that is elsewhere, and have written that again, unsynced.
        if (pool->impl->blocks().dropped_records() != dropped) owed.clear();
        keep_owed();
        // A promise that held before and after the call held all the time.
        Promises all_the_time;
        for (const auto& promise : before) {
            if (owed.contains(promise)) all_the_time.insert(promise);
        }
        for (const Image& image : files->take_images()) judge(image, all_the_time);
        if (random() % 4 == 0) judge(files->image(), owed);
    }
    void act() {
        const uint8_t salt = kSalts[random() % 2];
        switch (random() % 12) {
            case 0:
            case 1:
            case 2:
                return write_text(salt, random() % kTexts, 1 + random() % kBlocks);
            case 3:
            case 4:
                if (!written.empty()) publish_again(written[random() % written.size()]);
                return;
            case 5:
            case 6:
                return move_some();
            case 7:
            case 8:
                return flush(salt);
            case 9: {
                std::thread mover([this] { move_some(); });
                flush(salt);
                return mover.join();
            }
            case 10:
                if (random() % 4 == 0) return end_space(salt);
                return fill();
            default:
                if (written.empty()) return;
                std::swap(written[random() % written.size()], written.back());
                release(pool, written.back().seq);
                written.pop_back();
        }
    }
    void write_text(uint8_t salt, uint64_t text, uint64_t blocks) {
        const auto [seq, n] = match(pool, spaces[salt], text, blocks);
        try {
            if (n < int64_t(blocks) * 64) grow(pool, seq, int32_t(int64_t(blocks) * 64 - n), text);
        } catch (const std::exception&) {  // what was never acknowledged may be damaged after a power failure
            return release(pool, seq);
        }
        publish(pool, seq, spaces[salt], text + (random() % 3 == 0 ? kSecond : 0), blocks);
        written.push_back({seq, text, salt});
    }
    void publish_again(const Written& w) {
        publish(pool, w.seq, spaces[w.salt], w.text + (random() % 2 ? kSecond : 0), size_t(length(pool, w.seq)) / 64);
    }
    void move_some() {
        if (written.empty()) return;
        const ta_seq seq = written[random() % written.size()].seq;
        move(pool, seq, size_t(length(pool, seq)) / 64, random() % 3 ? TA_TIER_DISK : TA_TIER_DEVICE);
    }
    void flush(uint8_t salt) {
        ta_error err;
        const ta_status s = ta_namespace_flush(pool.get(), spaces[salt], &err);
        if (s != TA_OK) {
            EXPECT_TRUE(s == TA_E_IO || s == TA_E_TIER_FULL) << err.message;
            return;
        }
        ++flushes;
        for (const uint64_t key : kKeys) {
            const auto [seq, n] = match(pool, spaces[salt], key, kBlocks);
            for (size_t b = 0; b < size_t(n) / 64; ++b) owed.emplace(salt, key, b);
            release(pool, seq);
        }
    }
    void end_space(uint8_t salt) {
        std::erase_if(owed, [salt](const auto& promise) { return std::get<0>(promise) == salt; });
        for (const Written& w : written) {
            if (w.salt == salt) release(pool, w.seq);
        }
        std::erase_if(written, [salt](const Written& w) { return w.salt == salt; });
        ta_error err;
        require(ta_namespace_destroy(pool.get(), spaces[salt], &err), err);
        spaces[salt] = make_namespace(pool, salt);
    }
    // The disk, with what nobody is promised.
    void fill() {
        const ta_seq seq = write(pool, 6 * 64, 77);
        move(pool, seq, 6, TA_TIER_DISK);
        release(pool, seq);
    }
    // The pool may drop what nobody uses, and records of what is elsewhere, for others.
    void keep_owed() {
        const BlockStore& blocks = pool->impl->blocks();
        for (const uint8_t salt : kSalts) {
            for (const uint64_t key : kKeys) {
                if (!owed.contains({salt, key, 0})) continue;
                // Not by a match: a block that cannot be read for now is not matched, and has not been dropped.
                const PrefixStore& prefixes = pool->impl->prefixes();
                const std::vector<BlockKey> hashed = prefixes.hash_keys(spaces[salt], keys(key, kBlocks)).take();
                const std::vector<PrefixStore::Record> records = prefixes.records(spaces[salt]);
                for (size_t b = 0; b < kBlocks; ++b) {
                    const bool there = std::any_of(records.begin(), records.end(), [&](const auto& record) {
                        return record.key == hashed[b] && has_record(blocks, *record.block);
                    });
                    if (!there)
                        std::erase_if(owed, [&](const auto& p) {
                            return std::get<0>(p) == salt && std::get<1>(p) == key && std::get<2>(p) >= b;
                        });
                }
            }
        }
    }
    static bool has_record(const BlockStore& blocks, const Block& block) {
        const Place place = blocks.place_of(block);
        return blocks.has_record(block) || (place.tier == TierKind::kDisk && place.keys.state > 0);
    }
    static BlockPtr block_of(const KvPool& pool, ta_seq seq, size_t b) {
        BlockPtr block;
        const Status s = pool->impl->sequences().inspect(seq, [&](const Sequence& sequence) {
            block = sequence.blocks.at(b);
            return Status();
        });
        EXPECT_TRUE(s.ok());
        return block;
    }
    static size_t payload_bytes(const KvPool& pool, const Block& block) {
        return pool->impl->geometry().payload_bytes(block.kind());
    }
    bool wait_until_empty() const {
        for (int i = 0; i < 5000 && tier_stats(pool, TA_TIER_DISK).bytes_used > 0; ++i) usleep(1000);
        return tier_stats(pool, TA_TIER_DISK).bytes_used == 0;
    }

    // Opens an image.
    void judge(const Image& image, const Promises& promised) {
        ++images;
        refused.clear();
        const std::string path = folder.file("image");
        store(path, image);
        try {
            const KvPool found = open_pool(context, path);
            std::map<uint8_t, ta_namespace> of;
            for (const uint8_t salt : kSalts) of[salt] = make_namespace(found, salt);
            judge(found, of, promised);
        } catch (const std::exception& e) {
            ADD_FAILURE() << "image " << images << ": " << e.what();
        }
    }
    // A pool that was just opened. It has read all that may not be whole.
    void judge(const KvPool& found, const std::map<uint8_t, ta_namespace>& of, const Promises& promised) {
        for (const auto& [salt, space] : of) {
            for (const uint64_t key : kKeys) {
                const auto [seq, n] = match(found, space, key, kBlocks);
                size_t whole = 0, must = 0;
                while (whole < size_t(n) / 64 && is_whole(found, seq, key % kSecond, whole)) ++whole;
                while (promised.contains({salt, key, must})) ++must;
                served += whole;
                kept += must;
                EXPECT_TRUE(whole >= must && whole == size_t(n) / 64)
                    << "image " << images << ": of key " << key << " in namespace " << int(salt) << ", " << must
                    << " blocks were acknowledged, and " << n / 64 << " are found, " << whole << " of them whole: " << refused;
                release(found, seq);
            }
        }
    }
    // False: it is refused. Anything but its own bytes is a failure.
    bool is_whole(const KvPool& found, ta_seq seq, uint64_t text, size_t block) {
        const BlockPtr there = block_of(found, seq, block);
        std::vector<uint8_t> slot(found->impl->geometry().slot_bytes(there->kind()));
        const Status s = found->impl->reader().read(*there, block, slot.data());
        if (s.code() == TA_E_CORRUPT) {
            refused = s.detail()->message;
            return false;
        }
        slot.resize(payload_bytes(found, *there));
        EXPECT_TRUE(s.ok() && slot == expected[text][block])
            << "image " << images << ": text " << text << " block " << block << " is not what was published "
            << (s.ok() ? "" : s.detail()->message);
        return true;
    }

    const Folder folder;
    const std::string file = folder.file("tier");
    uint64_t slot_bytes = 0, disk_bytes = 0, syncs_fail = 0, reads_fail = 0;
    std::vector<uint8_t> expected[kTexts][kBlocks];  // without the trailer, which names the pool's contents
    std::mt19937_64 random;
    std::shared_ptr<PowerFiles> files;
    Context recorded;
    KvPool pool;
    std::map<uint8_t, ta_namespace> spaces;
    std::vector<Written> written;
    Promises owed;
    std::string refused;  // why the last record was
    uint64_t images = 0, served = 0, kept = 0, flushes = 0, failed_syncs = 0;
};

TEST_F(Power, NothingAcknowledgedIsLostAndNothingWrongIsServed) {
    const uint64_t wanted = number_from("TA_POWER_IMAGES", kImages);
    uint64_t seed = number_from("TA_POWER_SEED", 1);
    while (images < wanted && !HasFailure()) {
        SCOPED_TRACE("TA_POWER_SEED=" + std::to_string(seed));
        start_file(seed++);
        for (const uint64_t end = images + kImagesOfAFile; images < end && !HasFailure();) step();
        end_file();
    }
    std::printf("%llu images, the last of seed %llu: %llu blocks acknowledged, %llu served; %llu flushes, %llu syncs failed\n",
                (unsigned long long)images, (unsigned long long)seed - 1, (unsigned long long)kept, (unsigned long long)served,
                (unsigned long long)flushes, (unsigned long long)failed_syncs);
    EXPECT_GT(kept, images);
}

// A block that could not be read for once is published anew. Its record is all that a power failure leaves, whoever flushes, until
// the new block has one.
TEST_F(Power, APublishAnewKeepsTheRecordThatCouldNotBeRead) {
    start_file(1);
    files->fail_syncs(0);
    files->watch(0);
    const ta_seq first = write(pool, kBlocks * 64, 1);
    publish(pool, first, spaces[1], 1, kBlocks);
    flush(1);
    const Promises promised = owed;
    EXPECT_EQ(promised.size(), kBlocks);
    EXPECT_EQ(move(pool, first, kBlocks, TA_TIER_DISK).moved, kBlocks);
    files->fail_reads(1);
    EXPECT_EQ(move(pool, first, kBlocks, TA_TIER_DEVICE).failed, kBlocks);
    release(pool, first);
    files->fail_reads(0);
    const auto [none, n] = match(pool, spaces[1], 1, kBlocks);
    EXPECT_EQ(n, 0);
    release(pool, none);
    const ta_seq anew = write(pool, kBlocks * 64, 1), other = write(pool, 64, 2);
    publish(pool, anew, spaces[1], 1, kBlocks);
    publish(pool, other, spaces[2], 2, 1);
    flush(2);
    ASSERT_TRUE(pool->impl->residency().disk()->wait_for_erased(std::chrono::seconds(5)));
    judge(files->image(), promised);
    // With records of its own it needs the others no more.
    flush(1);
    flush(2);
    ASSERT_TRUE(pool->impl->residency().disk()->wait_for_erased(std::chrono::seconds(5)));
    EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).blocks, kBlocks + 1);
    judge(files->image(), owed);
    end_file();
}

// Room that a flush had taken on the disk when memory ran out is nobody's else for the life of the pool.
TEST_F(Power, AFlushWithoutMemoryLeavesNoRoomBehind) {
    disk_bytes = 40 * (slot_bytes + 8192);
    pool = open_pool(context, file);
    const ta_seq seq = write(pool, kBlocks * 64, 1);
    ta_error err;
    bool failed = true;
    int64_t failures = 0;
    for (int64_t n = 0; failed; ++n) {
        const ta_namespace space = make_namespace(pool, uint8_t(1 + n));
        const ta_seq own = write(pool, kBlocks * 64, 2);
        publish(pool, own, space, 2, kBlocks);
        skip_allocations(n);
        arm_memory(MemorySource::kNew, false);
        const ta_status s = ta_namespace_flush(pool.get(), space, &err);
        heal_memory();
        failed = memory_failed();
        failures += failed;
        EXPECT_TRUE(failed ? s == TA_OK || s == TA_E_MEMORY : s == TA_OK) << ta_status_name(s) << " " << err.message;
        require(ta_namespace_destroy(pool.get(), space, &err), err);
        release(pool, own);
        EXPECT_TRUE(wait_until_empty()) << "allocation " << n << " failed: " << tier_stats(pool, TA_TIER_DISK).blocks
                                        << " left";
        if (HasFailure()) return;
    }
    EXPECT_GT(failures, 5);
    release(pool, seq);
}

}  // namespace
}  // namespace ta::testing
