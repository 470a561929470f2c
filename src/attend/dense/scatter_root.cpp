#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/format/hash.h"
#include "src/attend/dense/scatter_parts.h"
#include "tiering/share/lane.h"

namespace ta {

using namespace scatter;

namespace {

// The part of a call for kv heads [first, first + n).
DenseCall part_of(const DenseCall& c, int64_t first, int64_t n, float* lse) {
    const int64_t group = c.q.heads / c.k.heads;
    DenseCall part = c;
    part.q = heads_of(c.q, first * group, n * group);
    part.k = heads_of(c.k, first, n);
    part.v = heads_of(c.v, first, n);
    part.out = heads_of(c.out, first * group, n * group);
    part.lse = lse;
    if (part.settings.alibi_slopes) part.settings.alibi_slopes += first * group;
    if (part.settings.sinks) part.settings.sinks += first * group;
    return part;
}

}  // namespace

struct DenseScatter::Worker {
    Peer peer;
    Share share;
    RoundLayout full;            // layout of a round with all its heads
    uint32_t ways = 0;           // what this root told the other rank that it can write by
    uint64_t result_window = 0;  // at the root; opened once the other rank is ready
    share::MemoryName result_name;
    bool open = false;
    ScatterMemory *send = nullptr, *results = nullptr;
    std::unique_ptr<ScatterLane> lane;
    ScatterStats stats;
    Status status;
    std::thread thread;
};

// The root's part of a call.
class DenseScatter::Giving {
  public:
    Giving(DenseScatter& scatter, const DenseCall& call, ScatterStats& stats) : s_(scatter), call_(call), stats_(stats) {}
    // The order matters: first the threads end, then windows close, and last the device completes its use of the memory.
    ~Giving() {
        join();
        for (Worker& w : workers_) {
            if (w.open) s_.group_.transport().close_window(w.result_window);
            w.lane.reset();
        }
        device_.reset();
    }
    Giving(const Giving&) = delete;
    Giving& operator=(const Giving&) = delete;

    Status run(const ScatterSettings& settings);

  private:
    Status call_others(const std::vector<Share>& shares);
    Result<share::PayloadWriter> describe(Worker& worker);
    Status open_windows();
    Status start_serving();
    void leave();
    void tell(uint32_t rank, Note what);
    Status serve(Worker& worker);
    Status pack_round(Worker& worker, uint32_t round);
    Status send_round(Worker& worker, uint32_t round);
    Status take_results(Worker& worker, uint32_t round, uint64_t hash);
    Status attend_own(const Share& share);
    RoundLayout layout_of(const Worker& w, uint32_t round) const {
        return RoundLayout::of(shape_, w.share.heads_of(round)).take();
    }
    void join() {
        for (Worker& w : workers_) {
            if (w.thread.joinable()) w.thread.join();
        }
    }

