#include <algorithm>
#include <condition_variable>
#include <cstring>

#include "kernels/format/distr.h"
#include "kernels/format/hash.h"
#include "src/attend/dense/scatter_parts.h"
#include "src/page/geometry.h"
#include "tiering/share/lane.h"

namespace ta {

using namespace scatter;

// One rank's part of a call that the root leads.
class DenseScatter::Taking {
  public:
    Taking(DenseScatter& scatter, ScatterStats& stats, uint32_t root) : s_(scatter), stats_(stats), root_(root) {}
    ~Taking() {
        stop();
        if (open_) s_.group_.transport().close_window(window_);
        lane_.reset();
        device_.reset();
    }
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

    Status run(uint64_t room) {
        Result<std::vector<uint8_t>> said = s_.rounds_.wait_for_call();
        if (!said.ok()) return std::move(said).status();
        if (!read(said.value(), room)) {
            Status why = share::no_message(root_);
            s_.group_.end(why);
            return why;
        }
        TA_RETURN_IF_ERROR(open());
        TA_RETURN_IF_ERROR(s_.rounds_.note(root_, Note::kReady, window_, peer_.way, input_name_));
        if (share_.heads > 0) TA_RETURN_IF_ERROR(attend_all());
        Result<Progress> done = s_.rounds_.wait(root_, [](const Progress& there, const Progress&) { return there.done != 0; });
        return std::move(done).status();
    }

  private:
    bool read(std::span<const uint8_t> said, uint64_t room);
    bool can_be() const;
    Status open();
    Status attend_all();
    Status attend_round(uint32_t round);
    Status return_results();
    Status return_round(uint32_t round);
    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
            changed_.notify_all();
        }
        if (thread_.joinable()) thread_.join();
    }
    RoundLayout layout_of(uint32_t round) const { return RoundLayout::of(shape_, share_.heads_of(round)).take(); }
    // Memory that the call reads and writes: the windows themselves, or copies on the GPU of windows in host memory.
    uint8_t* inputs_of(uint32_t round) { return (copies() ? gpu_inputs_ : inputs_)->data() + round % kSlots * full_.inputs; }
    uint8_t* results_of(uint32_t round) {
        return (copies() ? gpu_results_ : results_)->data() + round % kSlots * full_.results;
    }
    bool copies() const { return s_.context_.device() && !peer_.on_gpu(); }

    DenseScatter& s_;
    ScatterStats& stats_;
    const uint32_t root_;
    CallHeader header_{};
    Shape shape_{};
    Share share_;
    RoundLayout full_;
    DenseCall call_;
    std::vector<int64_t> q_offsets_, k_offsets_;
    std::vector<float> slopes_, sinks_;
    const float *slopes_there_ = nullptr, *sinks_there_ = nullptr;  // on the device
    Peer peer_;                                                     // the root
    share::MemoryName input_name_;
    bool open_ = false;
    uint64_t window_ = 0;
    ScatterMemory *inputs_ = nullptr, *results_ = nullptr, *gpu_inputs_ = nullptr, *gpu_results_ = nullptr;
    std::unique_ptr<ScatterDevice> device_;
    std::unique_ptr<ScatterLane> lane_;

    std::thread thread_;  // returns results to the root
    std::mutex mutex_;
    std::condition_variable changed_;
    uint32_t attended_ = 0;  // rounds that are enqueued on the device
    uint32_t over_ = 0;      // rounds that the device has completed
    share::Time over_since_{};
    bool stopping_ = false;
};

