// The CUDA dense call's pages against the CPU's, byte by byte, over memory that is 0xFF where nothing was written.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu/page_codec.h"
#include "kernels/cuda/any/dense/dense.h"
#include "src/attend/cpu/stage1.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/gpu.h"

namespace ta::cuda {
namespace {

using testing::Device;

enum class Data { kNormal, kTiny, kHuge, kZeros, kNonfinite, kCount };

struct Case {
    int d;
    DType type;
    DenseScale k_scale, v_scale;
    int levels;
    int layout;  // 0: dense; 1: rows not aligned, heads backwards
    Data data;
    bool saturate;
    uint64_t seed;
};

class Problem {
  public:
    explicit Problem(const Case& c) : c_(c), random_(c.seed), codec_(cpu::page_codec_scalar()) {
        int row = 0, sequence = 0;
        for (int n : {64, 1, 200, 7, 63, 129}) {
            for (int first = 0; first < n; first += kPageTokens) {
                pages_.push_back({row + first, std::min(kPageTokens, n - first), sequence, 0});
            }
            row += n;
            ++sequence;
        }
        rows_ = row;
        sequences_ = sequence;
        make(k_);
        make(v_);
    }

    bool run() {
        const size_t page_bytes = kHeads * TokenLayout(c_.d).bytes();
        Device<uint8_t> arena(pages_.size() * page_bytes), k(k_), v(v_);
        std::vector<uint64_t> table;
        for (size_t n = 0; n < pages_.size(); ++n) table.push_back(reinterpret_cast<uint64_t>(arena.get()) + n * page_bytes);
        Device<uint64_t> device_table(table);
        Device<DensePage> pages(pages_);
        Device<uint32_t> amax(std::vector<uint32_t>(size_t(sequences_ * kHeads), 0));
        Device<uint32_t> nonfinite(std::vector<uint32_t>(size_t(sequences_), 0));
        DensePagesArgs a{};
        a.head_dim = c_.d;
        a.kv_heads = kHeads;
        a.n_pages = int32_t(pages_.size());
        a.pages = pages.get();
        a.table = device_table.get();
        a.k = tensor(k.get());
        a.v = tensor(v.get());
        a.k_scale = c_.k_scale;
        a.v_scale = c_.v_scale;
        a.levels = c_.levels;
        a.v_amax = amax.get();
        a.saturate = c_.saturate;
        a.nonfinite = nonfinite.get();
        if (c_.v_scale == DenseScale::kTensor) CHECK(launch_dense_amax(a, nullptr));
        CHECK(launch_dense_pages(a, nullptr));
        CHECK(cudaDeviceSynchronize());
        std::vector<uint8_t> want(pages_.size() * page_bytes, 0);
        std::vector<uint32_t> want_nonfinite(size_t(sequences_), 0);
        quantize(want, want_nonfinite);
        std::vector<uint8_t> got = arena.copy();
        if (c_.v_scale == DenseScale::kNone) forget_v(got, want);
        if (nonfinite.copy() != want_nonfinite) {
            std::printf("    counts of replaced values differ\n");
            return false;
        }
        for (size_t i = 0; i < got.size(); ++i) {
            if (got[i] == want[i]) continue;
            std::printf("    page %zu, head %zu, byte %zu: %d, expected %d\n", i / page_bytes,
                        i % page_bytes / TokenLayout(c_.d).bytes(), i % TokenLayout(c_.d).bytes(), got[i], want[i]);
            return false;
        }
        return true;
    }

  private:
    static constexpr int kHeads = 3;

    int64_t stride_row() const { return int64_t(kHeads) * c_.d + (c_.layout ? 3 : 0); }
    int64_t stride_head() const { return c_.layout ? -c_.d : c_.d; }
    int64_t origin() const { return c_.layout ? (kHeads - 1) * c_.d + 1 : 0; }
    size_t element() const { return dtype_bytes(c_.type); }
    size_t at(int64_t row, int head) const { return size_t(origin() + row * stride_row() + head * stride_head()) * element(); }
    TensorArgs tensor(uint8_t* p) const { return {p + origin() * int64_t(element()), stride_row(), stride_head(), c_.type}; }

