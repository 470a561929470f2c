#include "model.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <stdexcept>
#include <string>

#include "parallel.h"
#include "safetensors.h"
#include "vector_math.h"

namespace tinylm {
namespace {

using json = nlohmann::json;

[[noreturn]] void refuse(const std::string& what) {
    throw std::runtime_error("config.json: " + what);
}

// A null counts as an absent key, as in transformers.
const json* find(const json& object, const char* key) {
    const auto it = object.find(key);
    return it == object.end() || it->is_null() ? nullptr : &*it;
}

int get_int(const json& object, const char* key, int fallback) {
    constexpr int64_t kMax = 1 << 24;  // keeps every product of two sizes within 64 bits
    const json* value = find(object, key);
    if (value == nullptr && fallback > 0) return fallback;
    if (value == nullptr) refuse(std::string(key) + " is missing");
    if (!value->is_number_unsigned() || value->get<uint64_t>() < 1 || value->get<uint64_t>() > kMax) {
        refuse(std::string(key) + " must be a whole number from 1 to " + std::to_string(kMax));
    }
    return value->get<int>();
}

double get_positive(const json& object, const char* key, double fallback) {
    const json* value = find(object, key);
    if (value == nullptr) return fallback;
    if (!value->is_number() || !(value->get<double>() > 0)) refuse(std::string(key) + " must be a positive number");
    return value->get<double>();
}

bool get_bool(const json& object, const char* key, bool fallback) {
    const json* value = find(object, key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) refuse(std::string(key) + " must be true or false");
    return value->get<bool>();
}

void require_plain_llama(const json& config) {
    const json* architectures = find(config, "architectures");
    if (architectures == nullptr || *architectures != json::array({"LlamaForCausalLM"})) {
        refuse("architectures must be [\"LlamaForCausalLM\"], not " +
               (architectures ? architectures->dump() : std::string("absent")));
    }
    const json* activation = find(config, "hidden_act");
    if (activation != nullptr && *activation != "silu") refuse("hidden_act must be \"silu\"");
    for (const char* key : {"attention_bias", "mlp_bias"}) {
        if (get_bool(config, key, false)) refuse(std::string(key) + " is true; biases are not supported");
    }
    for (const char* key : {"quantization_config", "sliding_window"}) {
        if (find(config, key) != nullptr) refuse(std::string(key) + " is not supported");
    }
    if (get_positive(config, "partial_rotary_factor", 1.0) != 1.0) refuse("partial_rotary_factor must be 1");
    if (get_int(config, "vocab_size", 0) != kVocab) refuse("vocab_size must be 256: tokens are bytes");
}

// transformers 5 writes rope_parameters. Earlier versions have rope_theta at the top, beside rope_scaling (with "type" in the
// oldest).
double read_rope_theta(const json& config) {
    double theta = get_positive(config, "rope_theta", 10000.0);
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        const json* rope = find(config, key);
        if (rope == nullptr) continue;
        if (!rope->is_object()) refuse(std::string(key) + " must be an object");
        for (const char* type_key : {"rope_type", "type"}) {
            const json* type = find(*rope, type_key);
            if (type != nullptr && *type != "default") {
                refuse(std::string(key) + "." + type_key + " is " + type->dump() + "; only \"default\" is supported");
            }
        }
        theta = get_positive(*rope, "rope_theta", theta);
    }
    return theta;
}

// The part of n for worker `part`, cut at multiples of 16, so that two workers never write the same cache line.
struct Range {
    int begin, end;
};
Range share(int n, int part, int parts) {
    const int unit = (n + 15) / 16;
    return {std::min(n, unit * part / parts * 16), std::min(n, unit * (part + 1) / parts * 16)};
}

struct Matrix {
    const float* data;  // [out, in]
    int in, out;
};

// Columns [cols.begin, cols.end) of y [rows, out] = x [rows, in] * w^T + beta * y
void linear(bool row_by_row, const float* x, int rows, const Matrix& w, Range cols, float* y, float beta = 0.0f) {
    const int n = cols.end - cols.begin, in = w.in, out = w.out;
    if (n <= 0) return;
    const float* w_part = w.data + static_cast<std::size_t>(cols.begin) * in;
    if (rows == 1 || row_by_row) {  // a matrix product would first copy the weights into its own layout
        for (int row = 0; row < rows; ++row, x += in, y += out)
            cblas_sgemv(CblasRowMajor, CblasNoTrans, n, in, 1.0f, w_part, in, x, 1, beta, y + cols.begin, 1);
    } else {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, n, in, 1.0f, x, in, w_part, in, beta, y + cols.begin, out);
    }
}

}  // namespace

