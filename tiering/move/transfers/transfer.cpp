#include "tiering/move/transfers/transfer.h"

#include <algorithm>
#include <utility>

#include "tiering/store/fall.h"

namespace ta {

Way way_of(const MoveSharing& sharing, const MovedBlock& block) {
    if (block.to.tier == TierKind::kDisk) return Way::kToDisk;
    if (block.from.tier == TierKind::kDisk) return Way::kFromDisk;
    return sharing.pool.device ? Way::kByDevice : Way::kInMemory;
}

std::unique_ptr<Transfer> make_transfer(Way way, MoveSharing& sharing, MovedBlocks blocks, TierKind to, MoveReason reason,
                                        DiskWork* disk_work) {
    switch (way) {
        case Way::kByDevice:
            return make_device_transfer(sharing, std::move(blocks), to, reason);
        case Way::kToDisk:
            return make_disk_write(sharing, std::move(blocks), disk_work);
        case Way::kFromDisk:
            return make_disk_read(sharing, std::move(blocks), to, disk_work);
        case Way::kInMemory:
            break;
    }
    return make_memory_transfer(sharing, std::move(blocks));
}

void fail_all(const MovedBlocks& blocks, const Status& status) {
    for (MovedBlock* b : blocks) {
        if (b->status.ok()) b->status = status.clone();
    }
}

bool is_on_device(const MoveSharing& sharing, const Place& place) {
    return sharing.pool.device && is_of_devices(place.tier);
}

BlockVerifier& verifier_in(const MoveHost& pool, TierKind tier) {
    return tier == TierKind::kPeer ? *pool.peer_verifier : *pool.verifier;
}

// A block without pages still has a trailer, so it counts as one piece.
void PageWork::add(size_t i, uint32_t pages) {
    const uint32_t all = sharing_.pool.pages.geometry.pages_of(blocks_[i]->to.kind);
    for (uint32_t first = 0; first == 0 || first < all; first += pages)
        pieces_.push_back({i, first, std::min(pages, all - first)});
}

Status check_pages(const MoveSharing& sharing, const MovedBlock& b, const uint8_t* slot, PageKind kind, uint32_t first,
                   uint32_t n) {
    const Pages& pages = sharing.pool.pages;
    TA_RETURN_IF_ERROR(verify_trailer(pages.geometry, kind, slot, pages.fingerprint, b.item->index, b.item->block->content_id(),
                                      uint32_t(kPageTokens)));
    return verify_pages(pages.geometry, kind, slot, b.item->index, first, n);
}

void write_fallen_trailer(const MoveSharing& sharing, const MovedBlock& b, uint8_t* to) {
    const Pages& pages = sharing.pool.pages;
    write_trailer(pages.geometry, b.to.kind, to, pages.fingerprint, b.item->index, b.item->block->content_id(),
                  uint32_t(kPageTokens), false);
}

Status encode_fallen(const MoveSharing& sharing, const MovedBlock& b, const uint8_t* from, uint8_t* to, uint32_t first,
                     uint32_t n) {
    const Pages& pages = sharing.pool.pages;
    TA_RETURN_IF_ERROR(check_pages(sharing, b, from, b.from.kind, first, n));
    TA_RETURN_IF_ERROR(encode_lower(pages, from, b.from.kind, to, b.to.kind, first, n));
    write_page_hashes(pages.geometry, b.to.kind, to, first, n);
    return {};
}

}  // namespace ta
