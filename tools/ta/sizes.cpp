#include "tools/ta/sizes.h"

#include <algorithm>
#include <fstream>
#include <memory>

#include "tools/ta/machine.h"

namespace ta::tools {
namespace {

using nlohmann::json;

struct BlockBytes {
    uint64_t token, full;  // of a block at 8 bits, and of a full one
};

// As a pool of the library says them. `bits` 42: every second head has 4 bits, the others 2.
BlockBytes block_bytes(const ModelShape& m, int bits) {
    ta_context* context = nullptr;
    auto one_thread = sized<ta_context_options>();
    one_thread.threads = 1;
    TA_CHECK(ta_context_create(&one_thread, &context, &error));
    const std::unique_ptr<ta_context, decltype(&ta_context_destroy)> keep(context, ta_context_destroy);
    auto options = sized<ta_kv_pool_options>();
    options.layers = m.layers;
    options.kv_heads = m.kv_heads;
    options.head_dim = m.head_dim;
    options.budget_bytes = uint64_t{1} << 40;  // nothing of it is taken before there are tokens
    std::vector<uint8_t> map;
    if (bits == 42) {
        for (uint64_t i = 0; i < uint64_t(m.layers) * m.kv_heads; ++i)
            map.push_back(i % m.kv_heads < (m.kv_heads + 1) / 2 ? 4 : 2);
        options.k_bits = options.v_bits = map.data();
    } else {
        options.bits = uint32_t(bits);
    }
    ta_kv_pool* made = nullptr;
    if (ta_kv_pool_create(context, &options, &made, &error) != TA_OK) throw WrongInput(m.name + ": " + error.message);
    const std::unique_ptr<ta_kv_pool, decltype(&ta_kv_pool_destroy)> pool(made, ta_kv_pool_destroy);
    auto about = sized<ta_kv_pool_description>();
    TA_CHECK(ta_kv_pool_describe(made, &about, &error));
    return {about.token_block_bytes, about.channel_block_bytes ? about.channel_block_bytes : about.token_block_bytes};
}

// A positive integer at one of these keys, or 0.
uint32_t number_at(const json& config, std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
        const auto at = config.find(key);
        if (at != config.end() && at->is_number_unsigned() && at->get<uint64_t>() <= 1 << 20) return at->get<uint32_t>();
    }
    return 0;
}

ModelShape shape_of_config(const std::string& path) {
    std::ifstream in(path);
    if (!in) throw WrongInput(path + ": cannot be read, and is no name that `ta map --list` shows");
    json config = json::parse(in, nullptr, false);
    if (!config.is_object()) throw WrongInput(path + ": no JSON object");
    // Models of text and images have the language model's part in a field of its own.
    if (config.contains("text_config") && config["text_config"].is_object()) config = json(config["text_config"]);
    if (config.contains("kv_lora_rank") && config["kv_lora_rank"].is_number())
        throw WrongInput(path + ": a model with latent attention (kv_lora_rank), whose cache has no K and V heads");
    ModelShape m;
    m.name = path;
    const uint32_t q_heads = number_at(config, {"num_attention_heads", "n_head"});
    const uint32_t width = number_at(config, {"hidden_size", "n_embd"});
    m.layers = number_at(config, {"num_hidden_layers", "n_layer"});
    m.kv_heads = number_at(config, {"num_key_value_heads"});
    if (m.kv_heads == 0) m.kv_heads = q_heads;
    m.head_dim = number_at(config, {"head_dim"});
    if (m.head_dim == 0 && q_heads > 0) m.head_dim = width / q_heads;
    if (m.layers == 0 || m.kv_heads == 0 || m.head_dim == 0)
        throw WrongInput(path +
                         ": no config.json of a language model: num_hidden_layers, num_attention_heads and hidden_size or "
                         "head_dim are needed");
    if (config.contains("layer_types") && config["layer_types"].is_array()) {
        const auto full = std::ranges::count(config["layer_types"], json("full_attention"));
        if (size_t(full) < config["layer_types"].size())
            m.note = std::to_string(config["layer_types"].size() - size_t(full)) +
                     " of the layers do not attend to the whole context; counted as if they kept it";
    }
    return m;
}

}  // namespace

