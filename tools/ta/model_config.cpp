#include "tools/ta/model_config.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <ranges>
#include <string_view>
#include <vector>

#include "tools/ta/machine.h"

namespace ta::tools {
namespace {

using nlohmann::json;

// Which layers have a window (or the other kind of attention), if the file does not list them.
enum class Rule {
    kNone,
    kAll,
    kSwitched,   // all, if use_sliding_window is on
    kBehind,     // if it is on, those from max_window_layers on
    kAlternate,  // if it is on, every second one before max_window_layers, starting with the first
    kPeriod,     // all but every `period`th, which sees all tokens
    kChunks,     // likewise, but they attend in chunks of attention_chunk_size tokens
    kLinear      // likewise, but they have no K and V
};
bool is_switched(Rule rule) {
    return rule == Rule::kSwitched || rule == Rule::kBehind || rule == Rule::kAlternate;
}

// Defaults of a kind of model for fields that its file leaves out; files of multimodal models leave out all fields with default
// values. From the configuration classes of transformers 4.57 and, for Qwen, 5.24
// (https://github.com/huggingface/transformers).
struct Kind {
    const char* model_type;
    uint32_t layers, q_heads;
    uint32_t kv_heads;  // 0: as many as query heads
    uint32_t width;     // hidden_size
    uint32_t head_dim;  // 0: width / q_heads
    Rule rule = Rule::kNone;
    uint32_t period = 0;         // for kBehind and kAlternate: max_window_layers
    uint32_t window = 0;         // sliding_window, or attention_chunk_size
    uint32_t shared_layers = 0;  // num_kv_shared_layers
    bool one_kv_head = false;    // multi_query
    const char* refusal = nullptr;
};
constexpr const char* kLatent = "whose cache has no K and V heads (latent attention)";
constexpr Kind kKinds[] = {
    {"cohere2", 40, 64, 0, 8192, 0, Rule::kPeriod, 4, 4096},
    {"deepseek_v2", 0, 0, 0, 0, 0, Rule::kNone, 0, 0, 0, false, kLatent},
    {"deepseek_v3", 0, 0, 0, 0, 0, Rule::kNone, 0, 0, 0, false, kLatent},
    {"exaone4", 32, 32, 32, 4096, 0, Rule::kPeriod, 4, 4096},
    {"falcon", 32, 71, 0, 4544, 0, Rule::kNone, 0, 0, 0, true},
    {"gemma", 28, 16, 16, 3072, 256},
    {"gemma2", 26, 8, 4, 2304, 256, Rule::kPeriod, 2, 4096},
    {"gemma3_text", 26, 8, 4, 2304, 256, Rule::kPeriod, 6, 4096},
    {"gemma3n_text", 35, 8, 2, 2048, 256, Rule::kPeriod, 5, 512, 15},
    {"gemma4_text", 0, 0, 0, 0, 0, Rule::kNone, 0, 0, 0, false,
     "some of whose layers have heads of more than 256 channels (global_head_dim)"},
    {"glm", 40, 32, 2, 4096, 128},
    {"glm4", 40, 32, 2, 4096, 128},
    {"gpt_bigcode", 12, 12, 0, 768, 0, Rule::kNone, 0, 0, 0, true},
    {"gpt_oss", 36, 64, 8, 2880, 64, Rule::kPeriod, 2, 128},
    {"llama", 32, 32, 0, 4096, 0},
    {"llama4_text", 48, 40, 8, 5120, 128, Rule::kChunks, 4, 8192},
    {"ministral", 32, 32, 8, 4096, 0, Rule::kAll, 0, 4096},
    {"mistral", 32, 32, 8, 4096, 0, Rule::kAll, 0, 4096},
    {"mixtral", 32, 32, 8, 4096, 0, Rule::kAll},
    {"olmo3", 32, 32, 0, 4096, 0, Rule::kPeriod, 4, 4096},
    {"phi3", 32, 32, 0, 3072, 0, Rule::kAll},
    {"phimoe", 32, 32, 8, 4096, 0, Rule::kAll},
    {"qwen2", 32, 32, 32, 4096, 0, Rule::kBehind, 28, 4096},
    {"qwen2_moe", 24, 16, 16, 2048, 0, Rule::kAlternate, 28, 4096},
    {"qwen2_vl_text", 80, 64, 8, 8192, 0, Rule::kBehind, 80, 4096},
    {"qwen2_5_vl_text", 80, 64, 8, 8192, 0, Rule::kBehind, 80, 4096},
    {"qwen2_5_omni_text", 28, 28, 4, 3584, 0, Rule::kBehind, 28, 32768},
    {"qwen3", 32, 32, 32, 4096, 128, Rule::kBehind, 28, 4096},
    {"qwen3_moe", 24, 32, 4, 2048, 0, Rule::kSwitched, 0, 4096},
    {"qwen3_next", 48, 16, 2, 2048, 256, Rule::kLinear, 4},
    {"qwen3_vl_text", 32, 32, 32, 4096, 128},
    {"qwen3_vl_moe_text", 24, 16, 16, 2048, 0},
    {"starcoder2", 30, 24, 2, 3072, 0, Rule::kAll},
};

std::string text_of(const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 40);
}
std::string joined(const std::vector<std::string>& words, const char* between = ", ") {
    std::string out;
    for (const std::string& w : words) out += (out.empty() ? "" : between) + w;
    return out;
}

class Config {
  public:
    explicit Config(const std::string& text) : fields_(json::parse(text, nullptr, false)) {
        if (!fields_.is_object()) throw WrongInput("no JSON object");
        std::string outer = string_at("model_type");
        // Multimodal models keep the language model's part in a field of its own.
        for (const char* part : {"thinker_config", "text_config", "llm_config", "language_config"}) {
            const auto at = fields_.find(part);
            if (at == fields_.end() || !at->is_object()) continue;
            fields_ = json(*at);
            const std::string inner = string_at("model_type");
            outer = inner.empty() ? outer : inner;
            is_part_ = true;
        }
        model_type_ = outer;
        for (const Kind& kind : kKinds)
            if (outer == kind.model_type || outer + "_text" == kind.model_type) kind_ = &kind;
    }

