#include "src/attend/cuda/parts.h"

#include <algorithm>
#include <cstring>

#include "src/attend/cuda/attend.h"
#include "src/attend/merge.h"
#include "src/device/cuda/capture.h"

namespace ta {

using cuda::ExchangeNotes;
using cuda::ExchangeState;

namespace {

// The host's view of given_up, which it writes while the kernel reads it.
std::atomic<uint64_t>* given_up_of(ExchangeNotes* notes) {
    static_assert(sizeof(std::atomic<uint64_t>) == sizeof(uint64_t) && std::atomic<uint64_t>::is_always_lock_free);
    return reinterpret_cast<std::atomic<uint64_t>*>(&notes->given_up);
}

}  // namespace

CudaParts::~CudaParts() {
    const CudaScope scope(device_.ordinal());
    if (done_) cudaEventDestroy(done_);
    if (notes_) cudaFreeHost(notes_);
}

Status CudaParts::begin(const PartitionedCalls& step, uint64_t arguments) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    // All ranks get the same answer. Two ranks on one GPU go through the host: their kernels would wait for each other, and may
    // be in one stream.
    Result<bool> reaches = step.exchange->all_reach();
    if (!reaches.ok()) return std::move(reaches).status();
    outputs_ = step.outputs;
    rank_ = step.exchange->rank();
    by_kernel_ = reaches.value();
    open_ = true;
    if (!by_kernel_) return step.exchange->begin(step.channel, arguments, step.without_queries, {});
    TA_RETURN_IF_ERROR(open());
    TA_RETURN_IF_ERROR(share_area(step.exchange));
    TA_RETURN_IF_ERROR(step.exchange->begin(step.channel, arguments, step.without_queries, shared_.name));
    const size_t bytes = cuda::exchange_area_bytes(int(step.outputs.ranks));
    Result<share::Exchange::Agreement> agreed = step.exchange->agree(step.channel, bytes, given_up_of(notes_));
    if (!agreed.ok()) return std::move(agreed).status();
    return send_state(step, agreed.value());
}

Status CudaParts::open() {
    if (done_) return {};
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::load_exchange_parts()), "loading a kernel"));
    if (!notes_) {
        void* notes = nullptr;
        TA_RETURN_IF_ERROR(device_.check(
            cudaHostAlloc(&notes, sizeof(ExchangeNotes), cudaHostAllocMapped | cudaHostAllocPortable), "pinned host memory"));
        std::memset(notes, 0, sizeof(ExchangeNotes));
        notes_ = static_cast<ExchangeNotes*>(notes);
    }
    TA_RETURN_IF_ERROR(state_.reserve(sizeof(ExchangeState), "the state of a partitioned step"));
    return device_.check(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming), "creating an event");
}

// Makes this rank's area. Other ranks keep the area, and so its context, for as long as their kernels may write there.
Status CudaParts::share_area(const std::shared_ptr<share::Exchange>& exchange) {
    if (area_of_ == exchange) return {};
    const size_t bytes = cuda::exchange_area_bytes(int(exchange->ranks()));
    const std::shared_ptr<Context> context = pool_.shared_context();
    uint8_t* const memory = device_.allocate(bytes);
    if (!memory)
        return fail(TA_E_MEMORY, "GPU %d has no %zu bytes for the parts of other ranks", device_.ordinal(), bytes).bytes(bytes);
    std::shared_ptr<uint8_t> area(memory, [context, bytes](uint8_t* p) { context->device()->deallocate(p, bytes); });
    // Zeroes the signals: 0 is the value of no exchange. Peers write there only after they have found the area.
    TA_RETURN_IF_ERROR(device_.check(cudaMemsetAsync(memory, 0, bytes, stream_), "emptying the area of other ranks"));
    TA_RETURN_IF_ERROR(device_.check(cudaStreamSynchronize(stream_), "emptying the area of other ranks"));
    Result<share::Transport::Shared> shared = exchange->share_memory(area, bytes);
    if (!shared.ok()) return std::move(shared).status();
    shared_ = shared.take();
    area_ = std::move(area);
    area_of_ = exchange;
    return {};
}

Status CudaParts::send_state(const PartitionedCalls& step, const share::Exchange::Agreement& agreed) {
    identity_ = agreed.identity;
    areas_ = agreed.areas;
    TA_RETURN_IF_ERROR(sent_.take(device_, sizeof(ExchangeState)));
    auto* const state = new (sent_.part(sizeof(ExchangeState))) ExchangeState{};
    state->identity = identity_;
    state->patience = uint64_t(std::chrono::nanoseconds(step.exchange->patience()).count());
    state->notes = notes_;
    for (size_t r = 0; r < areas_.size(); ++r) state->areas[r] = (r == rank_ ? area_ : areas_[r]).get();
    TA_RETURN_IF_ERROR(
        device_.check(cudaMemcpyAsync(state_.data(), state, sizeof(ExchangeState), cudaMemcpyHostToDevice, stream_),
                      "sending a step's state"));
    return sent_.record(device_, stream_);
}

