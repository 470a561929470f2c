// What `ta map` reads from the config.json of real models, shortened to the fields that count.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace {

using nlohmann::json;

class Config : public testing::Test {
  protected:
    Config() { EXPECT_NE(mkdtemp(folder_.data()), nullptr); }
    ~Config() override { std::filesystem::remove_all(folder_); }

    // The map's JSON, or the message of a refusal.
    json map(const std::string& config) const {
        const std::string& folder = folder_;
        std::ofstream(folder + "/config.json") << config;
        const std::string command =
            TA_PROGRAM " map " + folder + "/config.json --json --bits 4 >" + folder + "/out 2>" + folder + "/err";
        const int status = WEXITSTATUS(std::system(command.c_str()));
        EXPECT_TRUE(status == 0 || status == 2) << status;
        std::ifstream in(folder + (status == 0 ? "/out" : "/err"));
        return status == 0 ? json::parse(in) : json(std::string(std::istreambuf_iterator<char>(in), {}));
    }

  private:
    std::string folder_ = testing::TempDir() + "ta_config.XXXXXX";
};

// Each `period`th layer sees all tokens.
std::string layer_types(int layers, int period) {
    json types = json::array();
    for (int i = 1; i <= layers; ++i) types.push_back(i % period == 0 ? "full_attention" : "sliding_attention");
    return types.dump();
}

struct Model {
    const char* name;
    std::string config;
    int layers, kv_heads, head_dim, window_layers, window;  // layers: with K and V of their own
    const char* note;                                       // a part of it, "" if there is none
};

