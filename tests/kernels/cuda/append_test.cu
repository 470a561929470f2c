// The CUDA append against the CPU's, byte by byte, over arenas that are 0xFF where nothing was written.
//
// usage: append_test [--random] [--cases N] [--seed N] [--part I OF]    N random cases, beside the fixed ones or alone; of all
//        of them those numbered I modulo OF. Exits with 1 if one fails
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/page_codec.h"
#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/append/codec_page.cuh"
#include "src/attend/cpu/stage1.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/kernels/cuda/head_bits.h"

namespace ta::cuda {
namespace {

using testing::Device;
using testing::k_bits_of_head;
using testing::kAny;
using testing::kCodes;
using testing::Stream;
using testing::v_bits_of_head;

using cpu::HeadStage1;

constexpr uint64_t kSlot = 4096;  // alignment of slots

// -------------------------------------------------------------------------------------------------------------- one case

enum class Data {
    kNormal,
    kOutliers,
    kTokens,
    kZeros,
    kDenormal,
    kTiny,
    kTinyAndZeros,
    kConstant,
    kHuge,
    kNonfinite,
    kGrowing,
    kCount
};

struct Settings {
    bool hadamard = true, k_offset = false;
    bool k_page_scale = true, v_page_scale = true, k_page_scale_at_8_bits = false, v_page_scale_at_8_bits = false;
    bool universal_open_scale = false, saturate = false;
    EncodeOptions encode{true, true, true, true, true};
};
Settings paper() {
    Settings s;
    s.hadamard = false;
    s.encode = {};
    s.k_page_scale_at_8_bits = s.v_page_scale_at_8_bits = s.universal_open_scale = true;
    return s;
}

struct Grows {
    int length, n_new;  // tokens before the step and in it
};

struct Case {
    std::string name;
    int d = 128, heads = 2;
    int k_bits = 4, v_bits = 4;  // kCodes and kAny: of heads in turn
    bool stays = false;          // all pages at 8 bits
    std::vector<Grows> sequences{{0, 64}};
    DType type = DType::kBf16;
    int layout = 0;  // 0: dense; 1: padded rows; 2: heads backwards, rows not aligned; 3: rows backwards
    int sinks = 0;
    Settings set;
    Data data = Data::kNormal;
    uint64_t seed = 1;
};

uint16_t to_bf16(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return uint16_t(u >> 16 | 0x40);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), random_(c.seed), codec_(cpu::page_codec_scalar()) {
        for (int h = 0; h < c.heads; ++h) {
            HeadArgs a{};
            a.k_bits = k_bits_of_head(c.k_bits, h);
            a.v_bits = v_bits_of_head(c.v_bits, h);
            a.channel_offset = uint32_t(channel_bytes_);
            channel_bytes_ += ChannelLayout(c.d, a.k_bits, a.v_bits).bytes();
            heads_.push_back(a);
        }
        for (int i = 0; i < c.d; ++i) signs_.push_back(rotation_sign(kDefaultRotationSeed, i) ? -1.0f : 1.0f);
        for (int i = 0; i < c.d * c.heads; ++i) offset_.push_back(c.set.k_offset ? normal() : 0.0f);
        make_tasks();
        make_rows(k_bytes_);
        make_rows(v_bytes_);
        arena_.assign(arena_bytes_, 0xFF);
        state_.assign(c.sequences.size() * size_t(c.heads) * 2, 0.0f);
        fill_before();
    }

