#include "src/device/cuda/moves.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "kernels/cuda/any/moves/move_blocks.h"

namespace ta {
namespace {

constexpr uint64_t kUnmeasuredCrossover = 512 << 10;

// Joins copies that follow one another in the memory of both sides.
std::vector<DeviceCopy> joined(const CudaDevice& device, std::span<const DeviceCopy> copies) {
    std::vector<DeviceCopy> runs;
    runs.reserve(copies.size());
    for (const DeviceCopy& c : copies) {
        if (!runs.empty() && runs.back().to + runs.back().bytes == c.to && runs.back().from + runs.back().bytes == c.from &&
            !device.begins_chunk(c.to) && !device.begins_chunk(c.from)) {
            runs.back().bytes += c.bytes;
        } else {
            runs.push_back(c);
        }
    }
    return runs;
}

}  // namespace

CudaTransfer::CudaTransfer(CudaMoves& moves, cudaEvent_t done, MoveRoute route) : moves_(moves), done_(done), route_(route) {}

CudaTransfer::~CudaTransfer() {
    // After this the caller takes the memory back, so nothing may still be written.
    (void)wait();
    moves_.give_event(done_);
}

Status CudaTransfer::wait() {
    if (over_) return {};
    over_ = true;
    return moves_.device().wait_for(done_, "moving blocks");
}

CudaMoves::~CudaMoves() {
    const CudaScope scope(device_.ordinal());
    for (auto& pair : streams_) {
        for (cudaStream_t s : pair) {
            if (s) cudaStreamDestroy(s);
        }
    }
    for (cudaEvent_t e : events_) cudaEventDestroy(e);
}

Status CudaMoves::open() {
    for (auto& pair : streams_) {
        for (cudaStream_t& s : pair)
            TA_RETURN_IF_ERROR(device_.check(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking), "creating a stream"));
    }
    return {};
}

cudaEvent_t CudaMoves::take_event() {
    {
        std::lock_guard lock(mutex_);
        if (!events_.empty()) {
            const cudaEvent_t e = events_.back();
            events_.pop_back();
            return e;
        }
    }
    cudaEvent_t e = nullptr;
    return cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess ? e : nullptr;
}

void CudaMoves::give_event(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    try {
        events_.push_back(event);
    } catch (const std::bad_alloc&) {
        cudaEventDestroy(event);
    }
}

cudaError_t CudaMoves::enqueue_engine(const Copies& copies, cudaStream_t stream) {
#if CUDART_VERSION >= 12080
    if (batches_.load(std::memory_order_relaxed)) {
        std::vector<void*> to, from;
        std::vector<size_t> bytes;
        for (const DeviceCopy& c : copies) {
            to.push_back(c.to);
            from.push_back(const_cast<uint8_t*>(c.from));
            bytes.push_back(c.bytes);
        }
        cudaMemcpyAttributes attributes{};
        attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
        attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
        size_t first = 0;
#if CUDART_VERSION >= 13000
        const cudaError_t e =
            cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream);
#else
        size_t failed = 0;
        const cudaError_t e =
            cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, &failed, stream);
#endif
        if (e != cudaErrorNotSupported && e != cudaErrorCallRequiresNewerDriver) return e;
        batches_ = false;
    }
#endif
    for (const DeviceCopy& c : copies) {
        if (const cudaError_t e = cudaMemcpyAsync(c.to, c.from, c.bytes, cudaMemcpyDefault, stream); e != cudaSuccess) return e;
    }
    return cudaSuccess;
}

cudaError_t CudaMoves::enqueue_kernel(const Copies& copies, cudaStream_t stream) {
    std::vector<cuda::BlockCopy> list;
    list.reserve(copies.size());
    for (const DeviceCopy& c : copies) list.push_back({uint64_t(uintptr_t(c.to)), uint64_t(uintptr_t(c.from)), c.bytes});
    return cudaError_t(cuda::launch_move_blocks(list.data(), list.size(), device_.kernel_generation(), stream));
}

MoveRoute CudaMoves::route_for(const Copies& copies, bool to_host, MoveRoute route) const {
    if (route != MoveRoute::kCalibrated) return route;
    uint64_t bytes = 0;
    for (const DeviceCopy& c : copies) bytes += c.bytes;
    const uint64_t measured = crossover_[to_host ? 0 : 1].load(std::memory_order_relaxed);
    const uint64_t crossover = measured ? measured : kUnmeasuredCrossover;
    return bytes >= crossover * copies.size() ? MoveRoute::kCopyEngine : MoveRoute::kKernel;
}

Status CudaMoves::enqueue(std::span<const DeviceCopy> copies, bool to_host, MoveRoute route, cudaStream_t stream) {
    const Copies runs = joined(device_, copies);
    const bool kernel = route_for(runs, to_host, route) == MoveRoute::kKernel;
    return device_.check(kernel ? enqueue_kernel(runs, stream) : enqueue_engine(runs, stream), "moving pages");
}

