#include "src/kv/append_records.h"

#include <atomic>
#include <vector>

#include "src/core/checked.h"

namespace ta {

Status AppendRecords::open(Device& device, const Pages& pages, uint32_t max_sequences) {
    max_sequences_ = max_sequences;
    if (pages.numerics.universal_open_scale) {
        progress_at_ = round_up(size_t(max_sequences) * 2 * scales_of(pages.geometry) * sizeof(float), kProgressBytes);
        const std::vector<uint8_t> progress(size_t(max_sequences) * pages.geometry.most_kv_heads * kProgressBytes);
        const size_t bytes = progress_at_ + progress.size();
        scales_ = {device.allocate(bytes), FreeMemory{&device, bytes}};
        if (!scales_)
            return fail(TA_E_MEMORY, "GPU %d has no %zu bytes for universal scales", device.ordinal(), bytes).bytes(bytes);
        TA_RETURN_IF_ERROR(device.write(this->progress(), progress.data(), progress.size()));
    }
    nonfinite_ = {device.allocate_counters(first_even(max_sequences) + 2), FreeCounters{&device}};
    if (!nonfinite_) return fail(TA_E_MEMORY, "no pinned host memory for %u counters", max_sequences);
    return {};
}

uint32_t AppendRecords::nonfinite_of(uint32_t slot) const {
    return nonfinite_ ? std::atomic_ref(nonfinite_[slot]).load(std::memory_order_relaxed) : 0;
}

}  // namespace ta