    const Kind* kind() const { return kind_; }
    const std::string& model_type() const { return model_type_; }
    const json& fields() const { return fields_; }
    // The file is a part whose kind is not in the table, so what it leaves out must be guessed.
    bool is_guess() const { return is_part_ && !kind_; }

    // nullptr if the file lacks the field or has null there.
    const json* at(const char* key) const {
        const auto at = fields_.find(key);
        return at == fields_.end() || at->is_null() ? nullptr : &*at;
    }
    const json* list_at(const char* key) const {
        const json* list = at(key);
        if (list && !list->is_array()) throw WrongInput(std::string(key) + " is " + text_of(*list) + "; it takes a list");
        return list;
    }
    std::string string_at(const char* key) const {
        const json* found = at(key);
        return found && found->is_string() ? found->get<std::string>() : std::string();
    }
    bool is(const char* key, bool otherwise) const {
        const json* found = at(key);
        return found && found->is_boolean() ? found->get<bool>() : otherwise;
    }
    // The number at the first of these keys that the file has. If it has none of them: `otherwise`; if one is null: 0.
    uint32_t number(std::initializer_list<const char*> keys, uint32_t otherwise = 0) {
        bool null = false;
        for (const char* key : keys) {
            null |= fields_.contains(key);
            const json* found = at(key);
            if (!found) continue;
            if (found->is_number_unsigned() && found->get<uint64_t>() <= 1 << 20) return found->get<uint32_t>();
            throw WrongInput(std::string(key) + " is " + text_of(*found) + "; it takes an integer from 0 to 2^20");
        }
        if (null || otherwise == 0) return 0;
        usual_.push_back(*keys.begin() + std::string(" ") + std::to_string(otherwise));
        return otherwise;
    }
    // The values that number() took from the table.
    const std::vector<std::string>& usual() const { return usual_; }

