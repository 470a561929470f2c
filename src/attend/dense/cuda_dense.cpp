#include "src/attend/dense/cuda_dense.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/cuda/any/append/append.h"
#include "kernels/cuda/any/dense/dense.h"
#include "src/attend/cuda/attend.h"
#include "src/attend/dense/cuda_run.h"

namespace ta {
namespace {

using cuda::AttendArgs;
using cuda::DensePage;
using cuda::DenseScale;
using cuda::HalfTile;
using cuda::SequenceArgs;

// K and V become INT8 pages; the steps' kernels attend.
class PagesRun final : public CudaDenseRun {
  public:
    using CudaDenseRun::CudaDenseRun;

    Status prepare() override;
    void write(uint8_t* inputs, uint8_t* base) const override;
    Status launch(const uint8_t* inputs, uint8_t* base, uint32_t* replaced, cudaStream_t stream) override;

  private:
    bool half() const { return call_.variant == TA_DENSE_INT_FLASH_HALF; }
    size_t page_stride() const { return round_up(TokenLayout(d_).bytes() * size_t(kv_heads_), cuda::kEntryFlags + 1); }
    Status list_sequences();
    void list_tiles();
    AttendArgs attend_args() const;
    cuda::DensePagesArgs pages_args(uint8_t* base) const;
    Status launch_half(const AttendArgs& args, uint8_t* base, cudaStream_t stream) const;

    const int d_ = int(call_.k.head_dim), kv_heads_ = int(call_.k.heads), group_ = int(call_.q.heads / call_.k.heads);
    std::vector<SequenceArgs> few_, many_;  // by the kernel for their queries; half INT8: all in few_
    std::vector<DensePage> pages_;
    std::vector<HalfTile> tiles_;
    std::vector<int32_t> v_rows_;
    int max_few_rows_ = 0;
    AttendWork few_work_, many_work_;
    ManyRowsKey many_key_{};
    ManyRows many_rows_;

