// What `ta map` says fits into a budget, against pools of that budget that take a token a step until they are full.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "turboattention.h"

namespace {

using nlohmann::json;

constexpr uint32_t kLayers = 4, kDim = 64;
constexpr int64_t kEnough = 3000;  // tokens, where a budget never ends

struct Case {
    const char* bits;
    std::vector<uint32_t> layers_with_window;
    int64_t window;
};

json map_of(const Case& c, const std::string& folder, uint64_t budget) {
    json types = json::array();
    for (uint32_t layer = 0; layer < kLayers; ++layer) types.push_back("full_attention");
    for (const uint32_t layer : c.layers_with_window) types[layer] = "sliding_attention";
    std::ofstream(folder + "/config.json") << json{{"num_hidden_layers", kLayers},
                                                   {"num_attention_heads", 1},
                                                   {"hidden_size", kDim},
                                                   {"layer_types", types},
                                                   {"sliding_window", c.window}};
    const std::string command = std::string(TA_PROGRAM " map --json --bits ") + c.bits + " --budget " + std::to_string(budget) +
                                " " + folder + "/config.json > " + folder + "/out";
    EXPECT_EQ(std::system(command.c_str()), 0) << command;
    return json::parse(std::ifstream(folder + "/out"));
}

// Tokens that a sequence gets to have, one more in each step, up to kEnough.
int64_t tokens_in_pool(const Case& c, uint64_t budget) {
    ta_error err;
    ta_context* context = nullptr;
    ta_kv_pool* pool = nullptr;
    ta_plan* plan = nullptr;
    ta_seq seq = 0;
    ta_context_options one{};
    one.struct_size = sizeof one, one.threads = 1;
    EXPECT_EQ(ta_context_create(&one, &context, &err), TA_OK) << err.message;
    std::vector<ta_layer_group> groups;
    for (const uint32_t layer : c.layers_with_window) {
        groups.push_back({});
        groups.back().struct_size = sizeof groups.back();
        groups.back().first = layer, groups.back().layers = 1, groups.back().window = c.window;
    }
    const std::vector<uint8_t> k(kLayers, 8), v(kLayers, 4);
    ta_kv_pool_options options{};
    options.struct_size = sizeof options;
    options.layers = kLayers, options.kv_heads = 1, options.head_dim = kDim, options.budget_bytes = budget;
    if (c.bits[0] == 'k')
        options.k_bits = k.data(), options.v_bits = v.data();
    else
        options.bits = uint32_t(c.bits[0] - '0');
    options.layer_groups = groups.data(), options.n_layer_groups = uint32_t(groups.size());
    EXPECT_EQ(ta_kv_pool_create(context, &options, &pool, &err), TA_OK) << err.message;
    EXPECT_EQ(ta_plan_create(pool, nullptr, &plan, &err), TA_OK);
    EXPECT_EQ(ta_seq_create(pool, &seq, &err), TA_OK);
    std::vector<float> x(kDim, 0.5f);
    const ta_tensor row = ta_tensor_make(x.data(), TA_DTYPE_F32, 1, 1, kDim);
    const int32_t one_token = 1;
    int64_t tokens = 0;
    while (tokens < kEnough && ta_plan_begin(plan, 1, &seq, &one_token, nullptr, nullptr, &err) == TA_OK) {
        for (uint32_t layer = 0; layer < kLayers; ++layer) EXPECT_EQ(ta_append(plan, layer, &row, &row, &err), TA_OK);
        EXPECT_EQ(ta_plan_end(plan, nullptr, &err), TA_OK);
        ++tokens;
    }
    EXPECT_TRUE(tokens == kEnough || err.code == TA_E_TIER_FULL) << err.message;
    ta_plan_destroy(plan), ta_kv_pool_destroy(pool), ta_context_destroy(context);
    return tokens;
}

TEST(Map, WhatFitsIsWhatPoolsHave) {
    char folder[] = "/tmp/ta_map_test.XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    const Case cases[] = {
        {"4", {}, 0},       {"8", {}, 0},        {"k8v4", {}, 0},         {"4", {0, 2}, 128}, {"4", {1}, 129},
        {"8", {0, 2}, 100}, {"2", {0, 1, 2}, 1}, {"4", {0, 2}, 64},       {"4", {1, 3}, 300}, {"k8v4", {0}, 200},
        {"4", {3}, 191},    {"2", {3}, 1000},    {"4", {0, 1, 2, 3}, 256}};
    const uint64_t block = 34944;  // what 64 tokens take at 8 bits
    for (const Case& c : cases) {
        for (const uint64_t budget : {block, 3 * block, 5 * block + 500, 6 * block, 8 * block + 20000, 11 * block + 77}) {
            const int64_t fit = map_of(c, folder, budget)["rows"][1]["tokens_in_budget"], have = tokens_in_pool(c, budget);
            // The block behind what fits may begin, and the last token of the last one may lack, as it takes one more block.
            if (have == kEnough)
                EXPECT_GE(fit, kEnough - 63);
            else
                EXPECT_TRUE(fit - 1 <= have && have < fit + 63) << c.bits << " bits, window " << c.window << ", " << budget
                                                                << " bytes: " << fit << " said, " << have << " had";
        }
    }
    std::filesystem::remove_all(folder);
}

}  // namespace