Status CudaParts::reserve(AttendCall& own) {
    const CudaScope scope(device_.ordinal());
    if (Status s = check_device_memory(device_, own.out.data, "out"); !s.ok()) return std::move(s).argument(3);
    if (Status s = check_device_memory(device_, own.lse, "lse"); !s.ok()) return std::move(s).argument(4);
    CaptureScope capture;
    TA_RETURN_IF_ERROR(capture.enter(device_, stream_));
    if (capture.captured() && !by_kernel_) {
        return fail(TA_E_UNSUPPORTED,
                    "the ranks' GPUs do not reach each other's memory: parts go through the host, which no graph can capture");
    }
    const int64_t rows = own.q.tokens * own.q.heads, d = own.head_dim;
    TA_RETURN_IF_ERROR(own_.reserve(size_t(rows) * size_t(d + 1) * sizeof(float), "the results of this rank's blocks"));
    own.out = {own_.data(), DType::kF32, own.q.tokens, own.q.heads, d, own.q.heads * d, d};
    own.lse = reinterpret_cast<float*>(own_.data()) + rows * d;
    return {};
}

Status CudaParts::exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) {
    const CudaScope scope(device_.ordinal());
    return by_kernel_ ? exchange_by_kernel(step, call, own, arguments) : exchange_by_host(step, call, own, arguments);
}

// Makes as many launches as the call's rows fill slots.
Status CudaParts::exchange_by_kernel(PartitionedCalls& step, const AttendCall& call, const AttendCall& own,
                                     uint64_t arguments) {
    cuda::ExchangeArgs args{};
    args.state = reinterpret_cast<ExchangeState*>(state_.data());
    args.arguments = arguments;
    args.rank = int32_t(rank_);
    args.head_dim = call.head_dim;
    args.outputs = step.outputs;
    args.out = merge_state(call.out, call.lse);
    const int64_t heads = call.q.heads, rows = call.q.tokens * heads;
    for (int64_t first = 0; first < rows; first += args.rows) {
        args.rows = int32_t(std::min<int64_t>(cuda::rows_per_exchange(call.head_dim), rows - first));
        args.number = step.exchanged + 1;
        args.first_token = first / heads;
        args.first_head = int32_t(first % heads);
        args.o = reinterpret_cast<const float*>(own.out.data) + first * call.head_dim;
        args.lse = own.lse + first;
        TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_exchange_parts(args, stream_)), "exchanging parts"));
        ++step.exchanged;
    }
    return {};
}

Status CudaParts::exchange_by_host(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) {
    const int64_t rows = call.q.tokens * call.q.heads, d = call.head_dim;
    const size_t bytes = size_t(rows) * size_t(d + 1) * sizeof(float);
    TA_RETURN_IF_ERROR(down_.take(device_, bytes));
    auto* const here = static_cast<float*>(down_.part(bytes));
    TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(here, own.out.data, bytes, cudaMemcpyDeviceToHost, stream_),
                                     "copying a part from the GPU"));
    TA_RETURN_IF_ERROR(down_.record(device_, stream_));
    TA_RETURN_IF_ERROR(down_.wait(device_));
    Result<share::Exchange::Parts> exchanged = exchange_by_messages(step, call, here, here + rows * d, arguments);
    if (!exchanged.ok()) return std::move(exchanged).status();
    const share::Exchange::Parts parts = exchanged.take();
    MergeArgs args = merge_args(step, call, own);
    if (args.heads == 0) return {};
    const size_t part_bytes = size_t(args.tokens * args.heads) * size_t(d + 1) * sizeof(float), all = parts.size() * part_bytes;
    TA_RETURN_IF_ERROR(others_.reserve(all, "the parts of other ranks"));
    TA_RETURN_IF_ERROR(up_.take(device_, all));
    auto* const staged = static_cast<uint8_t*>(up_.part(all));
    for (uint32_t r = 0; r < parts.size(); ++r) {
        if (r == rank_) continue;
        std::memcpy(staged + r * part_bytes, parts[r].data(), part_bytes);
        args.parts[r] = packed_part(reinterpret_cast<float*>(others_.data() + r * part_bytes), args);
    }
    TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(others_.data(), staged, all, cudaMemcpyHostToDevice, stream_),
                                     "copying parts to the GPU"));
    TA_RETURN_IF_ERROR(up_.record(device_, stream_));
    return merge_states(pool_.context(), args, stream_);
}

// Waits for all that the plan has enqueued. Exchanges end when the step is given up, or their time is up.
Status CudaParts::wait() {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.check(cudaEventRecord(done_, stream_), "recording an event"));
    return device_.wait_for(done_, "exchanges");
}

Status CudaParts::settle(const PartitionedCalls& step) {
    if (!by_kernel_) return {};
    TA_RETURN_IF_ERROR(wait());
    std::atomic_ref<uint64_t> failed(notes_->failed);
    if (failed.load(std::memory_order_acquire) != identity_) return {};
    TA_RETURN_IF_ERROR(step.exchange->check(step.channel));
    const auto rank = notes_->rank;
    if (notes_->cause == ExchangeNotes::kOtherArguments) return share::other_arguments(rank);
    const auto ms = (long long)step.exchange->patience().count();
    return fail(TA_E_TIMEOUT, "rank %u did not attend in %lld ms", rank, ms).rank(int32_t(rank));
}

void CudaParts::end(bool gave_up) noexcept {
    open_ = false;
    const uint64_t identity = std::exchange(identity_, 0);
    if (identity == 0 || !gave_up) return;
    given_up_of(notes_)->store(identity, std::memory_order_release);
    // Other ranks' areas may be freed once no exchange writes there.
    bool captured = false;
    if (is_captured(device_, stream_, &captured).ok() && !captured) (void)wait();
}

void CudaParts::add_kind(KindOfStep& kind) const {
    kind.push_back(open_ ? uint64_t(1) + by_kernel_ : 0);
    if (!open_) return;
    kind.push_back(uint64_t(outputs_.kind) << 32 | outputs_.one);
    kind.push_back(uint64_t(outputs_.ranks) << 32 | rank_);
}

}  // namespace ta