// From the config.json of the models on Hugging Face: num_hidden_layers, num_key_value_heads and head_dim, or
// hidden_size / num_attention_heads. Compared with what others copied from these files: litgpt/config.py of
// https://github.com/Lightning-AI/litgpt (26857050), which names the file of each model; and for gpt-oss, which is not there,
// gpt_oss/torch/model.py of https://github.com/openai/gpt-oss (heads, windows) and src/models of
// https://github.com/ggml-org/llama.cpp (layers).
const std::vector<ModelShape>& known_models() {
    static const std::vector<ModelShape> models = {
        {"llama-2-7b", 32, 32, 128, ""},
        {"llama-2-13b", 40, 40, 128, ""},
        {"llama-2-70b", 80, 8, 128, ""},
        {"llama-3-8b", 32, 8, 128, ""},
        {"llama-3-70b", 80, 8, 128, ""},
        {"llama-3.1-405b", 126, 8, 128, ""},
        {"llama-3.2-1b", 16, 8, 64, ""},
        {"llama-3.2-3b", 28, 8, 128, ""},
        {"qwen2.5-7b", 28, 4, 128, ""},
        {"qwen2.5-14b", 48, 8, 128, ""},
        {"qwen2.5-32b", 64, 8, 128, ""},
        {"qwen2.5-72b", 80, 8, 128, ""},
        {"qwen3-8b", 36, 8, 128, ""},
        {"qwen3-32b", 64, 8, 128, ""},
        {"mistral-7b", 32, 8, 128, "version 0.1 attends to 4096 tokens only; counted as if it kept all"},
        {"mixtral-8x7b", 32, 8, 128, ""},
        {"phi-3-mini", 32, 32, 96, "with a context of 4k it attends to 2048 tokens only; counted as if it kept all"},
        {"gemma-2-9b", 42, 8, 256, "21 of the layers attend to 4096 tokens only; counted as if they kept all"},
        {"gpt-oss-20b", 24, 8, 64, "12 of the layers attend to 128 tokens only; counted as if they kept all"},
        {"gpt-oss-120b", 36, 8, 64, "18 of the layers attend to 128 tokens only; counted as if they kept all"},
    };
    return models;
}

ModelShape model_shape(const std::string& name_or_path) {
    const auto& models = known_models();
    const auto at = std::ranges::find(models, name_or_path, &ModelShape::name);
    return at != models.end() ? *at : shape_of_config(name_or_path);
}

Json map_sizes(const ModelShape& model, const MapOptions& options) {
    const uint64_t f16 = uint64_t{2} * model.layers * model.kv_heads * model.head_dim * 2;
    Json rows = Json::array();
    // Tokens of each of the sequences, were a sequence to have `first` bytes at 8 bits in front and behind.
    const auto tokens_in = [&](BlockBytes b, uint64_t eights) -> uint64_t {
        const uint64_t budget = options.budget_bytes / std::max<uint64_t>(1, options.sequences);
        if (budget < b.token) return 0;
        if (budget < eights * b.token) return budget / b.token * 64;
        return (eights + (budget - eights * b.token) / b.full) * 64;
    };
    rows.push_back({{"bits", "16 (F16)"},
                    {"block_bytes", 64 * f16},
                    {"bytes_per_token", double(f16)},
                    {"times_smaller", 1.0},
                    {"tokens_in_budget", options.budget_bytes / std::max<uint64_t>(1, options.sequences) / f16}});
    std::vector<int> all = options.bits;
    if (all.empty()) all = {8, 4, 42, 2};
    for (const int bits : all) {
        if (bits == 42 && model.kv_heads == 1) continue;
        const BlockBytes b = block_bytes(model, bits);
        // The sink block and the open one have 8 bits.
        rows.push_back({{"bits", bits == 42 ? std::string("4 and 2") : std::to_string(bits)},
                        {"block_bytes", b.full},
                        {"bytes_per_token", double(b.full) / 64},
                        {"times_smaller", double(f16) * 64 / double(b.full)},
                        {"tokens_in_budget", tokens_in(b, bits == 8 ? 1 : 2)}});
    }
    return {{"model", model.name},
            {"layers", model.layers},
            {"kv_heads", model.kv_heads},
            {"head_dim", model.head_dim},
            {"note", model.note},
            {"budget_bytes", options.budget_bytes},
            {"sequences", options.sequences},
            {"rows", std::move(rows)}};
}

void print_map(const Json& map) {
    std::printf("%s: %u layers, %u kv heads of %u; budget %s for %s\n", map["model"].get<std::string>().c_str(),
                map["layers"].get<unsigned>(), map["kv_heads"].get<unsigned>(), map["head_dim"].get<unsigned>(),
                bytes_text(map["budget_bytes"]).c_str(),
                map["sequences"] == 1 ? "one sequence" : (map["sequences"].dump() + " sequences of one length").c_str());
    if (!map["note"].get<std::string>().empty()) std::printf("%s\n", map["note"].get<std::string>().c_str());
    const std::vector<Json> rows(map["rows"].begin(), map["rows"].end());
    print_table(rows, {{"bits", "bits"},
                       {"block_bytes", "64 tokens", true},
                       {"bytes_per_token", "a token", true},
                       {"times_smaller", "times smaller"},
                       {"tokens_in_budget", map["sequences"] == 1 ? "tokens in budget" : "tokens each in budget"}});
}

}  // namespace ta::tools