  private:
    json fields_;
    std::string model_type_;
    const Kind* kind_ = nullptr;
    bool is_part_ = false;
    std::vector<std::string> usual_;
};

// Falcon and gpt_bigcode have one kv head if multi_query is on. In Falcon's later models num_kv_heads counts instead.
uint32_t kv_heads_of(Config& c, uint32_t q_heads) {
    const Kind* kind = c.kind();
    const uint32_t given = c.number({"num_key_value_heads"}, kind ? kind->kv_heads : 0);
    if (given > 0) return given;
    const uint32_t falcons = c.number({"num_kv_heads"});
    if (c.is("multi_query", kind && kind->one_kv_head) && !c.is("new_decoder_architecture", false)) return 1;
    return falcons > 0 ? falcons : q_heads;
}

enum class Layer { kFull, kWindow, kChunk, kWithout };
using Layers = std::vector<Layer>;

// A layer's kind by its name; empty: the name is unknown.
std::optional<Layer> layer_called(const std::string& name) {
    constexpr std::array kFull = {"full_attention", "attention", "global", "hybrid", "global_attention"};
    constexpr std::array kWindow = {"sliding_attention", "local", "local_attention"};
    constexpr std::array kWithout = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "moe", "mlp"};
    if (std::ranges::find(kFull, name) != kFull.end()) return Layer::kFull;
    if (std::ranges::find(kWindow, name) != kWindow.end()) return Layer::kWindow;
    if (std::ranges::find(kWithout, name) != kWithout.end()) return Layer::kWithout;
    if (name == "chunked_attention") return Layer::kChunk;
    return {};
}

// The layers that the file lists by name; empty: it lists none.
Layers listed_layers(const Config& c, size_t n, std::vector<std::string>& notes) {
    for (const char* key : {"layer_types", "layers_block_type"}) {
        const json* list = c.list_at(key);
        if (!list) continue;
        if (list->size() < n)
            throw WrongInput(std::string(key) + " names " + std::to_string(list->size()) + " layers of " + std::to_string(n));
        Layers layers;
        std::vector<std::string> unknown;
        for (size_t i = 0; i < n; ++i) {
            const json& name = (*list)[i];
            const std::optional<Layer> kind = layer_called(name.is_string() ? name.get<std::string>() : std::string());
            if (!kind && std::ranges::find(unknown, text_of(name)) == unknown.end()) unknown.push_back(text_of(name));
            layers.push_back(kind.value_or(Layer::kFull));
        }
        if (!unknown.empty())
            notes.push_back("layers of an unknown kind (" + joined(unknown) + ") are counted as if they kept all tokens");
        return layers;
    }
    return {};
}

// Which layers keep K and V at all; empty: the file does not say.
Layers layers_with_attention(Config& c, size_t n) {
    const auto those = [n](const auto& has_attention) {
        Layers layers;
        for (size_t i = 0; i < n; ++i) layers.push_back(has_attention(i) ? Layer::kFull : Layer::kWithout);
        return layers;
    };
    const bool linear = c.kind() && c.kind()->rule == Rule::kLinear;
    if (const size_t period = c.number({"full_attention_interval"}, linear ? c.kind()->period : 0); period > 0)
        return those([=](size_t i) { return (i + 1) % period == 0; });
    if (const size_t period = c.number({"attn_layer_period"}); period > 0) {
        const size_t offset = c.number({"attn_layer_offset"});
        return those([=](size_t i) { return i % period == offset; });
    }
    for (const char* key : {"full_attn_idxs", "attn_layer_indices"}) {
        if (const json* list = c.list_at(key)) return those([=](size_t i) { return std::ranges::count(*list, json(i)) > 0; });
    }
    if (const json* list = c.list_at("attn_type_list"))
        return those([=](size_t i) { return i < list->size() && (*list)[i] == json(1); });
    if (const std::string pattern = c.string_at("hybrid_override_pattern"); !pattern.empty())
        return those([=](size_t i) { return i < pattern.size() && pattern[i] == '*'; });
    return {};
}

// Which layers have windows, by a pattern: letters such as "LLLG", or the period of layers without a window.
std::optional<Layers> window_pattern(Config& c, size_t n) {
    const Kind* kind = c.kind();
    Layers layers(n, Layer::kFull);
    if (const std::string letters = c.string_at("sliding_window_pattern"); !letters.empty()) {
        for (size_t i = 0; i + 1 < n; ++i) layers[i] = letters[i % letters.size()] == 'L' ? Layer::kWindow : Layer::kFull;
        return layers;
    }
    const size_t period =
        c.number({"sliding_window_pattern", "_sliding_window_pattern"}, kind && kind->rule == Rule::kPeriod ? kind->period : 0);
    if (period > 0) {
        for (size_t i = 0; i < n; ++i) layers[i] = (i + 1) % period != 0 ? Layer::kWindow : Layer::kFull;
        return layers;
    }
    const Rule rule = kind ? kind->rule : Rule::kNone;
    if (rule == Rule::kAll || rule == Rule::kSwitched) return Layers(n, Layer::kWindow);
    if (rule == Rule::kBehind || rule == Rule::kAlternate || c.at("max_window_layers")) {
        const size_t bound = c.number({"max_window_layers"}, kind ? kind->period : 0);
        for (size_t i = 0; i < n; ++i) {
            const bool has_window = rule == Rule::kAlternate ? i < bound && i % 2 == 0 : i >= bound;
            if (has_window) layers[i] = Layer::kWindow;
        }
        return layers;
    }
    return {};
}