    // False with a printed reason when something differs.
    bool run() {
        Device<uint8_t> arena(arena_bytes_ + kSlot), k(k_bytes_), v(v_bytes_);
        const uint64_t base = (reinterpret_cast<uint64_t>(arena.get()) + kSlot - 1) / kSlot * kSlot;
        CHECK(cudaMemcpy(reinterpret_cast<void*>(base), arena_.data(), arena_bytes_, cudaMemcpyHostToDevice));
        CHECK(cudaStreamSynchronize(nullptr));
        std::vector<AppendTask> tasks = tasks_;
        for (AppendTask& t : tasks) {
            t.token_page += base;
            if (t.channel_slot) t.channel_slot += base;
        }
        Device<AppendTask> device_tasks(tasks);
        Device<int32_t> n_tasks(std::vector<int32_t>{int32_t(tasks.size())});
        Device<HeadArgs> heads(heads_);
        const std::vector<float> state_before = state_records();
        Device<float> signs(signs_), offset(offset_), state(state_before);
        Device<uint32_t> nonfinite(std::vector<uint32_t>(c_.sequences.size(), 0));
        Device<uint64_t> clamped(std::vector<uint64_t>{0});
        AppendArgs a = args();
        a.tasks = device_tasks.get();
        a.n_tasks = n_tasks.get();
        a.layer.heads = c_.stays ? nullptr : heads.get();
        a.layer.k = tensor(k.get());
        a.layer.v = tensor(v.get());
        a.signs = c_.set.hadamard ? signs.get() : nullptr;
        a.layer.k_offset = c_.set.k_offset ? offset.get() : nullptr;
        a.layer.largest_scales = state.get();
        a.scales_stride = state_stride();
        a.layer.token_own_scales = c_.set.universal_open_scale ? own_scales_at() : 0;
        Device<AppendProgress> progress(std::vector<AppendProgress>(c_.sequences.size() * size_t(c_.heads)));
        a.progress = progress.get();
        a.nonfinite = nonfinite.get();
        a.clamped = clamped.get();
        AppendPlan plan;
        CHECK(plan_append(0, c_.d, c_.heads, int64_t(tasks.size()), &plan));
        // A captured launch, replayed with no tasks and then with all.
        Stream stream;
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
        CHECK(launch_append(plan, a, false, stream.get()));
        CHECK(cudaStreamEndCapture(stream.get(), &graph));
        CHECK(cudaGraphInstantiate(&exec, graph, 0));
        n_tasks.set({0});
        CHECK(cudaGraphLaunch(exec, stream.get()));
        CHECK(cudaStreamSynchronize(stream.get()));
        n_tasks.set({int32_t(tasks.size())});
        CHECK(cudaGraphLaunch(exec, stream.get()));
        CHECK(cudaStreamSynchronize(stream.get()));
        CHECK(cudaGraphExecDestroy(exec));
        CHECK(cudaGraphDestroy(graph));
        std::vector<uint8_t> got(arena_bytes_);
        CHECK(cudaMemcpy(got.data(), reinterpret_cast<void*>(base), arena_bytes_, cudaMemcpyDeviceToHost));

        std::vector<uint32_t> want_nonfinite(c_.sequences.size(), 0);
        uint64_t want_clamped = 0;
        for (const AppendTask& t : tasks_) append_on_cpu(t, k_bytes_, v_bytes_, want_nonfinite, want_clamped);
        bool ok = compare(got);
        if (c_.set.universal_open_scale) ok &= compare_states(state_before, state.copy());
        for (const AppendProgress& r : progress.copy()) {
            if (r.k_scale || r.v_scale || r.left) ok = say("the records of progress are not 0 again");
        }
        if (nonfinite.copy() != want_nonfinite) ok = say("counts of replaced values differ");
        if (clamped.copy()[0] != want_clamped) {
            std::printf("    clamped %llu, expected %llu\n", (unsigned long long)clamped.copy()[0],
                        (unsigned long long)want_clamped);
            ok = false;
        }
        return ok && reopen(base);
    }

  private:
    static constexpr uint64_t kTokenLayer = 640, kChannelLayer = 1280;  // offsets of the layer within slots

    bool say(const char* what) const {
        std::printf("    %s\n", what);
        return false;
    }
    float normal() { return std::normal_distribution<float>()(random_); }

    uint64_t token_bytes() const { return uint64_t(c_.heads) * TokenLayout(c_.d).bytes(); }
    // In a token block's slot.
    uint64_t own_scales_at() const { return kTokenLayer + token_bytes() + 128; }

    // Makes the decisions of Plan::list_touched.
    void make_tasks() {
        int row = 0;
        const auto take = [this](uint64_t bytes) {
            const uint64_t at = arena_bytes_;
            arena_bytes_ += (bytes + kSlot - 1) / kSlot * kSlot;
            return at;
        };
        arena_bytes_ = kSlot;  // so that no slot is at 0
        for (size_t i = 0; i < c_.sequences.size(); ++i) {
            const Grows g = c_.sequences[i];
            const int total = g.length + g.n_new;
            for (int b = g.length / kPageTokens; g.n_new > 0 && b * kPageTokens < total; ++b) {
                AppendTask t{};
                t.have = uint8_t(std::clamp(g.length - b * kPageTokens, 0, kPageTokens));
                t.end = uint8_t(std::min(kPageTokens, total - b * kPageTokens));
                t.stays_8_bits = c_.stays || b < c_.sinks;
                t.row = row + b * kPageTokens + t.have - g.length;
                t.sequence = int32_t(i);
                t.scales_side = uint8_t(state_side(i));
                t.index = b - g.length / kPageTokens;
                const bool closes = t.end == kPageTokens && !t.stays_8_bits;
                if (t.have == 0 && closes) {
                    t.token_page = take(token_bytes()) | kEntrySingleLayer;
                } else {
                    t.token_page = take(own_scales_at() + 2 * kPageTokens * sizeof(float) * uint64_t(c_.heads) + 256);
                }
                if (closes) t.channel_slot = take(kChannelLayer + channel_bytes_ + 256);
                tasks_.push_back(t);
            }
            row += g.n_new;
        }
        rows_ = row;
    }