bool DenseScatter::Taking::read(std::span<const uint8_t> said, uint64_t room) {
    share::PayloadReader payload(said);
    CallHeader& h = header_;
    if (!payload.get(h)) return false;
    const auto is_type = [](int32_t t) { return t >= int32_t(DType::kF16) && t <= int32_t(DType::kF32); };
    if (h.q_tokens < 0 || h.k_tokens < 0 || h.head_dim < 1 || h.head_dim > kMaxHeadDim || h.group < 1 || h.group > kMaxGroup ||
        h.kv_heads < 0 || h.kv_heads > int32_t(kMaxKvHeads) || h.heads_per_round < 1 ||
        h.heads_per_round > std::max(1, h.kv_heads) || !is_type(h.q_type) || !is_type(h.k_type) || !is_type(h.v_type) ||
        !is_type(h.out_type) || h.offsets < 2 || h.offsets > (uint64_t{1} << 24) + 1) {
        return false;
    }
    shape_ = {h.q_tokens,      h.k_tokens,      h.head_dim,        h.group,        DType(h.q_type),
              DType(h.k_type), DType(h.v_type), DType(h.out_type), h.has_lse != 0, h.head_major};
    share_.heads = uint32_t(h.kv_heads);
    share_.per_round = uint32_t(h.heads_per_round);
    Result<RoundLayout> full = RoundLayout::of(shape_, share_.per_round);
    if (!full.ok() || (share_.heads > 0 && full.value().room() > room)) return false;
    full_ = full.value();
    const auto runs_to = [](const std::vector<int64_t>& offsets, int64_t end) {
        return offsets.front() == 0 && offsets.back() == end && std::is_sorted(offsets.begin(), offsets.end());
    };
    const uint64_t q_heads = uint64_t(h.kv_heads) * uint64_t(h.group);
    return payload.get_all(h.offsets, q_offsets_) && payload.get_all(h.offsets, k_offsets_) &&
           payload.get_all(h.has_slopes ? q_heads : 0, slopes_) && payload.get_all(h.has_sinks ? q_heads : 0, sinks_) &&
           payload.at_end() && runs_to(q_offsets_, h.q_tokens) && runs_to(k_offsets_, h.k_tokens) && can_be();
}

// True if a root's call can have these options. If not, the message is corrupt: the root checks its options before it calls.
bool DenseScatter::Taking::can_be() const {
    const CallHeader& h = header_;
    const bool distr = h.variant == TA_DENSE_DISTR;
    if (h.variant < TA_DENSE_INT8_PAGE || h.variant > TA_DENSE_DISTR || h.group_size < 2 || h.group_size > 4 ||
        (distr ? !is_distr_head_dim(h.head_dim) : !is_supported_head_dim(h.head_dim)) ||
        h.v_granularity < TA_GRANULARITY_DEFAULT || h.v_granularity > TA_GRANULARITY_TENSOR ||
        h.exp < int32_t(ExpMode::kPoly) || h.exp > int32_t(ExpMode::kSas))
        return false;
    ta_attend_options o{};
    o.mask = h.mask;
    o.scale = h.scale;
    o.softcap = h.softcap;
    o.window = h.window;
    o.p = h.p;
    if (h.has_slopes) o.alibi_slopes = slopes_.data();
    if (h.has_sinks) o.sinks = sinks_.data();
    const int64_t q_heads = int64_t(h.kv_heads) * h.group;
    return resolve_attend(&o, q_heads, h.head_dim, ExpMode(h.exp), h.p, !s_.context_.device()).ok();
}