TEST_F(Config, RealModels) {
    const Model models[] = {
        {"Llama 3.1 8B", R"({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8})",
         32, 8, 128, 0, 0, ""},
        {"Llama 4 Scout", R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192,
            "head_dim": 128, "hidden_size": 5120, "no_rope_layers": [], "num_attention_heads": 40, "num_hidden_layers": 48,
            "num_key_value_heads": 8}})",
         48, 8, 128, 36, 8192, "36 layers attend in chunks of 8192 tokens"},
        {"Mistral 7B v0.1", R"({"model_type": "mistral", "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096})",
         32, 8, 128, 32, 4096, ""},
        {"Mixtral 8x7B", R"({"model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": null})",
         32, 8, 128, 0, 0, ""},
        {"Qwen2.5 7B", R"({"model_type": "qwen2", "hidden_size": 3584, "max_window_layers": 28, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": false})",
         28, 4, 128, 0, 0, ""},
        {"Qwen2 with windows from layer 21 on", R"({"model_type": "qwen2", "hidden_size": 3584, "max_window_layers": 21,
            "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 4096,
            "use_sliding_window": true})",
         28, 4, 128, 7, 4096, ""},
        {"Qwen2, use_sliding_window alone", R"({"model_type": "qwen2", "hidden_size": 3584, "num_attention_heads": 28,
            "num_hidden_layers": 32, "num_key_value_heads": 4, "use_sliding_window": true})",
         32, 4, 128, 4, 4096, "usual for qwen2: sliding_window 4096, max_window_layers 28"},
        {"Qwen3 with max_window_layers", R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
            "max_window_layers": 30, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "use_sliding_window": true})",
         36, 8, 128, 6, 4096, "usual for qwen3: sliding_window 4096"},
        {"Qwen3 with no layer behind max_window_layers", R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
            "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "use_sliding_window": true})",
         36, 8, 128, 0, 0, "usual for qwen3: sliding_window 4096"},
        {"Qwen3 with a window of null", R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
            "max_window_layers": 30, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "sliding_window": null, "use_sliding_window": true})",
         36, 8, 128, 0, 0, ""},
        {"Qwen3 without use_sliding_window", R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
            "max_window_layers": 0, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
            "sliding_window": 4096})",
         36, 8, 128, 0, 0, ""},
        {"Qwen3 with its layers listed",
         R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "max_window_layers": 30,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "use_sliding_window": true,
            "layer_types": )" +
             layer_types(36, 4) + "}",
         36, 8, 128, 27, 4096, "usual for qwen3: sliding_window 4096"},
        {"Qwen3 with its layers listed, and no windows used",
         R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "use_sliding_window": false,
            "layer_types": )" +
             layer_types(36, 4) + "}",
         36, 8, 128, 0, 0, ""},
        {"Qwen2-VL", R"({"model_type": "qwen2_vl", "hidden_size": 3584, "max_window_layers": 20, "num_attention_heads": 28,
            "num_hidden_layers": 28, "num_key_value_heads": 4, "use_sliding_window": true})",
         28, 4, 128, 8, 4096, "usual for qwen2_vl: sliding_window 4096"},
        {"Qwen2.5-Omni", R"({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {
            "model_type": "qwen2_5_omni_text", "max_window_layers": 20, "use_sliding_window": true}}})",
         28, 4, 128, 8, 32768, "sliding_window 32768"},
        {"Qwen2 MoE, whose windows alternate before max_window_layers", R"({"model_type": "qwen2_moe", "hidden_size": 2048,
            "max_window_layers": 21, "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "use_sliding_window": true})",
         24, 16, 128, 11, 4096, "usual for qwen2_moe: sliding_window 4096"},
        {"Qwen3 MoE, all of whose layers have the window", R"({"model_type": "qwen3_moe", "head_dim": 128,
            "hidden_size": 2048, "max_window_layers": 48, "num_attention_heads": 32, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "use_sliding_window": true})",
         48, 4, 128, 48, 4096, "usual for qwen3_moe: sliding_window 4096"},
        {"Qwen3 30B", R"({"model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048, "max_window_layers": 48,
            "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "sliding_window": null,
            "use_sliding_window": false})",
         48, 4, 128, 0, 0, ""},
        {"Qwen3 8B", R"({"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "max_window_layers": 36,
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "sliding_window": null,
            "use_sliding_window": false})",
         36, 8, 128, 0, 0, ""},
        {"Qwen3-Next 80B", R"({"model_type": "qwen3_next", "full_attention_interval": 4, "head_dim": 256,
            "hidden_size": 2048, "linear_key_head_dim": 128, "num_attention_heads": 16, "num_hidden_layers": 48,
            "num_key_value_heads": 2})",
         12, 2, 256, 0, 0, "36 layers keep a state of fixed size"},
        {"Gemma 2 9B", R"({"model_type": "gemma2", "head_dim": 256, "hidden_size": 3584, "num_attention_heads": 16,
            "num_hidden_layers": 42, "num_key_value_heads": 8, "sliding_window": 4096})",
         42, 8, 256, 21, 4096, "usual for gemma2: sliding_window_pattern 2"},
        {"Gemma 3 4B", R"({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024}})",
         34, 4, 256, 29, 1024, "usual for gemma3_text: num_attention_heads 8, num_key_value_heads 4, head_dim 256"},
        {"Gemma 3 12B", R"({"model_type": "gemma3", "text_config": {"hidden_size": 3840, "model_type": "gemma3_text",
            "num_attention_heads": 16, "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 1024}})",
         48, 8, 256, 40, 1024, "head_dim 256, sliding_window_pattern 6"},
        {"Gemma 3n E4B",
         R"({"model_type": "gemma3n", "text_config": {"head_dim": 256, "hidden_size": 2048,
            "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 2,
            "num_kv_shared_layers": 15, "sliding_window": 512, "layer_types": )" +
             layer_types(35, 5) + "}}",
         20, 2, 256, 16, 512, "the last 15 layers use K and V of earlier ones"},
        {"gpt-oss 20b",
         R"({"model_type": "gpt_oss", "head_dim": 64, "hidden_size": 2880, "num_attention_heads": 64,
            "num_hidden_layers": 24, "num_key_value_heads": 8, "sliding_window": 128, "layer_types": )" +
             layer_types(24, 2) + "}",
         24, 8, 64, 12, 128, ""},
        {"Phi-3 mini 4k", R"({"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "sliding_window": 2047})",
         32, 32, 96, 32, 2047, ""},
        {"Falcon 7B", R"({"model_type": "falcon", "hidden_size": 4544, "multi_query": true,
            "new_decoder_architecture": false, "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71})",
         32, 1, 64, 0, 0, ""},
        {"LLaVA 1.5 7B", R"({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}})", 32, 32, 128,
         0, 0, "usual for llama: num_hidden_layers 32, num_attention_heads 32, hidden_size 4096"},
        {"Jamba", R"({"model_type": "jamba", "attn_layer_offset": 4, "attn_layer_period": 8, "hidden_size": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": null})",
         4, 8, 128, 0, 0, "28 layers keep a state"},
        {"Granite 4 as listed", R"({"model_type": "granitemoehybrid", "hidden_size": 1536, "num_attention_heads": 12,
            "num_hidden_layers": 4, "num_key_value_heads": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"]})",
         1, 4, 128, 0, 0, "3 layers keep a state"},
        {"EXAONE 4 by letters", R"({"model_type": "exaone4", "hidden_size": 5120, "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": "LLLG"})",
         64, 8, 128, 48, 4096, ""},
    };
    for (const Model& m : models) {
        const json j = map(m.config);
        ASSERT_TRUE(j.is_object()) << m.name << ": " << j;
        EXPECT_EQ(j["layers"], m.layers) << m.name;
        EXPECT_EQ(j["kv_heads"], m.kv_heads) << m.name;
        EXPECT_EQ(j["head_dim"], m.head_dim) << m.name;
        EXPECT_EQ(j["window_layers"], m.window_layers) << m.name;
        EXPECT_EQ(j["window"], m.window) << m.name;
        const std::string note = j["note"];
        EXPECT_TRUE(*m.note ? note.find(m.note) != std::string::npos : note.empty()) << m.name << ": " << note;
        // K and V in F16, of a token and of those of 64 tokens that the windows have passed.
        const int of_layer = 2 * m.kv_heads * m.head_dim * 2;
        EXPECT_EQ(j["rows"][0]["bytes_per_token"], m.layers * of_layer) << m.name;
        if (m.window == 0) continue;
        EXPECT_EQ(j["rows"][0]["passed_block_bytes"], std::max(128, (m.layers - m.window_layers) * of_layer * 64)) << m.name;
    }
}

