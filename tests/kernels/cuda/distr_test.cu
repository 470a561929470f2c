// Prepared inputs of DistrAttention on a GPU, over memory that is 0xFF where nothing was written: the order of channels and the
// channels that stand for groups against the CPU's kernel, K and V against their values times the tile's power of two.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/distr.h"
#include "kernels/cpu/page_codec.h"
#include "kernels/cuda/any/distr/distr.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/gpu.h"
#include "tests/support/numbers.h"

namespace ta::cuda {
namespace testing {

int attend_distr(bool bench);  // distr_attend.cu

}
namespace {

using testing::Device;

enum class Data { kNormal, kAlike, kTiny, kHuge, kZeros, kNonfinite, kCount };

struct Case {
    int d, group_size, group;
    DType type;
    int layout;  // 0: dense; 1: rows not aligned, heads backwards
    Data data;
    bool saturate;
    uint64_t seed;
};

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), random_(c.seed), codec_(cpu::page_codec_scalar()) {
        const int lengths[][2] = {{130, 200}, {1, 1}, {0, 5}, {128, 128}, {300, 7}, {64, 0}};
        for (const auto& [n_query, n_keys] : lengths) {
            sequences_.push_back({n_keys, n_query, q_rows_, int32_t(tiles_.size())});
            for (int first = 0; first < n_keys; first += kDistrKeyTile)
                tiles_.push_back({k_rows_ + first, std::min(kDistrKeyTile, n_keys - first)});
            for (int first = 0; first < n_query; first += kDistrRows)
                blocks_.push_back({int32_t(sequences_.size()) - 1, first});
            q_rows_ += n_query, k_rows_ += n_keys;
        }
        make(q_, q_rows_, q_heads());
        make(k_, k_rows_, kHeads);
        make(v_, k_rows_, kHeads);
    }

    bool run() {
        const size_t tile_bytes = size_t(distr_tile_bytes(c_.d)), of_keys = tiles_.size() * kHeads,
                     of_rows = blocks_.size() * size_t(q_heads());
        Device<uint8_t> q(q_), k(k_), v(v_), k_tiles(of_keys * tile_bytes), v_tiles(of_keys * tile_bytes),
            order(of_rows * size_t(c_.d)), sampled(of_rows * size_t(kDistrRows * 2 * stored()));
        Device<float> k_unit(of_keys), v_log2(of_keys), q_unit(of_rows * kDistrRows);
        Device<SequenceArgs> sequences(sequences_);
        Device<DistrKeys> tiles(tiles_);
        Device<DistrRows> blocks(blocks_);
        Device<uint32_t> nonfinite(std::vector<uint32_t>(1, 0));
        DistrArgs a{};
        a.attend.head_dim = c_.d;
        a.attend.kv_heads = kHeads;
        a.attend.group = c_.group;
        a.attend.sequences = sequences.get();
        a.attend.q = tensor(q.get(), q_heads());
        a.attend.saturate = c_.saturate;
        a.attend.nonfinite = nonfinite.get();
        a.k = tensor(k.get(), kHeads);
        a.v = tensor(v.get(), kHeads);
        a.group_size = c_.group_size;
        a.n_tiles = int32_t(tiles_.size());
        a.n_blocks = int32_t(blocks_.size());
        a.tiles = tiles.get();
        a.blocks = blocks.get();
        a.k_tiles = k_tiles.get(), a.v_tiles = v_tiles.get(), a.k_unit = k_unit.get(), a.v_log2 = v_log2.get();
        a.order = order.get(), a.q_rows = sampled.get(), a.q_unit = q_unit.get();
        CHECK(launch_distr_keys(a, nullptr));
        CHECK(launch_distr_rows(a, nullptr));
        CHECK(cudaDeviceSynchronize());
        uint32_t replaced = 0;
        const bool same = compare_rows(order.copy(), sampled.copy(), q_unit.copy(), replaced) &&
                          compare_keys(k_tiles.copy(), v_tiles.copy(), k_unit.copy(), v_log2.copy(), replaced);
        if (same && nonfinite.copy()[0] != replaced) {
            std::printf("    %u values replaced, expected %u\n", nonfinite.copy()[0], replaced);
            return false;
        }
        return same;
    }

  private:
    static constexpr int kHeads = 2;

