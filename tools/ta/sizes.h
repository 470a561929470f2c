// ta map: how much memory a model's cache takes, and how many tokens fit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/ta/model_config.h"
#include "tools/ta/table.h"

namespace ta::tools {

const std::vector<ModelShape>& known_models();
// The shape of a known model, or of the Hugging Face config.json at this path. Throws WrongInput.
ModelShape model_shape(const std::string& name_or_path);

struct MapOptions {
    uint64_t budget_bytes = 16'000'000'000;  // for all blocks together
    uint64_t sequences = 1;                  // of equal length
    std::vector<int> bits;                   // per head; 42: half of the heads 4, half 2; 84: K 8, V 4. Empty: 8, 4, 42, 2
};

// Bytes of a full block of 64 tokens; `bits`: see MapOptions. Throws WrongInput if the library accepts no such pool.
uint64_t full_block_bytes(const ModelShape& model, int bits);
Json map_sizes(const ModelShape& model, const MapOptions& options);
void print_map(const Json& map);

}  // namespace ta::tools
