// Precision that falls on demotion: blocks become what the scalar codec makes of them by hand, whichever way they
// take; attention over them is that over a pool which got the same blocks from a file; and what shall not fall does not.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "support/data.h"
#include "support/exact_attention.h"
#include "support/files.h"
#include "support/tiers.h"
#include "tests/tiering/store/falling_blocks.h"

namespace ta::testing {
namespace {

constexpr uint64_t kPlenty = uint64_t{64} << 20;

struct Settings {
    FallingShape shape;
    uint32_t bits = 8;
    uint64_t device_bytes = kPlenty, host_bytes = kPlenty, disk_bytes = kPlenty;
    const ta_numerics* numerics = nullptr;
    ta_switch falls = TA_ON;
    const char* disk_path = nullptr;
    int high = 100;
};

ta_kv_pool_options options_of(const Settings& s, ta_tier_options& tiers) {
    auto o = pool_options(s.shape.layers, s.shape.kv_heads, s.shape.head_dim, s.bits, s.numerics);
    o.budget_bytes = s.device_bytes;
    tiers = sized<ta_tier_options>();
    tiers.host_bytes = s.host_bytes;
    tiers.disk_bytes = s.disk_bytes;
    tiers.high_percent = s.high;
    tiers.falling_precision = s.falls;
    tiers.disk_path = s.disk_path;
    o.tiers = &tiers;
    return o;
}
KvPool make_pool(const Context& context, const Settings& s) {
    ta_tier_options tiers;
    return make_pool(context, options_of(s, tiers));
}
// The same without tiers: nothing falls.
KvPool make_plain(const Context& context, const Settings& s) {
    auto o = pool_options(s.shape.layers, s.shape.kv_heads, s.shape.head_dim, s.bits, s.numerics);
    return make_pool(context, o);
}

// Steps of random tokens, the same in all pools that take them from a generator of the same seed.
struct Steps {
    const FallingShape shape;
    uint32_t group = 2;
    ta_attend_options options = sized<ta_attend_options>();
    Random random{7};

    std::vector<float> take(const KvPool& pool, ta_seq seq, int32_t n_new, int32_t n_query) {
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {n_new}, {n_query});
        std::vector<float> all;
        const uint32_t heads = shape.kv_heads, d = shape.head_dim;
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            Tensor k(random.normals(int64_t(n_new) * heads * d), n_new, heads, d);
            Tensor v(random.normals(int64_t(n_new) * heads * d), n_new, heads, d);
            Tensor q(random.normals(int64_t(n_query) * heads * group * d), n_query, heads * group, d);
            Tensor out(n_query, heads * group, d);
            std::vector<float> lse(size_t(n_query) * heads * group);
            append(plan, layer, k, v);
            attend(plan, layer, q, out, lse.data(), &options);
            const std::vector<float> x = out.values();
            all.insert(all.end(), x.begin(), x.end());
            all.insert(all.end(), lse.begin(), lse.end());
        }
        end(plan);
        return all;
    }
};

// The blocks of a sequence in a pool in which nothing falls, and, made by hand, the blocks that they become.
class Expected {
  public:
    Expected(const Settings& s, const KvPool& plain, ta_seq seq) : shape_(s.shape) {
        const uint64_t blocks = uint64_t(length(plain, seq)) / kPageTokens;
        for (uint64_t b = 0; b < blocks; ++b) {
            const BlockBits full = read_block(plain, seq, b);
            std::map<uint32_t, std::vector<uint8_t>> of{{full.bits, full.payload}};
            for (uint32_t bits = full.bits; bits > 2; bits /= 2)
                of[bits / 2] = encode_lower_by_hand(shape_, bits, of[bits], full.trailer);
            blocks_.push_back(std::move(of));
        }
    }
    void check(const KvPool& pool, ta_seq seq, const std::vector<uint32_t>& bits) const {
        ASSERT_EQ(bits.size(), blocks_.size());
        for (uint64_t b = 0; b < bits.size(); ++b) {
            const BlockBits got = read_block(pool, seq, b);
            EXPECT_EQ(got.bits, bits[b]) << "block " << b;
            EXPECT_TRUE(got.payload == blocks_[b].at(got.bits)) << "block " << b << " of " << got.bits << " bits";
        }
        verify(pool, seq);
    }

  private:
    const FallingShape shape_;
    std::vector<std::map<uint32_t, std::vector<uint8_t>>> blocks_;
};

struct Case {
    const char* name;
    uint32_t head_dim, bits;
    ta_profile profile;
};
void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

