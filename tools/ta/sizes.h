// ta map: how much memory a model's cache takes, and how many tokens fit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/ta/table.h"

namespace ta::tools {

struct ModelShape {
    std::string name;
    uint32_t layers = 0, kv_heads = 0, head_dim = 0;
    uint32_t window_layers = 0;  // of the layers: those that see the last `window` tokens alone
    uint32_t window = 0;
    std::string note = {};  // what the sizes leave out
};

const std::vector<ModelShape>& known_models();
// A known name, or the path of a Hugging Face config.json. Throws WrongInput.
ModelShape model_shape(const std::string& name_or_path);

struct MapOptions {
    uint64_t budget_bytes = 16'000'000'000;  // for all blocks
    uint64_t sequences = 1;                  // of equal length
    std::vector<int> bits;                   // of a head; 42: half of the heads 4, half 2; 84: K 8, V 4. Empty: 8, 4, 42, 2
};

// Of a full block of 64 tokens; `bits` as in MapOptions. Throws WrongInput where the library takes no such pool.
uint64_t full_block_bytes(const ModelShape& model, int bits);
Json map_sizes(const ModelShape& model, const MapOptions& options);
void print_map(const Json& map);

}  // namespace ta::tools
