#include "tools/ta/sizes.h"

#include <algorithm>
#include <fstream>
#include <memory>

#include "tools/ta/machine.h"
#include "tools/ta/text_file.h"

namespace ta::tools {
namespace {

using nlohmann::json;

// Bytes of a block, in a pool that may have windows.
struct BlockBytes {
    uint64_t token, full;                // with 8 bits, and when full
    uint64_t passed_token, passed_full;  // the same after its windows have passed; 0: no windows
};

// Asks the library, by making a pool. `bits`: see MapOptions.
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
    options.budget_bytes = uint64_t{1} << 40;  // nothing of it is allocated before there are tokens
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
    // Pages of all layers have the same size, so it does not matter which layers have the window.
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

// The memory of one sequence that grows by a token per step. A block is passed once the window hides it from the last 64
// tokens; the block before the one where these begin is kept, too (docs/layers.md).
class Growth {
  public:
    Growth(BlockBytes bytes, uint32_t window) : bytes_(bytes), window_(window) {}

    // How many blocks fit into the budget, if the last one has at least 63 tokens.
    uint64_t blocks_in(uint64_t budget) const {
        // Until some blocks have passed, a later block may need less than an earlier one, because the first block has 8 bits.
        // So search these one by one.
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
    // Bytes of a sequence of `tokens` tokens between two steps.
    uint64_t between_steps(uint64_t tokens) const {
        const uint64_t blocks = (tokens + 63) / 64, gone = passed(tokens);
        const bool open = tokens % 64 != 0;
        const uint64_t eights = (gone == 0 && blocks > 0) + (open && blocks > 1);
        return passed_bytes(gone) + eights * bytes_.token + (blocks - gone - eights) * bytes_.full;
    }
    // Bytes during the step that appends the last of `tokens` tokens. What the step replaces is freed only after it.
    uint64_t in_step(uint64_t tokens) const {
        uint64_t bytes = between_steps(tokens - 1) + passed_bytes(passed(tokens)) - passed_bytes(passed(tokens - 1));
        if (tokens % 64 == 1) bytes += bytes_.token;
        if (tokens % 64 == 0 && tokens > 64 && bytes_.full != bytes_.token) bytes += bytes_.full;
        return bytes;
    }
    // The most bytes over the steps that close the block before, open this one, and append all its tokens but the last.
    uint64_t most_of_block(uint64_t block) const {
        uint64_t most = 0;
        for (uint64_t n = std::max<uint64_t>(1, (block - 1) * 64); n < block * 64; ++n) most = std::max(most, in_step(n));
        return most;
    }

    BlockBytes bytes_;
    int64_t window_;
};

ModelShape shape_of_config(const std::string& path) {
    if (!std::ifstream(path)) throw WrongInput(path + ": cannot be read, and is no name that `ta map --list` shows");
    const std::string text = read_text(path);
    try {
        ModelShape m = read_model_config(text);
        m.name = path;
        return m;
    } catch (const WrongInput& e) {
        throw WrongInput(path + ": " + e.what());
    }
}

}  // namespace

// From the models' config.json on Hugging Face: num_hidden_layers, num_key_value_heads, and head_dim or hidden_size /
// num_attention_heads. Checked against copies of these values by others: litgpt/config.py of
// https://github.com/Lightning-AI/litgpt (26857050), which names each model's file; for gpt-oss, which is not there,
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
        {"gemma-3-4b", 34, 4, 256, 29, 1024},
        {"gemma-3-12b", 48, 8, 256, 40, 1024},
        {"gemma-3-27b", 62, 16, 128, 52, 1024},
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
    full_block_bytes(model, 8);  // throws for a shape that the library refuses
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
    // With windows, an F16 cache is counted in blocks that pass, too. A block without pages counts 128 bytes, as in the
    // library.
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
            {"model_layers", std::max(model.layers, model.model_layers)},
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
    const auto text = [&map](const char* key) { return map[key].dump(); };
    const bool all_layers = map["layers"] == map["model_layers"], windows = map["window"] > 0;
    print_wrapped("", map["model"].get<std::string>() + ": " + text("model_layers") + " layers, " +
                          (all_layers ? "" : text("layers") + " with K and V of their own, ") + text("kv_heads") +
                          " kv heads of " + text("head_dim") + "; budget " + bytes_text(map["budget_bytes"]) + " for " +
                          (map["sequences"] == 1 ? "one sequence" : text("sequences") + " sequences of one length"));
    if (windows)
        print_wrapped("", text("window_layers") + " of the layers attend to the last " + text("window") +
                              " tokens alone; of 64 tokens further back the pages of the others stay");
    if (const std::string note = map["note"]; !note.empty()) print_wrapped("", note);
    const std::vector<Json> rows(map["rows"].begin(), map["rows"].end());
    std::vector<Column> columns = {{"bits", "bits"}, {"block_bytes", "64 tokens", true}};
    if (windows) columns.push_back({"passed_block_bytes", "64 passed", true});
    columns.insert(columns.end(), {{"bytes_per_token", "a token", true},
                                   {"times_smaller", "times smaller"},
                                   {"tokens_in_budget", map["sequences"] == 1 ? "tokens in budget" : "tokens each in budget"}});
    print_table(rows, columns);
}

}  // namespace ta::tools
