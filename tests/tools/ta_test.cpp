// The ta command on files that the library wrote, whole and damaged, and on input that is wrong. Sees only the public header.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "turboattention.h"

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr uint32_t kLayers = 3, kHeads = 2, kDim = 64;
constexpr int kTokens = 200;  // a sink block, two channel blocks, an open one of 8

struct Output {
    int status;
    std::string out, err;
    json parsed() const { return json::parse(out); }
};

std::string slurp(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

class Ta : public testing::Test {
  protected:
    Ta() {
        char name[] = "/tmp/ta_test.XXXXXX";
        folder_ = mkdtemp(name);
    }
    ~Ta() override { fs::remove_all(folder_); }

    Output ta(const std::string& arguments) const {
        const std::string command = TA_PROGRAM " " + arguments + " >" + path("out") + " 2>" + path("err");
        const int status = std::system(command.c_str());
        return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, slurp(path("out")), slurp(path("err"))};
    }
    std::string path(const std::string& name) const { return folder_ / name; }

    // A pool, two sequences of it (the second one a fork that is cut) as "sequence" and "pool"; with a disk tier its file "disk".
    // `falls`: full blocks but the sink have lost bits on the way to a disk tier without a name. `uneven`: layer 1 has one kv head of
    // 128 channels.
    void make_files(const uint8_t* bits, ta_profile profile = TA_PROFILE_ACCURATE, bool disk = false, bool falls = false,
                    bool uneven = false, uint32_t k_dim = kDim, uint32_t v_dim = kDim) {
        ta_context* context = nullptr;
        ta_kv_pool* pool = nullptr;
        ta_plan* plan = nullptr;
        ta_seq seq = 0, fork = 0;
        ta_numerics numerics{};
        numerics.struct_size = sizeof numerics;
        numerics.profile = profile;
        ta_tier_options tiers{};
        tiers.struct_size = sizeof tiers;
        tiers.disk_bytes = 4 << 20;
        const std::string disk_path = path("disk");
        if (disk) tiers.disk_path = disk_path.c_str();
        if (falls) tiers.falling_precision = TA_ON;
        ta_kv_pool_options options{};
        options.struct_size = sizeof options;
        options.layers = kLayers;
        options.kv_heads = kHeads;
        options.head_dim = k_dim;
        options.v_head_dim = v_dim;
        options.k_bits = options.v_bits = bits;
        options.budget_bytes = 1 << 20;
        options.numerics = &numerics;
        if (disk || falls) options.tiers = &tiers;
        ta_layer_group group{};
        group.struct_size = sizeof group;
        group.first = group.layers = group.kv_heads = 1;
        group.head_dim = 128;
        options.layer_groups = &group;
        options.n_layer_groups = uneven;
        ASSERT_EQ(ta_context_create(nullptr, &context, nullptr), TA_OK);
        ASSERT_EQ(ta_kv_pool_create(context, &options, &pool, nullptr), TA_OK);
        ASSERT_EQ(ta_plan_create(pool, nullptr, &plan, nullptr), TA_OK);
        ASSERT_EQ(ta_seq_create(pool, &seq, nullptr), TA_OK);
        std::vector<float> rows(size_t(kTokens) * kHeads * std::max({k_dim, v_dim, kDim}));
        for (size_t i = 0; i < rows.size(); ++i) rows[i] = float(i * 79 % 2003) / 1001 - 1;
        const ta_tensor k = ta_tensor_make(rows.data(), TA_DTYPE_F32, kTokens, kHeads, k_dim);
        const ta_tensor v = ta_tensor_make(rows.data(), TA_DTYPE_F32, kTokens, kHeads, v_dim);
        const ta_tensor other = ta_tensor_make(rows.data(), TA_DTYPE_F32, kTokens, 1, 128);
        const int32_t n = kTokens, none = 0;
        ASSERT_EQ(ta_plan_begin(plan, 1, &seq, &n, &none, nullptr, nullptr), TA_OK);
        for (uint32_t layer = 0; layer < kLayers; ++layer) {
            const bool is_other = uneven && layer == 1;
            ASSERT_EQ(ta_append(plan, layer, is_other ? &other : &k, is_other ? &other : &v, nullptr), TA_OK);
        }
        ASSERT_EQ(ta_plan_end(plan, nullptr, nullptr), TA_OK);
        if (falls) {
            ta_ticket ticket = 0;
            ta_move_info info{};
            info.struct_size = sizeof info;
            ASSERT_EQ(ta_seq_move(pool, seq, 1, 2, TA_TIER_DISK, &ticket, nullptr), TA_OK);
            ASSERT_EQ(ta_move_wait(pool, ticket, -1, &info, nullptr), TA_OK);
            ASSERT_EQ(info.moved, 2u);
        }
        ASSERT_EQ(ta_seq_fork(pool, seq, &fork, nullptr), TA_OK);
        ASSERT_EQ(ta_seq_truncate(pool, fork, 128, nullptr), TA_OK);
        if (disk) {
            ta_namespace_options space_options{};
            space_options.struct_size = sizeof space_options;
            space_options.salt[0] = 1;
            ta_namespace space = 0;
            ASSERT_EQ(ta_namespace_create(pool, &space_options, &space, nullptr), TA_OK);
            std::vector<uint8_t> keys(3 * 32);
            for (size_t i = 0; i < keys.size(); ++i) keys[i] = uint8_t(i + 1);
            ASSERT_EQ(ta_seq_publish(pool, seq, space, keys.data(), 3, nullptr), TA_OK);
            ASSERT_EQ(ta_namespace_flush(pool, space, nullptr), TA_OK);
        } else {
            ASSERT_EQ(ta_seq_save(pool, seq, path("sequence").c_str(), nullptr, nullptr), TA_OK);
            ASSERT_EQ(ta_kv_pool_save(pool, path("pool").c_str(), 0, nullptr, nullptr), TA_OK);
        }
        ta_plan_destroy(plan);
        ta_kv_pool_destroy(pool);
        ta_context_destroy(context);
    }

    void flip(const std::string& name, int64_t offset) const {
        std::fstream f(path(name), std::ios::in | std::ios::out | std::ios::binary);
        f.seekg(offset);
        const char c = char(f.get() ^ 4);
        f.seekp(offset);
        f.put(c);
        ASSERT_TRUE(f.good());
    }
    json block(const std::string& name, size_t i) const { return ta("inspect --json " + path(name)).parsed()["block_list"][i]; }
    // The report of verify after bit 2 of this byte is flipped; flips it back.
    json damage_at(const std::string& name, int64_t offset) const {
        flip(name, offset);
        const Output r = ta("verify --json " + path(name));
        flip(name, offset);
        EXPECT_EQ(r.status, 1) << name << " at " << offset << ": " << r.out << r.err;
        return r.status == 1 ? r.parsed()[0]["damage"] : json();
    }

    fs::path folder_;
};

