#include "src/attend/cuda/ranges.h"

#include <algorithm>

namespace ta {
namespace {

constexpr size_t kPartsBytes = size_t{64} << 20;  // for results of parts in one launch

size_t result_bytes(const AttendCall& call) {
    return size_t(call.kv_heads) * size_t(call.group) * (size_t(call.head_dim) * sizeof(float) + sizeof(cuda::PartSum));
}

// A member's query, with the table entries of its pages.
cuda::RangeQuery query_of(const cuda::SequenceArgs& s, const StepMember& m, int32_t query) {
    const int32_t position = s.n_keys - s.n_query + query, own = position / kPageTokens;
    const auto touched = int32_t(own - Step::untouched_blocks(m));
    return {
        s.row + query, position, s.first_entry, s.first_entry + (touched < 0 ? own : CudaTables::own_entry(m, touched)), 0, 0};
}

}  // namespace

CudaRanges::PartsLayout::PartsLayout(int32_t parts, const AttendCall& call) {
    const auto n = size_t(parts), heads = size_t(call.kv_heads) * size_t(call.group);
    size_t next = 0;
    const auto take = [&next](size_t& at, size_t each) {
        at = next;
        next += round_up(each, 16);
    };
    take(o, n * heads * size_t(call.head_dim) * sizeof(float));
    take(sums, n * heads * sizeof(cuda::PartSum));
    take(sequences, n * sizeof(cuda::SequenceArgs));
    take(pages_before, (n + 1) * sizeof(int32_t));
    take(positions, n * sizeof(int32_t));
    bytes = next;
}

Status CudaRanges::attend(const Step& step, const CudaTables& tables, const cuda::AttendArgs& args, const AttendCall& call,
                          cudaStream_t stream) {
    const auto most = int32_t(std::max<size_t>(kPartsBytes / result_bytes(call), 1));
    Result<Cut*> found = find(step, tables, args.window, most, stream);
    if (!found.ok()) return std::move(found).status();
    const Cut& cut = *found.value();
    if (cut.launches.empty()) return {};
    TA_RETURN_IF_ERROR(parts_.reserve(PartsLayout(cut.parts, call).bytes, "the parts of queries"));
    // One plan for all launches: that of the launch with the most parts.
    cuda::AttendArgs a = args;
    set_p(call.settings.p, args.group, kDecodeRangePages, a);
    a.batch = std::max(cut.parts, 1);
    a.are_parts = true;
    AttendWork work{};
    TA_RETURN_IF_ERROR(plan_few_rows(device_, a, args.group, call.q_rest, work));
    work.plan.overlap = false;  // the kernel before it writes its tables
    TA_RETURN_IF_ERROR(workspace_.reserve(work.plan.workspace_bytes, "the workspace of attention", [&](uint8_t* data) {
        return device_.check(cudaMemsetAsync(data, 0, work.plan.zeroed_bytes, stream), "zeroing the workspace of attention");
    }));
    for (const Launch& l : cut.launches) TA_RETURN_IF_ERROR(launch(cut, l, work, call, stream));
    return {};
}

Result<CudaRanges::Cut*> CudaRanges::find(const Step& step, const CudaTables& tables, int32_t window, int32_t most_parts,
                                          cudaStream_t stream) {
    for (size_t i = 0; i < used_; ++i) {
        if (cuts_[i]->window == window && cuts_[i]->most_parts == most_parts) return cuts_[i].get();
    }
    if (used_ == cuts_.size()) cuts_.push_back(std::make_unique<Cut>(device_));
    Cut& cut = *cuts_[used_];
    cut.window = window;
    cut.most_parts = most_parts;
    TA_RETURN_IF_ERROR(send(step, tables, cut, stream));
    ++used_;
    return &cut;
}

Status CudaRanges::send(const Step& step, const CudaTables& tables, Cut& cut, cudaStream_t stream) {
    cut.launches.clear();
    cut.parts = 0;
    size_t most = 0;
    for (const cuda::SequenceArgs& s : tables.queries()) most += size_t(s.n_query);
    const size_t bytes = most * sizeof(cuda::RangeQuery);
    if (bytes == 0) return {};
    TA_RETURN_IF_ERROR(cut.queries.reserve(bytes, "a step's queries"));
    PinnedBuffer& pinned = cut.pinned[cut.uploads++ % std::size(cut.pinned)];
    TA_RETURN_IF_ERROR(pinned.take(device_, bytes));
    auto* const queries = static_cast<cuda::RangeQuery*>(pinned.part(bytes));
    int32_t n = 0;
    for (size_t i = 0; i < tables.queries().size(); ++i) {
        const cuda::SequenceArgs& s = tables.queries()[i];
        for (int32_t query = 0; query < s.n_query; ++query) {
            cuda::RangeQuery q = query_of(s, step.members[step.queries[i].member], query);
            const cuda::RangeCut of_query(q.position, cut.window);
            if (cut.launches.empty() || cut.launches.back().parts + of_query.parts() > cut.most_parts)
                cut.launches.push_back({n, 0, 0, 0});
            Launch& l = cut.launches.back();
            q.first_part = l.parts;
            q.pages_before = l.pages;
            queries[n++] = q;
            ++l.queries;
            l.parts += of_query.parts();
            l.pages += of_query.pages();
            cut.parts = std::max(cut.parts, l.parts);
        }
    }
    TA_RETURN_IF_ERROR(device_.check(cudaMemcpyAsync(cut.queries.data(), queries, bytes, cudaMemcpyHostToDevice, stream),
                                     "sending a step's queries"));
    return pinned.record(device_, stream);
}

Status CudaRanges::launch(const Cut& cut, const Launch& l, const AttendWork& planned, const AttendCall& call,
                          cudaStream_t stream) const {
    const PartsLayout at(cut.parts, call);
    uint8_t* const memory = parts_.data();
    const auto* const queries = reinterpret_cast<const cuda::RangeQuery*>(cut.queries.data()) + l.first;
    auto* const sequences = reinterpret_cast<cuda::SequenceArgs*>(memory + at.sequences);
    auto* const pages_before = reinterpret_cast<int32_t*>(memory + at.pages_before);
    auto* const positions = reinterpret_cast<int32_t*>(memory + at.positions);
    auto* const o = reinterpret_cast<float*>(memory + at.o);
    auto* const sums = reinterpret_cast<cuda::PartSum*>(memory + at.sums);
    AttendWork work = planned;
    cuda::AttendArgs& a = work.args;
    const int32_t heads = a.kv_heads * a.group;
    const cuda::MergeRangesArgs merge{l.queries, heads, a.head_dim, cut.window, queries, o, sums, a.sink, a.out, a.lse};
    a.batch = l.parts;
    a.sequences = sequences;
    a.pages_before = pages_before;
    a.first_position = positions;
    a.part_sums = sums;
    a.out = {o, int64_t(heads) * a.head_dim, a.head_dim, DType::kF32};
    a.lse = nullptr;
    a.sink = nullptr;
    const cuda::CutRangesArgs ranges{l.queries, cut.window, queries, sequences, pages_before, positions};
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_cut_ranges(ranges, stream)), "cutting the keys of queries"));
    if (l.parts > 0) TA_RETURN_IF_ERROR(launch_attend(device_, work, workspace_.data(), stream));
    return device_.check(cudaError_t(cuda::launch_merge_ranges(merge, stream)), "merging the parts of queries");
}

}  // namespace ta