class Falling : public ::testing::TestWithParam<Case> {
  protected:
    Falling() {
        settings.shape.head_dim = GetParam().head_dim;
        settings.bits = GetParam().bits;
        numerics.profile = GetParam().profile;
        if (numerics.profile == TA_PROFILE_PAPER) settings.shape.encode = {false, false, false};
        settings.shape.own_scales = numerics.profile == TA_PROFILE_PAPER;
        settings.numerics = &numerics;
        sinks = numerics.profile == TA_PROFILE_PAPER ? 0 : 1;
    }
    // Of ten full blocks, the first `lower` ones that are no sinks.
    std::vector<uint32_t> all_of(uint32_t bits) const {
        std::vector<uint32_t> all(10, bits);
        if (sinks) all[0] = 8;
        return all;
    }

    ta_numerics numerics = sized<ta_numerics>();
    Settings settings;
    size_t sinks;
};

TEST_P(Falling, BlocksBecomeWhatTheCodecMakesOfThemWhicheverWayTheyTake) {
    const Context context = make_context(2);
    const KvPool plain = make_plain(context, settings);
    const ta_seq reference = make_sequence(plain);
    Steps{settings.shape}.take(plain, reference, 10 * 64 + 5, 1);
    const Expected expected(settings, plain, reference);
    const uint32_t on_device = settings.bits;
    for (const std::vector<ta_tier>& way : std::vector<std::vector<ta_tier>>{
             {TA_TIER_HOST, TA_TIER_DEVICE, TA_TIER_HOST, TA_TIER_DISK, TA_TIER_HOST, TA_TIER_DEVICE, TA_TIER_DISK},
             {TA_TIER_DISK, TA_TIER_DEVICE, TA_TIER_HOST}}) {
        const KvPool pool = make_pool(context, settings);
        const ta_seq seq = make_sequence(pool);
        Steps{settings.shape}.take(pool, seq, 10 * 64 + 5, 1);
        expected.check(pool, seq, all_of(on_device));
        uint32_t bits = on_device;
        for (const ta_tier tier : way) {
            const ta_move_info info = move_now(pool, seq, 0, 11, tier);
            EXPECT_EQ(info.state, TA_MOVE_DONE) << ta_status_name(info.status);
            EXPECT_EQ(info.moved, 10u);
            bits = std::min(bits, tier == TA_TIER_DISK ? 2u : tier == TA_TIER_HOST ? 4u : 8u);
            expected.check(pool, seq, all_of(bits));
            const ta_tier_stats s = tier_stats(pool, tier);
            EXPECT_EQ(bits == 2 ? s.low_blocks : bits == 4 ? s.channel_blocks : 0u, 10u - sinks);
            EXPECT_EQ(s.token_blocks, sinks + (tier == TA_TIER_DEVICE));
        }
        EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).fallen_blocks, 10u - sinks);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).fallen_blocks, way[0] == TA_TIER_HOST && on_device == 8 ? 10u - sinks : 0u);
        EXPECT_EQ(tier_stats(pool, TA_TIER_DEVICE).fallen_blocks, 0u);
    }
}

