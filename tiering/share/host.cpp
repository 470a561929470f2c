#include "tiering/share/host.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tiering/share/host_memory.h"
#include "tiering/share/id.h"
#include "tiering/share/lane.h"
#include "tiering/share/segment.h"

namespace ta::share {
namespace {

constexpr size_t kProbeBytes = size_t{32} << 20;
constexpr std::chrono::milliseconds kGoodbye{200};

class HostTransport final : public StreamTransport {
  public:
    HostTransport(uint64_t name, std::shared_ptr<Segment> segment, std::shared_ptr<Device> device)
        : StreamTransport(segment->ranks()),
          name_(name),
          segment_(std::move(segment)),
          rank_(segment_->rank()),
          ranks_(segment_->ranks()),
          device_(std::move(device)),
          damaged_(ranks_) {
        if (!device_) return;
        exports_.push_back(std::make_shared<Exports>(segment_, *device_));
        imports_ = std::make_shared<Imports>(segment_, *device_);
    }

    ~HostTransport() override {
        say_all();
        EndedGroups::of_this_process().add(name_);
        freeing_.stop();
        probe_ = {};
        Exports::leave(std::move(exports_));
        mine().state.store(RankArea::kLeft);
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (r != rank_) segment_->ring_bell(r);
        }
        bool last = true;
        for (uint32_t r = 0; r < ranks_; ++r)
            last = last && (r == rank_ || segment_->area(r).state.load() == RankArea::kLeft || !segment_->alive(r));
        if (last) segment_->remove_name();
    }

    // Publishes what this rank is, and that it is there.
    Status join() {
        RankArea& a = mine();
        a.process = process_number();
        if (device_) {
            TA_RETURN_IF_ERROR(freeing_.start());
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
                const std::lock_guard lock(mutex_of(r));
                leaves(r);
            }
            for (const auto& e : exports_) {
                while (std::shared_ptr<uint8_t> unused = e->take_unused()) free(std::move(unused));
            }
            if (woken_.exchange(false) || Clock::now() >= until) return {};
            segment_->wait_for_bell(heard, until);
        }
    }

    void wake() override {
        woken_ = true;
        segment_->ring_bell(rank_);
    }

    bool is_warm() const override { return all_warm_; }

    bool alive(uint32_t peer) const override {
        const uint32_t state = segment_->area(peer).state;
        return state == RankArea::kAbsent || segment_->alive(peer);
    }

    std::optional<bool> has_joined(uint32_t peer) const override { return segment_->area(peer).state != RankArea::kAbsent; }
    bool waits(uint32_t peer) const override {
        Record record{};
        return all_warm_ && !damaged_[peer] && segment_->ring(peer, rank_).next(record) != Ring::Next::kNone;
    }

    Result<bool> reaches(uint32_t peer) override { return (mine().reaches >> peer & 1) != 0; }
    Route route(uint32_t peer) override {
        const RankArea& theirs = segment_->area(peer);
        if ((mine().reaches >> peer & 1) != 0) return {Route::By::kGpuMemory, mine().bytes_per_s[peer], ""};
        if (!device_ || theirs.has_gpu == 0) return {Route::By::kHostMemory, 0, "a rank is on a CPU"};
        const bool same = std::strncmp(theirs.gpu, mine().gpu, sizeof theirs.gpu) == 0;
        return {Route::By::kHostMemory, 0,
                same ? "both ranks are on one GPU" : "the GPUs do not reach each other's memory, or CUDA IPC is not allowed"};
    }