ModelConfig load_config(const std::filesystem::path& folder) {
    constexpr std::size_t kMaxConfigBytes = 1 << 20;
    const std::string text = read_file(folder / "config.json", kMaxConfigBytes);
    const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!config.is_object()) refuse("not a JSON object");
    require_plain_llama(config);

    ModelConfig c;
    c.hidden = get_int(config, "hidden_size", 0);
    c.intermediate = get_int(config, "intermediate_size", 0);
    c.layers = get_int(config, "num_hidden_layers", 0);
    c.heads = get_int(config, "num_attention_heads", 0);
    c.kv_heads = get_int(config, "num_key_value_heads", c.heads);
    c.head_dim = get_int(config, "head_dim", std::max(1, c.hidden / c.heads));
    c.max_positions = get_int(config, "max_position_embeddings", 2048);
    c.rope_theta = read_rope_theta(config);
    c.rms_norm_eps = static_cast<float>(get_positive(config, "rms_norm_eps", 1e-6));
    c.tied_head = get_bool(config, "tie_word_embeddings", false);
    if (c.heads % c.kv_heads != 0) refuse("num_attention_heads must be a multiple of num_key_value_heads");
    if (c.head_dim % 2 != 0) refuse("head_dim must be even");
    if (static_cast<int64_t>(c.heads) * c.head_dim > 1 << 24) refuse("num_attention_heads * head_dim is too large");
    return c;
}

Model::Model(const std::filesystem::path& folder, Workers& workers) : config_(load_config(folder)), workers_(workers) {
    openblas_set_num_threads(1);  // the model cuts each product among its own workers
    const TensorFolder tensors(folder);
    for (const auto& [name, tensor] : tensors.tensors()) {
        if (name.ends_with(".bias")) throw std::runtime_error("tensor '" + name + "': biases are not supported");
    }
    const auto hidden = static_cast<uint64_t>(config_.hidden);
    embedding_ = tensors.read("model.embed_tokens.weight", {kVocab, hidden});
    final_norm_ = tensors.read("model.norm.weight", {hidden});
    if (!config_.tied_head) head_ = tensors.read("lm_head.weight", {kVocab, hidden});
    for (int i = 0; i < config_.layers; ++i) load_layer(tensors, i);
}

void Model::load_layer(const TensorFolder& tensors, int index) {
    const auto hidden = static_cast<uint64_t>(config_.hidden);
    const auto inner = static_cast<uint64_t>(config_.intermediate);
    const auto q_width = static_cast<uint64_t>(config_.heads) * config_.head_dim;
    const auto kv_width = static_cast<uint64_t>(config_.kv_heads) * config_.head_dim;
    const std::string prefix = "model.layers." + std::to_string(index) + ".";
    const auto read = [&](const char* name, const std::vector<uint64_t>& shape) {
        return tensors.read(prefix + name + ".weight", shape);
    };
    Layer layer;
    layer.input_norm = read("input_layernorm", {hidden});
    layer.q = read("self_attn.q_proj", {q_width, hidden});
    layer.k = read("self_attn.k_proj", {kv_width, hidden});
    layer.v = read("self_attn.v_proj", {kv_width, hidden});
    layer.o = read("self_attn.o_proj", {hidden, q_width});
    layer.post_norm = read("post_attention_layernorm", {hidden});
    layer.gate = read("mlp.gate_proj", {inner, hidden});
    layer.up = read("mlp.up_proj", {inner, hidden});
    layer.down = read("mlp.down_proj", {hidden, inner});
    layers_.push_back(std::move(layer));
}

AttentionShape Model::attention_shape(int max_tokens) const {
    return {config_.layers, config_.heads, config_.kv_heads, config_.head_dim, max_tokens, config_.rope_theta};
}

void Model::resize_buffers(std::size_t rows) {
    x_.resize(rows * config_.hidden);
    normed_.resize(rows * config_.hidden);
    q_.resize(rows * config_.heads * config_.head_dim);
    attended_.resize(q_.size());
    k_.resize(rows * config_.kv_heads * config_.head_dim);
    v_.resize(k_.size());
    gate_.resize(rows * config_.intermediate);
    up_.resize(gate_.size());
    cos_.resize(rows * config_.head_dim / 2);
    sin_.resize(cos_.size());
}

std::span<const float> Model::forward(std::span<const uint8_t> bytes, int first_position, AttentionBackend& attention) {
    positions_.resize(bytes.size());
    std::iota(positions_.begin(), positions_.end(), first_position);
    return forward(bytes, positions_, attention);
}

