// Moves between tiers that a CPU reads. Copies and checks at the same time.
#include <cstring>
#include <utility>

#include "tiering/move/transfers/transfer.h"

namespace ta {
namespace {

class MemoryTransfer final : public Transfer {
  public:
    MemoryTransfer(MoveSharing& sharing, MovedBlocks blocks) : sharing_(sharing), blocks_(std::move(blocks)) {}
    void start() override {}
    void finish() override {
        const Geometry& g = sharing_.pool.pages.geometry;
        PageWork work(sharing_, blocks_);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            const MovedBlock& b = *blocks_[i];
            if (b.falls()) write_fallen_trailer(sharing_, b, b.to.address);
            work.add(i, b.falls() ? 1 : g.layers);
        }
        work.run([&](size_t i, uint32_t first, uint32_t n) {
            const MovedBlock& b = *blocks_[i];
            if (b.falls()) return encode_fallen(sharing_, b, b.from.address, b.to.address, first, n);
            std::memcpy(b.to.address, b.from.address, g.slot_bytes(b.to.kind));
            return check_pages(sharing_, b, b.to.address, b.to.kind, first, n);
        });
    }

  private:
    MoveSharing& sharing_;
    const MovedBlocks blocks_;
};

}  // namespace

std::unique_ptr<Transfer> make_memory_transfer(MoveSharing& sharing, MovedBlocks blocks) {
    return std::make_unique<MemoryTransfer>(sharing, std::move(blocks));
}

}  // namespace ta