TEST_P(Falling, AttentionIsThatOverThePoolThatGotTheSameBlocksByHand) {
    const Folder folder;
    const std::string path = folder.file("sequence");
    Random choice(GetParam().head_dim);
    std::vector<float> scalar[4];
    for (const ta_cpu_isa isa : available_isas()) {
        SCOPED_TRACE(::testing::Message() << "isa " << isa);
        const Context context = make_context(2, isa);
        const KvPool plain = make_plain(context, settings), pool = make_pool(context, settings),
                     by_hand = make_pool(context, settings);
        const ta_seq reference = make_sequence(plain), seq = make_sequence(pool);
        constexpr int32_t kBlocks = 21;
        Steps steps{settings.shape}, plain_steps{settings.shape};
        steps.take(pool, seq, kBlocks * 64, 1);
        plain_steps.take(plain, reference, kBlocks * 64, 1);
        Random where(GetParam().head_dim);
        std::vector<BlockBits> blocks;
        for (uint64_t b = 0; b < kBlocks; ++b) {
            blocks.push_back(read_block(plain, reference, b));
            blocks.back().trailer = read_block(pool, seq, b).trailer;
            const auto tier = ta_tier(where.below(3));
            if (tier == TA_TIER_DEVICE) continue;
            ASSERT_EQ(move_now(pool, seq, b, 1, tier).moved, 1u);
            for (uint32_t bits = settings.bits; b >= sinks && bits > (tier == TA_TIER_HOST ? 4u : 2u); bits /= 2) {
                blocks.back().payload =
                    encode_lower_by_hand(settings.shape, bits, blocks.back().payload, blocks.back().trailer);
                blocks.back().bits = bits / 2;
            }
        }
        const std::vector<uint8_t> file = sequence_file_by_hand(settings.shape, by_hand, blocks);
        std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(file.data()), std::streamsize(file.size()));
        ta_seq loaded = 0;
        ta_error err;
        require(ta_seq_load(by_hand.get(), path.c_str(), nullptr, &loaded, &err), err);
        EXPECT_EQ(tier_stats(by_hand, TA_TIER_DEVICE).blocks, uint64_t(kBlocks));
        for (uint64_t b = 0; b < kBlocks; ++b) EXPECT_TRUE(read_block(by_hand, loaded, b).payload == blocks[b].payload);
        Steps other = steps;
        for (int variant = 0; variant < 4; ++variant) {
            SCOPED_TRACE(::testing::Message() << "variant " << variant);
            steps.options = sized<ta_attend_options>();
            if (variant == 1) steps.options.p = TA_P_U8_RUNNING;
            if (variant == 2) steps.options.window = 300, steps.options.softcap = 20.0f;
            if (variant == 3) steps.options.exp = TA_EXP_SAS;
            other.options = steps.options;
            const int32_t n = variant == 0 ? 1 : variant == 1 ? 70 : variant == 2 ? 5 : 130;
            const std::vector<float> a = steps.take(pool, seq, n, n), b = other.take(by_hand, loaded, n, n);
            EXPECT_TRUE(same_bits(a, b));
            for (const float x : a) ASSERT_TRUE(std::isfinite(x));
            if (scalar[variant].empty()) scalar[variant] = a;
            EXPECT_TRUE(same_bits(a, scalar[variant])) << "not what the scalar kernels give";
        }
        verify(pool, seq);
        std::filesystem::remove(path);
    }
}

INSTANTIATE_TEST_SUITE_P(
    Pools, Falling,
    ::testing::Values(Case{"D64Bits8", 64, 8, TA_PROFILE_ACCURATE}, Case{"D96Bits8", 96, 8, TA_PROFILE_ACCURATE},
                      Case{"D128Bits8", 128, 8, TA_PROFILE_ACCURATE}, Case{"D256Bits8", 256, 8, TA_PROFILE_ACCURATE},
                      Case{"D64Bits4", 64, 4, TA_PROFILE_ACCURATE}, Case{"D64Bits8Paper", 64, 8, TA_PROFILE_PAPER},
                      Case{"D128Bits4Paper", 128, 4, TA_PROFILE_PAPER}),
    [](const auto& i) { return i.param.name; });

// Over the values that are stored: queries that INT8 holds exactly, no rotation and 16-bit P leave errors of 1e-5.
TEST(FallingAttention, IsThatOverWhatIsStored) {
    auto numerics = sized<ta_numerics>();
    numerics.hadamard = TA_OFF;
    numerics.exp = TA_EXP_EXACT;
    numerics.p = TA_P_U16;
    Settings settings;
    settings.numerics = &numerics;
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, settings);
    const ta_seq seq = make_sequence(pool);
    constexpr int32_t kTokens = 40 * 64;
    constexpr int64_t kHeads = 2, kQHeads = 4, kDim = 64, kRow = kHeads * kDim;
    Steps{settings.shape}.take(pool, seq, kTokens, 1);
    move_now(pool, seq, 0, 12, TA_TIER_DISK);
    move_now(pool, seq, 7, 3, TA_TIER_DEVICE);
    move_now(pool, seq, 12, 11, TA_TIER_HOST);
    Random random(3);
    for (const int32_t n_query : {1, 7, 100}) {
        std::vector<float> q;
        for (int64_t i = 0; i < n_query * kQHeads; ++i) {
            for (int64_t c = 0; c < kDim; ++c) q.push_back(float(c == i % kDim ? 119 : random.between(-119, 119)) * 0x1p-6f);
        }
        const Plan plan = make_plan(pool);
        begin(plan, {seq}, {0}, {n_query});
        Tensor queries(q, n_query, kQHeads, kDim), out(n_query, kQHeads, kDim);
        attend(plan, 1, queries, out);
        end(plan);
        const Stored stored = dequantize(pool, seq, 1, 0, kTokens, kRow);
        const AttentionShape shape{n_query, kTokens, kQHeads, kHeads, kDim};
        const Attention exact = exact_attention(shape, {}, q.data(), stored.k.data(), stored.v.data());
        const std::vector<float> got = out.values();
        for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], exact.out[i], 2e-4) << "queries " << n_query << ", " << i;
    }
    // In place and on its way, at all widths.
    EXPECT_GT(tier_stats(pool, TA_TIER_HOST).channel_blocks, 0u);
    EXPECT_GT(tier_stats(pool, TA_TIER_HOST).low_blocks, 0u);
    EXPECT_EQ(tier_stats(pool, TA_TIER_DEVICE).low_blocks, 3u);
}

