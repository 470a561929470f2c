// Layers with windows: what a sequence has no more nobody misses. Beside each pool one that keeps everything, whose calls are given
// the windows.
#define XXH_INLINE_ALL
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>

#include "abi/tier_twins.h"
#include "support/files.h"
#include "support/saved_file.h"

namespace ta::testing {
namespace {

// The first block that tokens at `position` and behind it need whole.
int64_t first_needed(int64_t window, int64_t position) {
    return std::max<int64_t>(0, std::min(position - window + 1, (position / 64 - 1) * 64)) / 64;
}
// How many have passed: 64 tokens can be taken off.
int64_t passed_at(int64_t window, int64_t length) {
    return first_needed(window, std::max<int64_t>(0, length - 64));
}

struct Case {
    const char* name;
    Budgets budgets;
};
class Windows : public ::testing::TestWithParam<Case> {
  protected:
    static Budgets budgets(int64_t window) {
        Budgets b = GetParam().budgets;
        b.window = window;
        return b;
    }
};

TEST_P(Windows, RandomStepsAreAsWithout) {
    for (const int64_t window : {1, 63, 64, 65, 100, 300}) {
        SCOPED_TRACE(window);
        Twins twins(budgets(window), uint64_t(window));
        Random random{uint64_t(window)};
        const bool has_tiers = GetParam().budgets.host_bytes + GetParam().budgets.disk_bytes > 0;
        for (int i = 0; i < 3; ++i) twins.add();
        for (int round = 0; round < 60; ++round) {
            const size_t s = random.below(twins.seqs.size()), other = random.below(twins.seqs.size());
            const int64_t n = length(twins.pool, twins.seqs[s]);
            const int what = int(random.below(10));
            if (what < 6) {
                const auto more = [&] { return int32_t(random.chance(60) ? random.between(0, 3) : random.between(0, 190)); };
                if (random.chance(20)) {
                    const int32_t drafts = more();
                    twins.step({s}, {drafts}, {int32_t(random.between(0, drafts))});
                } else if (s == other || random.chance(50)) {
                    twins.step({s}, {more()});
                } else {
                    twins.step({s, other}, {more(), more()});
                }
            } else if (what == 6 && twins.seqs.size() < 6) {
                twins.fork(s);
            } else if (what == 7) {
                const int64_t to = random.between(std::max<int64_t>(0, n - 200), n);
                ta_error err;
                const ta_status cut = ta_seq_truncate(twins.pool.get(), twins.seqs[s], to, &err);
                if (cut == TA_E_STATE) {
                    EXPECT_LT(first_needed(window, to), first_needed(window, n)) << err.message;
                    EXPECT_EQ(err.block, std::clamp(err.block, first_needed(window, to), first_needed(window, n) - 1));
                    continue;
                }
                ASSERT_EQ(cut, TA_OK) << err.message;
                ASSERT_EQ(ta_seq_truncate(twins.plain_pool.get(), twins.plain_seqs[s], to, nullptr), TA_OK);
            } else if (what == 8 && has_tiers) {
                ta_ticket ticket = 0;
                const ta_tier to = GetParam().budgets.host_bytes > 0 ? TA_TIER_HOST : TA_TIER_DISK;
                ASSERT_EQ(ta_seq_suspend(twins.pool.get(), twins.seqs[s], to, &ticket, nullptr), TA_OK);
                if (random.chance(50)) wait(twins.pool, ticket);
            } else {
                twins.verify();
            }
            if (HasFatalFailure()) return;
        }
        twins.verify();
        // A sequence that shares no blocks has passed all that it can.
        const size_t alone = twins.add();
        for (int i = 0; i < 9; ++i) twins.step({alone}, {i % 2 ? 64 : 100});
        for (size_t s = 0; s + 1 < twins.seqs.size(); ++s) {
            ASSERT_EQ(ta_seq_release(twins.pool.get(), twins.seqs[s], nullptr), TA_OK);
        }
        if (!has_tiers) {
            const int64_t n = length(twins.pool, twins.seqs[alone]), passed = passed_at(window, n);
            const ta_kv_pool_stats now = stats(twins.pool);
            EXPECT_EQ(now.passed_blocks, uint64_t(passed));
            EXPECT_EQ(now.token_blocks + now.channel_blocks, uint64_t((n + 63) / 64 - passed));
        }
        ASSERT_EQ(ta_seq_release(twins.pool.get(), twins.seqs[alone], nullptr), TA_OK);
        wait_for_moves(twins.pool);
        EXPECT_EQ(stats(twins.pool).bytes_used, 0u);
    }
}

// Files, and bytes in memory: what is loaded goes on as the saved one does.
TEST_P(Windows, FilesHaveWhatThereIs) {
    const Folder folder;
    Twins twins(budgets(100));
    Random random(5);
    for (const int32_t tokens : {70, 200, 450}) {
        const size_t s = twins.add();
        for (int32_t left = tokens; left > 0; left -= 50) twins.step({s}, {std::min(left, 50)});
        ta_error err;
        const std::string path = folder.file(("seq" + std::to_string(tokens)).c_str());
        require(ta_seq_save(twins.pool.get(), twins.seqs[s], path.c_str(), nullptr, &err), err);
        ta_seq loaded = 0;
        require(ta_seq_load(twins.pool.get(), path.c_str(), nullptr, &loaded, &err), err);
        twins.seqs.push_back(loaded);
        twins.plain_seqs.push_back(fork_sequence(twins.plain_pool, twins.plain_seqs[s]));
        const size_t l = twins.seqs.size() - 1;
        const auto bytes = read_file(path);
        require(ta_seq_import(twins.pool.get(), bytes.data(), bytes.size(), &loaded, &err), err);
        twins.seqs.push_back(loaded);
        twins.plain_seqs.push_back(fork_sequence(twins.plain_pool, twins.plain_seqs[s]));
        for (int i = 0; i < 4; ++i) twins.step({s, l, l + 1}, {30, 70, int32_t(1 + random.below(100))});
        twins.verify();
        ta_seq other = 0;
        EXPECT_EQ(ta_seq_load(twins.plain_pool.get(), path.c_str(), nullptr, &other, &err), TA_E_INVALID);
    }
    // All of the pool, into one like it.
    ta_tier_options tiers;
    auto options = options_of(budgets(100), tiers, twins.peer_context.get());
    options.budget_bytes = kPlenty;
    const KvPool again = make_pool(twins.context, options);
    ta_error err;
    require(ta_kv_pool_save(twins.pool.get(), folder.file("pool").c_str(), 0, nullptr, &err), err);
    std::vector<ta_loaded_seq> loaded(16);
    uint64_t n = 0;
    require(ta_kv_pool_load(again.get(), folder.file("pool").c_str(), nullptr, loaded.data(), loaded.size(), &n, &err), err);
    twins.pool.swap(const_cast<KvPool&>(again));
    ASSERT_EQ(n, twins.seqs.size());
    for (size_t s = 0; s < n; ++s) twins.seqs[s] = loaded[s].loaded;
    twins.plan = make_plan(twins.pool);
    for (int i = 0; i < 3; ++i) twins.step({0, 1, 4}, {3, 60, 65});
    twins.verify();
    twins.plan.reset();
}

// A file of a pool in which a shorter sequence has the first blocks of a longer one, which have passed: nothing is read of it.
TEST(WindowsFiles, APassedBlockThatASequenceStillSeesIsDamage) {
    const Folder folder;
    Twins twins({.window = 100});
    const size_t s = twins.add();
    for (int i = 0; i < 10; ++i) twins.step({s}, {64});
    const std::string path = folder.file("pool");
    ta_error err;
    require(ta_kv_pool_save(twins.pool.get(), path.c_str(), 0, nullptr, &err), err);
    const SavedFile good(read_file(path));
    constexpr size_t kSequences = 16, kReferences = 24, kIndexBytes = 72, kRecord = 32, kLength = 8;
    const size_t sequence = good.header_bytes + good.records.size() * SavedFile::kEntryBytes, references = sequence + kRecord;
    ASSERT_EQ(good.get(kSequences), 1u);
    std::vector<char> bytes = good.bytes;
    const auto insert = [&](size_t at, size_t from, size_t n) {
        bytes.insert(bytes.begin() + ptrdiff_t(at), good.bytes.begin() + ptrdiff_t(from),
                     good.bytes.begin() + ptrdiff_t(from + n));
    };
    insert(references + 8 * good.get(kReferences), references, 2 * 8);  // of two blocks
    insert(references, sequence, kRecord);
    const auto put = [&](size_t at, uint64_t value) { std::memcpy(bytes.data() + at, &value, sizeof value); };
    put(references, good.get(sequence) + 1);  // its id
    put(references + kLength, 128);
    put(kSequences, 2);
    put(kReferences, good.get(kReferences) + 2);
    put(kIndexBytes, good.get(kIndexBytes) + kRecord + 2 * 8);
    SavedFile bad(bytes);
    bad.mend_index();
    write_file(path, bad.bytes);
    ta_loaded_seq loaded[2] = {};
    uint64_t n = 0;
    EXPECT_EQ(ta_kv_pool_load(twins.pool.get(), path.c_str(), nullptr, nullptr, 0, &n, &err), TA_E_CORRUPT) << err.message;
    EXPECT_EQ(ta_kv_pool_load(twins.pool.get(), path.c_str(), nullptr, loaded, 2, &n, &err), TA_E_CORRUPT) << err.message;
    EXPECT_EQ(err.block, 0);
    twins.plan.reset();
}

INSTANTIATE_TEST_SUITE_P(Pools, Windows,
                         ::testing::Values(Case{"Device", {}}, Case{"EightBits", {.bits = 8}}, Case{"TwoBits", {.bits = 2}},
                                           Case{"Host", {.device_blocks = 12, .host_bytes = kPlenty}},
                                           Case{"Disk", {.device_blocks = 40, .disk_bytes = kPlenty}},
                                           Case{"Both", {.device_blocks = 12, .host_bytes = 1 << 20, .disk_bytes = kPlenty}}),
                         [](const auto& of) { return of.param.name; });

struct Shape {
    uint32_t layers;
    std::vector<ta_layer_group> groups;
};
ta_layer_group group_of(uint32_t first, uint32_t layers, int64_t window) {
    auto g = sized<ta_layer_group>();
    g.first = first;
    g.layers = layers;
    g.window = window;
    return g;
}
KvPool make_windowed(const Context& context, const Shape& shape, uint64_t budget = kPlenty, uint32_t bits = 4) {
    auto options = pool_options(shape.layers, 2, 64, bits);
    options.budget_bytes = budget;
    options.layer_groups = shape.groups.data();
    options.n_layer_groups = uint32_t(shape.groups.size());
    return make_pool(context, options);
}
// The sequence gets `n` tokens in steps of `chunk`.
void grow(const KvPool& pool, uint32_t layers, ta_seq seq, int64_t n, int32_t chunk) {
    const Plan plan = make_plan(pool);
    Random random(1);
    for (int64_t at = 0; at < n; at += chunk) {
        const auto now = int32_t(std::min<int64_t>(chunk, n - at));
        begin(plan, {seq}, {now});
        Tensor k(random.normals(now * 128), now, 2, 64), v(random.normals(now * 128), now, 2, 64);
        for (uint32_t layer = 0; layer < layers; ++layer) append(plan, layer, k, v);
        end(plan);
    }
}

// All layers have windows: of 16,384 tokens next to nothing stays.
TEST(WindowsOf, AllLayersLeaveTheWindowAlone) {
    const Context context = make_context(2);
    const Shape shape{4, {group_of(0, 2, 128), group_of(2, 2, 100)}};
    const KvPool pool = make_windowed(context, shape), whole = make_windowed(context, {4, {}});
    const ta_seq seq = make_sequence(pool), plain = make_sequence(whole);
    grow(pool, 4, seq, 16384, 512);
    grow(whole, 4, plain, 16384, 512);
    EXPECT_LT(stats(pool).bytes_used * 20, stats(whole).bytes_used);
    EXPECT_EQ(stats(pool).passed_blocks, uint64_t(passed_at(128, 16384)));
    verify(pool, seq);
}

// Whatever the length is, for drafts that are taken back without ta_step_options.drafts.
TEST(WindowsOf, TheLast64TokensCanBeTakenOff) {
    const Context context = make_context(1);
    for (const int64_t window : {1, 63, 64, 65, 100, 130}) {
        const Shape shape{2, {group_of(1, 1, window)}};
        const KvPool pool = make_windowed(context, shape);
        const ta_seq seq = make_sequence(pool);
        Random random{uint64_t(window)};
        bool refused = false;
        for (int step = 0; step < 60; ++step) {
            grow(pool, 2, seq, random.between(1, 40), 40);
            const int64_t n = length(pool, seq);
            const ta_seq fork = fork_sequence(pool, seq);
            ASSERT_EQ(ta_seq_truncate(pool.get(), fork, std::max<int64_t>(0, n - 64), nullptr), TA_OK) << window << ", " << n;
            verify(pool, fork);
            refused |= ta_seq_truncate(pool.get(), fork, std::max<int64_t>(0, n - 128), nullptr) == TA_E_STATE;
            ASSERT_EQ(ta_seq_release(pool.get(), fork, nullptr), TA_OK);
        }
        EXPECT_TRUE(refused);
    }
}

// A budget of a window and a step's blocks is enough for a sequence of any length, also where its room was promised.
TEST(WindowsOf, AllLayersNeedRoomForTheWindowAlone) {
    const Context context = make_context(1);
    const Shape shape{2, {group_of(0, 2, 128)}};
    const KvPool probe = make_windowed(context, shape);
    const ta_kv_pool_stats s = stats(probe);
    const KvPool pool = make_windowed(context, shape, 3 * s.token_block_bytes + 6 * s.channel_block_bytes + 128 * 200);
    const ta_seq seq = make_sequence(pool);
    grow(pool, 2, seq, 64 * 150, 64);
    EXPECT_EQ(length(pool, seq), 64 * 150);
    verify(pool, seq);
}

// Blocks that pass may be a thousandth of the others: each tier has room for both.
TEST(WindowsOf, AllLayersOfALargeModelHaveTiers) {
    const Context context = make_context(2);
    auto options = pool_options(24, 8, 128);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = uint64_t{96} << 20;
    tiers.disk_bytes = uint64_t{96} << 20;
    options.budget_bytes = uint64_t{64} << 20;
    options.tiers = &tiers;
    const ta_layer_group groups[] = {group_of(0, 24, 64)};
    options.layer_groups = groups;
    options.n_layer_groups = 1;
    const KvPool pool = make_pool(context, options);
    const ta_seq seq = make_sequence(pool);
    const Plan plan = make_plan(pool);
    Tensor x(Random(1).normals(128 * 1024), 128, 8, 128);
    for (int i = 0; i < 6; ++i) {
        begin(plan, {seq}, {128});
        for (uint32_t layer = 0; layer < 24; ++layer) append(plan, layer, x, x);
        end(plan);
        ta_ticket ticket = 0;
        ta_error err;
        require(ta_seq_suspend(pool.get(), seq, i % 2 ? TA_TIER_HOST : TA_TIER_DISK, &ticket, &err), err);
        EXPECT_EQ(wait(pool, ticket).state, TA_MOVE_DONE);
    }
    verify(pool, seq);
    EXPECT_EQ(stats(pool).passed_blocks, uint64_t(passed_at(64, 768)));
    EXPECT_EQ(stats(pool).token_blocks + stats(pool).channel_blocks, 0u);
}

// Promised room is enough for the whole blocks and for what they become, whatever the steps are and whatever stays of them.
TEST(WindowsOf, PromisesHaveRoomForWhatPasses) {
    const Context context = make_context(1);
    const Shape shape{2, {group_of(0, 1, 30)}};
    for (const uint32_t bits : {4u, 8u}) {
        const ta_kv_pool_stats sizes = stats(make_windowed(context, shape, kPlenty, bits));
        const KvPool pool = make_windowed(context, shape, 45 * sizes.token_block_bytes, bits);
        const ta_seq seq = make_sequence(pool), greedy = make_sequence(pool);
        ta_error err;
        require(ta_seq_reserve(pool.get(), seq, 1500, 0, &err), err);
        EXPECT_THROW(grow(pool, 2, greedy, 64 * 100, 64), std::runtime_error);
        const Plan plan = make_plan(pool);
        Random random(bits);
        for (int64_t left = 1500; left > 0; left = 1500 - length(pool, seq)) {
            const auto n =
                int32_t(std::min<int64_t>(left, random.chance(50) ? random.between(1, 60) : random.between(60, 200)));
            auto how = sized<ta_step_options>();
            how.drafts = n <= 60 && random.chance(70) ? TA_ON : TA_OFF;
            const auto keep = int32_t(random.chance(30) ? 0 : random.between(0, n));
            require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, &how, &err), err);
            Tensor k(random.normals(n * 128), n, 2, 64), v(random.normals(n * 128), n, 2, 64);
            for (uint32_t layer = 0; layer < 2; ++layer) append(plan, layer, k, v);
            require(ta_plan_end(plan.get(), how.drafts == TA_ON ? &keep : nullptr, &err), err);
        }
        verify(pool, seq);
        EXPECT_EQ(stats(pool).bytes_promised, 0u);
    }
}

