// Moves in a pool with a GPU, which copies after the steps that were ended before. The GPU checks blocks that arrive in its
// memory, the checkers those that arrive in host memory.
#include <algorithm>
#include <utility>

#include "tiering/move/transfers/transfer.h"

namespace ta {
namespace {

constexpr size_t kCheckedBytes = 128 << 10;  // for one thread at a time: so small that all threads finish at about the same
                                             // time

class DeviceMove final : public Transfer {
  public:
    DeviceMove(MoveSharing& sharing, MovedBlocks blocks, TierKind to, MoveReason reason)
        : sharing_(sharing), blocks_(std::move(blocks)), to_(to), reason_(reason), written_(blocks_.size()) {}
    ~DeviceMove() override {
        check_.reset();
        copies_.reset();
        sharing_.falling.give(room_);
    }
    void start() override;
    void finish() override;
    bool wants_checkers() const override { return copies_ && to_ == TierKind::kHost; }

  private:
    void encode();

    MoveSharing& sharing_;
    const MovedBlocks blocks_;
    const TierKind to_;
    const MoveReason reason_;
    std::vector<uint8_t*> written_;  // by block: the re-encoded bytes of one that falls, in `room_`
    FallingRoom::Piece room_;
    std::unique_ptr<DeviceTransfer> copies_;
    std::unique_ptr<ArrivalCheck> check_;
};

void DeviceMove::start() {
    const MoveHost& pool = sharing_.pool;
    const Geometry& g = pool.pages.geometry;
    encode();
    std::vector<DeviceCopy> copies;
    std::vector<PlacedBlock> placed;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        const MovedBlock& b = *blocks_[i];
        if (!b.status.ok()) continue;
        copies.push_back({b.to.address, written_[i] ? written_[i] : b.from.address, g.slot_bytes(b.to.kind)});
        placed.push_back({b.item->block.get(), b.item->index, b.to.address, b.to.kind});
    }
    if (copies.empty()) return;
    // A move that nobody waits for must not take multiprocessors from kernels that decode.
    const bool urgent = reason_ == MoveReason::kAsked || reason_ == MoveReason::kNeeded;
    const MoveRoute route = sharing_.route == MoveRoute::kCalibrated && !urgent ? MoveRoute::kCopyEngine : sharing_.route;
    const CopyOptions options{to_ == TierKind::kHost, pool.store.barriers().writers, route};
    Result<std::unique_ptr<DeviceTransfer>> started = pool.device->start_copy(copies, options);
    if (!started.ok()) return fail_all(blocks_, std::move(started).status());
    copies_ = started.take();
    if (to_ == TierKind::kHost) return;
    Result<std::unique_ptr<ArrivalCheck>> check = verifier_in(pool, to_).start(placed, *copies_);
    if (!check.ok()) return fail_all(blocks_, std::move(check).status());
    check_ = check.take();
}

// Re-encodes the falling blocks in device memory.
void DeviceMove::encode() {
    const MoveHost& pool = sharing_.pool;
    MovedBlocks falling;
    std::vector<PlacedBlock> placed;
    std::vector<uint8_t**> written;
    for (size_t i = 0; i < blocks_.size(); ++i) {
        MovedBlock& b = *blocks_[i];
        if (!b.falls()) continue;
        falling.push_back(&b);
        placed.push_back({b.item->block.get(), b.item->index, b.from.address, b.from.kind});
        written.push_back(&written_[i]);
    }
    if (falling.empty()) return;
    // Re-encoding gives a block new hashes, so the old ones are checked first.
    std::vector<Status> statuses(falling.size());
    if (Status s = pool.verifier->verify(placed, statuses); !s.ok()) return fail_all(falling, s);
    size_t n = 0;
    for (size_t i = 0; i < falling.size(); ++i) {
        falling[i]->status = std::move(statuses[i]);
        if (!falling[i]->status.ok()) continue;
        falling[n] = falling[i];
        written[n] = written[i];
        placed[n++] = placed[i];
    }
    falling.resize(n);
    placed.resize(n);
    const size_t bytes = pool.pages.geometry.slot_bytes(PageKind::kChannel);
    room_ = sharing_.falling.take(n * bytes);
    if (!room_.data)
        return fail_all(falling, fail(TA_E_MEMORY, "the GPU has no %zu bytes to encode blocks in", n * bytes).bytes(n * bytes));
    std::vector<uint8_t*> to;
    for (size_t i = 0; i < n; ++i) to.push_back(*written[i] = room_.data + i * bytes);
    if (Status s = pool.encoder->encode_lower(placed, to); !s.ok()) fail_all(falling, s);
}

void DeviceMove::finish() {
    if (!copies_) return;
    if (const Status s = copies_->wait(); !s.ok()) fail_all(blocks_, s);
    for (MovedBlock* b : blocks_) b->route = copies_->route();
    const Geometry& g = sharing_.pool.pages.geometry;
    if (to_ == TierKind::kHost) {
        PageWork work(sharing_, blocks_);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (!blocks_[i]->status.ok()) continue;
            const size_t bytes = g.slot_bytes(blocks_[i]->to.kind);
            work.add(i, uint32_t(std::max<uint64_t>(uint64_t{g.layers} * kCheckedBytes / bytes, 1)));
        }
        work.run([&](size_t i, uint32_t first, uint32_t n) {
            const MovedBlock& b = *blocks_[i];
            return check_pages(sharing_, b, b.to.address, b.to.kind, first, n);
        });
    } else if (check_) {
        // No block falls on its way up, so all were placed.
        std::vector<Status> statuses(blocks_.size());
        const Status all = check_->wait(statuses);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (blocks_[i]->status.ok()) blocks_[i]->status = all.ok() ? std::move(statuses[i]) : all.clone();
        }
    }
}

}  // namespace

std::unique_ptr<Transfer> make_device_transfer(MoveSharing& sharing, MovedBlocks blocks, TierKind to, MoveReason reason) {
    return std::make_unique<DeviceMove>(sharing, std::move(blocks), to, reason);
}

}  // namespace ta