// Blocks leave by themselves; the budgets count what is stored.
TEST(FallingEviction, TiersHoldAsMuchAsTheirBitsAllow) {
    Settings settings;
    const Context context = make_context(2);
    const ta_kv_pool_stats sizes = stats(make_pool(context, settings));
    EXPECT_GT(sizes.token_block_bytes, sizes.channel_block_bytes);
    EXPECT_GT(sizes.channel_block_bytes, sizes.low_block_bytes);
    EXPECT_GT(sizes.low_block_bytes, 0u);
    const KvPool plain = make_plain(context, settings);
    settings.device_bytes = 12 * sizes.token_block_bytes;
    settings.host_bytes = 30 * (sizes.channel_block_bytes + 4096);
    settings.high = 80;
    const KvPool pool = make_pool(context, settings);
    std::vector<ta_seq> seqs, references;
    Steps steps{settings.shape}, plain_steps{settings.shape};
    for (int i = 0; i < 4; ++i) {
        seqs.push_back(make_sequence(pool));
        references.push_back(make_sequence(plain));
    }
    for (int round = 0; round < 5; ++round) {
        for (size_t i = 0; i < seqs.size(); ++i) {
            steps.take(pool, seqs[i], 200, 1);
            plain_steps.take(plain, references[i], 200, 1);
        }
    }
    wait_for_moves(pool);
    const ta_tier_stats device = tier_stats(pool, TA_TIER_DEVICE), host = tier_stats(pool, TA_TIER_HOST),
                        disk = tier_stats(pool, TA_TIER_DISK);
    EXPECT_EQ(device.blocks + host.blocks + disk.blocks, 4u * 16u);
    EXPECT_LE(device.bytes_used, settings.device_bytes);
    EXPECT_GT(host.blocks, 15u);
    EXPECT_LE(host.token_blocks, 2 * seqs.size()) << "sinks and open blocks, where a begin had to suspend their sequences";
    EXPECT_EQ(disk.low_blocks, disk.blocks);
    EXPECT_GT(disk.fallen_blocks, 0u);
    EXPECT_GE(host.fallen_blocks, host.channel_blocks);
    uint64_t unfallen = 0;
    for (size_t i = 0; i < seqs.size(); ++i) {
        const Expected expected(settings, plain, references[i]);
        std::vector<uint32_t> bits;
        std::set<uint32_t> widths;
        for (uint64_t b = 0; b < 15; ++b) {
            bits.push_back(read_block(pool, seqs[i], b).bits);
            widths.insert(bits.back());
        }
        EXPECT_EQ(bits[0], 8u) << "a sink";
        EXPECT_GT(widths.size(), 1u);
        expected.check(pool, seqs[i], bits);
        unfallen += uint64_t(std::count(bits.begin() + 1, bits.end(), 8u));
    }
    EXPECT_LE(unfallen, device.token_blocks) << "only the device has full blocks at 8 bits";
}

