#include "tiering/share/local.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace ta::share {
namespace {

constexpr std::chrono::milliseconds kReorderPatience{50};

struct Window {
    uint32_t peer;
    WindowMemory memory;
};

// Incoming messages of a rank. All mailboxes exist from the group's first rank on, so that messages wait for ranks that join
// later.
struct Mailbox {
    std::mutex mutex;
    std::condition_variable changed;
    // Sorted by time of arrival, then in the order of sending.
    std::multimap<Time, Transport::Received> packets;
    bool woken = false;
    std::atomic<bool> joined{false};
    bool left = false;
    int device = -1;

    std::shared_mutex writing;  // held shared by threads that write into windows
    std::unordered_map<uint64_t, Window> windows;
};

struct Hub {
    explicit Hub(uint32_t ranks) : boxes(ranks) {}
    std::vector<Mailbox> boxes;

    struct SharedMemory {
        uint32_t owner;
        uint64_t bytes;
        std::weak_ptr<uint8_t> memory;
    };
    std::mutex sharing;
    uint64_t shared = 0;
    std::unordered_map<uint64_t, SharedMemory> memories;  // by number
};

struct Registry {
    std::mutex mutex;
    std::map<GroupId, std::weak_ptr<Hub>> hubs;
};
Registry& registry() {
    static Registry r;
    return r;
}

class LocalTransport final : public Transport {
  public:
    LocalTransport(std::shared_ptr<Hub> hub, uint64_t name, uint32_t rank, Device* device, const Fault& fault)
        : hub_(std::move(hub)), name_(name), rank_(rank), device_(device), fault_(fault) {}
    ~LocalTransport() override {
        EndedGroups::of_this_process().add(name_);
        Mailbox& mine = box(rank_);
        const std::lock_guard lock(mine.mutex);
        mine.left = true;
        mine.packets.clear();
    }

    void send(uint32_t to, Packet packet, bool heartbeat) override {
        const std::lock_guard order(sending_);
        if (killed_) return;
        Outbound out{to, std::move(packet), Clock::now()};
        if (heartbeat || ++actions_ != fault_.action) return deliver(std::move(out));
        const size_t bytes = out.packet.size();
        switch (fault_.kind) {
            case Fault::Kind::kNone:
                break;
            case Fault::Kind::kDrop:
                return;
            case Fault::Kind::kDelay:
                delayed_to_ = out.at += std::chrono::milliseconds(fault_.detail);
                break;
            case Fault::Kind::kDuplicate:
                deliver({out.to, out.packet, out.at});
                break;
            case Fault::Kind::kReorder:
                out.at += kReorderPatience;
                return deliver_alone(std::move(out));
            case Fault::Kind::kCorrupt:
                flip(out.packet.data(), bytes);
                break;
            case Fault::Kind::kCut:
                out.packet.resize(size_t(fault_.detail % bytes));
                break;
            case Fault::Kind::kKill:
                killed_ = true;
                return;
        }
        deliver(std::move(out));
    }

    std::optional<Received> receive(Time until) override {
        Mailbox& mine = box(rank_);
        std::unique_lock lock(mine.mutex);
        for (;;) {
            const auto first = mine.packets.begin();
            const Time now = Clock::now();
            if (killed_) {
                mine.packets.clear();
            } else if (first != mine.packets.end() && first->first <= now) {
                std::optional<Received> got(std::move(first->second));
                mine.packets.erase(first);
                return got;
            }
            if (std::exchange(mine.woken, false) || now >= until) return {};
            const Time next = mine.packets.empty() ? until : std::min(until, mine.packets.begin()->first);
            mine.changed.wait_until(lock, next);
        }
    }

    std::optional<bool> has_joined(uint32_t peer) const override { return hub_->boxes[peer].joined.load(); }
    bool waits(uint32_t peer) const override {
        Mailbox& mine = hub_->boxes[rank_];
        const std::lock_guard lock(mine.mutex);
        const auto end = mine.packets.upper_bound(Clock::now());
        return std::any_of(mine.packets.begin(), end, [peer](const auto& entry) { return entry.second.from == peer; });
    }