    DenseScatter& s_;
    const DenseCall& call_;
    ScatterStats& stats_;
    const Shape shape_ = Shape::of(call_);
    std::unique_ptr<ScatterDevice> device_;
    std::vector<Worker> workers_;
    std::atomic<size_t> working_{1};  // threads that serve, and the one that starts them
};

Status DenseScatter::give(const DenseCall& call, const ScatterSettings& settings, ScatterStats& stats) {
    const Timed total(stats.total);
    TA_RETURN_IF_ERROR(check_dense(context_, call));
    const uint64_t room = settings.room ? settings.room : kDefaultRoom;
    TA_RETURN_IF_ERROR(rounds_.begin({settings.tag, room, settings.root, kind_of(context_)}));
    const InCall in(rounds_);
    Status s;
    {
        Giving giving(*this, call, stats);
        s = guarded([&] { return giving.run(settings); });
    }
    if (!s.ok()) forget();
    return s;
}

Status DenseScatter::Giving::run(const ScatterSettings& settings) {
    Result<std::vector<Rounds::Begin>> ranks = s_.rounds_.wait_for_all();
    if (!ranks.ok()) return std::move(ranks).status();
    Result<std::vector<Share>> shares = s_.share_out(call_, settings, ranks.value());
    if (!shares.ok()) return std::move(shares).status();
    const Share own = shares.value()[s_.rank_];
    stats_.heads = own.heads;
    stats_.rounds = own.rounds();
    stats_.heads_per_round = own.per_round;
    Result<std::unique_ptr<ScatterDevice>> made = make_scatter_device(s_.context_, call_.stream, false);
    if (!made.ok()) return std::move(made).status();
    device_ = made.take();
    TA_RETURN_IF_ERROR(call_others(shares.value()));
    TA_RETURN_IF_ERROR(open_windows());
    TA_RETURN_IF_ERROR(start_serving());
    TA_RETURN_IF_ERROR(attend_own(own));
    TA_RETURN_IF_ERROR(device_->wait());
    join();
    for (Worker& w : workers_) {
        TA_RETURN_IF_ERROR(std::move(w.status));
        stats_.bytes_sent += w.stats.bytes_sent;
        stats_.bytes_received += w.stats.bytes_received;
        stats_.pack += w.stats.pack;
        stats_.send += w.stats.send;
        stats_.longest_send = std::max(stats_.longest_send, w.stats.longest_send);
        stats_.wait += w.stats.wait;
    }
    // Reports values that a GPU's kernels replaced.
    DenseCall nothing = part_of(call_, 0, 0, nullptr);
    nothing.q.tokens = nothing.k.tokens = nothing.v.tokens = nothing.out.tokens = 0;
    return device_->check(nothing);
}

Status DenseScatter::Giving::call_others(const std::vector<Share>& shares) {
    workers_.reserve(s_.ranks_);
    size_t pieces = 0;
    for (uint32_t r = 0; r < s_.ranks_; ++r) {
        if (r == s_.rank_) continue;
        Worker& w = workers_.emplace_back();
        w.peer.rank = r;
        w.share = shares[r];
        Result<RoundLayout> full = RoundLayout::of(shape_, w.share.per_round);
        if (!full.ok()) return std::move(full).status();
        w.full = full.value();
        w.result_window = s_.rounds_.new_window();
        w.send = &s_.memory(pieces++);
        w.results = &s_.memory(pieces++);
        Result<std::unique_ptr<ScatterLane>> lane = device_->make_lane();
        if (!lane.ok()) return std::move(lane).status();
        w.lane = lane.take();
        Result<share::PayloadWriter> payload = describe(w);
        if (!payload.ok()) return std::move(payload).status();
        TA_RETURN_IF_ERROR(s_.rounds_.call(r, payload.value().bytes()));
    }
    return {};
}

Result<share::PayloadWriter> DenseScatter::Giving::describe(Worker& w) {
    const AttendSettings& o = call_.settings;
    CallHeader h{};
    h.q_tokens = shape_.q_tokens;
    h.k_tokens = shape_.k_tokens;
    h.window = o.window;
    h.head_dim = shape_.head_dim;
    h.group = shape_.group;
    h.kv_heads = int32_t(w.share.heads);
    h.heads_per_round = int32_t(w.share.per_round);
    h.q_type = int32_t(shape_.q);
    h.k_type = int32_t(shape_.k);
    h.v_type = int32_t(shape_.v);
    h.out_type = int32_t(shape_.out);
    h.variant = call_.variant;
    h.v_granularity = call_.v_granularity;
    h.group_size = call_.group_size;
    h.saturate = call_.saturate;
    h.mask = o.mask;
    h.exp = int32_t(o.exp);
    h.p = o.p;
    h.has_lse = shape_.has_lse;
    h.has_slopes = o.alibi_slopes != nullptr;
    h.has_sinks = o.sinks != nullptr;
    h.scale = o.scale;
    h.softcap = o.softcap;
    h.offsets = call_.q_offsets.size();
    h.result_window = w.result_window;
    h.head_major = shape_.head_major;
    h.ways = w.ways = ways_to(s_.group_.transport(), w.peer.rank);
    share::PayloadWriter payload;
    payload.put(h).put_all(call_.q_offsets).put_all(call_.k_offsets);
    const int64_t first = int64_t(w.share.first) * shape_.group, n = int64_t(w.share.heads) * shape_.group;
    for (const float* const all : {o.alibi_slopes, o.sinks}) {
        if (!all) continue;
        std::vector<float> values(size_t(n), 0.0f);
        TA_RETURN_IF_ERROR(w.lane->copy(values.data(), all + first, values.size() * sizeof(float)));
        TA_RETURN_IF_ERROR(w.lane->wait());
        payload.put_all(std::span<const float>(values));
    }
    return payload;
}

// Waits until all other ranks know the call. So none of them is still behind when the first gets its results.
Status DenseScatter::Giving::open_windows() {
    for (Worker& w : workers_) {
        Result<Progress> ready =
            s_.rounds_.wait(w.peer.rank, [](const Progress& there, const Progress&) { return there.ready != 0; });
        if (!ready.ok()) return std::move(ready).status();
        w.peer.window = ready.value().window;
        w.peer.way = Way(ready.value().way);
        if (w.peer.way != kHostWindows && w.peer.way != choose(w.ways & w.peer.way)) {
            Status why = share::no_message(w.peer.rank);
            s_.group_.end(why);
            return why;
        }
        if (w.share.heads == 0) continue;
        TA_RETURN_IF_ERROR(w.send->reserve(size_t(w.full.inputs), w.peer.on_gpu()));
        TA_RETURN_IF_ERROR(w.results->reserve(size_t(kSlots * w.full.results), w.peer.on_gpu()));
        if (w.peer.way == kGpuMemory) {
            TA_RETURN_IF_ERROR(s_.find(w.peer, ready.value().memory, kSlots * w.full.inputs));
            Result<share::MemoryName> name = w.results->share(s_.group_.transport());
            if (!name.ok()) return std::move(name).status();
            w.result_name = name.value();
            continue;
        }
        s_.group_.transport().open_window(w.result_window, w.peer.rank,
                                          window_of(*w.results, kSlots * w.full.results, w.peer.on_gpu()));
        w.open = true;
    }
    return {};
}

Status DenseScatter::Giving::start_serving() {
    for (const Worker& w : workers_) working_ += w.share.heads > 0;
    for (Worker& w : workers_) {
        if (w.share.heads == 0) continue;
        const auto run = [this, &w] {
            w.status = s_.guarded([&] { return serve(w); });
            if (w.status.ok()) leave();
        };
        TA_RETURN_IF_ERROR(share::start_thread(w.thread, run));
    }
    leave();
    return {};
}

// The last thread that has received all its results tells all other ranks that the call is done. The results are complete even
// if that message is lost.
void DenseScatter::Giving::leave() {
    if (working_.fetch_sub(1) > 1) return;
    for (const Worker& w : workers_) tell(w.peer.rank, Note::kDone);
}

void DenseScatter::Giving::tell(uint32_t rank, Note what) {
    try {
        (void)s_.rounds_.note(rank, what);
    } catch (const std::bad_alloc&) {
        // The other rank is not told: it waits until its deadline.
    }
}

Status DenseScatter::Giving::attend_own(const Share& share) {
    if (share.heads == 0) return {};
    const int64_t group = shape_.group;
    const size_t lse_bytes = size_t(call_.q.tokens) * share.per_round * size_t(group) * sizeof(float);
    ScatterMemory& lse = s_.memory(2 * size_t(s_.ranks_));
    if (call_.lse) TA_RETURN_IF_ERROR(lse.reserve(kSlots * lse_bytes, true));
    for (uint32_t round = 0; round < share.rounds(); ++round) {
        const int64_t first = share.first_of(round), n = share.heads_of(round);
        const uint32_t slot = round % kSlots;
        auto* const values = call_.lse ? reinterpret_cast<float*>(lse.data() + slot * lse_bytes) : nullptr;
        TA_RETURN_IF_ERROR(device_->attend(part_of(call_, first, n, values), slot));
        if (!values) continue;
        TA_RETURN_IF_ERROR(device_->copy(heads_of(lse_view(call_.lse, call_.q.tokens, call_.q.heads), first * group, n * group),
                                         lse_view(values, call_.q.tokens, n * group), slot));
    }
    return {};
}

// Serves one other rank, on a thread of its own.
Status DenseScatter::Giving::serve(Worker& w) {
    const uint32_t rounds = w.share.rounds();
    uint32_t packed = 0, given = 0, received = 0;
    bool first = true;
    while (received < rounds) {
        const auto may_give = [&](const Progress& there) { return given < packed && given < there.taken + kSlots; };
        const auto has_results = [&](const Progress& there) { return received < there.returned; };
        Result<Progress> progress = [&] {
            int64_t waited = 0;
            const Timed timed(first ? waited : w.stats.wait);
            return s_.rounds_.wait(w.peer.rank, [&](const Progress& there, const Progress&) {
                return (packed == given && given < rounds) || may_give(there) || has_results(there);
            });
        }();
        if (!progress.ok()) return std::move(progress).status();
        const Progress& there = progress.value();
        if (may_give(there)) {
            TA_RETURN_IF_ERROR(send_round(w, given));
            ++given;
            first = false;
        } else if (has_results(there)) {
            TA_RETURN_IF_ERROR(take_results(w, received, there.returned_hash[received % kSlots]));
            ++received;
            for (const Worker& other : workers_) {
                // A rank that has completed its part hears from nobody. So it is told that the call goes on, and does not give
                // up before this rank does.
                if (other.peer.rank != w.peer.rank) tell(other.peer.rank, Note::kGoesOn);
            }
        } else {
            TA_RETURN_IF_ERROR(pack_round(w, packed));
            ++packed;
        }
    }
    return {};
}

Status DenseScatter::Giving::pack_round(Worker& w, uint32_t round) {
    const Timed timed(w.stats.pack);
    const int64_t first = w.share.first_of(round), n = w.share.heads_of(round), d = shape_.head_dim, group = shape_.group;
    const RoundLayout at = layout_of(w, round);
    uint8_t* const to = w.send->data();
    const struct {
        const TensorView& from;
        int64_t first, heads;
        uint64_t begin, end;
        uint32_t bit;
    } parts[] = {{call_.q, first * group, n * group, at.q, at.k, 1},
                 {call_.k, first, n, at.k, at.v, 2},
                 {call_.v, first, n, at.v, at.inputs, 4}};
    for (const auto& p : parts) {
        const uint64_t bytes = uint64_t(p.from.tokens * p.heads * d) * dtype_bytes(p.from.dtype);
        if (!w.peer.on_gpu()) std::memset(to + p.begin + bytes, 0, p.end - p.begin - bytes);  // the padding is hashed, too
        TA_RETURN_IF_ERROR(
            w.lane->copy(packed(to + p.begin, p.from.dtype, p.from.tokens, p.heads, d, (shape_.head_major & p.bit) != 0),
                         heads_of(p.from, p.first, p.heads)));
    }
    return w.lane->wait();
}

Status DenseScatter::Giving::send_round(Worker& w, uint32_t round) {
    const share::RemoteCopy copy{round % kSlots * w.full.inputs, w.send->data(), size_t(layout_of(w, round).inputs)};
    const uint64_t hash = w.peer.on_gpu() ? 0 : hash_bytes(copy.from, copy.bytes);
    int64_t took = 0;
    {
        const Timed timed(took);
        TA_RETURN_IF_ERROR(s_.write(w.peer, copy));
    }
    w.stats.send += took;
    w.stats.longest_send = std::max(w.stats.longest_send, took);
    w.stats.bytes_sent += copy.bytes;
    return s_.rounds_.note(w.peer.rank, Note::kGiven, hash, 0, w.result_name);
}

Status DenseScatter::Giving::take_results(Worker& w, uint32_t round, uint64_t hash) {
    const Timed timed(w.stats.pack);
    const int64_t first = int64_t(w.share.first_of(round)) * shape_.group, n = int64_t(w.share.heads_of(round)) * shape_.group;
    const RoundLayout at = layout_of(w, round);
    uint8_t* const from = w.results->data() + round % kSlots * w.full.results;
    if (!w.peer.on_gpu() && hash_bytes(from, size_t(at.results)) != hash)
        return fail(TA_E_CORRUPT, "the results of round %u came damaged from rank %u", round, w.peer.rank)
            .rank(int32_t(w.peer.rank));
    w.stats.bytes_received += at.results;
    TA_RETURN_IF_ERROR(w.lane->copy(heads_of(call_.out, first, n), packed(from, shape_.out, shape_.q_tokens, n, shape_.head_dim,
                                                                          (shape_.head_major & 8) != 0)));
    if (call_.lse) {
        auto* const lse = reinterpret_cast<float*>(from + at.lse);
        TA_RETURN_IF_ERROR(w.lane->copy(heads_of(lse_view(call_.lse, call_.q.tokens, call_.q.heads), first, n),
                                        lse_view(lse, shape_.q_tokens, n)));
    }
    TA_RETURN_IF_ERROR(w.lane->wait());
    if (round + 1 < w.share.rounds()) return s_.rounds_.note(w.peer.rank, Note::kReceived);
    tell(w.peer.rank, Note::kReceived);
    return {};
}

}  // namespace ta
