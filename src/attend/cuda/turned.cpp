#include "src/attend/cuda/turned.h"

#include <cstring>
#include <vector>

#include "src/attend/cuda/attend.h"
#include "src/attend/queries.h"

namespace ta {

using cuda::TurnedRow;

Status CudaTurned::begin(const Step& step, cudaStream_t stream) {
    if (step.turned.empty()) return {};
    joined_at_ = round_up(size_t(step.turned_rows) * sizeof(TurnedRow), 16);
    const size_t bytes = joined_at_ + size_t(step.total_query) * sizeof(JoinedRow);
    TA_RETURN_IF_ERROR(tables_.reserve(bytes, "queries of sequences that were shifted"));
    PinnedBuffer& pinned = pinned_[uploads_++ % std::size(pinned_)];
    TA_RETURN_IF_ERROR(pinned.take(device_, bytes));
    auto* const staged = static_cast<uint8_t*>(pinned.part(bytes));
    auto* row = reinterpret_cast<TurnedRow*>(staged);
    for (const TurnedQueries& t : step.turned) {
        for (int64_t i = 0; i < t.n_query; ++i) *row++ = {int32_t(t.from_row + i), int32_t(t.back)};
    }
    const std::vector<JoinedRow> joined = list_joined(step);
    std::memcpy(staged + joined_at_, joined.data(), joined.size() * sizeof(JoinedRow));
    TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(tables_.data(), staged, bytes, cudaMemcpyHostToDevice, stream),
                                     "sending a step's turned queries"));
    return pinned.record(device_, stream);
}

Result<TensorView> CudaTurned::turn(const Step& step, const CudaConstants& constants, uint32_t layer, const TensorView& q,
                                    cudaStream_t stream) {
    TA_RETURN_IF_ERROR(q_.reserve(float_bytes(step, q), "queries of sequences that were shifted"));
    const TensorView all = float_rows(step, q, q_.data());
    const Rotary& rotary = pool_.numerics().rotary;
    cuda::TurnQueriesArgs a{};
    a.rows = int32_t(step.total_query);
    a.turned = int32_t(step.turned_rows);
    a.heads = int32_t(q.heads);
    a.head_dim = int32_t(q.head_dim);
    a.q = tensor_args(q);
    a.row = turned();
    a.pairs = rotary.pairs;
    a.channels = int32_t(rotary.channels);
    a.turns = constants.rotary_turns(layer);
    a.saturate = pool_.numerics().saturate;
    a.to = reinterpret_cast<float*>(q_.data());
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_turn_queries(a, stream)), "turning queries"));
    return all;
}

Status CudaTurned::hold(const Step& step, const AttendCall& call, TensorView& out, float*& lse) {
    const size_t o_bytes = float_bytes(step, call.out), lse_bytes = size_t(step.all_rows() * call.out.heads) * sizeof(float);
    TA_RETURN_IF_ERROR(results_.reserve(o_bytes + lse_bytes, "results of sequences that were shifted"));
    out = float_rows(step, call.out, results_.data());
    lse = reinterpret_cast<float*>(results_.data() + o_bytes);
    return {};
}

Status CudaTurned::join(const TensorView& out, const float* lse, const AttendCall& call, cudaStream_t stream) {
    cuda::JoinRowsArgs a{};
    a.rows = int32_t(call.out.tokens);
    a.heads = int32_t(out.heads);
    a.head_dim = int32_t(out.head_dim);
    a.joined = joined();
    a.o = reinterpret_cast<const float*>(out.data);
    a.lse = lse;
    a.sink = call.settings.sinks;
    a.out = tensor_args(call.out);
    a.out_lse = call.lse;
    return device_.check(cudaError_t(cuda::launch_join_rows(a, stream)), "joining the results of queries");
}

}  // namespace ta
