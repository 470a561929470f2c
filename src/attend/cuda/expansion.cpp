#include "src/attend/cuda/expansion.h"

#include <algorithm>
#include <bit>

namespace ta {
void CudaExpansion::release() {
    device_.deallocate(memory_, bytes_);
    memory_ = nullptr, bytes_ = 0;
}

// Waits if kernels still read the old memory, which is freed.
bool CudaExpansion::grow(size_t pages, size_t rest) {
    constexpr size_t kLeastBytes = size_t{16} << 20;
    if (pages >= refused_) return false;
    for (const size_t wanted : {std::max(kLeastBytes, std::bit_ceil(pages)), pages}) {
        uint8_t* const memory = device_.allocate(wanted + rest);
        if (!memory) continue;
        release();
        memory_ = memory, bytes_ = wanted + rest;
        return true;
    }
    refused_ = pages;
    return false;
}

// Calls of a plan run one after another on its stream, so a layer's expanded pages may replace those of the layer before. No
// graph has their address.
bool CudaExpansion::take(const CudaTables& tables, AttendWork& work) {
    constexpr size_t kAlignment = cuda::kEntryFlags + 1;  // CUDA promises less alignment
    const size_t pages = size_t(work.expand.pages) * cuda::expanded_page_bytes(work.args.head_dim, work.args.kv_heads);
    const size_t rest = tables.entries_bytes() + kAlignment;
    if (pages + rest > bytes_ && !grow(pages, rest)) return false;
    work.expand.to = reinterpret_cast<uint8_t*>(round_up(uintptr_t(memory_), kAlignment));
    work.expand.table = reinterpret_cast<uint64_t*>(work.expand.to + pages);
    return true;
}

}  // namespace ta