std::span<const float> Model::forward(std::span<const uint8_t> bytes, std::span<const int> positions,
                                      AttentionBackend& attention) {
    const int rows = static_cast<int>(bytes.size());
    resize_buffers(bytes.size());
    for (int i = 0; i < rows; ++i) {
        std::copy_n(embedding_.data() + static_cast<std::size_t>(bytes[i]) * config_.hidden, config_.hidden,
                    x_.data() + static_cast<std::size_t>(i) * config_.hidden);
    }
    make_rotation(positions);
    attention.begin(rows);
    for (int i = 0; i < config_.layers; ++i) {
        attention_block(layers_[i], i, rows, attention);
        mlp_block(layers_[i], rows);
    }
    attention.end();
    normalise(final_norm_, rows);
    return normed_;
}

void Model::attention_block(const Layer& layer, int index, int rows, AttentionBackend& attention) {
    const int hidden = config_.hidden;
    const int q_width = config_.heads * config_.head_dim;
    const int kv_width = config_.kv_heads * config_.head_dim;
    normalise(layer.input_norm, rows);
    workers_.run([&](int part) {
        const Range q_cols = share(q_width, part, workers_.count());
        const Range kv_cols = share(kv_width, part, workers_.count());
        linear(row_by_row_, normed_.data(), rows, {layer.q.data(), hidden, q_width}, q_cols, q_.data());
        linear(row_by_row_, normed_.data(), rows, {layer.k.data(), hidden, kv_width}, kv_cols, k_.data());
        linear(row_by_row_, normed_.data(), rows, {layer.v.data(), hidden, kv_width}, kv_cols, v_.data());
    });
    rotate(q_.data(), rows, config_.heads);
    rotate(k_.data(), rows, config_.kv_heads);
    attention.attend(index, q_.data(), k_.data(), v_.data(), attended_.data());
    workers_.run([&](int part) {
        const Range cols = share(hidden, part, workers_.count());
        linear(row_by_row_, attended_.data(), rows, {layer.o.data(), q_width, hidden}, cols, x_.data(), /*beta=*/1.0f);
    });
}

void Model::mlp_block(const Layer& layer, int rows) {
    const int hidden = config_.hidden;
    const int inner = config_.intermediate;
    normalise(layer.post_norm, rows);
    workers_.run([&](int part) {
        const Range cols = share(inner, part, workers_.count());
        linear(row_by_row_, normed_.data(), rows, {layer.gate.data(), hidden, inner}, cols, gate_.data());
        linear(row_by_row_, normed_.data(), rows, {layer.up.data(), hidden, inner}, cols, up_.data());
        for (std::size_t i = 0; i < static_cast<std::size_t>(rows); ++i) {
            const std::size_t at = i * inner + cols.begin;
            silu_mul(gate_.data() + at, up_.data() + at, cols.end - cols.begin);
        }
    });
    workers_.run([&](int part) {
        const Range cols = share(hidden, part, workers_.count());
        linear(row_by_row_, gate_.data(), rows, {layer.down.data(), inner, hidden}, cols, x_.data(), /*beta=*/1.0f);
    });
}

void Model::make_rotation(std::span<const int> positions) {
    const int half = config_.head_dim / 2, rows = static_cast<int>(positions.size());
    for (int i = 0; i < half; ++i) {
        const double frequency = std::pow(config_.rope_theta, -static_cast<double>(i) / half);
        for (int row = 0; row < rows; ++row) {
            const double angle = positions[row] * frequency;
            cos_[static_cast<std::size_t>(row) * half + i] = static_cast<float>(std::cos(angle));
            sin_[static_cast<std::size_t>(row) * half + i] = static_cast<float>(std::sin(angle));
        }
    }
}

// Elements i and i + head_dim / 2 of a head turn together.
void Model::rotate(float* x, int rows, int heads) const {
    const int half = config_.head_dim / 2;
    for (int row = 0; row < rows; ++row) {
        const float* cos = cos_.data() + static_cast<std::size_t>(row) * half;
        const float* sin = sin_.data() + static_cast<std::size_t>(row) * half;
        for (int head = 0; head < heads; ++head, x += 2 * half) {
            for (int i = 0; i < half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
        }
    }
}

void Model::normalise(const std::vector<float>& weight, int rows) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    for (std::size_t at = 0; at < rows * hidden; at += hidden) {
        rms_norm(x_.data() + at, weight.data(), hidden, config_.rms_norm_eps, normed_.data() + at);
    }
}

void Model::logits(std::span<const float> hidden, float* out) {
    const int rows = static_cast<int>(hidden.size()) / config_.hidden;
    const std::vector<float>& head = config_.tied_head ? embedding_ : head_;
    workers_.run([&](int part) {
        const Range cols = share(kVocab, part, workers_.count());
        linear(row_by_row_, hidden.data(), rows, {head.data(), config_.hidden, kVocab}, cols, out);
    });
}

}  // namespace tinylm
