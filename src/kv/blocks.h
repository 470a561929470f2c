// Blocks: reference-counted slots under a byte budget.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "src/core/memory.h"
#include "src/kv/geometry.h"
#include "src/kv/slot_memory.h"

namespace ta {

class BlockStore;

// One slot with its bytes. Immutable once committed and full; an open block is written by the one plan that holds its sequence.
// Shared between sequences by shared_ptr; the last owner gives the slot back.
class Block {
  public:
    Block(BlockStore& store, PageKind kind, uint8_t* slot, uint64_t content_id)
        : store_(store), slot_(slot), content_id_(content_id), kind_(kind) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    PageKind kind() const { return kind_; }
    uint8_t* slot() const { return slot_; }
    uint64_t content_id() const { return content_id_; }
    // True when the trailer holds the hashes of all pages.
    bool sealed() const { return sealed_; }

    // Writes the trailer: identity, and one hash per page when `tokens` is 64.
    void seal(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens);
    // The same into a host copy of the slot.
    void write_trailer(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index, uint32_t tokens,
                       uint8_t* slot) const;
    // The same was enqueued where the block's bytes are.
    void mark_sealed() { sealed_ = true; }
    // The block will be written again: its hashes no longer hold, and it becomes new content.
    void unseal(uint64_t content_id);
    // Recomputes the hashes of a sealed block. TA_E_CORRUPT names the layer.
    Status verify(const Geometry& geometry, uint64_t fingerprint, uint64_t block_index) const;

  private:
    BlockStore& store_;
    uint8_t* slot_;
    uint64_t content_id_;
    PageKind kind_;
    bool sealed_ = false;
};

using BlockPtr = std::shared_ptr<Block>;

// A full block and its index in the sequence.
struct PlacedBlock {
    Block* block;
    uint64_t index;
};

// Whether the slot's bytes, wherever they lie in host memory, are the block that these name: its trailer, and with 64 tokens the
// hash of every page. TA_E_CORRUPT names the layer.
Status verify_slot(const Geometry& geometry, PageKind kind, const uint8_t* slot, uint64_t fingerprint, uint64_t block_index,
                   uint64_t content_id, uint32_t tokens);

// Hands out slots of both kinds and keeps freed ones for reuse. All bytes it holds, in use or cached, stay within the budget.
class BlockStore {
  public:
    BlockStore(Allocator& allocator, Device* device, const Geometry& geometry, uint64_t budget);
    // With a device, before anything else: its memory for the whole budget.
    Status take_slab();
    ~BlockStore();
    BlockStore(const BlockStore&) = delete;
    BlockStore& operator=(const BlockStore&) = delete;

    // One block for each kind in `wanted`, in that order, or none and nothing changed. Their bytes are unspecified: kernels never
    // read slots of tokens that were not written. TA_E_TIER_FULL beyond the budget, `failed` is then the first that does not fit;
    // TA_E_MEMORY when the allocator has none.
    Result<std::vector<BlockPtr>> acquire(std::span<const PageKind> wanted, size_t* failed = nullptr);
    // Gives the slots kept for reuse back to the allocator.
    void trim();
    uint64_t next_content_id() { return content_ids_.fetch_add(1, std::memory_order_relaxed); }

    struct Usage {
        uint64_t used = 0, cached = 0, peak = 0, token_blocks = 0, channel_blocks = 0;
    };
    Usage usage() const;
    uint64_t budget() const { return budget_; }

  private:
    friend class Block;
    void release(PageKind kind, uint8_t* slot);
    void free_cached(PageKind kind, size_t keep);
    void put_back(PageKind kind, uint8_t* slot);
    Status beyond_budget(std::span<const PageKind> wanted, uint64_t in_use, size_t* failed) const;

    const Geometry& geometry_;
    const uint64_t budget_;
    std::atomic<uint64_t> content_ids_{1};
    mutable std::mutex mutex_;
    std::unique_ptr<SlotSlab> slab_;  // with a device
    SlotMemory memory_[2];            // by PageKind, as all below
    std::vector<uint8_t*> cached_[2];
    uint64_t in_use_[2] = {0, 0};  // slots
    uint64_t held_ = 0;            // bytes, in use and cached
    uint64_t peak_ = 0;            // bytes in use
};

}  // namespace ta
