// A GPU's part of attention in rounds. Only CUDA builds have this.
#include <climits>

#include "src/attend/dense/scatter_device.h"
#include "src/device/cuda/device.h"

namespace ta {
namespace {

// Copies of heads on a stream.
class Copies {
  public:
    explicit Copies(const CudaDevice& device) : device_(device) {}

    Status heads(const TensorView& to, const TensorView& from, cudaStream_t stream) const {
        const int64_t d = from.head_dim;
        if (to.stride_head == d && from.stride_head == d) {  // a token's heads are contiguous
            return rows(to.at(0, 0), to.stride_token, from.at(0, 0), from.stride_token, from.heads * d, from.tokens, from.dtype,
                        stream);
        }
        if (to.stride_token == d && from.stride_token == d) {  // a head's tokens are contiguous
            return rows(to.at(0, 0), to.stride_head, from.at(0, 0), from.stride_head, from.tokens * d, from.heads, from.dtype,
                        stream);
        }
        for (int64_t h = 0; h < from.heads; ++h) {
            TA_RETURN_IF_ERROR(
                rows(to.at(0, h), to.stride_token, from.at(0, h), from.stride_token, d, from.tokens, from.dtype, stream));
        }
        return {};
    }
    Status bytes(void* to, const void* from, size_t n, cudaStream_t stream) const {
        return n == 0 ? Status() : check(cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, stream));
    }

  private:
    // Copies `n` rows of `width` elements; strides are in elements.
    Status rows(uint8_t* to, int64_t to_stride, const uint8_t* from, int64_t from_stride, int64_t width, int64_t n, DType dtype,
                cudaStream_t stream) const {
        const auto element = int64_t(dtype_bytes(dtype)), to_pitch = to_stride * element, from_pitch = from_stride * element,
                   row = width * element;
        if (n == 0 || row == 0) return {};
        if (n == 1 || (to_pitch == row && from_pitch == row)) return bytes(to, from, size_t(row * n), stream);
        const auto fits = [&](int64_t pitch) { return pitch >= row && pitch <= INT_MAX; };
        if (fits(to_pitch) && fits(from_pitch)) {
            return check(cudaMemcpy2DAsync(to, size_t(to_pitch), from, size_t(from_pitch), size_t(row), size_t(n),
                                           cudaMemcpyDefault, stream));
        }
        for (int64_t i = 0; i < n; ++i)
            TA_RETURN_IF_ERROR(bytes(to + i * to_pitch, from + i * from_pitch, size_t(row), stream));
        return {};
    }
    Status check(cudaError_t error) const { return device_.check(error, "copying heads of a round"); }

    const CudaDevice& device_;
};

class Stream {
  public:
    explicit Stream(const CudaDevice& device) : device_(device) {}
    ~Stream() {
        if (!stream_) return;
        const CudaScope scope(device_.ordinal());
        cudaStreamSynchronize(stream_);
        cudaStreamDestroy(stream_);
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    Status create(int priority) {
        return device_.check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority), "creating a stream");
    }
    cudaStream_t get() const { return stream_; }

  private:
    const CudaDevice& device_;
    cudaStream_t stream_ = nullptr;
};

