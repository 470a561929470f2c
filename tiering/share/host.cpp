#include "tiering/share/host.h"

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "tiering/share/host_memory.h"
#include "tiering/share/segment.h"

namespace ta::share {
namespace {

constexpr size_t kProbeBytes = size_t{32} << 20;

// What is on its way to a peer: a packet, or a write that waits for its end.
struct Outbound {
    struct Write {
        uint64_t window;
        std::span<const RemoteCopy> copies;
        bool done = false;
    };
    Packet packet;
    Write* write = nullptr;
    size_t copy = 0, at = 0;  // what goes next
};

struct Peer {
    std::mutex mutex;  // of what leaves
    std::deque<Outbound> leaving;
    Packet coming;  // the parts that are there
    bool damaged = false;
};

struct Window {
    uint32_t peer;
    std::span<uint8_t> memory;
};

class HostTransport final : public Transport {
  public:
    HostTransport(std::shared_ptr<Segment> segment, std::shared_ptr<Device> device)
        : segment_(std::move(segment)),
          rank_(segment_->rank()),
          ranks_(segment_->ranks()),
          device_(std::move(device)),
          peers_(ranks_) {
        if (!device_) return;
        exports_.push_back(std::make_shared<Exports>(segment_, *device_));
        imports_ = std::make_shared<Imports>(segment_, *device_);
    }

    ~HostTransport() override {
        probe_ = {};
        Exports::leave(std::move(exports_));
        mine().state.store(RankArea::kLeft);
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) segment_->ring_bell(r);
        }
        bool last = true;
        for (uint32_t r = 0; r < ranks_; ++r) last = last && (r == rank_ || !segment_->alive(r));
        if (last) segment_->remove_name();
    }

