// Random pages of one kv head, written byte by byte in the stored format, and an attention problem over them. Shared
// by the tests and benchmarks of kernels/cpu. Everything that a kernel must not read as a value is poisoned: slots
// beyond n_keys, padding, codes of channels that do not exist. Every piece is its own allocation, so that a sanitizer
// sees reads beyond it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "kernels/cpu/attend.h"
#include "kernels/format/layout.h"
#include "kernels/format/turning.h"

namespace ta::cpu::testing {

// std::vector's storage at the alignment that AttendTask asks for.
template <class T>
struct AlignedAllocator {
    using value_type = T;
    AlignedAllocator() = default;
    template <class U>
    AlignedAllocator(const AlignedAllocator<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(kPieceAlignment))); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(kPieceAlignment)); }
    bool operator==(const AlignedAllocator&) const { return true; }
};
template <class T>
using AlignedVector = std::vector<T, AlignedAllocator<T>>;

class Random {
  public:
    explicit Random(uint64_t seed) : engine_(seed * 0x9E3779B97F4A7C15u + 1) {}
    int integer(int first, int last) { return std::uniform_int_distribution<int>(first, last)(engine_); }
    float normal() { return std::normal_distribution<float>()(engine_); }
    float lognormal(float median, float sigma) { return median * std::exp(sigma * normal()); }
    bool chance(int percent) { return integer(0, 99) < percent; }
    uint64_t bits() { return engine_(); }

  private:
    std::mt19937_64 engine_;
};