constexpr uint8_t kMixed[kLayers * kHeads] = {4, 2, 4, 4, 2, 2};
constexpr uint8_t kFour[kLayers * kHeads] = {4, 4, 4, 4, 4, 4};
constexpr uint8_t kEight[kLayers * kHeads] = {8, 8, 8, 8, 8, 8};

TEST_F(Ta, InspectSaysWhatThePoolWas) {
    for (const auto& [bits, settings] : {std::pair{kFour, "4 bits"}, {kEight, "8 bits"}, {kMixed, ""}}) {
        for (const ta_profile profile : {TA_PROFILE_ACCURATE, TA_PROFILE_PAPER}) {
            make_files(bits, profile);
            for (const char* name : {"sequence", "pool"}) {
                const json j = ta(std::string("inspect --json ") + path(name)).parsed();
                EXPECT_EQ(j["kind"], name);
                EXPECT_EQ(j["shape"], json({{"layers", kLayers}, {"kv_heads", kHeads}, {"head_dim", kDim}}));
                const std::string wanted =
                    *settings ? settings + std::string(", profile ") + (profile == TA_PROFILE_PAPER ? "paper" : "accurate")
                              : "";
                EXPECT_EQ(j.value("settings", ""), wanted);
                EXPECT_EQ(j["blocks"], 4);
                EXPECT_EQ(j["damage"], json::array());
                EXPECT_EQ(j["sequences"][0]["tokens"], kTokens);
                EXPECT_EQ(j["sequences"].size(), name == std::string("pool") ? 2u : 1u);
                EXPECT_EQ(j["block_list"][3]["tokens"], kTokens % 64);
                const Output verified = ta(std::string("verify --json ") + path(name));
                EXPECT_EQ(verified.status, 0) << verified.out;
                EXPECT_EQ(verified.parsed()[0]["pages"], 3 * kLayers);
                fs::remove(path(name));
            }
        }
    }
}

TEST_F(Ta, InspectTellsChannelsOfKFromThoseOfV) {
    for (const auto& [k_dim, v_dim] : {std::pair{64u, 32u}, {48u, 64u}, {48u, 40u}, {56u, 56u}, {96u, 64u}}) {
        make_files(kFour, TA_PROFILE_ACCURATE, false, false, false, k_dim, v_dim);
        for (const char* name : {"sequence", "pool"}) {
            const json j = ta(std::string("inspect --json ") + path(name)).parsed();
            json shape = {{"layers", kLayers}, {"kv_heads", kHeads}, {"head_dim", k_dim}};
            if (v_dim != k_dim) shape["v_head_dim"] = v_dim;
            EXPECT_EQ(j["shape"], shape);
            EXPECT_EQ(j.value("settings", ""), "4 bits, profile accurate");
        }
        const std::string text = ta("inspect " + path("sequence")).out;
        const std::string heads = "2 kv heads of " + std::to_string(k_dim);
        EXPECT_NE(text.find(heads + (v_dim == k_dim ? "\n" : ", V of " + std::to_string(v_dim) + "\n")), std::string::npos)
            << text;
        fs::remove(path("sequence"));
        fs::remove(path("pool"));
    }
    make_files(kMixed, TA_PROFILE_ACCURATE, false, false, false, 48, 40);
    const std::string text = ta("inspect " + path("sequence")).out;
    EXPECT_NE(text.find("2 kv heads in blocks of 64\n"), std::string::npos) << text;
}

TEST_F(Ta, VerifyNamesBlockAndLayer) {
    for (const auto* bits : {kMixed, kFour}) {
        make_files(bits);
        const json j = ta("inspect --json " + path("sequence")).parsed();
        for (const size_t b : {0, 1, 2}) {
            const bool token = j["block_list"][b]["kind"] == "token";
            EXPECT_EQ(token, b == 0);
            int64_t at = j["block_list"][b]["offset"];
            for (uint32_t layer = 0; layer < kLayers; ++layer) {
                const json damage = damage_at("sequence", at + 5);
                ASSERT_EQ(damage.size(), 1u) << damage;
                EXPECT_EQ(damage[0]["block"], b);
                EXPECT_EQ(damage[0]["layer"], layer);
                at += token ? int64_t(kHeads) * 8704 : j["channel_page_bytes"][layer].get<int64_t>();
            }
            // Behind the last page: the trailer, whose content id is at 24.
            EXPECT_EQ(damage_at("sequence", at + 24)[0]["what"], "the trailer names another block");
        }
        const json open = damage_at("sequence", j["block_list"][3]["offset"].get<int64_t>() + 5);
        ASSERT_EQ(open.size(), 1u);
        EXPECT_EQ(open[0]["block"], 3);
        fs::remove(path("sequence"));
        fs::remove(path("pool"));
    }
}

