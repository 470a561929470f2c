// A pool with tiers beside one without: whatever is suspended, promised, retained, forgotten, carried through a file, published and
// matched again or asked for, the results are the same, and what was promised is there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "abi/tier_twins.h"
#include "support/exported.h"
#include "support/files.h"
#include "support/memory_store.h"

namespace ta::testing {
namespace {

class Walk {
  public:
    explicit Walk(uint64_t seed)
        : random_(seed), twins_({.device_blocks = 6, .host_bytes = kPlenty, .disk_bytes = kPlenty}, seed) {
        for (int i = 0; i < 3; ++i) twins_.add(), promised_.push_back(0);
        auto o = sized<ta_namespace_options>();
        std::memset(o.salt, 1, sizeof o.salt);
        o.quota_bytes = 4 * stats(twins_.pool).channel_block_bytes;  // the store has what this drops
        require(ta_namespace_create(twins_.pool.get(), &o, &space_, &err_), err_);
        attach_store(twins_.pool, space_, store_.attach());
    }

    // `later`: also one after which not all blocks of a sequence are there.
    void move(bool later) {
        const auto s = size_t(random_.below(int64_t(promised_.size())));
        switch (random_.below(16)) {
            case 0:
                suspend(s);
                break;
            case 1:
                reserve(s);
                break;
            case 2:
                truncate(s, later);
                break;
            case 3:
                retain(s);
                break;
            case 4:
                out_and_in(s);
                break;
            case 5:
            case 8:
                publish(s);
                break;
            case 6:
            case 9:
                match(s);
                break;
            case 7:
                if (later) forget_or_shift(s);
                break;
            default:
                step(s);
        }
        if (random_.chance(30)) twins_.verify();
    }
    void verify() { twins_.verify(); }

    // What the walk met.
    struct Seen {
        int64_t carried = 0, matched = 0, from_store = 0;  // sequences; tokens; blocks
    };
    const Seen& seen() const { return seen_; }

  private:
    // A sequence as it was when its first blocks were published.
    struct Published {
        std::vector<uint8_t> keys;
        ta_seq plain;
    };

    const KvPool& pool() const { return twins_.pool; }
    int64_t tokens(size_t s) const { return length(pool(), twins_.seqs[s]); }
    bool lacks_blocks(size_t s, size_t of_first) {
        const std::vector<ta_block_info> first = blocks(s, of_first);
        return std::any_of(first.begin(), first.end(), [](const ta_block_info& b) { return b.flags & TA_BLOCK_DROPPED; });
    }
    size_t full_blocks(size_t s) const { return size_t(tokens(s) / 64); }
    std::vector<ta_block_info> blocks(size_t s, size_t n) {
        std::vector<ta_block_info> all(n);
        require(ta_seq_describe_blocks(pool().get(), twins_.seqs[s], 0, all.size(), all.data(), &err_), err_);
        return all;
    }

