#include "src/attend/partition.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/hash.h"
#include "src/attend/merge.h"

namespace ta {
namespace {

const Partition* partition_of(const StepMember& m) {
    return m.sequence->partition.get();
}

// Of what all ranks must say alike about a step.
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
    return hash.value();
}

uint64_t hash_of(uint32_t layer, const AttendCall& call) {
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
    const size_t bytes = size_t(call.q.heads) * sizeof(float);
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
    for (const StepMember& m : step.members) channel = std::min(channel, partition_of(m)->tag);
    channel_ = channel;
    calls_ = 0;
    output_ = first->output;
    output_rank_ = first->output_rank;
    exchange_ = first->exchange;
    Status s = exchange_->begin(channel_, hash_of(step, pool_.fingerprint()));
    if (!s.ok()) exchange_ = nullptr;
    return s;
}

void PartitionedStep::end(bool gave_up) noexcept {
    if (!exchange_) return;
    exchange_->end(channel_, gave_up);
    exchange_ = nullptr;
    own_.trim();
}

// The query heads whose results a rank gets.
PartitionedStep::Heads PartitionedStep::heads_of(uint32_t rank, int64_t q_heads) const {
    const int64_t n = exchange_->ranks();
    if (output_ == TA_OUTPUT_HEADS) return {q_heads * rank / n, q_heads * (rank + 1) / n};
    return {0, output_ == TA_OUTPUT_ALL || rank == output_rank_ ? q_heads : 0};
}

// [tokens, heads, d] of O, then [tokens, heads] of LSE.
std::vector<float> PartitionedStep::part_for(uint32_t rank, const AttendCall& own) const {
    const auto [first, end] = heads_of(rank, own.q.heads);
    const int64_t n = end - first, d = own.head_dim, tokens = own.q.tokens;
    std::vector<float> part(size_t(tokens * n * (d + 1)));
    if (n == 0) return part;
    float* lse = part.data() + tokens * n * d;
    for (int64_t t = 0; t < tokens; ++t) {
        std::memcpy(part.data() + t * n * d, own.out.at(t, first), size_t(n * d) * sizeof(float));
        std::memcpy(lse + t * n, own.lse + t * own.q.heads + first, size_t(n) * sizeof(float));
    }
    return part;
}

Status PartitionedStep::attend(uint32_t layer, const AttendCall& call, StepBackend& backend) {
    AttendCall own = call;
    if (call.q.tokens == 0) return backend.attend(layer, own);
    const uint32_t ranks = exchange_->ranks(), rank = exchange_->rank();
    const int64_t rows = call.q.tokens * call.q.heads, d = call.head_dim;
    const size_t bytes = size_t(rows) * size_t(d + 1) * sizeof(float);
    if (!own_.reserve(bytes)) {
        return fail(TA_E_MEMORY, "the allocator has no %zu bytes for the results of this rank's blocks", bytes).bytes(bytes);
    }
    own.out = {own_.data(), DType::kF32, call.q.tokens, call.q.heads, d, call.q.heads * d, d};
    own.lse = reinterpret_cast<float*>(own_.data()) + rows * d;
    if (rank != 0) own.settings.sinks = nullptr;  // they join the denominator once
    TA_RETURN_IF_ERROR(backend.attend(layer, own));
    share::Exchange::Call exchanged{calls_ + 1, hash_of(layer, call), {}, 0};
    for (uint32_t r = 0; r < ranks; ++r) exchanged.given.push_back(r == rank ? std::vector<float>() : part_for(r, own));
    const auto [first, end] = heads_of(rank, call.q.heads);
    exchanged.wanted = size_t(call.q.tokens * (end - first) * (d + 1));
    Result<share::Exchange::Parts> parts = exchange_->exchange(channel_, exchanged);
    if (!parts.ok()) return std::move(parts).status();
    ++calls_;
    share::Exchange::Parts all = parts.take();
    return first < end ? merge(call, own, all) : Status();
}

// In the order of the ranks: the same bits everywhere.
Status PartitionedStep::merge(const AttendCall& call, const AttendCall& own, share::Exchange::Parts& parts) {
    const Heads heads = heads_of(exchange_->rank(), call.q.heads);
    const int64_t n = heads.end - heads.first, d = call.head_dim;
    MergeArgs args{};
    args.n = int32_t(exchange_->ranks());
    args.head_dim = call.head_dim;
    args.tokens = call.q.tokens;
    args.heads = n;
    const auto states_of = [&](const AttendCall& c) {
        return MergeState{c.out.at(0, heads.first),
                          c.out.stride_token,
                          c.out.stride_head,
                          c.out.dtype,
                          c.lse ? c.lse + heads.first : nullptr,
                          c.q.heads,
                          1};
    };
    args.out = states_of(call);
    for (size_t r = 0; r < parts.size(); ++r) {
        float* const o = parts[r].data();
        args.parts[r] =
            r == exchange_->rank() ? states_of(own) : MergeState{o, n * d, d, DType::kF32, o + args.tokens * n * d, n, 1};
    }
    return merge_states(pool_.context(), args, nullptr);
}

}  // namespace ta