TEST_F(Ta, VerifyTakesAnyName) {
    make_files(kFour);
    fs::copy(path("sequence"), path("odd\xff"));
    const Output r = ta("verify --json " + path("odd\xff") + " " + path("sequence"));
    EXPECT_EQ(r.status, 0) << r.err;
    EXPECT_EQ(r.parsed().size(), 2u);
}

TEST_F(Ta, LayersOfSeveralShapes) {
    make_files(nullptr, TA_PROFILE_ACCURATE, false, false, true);
    const json j = ta("inspect --json " + path("sequence")).parsed();
    EXPECT_FALSE(j.contains("shape")) << j;
    EXPECT_EQ(j["damage"], json::array());
    EXPECT_EQ(ta("verify " + path("sequence") + " " + path("pool")).status, 0);
    const int64_t at = j["block_list"][1]["offset"].get<int64_t>() + j["channel_page_bytes"][0].get<int64_t>();
    const json damage = damage_at("sequence", at + 5);
    ASSERT_EQ(damage.size(), 1u) << damage;
    EXPECT_EQ(damage[0]["block"], 1);
    EXPECT_EQ(damage[0]["layer"], 1);
    // The only full token block: how long its pages are is not known then.
    EXPECT_EQ(damage_at("sequence", j["block_list"][0]["offset"].get<int64_t>() + 5)[0]["block"], 0);
}

TEST_F(Ta, BlocksThatLostBits) {
    for (const auto& [bits, settings] : {std::pair{kFour, "4 bits"}, {kEight, "8 bits"}}) {
        make_files(bits, TA_PROFILE_ACCURATE, false, true);
        const json j = ta("inspect --json " + path("sequence")).parsed();
        EXPECT_EQ(j["settings"], settings + std::string(", profile accurate, falling precision"));
        EXPECT_EQ(j["block_list"][1]["kind"], "low");
        EXPECT_EQ(ta("verify " + path("sequence") + " " + path("pool")).status, 0);
        // Low pieces of 64 channels: 2432 bytes.
        const json damage = damage_at("sequence", j["block_list"][2]["offset"].get<int64_t>() + kHeads * 2432 + 5);
        ASSERT_EQ(damage.size(), 1u) << damage;
        EXPECT_EQ(damage[0]["block"], 2);
        EXPECT_EQ(damage[0]["layer"], 1);
        fs::remove(path("sequence"));
        fs::remove(path("pool"));
    }
}

TEST_F(Ta, NoBitIsLeftOut) {
    make_files(kMixed);
    for (const char* name : {"sequence", "pool"}) {
        const int64_t bytes = int64_t(fs::file_size(path(name)));
        // Header, index, headers of blocks, pages, trailers, the last byte; the first 8 say what the file is.
        for (int64_t at : {int64_t{8}, int64_t{20}, int64_t{90}, int64_t{120}, int64_t{230}, bytes / 3, bytes / 2, bytes - 1}) {
            flip(name, at);
            const Output r = ta(std::string("verify ") + path(name));
            flip(name, at);
            EXPECT_TRUE(r.status == 1 || r.status == 2) << name << " at " << at << ": " << r.out;
        }
        EXPECT_EQ(ta(std::string("verify ") + path(name)).status, 0);
        fs::resize_file(path(name), uint64_t(bytes - 700));
        EXPECT_EQ(ta(std::string("verify ") + path(name)).status, 1);
        fs::resize_file(path(name), 30);
        const Output cut = ta(std::string("verify ") + path(name));
        EXPECT_EQ(cut.status, 2);
        EXPECT_NE(cut.err.find("cut off"), std::string::npos);
    }
}

TEST_F(Ta, DiskTierFiles) {
    make_files(kFour, TA_PROFILE_ACCURATE, true);
    const json j = ta("inspect --json " + path("disk")).parsed();
    EXPECT_EQ(j["kind"], "disk tier");
    EXPECT_EQ(j["settings"], "4 bits, profile accurate");
    EXPECT_EQ(j["blocks"], 3);
    EXPECT_EQ(j["published"], 3);
    EXPECT_EQ(j["state"], "closed");
    EXPECT_EQ(ta("verify " + path("disk")).status, 0);
    const json page = damage_at("disk", block("disk", 1)["offset"].get<int64_t>() + 5);
    ASSERT_EQ(page.size(), 1u) << page;
    EXPECT_EQ(page[0]["layer"], 0);
    EXPECT_EQ(damage_at("disk", block("disk", 1)["offset"].get<int64_t>() - 4096 + 60)[0]["what"],
              "a record's header does not match its hash");
    EXPECT_EQ(damage_at("disk", 40)[0]["what"], "a superblock does not match its hash");
}

