#include "tiering/share/nccl.h"

#include <cuda_runtime_api.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/any/moves/move_blocks.h"
#include "kernels/format/hash.h"
#include "src/device/cuda/device.h"
#include "tiering/share/host.h"
#include "tiering/share/host_memory.h"
#include "tiering/share/nccl_comm.h"
#include "tiering/share/nccl_pieces.h"
#include "tiering/share/stream.h"

namespace ta::share {
namespace {

constexpr size_t kFrame = size_t{16} << 10, kLargeFrame = size_t{8} << 20;  // bytes of a round's frame, one way: a multiple of
                                                                            // kFrame
constexpr std::chrono::microseconds kShortestRest{50}, kLongestRest{5000}, kPoll{200}, kSpin{100}, kBusySpin{1000};
constexpr int kRestsOfOneLength = 8;  // then the rest doubles
constexpr std::chrono::milliseconds kGoodbye{200};
constexpr int kMostCtas = 16;

// What a rank tells of itself when all join.
struct Card {
    uint64_t version;  // of records and frames: kMessageVersion
    uint64_t host[2];  // equal for ranks that share /dev/shm and belong to one user
};

// At the front of each frame.
struct Frame {
    uint64_t used;  // bytes of records after this struct
    uint64_t next;  // bytes of this side's next frame
};

Card card_of_this_host() {
    Card card{kMessageVersion, {}};
    std::string boot;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
    struct stat shm {};
    if (boot.empty() || stat("/dev/shm", &shm) != 0) {
        card.host[0] = process_number();  // unique: no other rank is on this host
        return card;
    }
    const uint64_t of[] = {shm.st_dev, shm.st_ino, geteuid()};
    card.host[0] = hash_bytes(boot.data(), boot.size());
    card.host[1] = hash_bytes(of, sizeof of);
    return card;
}

// A piece of GPU memory with its twin in pinned host memory.
struct Twin {
    uint8_t *host = nullptr, *device = nullptr;
    bool make(size_t bytes) {
        return cudaHostAlloc(reinterpret_cast<void**>(&host), bytes, cudaHostAllocPortable) == cudaSuccess &&
               cudaMalloc(reinterpret_cast<void**>(&device), bytes) == cudaSuccess;
    }
    void free() const {
        cudaFreeHost(host);
        cudaFree(device);
    }
};

class NcclTransport final : public StreamTransport {
  public:
    // `generation`: of the device's kernels, as the launchers take it.
    NcclTransport(const nccl::Library& lib, const GroupId& id, uint32_t rank, uint32_t ranks, std::shared_ptr<Device> device,
                  int generation, const NcclOptions& options)
        : StreamTransport(ranks),
          nccl_(lib),
          id_(id),
          rank_(rank),
          ranks_(ranks),
          device_(std::move(device)),
          generation_(generation),
          apart_(options.hosts_apart),
          adopted_(options.comm != nullptr),
          silence_(options.silence),
          connect_(std::min(options.silence, options.connect)),
          place_(ranks, kElsewhere),
          pairs_(ranks) {
        const auto adopt = [&options](nccl::Comm* comm) {
            *comm = static_cast<nccl::Comm>(options.comm);
            return nccl::kSuccess;
        };
        if (adopted_) world_.make(adopt);
    }

    // TA_E_LIMIT: the system has no thread.
    Status start() {
        return watch_.start(connect_, [this] { end_what_is_stuck(); });
    }
    void when_stuck(std::function<void(const Status&)> tell) override {
        const std::lock_guard lock(telling_);
        tell_stuck_ = std::move(tell);
    }
    void give_back_lent() override {
        if (adopted_) world_.release();
        connected_ = true;
    }

    ~NcclTransport() override {
        // Sends the last messages before the communicators end.
        ends_ = true;
        const auto is_connected = [](const Pair& p) { return p.open; };
        while (phase_ == Phase::kOpen && std::any_of(pairs_.begin(), pairs_.end(), is_connected)) {
            step();
            std::this_thread::sleep_for(kPoll);
        }
        const CudaScope scope(device_->ordinal());
        for (Pair& p : pairs_) {
            abort(p);
            if (p.stream) cudaStreamDestroy(p.stream);
            for (cudaEvent_t e : p.went) {
                if (e) cudaEventDestroy(e);
            }
            p.out.free();
            p.in.free();
            p.packed.free();
            p.arrived.free();
        }
        watch_.stop();
        // NCCL has not used it, or only in a group of one rank, which is ready at once: it stays the caller's.
        if (adopted_ && (phase_ == Phase::kBegin || ranks_ == 1)) world_.release();
        world_.abort(nccl_);
        EndedGroups::of_this_process().add(name_of(id_));
        if (stream_) cudaStreamDestroy(stream_);
        cards_.free();
    }

