#include "src/attend/cuda/mass.h"

#include <algorithm>

#include "src/attend/call.h"

namespace ta {

CudaMass::CudaMass(Pool& pool, CudaDevice& device)
    : pool_(pool),
      device_(device),
      on_(pool.residency().observes_attention()),
      sums_(device),
      page_lse_(device, "this shape of a batch") {
    if (on_) pool_.sequences().add_source(this);
}

CudaMass::~CudaMass() {
    if (!on_) return;
    take_in(true);  // records wait for their steps in any case
    pool_.sequences().remove_source(this);
}

cuda::DecodeMass CudaMass::args() const {
    return {reinterpret_cast<float*>(page_lse_.data()), uint32_t(entries_), reinterpret_cast<uint64_t*>(sums_.data() + kHeader),
            reinterpret_cast<uint64_t*>(sums_.data())};
}

Status CudaMass::begin(const Step& step, const CudaTables& tables, cudaStream_t stream) {
    if (!on_) return {};
    const size_t bytes = kHeader + tables.capacity() * sizeof(uint64_t);
    unsent_ |= !sums_.holds(bytes);
    TA_RETURN_IF_ERROR(sums_.reserve(bytes, "the attention of blocks"));
    entries_ = tables.capacity();
    if (unsent_) {
        TA_RETURN_IF_ERROR(
            device_.check(cudaMemsetAsync(sums_.data(), 0, sums_.bytes(), stream), "zeroing the attention of blocks"));
        counts_anew_ = true;
    }
    unsent_ = true;
    std::lock_guard lock(mutex_);
    TA_RETURN_IF_ERROR(take_in_locked(false, 0));
    TA_RETURN_IF_ERROR(take_in_locked(true, std::size(records_) - 1));
    Record& r = records_[sent_ % std::size(records_)];
    r.members.clear();
    size_t blocks = 0;
    for (const StepMember& m : step.members) {
        const size_t n = size_t(CudaTables::blocks_of(m));
        r.members.push_back({m.sequence->slot, m.sequence->generation, std::min(m.n_query, kObservedTokens), blocks, n});
        blocks += n;
    }
    TA_RETURN_IF_ERROR(
        r.pinned.take(device_, 16 + r.members.size() * sizeof(cuda::MassRow) + round_up(blocks * sizeof(float), 16)));
    r.heads = static_cast<uint64_t*>(r.pinned.part(sizeof(uint64_t)));
    r.rows = static_cast<cuda::MassRow*>(r.pinned.part(r.members.size() * sizeof(cuda::MassRow)));
    r.weight = static_cast<float*>(r.pinned.part(blocks * sizeof(float)));
    return {};
}

Status CudaMass::reserve(const CudaTables& tables, int rows) {
    TA_RETURN_IF_ERROR(page_lse_.may_reserve(lse_bytes(tables, rows)));
    const uint64_t places = uint64_t{tables.capacity()} * pool_.geometry().most_kv_heads;
    if (places > UINT32_MAX) {
        return fail(TA_E_LIMIT, "the block table has room for %zu blocks; with %u kv heads TA_EVICT_ATTENTION takes fewer",
                    tables.capacity(), pool_.geometry().most_kv_heads);
    }
    return page_lse_.reserve(lse_bytes(tables, rows), "the weights of pages");
}

Status CudaMass::end(const Step& step, const CudaTables& tables, cudaStream_t stream) {
    if (!on_) return {};
    std::lock_guard lock(mutex_);
    Record& r = records_[sent_ % std::size(records_)];
    for (size_t i = 0; i < r.members.size(); ++i) {
        r.rows[i] = {tables.first_entry(*step.members[i].sequence), uint32_t(r.members[i].blocks), r.members[i].first};
    }
    const cuda::DecodeMass mass = args();
    const cuda::PageMassArgs a{mass.weight, mass.heads, r.rows, int32_t(r.members.size()), r.weight, r.heads};
    TA_RETURN_IF_ERROR(device_.check(cudaError_t(cuda::launch_page_mass(a, stream)), "sending the attention of blocks"));
    TA_RETURN_IF_ERROR(r.pinned.record(device_, stream));
    r.at = pool_.residency().decay().now();
    r.counts_anew = counts_anew_;
    counts_anew_ = unsent_ = false;
    ++sent_;
    // A block that replaces another takes over its attention.
    for (const StepMember& m : step.members) {
        for (const StepBlock& t : m.touched) {
            Block& block = t.channel ? *t.channel : *t.token;
            if (t.have == 0 || m.sequence->blocks[size_t(t.index)].get() == &block) continue;
            block.take_mass(*m.sequence->blocks[size_t(t.index)]);
        }
    }
    return {};
}

void CudaMass::take_in(bool wait) {
    std::lock_guard lock(mutex_);
    (void)take_in_locked(wait, 0);  // fails only if the device is lost: then nothing arrives any more
}

// Takes in records in order, as far as they have arrived. `wait`: waits until at most `most_left` are missing.
Status CudaMass::take_in_locked(bool wait, uint64_t most_left) {
    const CudaScope scope(device_.ordinal());
    while (sent_ - taken_ > most_left) {
        Record& r = records_[taken_ % std::size(records_)];
        if (wait) {
            TA_RETURN_IF_ERROR(r.pinned.wait(device_));
        } else if (!r.pinned.done()) {
            break;
        }
        take_in(r);
        ++taken_;
    }
    return {};
}

void CudaMass::take_in(Record& r) {
    const uint64_t observed = *r.heads - (r.counts_anew ? 0 : heads_);  // heads of all calls of the step: each gave 1 to every
                                                                        // row
    heads_ = *r.heads;
    for (const Member& m : r.members) {
        if (observed == 0 || m.observed == 0) continue;
        const float each = float(1.0 / (double(observed) * double(m.observed)));
        pool_.sequences().add_attention(m.slot, m.generation, {r.weight + m.first, m.blocks}, each, r.at);
    }
}

}  // namespace ta
