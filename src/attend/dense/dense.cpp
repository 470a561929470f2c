#include "src/attend/dense/dense.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "src/attend/cpu/executor.h"
#include "src/attend/cpu/stage1.h"
#include "src/attend/dense/distr.h"

namespace ta {
namespace {

// A page of a sequence, all kv heads, to be quantized.
struct PageTask {
    uint8_t* page;
    int64_t first_key;  // row of k and v
    int tokens;
    size_t sequence;
};

struct PageScratch {
    cpu::HeadStage1 codes;
    alignas(64) float x[kPageTokens * kMaxHeadDim];
    float amax[kPageTokens];
};

class DenseRun {
  public:
    DenseRun(Context& context, const DenseCall& call)
        : context_(context),
          call_(call),
          d_(int(call.k.head_dim)),
          kv_heads_(call.k.heads),
          levels_(call.levels()),
          v_granularity_(call.v_scale()),
          pages_(context.allocator()),
          v_float_(context.allocator()),
          scratch_(context.allocator()) {}

    Status run() {
        TA_RETURN_IF_ERROR(prepare());
        if (v_granularity_ == TA_GRANULARITY_TENSOR && !half()) find_tensor_scales();
        context_.threads().parallel_for(int64_t(tasks_.size()), 1,
                                        [&](int64_t i, int worker) { quantize_page(tasks_[size_t(i)], scratch(worker)); });
        AttendCall call;
        call.head_dim = d_;
        call.kv_heads = int(kv_heads_);
        call.group = int(call_.q.heads / kv_heads_);
        call.sequences = sequences_;
        call.q = call_.q;
        call.out = call_.out;
        call.lse = call_.lse;
        call.settings = call_.settings;
        call.q_levels = levels_;
        call.saturate = call_.saturate;
        AttendExecutor executor(context_);
        uint64_t saturated = 0;
        return executor.run(call, &saturated);
    }

  private:
    bool half() const { return call_.variant == TA_DENSE_INT_FLASH_HALF; }
    PageScratch& scratch(int worker) { return reinterpret_cast<PageScratch*>(scratch_.data())[worker]; }
    const cpu::PageCodec& codec() const { return *context_.kernels().codec; }
    size_t piece_bytes() const { return TokenLayout(d_).bytes(); }

    Status prepare() {
        const size_t batch = call_.k_offsets.size() - 1;
        const size_t page_bytes = piece_bytes() * size_t(kv_heads_);
        size_t n_pages = 0;
        for (size_t b = 0; b < batch; ++b) n_pages += pages_of(b);
        const size_t v_bytes = half() ? size_t(call_.v.tokens * kv_heads_ * d_) * sizeof(float) : 0;
        if (!pages_.reserve(n_pages * page_bytes) || !v_float_.reserve(v_bytes) ||
            !scratch_.reserve(sizeof(PageScratch) * size_t(context_.thread_count()))) {
            return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the INT8 pages of this call", n_pages * page_bytes)
                .bytes(n_pages * page_bytes);
        }
        bases_.reserve(n_pages);
        uint8_t* next = pages_.data();
        for (size_t b = 0; b < batch; ++b) {
            const int64_t first = call_.k_offsets[b], n_keys = call_.k_offsets[b + 1] - first;
            AttendSequence s{bases_.data() + bases_.size(), n_keys, call_.q_offsets[b + 1] - call_.q_offsets[b],
                             call_.q_offsets[b]};
            if (half()) s.v_float = reinterpret_cast<const float*>(v_float_.data()) + first * kv_heads_ * d_;
            sequences_.push_back(s);
            for (int64_t key = 0; key < n_keys; key += kPageTokens, next += page_bytes) {
                tasks_.push_back({next, first + key, int(std::min<int64_t>(kPageTokens, n_keys - key)), b});
                bases_.push_back({next, PageKind::kToken});
            }
        }
        v_scales_.assign(batch * size_t(kv_heads_), 0.0f);
        return {};
    }

    size_t pages_of(size_t b) const {
        return size_t((call_.k_offsets[b + 1] - call_.k_offsets[b] + kPageTokens - 1) / kPageTokens);
    }