    float value(int row, int channel, float last) {
        const float x = normal();
        switch (c_.data) {
            case Data::kOutliers:
                return channel % 37 == 5 ? 1e4f * x : x;
            case Data::kTokens:
                return std::ldexp(x, -int(uint32_t(row) * 2654435761u >> 28) - (channel == 3 ? 0 : 2));
            case Data::kZeros:
                return row % 3 ? 0.0f : x * float(channel % 2);
            case Data::kDenormal:
                return x * 1e-41f;
            case Data::kTiny:
                return std::ldexp(x, -100 - row % 25);
            case Data::kTinyAndZeros:
                return row % 5 == 2 ? 0.0f : std::ldexp(x, -110 - row % 12);
            case Data::kConstant:
                return channel % 4 == 0 ? -1.5f : channel % 4 == 1 ? float(channel) : channel % 4 == 2 ? last : x;
            case Data::kHuge:
                return std::ldexp(x, 52);
            case Data::kNonfinite: {
                const uint32_t n = uint32_t(random_() % 200);
                return n == 0 ? NAN : n == 1 ? INFINITY : n == 2 ? -INFINITY : n == 3 ? 3e38f : n == 4 ? -3e38f : x;
            }
            case Data::kGrowing:
                return std::ldexp(x, row % 40 - 20);
            default:
                return x;
        }
    }
    int64_t stride_row() const {
        const int64_t dense = int64_t(c_.heads) * c_.d;
        return c_.layout == 0 ? dense : c_.layout == 1 ? dense + 64 : c_.layout == 2 ? dense + 3 : -dense;
    }
    int64_t stride_head() const { return c_.layout == 2 ? -(c_.d + 1) : c_.d; }
    int64_t origin() const {
        return c_.layout == 2 ? (c_.heads - 1) * (c_.d + 1) + 1 : c_.layout == 3 ? (rows_ - 1) * int64_t(c_.heads) * c_.d : 0;
    }
    int64_t at(int64_t row, int head) const { return origin() + row * stride_row() + head * stride_head(); }
    size_t element() const { return dtype_bytes(c_.type); }

    void store(std::vector<uint8_t>& bytes, int64_t i, float x) {
        if (c_.type == DType::kF32) {
            std::memcpy(&bytes[size_t(i) * 4], &x, 4);
            return;
        }
        uint16_t h = to_bf16(x);
        if (c_.type == DType::kF16) {
            const __half half = __float2half_rn(x);
            std::memcpy(&h, &half, 2);
        }
        std::memcpy(&bytes[size_t(i) * 2], &h, 2);
    }
    void make_rows(std::vector<uint8_t>& bytes) {
        const int64_t last = std::abs(stride_row()) * std::max(0, rows_ - 1) + int64_t(c_.heads) * (c_.d + 2);
        bytes.assign(size_t(last) * element(), 0xFF);
        float x = 0.0f;
        for (int r = 0; r < rows_; ++r) {
            for (int h = 0; h < c_.heads; ++h) {
                for (int c = 0; c < c_.d; ++c) store(bytes, at(r, h) + c, x = value(r, c, x));
            }
        }
    }

    // The tokens that the touched blocks have before the step, appended on the CPU at once.
    void fill_before() {
        const int rows = rows_;
        rows_ = kPageTokens;
        std::vector<uint8_t> k, v;
        std::vector<uint32_t> nonfinite(c_.sequences.size(), 0);
        uint64_t clamped = 0;
        const std::vector<AppendTask> tasks = tasks_;
        for (AppendTask t : tasks) {
            if (t.have == 0) continue;
            make_rows(k);
            make_rows(v);
            t.end = t.have;
            t.have = 0;
            t.row = 0;
            t.channel_slot = 0;
            append_on_cpu(t, k, v, nonfinite, clamped);
        }
        rows_ = rows;
    }