// What a step took out of a promise and gave back is there again: what is left is what a new promise of the rest would take.
TEST(WindowsOf, PromisesGetBackWhatPassesOrDoesNot) {
    const Context context = make_context(1);
    for (const uint32_t bits : {4u, 8u}) {
        SCOPED_TRACE(bits);
        const KvPool pool = make_windowed(context, {2, {group_of(0, 1, 30)}}, kPlenty, bits);
        const ta_seq seq = make_sequence(pool);
        grow(pool, 2, seq, 100, 100);
        ta_error err;
        require(ta_seq_reserve(pool.get(), seq, 2000, 0, &err), err);
        const Plan plan = make_plan(pool);
        // Of 30 drafts none stay: the block behind the window, for which the step took room, does not pass. 200 tokens: blocks that
        // the step writes pass with it.
        for (const auto& [n, drafts] : {std::pair{30, true}, {200, false}, {30, true}, {63, false}, {200, false}}) {
            auto how = sized<ta_step_options>();
            how.drafts = drafts ? TA_ON : TA_OFF;
            const int32_t none = 0;
            require(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, &how, &err), err);
            Tensor x(Random(uint64_t(n)).normals(n * 128), n, 2, 64);
            for (uint32_t layer = 0; layer < 2; ++layer) append(plan, layer, x, x);
            require(ta_plan_end(plan.get(), drafts ? &none : nullptr, &err), err);
            const uint64_t left = stats(pool).bytes_promised;
            require(ta_seq_reserve(pool.get(), seq, 2100 - length(pool, seq), 0, &err), err);
            EXPECT_EQ(left, stats(pool).bytes_promised) << n << " tokens, at " << length(pool, seq);
        }
    }
}