    void send(uint32_t to, Packet packet, bool heartbeat) override {
        if (place_of(to) != kElsewhere) return local_->send(uint32_t(place_[to]), std::move(packet), heartbeat);
        StreamTransport::send(to, std::move(packet), heartbeat);
    }

    std::optional<Received> receive(Time until) override {
        for (;;) {
            step();
            std::unique_lock lock(stepping_);
            if (!coming_.empty()) {
                Received got = std::move(coming_.front());
                coming_.pop_front();
                return got;
            }
            const bool fails = !health_.ok() && !std::exchange(told_, true);
            const Time next = next_step();
            lock.unlock();
            const bool enough = woken_.exchange(false) || Clock::now() >= until;
            if (fails || (enough && phase_ != Phase::kOpen)) return {};
            if (phase_ != Phase::kOpen) {
                if (!connects()) {
                    woken_.wait(false);
                } else {  // polls NCCL until it has connected: NCCL calls nobody back
                    std::this_thread::sleep_for(std::min<Clock::duration>(kPoll, until - Clock::now()));
                }
                continue;
            }
            std::optional<Received> got = local_->receive(enough ? Time::min() : std::min(until, next));
            if (got) return Received{members_[got->from], std::move(got->packet)};
            if (enough) return {};
        }
    }

    void wake() override {
        woken_ = true;
        woken_.notify_all();
        if (open_.load(std::memory_order_acquire)) local_->wake();
    }

    Status health() const override {
        const std::lock_guard lock(stepping_);
        return health_.clone();
    }
    bool alive(uint32_t peer) const override { return place_of(peer) == kElsewhere || local_->alive(uint32_t(place_[peer])); }
    std::optional<bool> has_joined(uint32_t peer) const override {
        if (!open_.load(std::memory_order_acquire)) return {};
        return place_[peer] == kElsewhere || local_->has_joined(uint32_t(place_[peer]));
    }
    bool waits(uint32_t peer) const override {
        const std::lock_guard lock(stepping_);
        const auto is_of = [peer](const Received& r) { return r.from == peer; };
        if (std::any_of(coming_.begin(), coming_.end(), is_of)) return true;
        if (pairs_[peer].under_way && pairs_[peer].over) return true;  // whatever the round brought
        return place_of(peer) != kElsewhere && local_->waits(uint32_t(place_[peer]));
    }
    void end_writes() override {
        StreamTransport::end_writes();
        {
            const std::lock_guard lock(users_mutex_);
            ends_ = true;
            users_changed_.notify_all();
        }
        if (open_.load(std::memory_order_acquire)) local_->end_writes();
        wake();
    }

    void open_window(uint64_t window, uint32_t peer, WindowMemory memory) override {
        if (place_of(peer) != kElsewhere) return local_->open_window(window, uint32_t(place_[peer]), std::move(memory));
        StreamTransport::open_window(window, peer, std::move(memory));
    }
    void close_window(uint64_t window) override {
        StreamTransport::close_window(window);
        if (open_.load(std::memory_order_acquire)) local_->close_window(window);
    }
    Status write(uint32_t to, uint64_t window, std::span<const RemoteCopy> copies, bool on_gpu) override {
        if (place_of(to) != kElsewhere) return local_->write(uint32_t(place_[to]), window, copies, on_gpu);
        return StreamTransport::write(to, window, copies, on_gpu);
    }
    bool may_write_gpu(uint32_t peer) override {
        if (!open_.load(std::memory_order_acquire)) return false;
        if (place_[peer] != kElsewhere) return local_->may_write_gpu(uint32_t(place_[peer]));
        // Takes no lock of the communication thread: the driver may wait for a round that a peer never enters.
        const std::lock_guard lock(making_);
        const CudaScope scope(device_->ordinal());
        Pair& p = pairs_[peer];
        return p.packed.make() && p.arrived.make();
    }

    Result<bool> reaches(uint32_t peer) override {
        return place_of(peer) == kElsewhere ? Result<bool>(false) : local_->reaches(uint32_t(place_[peer]));
    }
    Route route(uint32_t peer) override {
        if (place_of(peer) != kElsewhere) return local_->route(uint32_t(place_[peer]));
        return {Route::By::kNccl, 0, apart_ ? "hosts_apart is set" : "the ranks are of two hosts, or do not share /dev/shm"};
    }
    Result<bool> all_reach() override { return members_.size() == ranks_ ? local_->all_reach() : Result<bool>(false); }
    bool all_cpus() const override { return false; }
    Result<Shared> share_memory(std::shared_ptr<uint8_t> memory, uint64_t bytes) override {
        return local_->share_memory(std::move(memory), bytes);
    }
    Result<std::shared_ptr<uint8_t>> find_memory(uint32_t peer, const MemoryName& name, uint64_t bytes) override {
        if (place_of(peer) == kElsewhere) return std::shared_ptr<uint8_t>();
        return local_->find_memory(uint32_t(place_[peer]), name, bytes);
    }