Result<std::unique_ptr<DeviceTransfer>> CudaMoves::start(std::span<const DeviceCopy> copies, const CopyOptions& options) {
    const CudaScope scope(device_.ordinal());
    const int direction = options.to_host ? 0 : 1;
    const Copies runs = joined(device_, copies);
    const MoveRoute route = route_for(runs, options.to_host, options.route);
    const bool kernel = route == MoveRoute::kKernel;
    const cudaStream_t stream = streams_[direction][kernel ? turn_[direction].fetch_add(1) % 2 : 0];
    if (options.behind_steps) TA_RETURN_IF_ERROR(device_.wait_for_fences(stream, nullptr, true));
    const cudaEvent_t done = take_event();
    if (!done) return fail(TA_E_MEMORY, "the driver has no memory for an event");
    std::unique_ptr<DeviceTransfer> transfer;
    try {
        transfer = std::make_unique<CudaTransfer>(*this, done, route);
    } catch (...) {
        give_event(done);
        throw;
    }
    const cudaError_t e = kernel ? enqueue_kernel(runs, stream) : enqueue_engine(runs, stream);
    // Record the event after a failure, too: copies that were enqueued must be waited for.
    const cudaError_t recorded = cudaEventRecord(done, stream);
    TA_RETURN_IF_ERROR(device_.check(e, "moving blocks"));
    TA_RETURN_IF_ERROR(device_.check(recorded, "recording an event"));
    return transfer;
}

// ------------------------------------------------------------------------------------------------------------- calibration

// Times one of several copies in flight, like the parts of a move. So the time to enqueue one does not count: it passes while
// others are copied.
cudaError_t CudaMoves::time_copies(const Copies& copies, MoveRoute route, cudaStream_t stream, double& seconds) {
    constexpr int kOnTheirWay = 3;
    seconds = 1e30;
    for (int repeat = 0; repeat < 2; ++repeat) {  // the first run loads the kernel
        const auto start = std::chrono::steady_clock::now();
        cudaError_t e = cudaSuccess;
        for (int n = 0; n < kOnTheirWay && e == cudaSuccess; ++n)
            e = route == MoveRoute::kKernel ? enqueue_kernel(copies, stream) : enqueue_engine(copies, stream);
        if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
        if (e != cudaSuccess) return e;
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        seconds = std::min(seconds, took.count() / kOnTheirWay);
    }
    return cudaSuccess;
}

cudaError_t CudaMoves::measure() {
    constexpr double kMuchSlower = 1.25;  // how much slower the engine may be, since it leaves the multiprocessors to other
                                          // work
    constexpr size_t kBytes = 8 << 20, kSmallest = 64 << 10, kLargest = 4 << 20;
    struct Memory {
        uint8_t *host = nullptr, *device = nullptr;
        ~Memory() {
            cudaFree(device);
            cudaFreeHost(host);
        }
    } memory;
    cudaError_t e = cudaHostAlloc(reinterpret_cast<void**>(&memory.host), kBytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaSuccess) e = cudaMalloc(reinterpret_cast<void**>(&memory.device), kBytes);
    for (int direction = 0; direction < 2 && e == cudaSuccess; ++direction) {
        // From the largest size down, as long as the engine is about as fast. If it never is, the kernel copies everything
        // except still larger blocks.
        uint64_t crossover = 2 * kLargest;
        for (size_t size = kLargest; size >= kSmallest && e == cudaSuccess; size /= 2) {
            Copies copies;
            const size_t n = kBytes / size;
            for (size_t i = 0; i < n; ++i) {
                const size_t at = i * 5 % n * size, other = (i * 3 + 1) % n * size;  // scattered: i * 5 and i * 3 are
                                                                                     // permutations, as n is a power of two
                copies.push_back(direction == 0 ? DeviceCopy{memory.host + at, memory.device + other, size}
                                                : DeviceCopy{memory.device + at, memory.host + other, size});
            }
            double engine = 0, kernel = 0;
            e = time_copies(copies, MoveRoute::kCopyEngine, streams_[direction][0], engine);
            if (e == cudaSuccess && direction == 1 && size == kLargest) up_bytes_per_s_ = double(kBytes) / engine;
            if (e == cudaSuccess) e = time_copies(copies, MoveRoute::kKernel, streams_[direction][0], kernel);
            if (e != cudaSuccess || engine > kMuchSlower * kernel) break;
            crossover = size;
        }
        if (e == cudaSuccess) crossover_[direction] = crossover;
    }
    return e;
}

Status CudaMoves::calibrate() {
    const CudaScope scope(device_.ordinal());
    std::lock_guard lock(calibrating_);
    if (calibrated_) return {};
    const cudaError_t e = measure();
    // If there was no memory to measure with, moves work all the same, perhaps more slowly.
    calibrated_ = e == cudaSuccess || e == cudaErrorMemoryAllocation;
    return calibrated_ ? Status() : device_.check(e, "measuring copies");
}

}  // namespace ta