TEST_F(Ta, WrongInputGetsOneLine) {
    std::ofstream(path("text")) << "no file of the library";
    std::ofstream(path("mla.json")) << R"({"num_hidden_layers": 2, "kv_lora_rank": 512})";
    std::ofstream(path("odd.json")) << R"({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 336})";
    std::ofstream(path("rows.json")) << R"({"rows": [1]})";
    std::ofstream(path("costs")) << R"({"head_dim": 64, "k": [[[0, 1, 2]]], "v": [[[0, 1, 2]]]})";
    const char* const heads[] = {R"("8")", "8.0", "[8, 8]", "-8", "1099511627776"};
    for (size_t i = 0; i < std::size(heads); ++i) {
        std::ofstream(path("heads" + std::to_string(i)))
            << R"({"num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096,
            "num_key_value_heads": )"
            << heads[i] << "}";
    }
    for (const std::string& arguments : {std::string(""),
                                         std::string("frobnicate"),
                                         std::string("inspect"),
                                         "inspect " + path("none"),
                                         "inspect " + path("text"),
                                         "inspect " + folder_.string(),
                                         "verify " + path("text"),
                                         std::string("map"),
                                         std::string("map nobody-knows-it"),
                                         "map " + folder_.string(),
                                         "map " + path("heads0"),
                                         "map " + path("heads1"),
                                         "map " + path("heads2"),
                                         "map " + path("heads3"),
                                         "map " + path("heads4"),
                                         "map " + path("text"),
                                         "map " + path("mla.json"),
                                         "map " + path("odd.json"),
                                         std::string("map llama-3-8b --bits 3"),
                                         std::string("map llama-3-8b --budget lots"),
                                         "calibrate " + folder_.string(),
                                         "plot " + folder_.string() + " -o x.svg",
                                         "plot " + path("rows.json") + " -o x.svg",
                                         "plot " + path("rows.json") + " -o x.pdf",
                                         "plot " + path("rows.json") + " -o ''",
                                         "plot " + path("rows.json") + " -o x.svg --python ''",
                                         std::string("calibrate '' -o x"),
                                         "calibrate " + path("costs") + " -o ''",
                                         std::string("inspect ''"),
                                         std::string("verify ''"),
                                         std::string("map ''"),
                                         std::string("map llama-3-8b --budget ''"),
                                         std::string("map llama-3-8b --budget 0x10GB"),
                                         std::string("map llama-3-8b --sequences 0b11"),
                                         std::string("bench tiers --device cpu --folder ''"),
                                         std::string("bench attend --device cpu --tokens 0x400"),
                                         std::string("completion tcsh"),
                                         std::string("bench tiers --repeats 1"),
                                         std::string("bench tiers --device cpu --memory -1"),
                                         std::string("bench attend --device cpu --parts decode,none"),
                                         std::string("bench attend --device cpu --q-heads 8 --kv-heads 3"),
                                         std::string("bench tiers --device cpu --memory 999KB"),
                                         std::string("bench share --devices cpu --parts transfers"),
                                         std::string("bench share --devices cpu,cpu --kind none"),
                                         std::string("bench attend --device cpux")}) {
        const Output r = ta(arguments);
        EXPECT_EQ(r.status, 2) << arguments;
        EXPECT_EQ(r.out, "") << arguments;
        EXPECT_EQ(std::count(r.err.begin(), r.err.end(), '\n'), 1) << arguments << ": " << r.err;
        EXPECT_EQ(r.err.rfind("ta: ", 0), 0u) << r.err;
    }
}

TEST_F(Ta, FailuresNameTheCommand) {
    EXPECT_NE(ta("bench tiers --repeats x").err.find("see ta bench tiers --help\n"), std::string::npos);
    const Output r = ta("bench tiers --device cpu --parts disk --memory 1MB --folder " + path("none"));
    EXPECT_EQ(r.status, 1);
    EXPECT_EQ(r.out, "");
    EXPECT_EQ(r.err.rfind("ta: ta_kv_pool_create: TA_E_IO: ", 0), 0u) << r.err;
}