// So is the copy of an open block that a fork made necessary, when that block passes.
TEST(WindowsOf, PromisesGetBackTheCopyThatPasses) {
    const Context context = make_context(1);
    const KvPool pool = make_windowed(context, {2, {group_of(0, 1, 30)}}, kPlenty, 8);
    const ta_seq seq = make_sequence(pool);
    grow(pool, 2, seq, 100, 100);
    ta_error err;
    require(ta_seq_reserve(pool.get(), seq, 2000, 0, &err), err);
    const ta_seq fork = fork_sequence(pool, seq);  // keeps what is before the copy from passing
    grow(pool, 2, seq, 1, 1);
    grow(pool, 2, seq, 200, 200);
    EXPECT_EQ(stats(pool).passed_blocks, 1u);
    const uint64_t left = stats(pool).bytes_promised;
    require(ta_seq_reserve(pool.get(), seq, 1799, 0, &err), err);
    EXPECT_EQ(left, stats(pool).bytes_promised);
    ASSERT_EQ(ta_seq_release(pool.get(), fork, nullptr), TA_OK);
}

// A block that a fork has, too, passes behind the fork's end, with the next one.
TEST(WindowsOf, SharedBlocksPassWhenTheyAreAlone) {
    const Context context = make_context(1);
    const KvPool pool = make_windowed(context, {2, {group_of(1, 1, 100)}});
    const ta_seq seq = make_sequence(pool);
    grow(pool, 2, seq, 200, 200);
    const ta_seq fork = fork_sequence(pool, seq);
    grow(pool, 2, seq, 440, 40);
    EXPECT_EQ(stats(pool).passed_blocks, uint64_t(passed_at(100, 640)) - 3);  // the fork has three full ones
    ASSERT_EQ(ta_seq_release(pool.get(), fork, nullptr), TA_OK);
    grow(pool, 2, seq, 64, 64);
    EXPECT_EQ(stats(pool).passed_blocks, uint64_t(passed_at(100, 704)));
    verify(pool, seq);
}

