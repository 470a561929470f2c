#include "src/device/cuda/device.h"

#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "kernels/cuda/common/generation.h"
#include "src/device/cuda/moves.h"

namespace ta {
namespace {

// Errors after which every later call on the device fails.
bool ends_device(cudaError_t error) {
    switch (error) {
        case cudaErrorIllegalAddress:
        case cudaErrorLaunchFailure:
        case cudaErrorLaunchTimeout:
        case cudaErrorHardwareStackError:
        case cudaErrorIllegalInstruction:
        case cudaErrorMisalignedAddress:
        case cudaErrorInvalidAddressSpace:
        case cudaErrorInvalidPc:
        case cudaErrorAssert:
        case cudaErrorECCUncorrectable:
        case cudaErrorNvlinkUncorrectable:
        case cudaErrorDevicesUnavailable:
        case cudaErrorExternalDevice:
        case cudaErrorContained:
        case cudaErrorTensorMemoryLeak:
        case cudaErrorMpsClientTerminated:
        case cudaErrorContextIsDestroyed:
            return true;
        default:
            return false;
    }
}

// cudaMalloc aligns to at least 256 bytes, and from 1 MiB on to pages of 2 MiB.
constexpr uint64_t kAlignment = 256;
size_t taken_for(size_t bytes) {
    return std::max<size_t>(bytes, 2 << 20);
}

// Functions that only the driver API has. Among them is the stack of contexts: cudaSetDevice() can restore a device but not
// "none", and would create a context on that device.
struct Driver {
    decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
    decltype(&cuCtxPushCurrent) push = nullptr;
    decltype(&cuCtxPopCurrent) pop = nullptr;
    decltype(&cuMemGetAddressRange) get_address_range = nullptr;

    Driver() {
        find("cuDevicePrimaryCtxRetain", retain);
        find("cuCtxPushCurrent", push);
        find("cuCtxPopCurrent", pop);
        find("cuMemGetAddressRange", get_address_range);
    }
    // The primary context of a device, which is never released; nullptr if there is none.
    CUcontext context_of(int ordinal) {
        constexpr int kDevices = 64;
        static std::atomic<CUcontext> kept[kDevices];
        if (ordinal < 0 || ordinal >= kDevices || !retain || !push || !pop) return nullptr;
        CUcontext context = kept[ordinal].load(std::memory_order_acquire);
        if (!context && retain(&context, ordinal) == CUDA_SUCCESS) kept[ordinal].store(context, std::memory_order_release);
        return context;
    }

  private:
    template <class Function>
    static void find(const char* name, Function& function) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
        const cudaError_t e = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
        const cudaError_t e = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
        if (e == cudaSuccess && result == cudaDriverEntryPointSuccess) function = reinterpret_cast<Function>(found);
    }
};

Driver& driver() {
    static Driver of_process;
    return of_process;
}

}  // namespace

CudaScope::CudaScope(int ordinal) : callers_error_(cudaPeekAtLastError() != cudaSuccess) {
    if (ordinal < 0) return;
    const CUcontext context = driver().context_of(ordinal);
    pushed_ = context && driver().push(context) == CUDA_SUCCESS;
    outside_.emplace();
}

CudaScope::~CudaScope() {
    outside_.reset();
    CUcontext popped;
    if (pushed_) driver().pop(&popped);
    if (!callers_error_) cudaGetLastError();
}

CudaDevice::CudaDevice(int ordinal) : ordinal_(ordinal) {}

Result<std::unique_ptr<Device>> CudaDevice::open(int ordinal) {
    const CudaScope scope(-1);
    int count = 0;
    const cudaError_t counted = cudaGetDeviceCount(&count);
    if (counted != cudaSuccess) {
        return fail(TA_E_UNSUPPORTED, "no GPU can be used here: %s", cudaGetErrorString(counted));
    }
    if (ordinal < 0 || ordinal >= count) {
        return fail(TA_E_INVALID, "options.device_ordinal is %d; this machine has %d GPUs", ordinal, count);
    }
    std::unique_ptr<CudaDevice> device(new CudaDevice(ordinal));
    const CudaScope on_device(ordinal);
    if (!on_device.entered())
        return fail(TA_E_DEVICE, "GPU %d gives no context: it has no memory, or is another process's", ordinal);
    TA_RETURN_IF_ERROR(device->check(cudaGetDeviceProperties(&device->properties_, ordinal), "reading the GPU's properties"));
    if (device->properties_.major < 8) {
        return fail(TA_E_UNSUPPORTED, "%s has compute capability %d.%d; the kernels need 8.0", device->name(),
                    device->properties_.major, device->properties_.minor);
    }
    const cudaError_t found = cuda::kernel_generation(&device->generation_);
    if (found == cudaErrorNoKernelImageForDevice) {
        return fail(TA_E_UNSUPPORTED, "this build has no code for %s (sm_%d); TA_CUDA_ARCHITECTURES says what is built",
                    device->name(), device->compute_capability());
    }
    TA_RETURN_IF_ERROR(device->check(found, "looking at the kernels"));
    for (cudaStream_t* s : {&device->copies_, &device->waits_})
        TA_RETURN_IF_ERROR(device->check(cudaStreamCreateWithFlags(s, cudaStreamNonBlocking), "creating a stream"));
    device->moves_ = std::make_unique<CudaMoves>(*device);
    TA_RETURN_IF_ERROR(device->moves_->open());
    return std::unique_ptr<Device>(std::move(device));
}