    void suspend(size_t s) {
        ta_ticket ticket = 0;
        const ta_tier tier = random_.chance(50) ? TA_TIER_HOST : TA_TIER_DISK;
        require(ta_seq_suspend(pool().get(), twins_.seqs[s], tier, &ticket, &err_), err_);
        promised_[s] = 0;
        if (random_.chance(50)) return;  // it goes on
        ASSERT_EQ(wait(pool(), ticket).state, TA_MOVE_DONE);
        wait_for_moves(pool());  // of what an earlier suspend has on its way
        // Blocks that a sequence with a reservation has, too, stay.
        if (std::all_of(promised_.begin(), promised_.end(), [](int64_t n) { return n == 0; })) {
            EXPECT_EQ(residency(pool(), twins_.seqs[s]).device_bytes, 0u);
        }
    }
    void reserve(size_t s) {
        const int64_t n = random_.chance(30) ? 0 : random_.between(1, 150);
        const ta_status status = ta_seq_reserve(pool().get(), twins_.seqs[s], n, 0, &err_);
        ASSERT_TRUE(status == TA_OK || (status == TA_E_TIER_FULL && n > 0)) << err_.message;
        if (status == TA_OK) promised_[s] = n;
    }
    void truncate(size_t s, bool later) {
        const int64_t all = tokens(s), to = random_.between(random_.chance(80) ? all / 2 : 0, all);
        twins_.truncate(s, later ? to / 64 * 64 : to);  // where a forgotten block may be
    }
    void forget_or_shift(size_t s) {
        const int64_t all = tokens(s), at = random_.between(0, all), n = random_.between(0, all - at);
        random_.chance(50) ? twins_.forget(s, at, n) : twins_.shift(s, at / 64 * 64, n / 64 * 64);
    }
    void retain(size_t s) {
        const std::vector<ta_block_info> all = blocks(s, full_blocks(s));
        auto r = sized<ta_retention>();
        r.priority = uint32_t(random_.between(1, 63));
        r.duration_ms = random_.between(0, 3);
        for (size_t b = 0; b < all.size(); ++b) {
            const ta_status status = ta_seq_retain(pool().get(), twins_.seqs[s], b, 1, &r, &err_);
            ASSERT_EQ(status, all[b].flags & TA_BLOCK_DROPPED ? TA_E_STATE : TA_OK) << err_.message;
        }
    }
    void out_and_in(size_t s) {
        const bool by_file = random_.chance(50);
        const std::string path = folder_.file("sequence");
        Exported bytes;
        const ta_sink sink = bytes.sink();
        ta_status status = by_file ? ta_seq_save(pool().get(), twins_.seqs[s], path.c_str(), nullptr, &err_)
                                   : ta_seq_export(pool().get(), twins_.seqs[s], &sink, nullptr, &err_);
        ASSERT_EQ(status, lacks_blocks(s, full_blocks(s)) ? TA_E_STATE : TA_OK) << err_.message;
        if (status != TA_OK) return;
        ta_seq again = 0;
        status = by_file ? ta_seq_load(pool().get(), path.c_str(), nullptr, &again, &err_)
                         : ta_seq_import(pool().get(), bytes.bytes.data(), bytes.bytes.size(), &again, &err_);
        std::filesystem::remove(path);
        ASSERT_TRUE(status == TA_OK || status == TA_E_TIER_FULL) << err_.message;  // what is promised to others is theirs
        if (status != TA_OK) return;
        twins_.replace(s, again, fork_sequence(twins_.plain_pool, twins_.plain_seqs[s]));
        promised_[s] = 0;
        ++seen_.carried;
    }
    void publish(size_t s) {
        if (full_blocks(s) == 0) return;
        Published p{std::vector<uint8_t>(size_t(random_.between(1, std::min<int64_t>(3, int64_t(full_blocks(s))))) * 32), 0};
        for (uint8_t& byte : p.keys) byte = uint8_t(random_.below(256));
        const ta_status status = ta_seq_publish(pool().get(), twins_.seqs[s], space_, p.keys.data(), p.keys.size() / 32, &err_);
        const bool lacks = lacks_blocks(s, p.keys.size() / 32);
        ASSERT_TRUE(status == TA_OK ? !lacks : lacks ? status == TA_E_STATE : status == TA_E_LIMIT) << err_.message;
        if (status != TA_OK) return;
        p.plain = fork_sequence(twins_.plain_pool, twins_.plain_seqs[s]);
        published_.push_back(std::move(p));
        if (random_.chance(30)) return;
        // The entries are in the store, and no sequence has them: later ones take their place.
        flush_store(pool(), space_);
        twins_.replace(s, make_sequence(pool()), make_sequence(twins_.plain_pool));
        promised_[s] = 0;
    }
    void match(size_t s) {
        if (published_.empty()) return;
        const Published& p = published_[size_t(random_.below(int64_t(published_.size() + 1) / 2))];  // one that may be dropped
        ta_move_info came{};
        if (random_.chance(90)) {
            if (random_.chance(50)) flush_store(pool(), space_);
            came = load_from_store(pool(), space_, p.keys);
        }
        ta_seq found = 0;
        int64_t n = 0;
        require(ta_seq_match_prefix(pool().get(), space_, p.keys.data(), p.keys.size() / 32, &found, &n, &err_), err_);
        if (came.state == TA_MOVE_DONE) {
            EXPECT_EQ(n, int64_t(came.moved + came.present) * 64);
        }
        const ta_seq plain = fork_sequence(twins_.plain_pool, p.plain);
        require(ta_seq_truncate(twins_.plain_pool.get(), plain, n, &err_), err_);
        twins_.replace(s, found, plain);
        promised_[s] = 0;
        seen_.matched += n;
        seen_.from_store += int64_t(came.moved);
    }
    void step(size_t s) {
        const auto n = int32_t(promised_[s] > 0 ? random_.between(1, promised_[s]) : random_.between(1, 150));
        auto fit = sized<ta_fit>();
        require(ta_kv_pool_fit(pool().get(), 1, &twins_.seqs[s], &n, &fit, &err_), err_);
        if (promised_[s] >= n) {
            EXPECT_TRUE(fit.after_eviction) << n << " of " << promised_[s] << " promised tokens";
        }
        if (fit.after_eviction) twins_.step({s}, {n});
        promised_[s] = std::max<int64_t>(0, promised_[s] - n);
    }

    Random random_;
    const Folder folder_;
    MemoryStore store_;  // outlives the pool
    Twins twins_;
    std::vector<int64_t> promised_;  // tokens, of each sequence
    ta_namespace space_ = 0;
    std::vector<Published> published_;
    Seen seen_;
    ta_error err_;
};

TEST(TieredWalk, NothingChangesAResult) {
    const uint64_t first = number_from("TA_WALK_SEED", 1);
    Walk::Seen seen;
    for (uint64_t seed = first; seed < first + 4; ++seed) {
        SCOPED_TRACE("TA_WALK_SEED=" + std::to_string(seed));
        Walk walk(seed);
        for (int move = 0; move < 120 && !::testing::Test::HasFailure(); ++move) walk.move(move > 60);
        walk.verify();
        seen.carried += walk.seen().carried;
        seen.matched += walk.seen().matched;
        seen.from_store += walk.seen().from_store;
    }
    EXPECT_GT(seen.carried, 0);
    EXPECT_GT(seen.matched, 0);
    if (first == 1) {
        EXPECT_GT(seen.from_store, 0) << "few walks lose what they published and ask for it again";
    }
}

}  // namespace
}  // namespace ta::testing
