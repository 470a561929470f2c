// The calls of CUDA and NCCL that nccl.cpp makes, on a CPU: a stream is a thread, memory is the host's, and cudaFree waits for all
// that a GPU does. A communicator waits for its peers as NCCL does: one that is blocking in the call, another one on the stream.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/cuda/any/moves/move_blocks.h"
#include "src/device/cuda/device.h"
#include "tiering/share/lane.h"
#include "tiering/share/nccl_library.h"

struct CUstream_st {
    ta::share::Lane lane;
    std::atomic<int> gpu{-1};
    size_t left = 0;  // tasks
};
struct CUevent_st {
    uint64_t recorded = 0, done = 0;
};

namespace ta::testing {

using Bytes = std::vector<uint8_t>;

// The ranks that have the same id.
struct Room {
    size_t joined = 0;
    std::map<uint64_t, size_t> called;                 // by number of the gather: ranks
    std::map<uint64_t, std::map<int, Bytes>> gathers;  // what each rank has given
    std::map<int, std::deque<Bytes>> sent;             // by receiver, of two ranks
};

}  // namespace ta::testing

struct ta::share::nccl::Communicator {
    ta::testing::Room* room;
    int ranks, rank;
    bool blocking;
    bool aborted = false;
    uint64_t gathers = 0;
    std::vector<size_t> sent = {};  // bytes of each call
};

namespace ta::testing {

struct World {
    std::mutex mutex;
    std::condition_variable changed;
    std::list<CUstream_st> streams;  // until the program ends
    std::map<std::string, Room> rooms;
    std::list<share::nccl::Communicator> comms;
    uint64_t ids = 0;
    std::function<void(int rank, Bytes&)> on_gather;  // changes what a rank gives

    template <class Condition>
    void wait(Condition&& condition) {
        std::unique_lock lock(mutex);
        changed.wait(lock, condition);
    }
    template <class Change>
    auto change(Change&& change) {
        const std::lock_guard lock(mutex);
        changed.notify_all();
        return change();
    }
    void enqueue(cudaStream_t s, std::function<void()> task) {
        change([&] { ++s->left; });
        s->lane.post([this, s, task = std::move(task)] {
            task();
            change([&] { --s->left; });
        });
    }
    share::nccl::Comm join(const std::string& id, int ranks, int rank, bool blocking) {
        return change([&] {
            Room& room = rooms[id];
            ++room.joined;
            return &comms.emplace_back(share::nccl::Communicator{&room, ranks, rank, blocking});
        });
    }
};
inline World& world() {
    static auto* const w = new World;
    return *w;
}
inline thread_local int current_gpu = -1;

inline int gather(const void* from, void* to, size_t n, int, share::nccl::Comm c, cudaStream_t s) {
    EXPECT_FALSE(c->aborted);
    const uint64_t number = c->gathers++;
    const auto all = size_t(c->ranks);
    world().change([&] { ++c->room->called[number]; });
    if (c->blocking) {
        world().wait([&] { return c->aborted || c->room->called[number] == all; });
        if (c->aborted) return 1;
    }
    world().enqueue(s, [=] {
        const auto* const bytes = static_cast<const uint8_t*>(from);
        Bytes mine(bytes, bytes + n);
        if (world().on_gather) world().on_gather(c->rank, mine);
        std::map<int, Bytes>* given = nullptr;
        world().change([&] {
            given = &c->room->gathers[number];
            given->emplace(c->rank, std::move(mine));
        });
        world().wait([&] { return c->aborted || given->size() == all; });
        if (c->aborted) return;
        for (const auto& [rank, x] : *given) std::memcpy(static_cast<uint8_t*>(to) + size_t(rank) * n, x.data(), n);
    });
    return share::nccl::kSuccess;
}

inline const share::nccl::Library& simulated_nccl() {
    using namespace share::nccl;
    static const Library lib = [] {
        Library l{};
        l.version = 22809;
        l.GetUniqueId = [](UniqueId* id) {
            *id = {};
            std::snprintf(id->bytes, sizeof id->bytes, "%llu",
                          (unsigned long long)world().change([] { return ++world().ids; }));
            return kSuccess;
        };
        l.CommInitRankConfig = [](Comm* comm, int ranks, UniqueId id, int rank, Config* config) {
            *comm = world().join(std::string(id.bytes, sizeof id.bytes), ranks, rank, config->blocking != 0);
            return kInProgress;
        };
        l.CommAbort = [](Comm c) {
            EXPECT_FALSE(c->aborted);
            world().change([&] { c->aborted = true; });
            return kSuccess;
        };
        l.CommGetAsyncError = [](Comm c, int* state) {
            *state = world().change([&] { return int(c->room->joined) == c->ranks ? kSuccess : kInProgress; });
            return kSuccess;
        };
        l.AllGather = gather;
        l.Send = [](const void* from, size_t n, int, int peer, Comm c, Stream s) {
            c->sent.push_back(n);
            world().enqueue(s, [=] {
                const auto* const bytes = static_cast<const uint8_t*>(from);
                world().change([&] { c->room->sent[peer].emplace_back(bytes, bytes + n); });
            });
            return kSuccess;
        };
        l.Recv = [](void* to, size_t n, int, int, Comm c, Stream s) {
            world().enqueue(s, [=] {
                world().wait([&] { return c->aborted || !c->room->sent[c->rank].empty(); });
                const std::lock_guard lock(world().mutex);
                if (c->aborted) return;
                std::deque<Bytes>& sent = c->room->sent[c->rank];
                EXPECT_EQ(sent.front().size(), n);
                std::memcpy(to, sent.front().data(), n);
                sent.pop_front();
            });
            return kSuccess;
        };
        l.GroupStart = l.GroupEnd = [] { return kSuccess; };
        l.GetErrorString = [](int) { return "simulated"; };
        return l;
    }();
    return lib;
}

}  // namespace ta::testing