// Llama 4: layers with rotary positions attend in chunks, the others to all tokens.
std::optional<Layers> chunk_pattern(Config& c, size_t n) {
    const json* rotary = c.list_at("no_rope_layers");
    const bool listed = rotary && rotary->size() >= n;
    const size_t period =
        listed ? 0 : c.number({"no_rope_layer_interval"}, c.kind() && c.kind()->rule == Rule::kChunks ? c.kind()->period : 0);
    if (!listed && period == 0) return {};
    Layers layers;
    for (size_t i = 0; i < n; ++i)
        layers.push_back((listed ? (*rotary)[i] != json(0) : (i + 1) % period != 0) ? Layer::kChunk : Layer::kFull);
    return layers;
}

// `window` and `chunk` are in tokens; 0: none.
Layers layers_of(Config& c, size_t n, uint32_t window, uint32_t chunk, std::vector<std::string>& notes) {
    const std::string unsaid = "it has a window of " + std::to_string(std::max(window, chunk)) +
                               " tokens, and does not say which layers have it; counted as if they kept all";
    Layers layers = listed_layers(c, n, notes);
    if (layers.empty()) {
        layers = layers_with_attention(c, n);
        if (!layers.empty() && window + chunk > 0) notes.push_back(unsaid);
    }
    if (layers.empty()) {
        const std::optional<Layers> pattern = window > 0  ? window_pattern(c, n)
                                              : chunk > 0 ? chunk_pattern(c, n)
                                                          : Layers(n, Layer::kFull);
        if (!pattern) notes.push_back(unsaid);
        layers = pattern.value_or(Layers(n, Layer::kFull));
    }
    const auto has_no_length = [&](Layer layer) {
        return (layer == Layer::kWindow && window == 0) || (layer == Layer::kChunk && chunk == 0);
    };
    if (std::ranges::any_of(layers, has_no_length)) {
        if (c.is("use_sliding_window", true))
            notes.push_back("layers with a window of unknown length are counted as if they kept all tokens");
        std::ranges::replace_if(layers, has_no_length, Layer::kFull);
    }
    return layers;
}

// Refuses models whose layers differ in heads or channels, since a ModelShape cannot express that.
void refuse_unlike_layers(const Config& c, const ModelShape& m) {
    const auto differs = [&](const char* key, uint32_t usual) {
        const json* found = c.at(key);
        if (found && *found != json(usual))
            throw WrongInput("a model whose layers, or K and V, differ in heads or channels (" + std::string(key) + " " +
                             text_of(*found) + "), which `ta map` does not count");
    };
    for (const char* key : {"global_head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim"}) differs(key, m.head_dim);
    for (const char* key : {"num_global_key_value_heads", "swa_num_key_value_heads"}) differs(key, m.kv_heads);
    for (const char* key : {"num_key_value_heads_per_layer", "block_configs"}) differs(key, 0);
}

// Names of fields that concern K and V but that nothing here reads.
std::vector<std::string> unread_fields(const Config& c) {
    constexpr std::array kRead = {"head_dim",
                                  "num_key_value_heads",
                                  "num_kv_heads",
                                  "sliding_window",
                                  "use_sliding_window",
                                  "sliding_window_pattern",
                                  "_sliding_window_pattern",
                                  "max_window_layers",
                                  "attention_chunk_size",
                                  "num_kv_shared_layers",
                                  "global_head_dim",
                                  "swa_head_dim",
                                  "v_head_dim",
                                  "swa_v_head_dim",
                                  "num_global_key_value_heads",
                                  "swa_num_key_value_heads"};
    constexpr std::array kOfOthers = {"linear_", "mamba_", "ssm_", "vision_", "audio_", "rope_", "rotary_", "index_"};
    std::vector<std::string> unread;
    for (const auto& [key, value] : c.fields().items()) {
        const auto has = [&key](std::string_view part) { return key.find(part) != std::string::npos; };
        const auto begins = [&key](std::string_view part) { return key.starts_with(part); };
        if (value.is_null() || value == json(false) || value == json(0) || value.is_object()) continue;
        if (std::ranges::find(kRead, key) != kRead.end() || std::ranges::any_of(kOfOthers, begins)) continue;
        if (has("head_dim") || has("kv_heads") || has("key_value_heads") || has("window") || has("kv_shar") ||
            has("share_kv") || has("cross_attention_layers") || has("cla_share_factor") || has("layer_pattern") ||
            key == "block_types" || key == "attention_types" || key == "dense_attention_every_n_layers" ||
            key == "is_encoder_decoder")
            unread.push_back(key);
    }
    return unread;
}

}  // namespace