TEST_F(Ta, MapIsWhatPoolsTake) {
    const json j = ta("map llama-3-8b --budget 1GB --json").parsed();
    // docs/FORMAT.md: pieces of 8832 bytes; 64 + 8 * 32 bytes of trailer, up to a multiple of 128.
    const json& four = j["rows"][2];
    EXPECT_EQ(four["bits"], "4");
    EXPECT_EQ(four["block_bytes"], 32 * 8 * 8832 + 384);
    const uint64_t token = 32 * 8 * 16896 + 384, full = four["block_bytes"];
    EXPECT_EQ(four["tokens_in_budget"], 64 * (2 + (1'000'000'000 - 2 * token) / full));
    std::ofstream(path("config.json")) << R"({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
                                             "hidden_size": 4096})";
    EXPECT_EQ(ta("map --budget 1GB --json " + path("config.json")).parsed()["rows"], j["rows"]);
    // A list takes one word, so that the model may stand behind it.
    EXPECT_EQ(ta("map --json --bits 4,2 --bits 8 llama-3-8b").parsed()["rows"].size(), 4u);
}

TEST_F(Ta, UnitsAreThoseThatTablesPrint) {
    const std::pair<const char*, int> units[] = {{"1MB", 1'000'000}, {"1mb", 1'000'000}, {"1M", 1'000'000}, {"1MiB", 1 << 20}};
    for (const auto& [text, bytes] : units)
        EXPECT_EQ(ta(std::string("map llama-3-8b --json --budget ") + text).parsed()["budget_bytes"], bytes) << text;
    EXPECT_NE(ta("--man").out.find("1MB is 1000000 bytes, 1MiB is 1048576"), std::string::npos);
    // The last case is the largest one.
    const auto most_blocks = [&](const std::string& command, const char* what) {
        const json rows = ta("bench " + command + " --repeats 3 --json").parsed()["rows"];
        uint64_t most = 0;
        for (const json& row : rows) {
            if (row["what"] == what && row["block_bytes"] == rows[0]["block_bytes"])
                most = std::max(most, row["blocks"].get<uint64_t>());
        }
        return std::pair(most, rows[0]["block_bytes"].get<uint64_t>());
    };
    const auto [shared, of] = most_blocks("share --devices cpu,cpu --parts transfers --memory 8MB", "one way");
    EXPECT_EQ(shared, 8'000'000 / 4 / of);
    for (const auto& [text, bytes] : {std::pair{"2MB", 2'000'000}, {"2MiB", 2 << 20}}) {
        const auto [moved, size] = most_blocks(std::string("tiers --device cpu --parts moves --memory ") + text, "demote");
        EXPECT_EQ(moved, uint64_t(bytes) / size) << text;
    }
}

// Of a pipe, 100 columns. Every table, with sizes so small that it is made quickly.
TEST_F(Ta, NoLineIsLongerThanATerminal) {
    make_files(kFour);
    const json heads = std::vector<json>(64, {0, 1, 2}), blocks = std::vector<json>(64, {{0, 0}, {1, 1}, {2, 2}});
    std::ofstream(path("costs")) << json{
        {"head_dim", 64},         {"k", {heads, heads}},          {"v", {heads, heads}},
        {"block_tokens", {9, 9}}, {"k_blocks", {blocks, blocks}}, {"v_blocks", {blocks, blocks}}};
    std::ofstream(path("config.json")) << R"({"model_type": "gemma3", "text_config": {"num_hidden_layers": 34}})";
    const std::string attend = "bench attend --device cpu --tokens 100 --repeats 3 --batch-invariant --chunk 9";
    for (const std::string& arguments :
         {std::string("info"), std::string("map --list"), "map " + path("config.json"), "inspect " + path("sequence"),
          "inspect " + path("pool"), "verify " + path("pool"), "calibrate --all --bits 3 " + path("costs"), attend,
          attend + " --bits 4", std::string("bench tiers --device cpu --memory 4MB --disk 16MB --repeats 3"),
          std::string("bench share --devices cpu,cpu --memory 4MB --repeats 3")}) {
        const Output r = ta(arguments);
        EXPECT_EQ(r.status, 0) << arguments << ": " << r.err;
        EXPECT_TRUE(arguments.starts_with("bench") || json::accept(ta(arguments + " --json").out)) << arguments;
        std::istringstream lines(r.out);
        for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << arguments << ":\n" << line;
    }
    for (const char* command : {"", "info ", "inspect ", "verify ", "map ", "calibrate ", "plot ", "bench ", "bench attend ",
                                "bench tiers ", "bench share ", "completion "}) {
        std::istringstream lines(ta(std::string(command) + "--help").out);
        for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << command << ":\n" << line;
    }
}

TEST_F(Ta, NumbersAreDecimal) {
    const json ten = ta("map llama-3-8b --budget 10GB --json").parsed();
    for (const char* budget : {"010GB", "0010GB", "010000000000", "10000MB"})
        EXPECT_EQ(ta(std::string("map llama-3-8b --json --budget ") + budget).parsed(), ten) << budget;
    const json sequences = ta("map llama-3-8b --budget 10GB --sequences 8 --json").parsed();
    EXPECT_EQ(ta("map llama-3-8b --budget 10GB --sequences 08 --json").parsed(), sequences);
    EXPECT_EQ(ta("map llama-3-8b --budget 0b --json").status, ta("map llama-3-8b --budget 0 --json").status);
    std::ofstream(path("costs")) << R"({"head_dim": 64, "k": [[[0, 1, 2]]], "v": [[[0, 1, 2]]]})";
    EXPECT_EQ(ta("calibrate " + path("costs") + " --bits 08.0 --json").parsed()["bits"], 8);
}

// Falcon's ways to say it.
TEST_F(Ta, MapKnowsModelsOfOneKvHead) {
    const auto kv_heads = [&](const char* more) {
        std::ofstream(path("config.json")) << R"({"num_hidden_layers": 2, "num_attention_heads": 64, "hidden_size": 4096)"
                                           << more << "}";
        return ta("map --json " + path("config.json")).parsed()["kv_heads"];
    };
    EXPECT_EQ(kv_heads(R"(, "multi_query": true, "num_kv_heads": 64)"), 1);
    EXPECT_EQ(kv_heads(R"(, "multi_query": true, "new_decoder_architecture": true, "num_kv_heads": 8)"), 8);
    EXPECT_EQ(kv_heads(R"(, "multi_query": false, "num_key_value_heads": null)"), 64);
}

TEST_F(Ta, OutputThatCannotBeWrittenIsAFailure) {
    for (const char* arguments :
         {"map llama-3-8b", "map llama-3-8b --json", "--version", "--help", "--man", "completion bash"}) {
        for (const char* full : {" >/dev/full", " >&-"}) {
            const std::string command = std::string(TA_PROGRAM " ") + arguments + full + " 2>" + path("err");
            const int status = std::system(command.c_str());
            EXPECT_EQ(WEXITSTATUS(status), 1) << command;
            EXPECT_EQ(slurp(path("err")), "ta: standard output cannot be written\n") << command;
        }
    }
}

TEST_F(Ta, TablesForPeople) {
    // Units in the head, numbers to the right: all lines of the table end in the same column.
    std::istringstream table(ta("map llama-3-8b --bits 8,4").out);
    std::string title, head, row;
    std::getline(table, title);
    std::getline(table, head);
    EXPECT_NE(head.find("64 tokens (MB)"), std::string::npos) << head;
    int rows = 0;
    for (; std::getline(table, row); ++rows) EXPECT_EQ(row.size(), head.size()) << row;
    EXPECT_EQ(rows, 3);
    make_files(kFour);
    const std::string text = ta("inspect " + path("sequence")).out;
    EXPECT_NE(text.find("3 layers, 2 kv heads of 64\n"), std::string::npos) << text;
    const std::string bench = ta("bench share --devices cpu,cpu --memory 8MB --repeats 3 --parts transfers").out;
    EXPECT_NE(bench.find("\ntransfers\nwhat "), std::string::npos) << bench;
    EXPECT_NE(bench.find("rate (GB/s)"), std::string::npos) << bench;
    EXPECT_EQ(bench.find("gb_s"), std::string::npos) << bench;
}

TEST_F(Ta, InfoSaysWhatIsHere) {
    const json j = ta("info --json").parsed();
    EXPECT_EQ(j["build"], ta_build_info());
    EXPECT_EQ(j["abi"], TA_ABI_VERSION);
    EXPECT_EQ(j["devices"][0]["kind"], "cpu");
    EXPECT_EQ(j["tiers"].size(), 2u);
    EXPECT_EQ(ta("info").status, 0);
}

TEST_F(Ta, PlotDrawsOrSaysWhatIsMissing) {
    std::ofstream(path("bench.json")) << R"({"device": "d", "library": "l", "rows": [
        {"part": "moves", "what": "up", "bytes": 1000, "gb_s": 1.5}, {"part": "moves", "what": "up", "bytes": 2000, "gb_s": 2},
        {"part": "moves", "what": "up", "bytes": 4000, "gb_s": 2.5}, {"part": "disk", "what": "read", "p50_us": 7}]})";
    const Output r = ta("plot " + path("bench.json") + " -o " + path("bench.svg"));
    if (r.status == 0) {
        EXPECT_NE(slurp(path("bench.svg")).find("<svg"), std::string::npos);
    } else {
        EXPECT_EQ(r.status, 1);
        EXPECT_NE(r.err.find("plot needs"), std::string::npos) << r.err;
    }
    const Output none = ta("plot " + path("bench.json") + " -o " + path("x.svg") + " --python " + path("no-python"));
    EXPECT_EQ(none.status, 1);
    EXPECT_NE(none.err.find("plot needs"), std::string::npos) << none.err;
}