    // The largest scales in device memory: two sides a sequence, records of other layers between them, NaN where nothing
    // is.
    int64_t state_stride() const { return c_.heads * 2 + 6; }
    int state_side(size_t sequence) const { return c_.sequences[sequence].length == 0 ? kNothingSeen : int(sequence % 2); }
    std::vector<float> state_records() const {
        std::vector<float> records(c_.sequences.size() * 2 * size_t(state_stride()), std::numeric_limits<float>::quiet_NaN());
        for (size_t i = 0; i < c_.sequences.size(); ++i) {
            if (state_side(i) == kNothingSeen) continue;
            std::copy_n(&state_[i * size_t(c_.heads) * 2], c_.heads * 2,
                        &records[(i * 2 + size_t(state_side(i))) * size_t(state_stride())]);
        }
        return records;
    }
    bool compare_states(std::vector<float> want, const std::vector<float>& got) const {
        for (const AppendTask& t : tasks_) {
            const int side = t.scales_side == kNothingSeen ? 0 : 1 - t.scales_side;
            std::copy_n(&state_[size_t(t.sequence * c_.heads) * 2], c_.heads * 2,
                        &want[size_t(t.sequence * 2 + side) * size_t(state_stride())]);
        }
        if (std::memcmp(want.data(), got.data(), want.size() * sizeof(float)) == 0) return true;
        return say("largest_scales differ");
    }

    AppendArgs args() const {
        const Settings& s = c_.set;
        AppendArgs a{};
        a.head_dim = c_.d;
        a.kv_heads = c_.heads;
        a.layer.token_layer_offset = kTokenLayer;
        a.layer.channel_layer_offset = kChannelLayer;
        a.k_page_scale = s.k_page_scale;
        a.v_page_scale = s.v_page_scale;
        a.k_page_scale_at_8_bits = s.k_page_scale_at_8_bits;
        a.v_page_scale_at_8_bits = s.v_page_scale_at_8_bits;
        a.universal_open_scale = s.universal_open_scale;
        a.encode = s.encode;
        a.saturate = s.saturate;
        return a;
    }
    TensorArgs tensor(uint8_t* p) const { return {p + origin() * int64_t(element()), stride_row(), stride_head(), c_.type}; }

    // CpuStep::append_block of src/attend/cpu/step.cpp over the arena.
    void append_on_cpu(const AppendTask& t, const std::vector<uint8_t>& k, const std::vector<uint8_t>& v,
                       std::vector<uint32_t>& nonfinite, uint64_t& clamped) {
        const Settings& num = c_.set;
        const int d = c_.d, n = t.end - t.have;
        for (int head = 0; head < c_.heads; ++head) {
            std::vector<float> x[2];
            float amax[2][kPageTokens];
            for (int which = 0; which < 2; ++which) {
                x[which].resize(size_t(n) * size_t(d));
                for (int i = 0; i < n; ++i) {
                    float* to = x[which].data() + i * d;
                    const uint8_t* from = (which ? v : k).data() + size_t(at(t.row + i, head)) * element();
                    nonfinite[size_t(t.sequence)] += uint32_t(codec_.to_float(from, c_.type, d, num.saturate, to));
                    for (int c = 0; c < d; ++c) {
                        if (std::fabs(to[c]) <= kMaxMagnitude) continue;
                        to[c] = 0.0f;
                        ++nonfinite[size_t(t.sequence)];
                    }
                    if (which == 0 && num.k_offset) {
                        for (int c = 0; c < d; ++c) to[c] -= offset_[size_t(head * d + c)];
                    }
                    if (which == 0 && num.hadamard && can_rotate(d)) codec_.rotate(to, d, signs_.data());
                    amax[which][i] = codec_.amax(to, d);
                }
            }
            uint8_t* piece = &arena_[t.token_page & ~kEntryFlags] + (t.token_page & kEntrySingleLayer ? 0 : kTokenLayer) +
                             size_t(head) * TokenLayout(d).bytes();
            static HeadStage1 codes;
            if (t.have > 0) codec_.load_token_piece(piece, d, t.have, codes);
            float universal[2] = {0.0f, 0.0f}, own[2] = {0.0f, 0.0f};
            for (int which = 0; num.universal_open_scale && which < 2; ++which) {
                float* largest = &state_[(size_t(t.sequence) * size_t(c_.heads) + size_t(head)) * 2 + size_t(which)];
                float* to = t.token_page & kEntrySingleLayer
                                ? nullptr
                                : reinterpret_cast<float*>(&arena_[t.token_page & ~kEntryFlags] + own_scales_at()) +
                                      (2 * head + which) * kPageTokens;
                for (int i = 0; i < t.have; ++i) own[which] = std::max(own[which], to[i]);
                for (int i = 0; i < n; ++i) {
                    const float scale = stage1_scale(amax[which][i], kStage1Levels);
                    if (to) to[t.have + i] = scale;
                    own[which] = std::max(own[which], scale);
                }
                *largest = std::max(*largest, own[which]);
                universal[which] = universal_scale(which ? codes.v_scale : codes.k_scale, t.have, *largest);
            }
            const bool whole = n == kPageTokens;
            const HeadArgs& h = heads_[size_t(head)];
            const auto rule = [&](bool page, bool at_8, bool exponents, int bits) {
                const bool stays = t.stays_8_bits || bits == 8;
                if (whole && page && (!stays || at_8)) return exponents && !stays ? ScaleRule::kPageExp : ScaleRule::kPage;
                return num.universal_open_scale ? ScaleRule::kUniversal : ScaleRule::kToken;
            };
            const TokenScaling k_scaling{rule(num.k_page_scale, num.k_page_scale_at_8_bits, false, h.k_bits), universal[0]};
            const TokenScaling v_scaling{rule(num.v_page_scale, num.v_page_scale_at_8_bits, num.encode.v_exponents, h.v_bits),
                                         universal[1]};
            clamped +=
                uint64_t(quantize_tokens(codec_, {x[0].data(), amax[0], d, t.have, t.end}, k_scaling, codes.k, codes.k_scale));
            clamped +=
                uint64_t(quantize_tokens(codec_, {x[1].data(), amax[1], d, t.have, t.end}, v_scaling, codes.v, codes.v_scale));
            codec_.store_token_piece(codes, d, t.have, t.end, piece);
            if (!t.channel_slot) continue;
            const ChannelLayout layout(d, h.k_bits, h.v_bits);
            uint8_t* closed = &arena_[t.channel_slot + kChannelLayer + h.channel_offset];
            codec_.encode_channel_piece(codes, layout, num.encode, closed);
            std::memcpy(closed + layout.own_scales(), own, sizeof own);
        }
    }