    size_t table_at_ = 0, pages_at_ = 0, few_at_ = 0, counts_at_ = 0, many_at_ = 0, tiles_at_ = 0, v_rows_at_ = 0;
    size_t nonfinite_at_ = 0, n_nonfinite_ = 0, amax_at_ = 0, zeros_end_ = 0, data_at_ = 0, workspace_at_ = 0, parts_at_ = 0;
};

Status PagesRun::list_sequences() {
    const size_t batch = call_.k_offsets.size() - 1;
    for (size_t b = 0; b < batch; ++b) {
        const int64_t first = call_.k_offsets[b], n_keys = call_.k_offsets[b + 1] - first;
        SequenceArgs s{int32_t(n_keys), int32_t(call_.q_offsets[b + 1] - call_.q_offsets[b]), int32_t(call_.q_offsets[b]),
                       int32_t(pages_.size())};
        for (int64_t key = 0; key < n_keys; key += kPageTokens) {
            pages_.push_back({int32_t(first + key), int32_t(std::min<int64_t>(kPageTokens, n_keys - key)), int32_t(b), 0});
        }
        if (half()) v_rows_.push_back(int32_t(first));
        const int64_t rows = int64_t(s.n_query) * group_;
        if (rows > INT32_MAX) {
            return fail(TA_E_LIMIT, "a kv head has %lld query rows in a sequence; on a GPU the limit is 2^31 - 1",
                        (long long)rows)
                .sequence(int64_t(b));
        }
        if (!half() && rows > cuda::kDecodeRows) {
            many_.push_back(s);
            s.n_query = 0;
        } else {
            max_few_rows_ = std::max(max_few_rows_, int(rows));
        }
        few_.push_back(s);
    }
    if (int64_t(pages_.size()) * kv_heads_ > INT32_MAX) {
        return fail(TA_E_LIMIT, "the call has %zu pages of %d kv heads; on a GPU their product is at most 2^31 - 1",
                    pages_.size(), kv_heads_);
    }
    return {};
}

void PagesRun::list_tiles() {
    for (size_t b = 0; b < few_.size(); ++b) {
        const int64_t rows = int64_t(few_[b].n_query) * group_;
        for (int64_t row = 0; row < rows; row += cuda::kHalfRows) tiles_.push_back({int32_t(b), int32_t(row)});
    }
}

AttendArgs PagesRun::attend_args() const {
    AttendArgs a{};
    a.head_dim = d_;
    a.kv_heads = kv_heads_;
    a.group = group_;
    a.batch = int32_t(few_.size());
    a.q = tensor_args(call_.q);
    a.out = tensor_args(call_.out);
    a.lse = call_.lse;
    a.q_levels = call_.levels();
    a.saturate = call_.saturate;
    set_options(call_.settings, a);
    return a;
}

Status PagesRun::prepare() {
    TA_RETURN_IF_ERROR(list_sequences());
    AttendArgs a = attend_args();
    if (half()) {
        list_tiles();
    } else if (max_few_rows_ > 0) {
        set_p(call_.settings.p, max_few_rows_, kDecodeRangePages, a);
        TA_RETURN_IF_ERROR(plan_few_rows(device_, a, max_few_rows_, false, few_work_));
    }
    if (!many_.empty()) {
        many_key_ = choose_for_many_rows(device_, call_.settings.p, a);
        many_rows_ = ManyRows(many_key_, many_);
        a.long_tiles = call_.variant == TA_DENSE_INT8_PAGE;
        a.resident = true;
        TA_RETURN_IF_ERROR(plan_many_rows(device_, a, many_rows_, many_work_));
    }

    const size_t batch = few_.size();
    table_at_ = layout_.take(pages_.size() * sizeof(uint64_t));
    pages_at_ = layout_.take(pages_.size() * sizeof(DensePage));
    few_at_ = layout_.take(batch * sizeof(SequenceArgs));
    counts_at_ = layout_.take((batch + 1) * sizeof(int32_t));
    many_at_ = layout_.take(many_rows_.bytes);
    tiles_at_ = layout_.take(tiles_.size() * sizeof(HalfTile));
    v_rows_at_ = layout_.take(v_rows_.size() * sizeof(int32_t));
    inputs_end_ = layout_.bytes();
    // Zeros from here to zeros_end_.
    n_nonfinite_ = call_.saturate ? 0 : std::max(batch, size_t(many_rows_.chunks));
    nonfinite_at_ = layout_.take(n_nonfinite_ * sizeof(uint32_t));
    const bool tensor_scale = call_.v_scale() == TA_GRANULARITY_TENSOR && !half();
    amax_at_ = layout_.take(tensor_scale ? batch * size_t(kv_heads_) * sizeof(uint32_t) : 0);
    // Shared: the kernels for few rows and for many run one after the other.
    workspace_at_ = layout_.take(std::max(few_work_.plan.workspace_bytes, many_work_.plan.workspace_bytes), 256);
    parts_at_ = layout_.take(many_rows_.tiles.slots() > 0 ? many_work_.parts_bytes : 0, 256);
    zeros_end_ = workspace_at_ + std::max(few_work_.plan.zeroed_bytes, many_work_.plan.zeroed_bytes);
    data_at_ = layout_.take(pages_.size() * page_stride(), cuda::kEntryFlags + 1);
    return {};
}

void PagesRun::write(uint8_t* inputs, uint8_t* base) const {
    for (size_t n = 0; n < pages_.size(); ++n) {
        at<uint64_t>(inputs, table_at_)[n] = uint64_t(uintptr_t(base + data_at_)) + n * page_stride();
    }
    put(inputs, pages_at_, pages_);
    put(inputs, few_at_, few_);
    cuda::count_pages(few_, at<int32_t>(inputs, counts_at_));
    if (!many_.empty()) many_rows_.write(many_key_, many_, inputs + many_at_);
    put(inputs, tiles_at_, tiles_);
    put(inputs, v_rows_at_, v_rows_);
}

cuda::DensePagesArgs PagesRun::pages_args(uint8_t* base) const {
    cuda::DensePagesArgs p{};
    p.head_dim = d_;
    p.kv_heads = kv_heads_;
    p.n_pages = int32_t(pages_.size());
    p.pages = at<DensePage>(base, pages_at_);
    p.table = at<uint64_t>(base, table_at_);
    p.k = tensor_args(call_.k);
    p.v = tensor_args(call_.v);
    p.k_scale = call_.variant == TA_DENSE_INT8_PAGE ? DenseScale::kPage : DenseScale::kToken;
    const ta_granularity v = call_.v_scale();
    p.v_scale = half()                       ? DenseScale::kNone
                : v == TA_GRANULARITY_TOKEN  ? DenseScale::kToken
                : v == TA_GRANULARITY_TENSOR ? DenseScale::kTensor
                                             : DenseScale::kPage;
    p.levels = call_.levels();
    p.v_amax = at<uint32_t>(base, amax_at_);
    p.saturate = call_.saturate;
    p.nonfinite = n_nonfinite_ > 0 ? at<uint32_t>(base, nonfinite_at_) : nullptr;
    return p;
}

Status PagesRun::launch_half(const AttendArgs& args, uint8_t* base, cudaStream_t stream) const {
    cuda::DenseHalfArgs h{};
    h.attend = args;
    h.v = tensor_args(call_.v);
    h.v_row = at<int32_t>(base, v_rows_at_);
    h.tiles = at<HalfTile>(base, tiles_at_);
    h.n_tiles = int32_t(tiles_.size());
    return device_.check(cudaError_t(cuda::launch_dense_half(h, stream)), "attention with V in float");
}

Status PagesRun::launch(const uint8_t* inputs, uint8_t* base, uint32_t* replaced, cudaStream_t stream) {
    const auto check = [this](int error, const char* what) { return device_.check(cudaError_t(error), what); };
    TA_RETURN_IF_ERROR(copy_tables(inputs, base, stream));
    TA_RETURN_IF_ERROR(clear(base + nonfinite_at_, zeros_end_ - nonfinite_at_, stream));
    const cuda::DensePagesArgs pages = pages_args(base);
    if (pages.v_scale == DenseScale::kTensor) {
        TA_RETURN_IF_ERROR(check(cuda::launch_dense_amax(pages, stream), "finding scales of V"));
    }
    TA_RETURN_IF_ERROR(check(cuda::launch_dense_pages(pages, stream), "quantizing K and V"));
    const auto placed = [&](AttendArgs a) {
        a.sequences = at<SequenceArgs>(base, few_at_);
        a.pages_before = at<int32_t>(base, counts_at_);
        a.table = pages.table;
        a.nonfinite = pages.nonfinite;
        return a;
    };
    if (half()) {
        TA_RETURN_IF_ERROR(launch_half(placed(attend_args()), base, stream));
    } else if (max_few_rows_ > 0) {
        few_work_.args = placed(few_work_.args);
        TA_RETURN_IF_ERROR(launch_attend(device_, few_work_, base + workspace_at_, stream));
    }
    if (!many_.empty()) {
        many_work_.args = placed(many_work_.args);
        set_schedule(many_rows_, base + many_at_, many_work_);
        many_work_.parts = base + parts_at_;
        TA_RETURN_IF_ERROR(launch_attend(device_, many_work_, base + workspace_at_, stream));
    }
    if (n_nonfinite_ == 0) return {};
    return check(cuda::launch_dense_count(pages.nonfinite, int64_t(n_nonfinite_), replaced, stream),
                 "counting replaced values");
}

}  // namespace

CudaDense::~CudaDense() {
    const CudaScope scope(device_.ordinal());
    pinned_.clear();  // waits for running calls
    device_.deallocate_counters(replaced_);
    if (memory_) cudaMemPoolDestroy(memory_);
    device_.count_bytes(-int64_t(counted_bytes_));
}

Status CudaDense::open() {
    if (!replaced_ && !(replaced_ = device_.allocate_counters(1)))
        return fail(TA_E_MEMORY, "no pinned host memory for a counter");
    if (memory_) return {};
    if (!device_.properties().memoryPoolsSupported) {
        return fail(TA_E_UNSUPPORTED, "the driver of %s has no memory pools, which ta_attend_dense takes its workspace from",
                    device_.name());
    }
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;
    wanted.location.type = cudaMemLocationTypeDevice;
    wanted.location.id = device_.ordinal();
    TA_RETURN_IF_ERROR(device_.check(cudaMemPoolCreate(&memory_, &wanted), "a memory pool"));
    uint64_t keep = UINT64_MAX;
    return device_.check(cudaMemPoolSetAttribute(memory_, cudaMemPoolAttrReleaseThreshold, &keep), "a memory pool");
}

Status CudaDense::report_replaced() {
    const uint32_t now = std::atomic_ref(*replaced_).load(std::memory_order_relaxed), values = now - reported_;
    if (values == 0) return {};
    reported_ = now;
    return fail(TA_E_NONFINITE, "%u values of q, k or v of earlier calls were NaN, infinite or too large; they were taken as 0",
                values);
}

void CudaDense::count_memory() {
    uint64_t now = 0;
    if (cudaMemPoolGetAttribute(memory_, cudaMemPoolAttrReservedMemCurrent, &now) != cudaSuccess) return;
    device_.count_bytes(int64_t(now - counted_bytes_));
    counted_bytes_ = now;
}

// Checks the call's memory and its stream.
Status CudaDense::check_memory(const DenseCall& call) const {
    const auto check_memory = [this](const auto& data, const char* name, int argument) -> Status {
        return check_device_memory(device_, data, name).argument(argument);
    };
    const AttendSettings& settings = call.settings;
    TA_RETURN_IF_ERROR(check_memory(call.q, "q", 1));
    TA_RETURN_IF_ERROR(check_memory(call.k, "k", 2));
    TA_RETURN_IF_ERROR(check_memory(call.v, "v", 3));
    TA_RETURN_IF_ERROR(check_memory(call.out, "out", 4));
    TA_RETURN_IF_ERROR(check_memory(call.q.tokens > 0 ? call.lse : nullptr, "lse", 5));
    TA_RETURN_IF_ERROR(check_memory(settings.alibi_slopes, "options.attend.alibi_slopes", 6));
    TA_RETURN_IF_ERROR(check_memory(settings.sinks, "options.attend.sinks", 6));
    bool captured = false;
    if (Status s = is_captured(device_, call.stream, &captured); !s.ok()) return std::move(s).argument(6);
    if (captured) {
        return fail(TA_E_STATE, "the stream is being captured; a dense call depends on lengths in host memory").argument(6);
    }
    const int64_t most = std::max(call.q.tokens, call.k.tokens);
    if (most > kMaxCudaKeys) return fail(TA_E_LIMIT, "the call has %lld tokens; on a GPU the limit is 2^30", (long long)most);
    return {};
}

Status CudaDense::check(const DenseCall& call) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    TA_RETURN_IF_ERROR(check_memory(call));
    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(open());
    return call.saturate ? Status() : report_replaced();
}