    int q_heads() const { return kHeads * c_.group; }
    int stored() const { return distr_stored_groups(c_.d, c_.group_size); }
    int64_t stride_row(int heads) const { return int64_t(heads) * c_.d + (c_.layout ? 3 : 0); }
    int64_t stride_head() const { return c_.layout ? -c_.d : c_.d; }
    int64_t origin(int heads) const { return c_.layout ? int64_t(heads - 1) * c_.d + 1 : 0; }
    size_t at(int64_t row, int head, int heads) const {
        return size_t(origin(heads) + row * stride_row(heads) + head * stride_head()) * dtype_bytes(c_.type);
    }
    TensorArgs tensor(uint8_t* p, int heads) const {
        return {p + origin(heads) * int64_t(dtype_bytes(c_.type)), stride_row(heads), stride_head(), c_.type};
    }

    float value(int channel) {
        const float x = std::normal_distribution<float>()(random_);
        switch (c_.data) {
            case Data::kAlike:
                return channel % 3 ? 0.5f : -2.0f;
            case Data::kTiny:
                return x * 1e-33f;
            case Data::kHuge:
                return x * (c_.type == DType::kF16 ? 1e4f : 1e15f);
            case Data::kZeros:
                return random_() % 3 ? 0.0f : x;
            case Data::kNonfinite: {
                const uint64_t n = random_() % 300;
                return n == 0 ? NAN : n == 1 ? INFINITY : n == 2 ? -3e38f : x;
            }
            default:
                return x;
        }
    }
    void make(std::vector<uint8_t>& bytes, int rows, int heads) {
        bytes.assign((size_t(stride_row(heads)) * size_t(rows) + 16) * dtype_bytes(c_.type), 0xFF);
        std::vector<float> x(size_t(c_.d), 0.0f);
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                for (int c = 0; c < c_.d; ++c) x[size_t(c)] = value(c);
                codec_.from_float(x.data(), c_.d, c_.type, bytes.data() + at(row, head, heads));
            }
        }
    }
    // A row as the library reads it; counts what it replaces.
    void read(const std::vector<uint8_t>& bytes, int64_t row, int head, int heads, float* x, uint32_t& replaced) {
        replaced += uint32_t(codec_.to_float(bytes.data() + at(row, head, heads), c_.type, c_.d, c_.saturate, x));
        for (int c = 0; c < c_.d; ++c) {
            if (std::fabs(x[c]) <= kMaxMagnitude) continue;
            x[c] = 0.0f;
            ++replaced;
        }
    }

    static float largest(const std::vector<float>& x) {
        float most = 0.0f;
        for (const float v : x) most = std::max(most, std::fabs(v));
        return most;
    }
    // The power of two of values up to `most`: multiples of it are below 2^13.
    static float unit_of(float most) {
        int e = 0;
        if (most > 0.0f) std::frexp(most, &e);
        return std::ldexp(1.0f, most > 0.0f ? std::max(e - 13, kDistrLeastExponent) : kDistrLeastExponent);
    }
    static bool is_half(const uint8_t* got, float x, float unit) {
        uint16_t bits;
        std::memcpy(&bits, got, 2);
        return bits == half_of(x / unit);
    }
    static uint16_t half_of(float x) { return ::ta::testing::float_to_f16(x); }

    bool compare_rows(const std::vector<uint8_t>& order, const std::vector<uint8_t>& sampled, const std::vector<float>& unit,
                      uint32_t& replaced) {
        const int groups = distr_groups(c_.d, c_.group_size);
        std::vector<float> q(size_t(kDistrRows * c_.d)), want(size_t(kDistrRows * groups)), m(kDistrRows), l(kDistrRows),
            o(q.size());
        std::vector<uint8_t> want_order(size_t(c_.d));
        for (size_t b = 0; b < blocks_.size(); ++b) {
            const SequenceArgs& s = sequences_[size_t(blocks_[b].sequence)];
            const int rows = std::min(s.n_query - blocks_[b].first_row, kDistrRows);
            for (int head = 0; head < q_heads(); ++head) {
                for (int r = 0; r < rows; ++r)
                    read(q_, s.row + blocks_[b].first_row + r, head, q_heads(), q.data() + r * c_.d, replaced);
                cpu::distr_kernel_scalar().start(
                    {rows, c_.d, c_.group_size, q.data(), want_order.data(), want.data(), m.data(), l.data(), o.data()});
                const size_t item = b * size_t(q_heads()) + size_t(head);
                if (std::memcmp(order.data() + item * size_t(c_.d), want_order.data(), size_t(c_.d)) != 0) {
                    std::printf("    block %zu, head %d: another order\n", b, head);
                    return false;
                }
                for (int r = 0; r < kDistrRows; ++r) {
                    const std::vector<float> row(q.begin() + r * c_.d, q.begin() + (r + 1) * c_.d);
                    const float of_row = r < rows ? unit_of(largest(row)) : unit_of(0.0f);
                    if (unit[item * kDistrRows + size_t(r)] != of_row) {
                        std::printf("    block %zu, head %d, row %d: unit %g, expected %g\n", b, head, r,
                                    double(unit[item * kDistrRows + size_t(r)]), double(of_row));
                        return false;
                    }
                    for (int g = 0; g < stored(); ++g) {
                        const float x = r < rows && g < groups ? want[size_t(r * groups + g)] : 0.0f;
                        if (is_half(sampled.data() + 2 * ((item * kDistrRows + size_t(r)) * size_t(stored()) + size_t(g)), x,
                                    of_row))
                            continue;
                        std::printf("    block %zu, head %d, row %d, group %d is not %g\n", b, head, r, g, double(x));
                        return false;
                    }
                }
            }
        }
        return true;
    }

    bool compare_keys(const std::vector<uint8_t>& k_tiles, const std::vector<uint8_t>& v_tiles,
                      const std::vector<float>& k_unit, const std::vector<float>& v_log2, uint32_t& replaced) {
        const int d = c_.d, channels = distr_v_channels(d);
        std::vector<float> k(size_t(kDistrKeyTile * d)), v(k.size());
        for (size_t n = 0; n < tiles_.size(); ++n) {
            for (int head = 0; head < kHeads; ++head) {
                std::fill(k.begin(), k.end(), 0.0f), std::fill(v.begin(), v.end(), 0.0f);
                for (int j = 0; j < tiles_[n].keys; ++j) {
                    read(k_, tiles_[n].row + j, head, kHeads, k.data() + j * d, replaced);
                    read(v_, tiles_[n].row + j, head, kHeads, v.data() + j * d, replaced);
                }
                const size_t item = n * kHeads + size_t(head);
                const uint8_t* of_k = k_tiles.data() + item * size_t(distr_tile_bytes(d));
                const uint8_t* of_v = v_tiles.data() + item * size_t(distr_tile_bytes(d));
                const float unit_k = unit_of(largest(k)), unit_v = unit_of(largest(v));
                if (k_unit[item] != unit_k || v_log2[item] != std::log2(unit_v)) {
                    std::printf("    tile %zu, head %d: units %g and 2^%g\n", n, head, double(k_unit[item]),
                                double(v_log2[item]));
                    return false;
                }
                for (int j = 0; j < kDistrKeyTile; ++j) {
                    for (int c = 0; c < d; ++c) {
                        const int half = j / kDistrHalfKeys, key = j % kDistrHalfKeys, in_piece = c % channels;
                        const uint8_t* at_k = of_k + 2 * ((half * d + c) * kDistrHalfKeys + key);
                        const uint8_t* at_v = of_v +
                                              2 * ((half * d / channels + c / channels) * kDistrHalfKeys + key) * channels +
                                              16 * distr_v_chunk(d, key, in_piece / 8) + in_piece % 8 * 2;
                        if (is_half(at_k, k[size_t(j * d + c)], unit_k) && is_half(at_v, v[size_t(j * d + c)], unit_v))
                            continue;
                        std::printf("    tile %zu, head %d, key %d, channel %d\n", n, head, j, c);
                        return false;
                    }
                }
            }
        }
        return true;
    }

    Case c_;
    std::mt19937_64 random_;
    const cpu::PageCodec& codec_;
    std::vector<SequenceArgs> sequences_;
    std::vector<DistrKeys> tiles_;
    std::vector<DistrRows> blocks_;
    int q_rows_ = 0, k_rows_ = 0;
    std::vector<uint8_t> q_, k_, v_;
};