CudaDevice::~CudaDevice() {
    const CudaScope scope(ordinal_);
    moves_.reset();
    if (copies_) cudaStreamDestroy(copies_);
    if (waits_) cudaStreamDestroy(waits_);
    if (zeroed_) cudaEventDestroy(zeroed_);
}

Result<bool> CudaDevice::reach(std::span<const int> ordinals) {
    const CudaScope scope(ordinal_);
    for (size_t i = 0; i < ordinals.size(); ++i) {
        for (size_t j = 0; j < i; ++j) {
            int there = 0, back = 0;
            if (ordinals[i] == ordinals[j]) return false;
            TA_RETURN_IF_ERROR(check(cudaDeviceCanAccessPeer(&there, ordinals[i], ordinals[j]), "asking for peer access"));
            TA_RETURN_IF_ERROR(check(cudaDeviceCanAccessPeer(&back, ordinals[j], ordinals[i]), "asking for peer access"));
            if (!there || !back) return false;
        }
    }
    for (const int peer : ordinals) {
        if (peer == ordinal_) continue;
        const cudaError_t enabled = cudaDeviceEnablePeerAccess(peer, 0);
        if (enabled != cudaErrorPeerAccessAlreadyEnabled) TA_RETURN_IF_ERROR(check(enabled, "reaching another GPU"));
    }
    return true;
}

Result<ExportedMemory> CudaDevice::export_memory(const uint8_t* memory) {
    const CudaScope scope(ordinal_);
    ExportedMemory e{};
    CUdeviceptr base = 0;
    if (!driver().get_address_range || driver().get_address_range(&base, nullptr, CUdeviceptr(memory)) != CUDA_SUCCESS)
        return fail(TA_E_UNSUPPORTED, "GPU %d does not say where an allocation begins", ordinal_);
    cudaIpcMemHandle_t handle;
    static_assert(sizeof handle == sizeof e.handle);
    if (const cudaError_t error = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base)); error != cudaSuccess)
        return fail(TA_E_UNSUPPORTED, "memory of GPU %d cannot be shared with other processes: %s", ordinal_,
                    cudaGetErrorString(error));
    std::memcpy(e.handle, &handle, sizeof handle);
    e.offset = CUdeviceptr(memory) - base;
    return e;
}

Result<ImportedMemory> CudaDevice::import_memory(const ExportedMemory& memory) {
    const CudaScope scope(ordinal_);
    cudaIpcMemHandle_t handle;
    std::memcpy(&handle, memory.handle, sizeof handle);
    void* base = nullptr;
    if (const cudaError_t error = cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess); error != cudaSuccess)
        return fail(TA_E_UNSUPPORTED, "GPU %d does not reach what another process shares: %s", ordinal_,
                    cudaGetErrorString(error));
    const auto unmap = [ordinal = ordinal_, base](uint8_t*) {
        const CudaScope on_device(ordinal);
        cudaIpcCloseMemHandle(base);
    };
    const std::shared_ptr<uint8_t> whole(static_cast<uint8_t*>(base), unmap);
    // The other process says where in the allocation its memory begins. Only the driver knows how long the allocation is.
    CUdeviceptr begin = 0;
    size_t bytes = 0;
    if (!driver().get_address_range || driver().get_address_range(&begin, &bytes, CUdeviceptr(base)) != CUDA_SUCCESS)
        return fail(TA_E_UNSUPPORTED, "GPU %d does not say how long memory is that another process shares", ordinal_);
    if (memory.offset >= bytes || memory.offset % kAlignment != 0) {
        return fail(TA_E_CORRUPT, "memory of %zu bytes was shared from byte %llu on", bytes, (unsigned long long)memory.offset);
    }
    return ImportedMemory{{whole, whole.get() + memory.offset}, bytes - memory.offset};
}

std::string CudaDevice::bus_address() const {
    const CudaScope scope(ordinal_);
    char address[32] = {};
    return cudaDeviceGetPCIBusId(address, int(sizeof address), ordinal_) == cudaSuccess ? address : "";
}

