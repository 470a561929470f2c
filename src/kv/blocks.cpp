#include "src/kv/blocks.h"

#include <algorithm>
#include <cstring>

#include "kernels/format/hash.h"
#include "kernels/format/slot.h"

namespace ta {
namespace {

constexpr size_t kCachedSlots = 64;  // of each kind

SlotTrailer* trailer_of(const Geometry& g, PageKind kind, uint8_t* slot) {
    return reinterpret_cast<SlotTrailer*>(slot + g.payload_bytes(kind));
}

PageIdentity identity_of(const SlotTrailer& t, const Geometry& g, uint32_t layer) {
    PageIdentity id{};
    id.fingerprint = t.fingerprint;
    id.block_index = t.block_index;
    id.content_id = t.content_id;
    id.layer = layer;
    id.tokens = t.tokens;
    id.magic = t.magic;
    id.version = t.version;
    id.kind = t.kind;
    id.payload_bytes = g.page_bytes(PageKind(t.kind), layer);
    return id;
}

uint64_t hash_of(const Geometry& g, PageKind kind, const SlotTrailer& t, const uint8_t* slot, uint32_t layer) {
    return page_hash(identity_of(t, g, layer), slot + g.page_offset(kind, layer));
}

}  // namespace

Block::~Block() {
    store_.release(kind_, slot_);
}

void Block::seal(const Geometry& g, uint64_t fingerprint, uint64_t block_index, uint32_t tokens) {
    SlotTrailer* t = trailer_of(g, kind_, slot_);
    *t = SlotTrailer{};
    t->magic = kSlotMagic;
    t->version = kFormatVersion;
    t->kind = uint8_t(kind_);
    t->fingerprint = fingerprint;
    t->block_index = block_index;
    t->content_id = content_id_;
    t->tokens = tokens;
    t->layers = g.layers;
    auto* hashes = reinterpret_cast<uint64_t*>(t + 1);
    sealed_ = tokens == kPageTokens;
    const size_t used = size_t(reinterpret_cast<uint8_t*>(hashes + g.layers) - slot_);
    std::memset(slot_ + used, 0, g.slot_bytes(kind_) - used);
    for (uint32_t layer = 0; layer < g.layers; ++layer) hashes[layer] = sealed_ ? hash_of(g, kind_, *t, slot_, layer) : 0;
}

void Block::unseal(uint64_t content_id) {
    content_id_ = content_id;
    sealed_ = false;
}

Status Block::verify(const Geometry& g, uint64_t fingerprint, uint64_t block_index) const {
    const SlotTrailer* t = trailer_of(g, kind_, slot_);
    if (t->magic != kSlotMagic || t->version != kFormatVersion || t->kind != uint8_t(kind_) || t->fingerprint != fingerprint ||
        t->block_index != block_index || t->content_id != content_id_ || t->tokens != uint32_t(kPageTokens) ||
        t->layers != g.layers) {
        return fail(TA_E_CORRUPT, "the block's trailer does not name the block that is asked for").block(int64_t(block_index));
    }
    const auto* hashes = reinterpret_cast<const uint64_t*>(t + 1);
    for (uint32_t layer = 0; layer < g.layers; ++layer) {
        if (hash_of(g, kind_, *t, slot_, layer) == hashes[layer]) continue;
        return fail(TA_E_CORRUPT, "a page in the device tier does not match its hash").layer(layer).block(int64_t(block_index));
    }
    return {};
}

BlockStore::~BlockStore() {
    trim();
}

void BlockStore::trim() {
    std::lock_guard lock(mutex_);
    free_cached(PageKind::kToken);
    free_cached(PageKind::kChannel);
}

void BlockStore::free_cached(PageKind kind) {
    auto& list = cached_[size_t(kind)];
    const size_t bytes = geometry_.slot_bytes(kind);
    for (uint8_t* slot : list) allocator_.deallocate(slot, bytes, kSlotAlignment);
    held_ -= list.size() * bytes;
    list.clear();
}

Result<BlockPtr> BlockStore::acquire(PageKind kind) {
    const size_t bytes = geometry_.slot_bytes(kind);
    uint8_t* slot = nullptr;
    {
        std::lock_guard lock(mutex_);
        auto& list = cached_[size_t(kind)];
        list.reserve(kCachedSlots);  // so that release never allocates
        if (!list.empty()) {
            slot = list.back();
            list.pop_back();
        } else {
            const PageKind other = kind == PageKind::kToken ? PageKind::kChannel : PageKind::kToken;
            if (held_ + bytes > budget_) free_cached(other);
            if (held_ + bytes > budget_) {
                return fail(TA_E_TIER_FULL, "the device tier holds %llu of %llu bytes; a %s block needs %zu more",
                            (unsigned long long)held_, (unsigned long long)budget_,
                            kind == PageKind::kToken ? "token" : "channel", bytes);
            }
            slot = static_cast<uint8_t*>(allocator_.allocate(bytes, kSlotAlignment));
            if (!slot) return fail(TA_E_MEMORY, "the allocator has no %zu bytes for a block", bytes);
            held_ += bytes;
        }
        ++in_use_[size_t(kind)];
        const uint64_t used = in_use_[0] * geometry_.token_slot_bytes + in_use_[1] * geometry_.channel_slot_bytes;
        peak_ = std::max(peak_, used);
    }
    try {
        return std::make_shared<Block>(*this, kind, slot, next_content_id());
    } catch (const std::bad_alloc&) {
        release(kind, slot);
        return fail(TA_E_MEMORY, "no memory for a block's bookkeeping");
    }
}

void BlockStore::release(PageKind kind, uint8_t* slot) {
    std::lock_guard lock(mutex_);
    --in_use_[size_t(kind)];
    auto& list = cached_[size_t(kind)];
    if (list.size() < list.capacity() && list.size() < kCachedSlots) {
        list.push_back(slot);
        return;
    }
    const size_t bytes = geometry_.slot_bytes(kind);
    allocator_.deallocate(slot, bytes, kSlotAlignment);
    held_ -= bytes;
}

BlockStore::Usage BlockStore::usage() const {
    std::lock_guard lock(mutex_);
    Usage u;
    u.token_blocks = in_use_[0];
    u.channel_blocks = in_use_[1];
    u.used = in_use_[0] * geometry_.token_slot_bytes + in_use_[1] * geometry_.channel_slot_bytes;
    u.cached = held_ - u.used;
    u.peak = peak_;
    return u;
}

}  // namespace ta