TEST_F(Ta, FilesMayBePipes) {
    const auto through_pipe = [&](const std::string& name, const std::string& arguments) {
        return "cat " + path(name) + " | " TA_PROGRAM " " + arguments + " >" + path("out") + " 2>" + path("err");
    };
    std::ofstream(path("bench.json")) << R"({"rows": [{"part": "moves", "what": "up", "gb_s": 1.5}]})";
    const Output direct = ta("plot " + path("bench.json") + " -o " + path("direct.svg"));
    const int status = std::system(through_pipe("bench.json", "plot /dev/stdin -o " + path("piped.svg")).c_str());
    EXPECT_EQ(WEXITSTATUS(status), direct.status) << slurp(path("err"));
    EXPECT_EQ(fs::exists(path("piped.svg")), direct.status == 0);
    std::ofstream(path("costs")) << R"({"head_dim": 64, "k": [[[0, 1, 2]]], "v": [[[0, 1, 2]]]})";
    ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
    const std::string reader = "timeout 20 cat " + path("pipe") + " >" + path("maps") + " & ";
    EXPECT_EQ(std::system((reader + through_pipe("costs", "calibrate /dev/stdin -o " + path("pipe")) + " && wait").c_str()), 0)
        << slurp(path("err"));
    EXPECT_EQ(json::parse(slurp(path("maps")))["k_bits"], json({{4}}));
    EXPECT_TRUE(fs::is_fifo(path("pipe")));
    make_files(kFour);
    for (const char* command : {"inspect", "verify"}) {  // they go back and forth in a file
        const int refused = std::system(through_pipe("sequence", std::string(command) + " /dev/stdin").c_str());
        EXPECT_EQ(WEXITSTATUS(refused), 2) << command;
        EXPECT_NE(slurp(path("err")).find("no regular file"), std::string::npos) << slurp(path("err"));
    }
}

// Whatever is the first to lack memory.
TEST_F(Ta, LittleMemoryIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    GTEST_SKIP() << "the sanitizer takes more";
#endif
    const json heads = std::vector<json>(64, {0, 1, 2}), layers = std::vector<json>(200, heads);
    std::ofstream(path("costs")) << json{{"head_dim", 64}, {"k", layers}, {"v", layers}};
    make_files(kFour);
    json rows = json::array();
    for (int i = 0; i < 20000; ++i) rows.push_back({{"part", 5}});
    std::ofstream(path("bench.json")) << json{{"rows", rows}};
    for (const std::string& arguments :
         {"calibrate " + path("costs"), "plot " + path("bench.json") + " -o x.svg", "map " + path("bench.json"),
          "inspect " + path("sequence"), "verify " + path("pool"), std::string("info"), std::string("--man"),
          std::string("bench attend --device cpu --parts decode --tokens 64 --batch 1 --repeats 3")}) {
        int lacking = 0;
        for (int kib = 8000; kib < 32000; kib += 1000) {
            const std::string command = "ulimit -c 0; ulimit -v " + std::to_string(kib) + "; exec " TA_PROGRAM " " + arguments +
                                        " >" + path("out") + " 2>" + path("err");
            const int status = std::system(command.c_str());
            ASSERT_TRUE(WIFEXITED(status)) << kib << ": " << arguments;
            const int code = WEXITSTATUS(status);
            if (code == 127) continue;  // the loader's: the program did not begin
            EXPECT_TRUE(code >= 0 && code <= 2) << kib << ": " << arguments << ": " << code;
            if (code != 1) continue;
            ++lacking;
            const std::string err = slurp(path("err"));
            EXPECT_EQ(err.rfind("ta: ", 0), 0u) << err;
            EXPECT_EQ(err.find("bad_alloc"), std::string::npos) << err;
        }
        EXPECT_TRUE(lacking > 0 || !arguments.starts_with("calibrate"));
    }
}