TEST(FallingBlocks, PublishedAndPinnedOnesKeepWhatTheyHave) {
    Settings settings;
    const Context context = make_context(2);
    const Folder folder(false);
    const std::string path = folder.file("tier");
    settings.disk_path = path.c_str();
    auto space_options = sized<ta_namespace_options>();
    space_options.salt[3] = 5;
    std::vector<uint8_t> keys(6 * 32);
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = uint8_t(i * 37 + 1);
    const KvPool plain = make_plain(context, settings);
    const ta_seq reference = make_sequence(plain);
    Steps{settings.shape}.take(plain, reference, 10 * 64, 1);
    const Expected expected(settings, plain, reference);
    const std::vector<uint32_t> bits = {8, 2, 4, 8, 8, 8, 8, 4, 4, 4};
    const auto found = [&](const KvPool& pool, ta_namespace space) {
        ta_seq seq = 0;
        int64_t n = 0;
        ta_error err;
        require(ta_seq_match_prefix(pool.get(), space, keys.data(), 6, &seq, &n, &err), err);
        return std::pair(seq, n);
    };
    {
        const KvPool pool = make_pool(context, settings);
        const ta_seq seq = make_sequence(pool);
        Steps{settings.shape}.take(pool, seq, 10 * 64, 1);
        ta_error err;
        ta_namespace space = 0;
        require(ta_namespace_create(pool.get(), &space_options, &space, &err), err);
        EXPECT_EQ(move_now(pool, seq, 1, 1, TA_TIER_DISK).moved, 1u);
        EXPECT_EQ(move_now(pool, seq, 2, 1, TA_TIER_HOST).moved, 1u);
        // A block that fell before it was published is published as it is.
        require(ta_seq_publish(pool.get(), seq, space, keys.data(), 6, &err), err);
        auto before = sized<ta_namespace_stats>(), after = before;
        require(ta_namespace_get_stats(pool.get(), space, &before, &err), err);
        require(ta_seq_pin(pool.get(), seq, 6, 1, &err), err);
        const ta_move_info down = move_now(pool, seq, 0, 10, TA_TIER_HOST);
        EXPECT_EQ(down.skipped, 1u);
        EXPECT_EQ(down.failed, 0u);
        expected.check(pool, seq, bits);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).token_blocks, 4u);
        // A fork has the same blocks, and they fall for both.
        const ta_seq fork = fork_sequence(pool, seq);
        EXPECT_EQ(move_now(pool, fork, 8, 1, TA_TIER_DISK).moved, 1u);
        EXPECT_EQ(read_block(pool, seq, 8).bits, 2u);
        EXPECT_EQ(read_block(pool, seq, 8).content_id, read_block(pool, fork, 8).content_id);
        require(ta_namespace_flush(pool.get(), space, &err), err);
        EXPECT_EQ(move_now(pool, seq, 0, 6, TA_TIER_DISK).failed, 0u);
        const auto [matched, n] = found(pool, space);
        EXPECT_EQ(n, 6 * 64);
        for (uint64_t b = 0; b < 6; ++b) EXPECT_EQ(read_block(pool, matched, b).bits, bits[b]) << "block " << b;
        require(ta_namespace_get_stats(pool.get(), space, &after, &err), err);
        EXPECT_EQ(before.bytes, after.bytes);
    }
    // The next pool finds them with the bits that they had.
    const KvPool pool = make_pool(context, settings);
    ta_error err;
    ta_namespace space = 0;
    require(ta_namespace_create(pool.get(), &space_options, &space, &err), err);
    const auto [seq, n] = found(pool, space);
    ASSERT_EQ(n, 6 * 64);
    for (uint64_t b = 0; b < 6; ++b) EXPECT_EQ(read_block(pool, seq, b).bits, bits[b]) << "block " << b;
    EXPECT_EQ(move_now(pool, seq, 0, 6, TA_TIER_DEVICE).moved, 6u);
    EXPECT_EQ(move_now(pool, seq, 0, 6, TA_TIER_HOST).moved, 6u);
    for (uint64_t b = 0; b < 6; ++b) EXPECT_EQ(read_block(pool, seq, b).bits, bits[b]) << "block " << b;
    verify(pool, seq);
    // A pool of other settings does not take the file.
    settings.falls = TA_OFF;
    ta_tier_options tiers;
    ta_kv_pool_options options = options_of(settings, tiers);
    ta_kv_pool* other = nullptr;
    EXPECT_EQ(ta_kv_pool_create(context.get(), &options, &other, &err), TA_E_BUSY);
}

TEST(FallingBlocks, WhatWasPublishedStaysAsItWas) {
    const Context context = make_context(2);
    const KvPool pool = make_pool(context, Settings{});
    const ta_seq seq = make_sequence(pool);
    Steps{FallingShape{}}.take(pool, seq, 3 * 64, 1);
    auto space_options = sized<ta_namespace_options>();
    space_options.salt[0] = 1;
    ta_error err;
    ta_namespace space = 0;
    require(ta_namespace_create(pool.get(), &space_options, &space, &err), err);
    const std::vector<uint8_t> keys(2 * 32, 9);
    require(ta_seq_publish(pool.get(), seq, space, keys.data(), 2, &err), err);
    require(ta_namespace_destroy(pool.get(), space, &err), err);
    EXPECT_EQ(move_now(pool, seq, 0, 3, TA_TIER_HOST).moved, 3u);
    EXPECT_EQ(read_block(pool, seq, 1).bits, 8u);
    EXPECT_EQ(read_block(pool, seq, 2).bits, 4u);
}

