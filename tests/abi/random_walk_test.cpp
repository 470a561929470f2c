// Walks of random_walk.h through pools of several shapes.
//
// TA_WALK_SECONDS (10) is the time of all walks together, TA_WALK_SEED (1) where they begin. A failure prints the seed and the
// moves that led to it.
#include "abi/random_walk.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

namespace ta::testing {

Walk::Walk(const Config& config, uint64_t seed) : c_(config), random_(seed), context_(make_context(config.threads)) {
    auto numerics = sized<ta_numerics>();
    numerics.profile = c_.profile;
    numerics.sink_blocks = c_.sink_blocks;
    numerics.hadamard = c_.hadamard;
    numerics.k_granularity = numerics.v_granularity = c_.granularity;
    const std::vector<float> offset = random_.normals(int64_t(c_.layers) * c_.row(), 2.0f);
    if (c_.k_offset) numerics.k_offset = offset.data();
    auto options = pool_options(c_.layers, c_.kv_heads, c_.head_dim, c_.bits, &numerics);
    std::vector<uint8_t> v_map(c_.map.rbegin(), c_.map.rend());
    if (!c_.map.empty()) {
        options.k_bits = c_.map.data();
        options.v_bits = v_map.data();
    }
    options.max_sequences = 2 * kMaxSequences;
    replay_pool_ = make_pool(make_context(1, TA_CPU_ISA_SCALAR), options);
    for (Plan& plan : replay_plans_) plan = make_plan(replay_pool_);
    auto description = sized<ta_kv_pool_description>();
    ta_error err;
    require(ta_kv_pool_describe(replay_pool_.get(), &description, &err), err);
    sinks_ = std::max(0, description.numerics->sink_blocks);
    universal_ = description.numerics->open_scale == TA_OPEN_SCALE_UNIVERSAL;
    closes_ = description.channel_block_bytes > 0;
    peer_pool_ = make_pool(peer_context_, options);
    options.max_sequences = kMaxSequences;
    options.budget_bytes = c_.budget_blocks * description.token_block_bytes + 1000;
    pool_ = make_pool(context_, options);
    plan_ = make_plan(pool_);
    other_plan_ = make_plan(pool_);
    mean_ = random_.normals(2 * c_.row(), 0.5f);
}

void Walk::move() {
    const int64_t n = random_.below(100);
    if (n < 12) {
        create();
    } else if (n < 22) {
        fork();
    } else if (n < 24) {
        there_and_back();
    } else if (n < 34) {
        truncate();
    } else if (n < 41) {
        release();
    } else if (n < 46) {
        wrong_call();
    } else if (n < 54) {
        reserve();
    } else {
        step();
    }
    check_statistics();
    if (!sequences_.empty() && random_.chance(40)) check_sequence(*random_.pick(sequences_));
}

void Walk::check_all() {
    for (const auto& s : sequences_) check_sequence(*s);
}

namespace {

std::vector<Config> configs() {
    std::vector<Config> all = {
        {"accurate4_d64", 2, 2, 4, 64, 4},      {"accurate2_d128", 1, 2, 2, 128, 2},
        {"accurate8_d96", 2, 1, 3, 96, 8},      {"mixed_d128", 2, 3, 6, 128, 4, {4, 2, 8, 2, 2, 4}},
        {"paper4_d64", 1, 2, 8, 64, 4},         {"paper2_d96", 2, 2, 2, 96, 2},
        {"no_sink_tokens_d96", 2, 2, 4, 96, 4}, {"two_sinks_offset_d64", 1, 3, 3, 64, 4},
    };
    all[1].dtype = TA_DTYPE_F16;
    all[3].threads = 3;
    all[3].dtype = TA_DTYPE_BF16;
    all[4].profile = all[5].profile = TA_PROFILE_PAPER;
    all[5].sink_blocks = 1;
    all[6].sink_blocks = -1;
    all[6].granularity = TA_GRANULARITY_TOKEN;
    all[7].sink_blocks = 2;
    all[7].k_offset = true;
    all[7].threads = 2;
    all[7].budget_blocks = 12;  // often full
    return all;
}

class RandomWalk : public ::testing::TestWithParam<Config> {};

TEST_P(RandomWalk, AgreesWithTheModel) {
    constexpr int kMoves = 60;
    const uint64_t milliseconds = number_from("TA_WALK_SECONDS", 10) * 1000 / configs().size();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
    uint64_t seed = number_from("TA_WALK_SEED", 1), walks = 0;
    const uint64_t first = seed;
    for (; walks == 0 || std::chrono::steady_clock::now() < deadline; ++walks, ++seed) {
        Walk walk(GetParam(), seed);
        for (int i = 0; i < kMoves; ++i) {
            try {
                walk.move();
            } catch (const std::exception& e) {
                ADD_FAILURE() << "a correct call failed: " << e.what();
            }
            if (HasFailure()) {
                FAIL() << "TA_WALK_SEED=" << seed << " --gtest_filter='*" << GetParam().name << "', move " << i
                       << walk.history();
            }
        }
        walk.check_all();
        if (HasFailure()) FAIL() << "TA_WALK_SEED=" << seed << walk.history();
    }
    std::printf("%s: %llu walks of %d moves, seeds from %llu\n", GetParam().name, (unsigned long long)walks, kMoves,
                (unsigned long long)first);
}

INSTANTIATE_TEST_SUITE_P(Pools, RandomWalk, ::testing::ValuesIn(configs()),
                         [](const auto& i) { return std::string(i.param.name); });

}  // namespace
}  // namespace ta::testing
