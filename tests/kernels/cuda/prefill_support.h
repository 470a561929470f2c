// Shared by the test and the benchmark of the CUDA prefill kernel: memory, and pages with one scale each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/cuda/common/generation.h"
#include "kernels/cuda/variants.h"
#include "src/attend/cpu/stage1.h"
#include "tests/kernels/cuda/device_memory.h"
#include "tests/kernels/cuda/pages.h"

namespace ta::cuda::testing {

// Pinned host memory that the device reads.
class HostCopy {
  public:
    HostCopy() = default;
    explicit HostCopy(const std::vector<uint8_t>& v) {
        CHECK(cudaHostAlloc(&p_, std::max<size_t>(1, v.size()), cudaHostAllocMapped));
        std::memcpy(p_, v.data(), v.size());
    }
    HostCopy(const HostCopy&) = delete;
    HostCopy& operator=(HostCopy&& o) noexcept {
        std::swap(p_, o.p_);
        return *this;
    }
    ~HostCopy() { cudaFreeHost(p_); }
    void* get() const { return p_; }

  private:
    void* p_ = nullptr;
};

inline int multiprocessors() {
    int n = 0;
    CHECK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
    return n;
}

// The kernels that run here; `sm80`: without those for one architecture.
inline std::vector<const PrefillVariant*> kernels_here(bool sm80) {
    int generation = 0, major = 0, shared_bytes = 0;
    CHECK(kernel_generation(&generation));
    CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CHECK(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    std::vector<const PrefillVariant*> kernels;
    for (const PrefillVariant& v : kPrefillVariants) {
        if (v.runs_on(generation, major, shared_bytes) && !(sm80 && v.major > 0)) kernels.push_back(&v);
    }
    return kernels;
}

// Slots must be 4096-byte aligned; cudaMalloc promises 256.
class DevicePool {
  public:
    DevicePool() = default;
    explicit DevicePool(const std::vector<uint8_t>& bytes) : memory_(bytes.size() + kAlignment) {
        CHECK(cudaMemcpy(reinterpret_cast<void*>(address()), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    uint64_t address() const { return (reinterpret_cast<uint64_t>(memory_.get()) + kAlignment - 1) / kAlignment * kAlignment; }

  private:
    static constexpr uint64_t kAlignment = 4096;
    Device<uint8_t> memory_;
};

enum class Pages {
    kToken,          // 8 bits, one scale per page
    kPrompt,         // as a step of new sequences: the first has a scale per token, V in others exponents of tokens
    kTokenOwnScale,  // 8 bits, a scale per token
    kPrefix,         // channel pages below the chunk but for the first page, then kToken
    kChannel,        // channel pages wherever a page is full, the first too
    kRandom,
};
inline bool are_token_pages(Pages pages) {
    return pages == Pages::kToken || pages == Pages::kPrompt || pages == Pages::kTokenOwnScale;
}

// Writes all heads of a token page again, with one scale for K and, but for what `v_rule` adds, one for V.
inline void give_page_scales(PagePool& pool, uint64_t entry, const float* k, const float* v, int tokens,
                             ScaleRule v_rule = ScaleRule::kPage) {
    const cpu::PageCodec& codec = *cpu::find_kernels(TA_CPU_ISA_AUTO)->codec;
    const size_t d = size_t(pool.shape().head_dim), heads = size_t(pool.shape().kv_heads);
    const auto in = std::make_unique<cpu::HeadStage1>();
    std::vector<float> x(kPageTokens * d), amax(kPageTokens);
    for (size_t h = 0; h < heads; ++h) {
        for (const bool is_k : {true, false}) {
            for (size_t t = 0; t < size_t(tokens); ++t) {
                std::memcpy(x.data() + t * d, (is_k ? k : v) + (t * heads + h) * d, d * sizeof(float));
                amax[t] = codec.amax(x.data() + t * d, int64_t(d));
            }
            quantize_tokens(codec, {x.data(), amax.data(), int(d), 0, tokens}, {is_k ? ScaleRule::kPage : v_rule},
                            is_k ? in->k : in->v, is_k ? in->k_scale : in->v_scale);
        }
        codec.store_token_piece(*in, int(d), 0, tokens, const_cast<uint8_t*>(pool.piece(entry, int(h))));
    }
}

}  // namespace ta::cuda::testing