// A match gets no pages that a published block has lost; a published block that still has them takes its place.
TEST(WindowsOf, PrefixesEndWhereSequencesCanBegin) {
    const Context context = make_context(1);
    const Shape shape{2, {group_of(0, 1, 100)}};
    const KvPool pool = make_windowed(context, shape);
    auto o = sized<ta_namespace_options>();
    o.salt[0] = 1;
    ta_namespace space = 0;
    ta_error err;
    require(ta_namespace_create(pool.get(), &o, &space, &err), err);
    std::vector<uint8_t> keys(10 * 32);
    for (size_t i = 0; i < 10; ++i) keys[32 * i] = uint8_t(i + 1);
    const auto matched = [&](uint64_t n) {
        ta_seq seq = 0;
        int64_t tokens = -1;
        require(ta_seq_match_prefix(pool.get(), space, keys.data(), n, &seq, &tokens, &err), err);
        verify(pool, seq);
        require(ta_seq_release(pool.get(), seq, &err), err);
        return tokens / 64;
    };
    const ta_seq late = make_sequence(pool), early = make_sequence(pool);
    grow(pool, 2, late, 640, 64);
    require(ta_seq_publish(pool.get(), late, space, keys.data(), 10, &err), err);
    EXPECT_EQ(matched(10), 10);
    EXPECT_EQ(matched(9), 9);
    EXPECT_EQ(matched(8), 0);  // block 6 has passed
    grow(pool, 2, early, 320, 320);
    EXPECT_EQ(matched(5), 0);
    require(ta_seq_publish(pool.get(), early, space, keys.data(), 5, &err), err);
    EXPECT_EQ(matched(5), 5);
    EXPECT_EQ(matched(3), 0);  // so has block 1
    EXPECT_EQ(matched(10), 10);
}