TEST_F(Ta, ManualAndCompletionsKnowEveryCommand) {
    std::vector<std::string> pages = {ta("--man").out};
    for (const char* shell : {"bash", "zsh", "fish"}) pages.push_back(ta(std::string("completion ") + shell).out);
    for (const std::string& page : pages) {
        for (const char* word :
             {"info", "inspect", "verify", "map", "plot", "bench", "completion", "budget", "json", "repeats"})
            EXPECT_NE(page.find(word), std::string::npos) << word << " in\n" << page.substr(0, 200);
    }
    std::ofstream(path("completion")) << pages[1];
    const std::string asked = "bash -c '. " + path("completion") +
                              "; COMP_WORDS=(ta bench tiers --me); COMP_CWORD=3; _ta; echo \"${COMPREPLY[@]}\"' >" +
                              path("reply");
    ASSERT_EQ(std::system(asked.c_str()), 0);
    EXPECT_EQ(slurp(path("reply")), "--memory\n");
}

// K of head 0 is cheap in every block and K of head 1 dear. V of head 0 is cheaper than that of head 1, but not in all blocks. Of four
// blocks errors and draws take two neighbours together.
TEST_F(Ta, CalibrateSaysHowSureItIs) {
    const json blocks[] = {{1, 1, 1, 1}, {90, 90, 90, 90}, {2, 2, 6, 6}, {6, 6, 3, 2}};
    const auto of_2 = [](const json& first, const json& second, const json& other) {
        return json::array({json::array({{other, other, first}, {other, other, second}})});
    };
    std::ofstream(path("costs")) << json{{"head_dim", 64},
                                         {"k", of_2(1, 90, 0)},
                                         {"v", of_2(4, 4.25, 0)},
                                         {"block_tokens", {256, 256, 256, 256}},
                                         {"k_blocks", of_2(blocks[0], blocks[1], nullptr)},
                                         {"v_blocks", of_2(blocks[2], blocks[3], nullptr)}};
    Output o = ta("calibrate " + path("costs") + " --bits 3 --json");
    ASSERT_EQ(o.status, 0) << o.err;
    const json chosen = o.parsed();
    EXPECT_EQ(chosen["k_bits"], json({{2, 4}}));
    EXPECT_EQ(chosen["v_bits"], json({{2, 4}}));
    EXPECT_EQ(chosen["cost"], 5);
    EXPECT_NEAR(chosen["cost_error"], std::sqrt(2), 1e-12);        // of 3, 3, 7, 7: neighbours are off by -4, 0, 4, 0
    EXPECT_NEAR(chosen["uniform"][2]["cost_error"], 0.25, 1e-12);  // of 99, 99, 100, 99: V's errors cancel
    EXPECT_NEAR(chosen["units"][1]["costs"][2]["cost_error"], std::sqrt(2), 1e-12);
    EXPECT_EQ(chosen["units"][0]["kept"], 1);
    const double kept = chosen["units"][1]["kept"];
    EXPECT_TRUE(kept > 0.4 && kept < 0.8) << kept;
    EXPECT_NEAR(chosen["regret"], (1 - kept) * 0.25, 1e-6);
    EXPECT_EQ(chosen["certain"], 2);
    o = ta("calibrate " + path("costs") + " --bits 3");
    EXPECT_NE(o.out.find("at a cost of 5 +- 1.4"), std::string::npos) << o.out;
    EXPECT_NE(o.out.find("2 of 4 K and V keep their"), std::string::npos) << o.out;
    EXPECT_EQ(o.out.find("90 +- 0"), std::string::npos) << "not in doubt";
    EXPECT_NE(ta("calibrate " + path("costs") + " --bits 3 --all").out.find("90 +- 0"), std::string::npos);
}

// V of head 0 costs more than V of head 1 in every second block, and less in every two neighbours together. Draws of neighbours have four
// of 18 blocks at a time and two at the end, so all of them say so. Draws of single blocks would not.
TEST_F(Ta, CalibrateDrawsNeighboursTogether) {
    json first = json::array(), second = json::array();
    for (int i = 0; i < 9; ++i) {
        for (const int cost : {2, 12}) first.push_back(cost);
        for (const int cost : {12, 4}) second.push_back(cost);
    }
    const auto v = [](const json& of_first, const json& of_second, const json& other) {
        return json::array({json::array({{other, other, of_first}, {other, other, of_second}})});
    };
    std::ofstream(path("costs")) << json{{"head_dim", 64},
                                         {"k", v(1, 90, 0)},
                                         {"v", v(7, 8, 0)},
                                         {"block_tokens", std::vector<int>(18, 256)},
                                         {"k_blocks", v(nullptr, nullptr, nullptr)},
                                         {"v_blocks", v(first, second, nullptr)}};
    const Output o = ta("calibrate " + path("costs") + " --bits 3 --json");
    ASSERT_EQ(o.status, 0) << o.err;
    const json chosen = o.parsed();
    EXPECT_EQ(chosen["v_bits"], json({{2, 4}}));
    EXPECT_EQ(chosen["certain"], 4);
    EXPECT_EQ(chosen["regret"], 0);
    EXPECT_NEAR(chosen["units"][1]["costs"][2]["cost_error"], 0, 1e-12);  // each four neighbours cost 28
    std::string text = ta("calibrate " + path("costs") + " --bits 3").out;
    std::ranges::replace(text, '\n', ' ');
    EXPECT_NE(text.find("take 4 neighbouring blocks at a time."), std::string::npos) << text;
}

