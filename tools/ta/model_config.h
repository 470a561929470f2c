// The shape of a model's cache, from its Hugging Face config.json.
#pragma once

#include <cstdint>
#include <string>

namespace ta::tools {

struct ModelShape {
    std::string name;
    uint32_t layers = 0, kv_heads = 0, head_dim = 0;  // layers: those that keep K and V of their own
    uint32_t window_layers = 0;                       // of `layers`: those that see only the last `window` tokens
    uint32_t window = 0;
    uint32_t model_layers = 0;  // 0: as many as `layers`
    std::string note = {};      // what the sizes leave out, and what they assume
};

// Throws WrongInput, with a text to print after the file's name.
ModelShape read_model_config(const std::string& text);

}  // namespace ta::tools