// What pools with a window and a persistent disk tier are made of, and keys of ten blocks.
struct OnDisk {
    OnDisk() {
        tiers.disk_bytes = kPlenty;
        tiers.disk_path = path.c_str();
        options.tiers = &tiers;
        options.layer_groups = groups;
        options.n_layer_groups = 1;
        space.salt[0] = 1;
        for (size_t i = 0; i < 10; ++i) keys[32 * i] = uint8_t(i + 1);
    }
    OnDisk(const OnDisk&) = delete;

    const Folder folder;
    const std::string path = folder.file("tier");
    const Context context = make_context(1);
    ta_tier_options tiers = sized<ta_tier_options>();
    const ta_layer_group groups[1] = {group_of(0, 1, 100)};
    ta_kv_pool_options options = pool_options(2, 2, 64);
    ta_namespace_options space = sized<ta_namespace_options>();
    std::vector<uint8_t> keys = std::vector<uint8_t>(10 * 32);
};

// A flush has promised the record of a passed block. The full block that takes its place is only in memory.
TEST(WindowsOf, ABlockInPlaceOfAPassedOneLosesNoRecord) {
    const OnDisk d;
    ta_error err;
    KvPool pool;
    ta_namespace space = 0;
    const auto restart = [&] {
        pool.reset();
        pool = make_pool(d.context, d.options);
        require(ta_namespace_create(pool.get(), &d.space, &space, &err), err);
    };
    const auto matched = [&](uint64_t n) {
        ta_seq seq = 0;
        int64_t tokens = -1;
        require(ta_seq_match_prefix(pool.get(), space, d.keys.data(), n, &seq, &tokens, &err), err);
        verify(pool, seq);
        require(ta_seq_release(pool.get(), seq, &err), err);
        return tokens / 64;
    };
    const auto publish = [&](int32_t tokens, int32_t step) {
        const ta_seq seq = make_sequence(pool);
        grow(pool, 2, seq, tokens, step);
        require(ta_seq_publish(pool.get(), seq, space, d.keys.data(), size_t(tokens) / 64, &err), err);
        return seq;
    };
    // The passed blocks leave at once, with the end of a namespace, or when records of the full ones are there.
    for (const bool on_disk : {false, true}) {
        for (const int held : {0, 1, 2}) {
            SCOPED_TRACE(std::to_string(on_disk) + " " + std::to_string(held));
            std::filesystem::remove(d.path);
            restart();
            const ta_seq late = publish(640, 64);
            require(ta_namespace_flush(pool.get(), space, &err), err);
            const uint64_t passed = tier_stats(pool, TA_TIER_DISK).bytes_used;
            if (on_disk) {
                EXPECT_GT(move_now(pool, late, 0, 10, TA_TIER_DISK).moved, 0u);
            }
            if (held == 0) require(ta_seq_release(pool.get(), late, &err), err);
            (void)publish(320, 320);
            if (held == 2) {
                EXPECT_EQ(move_now(pool, late, 0, 10, TA_TIER_DEVICE).failed, 0u);
            }
            if (held > 0) require(ta_seq_release(pool.get(), late, &err), err);
            EXPECT_EQ(matched(5), 5);
            EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).bytes_used, passed);
            restart();
            EXPECT_EQ(matched(10), 10);
            EXPECT_EQ(matched(5), 0);
            // Now with records of their own.
            (void)publish(320, 320);
            require(ta_namespace_flush(pool.get(), space, &err), err);
            restart();
            EXPECT_EQ(matched(10), 10);
            EXPECT_EQ(matched(5), 5);
            EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).blocks, 10u);
            // And with neither.
            require(ta_namespace_destroy(pool.get(), space, &err), err);
            for (int i = 0; i < 2000 && tier_stats(pool, TA_TIER_DISK).bytes_used > 0; ++i) usleep(1000);
            EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).bytes_used, 0u);
        }
    }
}