    bool compare(const std::vector<uint8_t>& got) const {
        size_t wrong = 0, first = 0;
        for (size_t i = 0; i < got.size(); ++i) {
            if (got[i] == arena_[i]) continue;
            if (wrong++ == 0) first = i;
        }
        if (wrong == 0) return true;
        std::printf("    %zu bytes differ, the first at %zu: %d, expected %d", wrong, first, got[first], arena_[first]);
        for (const AppendTask& t : tasks_) {
            const uint64_t token = t.token_page & ~kEntryFlags;
            const uint64_t in_token = first - token - (t.token_page & kEntrySingleLayer ? 0 : kTokenLayer);
            const uint64_t in_channel = first - t.channel_slot - kChannelLayer;
            const auto piece = TokenLayout(c_.d).bytes();
            if (first >= token && in_token < piece * size_t(c_.heads)) {
                std::printf(" (token page of sequence %d, have %d, end %d; head %zu, byte %zu)", t.sequence, t.have, t.end,
                            size_t(in_token / piece), size_t(in_token % piece));
            }
            if (t.channel_slot && first >= t.channel_slot && in_channel < channel_bytes_) {
                int head = c_.heads - 1;
                while (heads_[size_t(head)].channel_offset > in_channel) --head;
                const HeadArgs& h = heads_[size_t(head)];
                std::printf(" (channel page of sequence %d, have %d; head %d with %d, %d bits, byte %zu; metadata from %zu)",
                            t.sequence, t.have, head, h.k_bits, h.v_bits, size_t(in_channel - h.channel_offset),
                            ChannelLayout(c_.d, h.k_bits, h.v_bits).k_step());
            }
        }
        std::printf("\n");
        return false;
    }