Status DenseScatter::Taking::open() {
    stats_.heads = share_.heads;
    stats_.rounds = share_.rounds();
    stats_.heads_per_round = share_.per_round;
    if (share_.heads == 0) return {};
    Result<std::unique_ptr<ScatterDevice>> made = make_scatter_device(s_.context_, nullptr, true);
    if (!made.ok()) return std::move(made).status();
    device_ = made.take();
    Result<std::unique_ptr<ScatterLane>> lane = device_->make_lane();
    if (!lane.ok()) return std::move(lane).status();
    lane_ = lane.take();
    call_.variant = header_.variant;
    call_.v_granularity = header_.v_granularity;
    call_.group_size = header_.group_size;
    call_.saturate = header_.saturate != 0;
    call_.q_offsets = q_offsets_;
    call_.k_offsets = k_offsets_;
    AttendSettings& o = call_.settings;
    o.mask = header_.mask;
    o.scale = header_.scale;
    o.softcap = header_.softcap;
    o.window = header_.window;
    o.exp = ExpMode(header_.exp);
    o.p = header_.p;

    inputs_ = &s_.memory(0);
    results_ = &s_.memory(1);
    gpu_inputs_ = &s_.memory(2);
    gpu_results_ = &s_.memory(3);
    peer_.rank = root_;
    peer_.way = choose(header_.ways & ways_to(s_.group_.transport(), root_));
    peer_.window = header_.result_window;
    TA_RETURN_IF_ERROR(inputs_->reserve(size_t(kSlots * full_.inputs), peer_.on_gpu()));
    TA_RETURN_IF_ERROR(results_->reserve(size_t(kSlots * full_.results), peer_.on_gpu()));
    if (copies()) {
        TA_RETURN_IF_ERROR(gpu_inputs_->reserve(size_t(kSlots * full_.inputs), true));
        TA_RETURN_IF_ERROR(gpu_results_->reserve(size_t(kSlots * full_.results), true));
    }
    size_t piece = 4;
    for (const auto& [values, there] : {std::pair(&slopes_, &slopes_there_), std::pair(&sinks_, &sinks_there_)}) {
        ScatterMemory& memory = s_.memory(piece++);
        if (values->empty()) continue;
        const size_t bytes = values->size() * sizeof(float);
        TA_RETURN_IF_ERROR(memory.reserve(bytes, true));
        TA_RETURN_IF_ERROR(device_->copy(memory.data(), values->data(), bytes, 0));
        *there = reinterpret_cast<const float*>(memory.data());
    }
    TA_RETURN_IF_ERROR(device_->wait());  // both slots read them
    // Reports errors of earlier calls.
    TA_RETURN_IF_ERROR(device_->check(call_));
    window_ = s_.rounds_.new_window();
    if (peer_.way == kGpuMemory) {
        Result<share::MemoryName> name = inputs_->share(s_.group_.transport());
        if (!name.ok()) return std::move(name).status();
        input_name_ = name.value();
        return {};
    }
    s_.group_.transport().open_window(window_, root_, window_of(*inputs_, kSlots * full_.inputs, peer_.on_gpu()));
    open_ = true;
    return {};
}

Status DenseScatter::Taking::attend_all() {
    TA_RETURN_IF_ERROR(share::start_thread(thread_, [this] { (void)s_.guarded([this] { return return_results(); }); }));
    const uint32_t rounds = share_.rounds();
    for (uint32_t round = 0; round < rounds; ++round) TA_RETURN_IF_ERROR(attend_round(round));
    Result<Progress> last =
        s_.rounds_.wait(root_, [rounds](const Progress&, const Progress& here) { return here.returned == rounds; });
    return std::move(last).status();
}

Status DenseScatter::Taking::attend_round(uint32_t round) {
    const share::Time started = Clock::now();
    Result<Progress> there =
        s_.rounds_.wait(root_, [round](const Progress& said, const Progress&) { return said.given > round; });
    if (round == 0) stats_.first_wait = nanoseconds_since(started);
    if (there.ok())
        there =
            s_.rounds_.wait(root_, [round](const Progress&, const Progress& here) { return here.returned + kSlots > round; });
    if (!there.ok()) return std::move(there).status();
    if (round == 0 && peer_.way == kGpuMemory) TA_RETURN_IF_ERROR(s_.find(peer_, there.value().memory, kSlots * full_.results));
    const RoundLayout at = layout_of(round);
    uint8_t* const window = inputs_->data() + round % kSlots * full_.inputs;
    if (!peer_.on_gpu() && hash_bytes(window, size_t(at.inputs)) != there.value().given_hash[round % kSlots])
        return fail(TA_E_CORRUPT, "round %u came damaged from rank %u", round, root_).rank(int32_t(root_));
    stats_.bytes_received += at.inputs;
    uint8_t *const in = inputs_of(round), *const out = results_of(round);
    if (copies()) TA_RETURN_IF_ERROR(device_->copy(in, window, size_t(at.inputs), round % kSlots));
    const int64_t n = share_.heads_of(round), q_heads = n * shape_.group, d = shape_.head_dim;
    DenseCall call = call_;
    call.q = packed(in + at.q, shape_.q, shape_.q_tokens, q_heads, d, (shape_.head_major & 1) != 0);
    call.k = packed(in + at.k, shape_.k, shape_.k_tokens, n, d, (shape_.head_major & 2) != 0);
    call.v = packed(in + at.v, shape_.v, shape_.k_tokens, n, d, (shape_.head_major & 4) != 0);
    call.out = packed(out + at.out, shape_.out, shape_.q_tokens, q_heads, d, (shape_.head_major & 8) != 0);
    call.lse = shape_.has_lse ? reinterpret_cast<float*>(out + at.lse) : nullptr;
    const int64_t first = int64_t(share_.first_of(round)) * shape_.group;
    if (slopes_there_) call.settings.alibi_slopes = slopes_there_ + first;
    if (sinks_there_) call.settings.sinks = sinks_there_ + first;
    TA_RETURN_IF_ERROR(device_->attend(call, round % kSlots));
    TA_RETURN_IF_ERROR(device_->mark(round % kSlots));
    const std::lock_guard lock(mutex_);
    if (round > 0 && over_ == round) stats_.wait += nanoseconds_since(over_since_);
    attended_ = round + 1;
    changed_.notify_all();
    return {};
}

