// The model's interface to attention: it keeps the keys and values of one sequence and attends to them.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace tinylm {

class Workers;

struct AttentionShape {
    int layers = 0;
    int heads = 0;
    int kv_heads = 0;
    int head_dim = 0;
    int max_tokens = 0;     // longest sequence that will be fed
    double rope_theta = 0;  // of the rotary embedding: channel i of a head turns with channel i + head_dim / 2
};

struct KvStats {
    std::string description;
    uint64_t bytes = 0;  // K and V of all layers, with scales and everything else that is stored for these tokens
    uint64_t tokens = 0;
    // How many blocks of 64 tokens are in each tier, and the bytes that were moved to get them there; zero without tiers.
    uint64_t device_blocks = 0, host_blocks = 0, disk_blocks = 0;
    uint64_t evicted_bytes = 0, disk_bytes = 0, returned_bytes = 0;
};

// One sequence. A step is begin(n), then attend() once per layer in order, then end(). Failures are exceptions.
class AttentionBackend {
  public:
    virtual ~AttentionBackend() = default;

    virtual void reset() = 0;  // makes the sequence empty
    virtual void begin(int n_new) = 0;
    //   q    [n_new, heads, head_dim]     after rotary embedding, row-major
    //   k, v [n_new, kv_heads, head_dim]  k after rotary embedding
    //   out  [n_new, heads, head_dim]     causal: row i sees everything before this step and rows 0..i of it
    virtual void attend(int layer, const float* q, const float* k, const float* v, float* out) = 0;
    virtual void end() = 0;
    // Removes the n tokens behind the first `first` ones and closes the gap: the first tokens move n positions closer to the
    // rest. Later tokens continue with the next positions. Both are multiples of 64, and `first` is the same in all calls.
    virtual void shift([[maybe_unused]] int first, [[maybe_unused]] int n) {
        throw std::logic_error("this attention takes nothing out");
    }
    // Tells that no step comes for a while, so the cache may move to cheaper memory.
    virtual void rest() {}
    virtual KvStats stats() const = 0;  // of the current sequence: ask while it holds tokens
};

// Plain fp32 attention over an fp32 cache: the reference.
std::unique_ptr<AttentionBackend> make_exact_attention(const AttentionShape& shape, Workers& workers);

}  // namespace tinylm
