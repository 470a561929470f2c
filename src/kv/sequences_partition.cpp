// Sequences that have some of their blocks on other ranks.
#include "src/kv/partition.h"
#include "src/kv/sequences.h"

namespace ta {

Status Sequences::may_partition(ta_seq seq) const {
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    return found.ok() ? may_partition(*found.value()) : std::move(found).status();
}

Status Sequences::may_partition(const Sequence& s) const {
    if (s.partition) return fail(TA_E_STATE, "the sequence is partitioned already");
    if (!s.gaps.empty()) return fail(TA_E_UNSUPPORTED, "a sequence that was shifted cannot be partitioned");
    if (numerics_.batch_invariant)
        return fail(TA_E_UNSUPPORTED, "sequences of a pool with batch_invariant cannot be partitioned");
    if (numerics_.universal_open_scale && s.length > 0 && !s.scales_known) {
        return fail(
            TA_E_STATE,
            "the universal scales of the sequence are not known since it was matched, forked, loaded or truncated: end a "
            "step with new tokens before it is partitioned");
    }
    return {};
}

// Drops blocks of other ranks at once, all but the last block: how the next one begins depends on it.
Status Sequences::partition(ta_seq seq, std::shared_ptr<const Partition> partition) {
    const RoomSignal::AtEnd signal(blocks().room_signal());
    std::vector<BlockPtr> left;  // freed after the lock
    std::lock_guard lock(mutex_);
    Result<Sequence*> found = find_idle(seq);
    if (!found.ok()) return std::move(found).status();
    Sequence& s = *found.value();
    TA_RETURN_IF_ERROR(may_partition(s));
    left.reserve(s.blocks.size());
    for (size_t b = 0; b + 1 < s.blocks.size(); ++b) {
        if (partition->owns(int64_t(b)) || s.blocks[b]->dropped()) continue;
        left.push_back(blocks().absent());
        put_block(s, b, left.back());
    }
    if (!left.empty()) ++s.version;
    // Taken from the length alone: which blocks have really passed depends on how a rank got the sequence.
    if (geometry_.has_windows()) s.passed_to = geometry_.first_needed(s.length);
    s.partition = std::move(partition);
    s.shared_block = int64_t(s.blocks.size()) - 1;
    return {};
}

}  // namespace ta