// They outlive the process with what they have.
TEST(WindowsOf, PrefixesAreFoundAgainOnDisk) {
    const OnDisk d;
    ta_error err;
    std::vector<float> before;
    for (const bool again : {false, true}) {
        const KvPool pool = make_pool(d.context, d.options);
        ta_namespace space = 0;
        ta_seq seq = 0;
        int64_t tokens = 640;
        require(ta_namespace_create(pool.get(), &d.space, &space, &err), err);
        if (again) {
            require(ta_seq_match_prefix(pool.get(), space, d.keys.data(), 10, &seq, &tokens, &err), err);
        } else {
            seq = make_sequence(pool);
            grow(pool, 2, seq, 640, 64);
            require(ta_seq_publish(pool.get(), seq, space, d.keys.data(), 10, &err), err);
            require(ta_namespace_flush(pool.get(), space, &err), err);
        }
        ASSERT_EQ(tokens, 640);
        verify(pool, seq);
        const Plan plan = make_plan(pool);
        Random random(9);
        Tensor k(random.normals(128), 1, 2, 64), q(random.normals(128), 1, 2, 64);
        std::vector<float> results;
        begin(plan, {seq}, {1});
        for (uint32_t layer = 0; layer < 2; ++layer) {
            Tensor out(1, 2, 64);
            append(plan, layer, k, k);
            attend(plan, layer, q, out);
            for (const float x : out.values()) results.push_back(x);
        }
        end(plan);
        EXPECT_TRUE(!again || results == before);
        before = results;
    }
}

