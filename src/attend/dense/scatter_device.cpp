#include "src/attend/dense/scatter_device.h"

#include <cstring>

namespace ta {
namespace {

void copy_heads(const TensorView& to, const TensorView& from) {
    const size_t row = size_t(from.head_dim) * dtype_bytes(from.dtype);
    const bool rows_meet = to.stride_head == to.head_dim && from.stride_head == from.head_dim;
    for (int64_t t = 0; t < from.tokens; ++t) {
        if (rows_meet) {
            std::memcpy(to.at(t, 0), from.at(t, 0), row * size_t(from.heads));
            continue;
        }
        for (int64_t h = 0; h < from.heads; ++h) std::memcpy(to.at(t, h), from.at(t, h), row);
    }
}

class HostLane final : public ScatterLane {
  public:
    Status copy(const TensorView& to, const TensorView& from) override {
        copy_heads(to, from);
        return {};
    }
    Status copy(void* to, const void* from, size_t bytes) override {
        if (bytes > 0) std::memcpy(to, from, bytes);
        return {};
    }
    Status wait() override { return {}; }
};

class HostScatterDevice final : public ScatterDevice {
  public:
    explicit HostScatterDevice(Context& context) : context_(context) {}

    Result<std::unique_ptr<ScatterLane>> make_lane() override { return std::unique_ptr<ScatterLane>(new HostLane); }
    Status attend(DenseCall call, uint32_t) override { return attend_dense(context_, call); }
    Status check(DenseCall call) override { return check_dense(context_, call); }
    Status copy(const TensorView& to, const TensorView& from, uint32_t) override { return lane_.copy(to, from); }
    Status copy(void* to, const void* from, size_t bytes, uint32_t) override { return lane_.copy(to, from, bytes); }
    Status mark(uint32_t) override { return {}; }
    Status wait_for(uint32_t) override { return {}; }
    Status wait() override { return {}; }

  private:
    Context& context_;
    HostLane lane_;
};

}  // namespace

Status ScatterMemory::reserve(size_t bytes, bool on_device) {
    Device* const device = on_device ? context_->device() : nullptr;
    if (!device) {
        release();
        if (host_.reserve(bytes)) return {};
        return fail(TA_E_MEMORY, "no %zu bytes of host memory for rounds of heads", bytes).bytes(bytes);
    }
    if (bytes <= bytes_) return {};
    release();
    uint8_t* const memory = device->allocate(bytes);
    if (!memory) {
        TA_RETURN_IF_ERROR(device->health());
        return fail(TA_E_MEMORY, "%s has no %zu bytes for rounds of heads", device->name(), bytes).bytes(bytes);
    }
    device_.reset(memory, [context = context_, bytes](uint8_t* p) { context->device()->deallocate(p, bytes); });
    bytes_ = bytes;
    return {};
}

Result<share::MemoryName> ScatterMemory::share(share::Transport& transport) {
    if (shared_.name.number == 0) {
        Result<share::Transport::Shared> shared = transport.share_memory(device_, bytes_);
        if (!shared.ok()) return std::move(shared).status();
        shared_ = shared.take();
    }
    return shared_.name;
}

void ScatterMemory::release() {
    shared_ = {};
    device_.reset();
    bytes_ = 0;
}

Result<std::unique_ptr<ScatterDevice>> make_scatter_device(Context& context, ta_stream stream, bool own_stream) {
#ifdef TA_HAVE_CUDA
    Device* device = context.device();
    if (CudaDevice* cuda = device ? device->cuda() : nullptr)
        return make_cuda_scatter_device(context, *cuda, stream, own_stream);
#endif
    (void)stream, (void)own_stream;
    return std::unique_ptr<ScatterDevice>(new HostScatterDevice(context));
}

}  // namespace ta
