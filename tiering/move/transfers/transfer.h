// Carries the blocks of a part from one tier to another. Each way has a file. A new way gets a file of its own and a case in
// make_transfer().
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tiering/move/sharing.h"

namespace ta {

// A block on its way.
struct MovedBlock {
    const MoveItem* item;
    Place from, to;
    Status status;
    bool over = false;
    bool cancelled = false;               // by the disk tier; the status says so
    std::optional<MoveRoute> route = {};  // the route of the copy, if a device copied
    bool falls() const { return from.kind != to.kind; }
};

// A transfer never changes a block's place; it says with `status` whether its bytes are at `to`. Used by one thread at a time.
class Transfer {
  public:
    // Waits until nothing touches the blocks' memory any more.
    virtual ~Transfer() = default;
    virtual void start() = 0;
    // Waits for what is on its way. The status of what arrived intact is OK.
    virtual void finish() = 0;
    // True if finish() hashes with the checkers.
    virtual bool wants_checkers() const { return false; }
};

using MovedBlocks = std::vector<MovedBlock*>;  // of one part; they have room at `to`, and outlive the transfer

// Ways between tiers.
enum class Way : uint8_t {
    kInMemory,  // on a CPU
    kByDevice,  // by a device that reaches both places
    kToDisk,
    kFromDisk,
};
Way way_of(const MoveSharing& sharing, const MovedBlock& block);
// `disk_work`: nullptr if nobody may cancel the move.
std::unique_ptr<Transfer> make_transfer(Way way, MoveSharing& sharing, MovedBlocks blocks, TierKind to, MoveReason reason,
                                        DiskWork* disk_work);

std::unique_ptr<Transfer> make_memory_transfer(MoveSharing& sharing, MovedBlocks blocks);
std::unique_ptr<Transfer> make_device_transfer(MoveSharing& sharing, MovedBlocks blocks, TierKind to, MoveReason reason);
std::unique_ptr<Transfer> make_disk_write(MoveSharing& sharing, MovedBlocks blocks, DiskWork* disk_work);
std::unique_ptr<Transfer> make_disk_read(MoveSharing& sharing, MovedBlocks blocks, TierKind to, DiskWork* disk_work);

// ---- what several ways need

void fail_all(const MovedBlocks& blocks, const Status& status);
// True if the place is device memory, which a CPU reads only through the device.
bool is_on_device(const MoveSharing& sharing, const Place& place);

// The verifier of the device that has the tier.
BlockVerifier& verifier_in(const MoveHost& pool, TierKind tier);

// Work on pages of blocks, for several threads.
class PageWork {
  public:
    PageWork(MoveSharing& sharing, const MovedBlocks& blocks) : sharing_(sharing), blocks_(blocks) {}
    // Adds all pages of blocks[i], in pieces of `pages`.
    void add(size_t i, uint32_t pages);
    // Calls work(i, first place, number of pages) for all pieces, on the checkers. A block gets the status of its first
    // failure.
    template <class Work>
    void run(Work&& work) {
        std::lock_guard lock(sharing_.checking);
        sharing_.checkers.parallel_for(int64_t(pieces_.size()), 1, [&](int64_t i, int) {
            const Piece& piece = pieces_[size_t(i)];
            Status s = work(piece.block, piece.first, piece.n);
            if (s.ok()) return;
            std::lock_guard one(failing_);
            MovedBlock& block = *blocks_[piece.block];
            if (block.status.ok()) block.status = std::move(s);
        });
    }

  private:
    struct Piece {
        size_t block;
        uint32_t first, n;  // places of pages in the slot
    };
    MoveSharing& sharing_;
    const MovedBlocks& blocks_;
    std::vector<Piece> pieces_;
    std::mutex failing_;
};

// Checks that pages [first, first + n) at `slot`, in host memory, and the trailer there are the block's.
Status check_pages(const MoveSharing& sharing, const MovedBlock& block, const uint8_t* slot, PageKind kind, uint32_t first,
                   uint32_t n);
// Re-encode a falling block. It gets new hashes, so encode_fallen() checks the old ones first. write_fallen_trailer() comes
// first and writes no hashes. encode_fallen() encodes pages [first, first + n), from a copy of the block in host memory.
void write_fallen_trailer(const MoveSharing& sharing, const MovedBlock& block, uint8_t* to);
Status encode_fallen(const MoveSharing& sharing, const MovedBlock& block, const uint8_t* from, uint8_t* to, uint32_t first,
                     uint32_t n);

}  // namespace ta