// A begin that cannot have its room waits for none, and takes bits from no block; what leaves takes less room below, and counts
// so.
TEST(FallingEviction, ABeginKnowsWhatLeavingBlocksTake) {
    const Context context = make_context(2);
    const ta_kv_pool_stats sizes = stats(make_pool(context, Settings{}));
    const uint64_t token = sizes.token_block_bytes, channel = sizes.channel_block_bytes;
    Settings settings;
    settings.device_bytes = 182 * token + token / 2;  // so that nothing leaves in the background
    settings.host_bytes = 130 * (token + 4096);       // 64 regions of two blocks of 8 bits, or three of 4
    settings.disk_bytes = 0;
    for (const bool fits : {false, true}) {
        const KvPool pool = make_pool(context, settings);
        Steps steps{settings.shape};
        ta_error err;
        auto space_options = sized<ta_namespace_options>();
        space_options.salt[0] = 1;
        ta_namespace space = 0;
        require(ta_namespace_create(pool.get(), &space_options, &space, &err), err);
        const std::vector<uint8_t> keys(32, 9);
        const auto entries = [&] {
            auto s = sized<ta_namespace_stats>();
            require(ta_namespace_get_stats(pool.get(), space, &s, &err), err);
            return s.entries;
        };
        const ta_seq seq = make_sequence(pool), idle = make_sequence(pool), next = make_sequence(pool);
        steps.take(pool, seq, 64, 1);
        require(ta_seq_publish(pool.get(), seq, space, keys.data(), 1, &err), err);
        require(ta_seq_release(pool.get(), seq, &err), err);
        steps.take(pool, idle, 181 * 64, 1);
        ASSERT_EQ(entries(), 1u);
        // All but the sink leaves at 4 bits, or the sink and one block too many are pinned.
        const uint64_t room = tier_stats(pool, TA_TIER_HOST).bytes_free;
        EXPECT_LT(room, 180 * token) << "not at 8 bits";
        EXPECT_GE(room, 180 * channel + token);
        if (!fits) require(ta_seq_pin(pool.get(), idle, 0, 3, &err), err);
        const Plan plan = make_plan(pool);
        const int32_t n = 180 * 64;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &next, &n, nullptr, nullptr, &err), fits ? TA_OK : TA_E_TIER_FULL)
            << err.message;
        EXPECT_EQ(entries(), 1u);
        EXPECT_EQ(move_stats(pool).waits_for_room, fits ? 1u : 0u);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).fallen_blocks, fits ? 179u : 0u);
        if (!fits) continue;
        require(ta_plan_abort(plan.get(), &err), err);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).channel_blocks, 179u);
        EXPECT_EQ(tier_stats(pool, TA_TIER_HOST).token_blocks, 1u) << "the published one";
    }
}

// The step's own blocks have nowhere to go, and those of others do not make enough room.
TEST(FallingEviction, ABeginThatCannotFitTakesNoBits) {
    const Context context = make_context(2);
    auto numerics = sized<ta_numerics>();
    numerics.sink_blocks = -1;
    Settings settings;
    settings.bits = 4;
    settings.numerics = &numerics;
    const ta_kv_pool_stats sizes = stats(make_pool(context, settings));
    const uint64_t token = sizes.token_block_bytes, channel = sizes.channel_block_bytes;
    settings.device_bytes = 6 * token + 12 * channel;
    settings.host_bytes = 0;
    const KvPool pool = make_pool(context, settings);
    Steps steps{settings.shape};
    const ta_seq other = make_sequence(pool), seq = make_sequence(pool);
    steps.take(pool, other, 4 * 64, 1);
    steps.take(pool, seq, 6 * 64, 1);
    const uint64_t room = tier_stats(pool, TA_TIER_DEVICE).bytes_free + 4 * channel;
    const Plan plan = make_plan(pool);
    for (const bool fits : {false, true}) {
        const int32_t n = int32_t((room - token) / channel + (fits ? 0 : 1)) * 64 + 1;  // full blocks and an open one
        ta_error err;
        EXPECT_EQ(ta_plan_begin(plan.get(), 1, &seq, &n, nullptr, nullptr, &err), fits ? TA_OK : TA_E_TIER_FULL) << err.message;
        EXPECT_EQ(tier_stats(pool, TA_TIER_DISK).fallen_blocks > 0, fits);
        EXPECT_EQ(residency(pool, other).device_blocks == 4, !fits);
        if (fits) require(ta_plan_abort(plan.get(), &err), err);
    }
}