    // Says what this rank is and that it is there.
    Status join() {
        RankArea& a = mine();
        a.process = process_number();
        if (device_) {
            a.has_gpu = 1;
            std::snprintf(a.gpu, sizeof a.gpu, "%s", device_->bus_address().c_str());
            a.ordinal = device_->ordinal();
            share_probe();
        }
        a.state.store(RankArea::kJoined);
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) segment_->ring_bell(r);
        }
        return {};
    }

    void send(uint32_t to, Packet packet, bool) override {
        Peer& peer = peers_[to];
        const std::lock_guard lock(peer.mutex);
        peer.leaving.emplace_back().packet = std::move(packet);
        flush(to);
    }

    std::optional<Received> receive(Time until) override {
        for (;;) {
            const uint32_t heard = mine().bell.load();
            if (warm_up()) {
                for (uint32_t n = 0; n < ranks_; ++n) {
                    next_ = (next_ + 1) % ranks_;
                    if (next_ == rank_) continue;
                    if (std::optional<Packet> packet = take_packet(next_)) return Received{next_, std::move(*packet)};
                }
            }
            for (uint32_t r = 0; r < ranks_; ++r) {
                if (r == rank_) continue;
                const std::lock_guard lock(peers_[r].mutex);
                flush(r);
            }
            for (const auto& e : exports_) e->reap();
            if (woken_.exchange(false) || Clock::now() >= until) return {};
            segment_->wait_for_bell(heard, until);
        }
    }

    void wake() override {
        woken_ = true;
        segment_->ring_bell(rank_);
    }

    bool alive(uint32_t peer) const override {
        const uint32_t state = segment_->area(peer).state;
        return state == RankArea::kAbsent || segment_->alive(peer);
    }

    void end_writes() override {
        {
            const std::lock_guard lock(writing_);
            ended_ = true;
        }
        for (uint32_t r = 0; r < ranks_; ++r) {
            const std::lock_guard lock(peers_[r].mutex);
            std::erase_if(peers_[r].leaving, [](const Outbound& o) { return o.write != nullptr; });
        }
        written_.notify_all();
    }

    void open_window(uint64_t window, uint32_t peer, std::span<uint8_t> memory) override {
        const std::lock_guard lock(windows_mutex_);
        windows_.emplace(window, Window{peer, memory});
    }

    void close_window(uint64_t window) override {
        const std::lock_guard lock(windows_mutex_);
        windows_.erase(window);
    }

    // The bytes go the way of messages: those sent behind them come behind them.
    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies) override {
        Outbound::Write write{window, copies};
        Peer& peer = peers_[to];
        {
            const std::lock_guard lock(peer.mutex);
            Outbound& out = peer.leaving.emplace_back();
            out.write = &write;
            flush(to);
        }
        std::unique_lock lock(writing_);
        written_.wait(lock, [&] { return write.done || ended_; });
        if (write.done) return {};
        lock.unlock();
        const std::lock_guard leaving(peer.mutex);  // nobody looks at `copies` any more
        std::erase_if(peer.leaving, [&](const Outbound& o) { return o.write == &write; });
        return fail(TA_E_PEER_LOST, "the group ended before rank %u had the blocks", to).rank(int32_t(to));
    }

    Result<bool> reaches(uint32_t peer) override { return (mine().reaches >> peer & 1) != 0; }
    Result<bool> all_reach() override {
        const uint64_t all = ranks_ == 64 ? ~uint64_t{0} : (uint64_t{1} << ranks_) - 1;
        for (uint32_t r = 0; r < ranks_; ++r) {
            if ((segment_->area(r).reaches | uint64_t{1} << r) != all) return false;
        }
        return true;
    }
    bool all_cpus() const override {
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (segment_->area(r).has_gpu != 0) return false;
        }
        return true;
    }
    Result<Shared> share_memory(std::shared_ptr<uint8_t> memory) override {
        if (!device_) return fail(TA_E_UNSUPPORTED, "a rank without a GPU shares no memory");
        return Exports::share(exports_.front(), std::move(memory));
    }
    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name) override {
        if (!imports_) return std::shared_ptr<uint8_t>();
        return Imports::find(imports_, peer, name);
    }

  private:
    RankArea& mine() const { return segment_->area(rank_); }

    // ---- what leaves; under the peer's mutex

    // As much as there is room for.
    void flush(uint32_t to) {
        Peer& peer = peers_[to];
        Ring ring = segment_->ring(rank_, to);
        bool put = false;
        while (!peer.leaving.empty()) {
            Outbound& out = peer.leaving.front();
            const bool all = out.write ? put_write(ring, out, put) : put_packet(ring, out, put);
            if (!all) break;
            if (out.write) {
                const std::lock_guard lock(writing_);
                out.write->done = true;
                written_.notify_all();
            }
            peer.leaving.pop_front();
        }
        if (put) segment_->ring_bell(to);
    }

    static bool put_record(Ring& ring, const Record& record, const uint8_t* body) {
        return ring.put(record, body) || (ring.starve(record.bytes) && ring.put(record, body));
    }

    static bool put_packet(Ring& ring, Outbound& out, bool& put) {
        for (;;) {
            const size_t left = out.packet.size() - out.at, part = std::min<size_t>(left, ring.most());
            const Record record{uint32_t(part), part == left ? Record::Kind::kPacketEnd : Record::Kind::kPacket, 0, 0};
            if (!put_record(ring, record, out.packet.data() + out.at)) return false;
            put = true;
            out.at += part;
            if (part == left) return true;
        }
    }

    static bool put_write(Ring& ring, Outbound& out, bool& put) {
        for (const std::span<const RemoteCopy> copies = out.write->copies; out.copy < copies.size(); ++out.copy, out.at = 0) {
            for (const RemoteCopy& c = copies[out.copy]; out.at < c.bytes;) {
                const size_t part = std::min<size_t>(c.bytes - out.at, ring.most());
                const Record record{uint32_t(part), Record::Kind::kBytes, out.write->window, c.to + out.at};
                if (!put_record(ring, record, c.from + out.at)) return false;
                put = true;
                out.at += part;
            }
        }
        return true;
    }

    // ---- what comes; by the communication thread

    // The next whole packet. What is for windows goes there.
    std::optional<Packet> take_packet(uint32_t from) {
        Peer& peer = peers_[from];
        Ring ring = segment_->ring(from, rank_);
        std::optional<Packet> whole;
        Record record{};
        bool took = false;
        while (!whole && !peer.damaged) {
            const Ring::Next next = ring.next(record);
            if (next == Ring::Next::kNone) break;
            if (next == Ring::Next::kDamaged) {
                peer.damaged = true;
                whole.emplace();  // what is no message
                break;
            }
            if (record.kind == Record::Kind::kBytes) {
                take_bytes(from, record, ring);
            } else {
                const size_t before = peer.coming.size();
                peer.coming.resize(before + record.bytes);
                ring.read(0, peer.coming.data() + before, record.bytes);
                if (record.kind == Record::Kind::kPacketEnd) whole = std::exchange(peer.coming, {});
            }
            ring.drop(record);
            took = true;
        }
        if (took && ring.was_starved()) segment_->ring_bell(from);
        return whole;
    }

    void take_bytes(uint32_t from, const Record& record, const Ring& ring) {
        const std::lock_guard lock(windows_mutex_);
        const auto found = windows_.find(record.window);
        if (found == windows_.end() || found->second.peer != from) return;  // it is closed
        const std::span<uint8_t> memory = found->second.memory;
        const uint64_t at = record.address - reinterpret_cast<uintptr_t>(memory.data());
        if (at <= memory.size() && record.bytes <= memory.size() - at) ring.read(0, memory.data() + at, record.bytes);
    }

    // ---- warm-up: who reaches whose memory, and how fast

    void share_probe() {
        uint8_t* const memory = device_->allocate(kProbeBytes);
        if (!memory) return;
        std::shared_ptr<uint8_t> probe(memory, [device = device_](uint8_t* p) { device->deallocate(p, kProbeBytes); });
        const uint64_t mark = process_number() + rank_;
        if (!device_->write(memory, &mark, sizeof mark).ok()) return;
        Result<Shared> shared = Exports::share(exports_.front(), probe);
        if (!shared.ok()) return;
        probe_ = shared.take();
        mine().probe = probe_.name;
    }

    // Once all ranks have joined. Messages wait for it, so a group that is ready is warm.
    bool warm_up() {
        if (all_warm_) return true;
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (segment_->area(r).state.load() == RankArea::kAbsent) return false;
        }
        if (mine().state.load() == RankArea::kJoined) {
            segment_->remove_name();
            for (uint32_t r = 0; device_ && r < ranks_; ++r) {
                if (r == rank_) continue;
                const uint64_t speed = measure(r);
                mine().bytes_per_s[r] = speed;
                if (speed > 0) mine().reaches |= uint64_t{1} << r;
            }
            mine().state.store(RankArea::kWarm);
            for (uint32_t r = 0; r < ranks_; ++r) {
                if (r != rank_) segment_->ring_bell(r);
            }
        }
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (segment_->area(r).state.load() == RankArea::kJoined) return false;
        }
        probe_ = {};
        return all_warm_ = true;
    }

    // Bytes per second from the peer's GPU; 0: it is not reached.
    uint64_t measure(uint32_t peer) {
        const RankArea& theirs = segment_->area(peer);
        if (theirs.probe.number == 0 || std::strncmp(theirs.gpu, mine().gpu, sizeof theirs.gpu) == 0) return 0;
        if (theirs.process == process_number()) {
            const int both[] = {device_->ordinal(), theirs.ordinal};
            Result<bool> reached = device_->reach(both);
            if (!reached.ok() || !reached.value()) return 0;
        }
        Result<std::shared_ptr<uint8_t>> memory = Imports::find(imports_, peer, theirs.probe);
        if (!memory.ok() || !memory.value()) return 0;
        uint8_t* const there = memory.value().get();
        uint64_t mark = 0;
        if (!device_->read(&mark, there, sizeof mark).ok() || mark != theirs.process + peer) return 0;
        uint8_t* const here = device_->allocate(kProbeBytes);
        if (!here) return 1;  // reached, at a speed that nobody knows
        constexpr size_t kTimes = 8;
        const std::vector<DeviceCopy> copies(kTimes, DeviceCopy{here, there, kProbeBytes});
        double seconds = 0;
        bool ok = true;
        for (int i = 0; ok && i < 2; ++i) {  // the first opens the way
            const Time start = Clock::now();
            CopyOptions options;
            options.behind_steps = false;
            options.route = MoveRoute::kCopyEngine;
            Result<std::unique_ptr<DeviceTransfer>> copied = device_->start_copy(copies, options);
            ok = copied.ok() && copied.value()->wait().ok();
            seconds = std::chrono::duration<double>(Clock::now() - start).count();
        }
        device_->deallocate(here, kProbeBytes);
        return ok ? uint64_t(double(kTimes * kProbeBytes) / std::max(seconds, 1e-9)) : 0;
    }

    const std::shared_ptr<Segment> segment_;
    const uint32_t rank_, ranks_;
    const std::shared_ptr<Device> device_;
    std::vector<Peer> peers_;
    Exports::List exports_;  // one of a GPU's rank
    std::shared_ptr<Imports> imports_;
    Shared probe_;
    bool all_warm_ = false;
    uint32_t next_ = 0;
    std::atomic<bool> woken_{false};

    std::mutex windows_mutex_;
    std::unordered_map<uint64_t, Window> windows_;

    std::mutex writing_;  // below a peer's
    std::condition_variable written_;
    bool ended_ = false;
};

}  // namespace

Result<std::unique_ptr<Transport>> join_host_group(uint64_t name, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device) {
    if (ranks > kMostHostRanks)
        return fail(TA_E_UNSUPPORTED, "ranks is %u; a group of one host's processes has at most %u", ranks, kMostHostRanks);
    Result<std::shared_ptr<Segment>> segment = Segment::join(name, rank, ranks);
    if (!segment.ok()) return std::move(segment).status();
    auto transport = std::make_unique<HostTransport>(segment.take(), std::move(device));
    TA_RETURN_IF_ERROR(transport->join());
    return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace ta::share
