// Device memory that grows, and pinned memory to copy from. Only CUDA builds include this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "src/core/checked.h"
#include "src/device/cuda/capture.h"
#include "src/device/cuda/device.h"

namespace ta {

// Device memory that grows, except within a captured call. Earlier parts are kept until the buffer is destroyed, since a
// captured graph may still read them.
class DeviceBuffer {
  public:
    // `first_use`: what the error text says an earlier step must have used, if a captured call needs more memory.
    explicit DeviceBuffer(CudaDevice& device, const char* first_use = "this kind of work")
        : device_(device), first_use_(first_use) {}
    ~DeviceBuffer() {
        for (const auto& [data, bytes] : parts_) device_.deallocate(data, bytes);
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    bool holds(size_t bytes) const { return bytes <= this->bytes(); }
    // TA_E_STATE if reserve() would refuse to grow because the call is captured.
    Status may_reserve(size_t bytes) const {
        return holds(bytes) || !CaptureScope::captured() ? Status() : needs_a_run(first_use_);
    }
    Status reserve(size_t bytes, const char* what) {
        if (holds(bytes)) return {};
        TA_RETURN_IF_ERROR(may_reserve(bytes));
        const size_t needed = round_up(bytes, 4096), ahead = round_up(2 * this->bytes(), 4096);
        if (ahead > needed && add(ahead, what).ok()) return {};
        return add(needed, what);
    }
    // set_up(data) writes the initial content of new memory. If it fails, the buffer stays as it was.
    template <typename SetUp>
    Status reserve(size_t bytes, const char* what, SetUp&& set_up) {
        if (holds(bytes)) return {};
        TA_RETURN_IF_ERROR(reserve(bytes, what));
        Status s = set_up(data());
        if (!s.ok()) {
            device_.deallocate(parts_.back().first, parts_.back().second);
            parts_.pop_back();
        }
        return s;
    }
    // Adds a new part of the same size. The old one is kept, since captured launches have its address.
    Status renew(const char* what) { return add(bytes(), what); }
    // The oldest part that holds `bytes`. So a caller with small needs keeps its address when the buffer grows for others;
    // captured launches depend on that.
    uint8_t* data_of(size_t bytes) const {
        for (const auto& [data, size] : parts_) {
            if (bytes <= size) return data;
        }
        return nullptr;
    }
    uint8_t* data() const { return parts_.empty() ? nullptr : parts_.back().first; }
    size_t bytes() const { return parts_.empty() ? 0 : parts_.back().second; }

  private:
    Status add(size_t bytes, const char* what) {
        parts_.reserve(parts_.size() + 1);
        uint8_t* data = device_.allocate(bytes);
        if (!data) {
            TA_RETURN_IF_ERROR(device_.health());
            return fail(TA_E_MEMORY, "GPU %d has no %zu bytes for %s", device_.ordinal(), bytes, what).bytes(bytes);
        }
        parts_.emplace_back(data, bytes);
        return {};
    }

    CudaDevice& device_;
    const char* const first_use_;
    std::vector<std::pair<uint8_t*, size_t>> parts_;
};

// Pinned host memory that the device reads from. It is reused when the work that reads it is over.
class PinnedBuffer {
  public:
    PinnedBuffer() = default;
    ~PinnedBuffer() {
        if (!done_ && !data_) return;
        const CudaScope scope(ordinal_);
        if (done_) {
            cudaEventSynchronize(done_);
            cudaEventDestroy(done_);
        }
        cudaFreeHost(data_);
    }
    PinnedBuffer(const PinnedBuffer&) = delete;
    PinnedBuffer& operator=(const PinnedBuffer&) = delete;

    Status take(const CudaDevice& device, size_t bytes) {
        ordinal_ = device.ordinal();
        if (!done_)
            TA_RETURN_IF_ERROR(device.check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "creating an event"));
        TA_RETURN_IF_ERROR(device.check(cudaEventSynchronize(done_), "waiting for an earlier step"));
        used_ = 0;
        if (bytes <= bytes_) return {};
        cudaFreeHost(data_);
        data_ = nullptr;
        bytes_ = 0;
        const size_t wanted = round_up(2 * bytes, 4096);
        TA_RETURN_IF_ERROR(device.check(cudaHostAlloc(&data_, wanted, cudaHostAllocDefault), "pinned host memory"));
        bytes_ = wanted;
        return {};
    }
    // The next part, 16-byte aligned. take() must have been given the sum of all parts, each rounded up to 16.
    void* part(size_t bytes) {
        void* p = static_cast<uint8_t*>(data_) + used_;
        used_ += round_up(bytes, 16);
        return p;
    }
    // Waits for the work that was recorded last; spins.
    Status wait(CudaDevice& device) const { return done_ ? device.wait_for(done_, "earlier work") : Status(); }
    bool done() const { return cudaEventQuery(done_) == cudaSuccess; }
    Status record(const CudaDevice& device, cudaStream_t stream) {
        return device.check(cudaEventRecord(done_, stream), "recording an event");
    }

  private:
    int ordinal_ = -1;
    void* data_ = nullptr;
    size_t bytes_ = 0, used_ = 0;
    cudaEvent_t done_ = nullptr;
};

}  // namespace ta
