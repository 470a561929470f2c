#include "src/attend/dense/scatter.h"

#include <algorithm>

#include "src/attend/dense/scatter_parts.h"

namespace ta {

using namespace scatter;

namespace {

constexpr uint64_t kRoundBytes = uint64_t{384} << 20;  // bytes of Q, K and V in a round: more gains nothing
constexpr uint32_t kRounds = 4;  // at least so many, if there are enough heads: the first and the last overlap with nothing

}  // namespace

ScatterMemory& DenseScatter::memory(size_t i) {
    while (memory_.size() <= i) memory_.push_back(std::make_unique<ScatterMemory>(group_.shared_context()));
    return *memory_[i];
}

Status DenseScatter::find(Peer& peer, const share::MemoryName& name, uint64_t bytes) {
    Found& found = found_[peer.rank];
    if (found.number != name.number || !found.memory || found.bytes < bytes) {
        Result<std::shared_ptr<uint8_t>> memory = group_.transport().find_memory(peer.rank, name, bytes);
        if (!memory.ok()) return std::move(memory).status();
        if (!memory.value()) {
            return fail(TA_E_CANCELLED, "rank %u has no memory any more for what comes", peer.rank).rank(int32_t(peer.rank));
        }
        found = {name.number, bytes, memory.take()};
    }
    peer.memory = found.memory;
    return {};
}

Status DenseScatter::write(const Peer& peer, const share::RemoteCopy& copy) {
    if (peer.way != kGpuMemory) return group_.transport().write(peer.rank, peer.window, {&copy, 1}, peer.on_gpu());
    const DeviceCopy piece{peer.memory.get() + copy.to, copy.from, copy.bytes};
    CopyOptions options;
    options.behind_steps = false;
    options.route = MoveRoute::kCopyEngine;
    Result<std::unique_ptr<DeviceTransfer>> copied = context_.device()->start_copy({&piece, 1}, options);
    return copied.ok() ? copied.value()->wait() : std::move(copied).status();
}

// After a failed call: gives up memory that another rank may still write to.
void DenseScatter::forget() {
    for (const auto& memory : memory_) memory->forget_if_shared();
    for (Found& found : found_) found = {};
}

Result<std::vector<DenseScatter::Share>> DenseScatter::share_out(const DenseCall& call, const ScatterSettings& settings,
                                                                 const std::vector<Rounds::Begin>& ranks) const {
    const Shape shape = Shape::of(call);
    const auto all = uint32_t(call.k.heads);
    std::vector<Share> shares(ranks_);
    uint32_t next = 0;
    for (uint32_t r = 0; r < ranks_; ++r) {
        Share& s = shares[r];
        s.first = next;
        s.heads = settings.heads.empty() ? all / ranks_ + (r < all % ranks_) : settings.heads[r];
        if (call.q.tokens == 0) s.heads = 0;
        next += s.heads;
        if (s.heads == 0) continue;
        Result<RoundLayout> one = RoundLayout::of(shape, 1);
        if (!one.ok()) return std::move(one).status();
        const uint64_t least = one.value().room();
        // How many kv heads a round may have if two rounds must fit the room. The root has no limit: its share is cut into
        // rounds only so that copies run in between.
        const uint64_t fitting = r == rank_ ? UINT64_MAX : ranks[r].room / least;
        if (fitting == 0) {
            return fail(TA_E_MEMORY, "two rounds of one kv head take %llu bytes; rank %u lends %llu", (unsigned long long)least,
                        r, (unsigned long long)ranks[r].room)
                .argument(8)
                .rank(int32_t(r))
                .bytes(least);
        }
        uint64_t wanted = settings.heads_per_round;
        if (wanted == 0)
            wanted =
                std::min<uint64_t>(std::max<uint64_t>(1, kRoundBytes / one.value().inputs), (s.heads + kRounds - 1) / kRounds);
        s.per_round = uint32_t(std::min({wanted, fitting, uint64_t(s.heads)}));
        if (Result<RoundLayout> full = RoundLayout::of(shape, s.per_round); !full.ok()) return std::move(full).status();
    }
    return shares;
}

}  // namespace ta
