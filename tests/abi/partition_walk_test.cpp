// Random walks of partitioned sequences: whatever the ranks do, alike, between them they have what one rank has that has it whole.
// TA_WALK_SEED: one seed alone.
#include <gtest/gtest.h>

#include <cstdlib>

#include "abi/draft_steps.h"
#include "abi/spread_layers.h"
#include "support/tiers.h"

namespace ta::testing {
namespace {

using namespace spread;

// Pools of the ranks and of the whole. Ranks may have a host tier.
struct WalkPool {
    UnevenPool uneven;
    ta_kv_pool_options options;
    ta_tier_options tiers = sized<ta_tier_options>();
    std::vector<LayerOf> of_layers = kAlike;
    explicit WalkPool(Random& random) {
        is_uneven = random.chance(40);
        options = is_uneven ? uneven.options : pool_shape(random.pick<uint32_t>({2, 4, 8}));
        if (is_uneven) of_layers = uneven.of_layers;
        has_tiers = random.chance(50);
        tiers.host_bytes = uint64_t{64} << 20;
        if (has_tiers) options.tiers = &tiers;
    }
    bool is_uneven, has_tiers;
};

class Walk {
  public:
    explicit Walk(uint64_t seed)
        : random_(seed), pool_(random_), s_(uint32_t(random_.between(1, 5)), pool_.options), tag_(seed * 1000) {
        s_.of_layers = pool_.of_layers;
        s_.tolerance = 3e-4;  // rounding was seen to be 1.3e-4; a missing key is 1e-2
        for (int64_t n = random_.between(1, 3); n > 0; --n) add();
    }

    void run(int actions) {
        for (int n = 0; n < actions && !::testing::Test::HasFailure(); ++n) {
            SCOPED_TRACE(::testing::Message() << "action " << n << ", " << s_.ranks.size() << " ranks");
            const int what = int(random_.below(10));
            if (what < 5) {
                step();
            } else if (what < 6) {
                give_up();
            } else if (what < 8) {
                truncate();
            } else if (what < 9 && pool_.has_tiers) {
                leave_the_device();
            } else {
                renew();
            }
        }
        for (size_t m = 0; m < s_.seqs.size(); ++m) release(m);
        for (const Rank& r : s_.ranks) EXPECT_EQ(stats(r.pool).bytes_used, 0u);
    }

  private:
    void add() { s_.add(partition_options(++tag_, uint32_t(random_.below(s_.ranks.size())))); }
    void release(size_t m) {
        ta_error err;
        for (size_t r = 0; r < s_.ranks.size(); ++r) require(ta_seq_release(s_.ranks[r].pool.get(), s_.seqs[m][r], &err), err);
        require(ta_seq_release(s_.whole.get(), s_.whole_seqs[m], &err), err);
    }
    void renew() {
        const size_t m = random_.below(s_.seqs.size());
        release(m);
        add();
        s_.seqs[m] = std::move(s_.seqs.back());
        s_.whole_seqs[m] = s_.whole_seqs.back();
        s_.seqs.pop_back();
        s_.whole_seqs.pop_back();
    }

    std::vector<size_t> members() {
        std::vector<size_t> all;
        const size_t first = random_.below(s_.seqs.size()), n = 1 + random_.below(s_.seqs.size());
        for (size_t i = 0; i < n; ++i) all.push_back((first + i) % s_.seqs.size());
        return all;
    }
    Asked ask(const std::vector<size_t>& of) {
        Asked asked;
        asked.n_new = int32_t(random_.chance(50) ? random_.between(0, 3) : random_.between(1, 150));
        asked.n_query = int32_t(random_.between(1, 4));
        asked.seed = random_.below(1 << 20);
        asked.group = int32_t(random_.pick<int64_t>({1, 2, 5}));
        asked.more = int32_t(random_.below(3));
        asked.lse = random_.chance(70);
        if (random_.chance(20)) asked.options.window = random_.between(1, 100);  // no layer's is shorter
        if (random_.chance(20)) asked.options.softcap = 20;
        if (random_.chance(20) && !pool_.is_uneven) asked.sinks = random_.normals(kHeads * asked.group);
        if (random_.chance(50) && asked.n_new > 0) {
            for (size_t i = 0; i < of.size(); ++i) {
                const int32_t n = asked.n_new + int32_t(i) * asked.more;
                asked.keep.push_back(int32_t(random_.between(0, n)));
                const std::vector<int32_t> tree = random_tree(random_, n, 60);
                asked.parent.insert(asked.parent.end(), tree.begin(), tree.end());
            }
            if (asked.n_new > 60 || random_.chance(50)) asked.parent.clear();
            if (!asked.parent.empty()) asked.n_query = asked.n_new;
        }
        return asked;
    }