ModelShape read_model_config(const std::string& text) {
    Config c(text);
    const Kind* kind = c.kind();
    if (const json* rank = c.at("kv_lora_rank"); rank && rank->is_number())
        throw WrongInput((c.model_type().empty() ? "a model" : c.model_type()) + ", " + kLatent + ": kv_lora_rank " +
                         text_of(*rank));
    if (kind && kind->refusal && !c.fields().contains("kv_lora_rank")) throw WrongInput(c.model_type() + ", " + kind->refusal);

    constexpr Kind kUnknown{"", 0, 0, 0, 0, 0};
    const Kind& usual = kind ? *kind : kUnknown;
    ModelShape m;
    const uint32_t n = c.number({"num_hidden_layers", "n_layer"}, usual.layers);
    const uint32_t q_heads = c.number({"num_attention_heads", "n_head"}, usual.q_heads);
    m.kv_heads = kv_heads_of(c, q_heads);
    m.head_dim = c.number({"head_dim"}, usual.head_dim);
    if (m.head_dim == 0 && q_heads > 0) {
        const uint32_t width = c.number({"hidden_size", "n_embd"}, usual.width);
        if (width % q_heads != 0)
            throw WrongInput("no head_dim, and hidden_size " + std::to_string(width) + " is no multiple of " +
                             std::to_string(q_heads) + " heads");
        m.head_dim = width / q_heads;
    }
    if (n == 0 || m.kv_heads == 0 || m.head_dim == 0)
        throw WrongInput(
            "no config.json of a language model: num_hidden_layers, num_attention_heads and hidden_size or "
            "head_dim are needed");
    refuse_unlike_layers(c, m);

    std::vector<std::string> notes;
    const bool used = c.is("use_sliding_window", !is_switched(usual.rule));
    const uint32_t window = used ? c.number({"sliding_window"}, usual.rule == Rule::kChunks ? 0 : usual.window) : 0;
    const uint32_t chunk = c.number({"attention_chunk_size"}, usual.rule == Rule::kChunks ? usual.window : 0);
    Layers layers = layers_of(c, n, window, chunk, notes);
    const uint32_t shared = c.number({"num_kv_shared_layers"}, usual.shared_layers);
    layers.resize(n - std::min(n, shared));

    const auto count = [&](Layer kind_of) { return uint32_t(std::ranges::count(layers, kind_of)); };
    const uint32_t windows = count(Layer::kWindow), chunks = count(Layer::kChunk), without = count(Layer::kWithout);
    m.model_layers = n;
    m.layers = uint32_t(layers.size()) - without;
    m.window_layers = windows + chunks;
    m.window = std::max(windows > 0 ? window : 0, chunks > 0 ? chunk : 0);
    if (m.layers == 0) throw WrongInput("none of its " + std::to_string(n) + " layers keeps K and V");
    if (without > 0)
        notes.push_back(std::to_string(without) + " layers keep a state of fixed size in place of K and V; it is not counted");
    if (shared > 0) notes.push_back("the last " + std::to_string(shared) + " layers use K and V of earlier ones");
    if (chunks > 0)
        notes.push_back(std::to_string(chunks) + " layers attend in chunks of " + std::to_string(chunk) +
                        " tokens; counted as a window of that length");
    if (windows > 0 && chunks > 0) notes.push_back("all windows are counted as long as the longest");
    if (!c.usual().empty()) notes.push_back("not in the file, but usual for " + c.model_type() + ": " + joined(c.usual()));
    if (c.is_guess() && (!c.at("num_key_value_heads") || !c.at("head_dim")))
        notes.push_back("its model_type is not known here: fields that are not in the file may be other than taken");
    if (const std::vector<std::string> unread = unread_fields(c); !unread.empty())
        notes.push_back("not counted, whatever it says: " + joined(unread));
    m.note = joined(notes, "; ");
    return m;
}

}  // namespace ta::tools