    void wake() override {
        Mailbox& mine = box(rank_);
        const std::lock_guard lock(mine.mutex);
        mine.woken = true;
        mine.changed.notify_all();
    }

    void open_window(uint64_t window, uint32_t peer, WindowMemory memory) override {
        Mailbox& mine = box(rank_);
        const std::unique_lock lock(mine.writing);
        mine.windows.emplace(window, Window{peer, std::move(memory)});
    }

    void close_window(uint64_t window) override {
        Mailbox& mine = box(rank_);
        const std::unique_lock lock(mine.writing);
        mine.windows.erase(window);
    }

    bool may_write_gpu(uint32_t peer) override { return device_ && box(peer).device >= 0; }

    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu) override {
        Fault::Kind fault = Fault::Kind::kNone;
        {
            const std::lock_guard order(sending_);
            if (!killed_ && ++actions_ == fault_.action) fault = fault_.kind;
            if (fault == Fault::Kind::kKill) killed_ = true;
            if (killed_) return {};
        }
        if (fault == Fault::Kind::kDrop) return {};
        if (fault == Fault::Kind::kDelay) std::this_thread::sleep_for(std::chrono::milliseconds(fault_.detail));
        Mailbox& theirs = box(to);
        const std::shared_lock lock(theirs.writing);
        const auto found = theirs.windows.find(window);
        if (found == theirs.windows.end() || found->second.peer != rank_) return {};
        const WindowMemory& memory = found->second.memory;
        // `special`: where a write is cut, or its damaged byte.
        size_t all = 0;
        for (const RemoteCopy& c : copies) all += c.bytes;
        const uint64_t at = fault == Fault::Kind::kCorrupt ? fault_.detail / 8 : fault_.detail;
        const size_t special = all > 0 ? size_t(at % all) : 0;
        std::vector<DeviceCopy> pieces;
        uint8_t* damaged = nullptr;
        size_t left = fault == Fault::Kind::kCut ? special : all, before = 0;
        bool inside = memory.on_gpu == on_gpu;
        for (const RemoteCopy& c : copies) {
            inside = inside && memory.visit(c.to, c.bytes, [&](uint8_t* there, uint64_t from, uint64_t n) {
                if (special - before < n) damaged = there + (special - before);
                before += n;
                n = std::min<uint64_t>(n, left);
                left -= n;
                if (n > 0) pieces.push_back({there, c.from + from, n});
            });
        }
        if (!inside) return fail(TA_E_CORRUPT, "the blocks do not fit the window that rank %u named", to).rank(int32_t(to));
        if (on_gpu && !pieces.empty()) {
            CopyOptions options;
            options.route = MoveRoute::kCopyEngine;  // needs no access to the peer's memory
            Result<std::unique_ptr<DeviceTransfer>> copied = device_->start_copy(pieces, options);
            if (!copied.ok()) return std::move(copied).status();
            TA_RETURN_IF_ERROR(copied.value()->wait());
        } else if (!on_gpu) {
            for (const DeviceCopy& p : pieces) std::memcpy(p.to, p.from, p.bytes);
        }
        if (fault != Fault::Kind::kCorrupt || !damaged) return {};
        uint8_t byte = 0;
        if (on_gpu) TA_RETURN_IF_ERROR(device_->read(&byte, damaged, 1));
        byte = uint8_t((on_gpu ? byte : *damaged) ^ 1 << fault_.detail % 8);
        if (on_gpu) return device_->write(damaged, &byte, 1);
        *damaged = byte;
        return {};
    }

    Result<bool> reaches(uint32_t peer) override {
        const int both[] = {box(rank_).device, box(peer).device};
        return device_ && both[1] >= 0 ? device_->reach(both) : Result<bool>(false);
    }

    Route route(uint32_t peer) override {
        Result<bool> reached = reaches(peer);
        if (reached.ok() && reached.value()) return {Route::By::kGpuMemory, 0, ""};
        return {Route::By::kHostMemory, 0, why_not_gpu(box(rank_).device, box(peer).device)};
    }