    float value() {
        const float x = std::normal_distribution<float>()(random_);
        switch (c_.data) {
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
    void make(std::vector<uint8_t>& bytes) {
        bytes.assign((size_t(stride_row()) * size_t(rows_) + 16) * element(), 0xFF);
        std::vector<float> x(size_t(c_.d), 0.0f);
        for (int row = 0; row < rows_; ++row) {
            for (int head = 0; head < kHeads; ++head) {
                for (float& f : x) f = value();
                codec_.from_float(x.data(), c_.d, c_.type, bytes.data() + at(row, head));
            }
        }
    }

    void read(const std::vector<uint8_t>& bytes, const DensePage& page, int head, float* x, float* amax, uint32_t* replaced) {
        for (int t = 0; t < page.tokens; ++t) {
            float* to = x + t * c_.d;
            uint32_t n = uint32_t(codec_.to_float(bytes.data() + at(page.row + t, head), c_.type, c_.d, c_.saturate, to));
            for (int c = 0; c < c_.d; ++c) {
                if (std::fabs(to[c]) <= kMaxMagnitude) continue;
                to[c] = 0.0f;
                ++n;
            }
            if (replaced) *replaced += n;
            amax[t] = codec_.amax(to, c_.d);
        }
    }
    void quantize(std::vector<uint8_t>& want, std::vector<uint32_t>& nonfinite) {
        std::vector<float> x(size_t(kPageTokens * c_.d)), largest(size_t(sequences_ * kHeads), 0.0f);
        float amax[kPageTokens];
        for (const DensePage& page : pages_) {
            for (int head = 0; head < kHeads; ++head) {
                read(v_, page, head, x.data(), amax, nullptr);
                float& most = largest[size_t(page.sequence * kHeads + head)];
                for (int t = 0; t < page.tokens; ++t) most = std::max(most, amax[t]);
            }
        }
        const auto rule = [](DenseScale s) {
            return s == DenseScale::kToken  ? ScaleRule::kToken
                   : s == DenseScale::kPage ? ScaleRule::kPage
                                            : ScaleRule::kUniversal;
        };
        static cpu::HeadStage1 codes;
        for (size_t n = 0; n < pages_.size(); ++n) {
            const DensePage& page = pages_[n];
            for (int head = 0; head < kHeads; ++head) {
                std::memset(static_cast<void*>(&codes), 0, sizeof codes);
                read(k_, page, head, x.data(), amax, &nonfinite[size_t(page.sequence)]);
                const TokenRows rows{x.data(), amax, c_.d, 0, page.tokens};
                quantize_tokens(codec_, rows, {rule(c_.k_scale), 0.0f, nullptr, c_.levels}, codes.k, codes.k_scale);
                read(v_, page, head, x.data(), amax, &nonfinite[size_t(page.sequence)]);
                const float scale = stage1_scale(largest[size_t(page.sequence * kHeads + head)], c_.levels);
                quantize_tokens(codec_, rows, {rule(c_.v_scale), scale, nullptr, c_.levels}, codes.v, codes.v_scale);
                uint8_t* piece = want.data() + (n * kHeads + size_t(head)) * TokenLayout(c_.d).bytes();
                codec_.store_token_piece(codes, c_.d, 0, kPageTokens, piece);
            }
        }
    }
    // Without codes of V nothing is written there.
    void forget_v(std::vector<uint8_t>& got, std::vector<uint8_t>& want) const {
        const TokenLayout at(c_.d);
        for (size_t piece = 0; piece < got.size(); piece += at.bytes()) {
            for (size_t i = 0; i < at.bytes(); ++i) {
                const bool of_v = (i >= at.v_codes() && i < at.k_scale()) || i >= at.v_scale();
                if (of_v && got[piece + i] == 0xFF) got[piece + i] = want[piece + i];
            }
        }
    }

    Case c_;
    std::mt19937_64 random_;
    const cpu::PageCodec& codec_;
    std::vector<DensePage> pages_;
    int rows_ = 0, sequences_ = 0;
    std::vector<uint8_t> k_, v_;
};

int run_all() {
    int cases = 0, failed = 0;
    const DenseScale v_scales[] = {DenseScale::kToken, DenseScale::kPage, DenseScale::kTensor, DenseScale::kNone};
    for (int d : {64, 96, 128, 256}) {
        for (DType type : {DType::kF16, DType::kBf16, DType::kF32}) {
            for (int data = 0; data < int(Data::kCount); ++data) {
                for (DenseScale v_scale : v_scales) {
                    const int n = cases++;
                    const Case c{d,
                                 type,
                                 n % 2 ? DenseScale::kPage : DenseScale::kToken,
                                 v_scale,
                                 n / 2 % 2 ? 119 : 127,
                                 n / 3 % 2,
                                 Data(data),
                                 n / 5 % 2 == 1,
                                 uint64_t(n) + 1};
                    Problem problem(c);
                    if (problem.run()) continue;
                    ++failed;
                    std::printf("FAIL d %d, type %d, data %d, K %d, V %d, levels %d, layout %d, saturate %d\n", d, int(type),
                                data, int(c.k_scale), int(v_scale), c.levels, c.layout, c.saturate);
                }
            }
        }
    }
    std::printf("dense_test: %d cases, %d failed\n", cases, failed);
    return failed != 0;
}

}  // namespace
}  // namespace ta::cuda

int main() {
    if (ta::cuda::testing::without_gpu()) return ta::cuda::testing::kSkipped;
    return ta::cuda::run_all();
}
