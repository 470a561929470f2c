#include "tools/ta/sizes.h"

#include <algorithm>
#include <fstream>
#include <memory>

#include "tools/ta/machine.h"
#include "tools/ta/text_file.h"

namespace ta::tools {
namespace {

using nlohmann::json;

// Of a block, in a pool that may have windows.
struct BlockBytes {
    uint64_t token, full;                // at 8 bits, and of a full one
    uint64_t passed_token, passed_full;  // likewise, when its windows have passed; 0 without windows
};

// As a pool of the library says them. `bits`: see MapOptions.
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
    std::vector<uint8_t> k_bits, v_bits;
    if (bits == 42 || bits == 84) {
        for (uint64_t i = 0; i < uint64_t(m.layers) * m.kv_heads; ++i) {
            const uint8_t of_head = i % m.kv_heads < (m.kv_heads + 1) / 2 ? 4 : 2;
            k_bits.push_back(bits == 84 ? 8 : of_head);
            v_bits.push_back(bits == 84 ? 4 : of_head);
        }
        options.k_bits = k_bits.data();
        options.v_bits = v_bits.data();
    } else {
        options.bits = uint32_t(bits);
    }
    // All layers have pages of one size, so it does not matter which ones have the window.
    auto group = sized<ta_layer_group>();
    group.layers = m.window_layers;
    group.window = m.window;
    if (m.window_layers > 0) {
        options.layer_groups = &group;
        options.n_layer_groups = 1;
    }
    ta_kv_pool* made = nullptr;
    if (ta_kv_pool_create(context, &options, &made, &error) != TA_OK) throw WrongInput(m.name + ": " + error.message);
    const std::unique_ptr<ta_kv_pool, decltype(&ta_kv_pool_destroy)> pool(made, ta_kv_pool_destroy);
    auto about = sized<ta_kv_pool_description>();
    TA_CHECK(ta_kv_pool_describe(made, &about, &error));
    const auto full_or = [](uint64_t full, uint64_t token) { return full > 0 ? full : token; };
    return {about.token_block_bytes, full_or(about.channel_block_bytes, about.token_block_bytes),
            about.passed_token_block_bytes, full_or(about.passed_channel_block_bytes, about.passed_token_block_bytes)};
}

// What one sequence takes that grows by a token a step. A block passes when the window hides it from the last 64 tokens, and the one
// before the block that these begin in stays (docs/layers.md).
class Growth {
  public:
    Growth(BlockBytes bytes, uint32_t window) : bytes_(bytes), window_(window) {}

    // How many blocks a sequence can have within the budget, the last one with 63 tokens or more.
    uint64_t blocks_in(uint64_t budget) const {
        // Until some blocks have passed, a later one may take less than an earlier one: the first block has 8 bits.
        const uint64_t early = window_ > 0 ? window_ / 64 + 4 : 0;
        uint64_t fit = 0;
        while (fit < early && most_of_block(fit + 1) <= budget) ++fit;
        if (fit < early) return fit;
        uint64_t lacks = fit + 1;
        while (most_of_block(lacks) <= budget) fit = lacks, lacks *= 2;
        while (fit + 1 < lacks) {
            const uint64_t middle = fit + (lacks - fit) / 2;
            (most_of_block(middle) <= budget ? fit : lacks) = middle;
        }
        return fit;
    }

  private:
    uint64_t passed(uint64_t tokens) const {
        if (window_ == 0) return 0;
        const int64_t position = int64_t(tokens) - 64;
        return uint64_t(std::max<int64_t>(0, std::min(position - window_ + 1, position / 64 * 64 - 64)) / 64);
    }
    uint64_t passed_bytes(uint64_t blocks) const {
        return blocks > 0 ? bytes_.passed_token + (blocks - 1) * bytes_.passed_full : 0;
    }
    // Of the blocks before the one that token `tokens` is in, and of that.
    uint64_t between_steps(uint64_t tokens) const {
        const uint64_t blocks = (tokens + 63) / 64, gone = passed(tokens);
        const bool open = tokens % 64 != 0;
        const uint64_t eights = (gone == 0 && blocks > 0) + (open && blocks > 1);
        return passed_bytes(gone) + eights * bytes_.token + (blocks - gone - eights) * bytes_.full;
    }
    // While the step runs that brings the last of so many tokens: what it replaces goes after it.
    uint64_t in_step(uint64_t tokens) const {
        uint64_t bytes = between_steps(tokens - 1) + passed_bytes(passed(tokens)) - passed_bytes(passed(tokens - 1));
        if (tokens % 64 == 1) bytes += bytes_.token;
        if (tokens % 64 == 0 && tokens > 64 && bytes_.full != bytes_.token) bytes += bytes_.full;
        return bytes;
    }
    // Of the steps that close the block before, open this one, and bring tokens to it but for the last one.
    uint64_t most_of_block(uint64_t block) const {
        uint64_t most = 0;
        for (uint64_t n = std::max<uint64_t>(1, (block - 1) * 64); n < block * 64; ++n) most = std::max(most, in_step(n));
        return most;
    }