    Result<bool> all_reach() override {
        std::vector<int> all;
        for (const Mailbox& box : hub_->boxes) all.push_back(box.device);
        if (!device_ || std::count_if(all.begin(), all.end(), [](int d) { return d < 0; }) > 0) return false;
        if (all_reach_) return true;
        Result<bool> reach = device_->reach(all);
        all_reach_ = reach.ok() && reach.value();
        return reach;
    }

    bool all_cpus() const override {
        return std::all_of(hub_->boxes.begin(), hub_->boxes.end(), [](const Mailbox& b) { return b.device < 0; });
    }

    Result<Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) override {
        const std::lock_guard lock(hub_->sharing);
        std::erase_if(hub_->memories, [](const auto& entry) { return entry.second.memory.expired(); });
        hub_->memories.emplace(hub_->shared + 1, Hub::SharedMemory{rank_, bytes, memory});
        Shared shared;
        shared.name.number = ++hub_->shared;
        shared.lasts = std::move(memory);
        return shared;
    }

    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name, uint64_t bytes) override {
        const std::lock_guard lock(hub_->sharing);
        const auto found = hub_->memories.find(name.number);
        if (found == hub_->memories.end() || found->second.owner != peer) return std::shared_ptr<uint8_t>();
        return memory_of({found->second.memory.lock(), found->second.bytes}, peer, bytes);
    }

  private:
    struct Outbound {
        uint32_t to;
        Packet packet;
        Time at;  // when it arrives
    };

    static const char* why_not_gpu(int here, int there) {
        if (here < 0 || there < 0) return "a rank is on a CPU";
        return here == there ? "both ranks are on one GPU" : "the GPUs do not reach each other's memory";
    }

    Mailbox& box(uint32_t rank) { return hub_->boxes[rank]; }

    void flip(uint8_t* bytes, size_t n) const { bytes[fault_.detail / 8 % n] ^= uint8_t(1 << fault_.detail % 8); }

    // Delivers the message, but not before those that were delayed.
    void deliver(Outbound out) {
        out.at = std::max(out.at, delayed_to_);
        deliver_alone(std::move(out));
    }

    void deliver_alone(Outbound out) {
        Mailbox& theirs = box(out.to);
        const std::lock_guard lock(theirs.mutex);
        if (theirs.left) return;
        theirs.packets.emplace(out.at, Received{rank_, std::move(out.packet)});
        theirs.changed.notify_all();
    }

    const std::shared_ptr<Hub> hub_;
    const uint64_t name_;
    const uint32_t rank_;
    Device* const device_;
    std::atomic<bool> all_reach_{false};
    const Fault fault_;
    std::mutex sending_;  // keeps messages in order
    uint64_t actions_ = 0;
    Time delayed_to_{};
    std::atomic<bool> killed_{false};
};

}  // namespace

Result<std::unique_ptr<Transport>> join_local_group(const GroupId& id, uint32_t rank, uint32_t ranks, Device* device,
                                                    const Fault& fault) {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    if (EndedGroups::of_this_process().has(name_of(id))) return ended_group();
    std::erase_if(all.hubs, [](const auto& entry) { return entry.second.expired(); });
    std::shared_ptr<Hub> hub = all.hubs[id].lock();
    if (!hub) all.hubs[id] = hub = std::make_shared<Hub>(ranks);
    if (hub->boxes.size() != ranks) {
        return fail(TA_E_MISMATCH, "ranks is %u; another rank of the group says %zu", ranks, hub->boxes.size());
    }
    Mailbox& mine = hub->boxes[rank];
    for (Mailbox& box : hub->boxes) {
        const std::lock_guard box_lock(box.mutex);
        if (box.left) return ended_group();
    }
    if (mine.joined) return fail(TA_E_INVALID, "rank %u has joined the group already", rank);
    auto transport = std::make_unique<LocalTransport>(hub, name_of(id), rank, device, fault);
    mine.joined = true;
    mine.device = device ? device->ordinal() : -1;
    return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace ta::share