    // Finds V's scale for each sequence and head, if all its tokens share one.
    void find_tensor_scales() {
        context_.threads().parallel_for(int64_t(v_scales_.size()), 1, [&](int64_t i, int worker) {
            const int64_t b = i / kv_heads_, head = i % kv_heads_;
            float largest = 0.0f;
            float* x = scratch(worker).x;
            for (int64_t key = call_.k_offsets[size_t(b)]; key < call_.k_offsets[size_t(b) + 1]; ++key) {
                codec().to_float(call_.v.at(key, head), call_.v.dtype, d_, call_.saturate, x);
                largest = std::max(largest, codec().amax(x, d_));
            }
            v_scales_[size_t(i)] = stage1_scale(largest, levels_);
        });
    }

    void read_rows(const TensorView& t, const PageTask& task, int64_t head, float* x, float* amax) {
        for (int j = 0; j < task.tokens; ++j) {
            codec().to_float(t.at(task.first_key + j, head), t.dtype, d_, call_.saturate, x + j * d_);
            amax[j] = codec().amax(x + j * d_, d_);
        }
    }

    void quantize_page(const PageTask& task, PageScratch& s) {
        const ScaleRule k_rule = call_.variant == TA_DENSE_INT8_PAGE ? ScaleRule::kPage : ScaleRule::kToken;
        const ScaleRule v_rule = v_granularity_ == TA_GRANULARITY_TOKEN  ? ScaleRule::kToken
                                 : v_granularity_ == TA_GRANULARITY_PAGE ? ScaleRule::kPage
                                                                         : ScaleRule::kUniversal;
        for (int64_t head = 0; head < kv_heads_; ++head) {
            read_rows(call_.k, task, head, s.x, s.amax);
            const TokenRows rows{s.x, s.amax, d_, 0, task.tokens};
            quantize_tokens(codec(), rows, {k_rule, 0.0f, nullptr, levels_}, s.codes.k, s.codes.k_scale);
            read_rows(call_.v, task, head, s.x, s.amax);
            if (half()) {
                auto* v = reinterpret_cast<float*>(v_float_.data());
                for (int j = 0; j < task.tokens; ++j) {
                    std::memcpy(v + ((task.first_key + j) * kv_heads_ + head) * d_, s.x + j * d_, size_t(d_) * sizeof(float));
                }
                std::memset(s.codes.v, 0, size_t(task.tokens) * size_t(d_));
                std::fill_n(s.codes.v_scale, task.tokens, 0.0f);
            } else {
                const float shared = v_scales_[task.sequence * size_t(kv_heads_) + size_t(head)];
                quantize_tokens(codec(), rows, {v_rule, shared, nullptr, levels_}, s.codes.v, s.codes.v_scale);
            }
            codec().store_token_piece(s.codes, d_, 0, task.tokens, task.page + size_t(head) * piece_bytes());
        }
    }

    Context& context_;
    const DenseCall& call_;
    const int d_;
    const int64_t kv_heads_;
    const int levels_;
    const ta_granularity v_granularity_;
    Buffer pages_, v_float_, scratch_;
    std::vector<PageTask> tasks_;
    std::vector<StoredPage> bases_;
    std::vector<AttendSequence> sequences_;
    std::vector<float> v_scales_;  // [batch, kv_heads]
};

}  // namespace

Status check_dense(Context& context, const DenseCall& call) {
#ifdef TA_HAVE_CUDA
    Device* device = context.device();
    if (CudaDevice* cuda = device ? device->cuda() : nullptr) return check_dense_on_gpu(*cuda, call);
#endif
    if (call.saturate) return {};
    const cpu::PageCodec& codec = *context.kernels().codec;
    const TensorView* tensors[] = {&call.q, &call.k, &call.v};
    const char* names[] = {"q", "k", "v"};
    for (int i = 0; i < 3; ++i) {
        Status s = check_finite(codec, *tensors[i], names[i]);
        if (s.ok()) continue;
        if (!s.detail()) return s;
        const std::span<const int64_t> offsets = i == 0 ? call.q_offsets : call.k_offsets;
        const auto behind = std::upper_bound(offsets.begin(), offsets.end(), s.detail()->token);
        return std::move(s).argument(i + 1).sequence(behind - offsets.begin() - 1);
    }
    return {};
}

Status attend_dense(Context& context, const DenseCall& call) {
#ifdef TA_HAVE_CUDA
    Device* device = context.device();
    if (CudaDevice* cuda = device ? device->cuda() : nullptr) return attend_dense_on_gpu(*cuda, call);
#endif
    TA_RETURN_IF_ERROR(check_dense(context, call));
    if (call.variant == TA_DENSE_DISTR) return attend_distr(context, call);
    return DenseRun(context, call).run();
}

}  // namespace ta