// What cannot be counted is refused or said, never left out in silence.
TEST_F(Config, WhatIsNotKnownIsSaid) {
    const std::string shape =
        R"("hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2)";
    const std::pair<std::string, const char*> refused[] = {
        {R"({"model_type": "deepseek_v3", "kv_lora_rank": 512, "num_key_value_heads": 128})",
         "deepseek_v3, whose cache has no K and V heads"},
        {R"({"model_type": "kimi_vl", "text_config": {"model_type": "deepseek_v3"}})",
         "deepseek_v3, whose cache has no K and V heads"},
        {R"({"model_type": "gemma4", "text_config": {"num_hidden_layers": 42}})",
         "gemma4, some of whose layers have heads of more than 256"},
        {"{" + shape + R"(, "swa_num_key_value_heads": 8})", "(swa_num_key_value_heads 8)"},
        {"{" + shape + R"(, "v_head_dim": 32})", "(v_head_dim 32)"},
        {"{" + shape + R"(, "layer_types": ["full_attention"]})", "layer_types names 1 layers of 4"},
        {"{" + shape + R"(, "layer_types": "all"})", "it takes a list"},
        {"{" + shape + R"(, "layer_types": ["conv", "conv", "conv", "conv"]})", "none of its 4 layers keeps K and V"},
        {R"({"num_hidden_layers": 4, "num_attention_heads": 3, "hidden_size": 256})", "hidden_size 256 is no multiple of 3"},
    };
    for (const auto& [config, why] : refused) {
        const json said = map(config);
        ASSERT_TRUE(said.is_string()) << config << ": " << said;
        EXPECT_NE(said.get<std::string>().find(why), std::string::npos) << said;
    }
    const std::pair<std::string, const char*> noted[] = {
        {"{" + shape + R"(, "sliding_window": 64})", "does not say which layers"},
        {"{" + shape + R"(, "sliding_window": 64, "full_attention_interval": 2})", "does not say which layers"},
        {"{" + shape + R"(, "attention_chunk_size": 64})", "does not say which layers"},
        {"{" + shape + R"(, "layer_types": ["full_attention", "sliding_attention", "conv", "conv"]})",
         "window of unknown length"},
        {"{" + shape + R"(, "layer_types": ["full_attention", "odd", "conv", "conv"]})",
         R"(layers of an unknown kind ("odd"))"},
        {"{" + shape + R"(, "attention_window_size": 64, "block_types": ["recurrent", "attention"]})",
         "not counted, whatever it says: attention_window_size, block_types"},
        {R"({"model_type": "new", "text_config": {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 4}})",
         "its model_type is not known here"},
    };
    for (const auto& [config, what] : noted) {
        const json j = map(config);
        ASSERT_TRUE(j.is_object()) << config << ": " << j;
        EXPECT_NE(j["note"].get<std::string>().find(what), std::string::npos) << config << ": " << j["note"];
    }
}

}  // namespace
