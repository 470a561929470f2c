// Attention by the TurboAttention library, through its C ABI alone, and the choice of a bit width for each head.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "attention.h"

namespace tinylm {

class Model;

// Bits of K and of V for each [layer, kv head], 8, 4 or 2. Empty: the same bits everywhere.
struct HeadMap {
    std::vector<uint8_t> k_bits, v_bits;
    bool empty() const { return k_bits.empty(); }
};

struct TurboOptions {
    std::string profile = "accurate";  // or "paper"
    int bits = 4;                      // 8, 4 or 2; ignored where head_map is given
    HeadMap head_map;
    int threads = 1;
    bool gpu = false;              // attention there, the rest of the model here
    int device_percent = 0;        // of the context that the device tier holds, the rest on the host and on disk; 0: all of it
    int keep_percent = 0;          // of the context that is kept, the rest is dropped; 0: all of it
    std::string eviction = "lru";  // what is dropped first; or "attention"
    int half_life = 0;             // of attention, in steps; 0: the default
};

std::unique_ptr<AttentionBackend> make_turbo_attention(const AttentionShape& shape, const TurboOptions& options);

// Runs text through the model with exact attention and shows every K and V to a ta_calibrator: the low_heads heads of
// each layer with the lowest priority get 2 bits, the others 4.
HeadMap calibrate_head_map(Model& model, Workers& workers, std::span<const uint8_t> text, int low_heads);

// The costs of K and V with 8, 4 and 2 bits, [layers, kv heads, 3]; infinity: never so many.
struct HeadCosts {
    std::vector<float> k, v;
};
// For each of the costs the map of least cost by ta_calibrator, over all layers at once, of the size of a map with low_heads heads of 2
// bits in each layer and 4 in the others.
std::vector<HeadMap> choose_head_maps(const AttentionShape& shape, std::span<const HeadCosts> costs, int low_heads);

// The same bits in every head.
HeadMap same_head_map(const AttentionShape& shape, int k_bits, int v_bits);

// 2 bits for 4 and 4 for 2.
HeadMap complement_of(HeadMap map);

// A choice of the same size without looking at any data; seed_text is a whole number.
HeadMap random_head_map(const AttentionShape& shape, int low_heads, const std::string& seed_text);

// {"k_bits": [[4, 2], ...], "v_bits": [[2, 4], ...]}, one row for each layer.
HeadMap read_head_map(const std::filesystem::path& path, const AttentionShape& shape);
std::string head_map_json(const HeadMap& map, const AttentionShape& shape);

}  // namespace tinylm
