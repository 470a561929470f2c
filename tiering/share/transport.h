// Connects the ranks of a group. A further way is one more file and a case in src/api/group.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "src/core/status.h"
#include "tiering/share/message.h"

namespace ta::share {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

// Until when a caller waits that gives so many nanoseconds; < 0: for ever.
inline Time time_after(int64_t nanoseconds) {
    constexpr int64_t kYears = int64_t{1} << 60;
    return nanoseconds < 0 ? Time::max() : Clock::now() + std::chrono::nanoseconds(std::min(nanoseconds, kYears));
}

// Bytes for a window of the peer.
struct RemoteCopy {
    uint64_t to;  // offset there
    const uint8_t* from;
    size_t bytes;
};

// Memory that a peer may write to: parts, counted as if they lay one behind the other.
class WindowMemory {
  public:
    explicit WindowMemory(std::vector<std::span<uint8_t>> parts, bool gpu = false) : on_gpu(gpu), parts_(std::move(parts)) {
        for (const auto& p : parts_) ends_.push_back(bytes() + p.size());
    }
    uint64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }
    // Calls fn(memory, from, n) for each piece of [at, at + n): `from` is its offset in that range. False: that is not all in the
    // window, and nothing was called.
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

    const bool on_gpu;  // of this rank; else in the host's memory

  private:
    std::vector<std::span<uint8_t>> parts_;
    std::vector<uint64_t> ends_;
};

// Memory of a rank's GPU, as messages name it.
struct MemoryName {
    uint64_t number = 0;      // 0: none
    uint64_t offset = 0;      // in what the handle is of
    uint8_t handle[64] = {};  // by which other processes find it
};
static_assert(sizeof(MemoryName) == 80);

// One rank's end. Calls from any thread, but for receive(), which one thread calls.
class Transport {
  public:
    virtual ~Transport() = default;
    // Enqueues a packet for a peer; never waits. Packets of one rank for one other arrive once and in order, or the transport
    // is at fault: the group finds that and ends. `heartbeat`: of no weight, comes again.
    virtual void send(uint32_t to, Packet packet, bool heartbeat) = 0;
    struct Received {
        uint32_t from;
        Packet packet;
    };
    // The next one; nothing when `until` has come or wake() was called, and none is there.
    virtual std::optional<Received> receive(Time until) = 0;
    virtual void wake() = 0;
    // False: receive() has yet to measure ways between GPUs, which waits for what they do.
    virtual bool is_warm() const { return true; }

    // Why nothing goes or comes any more; by the thread that receives.
    virtual Status health() const { return {}; }
    // True if the peer may still be heard; a transport that cannot tell says yes.
    virtual bool alive(uint32_t) const { return true; }
    // The group has ended, and what was to be said about that is sent: writes that wait for a peer, and later ones, fail with
    // TA_E_PEER_LOST.
    virtual void end_writes() {}

    // Memory of this rank that a peer may write to under that number, until it is closed. close_window() returns when nobody
    // writes there any more. Numbers are never used again.
    virtual void open_window(uint64_t window, uint32_t peer, WindowMemory memory) = 0;
    virtual void close_window(uint64_t window) = 0;
    // Writes into a window of a peer, and waits until it is done. `on_gpu`: it is one on the peer's GPU, and so are the bytes on
    // this rank's. Bytes for a window that is closed go nowhere: the rank that closed it says why.
    virtual Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu = false) = 0;
    // True if this rank may open windows on its GPU for the peer, and write into those of the peer; where there is no memory for
    // that the answer is no, for this time.
    virtual bool may_write_gpu(uint32_t) { return false; }

    // True if this rank's GPU reads and writes what the peer's GPU has; a CPU reaches nothing. Of a group that is ready.
    virtual Result<bool> reaches(uint32_t peer) = 0;
    // How blocks come from there, for those who ask.
    struct Route {
        enum class By { kHostMemory = 1, kGpuMemory, kNccl } by = By::kHostMemory;
        uint64_t bytes_per_s = 0;  // that were measured
        const char* why = "";      // it is none that is faster
    };
    virtual Route route(uint32_t peer) = 0;
    // True if every rank's GPU does so with every other's: the same answer at all ranks.
    virtual Result<bool> all_reach() = 0;
    // True if no rank has a GPU.
    virtual bool all_cpus() const = 0;
    struct Shared {
        MemoryName name;
        std::shared_ptr<void> lasts;  // peers find the memory until this goes
    };
    // Memory of this rank's GPU for those peers that it is named to. It is kept for as long as one has found it.
    virtual Result<Shared> share_memory(std::shared_ptr<uint8_t> memory) = 0;
    // The memory that the peer named; nullptr: it is not shared any more.
    virtual Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name) = 0;
};

}  // namespace ta::share