TEST_F(Ta, CalibrateChoosesByCosts) {
    // K of head 1 in layer 0 and V of head 0 in layer 1 are dear at 2 bits; V of head 1 in layer 1 must have 8.
    json k = {{{0, 1, 2}, {0, 1, 90}}, {{0, 1, 2}, {0, 1, 3}}},
         v = {{{0, 1, 2}, {0, 1, 2}}, {{0, 1, 80}, {0, nullptr, nullptr}}};
    const auto write = [&](const json& file) { std::ofstream(path("costs")) << file.dump(); };
    write({{"head_dim", 64}, {"k", k}, {"v", v}, {"tokens", 5}});
    Output o = ta("calibrate " + path("costs") + " --bits 3.3 --json -o " + path("map"));
    ASSERT_EQ(o.status, 0) << o.err;
    const json chosen = o.parsed();
    EXPECT_EQ(chosen["k_bits"], json({{2, 4}, {2, 2}}));
    EXPECT_EQ(chosen["v_bits"], json({{2, 2}, {4, 8}}));
    EXPECT_EQ(chosen["bits"], 26 / 8.0);
    EXPECT_EQ(chosen["cost"], 2 + 1 + 2 + 3 + 2 + 2 + 1 + 0);
    EXPECT_EQ(chosen["uniform"][0], json({{"bits", 8}, {"cost", 0}}));
    EXPECT_TRUE(chosen["uniform"][1]["cost"].is_null());
    EXPECT_EQ(json::parse(slurp(path("map"))), json({{"k_bits", chosen["k_bits"]}, {"v_bits", chosen["v_bits"]}}));
    o = ta("calibrate " + path("costs") + " --bits 3.3");
    EXPECT_NE(o.out.find("3.25 bits on average, at a cost of 13"), std::string::npos) << o.out;
    EXPECT_EQ(ta("calibrate " + path("costs") + " --bits 8 --json").parsed()["cost"], 0);
    o = ta("calibrate " + path("costs") + " --bits 2");
    EXPECT_EQ(o.status, 2) << "8 bits do not fit";
    EXPECT_NE(o.err.find("block_bytes"), std::string::npos) << o.err;

    json fewer = v, longer = k;
    const json two = {10, 10}, of_one = {{{nullptr, {1, 1}, {2, 2}}}};
    const auto with_blocks = [&](const json& tokens, const json& of_k) {
        const json costs = {{{0, 1, 2}}};
        return json{{"head_dim", 64},         {"k", costs},       {"v", costs},
                    {"block_tokens", tokens}, {"k_blocks", of_k}, {"v_blocks", of_one}}
            .dump();
    };
    fewer[1].erase(1);
    longer[0][0].push_back(1);
    const auto file = [](json head_dim, json of_k, json of_v) {
        return json{{"head_dim", head_dim}, {"k", of_k}, {"v", of_v}}.dump();
    };
    const json one = {{{0, 1, 2}}};
    const std::pair<std::string, const char*> bad[] = {
        {"5", "is no JSON object"},
        {"", "is no JSON object"},
        {file(64, k, v).substr(0, 90), "is no JSON object"},
        {json{{"k", k}, {"v", v}}.dump(), "with head_dim, k and v"},
        {file(-64, k, v), "with head_dim, k and v"},
        {file(63, k, v), "head_dim"},
        {file(uint64_t{1} << 40, k, v), "head_dim is above 256"},
        {file((uint64_t{1} << 32) + 64, k, v), "head_dim is above 256"},
        {file(64, k, fewer), "different numbers of heads"},
        {file(64, longer, v), "costs of 8, 4 and 2 bits"},
        {file(64, json::array(), v), "is not a list of layers"},
        {file(64, "4", v), "is not a list of layers"},
        {file(64, {{{0, "1", 2}}}, one), "k[0][0] is no number"},
        {file(64, {{{0, 1e39, 2}}}, one), "k[0][0] is too large"},
        {file(64, {{{nullptr, nullptr, nullptr}}}, one), "k_cost"},
        {with_blocks({10}, of_one), "block_tokens is no list"},
        {with_blocks({10, 0}, of_one), "block_tokens is no list"},
        {with_blocks(two, {of_one, of_one}), "k_blocks has not the shape"},
        {with_blocks({10, 10, 10}, of_one), "k_blocks, list 1 has not a cost for each block"},
        {with_blocks(two, {{{nullptr, {1, 1}, {2, 3}}}}), "k_blocks, list 2 has another mean"},
        {with_blocks(two, {{{nullptr, {1, 1}, {2, nullptr}}}}), "k_blocks, list 2 has another mean"},
    };
    for (const auto& [text, why] : bad) {
        std::ofstream(path("costs")) << text;
        o = ta("calibrate " + path("costs"));
        EXPECT_EQ(o.status, 2) << text;
        EXPECT_NE(o.err.find(why), std::string::npos) << o.err;
    }
    write({{"head_dim", 64}, {"k", k}, {"v", v}});
    EXPECT_EQ(ta("calibrate " + path("costs") + " -o /no/such/folder").status, 2);
    EXPECT_EQ(ta("calibrate " + path("costs") + " --bits nan").status, 2);
    EXPECT_EQ(ta("calibrate " + path("none")).status, 2);
    EXPECT_EQ(ta("calibrate " + path("costs") + " --bits 9").status, 2);
}

}  // namespace