TEST(FallingBlocks, FilesAndTruncatesKeepTheBits) {
    Settings settings;
    const Context context = make_context(2);
    const Folder folder;
    const KvPool pool = make_pool(context, settings), other = make_pool(context, settings);
    const ta_seq seq = make_sequence(pool);
    Steps steps{settings.shape};
    steps.take(pool, seq, 10 * 64 + 9, 1);
    move_now(pool, seq, 1, 4, TA_TIER_DISK);
    move_now(pool, seq, 5, 3, TA_TIER_HOST);
    const std::vector<uint32_t> bits = {8, 2, 2, 2, 2, 4, 4, 4, 8, 8};
    ta_error err;
    ta_seq loaded = 0;
    require(ta_seq_save(pool.get(), seq, folder.file("s").c_str(), nullptr, &err), err);
    require(ta_seq_load(other.get(), folder.file("s").c_str(), nullptr, &loaded, &err), err);
    require(ta_kv_pool_save(pool.get(), folder.file("p").c_str(), 0, nullptr, &err), err);
    ta_loaded_seq ids[2];
    uint64_t n = 0;
    require(ta_kv_pool_load(other.get(), folder.file("p").c_str(), nullptr, ids, 2, &n, &err), err);
    for (const ta_seq copy : {loaded, ids[0].loaded}) {
        for (uint64_t b = 0; b < bits.size(); ++b) {
            const BlockBits a = read_block(pool, seq, b), c = read_block(other, copy, b);
            EXPECT_EQ(a.bits, bits[b]);
            EXPECT_EQ(c.bits, bits[b]);
            EXPECT_TRUE(a.payload == c.payload);
        }
        verify(other, copy);
        // In the device tier they can fall again.
        EXPECT_EQ(move_now(other, copy, 4, 5, TA_TIER_DISK).failed, 0u);
        EXPECT_EQ(read_block(other, copy, 8).bits, 2u);
    }
    // Pools in which nothing falls do not take the file.
    settings.falls = TA_OFF;
    EXPECT_EQ(ta_seq_load(make_pool(context, settings).get(), folder.file("s").c_str(), nullptr, &loaded, &err), TA_E_INVALID);
    // A truncate into a fallen block: it is opened at 8 bits from what it has.
    for (const int64_t length : {5 * 64 + 30, 2 * 64 + 30}) {
        const uint64_t block = uint64_t(length) / 64;
        const Stored before = dequantize(pool, seq, 1, int64_t(block) * 64, 30, 128);
        require(ta_seq_truncate(pool.get(), seq, length, &err), err);
        steps.take(pool, seq, 40, 2);
        EXPECT_EQ(read_block(pool, seq, block).bits, 8u);
        const Stored after = dequantize(pool, seq, 1, int64_t(block) * 64, 30, 128);
        for (size_t i = 0; i < before.v.size(); ++i) ASSERT_NEAR(before.v[i], after.v[i], 0.05f);
        verify(pool, seq);
    }
}

TEST(FallingOptions, WhatIsRefused) {
    const Context context = make_context(1);
    Settings settings;
    ta_tier_options tiers;
    ta_error err;
    const auto create = [&](auto change) {
        ta_kv_pool_options o = options_of(settings, tiers);
        change(o);
        ta_kv_pool* p = nullptr;
        const ta_status status = ta_kv_pool_create(context.get(), &o, &p, &err);
        ta_kv_pool_destroy(p);
        return status;
    };
    EXPECT_EQ(create([](auto&) {}), TA_OK);
    EXPECT_EQ(create([](auto& o) { o.bits = 4; }), TA_OK);
    EXPECT_EQ(create([](auto& o) { o.bits = 2; }), TA_E_UNSUPPORTED);
    const std::vector<uint8_t> mixed = {4, 2, 4, 4}, fours(4, 4), eights(4, 8);
    EXPECT_EQ(create([&](auto& o) { o.k_bits = mixed.data(), o.v_bits = fours.data(); }), TA_E_UNSUPPORTED);
    EXPECT_EQ(create([&](auto& o) { o.k_bits = o.v_bits = eights.data(); }), TA_OK);
    EXPECT_EQ(create([&](auto&) { tiers.falling_precision = 3; }), TA_E_INVALID);
    EXPECT_EQ(create([&](auto&) { tiers.host_bytes = tiers.disk_bytes = 0; }), TA_E_INVALID);
    EXPECT_EQ(create([&](auto&) { tiers.drop_coldest = TA_ON; }), TA_E_UNSUPPORTED);
    EXPECT_EQ(create([&](auto&) { tiers.disk_bytes = 0; }), TA_OK);
    EXPECT_EQ(create([&](auto&) { tiers.host_bytes = 0; }), TA_OK);
}