class Event {
  public:
    explicit Event(const CudaDevice& device) : device_(device) {}
    ~Event() {
        if (!event_) return;
        const CudaScope scope(device_.ordinal());
        cudaEventDestroy(event_);
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    Status record(cudaStream_t stream) {
        const CudaScope scope(device_.ordinal());
        if (!event_)
            TA_RETURN_IF_ERROR(device_.check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event"));
        return device_.check(cudaEventRecord(event_, stream), "recording an event");
    }
    Status wait() const { return event_ ? device_.wait_for(event_, "a round of heads") : Status(); }
    cudaEvent_t get() const { return event_; }

  private:
    const CudaDevice& device_;
    cudaEvent_t event_ = nullptr;
};

class CudaLane final : public ScatterLane {
  public:
    explicit CudaLane(const CudaDevice& device) : device_(device), copies_(device), stream_(device), done_(device) {}

    // `after`: an event to wait for first; may be nullptr.
    Status open(cudaEvent_t after) {
        const CudaScope scope(device_.ordinal());
        // High priority: copies must run before the rounds of attention, which fill the multiprocessors.
        int lowest = 0, highest = 0;
        TA_RETURN_IF_ERROR(device_.check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "asking for priorities"));
        TA_RETURN_IF_ERROR(stream_.create(highest));
        return after ? device_.check(cudaStreamWaitEvent(stream_.get(), after, 0), "waiting for the inputs") : Status();
    }
    Status copy(const TensorView& to, const TensorView& from) override {
        const CudaScope scope(device_.ordinal());
        return copies_.heads(to, from, stream_.get());
    }
    Status copy(void* to, const void* from, size_t bytes) override {
        const CudaScope scope(device_.ordinal());
        return copies_.bytes(to, from, bytes, stream_.get());
    }
    Status wait() override {
        TA_RETURN_IF_ERROR(done_.record(stream_.get()));
        return done_.wait();
    }

  private:
    const CudaDevice& device_;
    const Copies copies_;
    Stream stream_;
    Event done_;
};

class CudaScatterDevice final : public ScatterDevice {
  public:
    CudaScatterDevice(Context& context, CudaDevice& device, ta_stream stream)
        : context_(context),
          device_(device),
          copies_(device),
          own_{Stream(device), Stream(device)},
          streams_{stream, nullptr},
          begun_(device),
          marks_{Event(device), Event(device)} {}
    ~CudaScatterDevice() override { (void)wait(); }

    Status open(bool own_stream) {
        const CudaScope scope(device_.ordinal());
        TA_RETURN_IF_ERROR(device_.health());
        for (const int slot : {0, 1}) {
            if (slot == 0 && !own_stream) continue;
            TA_RETURN_IF_ERROR(own_[slot].create(0));
            streams_[slot] = own_[slot].get();
        }
        TA_RETURN_IF_ERROR(begun_.record(streams_[0]));
        return device_.check(cudaStreamWaitEvent(streams_[1], begun_.get(), 0), "waiting for the inputs");
    }
    Result<std::unique_ptr<ScatterLane>> make_lane() override {
        auto lane = std::make_unique<CudaLane>(device_);
        TA_RETURN_IF_ERROR(lane->open(begun_.get()));
        return std::unique_ptr<ScatterLane>(std::move(lane));
    }
    Status attend(DenseCall call, uint32_t slot) override {
        call.stream = streams_[slot];
        return attend_dense(context_, call);
    }
    Status check(DenseCall call) override {
        call.stream = streams_[0];
        return check_dense(context_, call);
    }
    Status copy(const TensorView& to, const TensorView& from, uint32_t slot) override {
        const CudaScope scope(device_.ordinal());
        return copies_.heads(to, from, streams_[slot]);
    }
    Status copy(void* to, const void* from, size_t bytes, uint32_t slot) override {
        const CudaScope scope(device_.ordinal());
        return copies_.bytes(to, from, bytes, streams_[slot]);
    }
    Status mark(uint32_t slot) override { return marks_[slot].record(streams_[slot]); }
    Status wait_for(uint32_t slot) override { return marks_[slot].wait(); }
    Status wait() override {
        if (!begun_.get()) return {};  // nothing was enqueued
        Status s;
        for (const cudaStream_t stream : streams_) {
            Event all(device_);
            Status over = all.record(stream);
            if (over.ok()) over = all.wait();
            if (s.ok()) s = std::move(over);
        }
        return s;
    }

  private:
    Context& context_;
    CudaDevice& device_;
    const Copies copies_;
    Stream own_[2];
    cudaStream_t streams_[2];
    Event begun_;
    Event marks_[2];
};

}  // namespace

Result<std::unique_ptr<ScatterDevice>> make_cuda_scatter_device(Context& context, CudaDevice& device, ta_stream stream,
                                                                bool own_stream) {
    auto made = std::make_unique<CudaScatterDevice>(context, device, stream);
    TA_RETURN_IF_ERROR(made->open(own_stream));
    return std::unique_ptr<ScatterDevice>(std::move(made));
}

}  // namespace ta