Status CudaDense::attend(const DenseCall& call) {
    const CudaScope scope(device_.ordinal());
    TA_RETURN_IF_ERROR(device_.health());
    TA_RETURN_IF_ERROR(check_memory(call));
    const std::unique_ptr<CudaDenseRun> of_call =
        call.variant == TA_DENSE_DISTR ? make_distr_run(device_, call) : std::make_unique<PagesRun>(device_, call);
    CudaDenseRun& run = *of_call;
    TA_RETURN_IF_ERROR(run.prepare());

    const std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(open());
    if (!call.saturate) TA_RETURN_IF_ERROR(report_replaced());
    if (call.q.tokens == 0) return {};
    PinnedBuffer& pinned = pinned_[calls_ % pinned_.size()];
    TA_RETURN_IF_ERROR(pinned.take(device_, run.input_bytes()));
    void* memory = nullptr;
    const cudaError_t taken = cudaMallocFromPoolAsync(&memory, run.bytes() + cuda::kEntryFlags, memory_, call.stream);
    if (taken == cudaErrorMemoryAllocation) {
        return fail(TA_E_MEMORY, "GPU %d has no %zu bytes for this call", device_.ordinal(), run.bytes()).bytes(run.bytes());
    }
    TA_RETURN_IF_ERROR(device_.check(taken, "the workspace of a dense call"));
    ++calls_;
    // Aligned by hand, as CUDA promises less: the low bits of pages' addresses are flags.
    auto* base = reinterpret_cast<uint8_t*>(round_up(uintptr_t(memory), cuda::kEntryFlags + 1));
    auto* inputs = static_cast<uint8_t*>(pinned.part(run.input_bytes()));
    run.write(inputs, base);
    // Freed even if a launch failed.
    Status launched = run.launch(inputs, base, replaced_, call.stream);
    Status freed = device_.check(cudaFreeAsync(memory, call.stream), "the workspace of a dense call");
    Status recorded = pinned.record(device_, call.stream);
    count_memory();
    if (!launched.ok()) return launched;
    return freed.ok() ? std::move(recorded) : std::move(freed);
}

namespace {

CudaDense& dense_of(CudaDevice& device) {
    const auto make = [](CudaDevice& of) -> std::shared_ptr<void> { return std::make_shared<CudaDense>(of); };
    return *static_cast<CudaDense*>(device.companion(make).get());
}

}  // namespace

Status attend_dense_on_gpu(CudaDevice& device, const DenseCall& call) {
    return dense_of(device).attend(call);
}

Status check_dense_on_gpu(CudaDevice& device, const DenseCall& call) {
    return dense_of(device).check(call);
}

}  // namespace ta