uint8_t* CudaDevice::allocate(size_t bytes) {
    const CudaScope scope(ordinal_);
    void* ptr = nullptr;
    if (!check(cudaMalloc(&ptr, taken_for(bytes)), "allocating GPU memory").ok())
        return nullptr;  // check() remembers an error
                         // that ends the device
    count_bytes(int64_t(taken_for(bytes)));
    return static_cast<uint8_t*>(ptr);
}

void CudaDevice::count_bytes(int64_t change) {
    const uint64_t now = in_use_.fetch_add(uint64_t(change)) + uint64_t(change);
    uint64_t peak = peak_.load();
    while (change > 0 && now > peak && !peak_.compare_exchange_weak(peak, now)) {
    }
}

void CudaDevice::deallocate(uint8_t* ptr, size_t bytes) {
    if (!ptr) return;
    const CudaScope scope(ordinal_);
    cudaFree(ptr);
    count_bytes(-int64_t(taken_for(bytes)));
}

uint32_t* CudaDevice::allocate_counters(size_t n) {
    const CudaScope scope(ordinal_);
    void* ptr = nullptr;
    const cudaError_t error = cudaHostAlloc(&ptr, n * sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable);
    if (!check(error, "allocating pinned host memory").ok()) return nullptr;
    std::memset(ptr, 0, n * sizeof(uint32_t));
    return static_cast<uint32_t*>(ptr);
}

void CudaDevice::deallocate_counters(uint32_t* counters) {
    if (!counters) return;
    const CudaScope scope(ordinal_);
    cudaFreeHost(counters);
}

Status CudaDevice::read(void* to, const uint8_t* from, size_t bytes) {
    const CudaScope scope(ordinal_);
    TA_RETURN_IF_ERROR(wait_for_fences(copies_, nullptr));
    TA_RETURN_IF_ERROR(check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, copies_), "copying from the GPU"));
    return check(cudaStreamSynchronize(copies_), "copying from the GPU");
}

Status CudaDevice::read_rows(void* to, const uint8_t* from, size_t pitch, size_t row_bytes, size_t rows) {
    const CudaScope scope(ordinal_);
    TA_RETURN_IF_ERROR(wait_for_fences(copies_, nullptr));
    TA_RETURN_IF_ERROR(check(cudaMemcpy2DAsync(to, row_bytes, from, pitch, row_bytes, rows, cudaMemcpyDefault, copies_),
                             "copying rows from the GPU"));
    return check(cudaStreamSynchronize(copies_), "copying rows from the GPU");
}

Status CudaDevice::write(uint8_t* to, const void* from, size_t bytes) {
    const CudaScope scope(ordinal_);
    TA_RETURN_IF_ERROR(wait_for_fences(copies_, nullptr));
    TA_RETURN_IF_ERROR(check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, copies_), "copying to the GPU"));
    return check(cudaStreamSynchronize(copies_), "copying to the GPU");
}

Status CudaDevice::copy(std::span<const DeviceCopy> copies, bool to_host) {
    Result<std::unique_ptr<DeviceTransfer>> transfer = start_copy(copies, {.to_host = to_host});
    return transfer.ok() ? transfer.value()->wait() : std::move(transfer).status();
}

Result<std::unique_ptr<DeviceTransfer>> CudaDevice::start_copy(std::span<const DeviceCopy> copies, const CopyOptions& options) {
    return moves_->start(copies, options);
}

Status CudaDevice::calibrate_moves() {
    return moves_->calibrate();
}

MoveCrossover CudaDevice::move_crossover() const {
    return moves_->crossover();
}

Status CudaDevice::zero(std::span<const DeviceRange> ranges) {
    const CudaScope scope(ordinal_);
    std::lock_guard lock(mutex_);
    if (!zeroed_) {
        fences_.reserve(fences_.size() + 1);
        TA_RETURN_IF_ERROR(check(cudaEventCreateWithFlags(&zeroed_, cudaEventDisableTiming), "creating an event"));
        fences_.push_back(zeroed_);  // so that steps and moves wait for it, too
    }
    Status s;
    for (cudaEvent_t fence : fences_) {
        if (s.ok() && fence != zeroed_) s = check(cudaStreamWaitEvent(copies_, fence, 0), "waiting for a step");
    }
    for (const DeviceRange& r : ranges) {
        if (s.ok()) s = check(cudaMemsetAsync(r.memory, 0, r.bytes, copies_), "zeroing blocks");
    }
    // Record the event after a failure, too: some of the writes may be enqueued.
    Status recorded = check(cudaEventRecord(zeroed_, copies_), "recording an event");
    return s.ok() ? std::move(recorded) : std::move(s);
}