TEST(WindowsOf, CallsThatSeeMoreAreRefused) {
    const Context context = make_context(1);
    const Shape shape{2, {group_of(1, 1, 100)}};
    const KvPool pool = make_windowed(context, shape);
    const ta_seq seq = make_sequence(pool);
    grow(pool, 2, seq, 640, 64);
    const Plan plan = make_plan(pool);
    ta_error err;
    const int32_t none = 0, few = 3, many = 150;
    EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &none, &many, nullptr, &err), TA_E_STATE);
    EXPECT_EQ(err.sequence, 0);
    EXPECT_EQ(err.block, 6) << err.message;
    begin(plan, {seq}, {none}, {few});
    Tensor q(Random(1).normals(3 * 128), 3, 2, 64), out(3, 2, 64);
    auto options = sized<ta_attend_options>();
    for (const auto& [layer, window, expected] : {std::tuple{0u, int64_t{0}, TA_OK},
                                                  {1u, int64_t{0}, TA_OK},
                                                  {1u, int64_t{100}, TA_OK},
                                                  {1u, int64_t{7}, TA_OK},
                                                  {1u, int64_t{101}, TA_E_INVALID},
                                                  {0u, int64_t{101}, TA_OK}}) {
        options.window = window;
        EXPECT_EQ(ta_attend(plan.get(), layer, q.view(), out.view(), nullptr, &options, &err), expected) << layer << window;
        EXPECT_EQ(err.layer, expected == TA_OK ? -1 : 1);
    }
    end(plan);
    EXPECT_EQ(ta_seq_truncate(pool.get(), seq, 500, &err), TA_E_STATE);
    EXPECT_EQ(length(pool, seq), 640);
    require(ta_seq_truncate(pool.get(), seq, 576, &err), err);
    std::vector<float> k(64 * 128);
    EXPECT_EQ(ta_x_seq_dequantize(pool.get(), seq, 1, 64, 64, k.data(), nullptr, &err), TA_E_STATE);
    require(ta_x_seq_dequantize(pool.get(), seq, 0, 64, 64, k.data(), nullptr, &err), err);
}

TEST(WindowsOf, FallingPrecisionIsRefused) {
    const Context context = make_context(1);
    auto tiers = sized<ta_tier_options>();
    tiers.host_bytes = kPlenty;
    tiers.falling_precision = TA_ON;
    auto options = pool_options(4, 2, 64);
    options.tiers = &tiers;
    const ta_layer_group group = group_of(0, 1, 5);
    options.layer_groups = &group;
    options.n_layer_groups = 1;
    ta_kv_pool* pool = nullptr;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &pool, nullptr), TA_E_UNSUPPORTED);
}

}  // namespace
}  // namespace ta::testing