  private:
    static constexpr int kElsewhere = -1;
    enum class Phase { kBegin, kConnecting, kCards, kWarming, kIds, kPairing, kOpen };
    struct Pair {
        NcclComm comm;
        bool open = false;  // since comm was made, until abort()
        cudaStream_t stream = nullptr;
        Twin out, in;
        size_t next_out = kFrame, next_in = kFrame;
        // GPU to GPU, after the frames: what this round carries, and what its frames announce for the next.
        Chunks packed, arrived;
        Pieces gpu_out, gpu_in, next_gpu_out, next_gpu_in;
        std::vector<WindowUser> users, next_users;  // windows into which incoming pieces go
        size_t gpu_bytes = kGpuChunk;               // most bytes in the next round that this rank fills
        Time began{};                               // when the round began
        cudaEvent_t went[2] = {};                   // after each of the last two chunks
        size_t chunk = 0;                           // the current chunk
        bool enqueued = false, under_way = false;
        std::atomic<bool> over{false};
        bool said = false;  // this rank sent records in the current round
        int rests = 0;      // rounds since either side sent something
        Time due{};
    };

    // The peer's number among this host's ranks; kElsewhere: not on this host, or not known yet.
    int place_of(uint32_t peer) const { return open_.load(std::memory_order_acquire) ? place_[peer] : kElsewhere; }

    bool check(cudaError_t e, const char* what) {
        if (e != cudaSuccess && health_.ok()) health_ = fail(TA_E_DEVICE, "%s for NCCL: %s", what, cudaGetErrorString(e));
        return e == cudaSuccess;
    }
    // True if NCCL has accepted a call; its work may still go on.
    bool taken(int result, const char* what, int32_t peer = -1) {
        const bool ok = result == nccl::kSuccess || result == nccl::kInProgress;
        if (ok || !health_.ok()) return ok;
        const char* const why = result == NcclComm::kAborted ? "CUDA did not answer meanwhile" : nccl_.GetErrorString(result);
        health_ = fail(TA_E_PEER_LOST, "NCCL: %s: %s", what, why).rank(peer);
        return false;
    }
    // True if the communicator has finished its last call.
    bool done(NcclComm& comm, const char* what, int32_t peer = -1) {
        int state = nccl::kSuccess;
        const int result = comm.use([&](nccl::Comm c) { return nccl_.CommGetAsyncError(c, &state); });
        return taken(result, what, peer) && taken(state, what, peer) && state == nccl::kSuccess;
    }

    // ---- connecting

    bool connects() const { return phase_ != Phase::kOpen && health_.ok() && !ends_; }

    // Makes all the progress that needs no waiting.
    void step() {
        const std::lock_guard lock(stepping_);
        const StepWatch::Step watched(watch_, connected_ ? silence_ : connect_);
        const CudaScope scope(device_->ordinal());
        while (connects() && advance()) {
        }
        // NCCL's kernel may wait for a rank that never joins, and with it everybody who waits for the GPU.
        if (!connected_ && (ends_ || !health_.ok())) world_.abort(nccl_);
        if (phase_ != Phase::kOpen) return;
        for (uint32_t r = 0; r < ranks_ && health_.ok(); ++r) {
            if (pairs_[r].open) go_on(r);
        }
        if (!ends_ && health_.ok()) return;
        if (ended_at_ == Time()) ended_at_ = Clock::now();
        // If a peer never enters the round, its kernel stays on the GPU, and everybody who waits for the GPU waits with it.
        const bool late = !health_.ok() || Clock::now() >= ended_at_ + kGoodbye;
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (pairs_[r].open && (late || has_said_all(r))) abort(pairs_[r]);
        }
    }