// Runs on a thread of its own, so that the results of a round leave while the device computes the next one.
Status DenseScatter::Taking::return_results() {
    for (uint32_t round = 0; round < share_.rounds(); ++round) {
        {
            std::unique_lock lock(mutex_);
            changed_.wait(lock, [&] { return attended_ > round || stopping_; });
            if (attended_ <= round) return {};
        }
        TA_RETURN_IF_ERROR(return_round(round));
    }
    return {};
}

Status DenseScatter::Taking::return_round(uint32_t round) {
    TA_RETURN_IF_ERROR(device_->wait_for(round % kSlots));
    {
        const std::lock_guard lock(mutex_);
        over_ = round + 1;
        over_since_ = Clock::now();
    }
    // If a GPU's kernels replaced values, the call fails after the last round, before that round's results leave.
    if (round + 1 == share_.rounds()) TA_RETURN_IF_ERROR(device_->check(call_));
    TA_RETURN_IF_ERROR(s_.rounds_.note(root_, Note::kTaken));
    Result<Progress> there =
        s_.rounds_.wait(root_, [round](const Progress& said, const Progress&) { return said.received + kSlots > round; });
    if (!there.ok()) return std::move(there).status();
    const RoundLayout at = layout_of(round);
    uint8_t* const results = results_->data() + round % kSlots * full_.results;
    if (copies()) {
        TA_RETURN_IF_ERROR(lane_->copy(results, results_of(round), size_t(at.results)));
        TA_RETURN_IF_ERROR(lane_->wait());
    }
    if (!peer_.on_gpu()) {
        const uint64_t o = uint64_t(shape_.q_tokens) * share_.heads_of(round) * uint64_t(shape_.group);
        const uint64_t o_end = at.out + o * uint64_t(shape_.head_dim) * dtype_bytes(shape_.out),
                       lse_end = at.lse + (shape_.has_lse ? o * sizeof(float) : 0);
        std::memset(results + o_end, 0, at.lse - o_end);  // the padding is hashed, too
        std::memset(results + lse_end, 0, at.results - lse_end);
    }
    const share::RemoteCopy copy{round % kSlots * full_.results, results, size_t(at.results)};
    const uint64_t hash = peer_.on_gpu() ? 0 : hash_bytes(copy.from, copy.bytes);
    int64_t took = 0;
    {
        const Timed timed(took);
        TA_RETURN_IF_ERROR(s_.write(peer_, copy));
    }
    stats_.send += took;
    stats_.longest_send = std::max(stats_.longest_send, took);
    stats_.bytes_sent += copy.bytes;
    return s_.rounds_.note(root_, Note::kReturned, hash);
}

Status DenseScatter::take(const ScatterSettings& settings, ScatterStats& stats) {
    const Timed total(stats.total);
    const uint64_t room = settings.room ? settings.room : kDefaultRoom;
    TA_RETURN_IF_ERROR(rounds_.begin({settings.tag, room, settings.root, kind_of(context_)}));
    const InCall in(rounds_);
    Status s;
    {
        Taking taking(*this, stats, settings.root);
        s = guarded([&] { return taking.run(room); });
    }
    if (!s.ok()) forget();
    return s;
}

}  // namespace ta
