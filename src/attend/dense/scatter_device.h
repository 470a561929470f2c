// What attention in rounds (scatter.h) needs of a device: memory for rounds, copies of heads, and the attend calls. For GPUs:
// cuda_scatter.cpp.
#pragma once

#include <memory>

#include "src/attend/dense/dense.h"
#include "src/core/context.h"
#include "tiering/share/transport.h"

namespace ta {

// Memory that a group keeps between calls.
class ScatterMemory {
  public:
    explicit ScatterMemory(const std::shared_ptr<Context>& context) : context_(context), host_(context->allocator()) {}

    // Takes memory of the device or of the host, which are the same on a CPU. Old contents are lost. TA_E_MEMORY.
    Status reserve(size_t bytes, bool on_device);
    uint8_t* data() { return device_ ? device_.get() : host_.data(); }
    // Shares the reserved device memory, so that other ranks can write to it.
    Result<share::MemoryName> share(share::Transport& transport);
    // For a failed call: gives up shared memory, as a rank may still write there.
    void forget_if_shared() {
        if (shared_.name.number != 0) release();
    }

  private:
    void release();

    const std::shared_ptr<Context> context_;
    Buffer host_;
    std::shared_ptr<uint8_t> device_;  // ranks that found it keep it, and so the context
    size_t bytes_ = 0;                 // of device_
    share::Transport::Shared shared_;
};

// Copies of one thread: each runs after the one before, and after the call's inputs are complete.
class ScatterLane {
  public:
    virtual ~ScatterLane() = default;
    // Copies between tensors of equal shape and type, in device or host memory.
    virtual Status copy(const TensorView& to, const TensorView& from) = 0;
    virtual Status copy(void* to, const void* from, size_t bytes) = 0;
    // Waits for all copies.
    virtual Status wait() = 0;
};

class ScatterDevice {
  public:
    virtual ~ScatterDevice() = default;
    virtual Result<std::unique_ptr<ScatterLane>> make_lane() = 0;
    // A GPU enqueues the following calls in order, for each slot, 0 or 1, on a stream of its own: one slot's attention begins
    // while the other's still runs on some multiprocessors. Call from one thread.
    virtual Status attend(DenseCall call, uint32_t slot) = 0;
    virtual Status check(DenseCall call) = 0;  // check_dense(), on slot 0's stream
    virtual Status copy(const TensorView& to, const TensorView& from, uint32_t slot) = 0;
    virtual Status copy(void* to, const void* from, size_t bytes, uint32_t slot) = 0;
    virtual Status mark(uint32_t slot) = 0;
    // Waits until all that came before the last mark() of the slot is done. Any thread.
    virtual Status wait_for(uint32_t slot) = 0;
    // Waits for all work.
    virtual Status wait() = 0;
};

// `stream`: the caller's on a GPU, which slot 0 uses. `own_stream`: slot 0 uses a stream of its own instead.
Result<std::unique_ptr<ScatterDevice>> make_scatter_device(Context& context, ta_stream stream, bool own_stream);
Result<std::unique_ptr<ScatterDevice>> make_cuda_scatter_device(Context& context, CudaDevice& device, ta_stream stream,
                                                                bool own_stream);

}  // namespace ta
