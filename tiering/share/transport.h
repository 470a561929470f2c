// Connects the ranks of a group. A new kind of transport gets a file of its own and a case in src/api/group.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/core/status.h"
#include "tiering/share/message.h"

namespace ta::share {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// The end of a wait of so many nanoseconds from now; < 0: never.
inline Time time_after(int64_t nanoseconds) {
    constexpr int64_t kYears = int64_t{1} << 60;
    return nanoseconds < 0 ? Time::max() : Clock::now() + std::chrono::nanoseconds(std::min(nanoseconds, kYears));
}

// Bytes to write into a peer's window.
struct RemoteCopy {
    uint64_t to;  // offset in the window
    const uint8_t* from;
    size_t bytes;
};

// Memory that a peer may write to: several parts, with offsets as if they were contiguous.
class WindowMemory {
  public:
    explicit WindowMemory(std::vector<std::span<uint8_t>> parts, bool gpu = false) : on_gpu(gpu), parts_(std::move(parts)) {
        for (const auto& p : parts_) ends_.push_back(bytes() + p.size());
    }
    uint64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
    // Calls fn(memory, from, n) for each piece of [at, at + n); `from` is the piece's offset in that range. False: the range is
    // not all in the window, and fn was not called.
    template <class Fn>
    bool visit(uint64_t at, uint64_t n, Fn&& fn) const {
        if (at > bytes() || n > bytes() - at) return false;
        auto part = size_t(std::upper_bound(ends_.begin(), ends_.end(), at) - ends_.begin());
        for (uint64_t done = 0; done < n; ++part) {
            const uint64_t skip = at + done - (ends_[part] - parts_[part].size());
            const uint64_t piece = std::min(n - done, parts_[part].size() - skip);
            fn(parts_[part].data() + skip, done, piece);
            done += piece;
        }
        return true;
    }

    const bool on_gpu;  // true: memory of this rank's GPU; false: host memory

  private:
    std::vector<std::span<uint8_t>> parts_;
    std::vector<uint64_t> ends_;
};

// Names memory of a rank's GPU in messages.
struct MemoryName {
    uint64_t number = 0;      // 0: none
    uint64_t offset = 0;      // in the allocation that the handle names
    uint8_t handle[64] = {};  // with which other processes open the allocation
};
static_assert(sizeof(MemoryName) == 80);

// One rank's end of the transport. Thread-safe, but only one thread may call receive().
class Transport {
  public:
    virtual ~Transport() = default;
    // Enqueues a packet for a peer; never waits. Packets from one rank to another arrive once and in order. If they do not, the
    // group notices and ends. `heartbeat`: the packet says nothing else, and another one follows.
    virtual void send(uint32_t to, Packet packet, bool heartbeat) = 0;
    struct Received {
        uint32_t from;
        Packet packet;
    };
    // Returns the next packet. None: there is none, and `until` has come or wake() was called.
    virtual std::optional<Received> receive(Time until) = 0;
    virtual void wake() = 0;
    // `tell` is called on another thread if receive() may never return. Setting an empty one waits for a running call.
    virtual void when_stuck(std::function<void(const Status&)>) {}
    // Called when the group is ready, or never began: the caller's communicator is the caller's again.
    virtual void give_back_lent() {}
    // False: receive() has yet to measure copies between GPUs, which may wait for other work on them.
    virtual bool is_warm() const { return true; }

    // The reason why the transport has failed. Called by the thread that receives.
    virtual Status health() const { return {}; }
    // True if the peer may still send something. A transport that cannot tell says true.
    virtual bool alive(uint32_t) const { return true; }
    // True if the rank has joined; nullopt: unknown.
    virtual std::optional<bool> has_joined(uint32_t peer) const = 0;
    // True if receive() would return a packet of the peer now.
    virtual bool waits(uint32_t peer) const = 0;
    // Called when the group has ended and the messages about that are sent. Waiting writes and later ones fail with
    // TA_E_PEER_LOST.
    virtual void end_writes() {}

    // Opens memory of this rank for writes of a peer, under a number that is never used again. close_window() returns when
    // nobody writes there any more.
    virtual void open_window(uint64_t window, uint32_t peer, WindowMemory memory) = 0;
    virtual void close_window(uint64_t window) = 0;
    // Writes into a window of a peer and waits until that is done. `on_gpu`: the window is on the peer's GPU, and the bytes are
    // on this rank's. If the window is closed, the bytes are dropped: the rank that closed it tells why.
    virtual Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu = false) = 0;
    // True if this rank may open windows on its GPU for the peer, and write into the peer's. False also if there is no memory
    // for that now.
    virtual bool may_write_gpu(uint32_t) { return false; }

    // True if this rank's GPU reads and writes memory of the peer's GPU. Always false on a CPU. Only when the group is ready.
    virtual Result<bool> reaches(uint32_t peer) = 0;
    // How blocks come from a peer, for callers who ask.
    struct Route {
        enum class By { kHostMemory = 1, kGpuMemory, kNccl } by = By::kHostMemory;
        uint64_t bytes_per_s = 0;  // as measured; 0: not measured
        const char* why = "";      // why it is not a faster one
    };
    virtual Route route(uint32_t peer) = 0;
    // True if every rank's GPU reaches every other's. All ranks get the same answer.
    virtual Result<bool> all_reach() = 0;
    // True if no rank has a GPU.
    virtual bool all_cpus() const = 0;
    struct Shared {
        MemoryName name;
        std::shared_ptr<void> lasts;  // peers can find the memory until this is released
    };
    // Shares so many bytes of this rank's GPU memory with the peers that get its name. The memory lives for as long as a peer
    // has found it.
    virtual Result<Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) = 0;
    // The memory that the peer named; nullptr: it is no longer shared. TA_E_CORRUPT: it has less than `bytes`. The size comes
    // from a peer's message, so each caller gives the size that it relies on.
    virtual Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name, uint64_t bytes) = 0;
};

// Memory of a peer, as this rank knows it.
struct FoundMemory {
    std::shared_ptr<uint8_t> memory;
    uint64_t bytes = 0;  // from `memory` to the end of its allocation, or as shared
};
// Makes find_memory()'s result.
inline Result<std::shared_ptr<uint8_t>> memory_of(FoundMemory found, uint32_t peer, uint64_t bytes) {
    if (!found.memory || bytes <= found.bytes) return std::move(found.memory);
    return fail(TA_E_CORRUPT, "rank %u says that it shares %llu bytes of memory; there are %llu", peer,
                (unsigned long long)bytes, (unsigned long long)found.bytes)
        .rank(int32_t(peer));
}

}  // namespace ta::share