    void abort(Pair& p) {
        if (!std::exchange(p.open, false)) return;
        p.comm.abort(nccl_);
        for (cudaStream_t s : {p.stream, p.packed.made_stream(), p.arrived.made_stream()}) {
            if (s) cudaStreamSynchronize(s);
        }
        drop_users(p.users);
        drop_users(p.next_users);
    }
    // Called when a step waits for the driver, or in a call of NCCL for a peer. Aborting ends NCCL's kernels, and so what the
    // driver waits for. The group ends even if the step never returns. While it connects it ends before the abort, so that it
    // cannot become ready with an aborted communicator.
    void end_what_is_stuck() {
        const bool connected = connected_;
        if (connected) abort_all();
        {
            const std::lock_guard lock(telling_);
            const auto limit = (long long)(connected ? silence_ : connect_).count();
            if (tell_stuck_)
                tell_stuck_(fail(connected ? TA_E_PEER_LOST : TA_E_TIMEOUT,
                                 "a call of NCCL or CUDA did not return within %lld ms%s", limit,
                                 connected ? "" : " while the group connected"));
        }
        if (!connected) abort_all();
    }
    void abort_all() {
        for (Pair& p : pairs_) p.comm.abort(nccl_);
        // A call on a blocking communicator of the caller may wait for a peer.
        adopted_ ? world_.abort_stuck(nccl_) : world_.abort(nccl_);
    }
    // After the group's end the communication thread may be gone: the caller makes the steps.
    void wait_for_users(std::unique_lock<std::mutex>& lock) override {
        if (!ends_) return StreamTransport::wait_for_users(lock);
        lock.unlock();
        step();
        std::this_thread::sleep_for(kPoll);
        lock.lock();
    }

    // Chunks may still be packed from the pieces until the communicator is aborted.
    void wait_for_pieces(uint32_t to) override {
        for (;; std::this_thread::sleep_for(kPoll)) {
            step();
            const std::lock_guard lock(stepping_);
            if (!pairs_[to].open) return;
        }
    }

    // True: a phase has ended.
    bool advance() {
        switch (phase_) {
            case Phase::kBegin:
                if (!check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream") ||
                    !check(cudaError_t(cuda::load_move_blocks(generation_)), "a kernel") ||
                    !check(cards_.make(ranks_ * ranks_ * sizeof(nccl::UniqueId)) ? cudaSuccess : cudaErrorMemoryAllocation,
                           "memory"))
                    return false;
                if (!adopted_ && !begin_comm(world_, ranks_, id_.data(), rank_)) return false;
                break;
            case Phase::kConnecting: {
                if (!done(world_, "connecting")) return false;
                Card mine = card_of_this_host();
                if (apart_) mine = {kMessageVersion, {process_number(), rank_}};
                if (!gather(&mine, sizeof mine)) return false;
                break;
            }
            case Phase::kCards: {
                if (!gathered()) return false;
                Result<std::vector<uint32_t>> members = find_members();
                if (!members.ok()) return give_up(std::move(members).status());
                if (members_.size() < ranks_ && !name_pairs()) return false;
                break;
            }
            case Phase::kWarming:
                // Before the first round: rounds' kernels wait for peers, and measuring may wait for kernels.
                while (std::optional<Received> got = local_->receive(Time::min()))
                    coming_.push_back({members_[got->from], std::move(got->packet)});
                if (!local_->is_warm()) return false;
                break;
            case Phase::kIds:
                if (members_.size() < ranks_ && (!gathered() || !begin_pairs())) return false;
                break;
            case Phase::kPairing:
                for (uint32_t r = 0; r < ranks_; ++r) {
                    if (pairs_[r].open && !done(pairs_[r].comm, "connecting two ranks", int32_t(r))) return false;
                }
                open();
                break;
            case Phase::kOpen:
                return false;
        }
        phase_ = Phase(int(phase_) + 1);
        return true;
    }

    bool give_up(Status s) {
        if (health_.ok()) health_ = std::move(s);
        return false;
    }

    bool begin_comm(NcclComm& comm, uint32_t ranks, const void* id, uint32_t rank) {
        nccl::Config config;
        config.blocking = 0;
        config.max_ctas = kMostCtas;
        nccl::UniqueId unique;
        std::memcpy(&unique, id, sizeof unique);
        const auto make = [&](nccl::Comm* c) { return nccl_.CommInitRankConfig(c, int(ranks), unique, int(rank), &config); };
        return taken(comm.make(make), "joining");
    }

    // Starts to gather every rank's bytes into cards_.host, in the order of ranks.
    bool gather(const void* mine, size_t bytes) {
        std::memcpy(cards_.host + rank_ * bytes, mine, bytes);
        gathered_bytes_ = bytes;
        gather_is_enqueued_ = false;
        return check(cudaMemcpyAsync(cards_.device + rank_ * bytes, cards_.host + rank_ * bytes, bytes, cudaMemcpyHostToDevice,
                                     stream_),
                     "a copy") &&
               taken(world_.use([&](nccl::Comm c) {
                   return nccl_.AllGather(cards_.device + rank_ * bytes, cards_.device, bytes, nccl::kBytes, c, stream_);
               }),
                     "gathering");
    }
    bool gathered() {
        if (!gather_is_enqueued_) {
            if (!done(world_, "gathering")) return false;
            if (!check(cudaMemcpyAsync(cards_.host, cards_.device, ranks_ * gathered_bytes_, cudaMemcpyDeviceToHost, stream_),
                       "a copy"))
                return false;
            gather_is_enqueued_ = true;
        }
        const cudaError_t e = cudaStreamQuery(stream_);
        return e != cudaErrorNotReady && check(e, "gathering");
    }