    BlockBytes bytes_;
    int64_t window_;
};

// The number at the first of these keys that is there, or 0.
uint32_t number_at(const json& config, std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
        const auto at = config.find(key);
        if (at == config.end() || at->is_null()) continue;
        if (at->is_number_unsigned() && at->get<uint64_t>() <= 1 << 20) return at->get<uint32_t>();
        throw WrongInput(std::string(key) + " is " + at->dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 40) +
                         "; it takes an integer from 0 to 2^20");
    }
    return 0;
}
bool is_on(const json& config, const char* key) {
    return config.value(key, json()) == json(true);
}

// Falcon and gpt_bigcode have one kv head where multi_query says so; of Falcon's later models num_kv_heads counts instead.
uint32_t kv_heads_of(const json& config, uint32_t q_heads) {
    const uint32_t given = number_at(config, {"num_key_value_heads"});
    if (given > 0) return given;
    const uint32_t falcons = number_at(config, {"num_kv_heads"});
    if (is_on(config, "multi_query") && !is_on(config, "new_decoder_architecture")) return 1;
    return falcons > 0 ? falcons : q_heads;
}

// Which layers have windows: layer_types says it, or what the kind of model is.
void read_windows(const json& config, ModelShape& m) {
    const uint32_t window = number_at(config, {"sliding_window"});
    const bool used = config.value("use_sliding_window", json(true)) != json(false);
    const std::string kind =
        config.contains("model_type") && config["model_type"].is_string() ? config["model_type"] : json("");
    uint32_t with_window = 0, others = 0;
    if (config.contains("layer_types") && config["layer_types"].is_array()) {
        const auto count = [&](const char* type) { return uint32_t(std::ranges::count(config["layer_types"], json(type))); };
        with_window = window > 0 ? std::min(m.layers, count("sliding_attention")) : 0;
        others = uint32_t(config["layer_types"].size()) - with_window - count("full_attention");
    } else if (window > 0 && used) {
        // The last layer of so many has none.
        const uint32_t period = number_at(config, {"sliding_window_pattern"});
        if (kind == "mistral" || kind == "mixtral" || kind == "phi3")
            with_window = m.layers;
        else if (period > 0 || kind == "gemma2")
            with_window = m.layers - m.layers / (period > 0 ? period : 2);
        else
            m.note = "it has a window of " + std::to_string(window) + " tokens, and does not say which layers have it; " +
                     "counted as if they kept all";
    }
    if (with_window > 0) m.window_layers = with_window, m.window = window;
    if (others > 0)
        m.note = std::to_string(others) + " of the layers have attention of another kind; counted as if they kept all tokens";
}

// The rest of what a failure says follows the file's name.
ModelShape read_shape(const std::string& text) {
    json config = json::parse(text, nullptr, false);
    if (!config.is_object()) throw WrongInput("no JSON object");
    // Models of text and images have the language model's part in a field of its own.
    if (config.contains("text_config") && config["text_config"].is_object()) config = json(config["text_config"]);
    if (config.contains("kv_lora_rank") && config["kv_lora_rank"].is_number())
        throw WrongInput("a model with latent attention (kv_lora_rank), whose cache has no K and V heads");
    ModelShape m;
    const uint32_t q_heads = number_at(config, {"num_attention_heads", "n_head"});
    const uint32_t width = number_at(config, {"hidden_size", "n_embd"});
    m.layers = number_at(config, {"num_hidden_layers", "n_layer"});
    m.kv_heads = kv_heads_of(config, q_heads);
    m.head_dim = number_at(config, {"head_dim"});
    if (m.head_dim == 0 && q_heads > 0) m.head_dim = width / q_heads;
    if (m.layers == 0 || m.kv_heads == 0 || m.head_dim == 0)
        throw WrongInput(
            "no config.json of a language model: num_hidden_layers, num_attention_heads and hidden_size or "
            "head_dim are needed");
    read_windows(config, m);
    return m;
}

ModelShape shape_of_config(const std::string& path) {
    if (!std::ifstream(path)) throw WrongInput(path + ": cannot be read, and is no name that `ta map --list` shows");
    const std::string text = read_text(path);
    try {
        ModelShape m = read_shape(text);
        m.name = path;
        return m;
    } catch (const WrongInput& e) {
        throw WrongInput(path + ": " + e.what());
    }
}

}  // namespace