// The error of falling precision: bench/results/accuracy.md has these figures.
TEST(FallingAccuracy, ErrorByWhereBlocksAre) {
    struct Mix {
        const char* name;
        int host, disk;  // percent of the blocks, the oldest on disk
        double most[4];
    };
    constexpr Mix kMixes[] = {
        {"all on the device", 0, 0, {0.02, 0.02, 0.02, 0.05}},   {"half in host memory", 50, 0, {0.12, 0.06, 0.06, 0.3}},
        {"all in host memory", 100, 0, {0.15, 0.08, 0.08, 0.4}}, {"40% host, 40% disk", 40, 40, {0.5, 0.2, 0.2, 0.9}},
        {"all on disk", 0, 100, {0.65, 0.3, 0.3, 1.3}},
    };
    constexpr DataKind kKinds[] = {DataKind::kNormal, DataKind::kFlat, DataKind::kSink, DataKind::kPeaky};
    constexpr int kDraws = 3;
    const Context context = make_context(2);
    const AttentionShape shape{16, 2048, 8, 2, 128};
    Settings settings;
    settings.shape = {1, 2, 128};
    std::printf("%-20s", "error of O, %");
    for (const DataKind kind : kKinds) std::printf(" %8s", name_of(kind));
    std::printf("\n");
    struct Draw {
        AttentionData data;
        std::vector<double> exact;
    };
    std::vector<Draw> draws;  // kDraws of each kind
    for (const DataKind kind : kKinds) {
        for (uint64_t draw = 0; draw < kDraws; ++draw) {
            AttentionData data = make_data(kind, shape, 40 + draw);
            Attention exact = exact_attention(shape, {}, data.q.data(), data.k.data(), data.v.data());
            draws.push_back({std::move(data), std::move(exact.out)});
        }
    }
    const auto error_of = [&](const Draw& draw, const Mix& mix, uint32_t bits) {
        const AttentionData& data = draw.data;
        settings.bits = bits;
        const KvPool pool = make_pool(context, settings);
        const ta_seq seq = make_sequence(pool);
        const Plan plan = make_plan(pool);
        const auto n = int32_t(shape.n_keys);
        begin(plan, {seq}, {n}, {0});
        Tensor k(data.k, n, 2, 128), v(data.v, n, 2, 128), q(data.q, 16, 8, 128), out(16, 8, 128);
        append(plan, 0, k, v);
        end(plan);
        const uint64_t on_disk = uint64_t(n / 64 * mix.disk / 100), in_host = uint64_t(n / 64 * mix.host / 100);
        if (on_disk) move_now(pool, seq, 0, on_disk, TA_TIER_DISK);
        if (in_host) move_now(pool, seq, on_disk, in_host, TA_TIER_HOST);
        begin(plan, {seq}, {0}, {16});
        attend(plan, 0, q, out);
        end(plan);
        const std::vector<float> got = out.values();
        return relative_l2(got, draw.exact);
    };
    const auto print = [&](const char* name, const Mix& mix, uint32_t bits, ta_switch falls, const double* most) {
        std::printf("%-20s", name);
        for (size_t i = 0; i < std::size(kKinds); ++i) {
            double sum = 0;
            settings.falls = falls;
            for (size_t draw = 0; draw < kDraws; ++draw) sum += error_of(draws[i * kDraws + draw], mix, bits);
            std::printf(" %8.2f", 100 * sum / kDraws);
            EXPECT_LT(sum / kDraws, most ? most[i] : 2.0) << name << ", " << name_of(kKinds[i]);
        }
        std::printf("\n");
    };
    for (const Mix& mix : kMixes) print(mix.name, mix, 8, TA_ON, mix.most);
    print("a 4-bit pool", kMixes[0], 4, TA_OFF, nullptr);
    print("a 2-bit pool", kMixes[0], 2, TA_OFF, nullptr);
}

}  // namespace
}  // namespace ta::testing
