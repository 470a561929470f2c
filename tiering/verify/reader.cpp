#include "tiering/verify/reader.h"

#include <cstring>
#include <vector>

#include "tiering/disk/latch.h"

namespace ta {

Status BlockReader::ask_disk(const DiskRequest& request) const {
    DiskLatch latch(1);
    Result<DiskBatch> batch = disk_->submit({&request, 1}, latch);
    Status s = batch.ok() ? std::move(latch.wait()[0].status) : std::move(batch).status();
    return s.ok() ? std::move(s) : std::move(s).block(int64_t(request.identity.block_index));
}

Status BlockReader::read_memory(const Place& place, uint8_t* to) const {
    const size_t bytes = pages_.geometry.slot_bytes(place.kind);
    if (device_ && is_of_devices(place.tier)) return device_->read(to, place.address, bytes);
    std::memcpy(to, place.address, bytes);
    return {};
}

Status BlockReader::read(const Block& block, uint64_t index, uint8_t* slot) const {
    std::vector<uint8_t> scratch;
    Status s;
    // The block may leave a place, and another block get it, before the disk is asked: tries again.
    constexpr int kMostPlaces = 4;
    for (int i = 0; i < kMostPlaces; ++i) {
        const Place place = store_.place_of(block);
        if (!slot || !scratch.empty()) {
            scratch.resize(pages_.geometry.slot_bytes(place.kind));
            slot = scratch.data();
        }
        s = read_place(block, index, place, slot);
        const Place now = store_.place_of(block);
        if (s.ok() || (now.tier == place.tier && now.slot.index == place.slot.index)) break;
    }
    return s;
}

Status BlockReader::read_place(const Block& block, uint64_t index, const Place& place, uint8_t* slot) const {
    if (place.tier != TierKind::kDisk) {  // it came up meanwhile
        TA_RETURN_IF_ERROR(read_memory(place, slot));
        return block.verify(pages_.geometry, pages_.fingerprint, index, slot, place.kind);
    }
    DiskRequest r;
    r.slot = place.slot;
    r.bytes = pages_.geometry.slot_bytes(place.kind);
    r.memory = slot;
    r.identity = block.identity(index, place.keys);
    return ask_disk(r);  // checks the block's hashes
}

}  // namespace ta