namespace ta {

CudaScope::CudaScope(int ordinal) : callers_error_(cudaPeekAtLastError() != cudaSuccess) {
    testing::current_gpu = ordinal;
}
CudaScope::~CudaScope() {
    if (!callers_error_) cudaGetLastError();
}

namespace cuda {
int launch_move_blocks(const BlockCopy* copies, size_t n, int, CUstream_st* stream, int) {
    testing::world().enqueue(stream, [list = std::vector(copies, copies + n)] {
        for (const BlockCopy& c : list) std::memcpy(reinterpret_cast<void*>(c.to), reinterpret_cast<void*>(c.from), c.bytes);
    });
    return cudaSuccess;
}
int load_move_blocks(int) {
    return cudaSuccess;
}
}  // namespace cuda

}  // namespace ta

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
    return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
    return cudaSuccess;
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
    return "simulated";
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = *greatest = 0;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    CUstream_st* const made = ta::testing::world().change([] { return &ta::testing::world().streams.emplace_back(); });
    made->gpu = ta::testing::current_gpu;
    *stream = made;
    return made->lane.start().ok() ? cudaSuccess : cudaErrorUnknown;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
    return cudaSuccess;  // waits for nothing
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return ta::testing::world().change([&] { return stream->left == 0 ? cudaSuccess : cudaErrorNotReady; });
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    ta::testing::world().wait([&] { return stream->left == 0; });
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const uint64_t number = ta::testing::world().change([&] { return ++event->recorded; });
    ta::testing::world().enqueue(stream, [=] { ta::testing::world().change([&] { event->done = number; }); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const uint64_t number = ta::testing::world().change([&] { return event->recorded; });
    ta::testing::world().enqueue(stream, [=] { ta::testing::world().wait([&] { return event->done >= number; }); });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
    ta::testing::world().enqueue(stream, [=] { std::memcpy(to, from, n); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void* given) {
    ta::testing::world().enqueue(stream, [=] { call(given); });
    return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t n) {
    return posix_memalign(memory, 256, n) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaHostAlloc(void** memory, size_t n, unsigned) {
    return cudaMalloc(memory, n);
}
cudaError_t cudaFree(void* memory) {
    if (!memory) return cudaSuccess;
    auto& world = ta::testing::world();
    world.wait([&] {
        return std::all_of(world.streams.begin(), world.streams.end(),
                           [](const CUstream_st& s) { return s.gpu != ta::testing::current_gpu || s.left == 0; });
    });
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
    return cudaFree(memory);
}
}
