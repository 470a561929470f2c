// Shared by the root's part of a call in rounds (scatter_root.cpp) and the others' (scatter_others.cpp).
#pragma once

#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "src/attend/dense/scatter.h"
#include "src/core/checked.h"

namespace ta {
namespace scatter {

using share::Clock;
using share::Rounds;
using Note = Rounds::Note;
using Progress = Rounds::Progress;

inline constexpr uint32_t kSlots = Rounds::kSlots;
inline constexpr uint64_t kDefaultRoom = uint64_t{1} << 30;
inline constexpr size_t kAlignment = 256;

inline int64_t nanoseconds_since(share::Time t) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - t).count();
}

// Adds the time of a scope to a sum.
class Timed {
  public:
    explicit Timed(int64_t& sum) : sum_(sum) {}
    ~Timed() { sum_ += nanoseconds_since(started_); }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;

  private:
    int64_t& sum_;
    const share::Time started_ = Clock::now();
};

// Properties that all heads of a call share.
struct Shape {
    int64_t q_tokens, k_tokens;
    int32_t head_dim, group;
    DType q, k, v, out;
    bool has_lse;
    uint32_t head_major;  // a bit each for Q, K, V and O: in a round a head's tokens are contiguous, as at the root

    static Shape of(const DenseCall& c) {
        uint32_t head_major = 0, bit = 1;
        for (const TensorView* t : {&c.q, &c.k, &c.v, &c.out}) {
            if (t->heads > 1 && t->stride_token == t->head_dim) head_major |= bit;
            bit *= 2;
        }
        return {c.q.tokens,
                c.k.tokens,
                int32_t(c.k.head_dim),
                int32_t(c.q.heads / c.k.heads),
                c.q.dtype,
                c.k.dtype,
                c.v.dtype,
                c.out.dtype,
                c.lse != nullptr,
                head_major};
    }
};

// Offsets of a round's tensors in its slot. The sizes are for `heads` kv heads.
struct RoundLayout {
    uint64_t q = 0, k = 0, v = 0, inputs = 0;  // Q, K, V and the end of V
    uint64_t out = 0, lse = 0, results = 0;    // O, LSE and its end

    static Result<RoundLayout> of(const Shape& s, int64_t heads) {
        RoundLayout l;
        bool fits = true;
        const auto add = [&](uint64_t at, int64_t tokens, int64_t n, int64_t d, size_t element) {
            uint64_t bytes = element;
            for (const int64_t factor : {tokens, n, d}) fits = fits && !__builtin_mul_overflow(bytes, uint64_t(factor), &bytes);
            fits = fits && bytes < uint64_t{1} << 60;
            return fits ? round_up(at + bytes, kAlignment) : 0;
        };
        l.k = add(l.q, s.q_tokens, heads * s.group, s.head_dim, dtype_bytes(s.q));
        l.v = add(l.k, s.k_tokens, heads, s.head_dim, dtype_bytes(s.k));
        l.inputs = add(l.v, s.k_tokens, heads, s.head_dim, dtype_bytes(s.v));
        l.lse = add(l.out, s.q_tokens, heads * s.group, s.head_dim, dtype_bytes(s.out));
        l.results = add(l.lse, s.q_tokens, heads * s.group, s.has_lse, sizeof(float));
        if (!fits) return fail(TA_E_LIMIT, "a round of %lld kv heads has more than 2^60 bytes", (long long)heads).argument(8);
        return l;
    }
    // Bytes of two rounds on the rank that attends.
    uint64_t room() const { return kSlots * (inputs + results); }
};

inline TensorView packed(uint8_t* data, DType dtype, int64_t tokens, int64_t heads, int64_t d, bool head_major) {
    if (head_major) return {data, dtype, tokens, heads, d, d, tokens * d};
    return {data, dtype, tokens, heads, d, heads * d, d};
}

// Heads [first, first + n) of a tensor.
inline TensorView heads_of(TensorView t, int64_t first, int64_t n) {
    t.data = t.at(0, first);
    t.heads = n;
    return t;
}