    // Finds the ranks of this host, this one included, and joins their shared memory.
    Result<std::vector<uint32_t>> find_members() {
        const auto* const cards = reinterpret_cast<const Card*>(cards_.host);
        struct {
            GroupId id;
            Card host;
        } of{id_, cards[rank_]};
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (cards[r].version != kMessageVersion) return other_version(r, cards[r].version);
            if (std::memcmp(&cards[r], &of.host, sizeof(Card)) != 0) continue;
            place_[r] = int(members_.size());
            members_.push_back(r);
        }
        Result<std::unique_ptr<Transport>> local =
            join_host_group(hash_bytes(&of, sizeof of), uint32_t(place_[rank_]), uint32_t(members_.size()), device_);
        if (!local.ok()) return std::move(local).status();
        local_ = local.take();
        return members_;
    }

    // Makes ids for communicators with higher ranks on other hosts.
    bool name_pairs() {
        std::vector<nccl::UniqueId> ids(ranks_);
        for (uint32_t r = rank_ + 1; r < ranks_; ++r) {
            if (place_[r] == kElsewhere && !taken(nccl_.GetUniqueId(&ids[r]), "naming a communicator")) return false;
        }
        return gather(ids.data(), ids.size() * sizeof ids[0]);
    }

    bool begin_pairs() {
        const auto* const ids = reinterpret_cast<const nccl::UniqueId*>(cards_.host);
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (place_[r] != kElsewhere) continue;
            Pair& p = pairs_[r];
            const uint32_t first = std::min(rank_, r), second = std::max(rank_, r);
            for (cudaEvent_t& e : p.went) {
                if (!check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "an event")) return false;
            }
            if (!check(cudaStreamCreateWithFlags(&p.stream, cudaStreamNonBlocking), "a stream") ||
                !check(p.out.make(kLargeFrame) && p.in.make(kLargeFrame) ? cudaSuccess : cudaErrorMemoryAllocation, "memory") ||
                !begin_comm(p.comm, 2, &ids[size_t(first) * ranks_ + second], rank_ == first ? 0 : 1))
                return false;
            p.open = true;
        }
        return true;
    }

    // From now on packets for ranks of this host go through shared memory. Packets that wait for such ranks go first.
    void open() {
        std::vector<std::unique_lock<std::mutex>> locks;
        for (uint32_t r = 0; r < ranks_; ++r) locks.emplace_back(mutex_of(r));
        for (uint32_t r = 0; r < ranks_; ++r) {
            if (place_[r] != kElsewhere && r != rank_) forward(r);
        }
        open_.store(true, std::memory_order_release);
        if (ranks_ == 1) give_back_lent();
    }

    // ---- rounds

    void go_on(uint32_t r) {
        Pair& p = pairs_[r];
        if (p.under_way && !finish_round(r)) return;
        if (p.under_way || Clock::now() < p.due) return;
        begin_round(r);
        finish_round(r);  // as far as it goes without waiting
    }

    // Puts records for this round into the frame; returns their bytes.
    size_t fill(uint32_t r, size_t room) {
        Pair& p = pairs_[r];
        const std::lock_guard lock(mutex_of(r));
        size_t used = 0;
        Record record{};
        const uint8_t* body = nullptr;
        bool more = false;
        while ((more = next_record(r, kLargeFrame / 4, record, body))) {
            const size_t left = room - used;
            if (left <= sizeof record) break;
            if (record.bytes > left - sizeof record) {  // only a part of it fits
                record.bytes = uint32_t(left - sizeof record);
                if (record.kind == Record::Kind::kPacketEnd) record.kind = Record::Kind::kPacket;
            }
            uint8_t* const at = p.out.host + sizeof(Frame) + used;
            std::memcpy(at, &record, sizeof record);
            std::memcpy(at + sizeof record, body, record.bytes);
            used += sizeof record + record.bytes;
            record_has_left(r, record);
        }
        p.next_gpu_out = Pieces(p.gpu_bytes);
        while (!more && p.next_gpu_out.room() > 0 && next_gpu_piece(r, p.next_gpu_out.room(), record, body)) {
            if (room - used < sizeof record) break;
            std::memcpy(p.out.host + sizeof(Frame) + used, &record, sizeof record);
            used += sizeof record;
            p.next_gpu_out.add(const_cast<uint8_t*>(body), record.bytes);
            record_has_left(r, record);
        }
        const size_t left = !more && next_gpu_piece(r, kGpuChunk, record, body) ? gpu_pieces_left(r) : 0;
        const size_t list = (sizeof(Frame) + (left + kGpuBytes / kGpuChunk) * sizeof record + kFrame - 1) / kFrame * kFrame;
        const Frame frame{used, more ? kLargeFrame : std::min(list, kLargeFrame)};
        std::memcpy(p.out.host, &frame, sizeof frame);
        return used;
    }

    void begin_round(uint32_t r) {
        Pair& p = pairs_[r];
        p.began = Clock::now();
        p.gpu_out = std::exchange(p.next_gpu_out, {});
        p.gpu_in = std::exchange(p.next_gpu_in, {});
        p.users = std::exchange(p.next_users, {});
        const size_t out = p.next_out;
        p.said = fill(r, out - sizeof(Frame)) > 0;
        Frame frame;
        std::memcpy(&frame, p.out.host, sizeof frame);
        p.next_out = size_t(frame.next);
        p.under_way = true;
        p.enqueued = p.over = false;
        p.chunk = 0;
        if (check(cudaMemcpyAsync(p.out.device, p.out.host, out, cudaMemcpyHostToDevice, p.stream), "a copy") && pack(p, 0) &&
            pack(p, 1))
            send_chunk(r, out);
    }

    // Packs a chunk. Chunks take turns in two buffers, so it waits until the chunk two before it has been sent.
    bool pack(Pair& p, size_t chunk) {
        if (chunk >= p.gpu_out.chunks()) return true;
        Chunks& to = p.packed;
        return (chunk < 2 || check(cudaStreamWaitEvent(to.stream, p.went[chunk % 2], 0), "an event")) &&
               check(cudaError_t(p.gpu_out.move(chunk, true, to.memory[chunk % 2], generation_, to.stream)), "packing") &&
               check(cudaEventRecord(to.moved[chunk % 2], to.stream), "an event");
    }

    // Sends and receives the next chunk. The first one goes together with the frames.
    bool send_chunk(uint32_t r, size_t frame_bytes) {
        Pair& p = pairs_[r];
        const int other = rank_ < r ? 1 : 0;
        const size_t out = p.gpu_out.bytes_of(p.chunk), in = p.gpu_in.bytes_of(p.chunk), half = p.chunk % 2;
        const auto group = [&](nccl::Comm comm) {
            int result = nccl_.GroupStart();
            const auto next = [&](size_t n, auto&& call) {
                if (n > 0 && (result == nccl::kSuccess || result == nccl::kInProgress)) result = call();
            };
            const auto send = [&](const uint8_t* from, size_t n) {
                next(n, [&] { return nccl_.Send(from, n, nccl::kBytes, other, comm, p.stream); });
            };
            const auto receive = [&](uint8_t* to, size_t n) {
                next(n, [&] { return nccl_.Recv(to, n, nccl::kBytes, other, comm, p.stream); });
            };
            if (p.chunk == 0) send(p.out.device, frame_bytes), receive(p.in.device, p.next_in);
            send(p.packed.memory[half], out);
            receive(p.arrived.memory[half], in);
            next(1, [&] { return nccl_.GroupEnd(); });
            return result;
        };
        if (out > 0 && !check(cudaStreamWaitEvent(p.stream, p.packed.moved[half], 0), "an event")) return false;
        if (in > 0 && p.chunk >= 2 && !check(cudaStreamWaitEvent(p.stream, p.arrived.moved[half], 0), "an event")) return false;
        return taken(p.comm.use(group), "a round", int32_t(r));
    }

    // Enqueues unpacking of the chunk that arrived, and packing of the chunk after the next.
    bool chunk_is_enqueued(Pair& p) {
        const size_t half = p.chunk % 2;
        if (!check(cudaEventRecord(p.went[half], p.stream), "an event") || !pack(p, p.chunk + 2)) return false;
        if (p.gpu_in.bytes_of(p.chunk) == 0) return true;
        Chunks& from = p.arrived;
        return check(cudaStreamWaitEvent(from.stream, p.went[half], 0), "an event") &&
               check(cudaError_t(p.gpu_in.move(p.chunk, false, from.memory[half], generation_, from.stream)), "unpacking") &&
               check(cudaEventRecord(from.moved[half], from.stream), "an event");
    }

    // How long to poll before sleeping. NCCL does not tell when it has enqueued a group. A transfer takes about ten rounds, and
    // each would last as long as a sleep.
    Time spins_until(const Pair& p) const {
        const bool busy = p.said || p.rests == 0;
        return Clock::now() + (busy ? kBusySpin : kSpin);
    }

    // Enqueues as many groups as NCCL takes: each may follow once the one before it is enqueued. True: all of the round is
    // enqueued.
    bool enqueue_round(uint32_t r) {
        Pair& p = pairs_[r];
        const size_t chunks = std::max<size_t>({1, p.gpu_out.chunks(), p.gpu_in.chunks()});
        for (const Time until = spins_until(p);;) {
            if (done(p.comm, "a round", int32_t(r))) {
                if (!chunk_is_enqueued(p)) return false;
                if (++p.chunk == chunks) break;
                if (!send_chunk(r, 0)) return false;
            } else if (!health_.ok() || Clock::now() > until) {
                return false;
            }
        }
        for (size_t half = 0; half < std::min<size_t>(2, p.gpu_in.chunks()); ++half) {
            if (!check(cudaStreamWaitEvent(p.stream, p.arrived.moved[half], 0), "an event")) return false;
        }
        p.enqueued = true;
        return check(cudaMemcpyAsync(p.in.host, p.in.device, p.next_in, cudaMemcpyDeviceToHost, p.stream), "a copy") &&
               check(cudaLaunchHostFunc(p.stream, &round_is_over, new Over{&p.over, local_}), "a call");
    }

    // True if the round is over.
    bool finish_round(uint32_t r) {
        Pair& p = pairs_[r];
        if (!p.enqueued && !enqueue_round(r)) return false;
        for (const Time until = spins_until(p); !p.over;) {
            if (p.rests > 0 || Clock::now() > until) return false;
        }
        p.under_way = false;
        if (const size_t bytes = std::max(p.gpu_out.bytes(), p.gpu_in.bytes()); bytes > 0)
            p.gpu_bytes = bytes_of_round(bytes, Clock::now() - p.began, silence_ / 8);
        drop_users(p.users);
        if (p.gpu_out.bytes() > 0 && p.next_gpu_out.bytes() == 0) {
            const std::lock_guard lock(mutex_of(r));
            gpu_pieces_have_left(r);
        }
        Frame frame;
        std::memcpy(&frame, p.in.host, sizeof frame);
        if (frame.used > p.next_in - sizeof frame || frame.next % kFrame != 0 || frame.next == 0 || frame.next > kLargeFrame)
            return give_up(fail(TA_E_PEER_LOST, "rank %u sent what is no frame", r).rank(int32_t(r)));
        for (size_t at = sizeof frame, end = sizeof frame + size_t(frame.used); at < end;) {
            Record record;
            if (end - at < sizeof record) return no_record(r);
            std::memcpy(&record, p.in.host + at, sizeof record);
            at += sizeof record;
            if (record.kind == Record::Kind::kGpuBytes) {
                if (!expect_gpu_bytes(r, record))
                    return give_up(fail(TA_E_PEER_LOST, "rank %u sends blocks that nobody asked for", r).rank(int32_t(r)));
                continue;
            }
            if (record.bytes > end - at || record.kind < Record::Kind::kPacket || record.kind > Record::Kind::kBytes)
                return no_record(r);
            std::optional<Packet> packet =
                take_record(r, record, [&](uint8_t* to) { std::memcpy(to, p.in.host + at, record.bytes); });
            if (packet) coming_.push_back({r, std::move(*packet)});
            at += record.bytes;
        }
        p.next_in = size_t(frame.next);
        // Both sides know what either has sent, so they rest equally long.
        const bool active =
            p.said || frame.used > 0 || p.next_in > kFrame || p.next_out > kFrame || p.gpu_in.bytes() + p.gpu_out.bytes() > 0;
        p.rests = active ? 0 : std::min(p.rests + 1, 8 * kRestsOfOneLength);
        const auto rest = std::min(kLongestRest, kShortestRest * (1 << p.rests / kRestsOfOneLength));
        p.due = Clock::now() + (active ? Clock::duration(0) : rest);
        return true;
    }

    bool no_record(uint32_t r) { return give_up(fail(TA_E_PEER_LOST, "rank %u sent what is no record", r).rank(int32_t(r))); }

    // Finds the place of a piece that the next round brings; if its window is closed, the piece is skipped.
    bool expect_gpu_bytes(uint32_t r, const Record& record) {
        Pair& p = pairs_[r];
        if (!p.arrived.made || record.bytes == 0 || record.bytes > p.next_gpu_in.room()) return false;
        if ((record.at | record.bytes) % 16 != 0) return false;  // the kernel moves words of 16 bytes
        WindowUser window = use_window(r, record);
        if (!window) {
            p.next_gpu_in.add(nullptr, record.bytes);
            return true;
        }
        const auto add = [&](uint8_t* memory, uint64_t, uint64_t n) { p.next_gpu_in.add(memory, n); };
        if (!window->visit(record.at, record.bytes, add)) return false;
        p.next_users.push_back(std::move(window));
        return true;
    }

    struct Over {
        std::atomic<bool>* over;
        std::shared_ptr<Transport> waits;
    };
    static void CUDART_CB round_is_over(void* given) {
        const std::unique_ptr<Over> over(static_cast<Over*>(given));
        over->over->store(true);
        over->waits->wake();
    }

    Time next_step() const {
        const Time soon = Clock::now() + kPoll;
        Time next = Time::max();
        for (const Pair& p : pairs_) {
            if (!p.open) continue;
            if (ended_at_ != Time()) return soon;
            if (p.under_way && p.enqueued) continue;  // its end wakes this thread
            next = std::min(next, p.under_way ? soon : p.due);
        }
        return next;
    }

    // True if all is sent, and a round since then had nothing to send on either side: the peer has received everything.
    bool has_said_all(uint32_t r) {
        const std::lock_guard lock(mutex_of(r));
        Record record{};
        const uint8_t* body = nullptr;
        return pairs_[r].rests > 0 && !pairs_[r].under_way && !next_record(r, kFrame, record, body);
    }

    void leaves(uint32_t to) override {
        if (!open_.load(std::memory_order_acquire)) return;
        if (place_[to] != kElsewhere) {
            forward(to);
        } else {
            local_->wake();
        }
    }
    // Forwards packets that were sent before the peer was known to be on this host. Under the peer's mutex.
    void forward(uint32_t to) {
        for (Packet& packet : take_packets(to)) local_->send(uint32_t(place_[to]), std::move(packet), false);
    }

    const nccl::Library& nccl_;
    const GroupId id_;
    const uint32_t rank_, ranks_;
    const std::shared_ptr<Device> device_;
    const int generation_;
    const bool apart_, adopted_;
    const std::chrono::milliseconds silence_, connect_;  // time limits of a step

    std::mutex telling_;
    std::function<void(const Status&)> tell_stuck_;
    std::atomic<bool> connected_{false};  // the group has been ready once

    std::mutex making_;            // guards the making of Chunks
    mutable std::mutex stepping_;  // guards what step() uses: after the group's end other threads step, too
    Phase phase_ = Phase::kBegin;
    Status health_;
    NcclComm world_;
    cudaStream_t stream_ = nullptr;
    Twin cards_;
    size_t gathered_bytes_ = 0;
    bool gather_is_enqueued_ = false;

    std::shared_ptr<Transport> local_;  // to the ranks of this host
    std::vector<uint32_t> members_;     // ranks of this host
    std::vector<int> place_;            // [ranks]: index in members_, or kElsewhere
    std::atomic<bool> open_{false};     // place_ and local_ are final
    std::atomic<bool> woken_{false};
    std::atomic<bool> ends_{false};  // the group has ended
    bool told_ = false;              // receive() has reported health_
    Time ended_at_{};

    std::vector<Pair> pairs_;
    std::deque<Received> coming_;
    StepWatch watch_;  // last: it uses the members above
};

}  // namespace