inline void store_f32(uint8_t* p, float x) {
    std::memcpy(p, &x, sizeof x);
}
inline float load_f32(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// How the numbers of a page are drawn. kLargest drives every integer to the end of its range, where 16-bit sums would
// overflow.
enum class PageValuesKind { kRandom, kLargest, kSmallest };

struct Piece {
    AlignedVector<uint8_t> bytes;
    PageKind kind;
};

// K or V at 8 bits: codes and scales of `valid` tokens; the other slots are poisoned.
template <class Place>
void draw_bytes(uint8_t* codes, uint8_t* scales, int d, int valid, Place place, float sigma, int percent_0,
                PageValuesKind values, Random& random) {
    const bool no_values = random.chance(percent_0 / 2);
    for (int j = 0; j < kPageTokens; ++j) {
        const bool zero = no_values || random.chance(percent_0);
        store_f32(scales + 4 * j, j >= valid ? std::numeric_limits<float>::quiet_NaN()
                                  : zero     ? 0.0f
                                             : random.lognormal(0.02f, sigma));
        for (int c = 0; c < d; ++c) {
            const int value = values == PageValuesKind::kLargest    ? 127
                              : values == PageValuesKind::kSmallest ? -127
                                                                    : random.integer(-127, 127);
            codes[place(d, 8, j, c).byte] = j < valid ? uint8_t(value) : random.chance(50) ? 0xFF : 0x80;
        }
    }
}

// At 4 or 2 bits: codes of `stored` channels, with those that do not exist, and steps and zero points.
inline void draw_channels(uint8_t* codes, uint8_t* steps, int d, int stored, int bits, PageValuesKind values, Random& random) {
    for (int i = 0; i < kPageTokens * stored * bits / 8; ++i)
        codes[i] = values == PageValuesKind::kLargest ? 0xFF : values == PageValuesKind::kSmallest ? 0 : uint8_t(random.bits());
    const int levels = (1 << bits) - 1, max_step = bits == 4 ? 16 : 80;
    for (int c = 0; c < d; ++c) {
        const int step = values != PageValuesKind::kRandom ? max_step : random.integer(1, max_step);
        const int highest = 127 - levels * step;
        const int zero = values == PageValuesKind::kLargest    ? highest
                         : values == PageValuesKind::kSmallest ? -128
                                                               : random.integer(-128, highest);
        const int fraction = bits == 4 ? random.integer(0, 7) : 4 * random.integer(0, 1);
        steps[c] = step_byte(step, fraction, bits);
        steps[d + c] = uint8_t(zero);
    }
}

// Poisons the parts that a piece of these bits does not have.
inline Piece make_channel_piece(int d, int k_bits, int v_bits, PageValuesKind values, Random& random) {
    const ChannelLayout layout(d, k_bits, v_bits);
    Piece piece{AlignedVector<uint8_t>(layout.bytes(), 0xFF), PageKind::kChannel};
    uint8_t* p = piece.bytes.data();
    if (k_bits == 8) {
        draw_bytes(p, p + layout.k_parameters(), d, kPageTokens, k_place, 0.7f, 0, values, random);
    } else {
        draw_channels(p, p + layout.k_parameters(), d, d, k_bits, values, random);
        store_f32(p + layout.k_scale(), random.lognormal(0.02f, 0.5f));
    }
    if (v_bits == 8) {
        draw_bytes(p + layout.v_codes(), p + layout.v_parameters(), d, kPageTokens, v_place, 1.0f, 5, values, random);
    } else {
        draw_channels(p + layout.v_codes(), p + layout.v_parameters(), d, v_stored_channels(d, v_bits), v_bits, values, random);
        for (int j = 0; j < kPageTokens / 2; ++j)
            p[layout.v_exponents() + j] = values == PageValuesKind::kRandom ? uint8_t(random.bits()) : 0;
        store_f32(p + layout.v_scale(), random.chance(3) ? 0.0f : random.lognormal(0.02f, 0.5f));
    }
    return piece;
}

// Slots from `valid` on are poisoned.
inline Piece make_token_piece(int d, int valid, PageValuesKind values, Random& random) {
    const TokenLayout layout(d);
    Piece piece{AlignedVector<uint8_t>(layout.bytes(), 0xFF), PageKind::kToken};
    uint8_t* p = piece.bytes.data();
    draw_bytes(p + layout.k_codes(), p + layout.k_scale(), d, valid, k_place, 0.7f, 0, values, random);
    draw_bytes(p + layout.v_codes(), p + layout.v_scale(), d, valid, v_place, 1.0f, 5, values, random);
    return piece;
}

// Up to 8 turning pairs for a page that has none yet. Their scores are a few units for queries of about 1.
inline void give_turning(Piece& piece, int d, int k_bits, int v_bits, Random& random) {
    TurningPairs pairs;
    for (int n = random.integer(0, kTurningPairs); n-- > 0;) {
        pairs.code[n] = pack_turning({random.integer(0, d - 1), random.integer(0, d - 1), uint32_t(random.bits()),
                                      uint32_t(random.bits()), random.lognormal(1.0f, 1.0f)});
    }
    const bool token = piece.kind == PageKind::kToken;
    const ChannelLayout channel(d, k_bits, v_bits);
    if (!token && k_bits != 8) {
        std::memcpy(piece.bytes.data() + channel.k_turning(), pairs.code, kTurningBytes);
        return;
    }
    const size_t scales = token ? TokenLayout(d).k_scale() : channel.k_parameters();
    for (int t = 0; t < kPageTokens; ++t) piece.bytes[scales + size_t(t) * 4] = pairs.byte(t);
}

// Which pages a sequence is made of.
enum class PageMix { kChannel, kToken, kSinkChannelOpen, kRandom };

struct ProblemSpec {
    int head_dim = 128, k_bits = 4, v_bits = 4;
    int64_t n_keys = 129;
    int64_t page_begin = 0;
    int rows = 4, group = 4;
    PageMix mix = PageMix::kSinkChannelOpen;
    PageValuesKind values = PageValuesKind::kRandom;
    ExpMode exp = ExpMode::kPoly;
    int p_levels = 65535;
    bool p_running = false;
    bool softcap = false, alibi = false, bias = false, v_float = false, turning = false;
    bool rest = false;          // of queries; at most 16 rows
    int64_t window = 0;         // keys that a row sees at most; 0: all up to its own position
    bool causal = true;         // rows / group query tokens at the end of the sequence
    int64_t farther = 0;        // from the keys than the end of the sequence: the rows' positions
    int hidden_percent = 0;     // rows that see nothing
    int gone_percent = 0;       // pages that are not there
    bool continued = false;     // o, m, l hold an earlier partial result
    float logit_spread = 4.0f;  // standard deviation of the logits in log2 units, about
    uint64_t seed = 1;
};

// The accumulators of a task, or a copy of them.
struct State {
    AlignedVector<float> o;
    std::vector<float> m, l;
    std::vector<float> page_sums = {};  // what each page added
};

// One task with everything that it points at.
class Problem {
  public:
    explicit Problem(const ProblemSpec& spec) : spec_(spec) {
        Random random(spec.seed);
        make_pages(random);
        make_rows(random);
        make_state(random);
    }
    Problem(const Problem&) = delete;

    const ProblemSpec& spec() const { return spec_; }
    const State& start() const { return start_; }
    const Piece& piece(int64_t page) const { return pieces_[size_t(page)]; }
    float v_at(int64_t key, int channel) const { return v_float_[size_t(key * v_stride() + channel)]; }

    // A task that works on `state`, which must live as long.
    AttendTask task(State& state, AlignedVector<uint8_t>& workspace) const {
        workspace.assign(workspace_bytes(spec_.head_dim, spec_.rows), 0xA5);
        AttendTask t{};
        t.head_dim = spec_.head_dim;
        t.k_bits = spec_.k_bits;
        t.v_bits = spec_.v_bits;
        t.pages = refs_.data();
        t.page_begin = spec_.page_begin;
        t.page_end = int64_t(refs_.size());
        t.n_keys = spec_.n_keys;
        t.rows = spec_.rows;
        t.q = q_.data();
        t.q_rest = spec_.rest ? q_rest_.data() : nullptr;
        t.q_scale = q_scale_.data();
        t.q_float = spec_.turning ? q_float_.data() : nullptr;
        t.key_begin = key_begin_.data();
        t.key_end = key_end_.data();
        t.position = spec_.alibi ? position_.data() : nullptr;
        t.slope = spec_.alibi ? slope_.data() : nullptr;
        t.bias = spec_.bias ? bias_.data() : nullptr;
        t.softcap_log2 = spec_.softcap ? 20.0f : 0.0f;
        t.softcap_inv = spec_.softcap ? 1.0f / 20.0f : 0.0f;
        t.exp = spec_.exp;
        t.p_levels = spec_.p_levels;
        t.p_running = spec_.p_running;
        t.v_float = spec_.v_float ? v_float_.data() : nullptr;
        t.v_float_stride = v_stride();
        t.o = state.o.data();
        t.m = state.m.data();
        t.l = state.l.data();
        const size_t sums = size_t(t.page_end - t.page_begin) * 2 * size_t(t.rows);
        state.page_sums.resize(sums);
        for (size_t i = 0; i < sums; ++i) state.page_sums[i] = i / size_t(t.rows) % 2 == 0 ? 1.0f : 0.0f;
        t.page_sums = state.page_sums.data();
        t.page_sums_rows = t.rows;
        t.workspace = workspace.data();
        return t;
    }

    State run(AttendFn attend) const { return run(attend, start_); }
    State run(AttendFn attend, State state) const {
        AlignedVector<uint8_t> workspace;
        attend(task(state, workspace));
        return state;
    }

  private:
    int64_t v_stride() const { return spec_.head_dim + 8; }

    void make_pages(Random& random) {
        const int64_t n_pages = (spec_.n_keys + kPageTokens - 1) / kPageTokens;
        for (int64_t n = 0; n < n_pages; ++n) {
            const int valid = int(std::min<int64_t>(kPageTokens, spec_.n_keys - n * kPageTokens));
            const bool token = spec_.mix == PageMix::kToken || (spec_.mix == PageMix::kRandom && random.chance(50)) ||
                               (spec_.mix == PageMix::kSinkChannelOpen && (n == 0 || n == n_pages - 1));
            pieces_.push_back(token ? make_token_piece(spec_.head_dim, valid, spec_.values, random)
                                    : make_channel_piece(spec_.head_dim, spec_.k_bits, spec_.v_bits, spec_.values, random));
            if (spec_.turning) give_turning(pieces_.back(), spec_.head_dim, spec_.k_bits, spec_.v_bits, random);
        }
        for (int64_t n = 0; n < n_pages; ++n) {
            // Pages before page_begin are not the task's: their address is not even valid.
            const bool gone = n < spec_.page_begin || (spec_.gone_percent > 0 && random.chance(spec_.gone_percent));
            refs_.push_back({gone ? nullptr : pieces_[size_t(n)].bytes.data(), pieces_[size_t(n)].kind});
        }
        if (!spec_.v_float) return;
        v_float_.resize(size_t(spec_.n_keys * v_stride()));
        for (float& v : v_float_) v = random.normal();
    }

    void make_rows(Random& random) {
        const int d = spec_.head_dim, rows = spec_.rows;
        if (spec_.turning) {
            q_float_.resize(size_t(rows) * d);
            for (float& q : q_float_) q = random.normal();
        }
        q_.resize(size_t(rows) * d);
        if (spec_.rest) {
            q_rest_.resize(size_t(rows) * d);
            for (int8_t& r : q_rest_)
                r = int8_t(spec_.values == PageValuesKind::kRandom ? random.integer(-64, 64) : random.chance(50) ? 64 : -64);
        }
        for (int row = 0; row < rows; ++row) {
            // The extremes: a row of zeros makes every P the largest, a row of +-127 every score.
            const int shape = spec_.values == PageValuesKind::kRandom ? (random.chance(4) ? random.integer(0, 2) : 3) : row % 4;
            for (int c = 0; c < d; ++c) {
                const int any = std::clamp(int(random.normal() * 45.0f), -127, 127);
                q_[size_t(row) * d + c] = int8_t(shape == 0 ? 0 : shape == 1 ? 127 : shape == 2 ? -127 : any);
            }
            // A score is about 45 * 75 * sqrt(d), its scale about 0.02.
            const float scale = spec_.logit_spread / (45.0f * 75.0f * 0.02f * std::sqrt(float(d)));
            q_scale_.push_back(shape == 0 ? 0.0f : random.lognormal(scale, 0.2f));
            const int64_t token = row / spec_.group, tokens = (rows + spec_.group - 1) / spec_.group;
            const int64_t position = spec_.n_keys - tokens + token;
            const bool hidden = random.chance(spec_.hidden_percent);
            const int64_t end = std::clamp<int64_t>(spec_.causal ? position + 1 : spec_.n_keys, 0, spec_.n_keys);
            const int64_t begin = spec_.window > 0 ? std::max<int64_t>(0, end - spec_.window) : 0;
            position_.push_back(position + spec_.farther);
            key_end_.push_back(hidden && random.chance(50) ? 0 : end);
            key_begin_.push_back(hidden ? key_end_.back() : begin);
            slope_.push_back(0.02f * float(1 + row % spec_.group));
            bias_.push_back(random.normal());
        }
    }

    void make_state(Random& random) {
        start_.o.assign(size_t(spec_.rows) * spec_.head_dim, 0.0f);
        start_.m.assign(size_t(spec_.rows), -std::numeric_limits<float>::infinity());
        start_.l.assign(size_t(spec_.rows), 0.0f);
        if (!spec_.continued) return;
        for (int row = 0; row < spec_.rows; ++row) {
            if (random.chance(20)) continue;
            // Far below, near and far above what is to come.
            start_.m[size_t(row)] = random.normal() * (random.chance(30) ? 200.0f : 5.0f);
            start_.l[size_t(row)] = random.lognormal(10.0f, 1.0f);
            for (int c = 0; c < spec_.head_dim; ++c) {
                start_.o[size_t(row) * spec_.head_dim + c] = random.chance(5) ? -0.0f : random.normal();
            }
        }
    }

    ProblemSpec spec_;
    std::vector<Piece> pieces_;
    std::vector<PageRef> refs_;
    AlignedVector<int8_t> q_, q_rest_;
    std::vector<float> q_scale_, q_float_, slope_, bias_;
    std::vector<int64_t> key_begin_, key_end_, position_;
    std::vector<float> v_float_;
    State start_;
};

}  // namespace ta::cpu::testing
