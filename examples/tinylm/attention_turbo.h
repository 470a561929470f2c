// Attention by the TurboAttention library, through its C ABI only, and the choice of bits for each head.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "attention.h"

namespace tinylm {

class Model;

// Bits of K and V, 8, 4 or 2, for each [layer, kv head]. Empty: the same bits for all.
struct HeadMap {
    std::vector<uint8_t> k_bits, v_bits;
    bool empty() const { return k_bits.empty(); }
};

struct TurboOptions {
    std::string profile = "accurate";  // or "paper"
    int bits = 4;                      // 8, 4 or 2; ignored if head_map is given
    HeadMap head_map;
    int q_bits = 0;  // of queries against K of 8 bits in decode: 8 or 15; 0: as the profile says
    int threads = 1;
    bool gpu = false;              // attention on the GPU, the rest of the model on the CPU
    int device_percent = 0;        // share of the context in the device tier, the rest is on the host and on disk; 0: all of it
    int keep_percent = 0;          // share of the context that is kept, the rest is dropped; 0: all of it
    std::string eviction = "lru";  // what is dropped first: "lru" or "attention"
    int half_life = 0;             // of attention scores, in steps; 0: the default
};

std::unique_ptr<AttentionBackend> make_turbo_attention(const AttentionShape& shape, const TurboOptions& options);

// Runs the text through the model with exact attention and shows every K and V to a ta_calibrator. In each layer, the low_heads
// heads of lowest priority get 2 bits, the others 4.
HeadMap calibrate_head_map(Model& model, Workers& workers, std::span<const uint8_t> text, int low_heads);

// What K and V cost with 8, 4 and 2 bits: [layers, kv heads, 3]; infinity: the head must not have these bits.
struct HeadCosts {
    std::vector<float> k, v;
};
// For each of the costs, the map of least cost by ta_calibrator, chosen over all layers at once. Its size is that of a map with
// low_heads heads of 2 bits in each layer and 4 bits in the others.
std::vector<HeadMap> choose_head_maps(const AttentionShape& shape, std::span<const HeadCosts> costs, int low_heads);

// The same bits in every head.
HeadMap same_head_map(const AttentionShape& shape, int k_bits, int v_bits);

// Swaps 2 and 4 bits.
HeadMap complement_of(HeadMap map);

// A random map of the same size that depends on no data; seed_text is a whole number.
HeadMap random_head_map(const AttentionShape& shape, int low_heads, const std::string& seed_text);

// {"k_bits": [[4, 2], ...], "v_bits": [[2, 4], ...]}, one row for each layer.
HeadMap read_head_map(const std::filesystem::path& path, const AttentionShape& shape);
std::string head_map_json(const HeadMap& map, const AttentionShape& shape);

}  // namespace tinylm