    // The first closed page decoded into a token page.
    bool reopen(uint64_t base) {
        const auto closed = std::find_if(tasks_.begin(), tasks_.end(), [](const AppendTask& t) { return t.channel_slot != 0; });
        if (closed == tasks_.end()) return true;
        const int tokens = int(c_.seed % kPageTokens) + 1;
        const size_t page = size_t(c_.heads) * TokenLayout(c_.d).bytes();
        std::vector<uint8_t> want(page, 0xFF);
        std::vector<float> own(2 * size_t(c_.heads) * 2 * kPageTokens, -1.0f);
        for (int head = 0; head < c_.heads; ++head) {
            const HeadArgs& h = heads_[size_t(head)];
            static HeadStage1 codes;
            codec_.decode_channel_piece(&arena_[closed->channel_slot + kChannelLayer + h.channel_offset],
                                        ChannelLayout(c_.d, h.k_bits, h.v_bits), tokens, codes);
            codec_.store_token_piece(codes, c_.d, 0, tokens, want.data() + size_t(head) * TokenLayout(c_.d).bytes());
            for (int layer = 0; layer < 2; ++layer) {
                float* of_head = &own[size_t(layer * c_.heads + head) * 2 * kPageTokens];
                reopen_own_scales(codes.k, codes.k_scale, c_.d, tokens, of_head);
                reopen_own_scales(codes.v, codes.v_scale, c_.d, tokens, of_head + kPageTokens);
            }
        }
        // Two layers of the same page.
        std::vector<HeadArgs> heads = heads_;
        heads.insert(heads.end(), heads_.begin(), heads_.end());
        Device<HeadArgs> device_heads(heads);
        Device<uint64_t> offsets(std::vector<uint64_t>{kChannelLayer, kChannelLayer});
        Device<uint64_t> token_offsets(std::vector<uint64_t>{0, page});
        Device<uint8_t> out(2 * page + own.size() * sizeof(float));
        CHECK(cudaMemcpy(out.get() + 2 * page, std::vector<float>(own.size(), -1.0f).data(), own.size() * sizeof(float),
                         cudaMemcpyHostToDevice));
        ReopenArgs a{c_.d,
                     c_.heads,
                     2,
                     tokens,
                     closed->channel_slot + base,
                     reinterpret_cast<uint64_t>(out.get()),
                     offsets.get(),
                     device_heads.get(),
                     token_offsets.get(),
                     false,
                     2 * page};
        CHECK(launch_reopen(a, nullptr));
        CHECK(cudaDeviceSynchronize());
        const std::vector<uint8_t> got = out.copy();
        for (int layer = 0; layer < 2; ++layer) {
            if (!std::equal(want.begin(), want.end(), got.begin() + layer * int64_t(page)))
                return say("the reopened page differs");
        }
        if (std::memcmp(got.data() + 2 * page, own.data(), own.size() * sizeof(float)) != 0)
            return say("the scales that reopened tokens would have alone differ");
        return true;
    }