Result<GroupId> make_nccl_id() {
    Result<const nccl::Library*> lib = nccl::Library::open();
    if (!lib.ok()) return std::move(lib).status();
    nccl::UniqueId unique;
    static_assert(sizeof unique == kGroupIdBytes);
    if (const int e = lib.value()->GetUniqueId(&unique); e != nccl::kSuccess)
        return fail(TA_E_UNSUPPORTED, "NCCL gives no id: %s", lib.value()->GetErrorString(e));
    GroupId id;
    std::memcpy(id.data(), &unique, sizeof unique);
    return id;
}

int nccl_version() {
    Result<const nccl::Library*> lib = nccl::Library::open();
    return lib.ok() ? lib.value()->version : 0;
}

Result<std::unique_ptr<Transport>> join_nccl_group(const GroupId& id, uint32_t rank, uint32_t ranks,
                                                   std::shared_ptr<Device> device, const NcclOptions& options) {
    if (!device || !device->cuda()) return fail(TA_E_UNSUPPORTED, "a rank of a group over NCCL has a GPU");
    if (EndedGroups::of_this_process().has(name_of(id))) return ended_group();
    Result<const nccl::Library*> lib = nccl::Library::open();
    if (!lib.ok()) return std::move(lib).status();
    if (options.comm) {
        const auto comm = static_cast<nccl::Comm>(options.comm);
        int n = 0, own = 0;
        if (lib.value()->CommCount(comm, &n) != nccl::kSuccess || lib.value()->CommUserRank(comm, &own) != nccl::kSuccess)
            return fail(TA_E_INVALID, "options.nccl_comm is no communicator that works");
        if (n != int(ranks) || own != int(rank))
            return fail(TA_E_MISMATCH, "options.nccl_comm has rank %d of %d, the group rank %u of %u", own, n, rank, ranks);
    }
    const int generation = device->cuda()->kernel_generation();
    auto transport = std::make_unique<NcclTransport>(*lib.value(), id, rank, ranks, std::move(device), generation, options);
    TA_RETURN_IF_ERROR(transport->start());
    return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace ta::share
