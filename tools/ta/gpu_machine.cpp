// Compiled only in builds with CUDA.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>

#include "tools/ta/machine.h"

namespace ta::tools {
namespace {

void cuda_check(cudaError_t e, const char* what) {
    if (e != cudaSuccess) throw Failure(std::string(what) + ": " + cudaGetErrorString(e));
}

class GpuMachine final : public Machine {
  public:
    explicit GpuMachine(int ordinal) : ordinal_(ordinal) {
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
    int ordinal() const override { return ordinal_; }
    int numa_node() const override { return numa_node_; }
    void* allocate(size_t bytes) override {
        void* p = nullptr;
        cuda_check(cudaSetDevice(ordinal_), "choosing the GPU");
        cuda_check(cudaMalloc(&p, bytes), "GPU memory for tensors");
        return p;
    }
    void release(void* p) override { cudaFree(p); }
    void write(void* to, const void* from, size_t bytes) override {
        cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "copying to the GPU");
        cuda_check(cudaStreamSynchronize(nullptr), "copying to the GPU");  // cudaMemcpy from pageable memory returns earlier
    }
    void read(void* to, const void* from, size_t bytes) override {
        cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "copying from the GPU");
    }
    ta_stream stream() const override { return stream_; }
    void wait() override { cuda_check(cudaStreamSynchronize(stream_), "waiting for the GPU"); }