Status CudaDevice::wait_for_steps() {
    const CudaScope scope(ordinal_);
    const cudaEvent_t over = moves_->take_event();
    if (!over) return fail(TA_E_MEMORY, "the driver has no memory for an event");
    // This needs an event of its own: a plan that ends meanwhile destroys its own fence.
    Status s = wait_for_fences(waits_, nullptr);
    if (s.ok()) s = check(cudaEventRecord(over, waits_), "recording an event");
    if (s.ok()) s = check(cudaEventSynchronize(over), "waiting for a step");
    moves_->give_event(over);
    return s;
}

Status CudaDevice::register_host(uint8_t* memory, size_t bytes) {
    const CudaScope scope(ordinal_);
    TA_RETURN_IF_ERROR(
        check(cudaHostRegister(memory, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "registering host memory"));
    try {
        std::lock_guard lock(mutex_);
        registered_.insert(std::upper_bound(registered_.begin(), registered_.end(), memory), memory);
    } catch (const std::bad_alloc&) {
        cudaHostUnregister(memory);
        throw;
    }
    return {};
}

void CudaDevice::unregister_host(uint8_t* memory) {
    const CudaScope scope(ordinal_);
    {
        std::lock_guard lock(mutex_);
        std::erase(registered_, memory);
    }
    cudaHostUnregister(memory);
}

bool CudaDevice::begins_chunk(const uint8_t* memory) const {
    std::lock_guard lock(mutex_);
    return std::binary_search(registered_.begin(), registered_.end(), memory);
}

int CudaDevice::numa_node() const {
    int node = -1;
    const CudaScope scope(ordinal_);
    if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, ordinal_) != cudaSuccess) return -1;
    return node;
}

Status CudaDevice::health() const {
    const int lost = lost_.load(std::memory_order_relaxed);
    if (lost == 0) return {};
    return fail(TA_E_DEVICE_LOST, "%s (GPU %d) was lost: %s", name(), ordinal_, cudaGetErrorString(cudaError_t(lost)));
}

Status CudaDevice::check(cudaError_t error, const char* what) const {
    if (error == cudaSuccess) return {};
    if (ends_device(error)) {
        int none = 0;
        lost_.compare_exchange_strong(none, int(error));
        return health();
    }
    if (error == cudaErrorMemoryAllocation)
        return fail(TA_E_MEMORY, "%s (GPU %d) has no memory for %s", name(), ordinal_, what);
    return fail(TA_E_DEVICE, "%s (GPU %d): %s failed: %s", name(), ordinal_, what, cudaGetErrorString(error));
}

Status CudaDevice::wait_for(cudaEvent_t event, const char* what) const {
    const CudaScope scope(ordinal_);
    constexpr std::chrono::milliseconds kSpin{2};
    constexpr std::chrono::microseconds kBetween{3};  // each query takes a lock of the driver that launches wait for
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    cudaError_t e;
    while ((e = cudaEventQuery(event)) == cudaErrorNotReady) {
        const auto looked = Clock::now();
        if (looked - start > kSpin) std::this_thread::sleep_for(std::chrono::microseconds(50));
        while (Clock::now() - looked < kBetween) {
        }
    }
    // If the driver refuses to query the event, wait for it all the same: the caller is going to reuse the memory.
    if (e != cudaSuccess && !ends_device(e)) e = cudaEventSynchronize(event);
    return check(e, what);
}

std::shared_ptr<void> CudaDevice::companion(std::shared_ptr<void> (*make)(CudaDevice&)) {
    const std::lock_guard lock(mutex_);
    if (!companion_) companion_ = make(*this);
    return companion_;
}

cudaEvent_t CudaDevice::add_fence() {
    const CudaScope scope(ordinal_);
    std::lock_guard lock(mutex_);
    fences_.reserve(fences_.size() + 1);
    cudaEvent_t event = nullptr;
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return nullptr;
    fences_.push_back(event);
    return event;
}

void CudaDevice::remove_fence(cudaEvent_t fence) {
    if (!fence) return;
    const CudaScope scope(ordinal_);
    cudaEventSynchronize(fence);  // after this nobody can wait for it, and its blocks may be reused
    std::lock_guard lock(mutex_);
    std::erase(fences_, fence);
    cudaEventDestroy(fence);
}

Status CudaDevice::wait_for_fences(cudaStream_t stream, cudaEvent_t except, bool look) const {
    std::lock_guard lock(mutex_);
    for (cudaEvent_t fence : fences_) {
        if (fence == except || (look && cudaEventQuery(fence) == cudaSuccess)) continue;
        TA_RETURN_IF_ERROR(check(cudaStreamWaitEvent(stream, fence, 0), "waiting for another plan"));
    }
    return {};
}

Result<std::unique_ptr<Device>> open_cuda_device(int ordinal) {
    return CudaDevice::open(ordinal);
}

}  // namespace ta
