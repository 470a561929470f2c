// Compiled where there is CUDA.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "tools/ta/machine.h"

namespace ta::tools {
namespace {

void cuda_check(cudaError_t e, const char* what) {
    if (e != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(e));
}

class GpuMachine final : public Machine {
  public:
    explicit GpuMachine(int ordinal) {
        cuda_check(cudaSetDevice(ordinal), "choosing the GPU");
        cuda_check(cudaGetDeviceProperties(&properties_, ordinal), "asking the GPU for its name");
        if (cudaDeviceGetAttribute(&numa_node_, cudaDevAttrHostNumaId, ordinal) != cudaSuccess) numa_node_ = -1;
        for (cudaStream_t* s : {&stream_, &up_, &down_})
            cuda_check(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), "creating a stream");
    }
    ~GpuMachine() override {
        for (cudaStream_t s : {stream_, up_, down_}) cudaStreamDestroy(s);
    }
    ta_device_kind kind() const override { return TA_DEVICE_CUDA; }
    std::string name() const override { return properties_.name; }
    int numa_node() const override { return numa_node_; }
    void* allocate(size_t bytes) override {
        void* p = nullptr;
        cuda_check(cudaMalloc(&p, bytes), "GPU memory for tensors");
        return p;
    }
    void release(void* p) override { cudaFree(p); }
    void write(void* to, const void* from, size_t bytes) override {
        cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
        cuda_check(cudaStreamSynchronize(nullptr), "copying to the GPU");  // cudaMemcpy from pageable memory returns earlier
    }
    ta_stream stream() const override { return stream_; }
    void wait() override { cuda_check(cudaStreamSynchronize(stream_), "waiting for the GPU"); }

    // 16 MiB pieces, as fast as the copy engines go.
    double copy_bytes_per_s(bool to_host, bool both) override {
        constexpr size_t kBytes = size_t{16} << 20;
        constexpr int kCopies = 64;
        void *device[2], *host[2];
        for (int i = 0; i < 2; ++i) {
            cuda_check(cudaMalloc(&device[i], kBytes), "GPU memory");
            cuda_check(cudaHostAlloc(&host[i], kBytes, cudaHostAllocDefault), "pinned host memory");
        }
        cudaEvent_t start, up_done, down_done;
        for (cudaEvent_t* e : {&start, &up_done, &down_done}) cuda_check(cudaEventCreate(e), "creating an event");
        cuda_check(cudaEventRecord(start, up_), "recording an event");
        cuda_check(cudaStreamWaitEvent(down_, start, 0), "waiting for an event");
        for (int i = 0; i < kCopies; ++i) {
            if (both || !to_host) cudaMemcpyAsync(device[0], host[0], kBytes, cudaMemcpyHostToDevice, up_);
            if (both || to_host) cudaMemcpyAsync(host[1], device[1], kBytes, cudaMemcpyDeviceToHost, down_);
        }
        cuda_check(cudaEventRecord(up_done, up_), "recording an event");
        cuda_check(cudaEventRecord(down_done, down_), "recording an event");
        cuda_check(cudaStreamSynchronize(up_), "copying");
        cuda_check(cudaStreamSynchronize(down_), "copying");
        float up_ms = 0, down_ms = 0;
        cuda_check(cudaEventElapsedTime(&up_ms, start, up_done), "reading a time");
        cuda_check(cudaEventElapsedTime(&down_ms, start, down_done), "reading a time");
        for (cudaEvent_t e : {start, up_done, down_done}) cudaEventDestroy(e);
        for (int i = 0; i < 2; ++i) {
            cudaFree(device[i]);
            cudaFreeHost(host[i]);
        }
        return double(kBytes) * kCopies * (both ? 2 : 1) / (1e-3 * std::max(up_ms, down_ms));
    }

  private:
    cudaDeviceProp properties_{};
    int numa_node_ = -1;
    cudaStream_t stream_ = nullptr, up_ = nullptr, down_ = nullptr;
};

}  // namespace

std::unique_ptr<Machine> make_gpu_machine(int ordinal) {
    return std::make_unique<GpuMachine>(ordinal);
}

}  // namespace ta::tools