    void step() {
        const std::vector<size_t> of = members();
        const Asked asked = ask(of);
        s_.expect_step(of, asked);
        for (const size_t m : of) {
            for (size_t r = 0; r < s_.ranks.size(); ++r)
                ASSERT_EQ(length(s_.ranks[r].pool, s_.seqs[m][r]), length(s_.whole, s_.whole_seqs[m])) << "rank " << r;
        }
    }
    // A begin at all ranks that comes to nothing.
    void give_up() {
        const std::vector<size_t> of = members();
        const std::vector<int32_t> n_new(of.size(), int32_t(random_.between(0, 100)));
        for (uint32_t r = 0; r < s_.ranks.size(); ++r) {
            begin(s_.ranks[r].plan, s_.at(of, r), n_new, n_new);
            EXPECT_EQ(ta_plan_abort(s_.ranks[r].plan.get(), nullptr), TA_OK);
        }
    }
    // All ranks do it or none, to whole blocks as the whole does.
    void truncate() {
        const size_t m = random_.below(s_.seqs.size());
        const int64_t n = length(s_.whole, s_.whole_seqs[m]);
        const int64_t to =
            random_.chance(50) ? random_.between(std::max<int64_t>(0, n - 90), n) : random_.between(0, n / 64) * 64;
        const Rank& first = s_.ranks[0];
        const ta_status got = ta_seq_truncate(first.pool.get(), s_.seqs[m][0], to, nullptr);
        for (size_t r = 1; r < s_.ranks.size(); ++r)
            EXPECT_EQ(ta_seq_truncate(s_.ranks[r].pool.get(), s_.seqs[m][r], to, nullptr), got) << n << " to " << to;
        // What one rank has may lie within a block that others lack.
        if (got == TA_OK || to % 64 == 0) {
            EXPECT_EQ(ta_seq_truncate(s_.whole.get(), s_.whole_seqs[m], to, nullptr), got);
        }
    }
    // Each rank as it likes.
    void leave_the_device() {
        const size_t m = random_.below(s_.seqs.size());
        for (size_t r = 0; r < s_.ranks.size(); ++r) {
            const KvPool& pool = s_.ranks[r].pool;
            const ta_seq seq = s_.seqs[m][r];
            ta_ticket ticket = 0;
            ta_error err;
            if (random_.chance(50)) {
                require(ta_seq_suspend(pool.get(), seq, TA_TIER_HOST, &ticket, &err), err);
            } else if (const auto blocks = uint64_t(length(pool, seq) / 64); blocks > 0) {
                const uint64_t first = random_.below(blocks);
                ticket = move(pool, seq, first, 1 + random_.below(blocks - first), TA_TIER_HOST);
            } else {
                continue;
            }
            if (random_.chance(50)) wait(pool, ticket);
        }
    }

    Random random_;
    WalkPool pool_;
    Spread s_;
    uint64_t tag_;
};

TEST(PartitionWalk, RanksHaveWhatOneHas) {
    const char* const given = std::getenv("TA_WALK_SEED");
    const uint64_t first = given ? std::strtoull(given, nullptr, 10) : 1, walks = given ? 1 : 24;
    for (uint64_t seed = first; seed < first + walks && !HasFailure(); ++seed) {
        SCOPED_TRACE(::testing::Message() << "TA_WALK_SEED=" << seed);
        Walk(seed).run(40);
    }
}

}  // namespace
}  // namespace ta::testing
