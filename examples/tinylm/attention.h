// The model's interface to attention: keep the keys and values of one sequence and attend over them.
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
    // The tiers of the blocks of 64 tokens, and the bytes that were moved to get them there: zero unless there are tiers.
    uint64_t device_blocks = 0, host_blocks = 0, disk_blocks = 0;
    uint64_t evicted_bytes = 0, disk_bytes = 0, returned_bytes = 0;
};

// One sequence. A step is begin(n), then attend() once per layer in order, then end(). Failures are exceptions.
class AttentionBackend {
  public:
    virtual ~AttentionBackend() = default;

    virtual void reset() = 0;  // empties the sequence
    virtual void begin(int n_new) = 0;
    //   q    [n_new, heads, head_dim]     after rotary embedding, row-major
    //   k, v [n_new, kv_heads, head_dim]  k after rotary embedding
    //   out  [n_new, heads, head_dim]     causal: row i sees everything before this step and rows 0..i of it
    virtual void attend(int layer, const float* q, const float* k, const float* v, float* out) = 0;
    virtual void end() = 0;
    // Takes n tokens out, those that are right behind the first `first`, and closes the gap: tokens before it are n positions nearer to
    // those behind it. Positions go on. Multiples of 64; `first` is the same in all calls.
    virtual void shift([[maybe_unused]] int first, [[maybe_unused]] int n) {
        throw std::logic_error("this attention takes nothing out");
    }
    // Nothing comes for a while: the cache may go where memory is cheap.
    virtual void rest() {}
    virtual KvStats stats() const = 0;  // of the sequence as it stands: ask while it holds tokens
};

// Plain fp32 attention over an fp32 cache: the reference.
std::unique_ptr<AttentionBackend> make_exact_attention(const AttentionShape& shape, Workers& workers);

}  // namespace tinylm
