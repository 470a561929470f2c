#include "tiering/move/sharing.h"

#include <algorithm>

namespace ta {

MoveCounters& MoveCounters::operator+=(const MoveCounters& more) {
    for (size_t t = 0; t < kTiers; ++t) {
        for (int b = 0; b < kLatencyBuckets; ++b) latency[t][b] += more.latency[t][b];
        seconds[t] += more.seconds[t];
        blocks_in[t] += more.blocks_in[t];
        blocks_out[t] += more.blocks_out[t];
        bytes_in[t] += more.bytes_in[t];
        bytes_out[t] += more.bytes_out[t];
        fallen[t] += more.fallen[t];
        evicted[t] += more.evicted[t];
        evicted_age[t] += more.evicted_age[t];
    }
    for (int r = 0; r < kMoveReasons; ++r) bytes_by_reason[r] += more.bytes_by_reason[r];
    bytes_by_kernel += more.bytes_by_kernel;
    bytes_by_engine += more.bytes_by_engine;
    failed += more.failed;
    corrupt += more.corrupt;
    return *this;
}

void DiskWork::add(DiskTier& disk, DiskBatch batch) {
    std::lock_guard lock(mutex_);
    if (cancelled_) return disk.cancel(batch);
    batches_.push_back(batch);
}

void DiskWork::cancel(DiskTier& disk) {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (const DiskBatch batch : batches_) disk.cancel(batch);
    batches_.clear();
}

FallingRoom::~FallingRoom() {
    for (const Piece& piece : idle_) device_->deallocate(piece.data, piece.bytes);
}

FallingRoom::Piece FallingRoom::take(size_t bytes) {
    constexpr size_t kLeast = 5 << 20;  // 8 MiB at 8 bits become 4.2 MiB at 4
    {
        std::lock_guard lock(mutex_);
        for (Piece& piece : idle_) {
            if (piece.bytes < bytes) continue;
            std::swap(piece, idle_.back());
            const Piece taken = idle_.back();
            idle_.pop_back();
            return taken;
        }
    }
    bytes = std::max(bytes, kLeast);
    return {device_->allocate(bytes), bytes};
}

void FallingRoom::give(const Piece& piece) {
    if (!piece.data) return;
    std::lock_guard lock(mutex_);
    try {
        idle_.push_back(piece);
    } catch (const std::bad_alloc&) {
        device_->deallocate(piece.data, piece.bytes);
    }
}

}  // namespace ta
