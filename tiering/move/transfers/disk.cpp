// Moves to and from the disk tier, between it and host or device memory. The tier copies between that memory and its own
// buffers, and checks what it writes and reads.
#include <utility>

#include "tiering/disk/latch.h"
#include "tiering/move/transfers/transfer.h"

namespace ta {
namespace {

class DiskTransfer : public Transfer {
  public:
    DiskTransfer(MoveSharing& sharing, MovedBlocks blocks, DiskWork* disk_work)
        : sharing_(sharing), blocks_(std::move(blocks)), disk_work_(disk_work) {}
    ~DiskTransfer() override { await(); }
    void finish() override {
        if (!latch_) return;
        std::vector<DiskCompletion>& completions = latch_->wait();
        for (size_t i = 0; i < completions.size(); ++i) {
            blocks_[i]->status = std::move(completions[i].status);
            blocks_[i]->cancelled = completions[i].cancelled;
        }
        latch_.reset();
    }

  protected:
    // Waits until the tier is done with all memory that it was given.
    void await() {
        if (latch_) latch_->wait();
    }
    void submit(std::span<const DiskRequest> requests) {
        auto latch = std::make_unique<DiskLatch>(requests.size());
        Result<DiskBatch> batch = sharing_.pool.disk->submit(requests, *latch);
        if (!batch.ok()) return fail_all(blocks_, std::move(batch).status());
        latch_ = std::move(latch);
        if (disk_work_) disk_work_->add(*sharing_.pool.disk, batch.value());
    }

    MoveSharing& sharing_;
    MovedBlocks blocks_;  // the submitted ones; the index is the tag

  private:
    DiskWork* const disk_work_;
    std::unique_ptr<DiskLatch> latch_;
};

class DiskWrite final : public DiskTransfer {
  public:
    using DiskTransfer::DiskTransfer;
    ~DiskWrite() override { await(); }  // before its buffers go
    void start() override {
        encode();
        if (blocks_.empty()) return;
        std::vector<DiskRequest> requests;
        for (size_t i = 0; i < blocks_.size(); ++i) {
            MovedBlock& b = *blocks_[i];
            DiskRequest r;
            r.kind = DiskRequest::Kind::kWrite;
            r.slot = b.to.slot;
            r.bytes = sharing_.pool.pages.geometry.slot_bytes(b.to.kind);
            r.memory = b.falls() ? written_[i] : b.from.address;
            r.on_device = !b.falls() && is_on_device(sharing_, b.from);
            b.to.keys = sharing_.pool.store.keys_of(*b.item->block, r.more_keys);
            r.identity = b.item->block->identity(b.item->index, b.to.keys);
            r.tag = i;
            requests.push_back(std::move(r));
        }
        submit(requests);
    }

  private:
    // Re-encodes the falling blocks in host memory; those of a device are read first. Keeps the blocks that can be written.
    void encode() {
        const Geometry& g = sharing_.pool.pages.geometry;
        size_t read_bytes = 0, bytes = 0;
        for (const MovedBlock* b : blocks_) {
            if (!b->falls()) continue;
            bytes += g.slot_bytes(b->to.kind);
            if (is_on_device(sharing_, b->from)) read_bytes += g.slot_bytes(b->from.kind);
        }
        written_.resize(blocks_.size());
        if (bytes == 0) return;
        read_.resize(read_bytes);
        encoded_.resize(bytes);
        std::vector<const uint8_t*> sources(blocks_.size());
        uint8_t *next_read = read_.data(), *next = encoded_.data();
        PageWork work(sharing_, blocks_);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            MovedBlock& b = *blocks_[i];
            if (!b.falls()) continue;
            sources[i] = b.from.address;
            if (is_on_device(sharing_, b.from)) {
                b.status = sharing_.pool.device->read(next_read, b.from.address, g.slot_bytes(b.from.kind));
                sources[i] = next_read;
                next_read += g.slot_bytes(b.from.kind);
            }
            written_[i] = next;
            next += g.slot_bytes(b.to.kind);
            write_fallen_trailer(sharing_, b, written_[i]);
            if (b.status.ok()) work.add(i, 1);
        }
        work.run([&](size_t i, uint32_t first, uint32_t n) {
            return encode_fallen(sharing_, *blocks_[i], sources[i], written_[i], first, n);
        });
        size_t kept = 0;
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (!blocks_[i]->status.ok()) continue;
            written_[kept] = written_[i];
            blocks_[kept++] = blocks_[i];
        }
        blocks_.resize(kept);
    }

    std::vector<uint8_t*> written_;        // by block: bytes of one that falls
    std::vector<uint8_t> read_, encoded_;  // in use until the write is over
};

class DiskRead final : public DiskTransfer {
  public:
    DiskRead(MoveSharing& sharing, MovedBlocks blocks, TierKind to, DiskWork* disk_work)
        : DiskTransfer(sharing, std::move(blocks), disk_work), to_(to) {}
    void start() override {
        const MoveHost& pool = sharing_.pool;
        if (pool.device && to_ == TierKind::kHost && pool.store.barriers().writers) {
            // Kernels may still read what these host slots held before.
            if (Status s = pool.device->wait_for_steps(); !s.ok()) return fail_all(blocks_, s);
        }
        std::vector<DiskRequest> requests;
        for (size_t i = 0; i < blocks_.size(); ++i) {
            const MovedBlock& b = *blocks_[i];
            DiskRequest r;
            r.kind = DiskRequest::Kind::kRead;
            r.slot = b.from.slot;
            r.bytes = pool.pages.geometry.slot_bytes(b.to.kind);
            r.memory = b.to.address;
            r.on_device = is_on_device(sharing_, b.to);
            r.identity = b.item->block->identity(b.item->index, b.from.keys);
            r.tag = i;
            requests.push_back(std::move(r));
        }
        submit(requests);
    }
    void finish() override {
        DiskTransfer::finish();
        if (sharing_.pool.device && is_of_devices(to_)) check_on_device();
    }

  private:
    // The tier has checked the bytes that it read, but not the device's copy of them.
    void check_on_device() {
        MovedBlocks arrived;
        std::vector<PlacedBlock> placed;
        for (MovedBlock* b : blocks_) {
            if (!b->status.ok()) continue;
            arrived.push_back(b);
            placed.push_back({b->item->block.get(), b->item->index, b->to.address, b->to.kind});
        }
        if (placed.empty()) return;
        std::vector<Status> statuses(placed.size());
        const Status all = verifier_in(sharing_.pool, to_).verify(placed, statuses);
        for (size_t i = 0; i < arrived.size(); ++i) arrived[i]->status = all.ok() ? std::move(statuses[i]) : all.clone();
    }

    const TierKind to_;
};

}  // namespace

std::unique_ptr<Transfer> make_disk_write(MoveSharing& sharing, MovedBlocks blocks, DiskWork* disk_work) {
    return std::make_unique<DiskWrite>(sharing, std::move(blocks), disk_work);
}

std::unique_ptr<Transfer> make_disk_read(MoveSharing& sharing, MovedBlocks blocks, TierKind to, DiskWork* disk_work) {
    return std::make_unique<DiskRead>(sharing, std::move(blocks), to, disk_work);
}

}  // namespace ta