    Case c_;
    std::mt19937_64 random_;
    const cpu::PageCodec& codec_;
    std::vector<HeadArgs> heads_;
    std::vector<float> signs_, offset_;
    size_t channel_bytes_ = 0;
    std::vector<AppendTask> tasks_;  // addresses relative to the arena
    uint64_t arena_bytes_ = 0;
    int rows_ = 0;
    std::vector<uint8_t> arena_, k_bytes_, v_bytes_;
    std::vector<float> state_;
};

std::vector<Case> fixed_cases() {
    std::vector<Case> cases;
    const std::vector<Grows> all = {{0, 1},   {0, 3},   {0, 63},  {0, 64},   {0, 65},  {0, 200}, {1, 1},
                                    {1, 3},   {1, 63},  {1, 64},  {1, 65},   {1, 200}, {63, 1},  {63, 3},
                                    {63, 63}, {63, 64}, {63, 65}, {63, 200}, {128, 0}, {100, 28}};
    for (int d : {64, 96, 128, 256}) {
        for (int bits : {4, 2, kCodes, kAny, 8}) {
            Case c;
            c.name = "d " + std::to_string(d) + " bits " + std::to_string(bits);
            c.d = d;
            c.heads = bits == kCodes ? 4 : bits == kAny ? 6 : 2;
            c.k_bits = c.v_bits = bits;
            c.stays = bits == 8;
            c.sequences = all;
            c.set.hadamard = d != 96;
            c.seed = uint64_t(d + bits);
            cases.push_back(c);
            c.name += " paper";
            c.set = paper();
            c.data = Data::kGrowing;
            cases.push_back(c);
        }
    }
    const auto with = [&](const char* name, auto change) {
        Case c;
        c.name = name;
        c.sequences = all;
        c.k_bits = c.v_bits = kCodes;
        c.heads = 4;
        c.data = Data::kTokens;
        change(c);
        cases.push_back(c);
    };
    with("no rotation", [](Case& c) { c.set.hadamard = false; });
    with("k offset", [](Case& c) { c.set.k_offset = true; });
    with("token scales of K", [](Case& c) { c.set.k_page_scale = false; });
    with("token scales of V", [](Case& c) { c.set.v_page_scale = false; });
    with("no exponents", [](Case& c) { c.set.encode.v_exponents = false; });
    with("no fractional zero", [](Case& c) { c.set.encode.fractional_zero = false; });
    with("no search", [](Case& c) { c.set.encode.v_search = c.set.encode.k_search = false; });
    with("no unit slope", [](Case& c) { c.set.encode.unit_slope = false; });
    with("unit slope alone", [](Case& c) { c.set.encode = {.unit_slope = true}; });
    with("universal", [](Case& c) { c.set.universal_open_scale = true; });
    with("paper, many pages", [](Case& c) {
        c.set = paper();
        c.sequences = {{0, 5000}, {30, 1000}, {64, 640}, {0, 64}, {10, 53}, {0, 0}, {100, 2000}};
        c.data = Data::kGrowing;
    });
    for (const bool stays : {true, false}) {
        with("page scales at 8 bits", [&](Case& c) {
            c.stays = stays;
            c.k_bits = c.v_bits = stays ? 8 : kAny;
            c.heads = 6;
            c.set.k_page_scale_at_8_bits = c.set.v_page_scale_at_8_bits = true;
        });
    }
    with("universal, any bits", [](Case& c) { c.set.universal_open_scale = true, c.k_bits = c.v_bits = kAny, c.heads = 6; });
    with("sinks", [](Case& c) { c.sinks = 2; });
    for (auto type : {DType::kF16, DType::kBf16, DType::kF32}) {
        for (int layout = 0; layout < 4; ++layout) {
            with("layout", [&](Case& c) {
                c.name = "type " + std::to_string(int(type)) + " layout " + std::to_string(layout);
                c.type = type;
                c.layout = layout;
                c.data = Data::kNormal;
            });
        }
        for (int data = 0; data < int(Data::kCount); ++data) {
            for (bool saturate : {false, true}) {
                with("data", [&](Case& c) {
                    c.name =
                        "type " + std::to_string(int(type)) + " data " + std::to_string(data) + (saturate ? " saturate" : "");
                    c.type = type;
                    c.data = Data(data);
                    c.set.saturate = saturate;
                });
            }
        }
    }
    return cases;
}

Case random_case(uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto below = [&](int n) { return int(random() % uint64_t(n)); };
    const auto coin = [&] { return below(4) != 0; };
    Case c;
    c.name = "random " + std::to_string(seed);
    c.seed = seed;
    c.d = std::vector<int>{64, 96, 128, 256}[size_t(below(4))];
    c.heads = 1 + below(4);
    c.k_bits = std::vector<int>{4, 2, kCodes, 8, kAny}[size_t(below(5))];
    c.v_bits = std::vector<int>{4, 2, kCodes, 8, kAny}[size_t(below(5))];
    c.stays = c.k_bits == 8 && c.v_bits == 8 && coin();
    c.type = DType(1 + below(3));
    c.layout = below(4);
    c.sinks = below(3);
    c.data = Data(below(int(Data::kCount)));
    c.set.hadamard = c.d != 96 && coin();
    c.set.k_offset = !coin();
    c.set.k_page_scale = coin();
    c.set.v_page_scale = coin();
    c.set.k_page_scale_at_8_bits = coin();
    c.set.v_page_scale_at_8_bits = coin();
    c.set.universal_open_scale = !coin();
    c.set.encode.v_exponents = coin();
    c.set.encode.fractional_zero = coin();
    c.set.encode.v_search = coin();
    c.set.encode.k_search = coin();
    c.set.encode.unit_slope = coin();
    c.set.saturate = !coin();
    c.sequences.clear();
    for (int n = 1 + below(5); n > 0; --n) c.sequences.push_back({below(200), below(3) ? below(70) : below(300)});
    return c;
}

// -------------------------------------------------------------------------- the arithmetic in half precision, exhaustively

// One block: a step. Threads: numerators.
__global__ void try_steps(int levels, int bits, int* wrong) {
    const int step = int(blockIdx.x) + 1;
    const __half2 inverse = __half2half2(reciprocal(step)), top = __float2half2_rn(float(levels));
    for (int q = int(threadIdx.x) - 255; q <= 255; q += int(blockDim.x)) {
        const __half2 x = __float2half2_rn(float(q));
        const int want = stage2_code_clamped(q, 0, step, levels);
        if (int(step_codes_clamped(x, inverse, top) & 0xffff) != 0x6400 + want) atomicAdd(wrong, 1);
        const bool in_range = q >= 0 && q <= levels * step && stage2_step(0, q, levels) <= step;
        if (in_range && int(step_codes(x, inverse) >> 16) != 0x6400 + want) atomicAdd(wrong, 1);
    }
    for (int z = -128; z + levels * step <= 127; ++z) {
        const Candidate c(StepZero{step, z}, levels);
        for (int q = int(threadIdx.x) - 128; q <= 127; q += int(blockDim.x)) {
            const int code = int(c.codes(__float2half2_rn(float(q)), top) & 0xffff) - 0x6400;
            const int e = q - (code * step + z), want = q - (stage2_code_clamped(q, z, step, levels) * step + z);
            if (e * e != want * want) atomicAdd(wrong, 1);
        }
    }
}

// Every mantissa of a row's largest magnitude, at the exponent `exponent`: the scale, and values divided by it.
__global__ void try_scales(int exponent, int* wrong) {
    const uint32_t mantissa = blockIdx.x * blockDim.x + threadIdx.x;
    const float amax = __uint_as_float(uint32_t(exponent + 127) << 23 | mantissa);
    const float scale = page_stage1_scale(amax);
    if (__float_as_uint(scale) != __float_as_uint(stage1_scale(amax, kStage1Levels))) atomicAdd(wrong, 1);
    const Divider divide(scale);
    uint32_t random = mantissa * 2654435761u + 12345u;
    for (int n = 0; n < 64 && scale > 0.0f; ++n) {
        random = random * 1664525u + 1013904223u;
        // Half of them around a tie.
        float x = amax * (float(random >> 8) * 0x1p-24f);
        if (n % 2)
            x = __uint_as_float(__float_as_uint(scale * (float(random >> 20) * 119.0f / 4096.0f + 0.5f)) + (random >> 10 & 3) -
                                1);
        const float want = rintf(__fdiv_rn(x, scale));
        if (rintf(divide(x * divide.up)) != want) atomicAdd(wrong, 1);
        const float tie = scale * (floorf(119.0f * float(random >> 8) * 0x1p-24f) + 0.5f);
        if (divide(tie * divide.up) != __fdiv_rn(tie, scale)) atomicAdd(wrong, 1);
    }
}

bool arithmetic() {
    Device<int> wrong(std::vector<int>{0});
    for (int exponent : {-119, -118, -117, -100, -61, -60, -59, -1, 0, 1, 40, 60}) {
        try_scales<<<(1 << 23) / 256, 256>>>(exponent, wrong.get());
    }
    try_steps<<<16, 256>>>(15, 4, wrong.get());
    try_steps<<<80, 256>>>(3, 2, wrong.get());
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    if (wrong.copy()[0] == 0) return true;
    std::printf("FAIL arithmetic: %d\n", wrong.copy()[0]);
    return false;
}

int run_all(bool fixed, int random_cases, uint64_t seed, int part, int parts) {
    int failed = 0, cases = 0, number = 0;
    if (!arithmetic()) ++failed;
    const auto run = [&](const Case& c) {
        if (number++ % parts != part) return;
        ++cases;
        Problem problem(c);
        if (problem.run()) return;
        ++failed;
        std::printf("FAIL %s: d %d, heads %d, bits %d %d, type %d, layout %d, data %d, sinks %d\n", c.name.c_str(), c.d,
                    c.heads, c.k_bits, c.v_bits, int(c.type), c.layout, int(c.data), c.sinks);
    };
    if (fixed) {
        for (const Case& c : fixed_cases()) run(c);
    }
    for (int i = 0; i < random_cases; ++i) run(random_case(seed + uint64_t(i)));
    std::printf("append_test: %d cases, %d failed\n", cases, failed);
    return failed != 0;
}

}  // namespace
}  // namespace ta::cuda

int main(int argc, char** argv) {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    bool fixed = true;
    int cases = 100, part = 0, parts = 1;
    uint64_t seed = 1000;
    for (int i = 1; i < argc; ++i) {
        if (!std::strcmp(argv[i], "--random")) fixed = false;
        if (!std::strcmp(argv[i], "--cases") && i + 1 < argc) cases = std::atoi(argv[++i]);
        if (!std::strcmp(argv[i], "--part") && i + 2 < argc) {
            part = std::atoi(argv[++i]);
            parts = std::max(1, std::atoi(argv[++i]));
        }
        if (!std::strcmp(argv[i], "--seed") && i + 1 < argc) seed = std::strtoull(argv[++i], nullptr, 0);
    }
    return ta::cuda::run_all(fixed, cases, seed, part, parts);
}