    Result<bool> all_reach() override {
        const uint64_t all = (uint64_t{1} << ranks_) - 1;
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
    Result<Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) override {
        if (!device_) return fail(TA_E_UNSUPPORTED, "a rank without a GPU shares no memory");
        return Exports::share(exports_.front(), std::move(memory), bytes);
    }
    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name, uint64_t bytes) override {
        if (!imports_) return std::shared_ptr<uint8_t>();
        Result<FoundMemory> found = Imports::find(imports_, peer, name);
        return found.ok() ? memory_of(found.take(), peer, bytes) : std::move(found).status();
    }

  private:
    RankArea& mine() const { return segment_->area(rank_); }

    // Waits until all peers that live have had room for the last messages.
    void say_all() {
        const auto is_left = [this](uint32_t r) {
            const std::lock_guard lock(mutex_of(r));
            leaves(r);
            const uint32_t state = segment_->area(r).state;
            return has_packets(r) && state != RankArea::kAbsent && state != RankArea::kLeft && segment_->alive(r);
        };
        for (const Time until = Clock::now() + kGoodbye; Clock::now() < until;) {
            const uint32_t heard = mine().bell.load();
            bool left = false;
            for (uint32_t r = 0; r < ranks_; ++r) left = (r != rank_ && is_left(r)) || left;
            if (!left) return;
            segment_->wait_for_bell(heard, until);
        }
    }

    // Writes as many records as there is room for.
    void leaves(uint32_t to) override {
        Ring ring = segment_->ring(rank_, to);
        Record record{};
        const uint8_t* body = nullptr;
        bool put = false;
        while (next_record(to, ring.most(), record, body)) {
            if (!ring.put(record, body) && !(ring.starve(record.bytes) && ring.put(record, body))) break;
            record_has_left(to, record);
            put = true;
        }
        if (put) segment_->ring_bell(to);
    }

    // Takes the next whole packet. Copies bytes for windows to their place.
    std::optional<Packet> take_packet(uint32_t from) {
        Ring ring = segment_->ring(from, rank_);
        std::optional<Packet> whole;
        Record record{};
        bool took = false;
        while (!whole && !damaged_[from]) {
            const Ring::Next next = ring.next(record);
            if (next == Ring::Next::kNone) break;
            if (next == Ring::Next::kDamaged) {
                damaged_[from] = true;
                return Packet();  // the caller gets a message that cannot be one
            }
            whole = take_record(from, record, [&](uint8_t* to) { ring.read(record, to); });
            ring.drop(record);
            took = true;
        }
        if (took && ring.was_starved()) segment_->ring_bell(from);
        return whole;
    }

    // Frees the memory on another thread: freeing GPU memory may wait for a kernel that waits for a message of this rank.
    // Without memory for the post, frees it here.
    void free(std::shared_ptr<void> memory) {
        freeing_.post([memory = std::move(memory)] {});
    }

    // ---- warm-up: who reaches whose memory, and how fast

    void share_probe() {
        uint8_t* const memory = device_->allocate(kProbeBytes);
        if (!memory) return;
        std::shared_ptr<uint8_t> probe(memory, [device = device_](uint8_t* p) { device->deallocate(p, kProbeBytes); });
        const uint64_t mark = process_number() + rank_;
        if (!device_->write(memory, &mark, sizeof mark).ok()) return;
        Result<Shared> shared = Exports::share(exports_.front(), probe, kProbeBytes);
        if (!shared.ok()) return;
        probe_ = shared.take();
        mine().probe = probe_.name;
    }

    // Runs once all ranks have joined. Messages wait for it, so a group that is ready is warmed up.
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
        if (probe_.lasts) free(std::move(probe_.lasts));
        all_warm_ = true;
        return true;
    }

    // Measures bytes per second from the peer's GPU; 0: not reachable.
    uint64_t measure(uint32_t peer) {
        const RankArea& theirs = segment_->area(peer);
        if (theirs.probe.number == 0 || std::strncmp(theirs.gpu, mine().gpu, sizeof theirs.gpu) == 0) return 0;
        if (theirs.process == process_number()) {
            const int both[] = {device_->ordinal(), theirs.ordinal};
            Result<bool> reached = device_->reach(both);
            if (!reached.ok() || !reached.value()) return 0;
        }
        Result<std::shared_ptr<uint8_t>> memory = find_memory(peer, theirs.probe, kProbeBytes);
        if (!memory.ok() || !memory.value()) return 0;
        uint8_t* const there = memory.value().get();
        uint64_t mark = 0;
        if (!device_->read(&mark, there, sizeof mark).ok() || mark != theirs.process + peer) return 0;
        uint8_t* const here = device_->allocate(kProbeBytes);
        if (!here) return 1;  // reachable, at an unknown speed
        constexpr size_t kTimes = 8;
        const std::vector<DeviceCopy> copies(kTimes, DeviceCopy{here, there, kProbeBytes});
        double seconds = 0;
        bool ok = true;
        for (int i = 0; ok && i < 2; ++i) {  // the first run sets up the connection
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

    const uint64_t name_;
    const std::shared_ptr<Segment> segment_;
    const uint32_t rank_, ranks_;
    const std::shared_ptr<Device> device_;
    std::vector<bool> damaged_;
    Exports::List exports_;  // one element if the rank has a GPU
    std::shared_ptr<Imports> imports_;
    Shared probe_;
    std::atomic<bool> all_warm_{false};
    Lane freeing_;
    uint32_t next_ = 0;
    std::atomic<bool> woken_{false};
};

}  // namespace

Result<std::unique_ptr<Transport>> join_host_group(uint64_t name, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device) {
    if (ranks > kMostHostRanks)
        return fail(TA_E_UNSUPPORTED, "ranks is %u; a group of one host's processes has at most %u", ranks, kMostHostRanks);
    if (EndedGroups::of_this_process().has(name)) return ended_group();
    Result<std::shared_ptr<Segment>> segment = Segment::join(name, rank, ranks);
    if (!segment.ok()) return std::move(segment).status();
    auto transport = std::make_unique<HostTransport>(name, segment.take(), std::move(device));
    TA_RETURN_IF_ERROR(transport->join());
    return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace ta::share