// A view of LSE as a tensor of single floats.
inline TensorView lse_view(float* lse, int64_t tokens, int64_t heads) {
    return {reinterpret_cast<uint8_t*>(lse), DType::kF32, tokens, heads, 1, heads, 1};
}

// The root's description of the call for another rank. It is followed by the batch's offsets of Q, then of K, and by slopes and
// sinks of the rank's heads.
struct CallHeader {
    int64_t q_tokens, k_tokens, window;
    int32_t head_dim, group, kv_heads, heads_per_round;
    int32_t q_type, k_type, v_type, out_type;
    int32_t variant, v_granularity, group_size, saturate, mask, exp, p, has_lse, has_slopes, has_sinks;
    float scale, softcap;
    uint64_t offsets;        // batch + 1
    uint64_t result_window;  // the root's window for results
    uint32_t ways;           // ways by which the root may write
    uint32_t head_major;     // as Shape's
};

// The kind of device that a rank computes on: equal kinds give equal bits.
inline int32_t kind_of(const Context& context) {
    return context.device() ? context.device()->compute_capability() : 0;
}

// How bytes go between two ranks; the same in both directions.
enum Way : uint32_t {
    kHostWindows = 0,  // into windows in host memory
    kGpuWindows = 1,   // into windows on GPUs
    kGpuMemory = 2,    // into memory that the other GPU has mapped
};

// The ways by which this rank may write, as a sum. Asking whether a GPU is reached makes it reachable from then on. Otherwise
// bytes for a window would go through host memory.
inline uint32_t ways_to(share::Transport& transport, uint32_t peer) {
    Result<bool> reaches = transport.reaches(peer);
    return uint32_t(transport.may_write_gpu(peer)) * kGpuWindows + uint32_t(reaches.ok() && reaches.value()) * kGpuMemory;
}

inline Way choose(uint32_t ways) {
    return ways & kGpuWindows ? kGpuWindows : ways & kGpuMemory ? kGpuMemory : kHostWindows;
}

inline uint32_t rounds_of(uint32_t heads, uint32_t per_round) {
    return heads == 0 ? 0 : (heads + per_round - 1) / per_round;
}

inline share::WindowMemory window_of(ScatterMemory& memory, uint64_t bytes, bool on_gpu) {
    std::vector<std::span<uint8_t>> parts;
    parts.emplace_back(memory.data(), size_t(bytes));
    return share::WindowMemory(std::move(parts), on_gpu);
}

}  // namespace scatter

struct DenseScatter::Share {
    uint32_t first = 0, heads = 0, per_round = 1;  // kv heads

    uint32_t rounds() const { return scatter::rounds_of(heads, per_round); }
    uint32_t first_of(uint32_t round) const { return first + round * per_round; }
    uint32_t heads_of(uint32_t round) const { return std::min(per_round, heads - round * per_round); }
};

struct DenseScatter::Peer {
    uint32_t rank = 0;
    scatter::Way way = scatter::kHostWindows;
    uint64_t window = 0;
    std::shared_ptr<uint8_t> memory;  // with kGpuMemory

    bool on_gpu() const { return way != scatter::kHostWindows; }
};

// Ends the rank's call at the end of a scope.
class DenseScatter::InCall {
  public:
    explicit InCall(share::Rounds& rounds) : rounds_(rounds) {}
    ~InCall() { rounds_.end(); }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;

  private:
    share::Rounds& rounds_;
};

template <class Part>
Status DenseScatter::guarded(Part&& part) {
    Status s;
    try {
        s = part();
    } catch (const std::bad_alloc&) {
        s = fail(TA_E_MEMORY, "no memory for a call in rounds");
    }
    if (s.ok()) return s;
    if (s.detail() && s.detail()->rank < 0) s = std::move(s).rank(int32_t(rank_));
    rounds_.give_up(s);
    return s;
}

}  // namespace ta
