// A device's services for attention in rounds (scatter.h): memory for rounds, copies of heads of tensors, and the calls. For a GPU:
// cuda_scatter.cpp.
#pragma once

#include <memory>

#include "src/attend/dense/dense.h"
#include "src/core/context.h"
#include "tiering/share/transport.h"

namespace ta {

// Memory that a group keeps from call to call.
class ScatterMemory {
  public:
    explicit ScatterMemory(const std::shared_ptr<Context>& context) : context_(context), host_(context->allocator()) {}

    // Of the device or of the host; on a CPU that is the same. Loses its contents. TA_E_MEMORY.
    Status reserve(size_t bytes, bool on_device);
    uint8_t* data() { return device_ ? device_.get() : host_.data(); }
    // Shares the memory that is reserved on the device, for others to write to.
    Result<share::MemoryName> share(share::Transport& transport);
    // A rank that wrote there may do so still.
    void forget_if_shared() {
        if (shared_.name.number != 0) release();
    }

  private:
    void release();

    const std::shared_ptr<Context> context_;
    Buffer host_;
    std::shared_ptr<uint8_t> device_;  // those that found it keep it, too, and with it the context
    size_t bytes_ = 0;                 // of device_
    share::Transport::Shared shared_;
};

// One thread's copies: each after the one before, and after the inputs of the call are complete.
class ScatterLane {
  public:
    virtual ~ScatterLane() = default;
    // Between tensors of one shape and type, in memory of the device or of the host.
    virtual Status copy(const TensorView& to, const TensorView& from) = 0;
    virtual Status copy(void* to, const void* from, size_t bytes) = 0;
    // Until they are over.
    virtual Status wait() = 0;
};

class ScatterDevice {
  public:
    virtual ~ScatterDevice() = default;
    virtual Result<std::unique_ptr<ScatterLane>> make_lane() = 0;
    // A GPU enqueues the calls below, in the order of the calls of a slot, 0 or 1: so that one slot's attention begins where the
    // other's leaves multiprocessors. From one thread.
    virtual Status attend(DenseCall call, uint32_t slot) = 0;
    virtual Status check(DenseCall call) = 0;  // check_dense(), on slot 0's stream
    virtual Status copy(const TensorView& to, const TensorView& from, uint32_t slot) = 0;
    virtual Status copy(void* to, const void* from, size_t bytes, uint32_t slot) = 0;
    virtual Status mark(uint32_t slot) = 0;
    // Until what came before the last mark of that slot is over. From any thread.
    virtual Status wait_for(uint32_t slot) = 0;
    // The same of all.
    virtual Status wait() = 0;
};

// `stream`: of the caller on a GPU, which slot 0 is enqueued on; `own_stream`: on one of its own instead.
Result<std::unique_ptr<ScatterDevice>> make_scatter_device(Context& context, ta_stream stream, bool own_stream);
Result<std::unique_ptr<ScatterDevice>> make_cuda_scatter_device(Context& context, CudaDevice& device, ta_stream stream,
                                                                bool own_stream);

}  // namespace ta