    double time(const std::function<void()>& calls) override {
        cuda_check(cudaSetDevice(ordinal_), "choosing the GPU");
        cudaEvent_t start, done;
        cuda_check(cudaEventCreate(&start), "creating an event");
        cuda_check(cudaEventCreate(&done), "creating an event");
        calls();  // so that the host is ahead of the device when the first event is due
        cuda_check(cudaEventRecord(start, stream_), "recording an event");
        calls();
        cuda_check(cudaEventRecord(done, stream_), "recording an event");
        wait();
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, start, done), "reading a time");
        for (cudaEvent_t e : {start, done}) cudaEventDestroy(e);
        return 1e-3 * ms;
    }
    std::function<void()> capture(const std::function<void()>& calls) override {
        cuda_check(cudaSetDevice(ordinal_), "choosing the GPU");
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        cuda_check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a graph");
        calls();
        cuda_check(cudaStreamEndCapture(stream_, &graph), "capturing a graph");
        cuda_check(cudaGraphInstantiate(&exec, graph, 0), "making a graph");
        cudaGraphDestroy(graph);
        const std::shared_ptr<CUgraphExec_st> kept(exec, cudaGraphExecDestroy);
        return [kept, stream = stream_] { cuda_check(cudaGraphLaunch(kept.get(), stream), "launching a graph"); };
    }

    // Copies pieces of 64 MiB by copy engine.
    double peer_bytes_per_s(Machine& other, bool both) override {
        constexpr size_t kBytes = size_t{64} << 20;
        constexpr int kCopies = 32;
        auto& peer = dynamic_cast<GpuMachine&>(other);
        GpuMachine* const ends[2] = {this, &peer};
        void* memory[2][2];  // [end][from, to]
        for (int e = 0; e < 2; ++e) {
            for (void*& m : memory[e]) m = ends[e]->allocate(kBytes);
        }
        cudaEvent_t start[2], done[2];
        for (int e = 0; e < 2; ++e) {
            cuda_check(cudaSetDevice(ends[e]->ordinal_), "choosing the GPU");
            cuda_check(cudaEventCreate(&start[e]), "creating an event");
            cuda_check(cudaEventCreate(&done[e]), "creating an event");
            const cudaError_t reached = cudaDeviceEnablePeerAccess(ends[1 - e]->ordinal_, 0);
            if (reached == cudaErrorPeerAccessAlreadyEnabled) (void)cudaGetLastError();
        }
        for (const int round : {0, 1}) {  // round 0 sets up the connection
            for (int e = 0; e < (both ? 2 : 1); ++e) {
                cuda_check(cudaSetDevice(ends[e]->ordinal_), "choosing the GPU");
                cuda_check(cudaEventRecord(start[e], ends[e]->up_), "recording an event");
                for (int i = 0; i < (round == 0 ? 1 : kCopies); ++i)
                    cudaMemcpyPeerAsync(memory[1 - e][1], ends[1 - e]->ordinal_, memory[e][0], ends[e]->ordinal_, kBytes,
                                        ends[e]->up_);
                cuda_check(cudaEventRecord(done[e], ends[e]->up_), "recording an event");
            }
            for (int e = 0; e < (both ? 2 : 1); ++e) cuda_check(cudaStreamSynchronize(ends[e]->up_), "copying to another GPU");
        }
        float longest = 0;
        for (int e = 0; e < (both ? 2 : 1); ++e) {
            float ms = 0;
            cuda_check(cudaEventElapsedTime(&ms, start[e], done[e]), "reading a time");
            longest = std::max(longest, ms);
        }
        for (int e = 0; e < 2; ++e) {
            cudaEventDestroy(start[e]);
            cudaEventDestroy(done[e]);
            for (void* m : memory[e]) cudaFree(m);
        }
        return double(kBytes) * kCopies * (both ? 2 : 1) / (1e-3 * longest);
    }

    double nccl_bytes_per_s(Machine& other) override {
        constexpr size_t kBytes = size_t{256} << 20;
        constexpr int kMessages = 8, kUint8 = 1;
        using Comm = struct ncclComm*;
        void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
        if (!library) return 0;
        const auto init = reinterpret_cast<int (*)(Comm*, int, const int*)>(dlsym(library, "ncclCommInitAll"));
        const auto abort = reinterpret_cast<int (*)(Comm)>(dlsym(library, "ncclCommAbort"));
        const auto begin = reinterpret_cast<int (*)()>(dlsym(library, "ncclGroupStart"));
        const auto end = reinterpret_cast<int (*)()>(dlsym(library, "ncclGroupEnd"));
        const auto send =
            reinterpret_cast<int (*)(const void*, size_t, int, int, Comm, cudaStream_t)>(dlsym(library, "ncclSend"));
        const auto receive = reinterpret_cast<int (*)(void*, size_t, int, int, Comm, cudaStream_t)>(dlsym(library, "ncclRecv"));
        auto& peer = dynamic_cast<GpuMachine&>(other);
        const int ordinals[2] = {ordinal_, peer.ordinal_};
        Comm comms[2] = {};
        if (!init || !abort || !begin || !end || !send || !receive || init(comms, 2, ordinals) != 0) return 0;
        void *const from = allocate(kBytes), *const to = peer.allocate(kBytes);
        double seconds = 0;
        bool good = true;
        for (const int round : {0, 1}) {  // round 0 connects
            wait();
            peer.wait();
            const auto start = std::chrono::steady_clock::now();
            for (int i = 0; i < (round == 0 ? 1 : kMessages) && good; ++i) {
                good = begin() == 0 && send(from, kBytes, kUint8, 1, comms[0], stream_) == 0 &&
                       receive(to, kBytes, kUint8, 0, comms[1], peer.stream_) == 0 && end() == 0;
            }
            wait();
            peer.wait();
            seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
        for (Comm c : comms) abort(c);
        release(from);
        peer.release(to);
        return good ? double(kBytes) * kMessages / seconds : 0;
    }

    // Copies pieces of 16 MiB, as fast as the copy engines can.
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
    const int ordinal_;
    cudaDeviceProp properties_{};
    int numa_node_ = -1;
    cudaStream_t stream_ = nullptr, up_ = nullptr, down_ = nullptr;
};

}  // namespace

std::unique_ptr<Machine> make_gpu_machine(int ordinal) {
    return std::make_unique<GpuMachine>(ordinal);
}

}  // namespace ta::tools