// From the config.json of the models on Hugging Face: num_hidden_layers, num_key_value_heads and head_dim, or
// hidden_size / num_attention_heads. Compared with what others copied from these files: litgpt/config.py of
// https://github.com/Lightning-AI/litgpt (26857050), which names the file of each model; and for gpt-oss, which is not there,
// gpt_oss/torch/model.py of https://github.com/openai/gpt-oss (heads, windows) and src/models of
// https://github.com/ggml-org/llama.cpp (layers).
const std::vector<ModelShape>& known_models() {
    static const std::vector<ModelShape> models = {
        {"llama-2-7b", 32, 32, 128},
        {"llama-2-13b", 40, 40, 128},
        {"llama-2-70b", 80, 8, 128},
        {"llama-3-8b", 32, 8, 128},
        {"llama-3-70b", 80, 8, 128},
        {"llama-3.1-405b", 126, 8, 128},
        {"llama-3.2-1b", 16, 8, 64},
        {"llama-3.2-3b", 28, 8, 128},
        {"qwen2.5-7b", 28, 4, 128},
        {"qwen2.5-14b", 48, 8, 128},
        {"qwen2.5-32b", 64, 8, 128},
        {"qwen2.5-72b", 80, 8, 128},
        {"qwen3-8b", 36, 8, 128},
        {"qwen3-32b", 64, 8, 128},
        {"mistral-7b", 32, 8, 128},
        {"mistral-7b-v0.1", 32, 8, 128, 32, 4096},
        {"mixtral-8x7b", 32, 8, 128},
        {"phi-3-mini", 32, 32, 96},
        {"phi-3-mini-4k", 32, 32, 96, 32, 2048},
        {"gemma-2-9b", 42, 8, 256, 21, 4096},
        {"gpt-oss-20b", 24, 8, 64, 12, 128},
        {"gpt-oss-120b", 36, 8, 64, 18, 128},
    };
    return models;
}

ModelShape model_shape(const std::string& name_or_path) {
    const auto& models = known_models();
    const auto at = std::ranges::find(models, name_or_path, &ModelShape::name);
    return at != models.end() ? *at : shape_of_config(name_or_path);
}

uint64_t full_block_bytes(const ModelShape& model, int bits) {
    return block_bytes(model, bits).full;
}

Json map_sizes(const ModelShape& model, const MapOptions& options) {
    full_block_bytes(model, 8);  // refuses a shape that the library refuses
    const uint64_t f16 = uint64_t{2} * model.layers * model.kv_heads * model.head_dim * 2;
    constexpr uint64_t kMostBytes = 1'000'000'000'000'000'000;
    if (options.budget_bytes > kMostBytes) throw WrongInput("--budget is above 1000 PB");
    const uint64_t budget = options.budget_bytes / std::max<uint64_t>(1, options.sequences);
    Json rows = Json::array();
    const auto add = [&](const std::string& bits, BlockBytes b, uint64_t tokens) {
        rows.push_back({{"bits", bits},
                        {"block_bytes", b.full},
                        {"bytes_per_token", double(b.full) / 64},
                        {"times_smaller", double(f16) * 64 / double(b.full)},
                        {"tokens_in_budget", tokens}});
        if (model.window > 0) rows.back()["passed_block_bytes"] = b.passed_full;
    };
    // A cache of F16 with windows is counted by blocks that pass, too; one without pages counts 128 bytes, as the library's.
    const uint64_t f16_passed = std::max<uint64_t>(128, 64 * f16 / model.layers * (model.layers - model.window_layers));
    const BlockBytes f16_block{64 * f16, 64 * f16, f16_passed, f16_passed};
    add("16 (F16)", f16_block, model.window == 0 ? budget / f16 : Growth(f16_block, model.window).blocks_in(budget) * 64);
    std::vector<int> all = options.bits;
    if (all.empty()) all = {8, 4, 42, 2};
    for (const int bits : all) {
        if (bits == 42 && model.kv_heads == 1) continue;
        const BlockBytes b = block_bytes(model, bits);
        const std::string name = bits == 42 ? "4 and 2" : bits == 84 ? "K 8, V 4" : std::to_string(bits);
        add(name, b, Growth(b, model.window).blocks_in(budget) * 64);
    }
    return {{"model", model.name},
            {"layers", model.layers},
            {"kv_heads", model.kv_heads},
            {"head_dim", model.head_dim},
            {"window", model.window},
            {"window_layers", model.window_layers},
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
    const bool windows = map["window"] > 0;
    if (windows)
        std::printf(
            "%u of the layers attend to the last %u tokens alone; of 64 tokens further back the pages of the others stay\n",
            map["window_layers"].get<unsigned>(), map["window"].get<unsigned>());
    if (!map["note"].get<std::string>().empty()) std::printf("%s\n", map["note"].get<std::string>().c_str());
    const std::vector<Json> rows(map["rows"].begin(), map["rows"].end());
    std::vector<Column> columns = {{"bits", "bits"}, {"block_bytes", "64 tokens", true}};
    if (windows) columns.push_back({"passed_block_bytes", "64 passed", true});
    columns.insert(columns.end(), {{"bytes_per_token", "a token", true},
                                   {"times_smaller", "times smaller"},
                                   {"tokens_in_budget", map["sequences"] == 1 ? "tokens in budget" : "tokens each in budget"}});
    print_table(rows, columns);
}

}  // namespace ta::tools
