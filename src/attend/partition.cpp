#include "src/attend/partition.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/format/hash.h"
#include "src/attend/backend.h"

namespace ta {
namespace {

static_assert(int(OutputHeads::Kind::kAll) == TA_OUTPUT_ALL && int(OutputHeads::Kind::kHeads) == TA_OUTPUT_HEADS &&
              int(OutputHeads::Kind::kOne) == TA_OUTPUT_ONE);

const Partition* partition_of(const StepMember& m) {
    return m.sequence->partition.get();
}

// A hash of what must be the same on all ranks.
uint64_t hash_of(const Step& step, uint64_t fingerprint) {
    struct Member {
        uint64_t tag;
        int64_t length, n_new, n_query;
        uint32_t first_rank, output_rank;
        int64_t output;
    };
    PiecewiseHash hash;
    hash.add(&fingerprint, sizeof fingerprint);
    for (const StepMember& m : step.members) {
        const Partition& p = *partition_of(m);
        const Member member{p.tag, m.length, m.n_new, m.n_query, p.first_rank, p.output_rank, p.output};
        hash.add(&member, sizeof member);
    }
    if (!step.parents.empty()) hash.add(step.parents.data(), step.parents.size() * sizeof(int32_t));
    for (const StepQueries& q : step.queries) {
        if (!step.has_positions) break;
        const int64_t run[] = {int64_t(q.member), q.n_keys, q.n_query, q.row};
        hash.add(run, sizeof run);
    }
    return hash.value();
}

// A hash that does not depend on the step's queries. Two steps of these sequences share it only if the first ended without
// queries and was then truncated away.
uint64_t hash_without_queries(const Step& step) {
    PiecewiseHash hash;
    for (const StepMember& m : step.members) {
        const Partition& p = *partition_of(m);
        const uint64_t member[] = {p.tag, p.last_met, uint64_t(m.length), uint64_t(m.n_new)};
        hash.add(member, sizeof member);
    }
    return hash.value() | 1;
}

// `readable`: all ranks are on CPUs. Arrays of a GPU's options cannot be read.
uint64_t hash_of(uint32_t layer, const AttendCall& call, bool readable) {
    const AttendSettings& s = call.settings;
    const struct {
        int64_t q_heads, window;
        uint32_t layer;
        float scale, softcap;
        int32_t mask, exp, p, has_slopes, has_sinks;
    } all{call.q.heads,      s.window,     layer,
          s.scale,           s.softcap,    int32_t(s.mask),
          int32_t(s.exp),    int32_t(s.p), s.alibi_slopes != nullptr,
          s.sinks != nullptr};
    PiecewiseHash hash;
    hash.add(&all, sizeof all);
    const size_t bytes = readable ? size_t(call.q.heads) * sizeof(float) : 0;
    if (s.alibi_slopes) hash.add(s.alibi_slopes, bytes);
    if (s.sinks) hash.add(s.sinks, bytes);
    return hash.value();
}

}  // namespace

Status PartitionedStep::check(const Step& step) {
    for (size_t i = 1; i < step.members.size(); ++i) {
        const Partition *a = partition_of(step.members[0]), *b = partition_of(step.members[i]);
        const bool alike =
            a && b ? a->exchange == b->exchange && a->output == b->output && a->output_rank == b->output_rank : !a && !b;
        if (alike) continue;
        return fail(TA_E_INVALID, "the sequence is not partitioned as the step's first one: group, output, output_rank")
            .argument(2)
            .sequence(int64_t(i));
    }
    return {};
}

Status PartitionedStep::begin(const Step& step) {
    const Partition* first = step.members.empty() ? nullptr : partition_of(step.members[0]);
    if (!first) return {};
    uint64_t channel = first->tag;
    members_.clear();
    for (const StepMember& m : step.members) {
        channel = std::min(channel, partition_of(m)->tag);
        members_.push_back(partition_of(m));
    }
    const uint64_t without_queries = hash_without_queries(step);
    // Without queries there is nothing to exchange, so ranks may be in different such steps.
    if (step.total_query == 0) {
        step_ = {nullptr, channel, without_queries, {}, 0};
        idle_ = first->exchange.get();
        return {};
    }
    step_ = {first->exchange, channel, without_queries, {}, 0};
    step_.outputs.kind = OutputHeads::Kind(first->output);
    step_.outputs.ranks = first->exchange->ranks();
    step_.outputs.one = first->output_rank;
    Result<bool> all_cpus = first->exchange->all_cpus();
    if (!all_cpus.ok()) return std::move(all_cpus).status();
    all_cpus_ = all_cpus.value();
    return backend_.parts().begin(step_, hash_of(step, pool_.fingerprint()));
}

Status PartitionedStep::attend(uint32_t layer, const AttendCall& call) {
    AttendCall own = call;
    if (call.q.tokens == 0) return backend_.attend(layer, own);
    TA_RETURN_IF_ERROR(backend_.parts().reserve(own));
    own.lse_of_o = !call.lse;
    if (step_.exchange->rank() != 0) own.settings.sinks = nullptr;  // sinks join the denominator once
    TA_RETURN_IF_ERROR(backend_.attend(layer, own));
    step_.outputs.heads = call.q.heads;
    return backend_.parts().exchange(step_, call, own, hash_of(layer, call, all_cpus_));
}

TensorView PartitionedStep::written(const TensorView& out) const {
    if (!open()) return out;
    const OutputHeads::Range range = step_.outputs.of(step_.exchange->rank());
    TensorView mine = out;
    mine.data = out.at(0, range.first);
    mine.heads = range.end - range.first;
    return mine;
}

Status PartitionedStep::settle() {
    return open() ? backend_.parts().settle(step_) : Status();
}

void PartitionedStep::end(bool gave_up) noexcept {
    if (share::Exchange* const idle = std::exchange(idle_, nullptr)) {
        for (const Partition* p : members_) p->given_up += gave_up;
        if (!gave_up) idle->end_idle(step_.channel, step_.without_queries);
    }
    if (!open()) return;
    const uint64_t identity = step_.exchange->end(step_.channel, gave_up);
    for (const Partition* p : members_) {
        if (identity == 0) continue;
        p->last_met = identity;
        p->given_up = 0;
    }
    backend_.parts().end(gave_up);
    step_.exchange = nullptr;
}

Result<share::Exchange::Parts> exchange_by_messages(PartitionedCalls& step, const AttendCall& call, const float* o,
                                                    const float* lse, uint64_t arguments) {
    const int64_t d = call.head_dim, tokens = call.q.tokens, heads = call.q.heads;
    const uint32_t rank = step.exchange->rank();
    share::Exchange::Call exchanged{step.exchanged + 1, arguments, {}, 0};
    for (uint32_t r = 0; r < step.outputs.ranks; ++r) {
        const OutputHeads::Range range = step.outputs.of(r);
        const int64_t first = range.first, n = range.end - first;
        const auto values = size_t(tokens * n * (d + 1));
        if (r == rank) exchanged.wanted = values;
        std::vector<float>& part = exchanged.given.emplace_back();
        if (r == rank || n == 0) continue;
        part.resize(values);
        for (int64_t t = 0; t < tokens; ++t) {
            std::memcpy(part.data() + t * n * d, o + (t * heads + first) * d, size_t(n * d) * sizeof(float));
            std::memcpy(part.data() + tokens * n * d + t * n, lse + t * heads + first, size_t(n) * sizeof(float));
        }
    }
    Result<share::Exchange::Parts> parts = step.exchange->exchange(step.channel, exchanged);
    if (parts.ok()) ++step.exchanged;
    return parts;
}

MergeArgs merge_args(const PartitionedCalls& step, const AttendCall& call, const AttendCall& own) {
    const uint32_t rank = step.exchange->rank();
    const OutputHeads::Range range = step.outputs.of(rank);
    const auto state_of = [&range](const AttendCall& c) {
        return MergeState{c.out.at(0, range.first),
                          c.out.stride_token,
                          c.out.stride_head,
                          c.out.dtype,
                          c.lse ? c.lse + range.first : nullptr,
                          c.q.heads,
                          1};
    };
    MergeArgs args{};
    args.n = int32_t(step.outputs.ranks);
    args.head_dim = call.head_dim;
    args.tokens = call.q.tokens;
    args.heads = range.end - range.first;
    if (args.heads == 0) return args;
    args.out = state_of(call);
    args.parts[rank] = state_of(own);
    return args;
}

MergeState packed_part(float* data, const MergeArgs& args) {
    const int64_t n = args.heads, d = args.head_dim;
    return {data, n * d, d, DType::kF32, data + args.tokens * n * d, n, 1};
}

}  // namespace ta