int run_all() {
    int cases = 0, failed = 0;
    for (int d : {32, 64, 128}) {
        for (int group_size : {2, 3, 4}) {
            for (DType type : {DType::kF16, DType::kBf16, DType::kF32}) {
                for (int data = 0; data < int(Data::kCount); ++data) {
                    const int n = cases++;
                    const Case c{d, group_size, 1 + n % 3, type, n / 2 % 2, Data(data), n / 5 % 2 == 1, uint64_t(n) + 1};
                    Problem problem(c);
                    if (problem.run()) continue;
                    ++failed;
                    std::printf("FAIL d %d, groups of %d, type %d, data %d, layout %d, saturate %d\n", d, group_size, int(type),
                                data, c.layout, c.saturate);
                }
            }
        }
    }
    std::printf("distr_test: %d cases, %d failed\n", cases, failed);
    return failed != 0;
}

}  // namespace
}  // namespace ta::cuda

// --bench: times in place of the tests. --attend: the kernels that attend alone.
int main(int argc, char** argv) {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    const std::string option = argc > 1 ? argv[1] : "";
    if (option == "--bench" || option == "--attend") return ta::cuda::testing::attend_distr(option == "--bench");
    return ta::cuda::run_all() | ta::cuda::testing::attend_distr(false);
}
