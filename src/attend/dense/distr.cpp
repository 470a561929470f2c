#include "src/attend/dense/distr.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "kernels/format/visible.h"
#include "src/attend/cpu/row_end.h"
#include "src/core/context.h"

namespace ta {
namespace {

using cpu::kDistrKeys;

struct Job {
    size_t sequence;
    int64_t first_row, rows;  // query tokens of the sequence
};

// A thread's memory.
struct Scratch {
    alignas(64) float q[kDistrRows * kMaxDistrHeadDim], sampled[kDistrRows * kMaxDistrHeadDim],
        o[kDistrRows * kMaxDistrHeadDim];
    alignas(64) float k[kMaxDistrHeadDim * kDistrKeys], v[kDistrKeys * kMaxDistrHeadDim], fused[kMaxDistrHeadDim * kDistrKeys];
    float m[kDistrRows], l[kDistrRows], row[kMaxDistrHeadDim];
    uint8_t order[kMaxDistrHeadDim];
};

class DistrRun {
  public:
    DistrRun(Context& context, const DenseCall& call)
        : kernels_(context.kernels()), call_(call), d_(int(call.k.head_dim)), group_(call.q.heads / call.k.heads) {}

    Status run(Context& context) {
        for (size_t b = 0; b + 1 < call_.q_offsets.size(); ++b) {
            const int64_t rows = call_.q_offsets[b + 1] - call_.q_offsets[b];
            for (int64_t r = 0; r < rows; r += kDistrRows) jobs_.push_back({b, r, std::min<int64_t>(kDistrRows, rows - r)});
        }
        Buffer scratch(context.allocator());
        const size_t bytes = sizeof(Scratch) * size_t(context.thread_count());
        if (!scratch.reserve(bytes))
            return fail(TA_E_MEMORY, "the allocator has no %zu bytes for this call", bytes).bytes(bytes);
        const int64_t heads = call_.q.heads;
        context.threads().parallel_for(int64_t(jobs_.size()) * heads, 1, [&](int64_t i, int worker) {
            attend(jobs_[size_t(i / heads)], i % heads, reinterpret_cast<Scratch*>(scratch.data())[worker]);
        });
        return {};
    }

  private:
    void read(const TensorView& t, int64_t token, int64_t head, float* to) const {
        kernels_.codec->to_float(t.at(token, head), t.dtype, d_, call_.saturate, to);
    }

    void attend(const Job& job, int64_t q_head, Scratch& s) const {
        const AttendSettings& options = call_.settings;
        const int64_t q_first = call_.q_offsets[job.sequence], k_first = call_.k_offsets[job.sequence];
        const int64_t n_query = call_.q_offsets[job.sequence + 1] - q_first,
                      n_keys = call_.k_offsets[job.sequence + 1] - k_first;
        for (int64_t r = 0; r < job.rows; ++r) read(call_.q, q_first + job.first_row + r, q_head, s.q + r * d_);
        const cpu::DistrBlock block{int(job.rows), d_, call_.group_size, s.q, s.order, s.sampled, s.m, s.l, s.o};
        kernels_.distr->start(block);
        const bool causal = options.mask == TA_MASK_CAUSAL;
        const cpu::DistrRules rules{options.softcap > 0.0f ? options.scale : options.scale * cpu::kLog2e,
                                    options.softcap,
                                    options.alibi_slopes ? options.alibi_slopes[q_head] * cpu::kLog2e : 0.0f,
                                    causal,
                                    options.window,
                                    n_keys,
                                    n_keys - n_query + job.first_row,
                                    options.exp};
        // Both ends of a row's visible range grow with its position.
        const int64_t first = visible_keys(causal, options.window, n_keys, rules.first_position).begin;
        const int64_t last = visible_keys(causal, options.window, n_keys, rules.first_position + job.rows - 1).end;
        for (int64_t key = first / kDistrKeys * kDistrKeys; key < last; key += kDistrKeys) {
            load_tile(k_first + key, std::min<int64_t>(kDistrKeys, n_keys - key), q_head / group_, s);
            kernels_.distr->attend(block, rules, {key, s.k, s.v, s.fused});
        }
        for (int64_t r = 0; r < job.rows; ++r) {
            const int64_t token = q_first + job.first_row + r;
            const cpu::RowEnd end = cpu::end_row(s.m[r], s.l[r], options.sinks ? options.sinks + q_head : nullptr);
            for (int c = 0; c < d_; ++c) s.row[c] = s.o[r * d_ + c] * end.factor;
            kernels_.codec->from_float(s.row, d_, call_.out.dtype, call_.out.at(token, q_head));
            if (call_.lse) call_.lse[token * call_.q.heads + q_head] = end.lse;
        }
    }

    void load_tile(int64_t token, int64_t n, int64_t head, Scratch& s) const {
        for (int64_t j = 0; j < n; ++j) {
            read(call_.k, token + j, head, s.row);
            for (int c = 0; c < d_; ++c) s.k[c * kDistrKeys + j] = s.row[c];
            read(call_.v, token + j, head, s.v + j * d_);
        }
        for (int c = 0; c < d_; ++c) std::fill(s.k + c * kDistrKeys + n, s.k + (c + 1) * kDistrKeys, 0.0f);
        std::fill(s.v + n * d_, s.v + kDistrKeys * d_, 0.0f);
    }

    const cpu::Kernels& kernels_;
    const DenseCall& call_;
    const int d_;
    const int64_t group_;
    std::vector<Job> jobs_;
};

}  // namespace

Status attend_distr(Context& context, const DenseCall& call) {
    return DistrRun(context, call).run(context);
}

}  // namespace ta
