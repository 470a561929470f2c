#include "src/attend/cpu/parts.h"

#include "src/attend/merge.h"

namespace ta {

Status CpuParts::begin(const PartitionedCalls& step, uint64_t arguments) {
    return step.exchange->begin(step.channel, arguments, step.without_queries, {});
}

Status CpuParts::reserve(AttendCall& own) {
    const int64_t rows = own.q.tokens * own.q.heads, d = own.head_dim;
    const size_t bytes = size_t(rows) * size_t(d + 1) * sizeof(float);
    if (!own_.reserve(bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the results of this rank's blocks", bytes).bytes(bytes);
    }
    own.out = {own_.data(), DType::kF32, own.q.tokens, own.q.heads, d, own.q.heads * d, d};
    own.lse = reinterpret_cast<float*>(own_.data()) + rows * d;
    return {};
}

Status CpuParts::exchange(PartitionedCalls& step, const AttendCall& call, const AttendCall& own, uint64_t arguments) {
    Result<share::Exchange::Parts> exchanged =
        exchange_by_messages(step, call, reinterpret_cast<const float*>(own.out.data), own.lse, arguments);
    if (!exchanged.ok()) return std::move(exchanged).status();
    share::Exchange::Parts parts = exchanged.take();
    MergeArgs args = merge_args(step, call, own);
    for (uint32_t r = 0; r < step.outputs.ranks && args.heads > 0; ++r) {
        if (r != step.exchange->rank()) args.parts[r] = packed_part(parts[r].data(), args);
    }
    return args.heads > 0 ? merge_states(context_, args, nullptr) : Status();
}

}  // namespace ta
