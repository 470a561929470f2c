// A Llama-architecture language model over bytes, in fp32 on the CPU. An AttentionBackend does the attention.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "attention.h"

namespace tinylm {

class TensorFolder;

constexpr int kVocab = 256;  // a token is a byte

struct ModelConfig {
    int hidden = 0;
    int intermediate = 0;
    int layers = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int max_positions = 0;
    double rope_theta = 0;
    float rms_norm_eps = 0;
    bool tied_head = false;
};

// Reads config.json; refuses whatever this program would compute wrongly.
ModelConfig load_config(const std::filesystem::path& folder);

class Model {
  public:
    Model(const std::filesystem::path& folder, Workers& workers);

    // From now on a row's results do not depend on the number of rows, which matrix products do not promise. Slower.
    void go_row_by_row() { row_by_row_ = true; }

    const ModelConfig& config() const { return config_; }
    AttentionShape attention_shape(int max_tokens) const;

    // Feeds bytes at positions first_position, ... and returns the final normalised hidden states [bytes, hidden], valid until
    // the next call.
    std::span<const float> forward(std::span<const uint8_t> bytes, int first_position, AttentionBackend& attention);
    // The same with a position for each byte, for bytes of several sequences or of a token tree.
    std::span<const float> forward(std::span<const uint8_t> bytes, std::span<const int> positions, AttentionBackend& attention);

    // logits [rows, kVocab] of hidden states [rows, hidden]
    void logits(std::span<const float> hidden, float* out);

  private:
    struct Layer {  // matrices [out, in]
        std::vector<float> input_norm, q, k, v, o, post_norm, gate, up, down;
    };
    void load_layer(const TensorFolder& tensors, int index);
    void resize_buffers(std::size_t rows);
    void attention_block(const Layer& layer, int index, int rows, AttentionBackend& attention);
    void mlp_block(const Layer& layer, int rows);
    void make_rotation(std::span<const int> positions);
    void rotate(float* x, int rows, int heads) const;
    void normalise(const std::vector<float>& weight, int rows);

    ModelConfig config_;
    Workers& workers_;
    bool row_by_row_ = false;
    std::vector<float> embedding_, final_norm_, head_;
    std::vector<Layer> layers_;
    std::vector<float> x_, normed_, q_, k_, v_, attended_, gate_, up_;  // one chunk: [rows, width]
    std::vector<float> cos_, sin_;                                      // [rows, head_dim / 2]
    std::vector<int> positions_;
};

}  // namespace tinylm
