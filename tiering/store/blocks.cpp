#include "tiering/store/blocks.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "src/core/checked.h"

namespace ta {
namespace {

constexpr size_t kCachedSlots = 64;  // of each kind

}  // namespace

Block::~Block() {
    if (prefetch_.waste()) ++store_.prefetches_.wasted;
    store_.release(*this);
}

bool Block::has_pages() const {
    return store_.geometry_.pages_of(kind()) > 0;
}

void Block::seal(const Geometry& g, uint64_t fingerprint, uint64_t block_index, uint32_t tokens) {
    write_trailer(g, fingerprint, block_index, tokens, slot());
    if (tokens == kPageTokens) mark_sealed();
}

void Block::write_trailer(const Geometry& g, uint64_t fingerprint, uint64_t block_index, uint32_t tokens, uint8_t* slot) const {
    ta::write_trailer(g, kind(), slot, fingerprint, block_index, content_id_, tokens, true);
}

Status Block::verify(const Geometry& g, uint64_t fingerprint, uint64_t block_index, const uint8_t* slot, PageKind kind) const {
    return verify_slot(g, kind, slot, fingerprint, block_index, content_id_, uint32_t(kPageTokens));
}

BlockStore::BlockStore(Allocator& allocator, Device* device, const Geometry& geometry, uint64_t budget)
    : geometry_(geometry),
      budget_(budget),
      device_(device),
      has_hooks_(allocator.has_hooks()),
      slab_(device ? std::make_unique<SlotSlab>(*device) : nullptr),
      memory_{{allocator, slab_.get(), 0, geometry.token_slot_bytes, budget},
              {allocator, slab_.get(), 1, geometry.channel_slot_bytes, budget},
              {allocator, slab_.get(), 2, geometry.low_slot_bytes, budget},
              {allocator, slab_.get(), 3, geometry.passed_token_slot_bytes, budget},
              {allocator, slab_.get(), 4, geometry.passed_channel_slot_bytes, budget}},
      absent_(without_bytes()) {}

BlockPtr BlockStore::forgotten() {
    BlockPtr block = without_bytes();
    has_forgotten_.store(true, std::memory_order_release);
    return block;
}

BlockPtr BlockStore::without_bytes() {
    auto block = std::make_shared<Block>(*this, PageKind::kToken, nullptr, 0);
    block->dropped_ = true;
    return block;
}

Status BlockStore::take_slab() {
    size_t strides[kPageKinds], slots[kPageKinds];
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        const size_t bytes = geometry_.slot_bytes(PageKind(kind));
        strides[kind] = memory_[kind].stride();
        // Passed blocks are few, and mostly padding: the slab is not sized for a pool full of them.
        slots[kind] = bytes ? size_t(budget_ / (is_passed(PageKind(kind)) ? strides[kind] : bytes)) : 0;
    }
    if (budget_ < uint64_t{1} << 48 && slab_->take(slots, strides)) return {};
    return fail(TA_E_MEMORY, "the GPU has no memory for a pool of %llu bytes", (unsigned long long)budget_)
        .tier(TA_TIER_DEVICE)
        .bytes(budget_);
}

BlockStore::~BlockStore() {
    promised_ = {};
    trim();
}

void BlockStore::trim() {
    std::lock_guard lock(mutex_);
    for (size_t kind = 0; kind < kPageKinds; ++kind) free_cached(PageKind(kind), 0);
}

void BlockStore::free_cached(PageKind kind, size_t keep) {
    auto& list = cached_[size_t(kind)];
    while (list.size() > std::max<uint64_t>(keep, promised_[size_t(kind)])) {
        give(kind, list.back());
        list.pop_back();
    }
}

Result<std::vector<BlockPtr>> BlockStore::acquire(std::span<const PageKind> wanted, size_t* failed,
                                                  std::span<const Tenant> tenants, const SlotCounts& promised) {
    std::vector<BlockPtr> blocks;
    std::vector<AcquiredSlot> slots;
    blocks.reserve(wanted.size());
    TA_RETURN_IF_ERROR(take_slots(wanted, slots, failed, promised));
    Status s;
    try {
        s = clear(wanted, slots, tenants);
        for (size_t i = 0; s.ok() && i < wanted.size(); ++i) {
            blocks.push_back(std::make_shared<Block>(*this, wanted[i], slots[i].slot, next_content_id()));
            if (!tenants.empty()) blocks.back()->set_tenant(tenants[i]);
        }
    } catch (const std::bad_alloc&) {
        s = fail(TA_E_MEMORY, "no memory for a block's bookkeeping");
    }
    if (s.ok()) return blocks;
    {
        std::lock_guard lock(mutex_);
        promised_ = sum_of(promised_, promised);
    }
    for (size_t i = blocks.size(); i < wanted.size(); ++i) release_slot(wanted[i], slots[i].slot, kUnknownTenant);
    return s;
}

// Zeroes slots with another tenant's bytes. Not under the lock: it takes as long as writing them.
Status BlockStore::clear(std::span<const PageKind> wanted, std::span<const AcquiredSlot> slots,
                         std::span<const Tenant> tenants) {
    std::vector<DeviceRange> ranges;
    for (size_t i = 0; i < slots.size(); ++i) {
        const Tenant tenant = tenants.empty() ? 0 : tenants[i];
        if (slots[i].tenant == kNobody) continue;
        if (slots[i].tenant == tenant && tenant != kUnknownTenant) continue;  // two unknown tenants may differ
        ranges.push_back({slots[i].slot, geometry_.slot_bytes(wanted[i])});
    }
    if (device_ && !ranges.empty()) return device_->zero(ranges);
    for (const DeviceRange& r : ranges) std::memset(r.memory, 0, r.bytes);
    return {};
}

Result<std::vector<uint8_t*>> BlockStore::acquire_slots(std::span<const PageKind> wanted, size_t* failed) {
    std::vector<AcquiredSlot> taken;
    std::vector<uint8_t*> slots;
    slots.reserve(wanted.size());
    TA_RETURN_IF_ERROR(take_slots(wanted, taken, failed));
    for (const AcquiredSlot& t : taken) slots.push_back(t.slot);
    return slots;
}

std::vector<BlockStore::Scratch> BlockStore::acquire_scratch(PageKind kind, size_t most) {
    std::vector<Scratch> scratch;
    {
        std::lock_guard lock(mutex_);
        most = size_t(std::min<uint64_t>(most, bytes_free() / geometry_.slot_bytes(kind)));
    }
    // Fragmentation may leave fewer slots, and others may take some meanwhile: tries with half as many, and so on.
    std::vector<PageKind> wanted(most, kind);
    std::vector<AcquiredSlot> taken;
    scratch.reserve(most);
    for (; !wanted.empty(); wanted.resize(wanted.size() / 2)) {
        taken.clear();
        if (!take_slots(wanted, taken, nullptr, {}, true).ok()) continue;
        for (const AcquiredSlot& t : taken) scratch.push_back({t.slot, t.tenant});
        break;
    }
    return scratch;
}

void BlockStore::release_scratch(PageKind kind, const Scratch& scratch, Tenant tenant) {
    tenant = zero_if_given(kind, scratch.slot, scratch.tenant == tenant ? tenant : kUnknownTenant);
    std::lock_guard lock(mutex_);
    --scratch_[size_t(kind)];  // before the signal of free_place()
    free_place({TierKind::kDevice, kind, scratch.slot, {}, {}}, tenant);
}

bool BlockStore::has_scratch() const {
    std::lock_guard lock(mutex_);
    return std::any_of(std::begin(scratch_), std::end(scratch_), [](uint64_t n) { return n > 0; });
}

// If there is no more memory, first gives cached slots back, all but `keep` of each kind: a region of a slab serves one kind
// for as long as one of its slots is cached.
uint8_t* BlockStore::take_memory(PageKind kind, const SlotCounts& keep) {
    SlotMemory& memory = memory_[size_t(kind)];
    if (uint8_t* slot = memory.take()) return slot;
    for (size_t k = 0; k < kPageKinds; ++k) free_cached(PageKind(k), keep[k]);
    return memory.take();
}

// Takes a slot that is not in cached_.
Result<BlockStore::AcquiredSlot> BlockStore::cut_slot(PageKind kind, const SlotCounts& keep) {
    const size_t bytes = geometry_.slot_bytes(kind);
    if (uint8_t* slot = take_memory(kind, keep)) {
        held_ += bytes;
        return AcquiredSlot{slot, true,
                            slab_has_tenants_ || (has_hooks_ && !slab_) ? kUnknownTenant : 0};  // memory from hooks may have
                                                                                                // anybody's bytes
    }
    if (!slab_) return fail(TA_E_MEMORY, "the allocator has no %zu bytes for a block", bytes).tier(TA_TIER_DEVICE).bytes(bytes);
    return fail(TA_E_TIER_FULL, "the device tier is fragmented: no room for a slot of %zu bytes between the others", bytes)
        .tier(TA_TIER_DEVICE)
        .bytes(bytes);
}

// Reserves capacity, so that releasing slots never allocates.
void BlockStore::reserve_cached() {
    for (size_t kind = 0; kind < kPageKinds; ++kind) cached_[kind].reserve(kCachedSlots + promised_[kind]);
}

Status BlockStore::take_slots(std::span<const PageKind> wanted, std::vector<AcquiredSlot>& slots, size_t* failed,
                              const SlotCounts& promised, bool as_scratch) {
    slots.reserve(wanted.size());
    SlotCounts need{};
    for (PageKind kind : wanted) ++need[size_t(kind)];
    const uint64_t more = bytes_of(need), of_promises = bytes_of(promised);
    std::lock_guard lock(mutex_);
    if (const uint64_t free = bytes_free(); more - of_promises > free) return beyond_budget(wanted, free + of_promises, failed);
    reserve_cached();
    for (size_t kind = 0; kind < kPageKinds; ++kind) promised_[kind] -= promised[kind];
    // Gives cached slots back that are not wanted now, to make room. Slots promised to others stay. Some promised slots may
    // still be in use.
    SlotCounts reused{};
    uint64_t to_take = more;
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        const uint64_t cached = cached_[kind].size();
        const uint64_t unpromised = cached - std::min(cached, promised_[kind]);
        reused[kind] = std::min(need[kind], std::max(unpromised, std::min(cached, promised[kind])));
        to_take -= reused[kind] * geometry_.slot_bytes(PageKind(kind));
    }
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        if (to_take > budget_ - std::min(budget_, held_)) free_cached(PageKind(kind), promised_[kind] + reused[kind]);
    }
    for (PageKind kind : wanted) {
        auto& list = cached_[size_t(kind)];
        if (reused[size_t(kind)] > 0) {
            --reused[size_t(kind)];
            slots.push_back({list.back().slot, false, list.back().tenant});
            list.pop_back();
            continue;
        }
        Result<AcquiredSlot> fresh = cut_slot(kind, sum_of(promised_, reused));
        if (fresh.ok()) {
            slots.push_back(fresh.value());
            continue;
        }
        promised_ = sum_of(promised_, promised);
        for (size_t i = slots.size(); i-- > 0;) {
            const Cached back{slots[i].slot, slots[i].tenant};
            if (slots[i].fresh) {
                give(wanted[i], back);
            } else {
                cached_[size_t(wanted[i])].push_back(back);
            }
        }
        return std::move(fresh).status();
    }
    in_use_ = sum_of(in_use_, need);
    if (as_scratch) scratch_ = sum_of(scratch_, need);
    peak_ = std::max(peak_, bytes_in_use());
    return {};
}

Status BlockStore::promise(SlotCounts& promise, const SlotCounts& to) {
    SlotCounts more{};
    for (size_t kind = 0; kind < kPageKinds; ++kind) more[kind] = to[kind] - std::min(to[kind], promise[kind]);
    {
        std::lock_guard lock(mutex_);
        const uint64_t wanted = bytes_of(more), free = bytes_free();
        if (wanted > free) {
            return fail(TA_E_TIER_FULL, "the device tier has %llu bytes that are neither in use nor promised; this needs %llu",
                        (unsigned long long)free, (unsigned long long)wanted)
                .tier(TA_TIER_DEVICE)
                .bytes(wanted - free);
        }
        const SlotCounts before = promised_;
        promised_ = sum_of(promised_, more);
        Status s;
        try {
            reserve_cached();
            for (size_t kind = 0; kind < kPageKinds; ++kind) {
                while (s.ok() && wanted > 0 && cached_[kind].size() < promised_[kind]) {
                    for (size_t other = 0; other < kPageKinds; ++other) {
                        if (held_ + geometry_.slot_bytes(PageKind(kind)) > budget_) free_cached(PageKind(other), 0);
                    }
                    Result<AcquiredSlot> slot = cut_slot(PageKind(kind), {});
                    if (slot.ok()) cached_[kind].push_back({slot.value().slot, slot.value().tenant});
                    s = slot.ok() ? Status() : std::move(slot).status();
                }
            }
        } catch (const std::bad_alloc&) {
            s = fail(TA_E_MEMORY, "no memory for a promise's bookkeeping");
        }
        if (!s.ok()) {
            promised_ = before;
            for (size_t kind = 0; kind < kPageKinds; ++kind) free_cached(PageKind(kind), kCachedSlots);
            return s;
        }
        for (size_t kind = 0; kind < kPageKinds; ++kind) promise[kind] += more[kind];
    }
    settle(promise, to);
    return {};
}

void BlockStore::settle(SlotCounts& promise, const SlotCounts& to) {
    std::lock_guard lock(mutex_);
    bool fewer = false;
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        promised_[kind] = promised_[kind] - promise[kind] + to[kind];
        fewer = fewer || to[kind] < promise[kind];
        if (to[kind] < promise[kind]) free_cached(PageKind(kind), kCachedSlots);
    }
    promise = to;
    try {
        reserve_cached();
    } catch (const std::bad_alloc&) {
        // Slots that find no capacity go back to the allocator or slab.
    }
    if (fewer) room_signal_.notify();
}

uint64_t BlockStore::bytes_of(const SlotCounts& slots) const {
    uint64_t bytes = 0;
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        const uint64_t of_kind = checked_mul(slots[kind], uint64_t{geometry_.slot_bytes(PageKind(kind))}).value_or(UINT64_MAX);
        bytes = checked_add(bytes, of_kind).value_or(UINT64_MAX);
    }
    return bytes;
}

uint64_t BlockStore::bytes_free() const {
    const uint64_t taken = bytes_in_use() + bytes_of(promised_);
    return budget_ - std::min(budget_, taken);
}

Status BlockStore::beyond_budget(std::span<const PageKind> wanted, uint64_t free, size_t* failed) const {
    uint64_t need = 0;
    size_t fitting = wanted.size();
    for (size_t i = 0; i < wanted.size(); ++i) {
        need += geometry_.slot_bytes(wanted[i]);
        if (fitting == wanted.size() && need > free) fitting = i;
    }
    if (failed) *failed = fitting;
    const uint64_t promised = bytes_of(promised_);
    const std::string promises = promised ? " and has promised " + std::to_string(promised) : "";
    return fail(TA_E_TIER_FULL, "the device tier holds %llu of %llu bytes%s; this needs %llu more",
                (unsigned long long)bytes_in_use(), (unsigned long long)budget_, promises.c_str(), (unsigned long long)need)
        .tier(TA_TIER_DEVICE)
        .bytes(need - free);
}

bool BlockStore::has_room_to_keep(PageKind kind) const {
    const auto& list = cached_[size_t(kind)];
    return list.size() < list.capacity() && list.size() < kCachedSlots + promised_[size_t(kind)];
}

// Zeroes a released slot if it is about to go back to hooks. Done before the lock is taken, since many may go at once. Returns
// whose bytes the slot has afterwards.
Tenant BlockStore::zero_if_given(PageKind kind, uint8_t* slot, Tenant tenant) {
    if (!has_hooks_ || slab_) return tenant;
    {
        std::lock_guard lock(mutex_);
        if (has_room_to_keep(kind)) return tenant;
    }
    std::memset(slot, 0, geometry_.slot_bytes(kind));
    return kNobody;
}

// Keeps a released slot for reuse, or gives it back if there are enough.
void BlockStore::put_back(PageKind kind, const Cached& slot) {
    if (has_room_to_keep(kind)) {
        cached_[size_t(kind)].push_back(slot);
    } else {
        give(kind, slot);
    }
}

// Gives a slot back to the allocator or slab. The system zeroes memory before it hands it out again; hooks may not, so this
// zeroes theirs.
void BlockStore::give(PageKind kind, const Cached& slot) {
    if (slot.tenant != 0 && slab_) slab_has_tenants_ = true;
    if (slot.tenant != kNobody && has_hooks_ && !slab_) std::memset(slot.slot, 0, geometry_.slot_bytes(kind));
    memory_[size_t(kind)].give(slot.slot);
    held_ -= geometry_.slot_bytes(kind);
}

void BlockStore::release_slot(PageKind kind, uint8_t* slot) {
    release_slot(kind, slot, kUnknownTenant);  // a failed move may have left bytes of any tenant there
}

void BlockStore::release_slot(PageKind kind, uint8_t* slot, Tenant tenant) {
    tenant = zero_if_given(kind, slot, tenant);
    std::lock_guard lock(mutex_);
    free_place({TierKind::kDevice, kind, slot, {}, {}}, tenant);
}

void BlockStore::release(const Block& block) {
    if (block.dropped()) return;
    const BlockPtr heir = block.heir_.lock();  // released after the lock
    Tenant tenant = block.tenant();
    if (block.tier() == TierKind::kDevice) tenant = zero_if_given(block.kind(), block.slot(), tenant);
    std::lock_guard lock(mutex_);
    const bool keep = keep_records_.load(std::memory_order_acquire) && block.published();
    const bool has_record = block.record_.index != Slot::kNone;
    const bool is_record = block.tier_ == TierKind::kDisk && block.tier_keys_.state > 0;
    if (is_record && keep && !has_record) return;
    // A bad block's content has been published again elsewhere: its record may be the only intact one.
    const bool replaced = block.is_bad() || heir || (keep && has_record);
    const auto left = [&](Slot record) { return heir && leave_record(*heir, record, block.heir_state_); };
    if (has_record && !keep && !left(block.record_)) give_record(block.record_, replaced);
    if (is_record && left(block.tier_slot_)) {
        on_disk_.fetch_sub(1, std::memory_order_release);
    } else {
        free_place({block.tier_, block.kind_, block.slot(), block.tier_slot_, {}}, tenant, replaced);
    }
    for (const Block::OldRecord& old : block.old_records_) {
        if (!keep && !left(old.slot)) give_record(old.slot, replaced);
    }
}

void BlockStore::replace(Block& block, const BlockPtr& by) noexcept {
    std::lock_guard lock(mutex_);
    block.heir_ = by;
    block.heir_state_ = by->keys_state_;
    if (block.published()) return;
    // Records beside the block are of no more use to it. A record that is its place stays with the block as long as that lives.
    if (block.record_.index != Slot::kNone && leave_record(*by, block.record_, block.heir_state_)) block.record_ = Slot{};
    std::erase_if(block.old_records_, [&](const auto& old) { return leave_record(*by, old.slot, block.heir_state_); });
}

// False: the heir has a record with the key, or is not published any more, or there is no memory for it.
bool BlockStore::leave_record(Block& heir, Slot record, uint64_t state) noexcept {
    const uint64_t of_record = heir.record_.index != Slot::kNone ? heir.record_keys_.state : 0;
    const uint64_t of_place = heir.tier_ == TierKind::kDisk ? heir.tier_keys_.state : 0;
    if (!heir.published() || std::max(of_record, of_place) >= state) return false;
    try {
        heir.old_records_.push_back({record, state});
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// Call when the block has got a record that was written in this state of its keys.
void BlockStore::give_old_records(Block& block, uint64_t state) {
    std::erase_if(block.old_records_, [&](const auto& old) {
        if (state < old.until) return false;
        disk_->retire({&old.slot, 1});
        return true;
    });
}

// Releases all records beside the block.
void BlockStore::release_records(Block& block) {
    if (block.record_.index != Slot::kNone) disk_->release({&block.record_, 1});
    block.record_ = Slot{};
    for (const Block::OldRecord& old : block.old_records_) disk_->release({&old.slot, 1});
    block.old_records_.clear();
}

void BlockStore::give_record(Slot slot, bool replaced) {
    replaced ? disk_->retire({&slot, 1}) : disk_->release({&slot, 1});
}

// `replaced`: the place is a record, and the one that replaces it may not be on the medium yet.
void BlockStore::free_place(const Place& place, Tenant tenant, bool replaced) {
    room_signal_.notify();  // waiters see it after the caller's lock is released
    if (place.tier == TierKind::kDevice) {
        --in_use_[size_t(place.kind)];
        put_back(place.kind, {place.address, tenant});
        return;
    }
    if (place.tier != TierKind::kDisk) return tiers_[place.tier]->release({&place.slot, 1});
    on_disk_.fetch_sub(1, std::memory_order_release);
    give_record(place.slot, replaced);
}

// ------------------------------------------------------------------------------------------------------------------- tiers

void BlockStore::attach(const LowerTiers& tiers) {
    tiers_ = tiers;
    disk_ = tiers[TierKind::kDisk];
}

Place BlockStore::place_of(const Block& block) const {
    std::lock_guard lock(mutex_);
    return place_locked(block);
}

Place BlockStore::place_locked(const Block& block) const {
    return {block.tier_, block.kind_, block.tier_ == TierKind::kDisk ? nullptr : block.slot(), block.tier_slot_,
            block.tier_keys_};
}

bool BlockStore::move(Block& block, const Place& to) {
    BlockPtr heir;  // released after the lock
    std::lock_guard lock(mutex_);
    heir = block.heir_.lock();
    return move_locked(block, to, heir.get());
}

bool BlockStore::move_to_record(Block& block) {
    std::lock_guard lock(mutex_);
    // The record has the block's kind, which is final.
    const Slot record = block.record_;
    if (record.index == Slot::kNone || block.tier_ == TierKind::kDisk || !disk_->holds(record)) return false;
    block.record_ = Slot{};
    if (move_locked(block, {TierKind::kDisk, block.kind_, nullptr, record, block.record_keys_}, nullptr)) return true;
    block.record_ = record;
    return false;
}

void BlockStore::expect_moves(size_t n) {
    std::lock_guard lock(mutex_);
    const size_t wanted = vacated_.size() + expected_moves_ + n;
    if (wanted > vacated_.capacity()) vacated_.reserve(std::max(wanted, 2 * vacated_.capacity()));
    expected_moves_ += n;
}

void BlockStore::end_moves(size_t n) {
    std::lock_guard lock(mutex_);
    expected_moves_ -= n;
}

// `heir`: the block's heir_, for a block that may leave the disk.
bool BlockStore::move_locked(Block& block, const Place& to, Block* heir) {
    if (to.kind != block.kind_ && block.keeps_kind()) return false;
    if (block.refuses(to.tier)) return false;
    const bool is_record = block.tier_ == TierKind::kDisk && block.tier_keys_.state > 0;
    if (is_record && block.published() && block.record_.index == Slot::kNone) {
        block.record_ = block.tier_slot_;  // keeps the record, so that the next process finds the block, too
        block.record_keys_ = block.tier_keys_;
        on_disk_.fetch_sub(1, std::memory_order_release);
    } else if (is_record && heir && !block.published() && leave_record(*heir, block.tier_slot_, block.heir_state_)) {
        on_disk_.fetch_sub(1, std::memory_order_release);
    } else {
        vacated_.push_back({moves_,
                            {block.tier_, block.kind_, block.slot(), block.tier_slot_, {}},
                            block.tenant(),
                            is_record && (block.published() || heir)});
    }
    if (to.tier == TierKind::kDisk) {
        on_disk_.fetch_add(1, std::memory_order_release);
        // The new record replaces an older one, unless a flush has meanwhile written one with more keys.
        if (block.record_.index != Slot::kNone && to.keys.state >= block.record_keys_.state) {
            disk_->retire({&block.record_, 1});
            block.record_ = Slot{};
        }
        give_old_records(block, to.keys.state);
    }
    if (to.tier != TierKind::kDisk) block.stored_.store(Block::pack(to.address, to.kind), std::memory_order_release);
    block.kind_.store(to.kind, std::memory_order_release);
    block.tier_.store(to.tier, std::memory_order_release);
    block.tier_slot_ = to.slot;
    block.tier_keys_ = to.keys;
    moves_.fetch_add(1, std::memory_order_release);
    free_vacated();
    room_signal_.notify();
    return true;
}

void BlockStore::pin(std::span<const BlockPtr> blocks) {
    std::lock_guard lock(mutex_);
    for (const BlockPtr& b : blocks) b->pins_.fetch_add(1, std::memory_order_relaxed);
}

bool BlockStore::promise_readable(std::span<const BlockPtr> blocks) {
    std::lock_guard lock(mutex_);
    const auto on_disk = [](const BlockPtr& b) { return b->tier_ == TierKind::kDisk; };
    if (std::any_of(blocks.begin(), blocks.end(), on_disk)) return false;
    for (const BlockPtr& b : blocks) b->add_reservation();
    return true;
}

void BlockStore::retain(std::span<const BlockPtr> blocks, Retention retention) {
    if (retention.given()) given_priorities_.fetch_or(uint64_t{1} << retention.priority(0), std::memory_order_relaxed);
    for (const BlockPtr& b : blocks) b->retention_.store(retention, std::memory_order_relaxed);
}

bool BlockStore::keep_kind(Block& block) {
    std::lock_guard lock(mutex_);
    return !block.keeps_kind_.exchange(true, std::memory_order_release);
}

void BlockStore::free_kind(Block& block) {
    std::lock_guard lock(mutex_);
    block.keeps_kind_.store(false, std::memory_order_release);
}

BlockPtr BlockStore::recover(const RecoveredBlock& found) {
    const uint64_t content_id = found.identity.content_id;
    std::vector<BlockKey> keys = found.more_keys;
    keys.insert(keys.begin(), found.identity.key);
    auto block = std::make_shared<Block>(*this, PageKind(found.slot.slot_class), nullptr, content_id);
    block->tier_slot_ = found.slot;
    block->keys_ = std::move(keys);
    block->keys_state_ = 1;
    block->tier_keys_ = {found.identity.key, 1};
    block->published_ = block->keeps_kind_ = true;
    block->tenant_ = kUnknownTenant;
    block->tier_ = TierKind::kDisk;
    block->mark_sealed();
    on_disk_.fetch_add(1, std::memory_order_release);
    uint64_t next = content_ids_.load();
    while (next <= content_id && !content_ids_.compare_exchange_weak(next, content_id + 1)) {
    }
    return block;
}

void BlockStore::reserve_keys(Block& block, size_t more) {
    std::lock_guard lock(mutex_);
    const size_t wanted = block.keys_.size() + more;
    if (wanted > block.keys_.capacity()) block.keys_.reserve(std::max(wanted, 2 * block.keys_.capacity()));
}

void BlockStore::add_key(Block& block, const BlockKey& key) noexcept {
    std::lock_guard lock(mutex_);
    if (std::find(block.keys_.begin(), block.keys_.end(), key) != block.keys_.end()) return;
    block.keys_.push_back(key);
    ++block.keys_state_;
    block.published_.store(true, std::memory_order_release);
}

void BlockStore::remove_key(Block& block, const BlockKey& key) {
    std::lock_guard lock(mutex_);
    if (std::erase(block.keys_, key) == 0) return;
    ++block.keys_state_;
    block.published_.store(!block.keys_.empty(), std::memory_order_release);
}

RecordKeys BlockStore::keys_of(const Block& block, std::vector<BlockKey>& more) const {
    if (!block.published()) return {};
    std::lock_guard lock(mutex_);
    if (block.keys_.empty()) return {};
    more.assign(block.keys_.begin() + 1, block.keys_.end());
    return {block.keys_[0], block.keys_state_};
}

bool BlockStore::drop_record(Block& block) {
    std::lock_guard lock(mutex_);
    if (block.record_.index == Slot::kNone && block.old_records_.empty()) return false;
    release_records(block);
    dropped_records_.fetch_add(1, std::memory_order_relaxed);
    return true;
}

void BlockStore::set_record(Block& block, Slot slot, const RecordKeys& keys) {
    std::lock_guard lock(mutex_);
    // Meanwhile the block may have moved to disk with these keys, or its namespace may have ended.
    const bool present = block.record_.index != Slot::kNone;
    const uint64_t state_there = block.tier_ == TierKind::kDisk ? block.tier_keys_.state : 0;
    const bool unwanted = !block.published() || state_there >= keys.state || (present && block.record_keys_.state > keys.state);
    if (unwanted) return disk_->release({&slot, 1});
    if (present) disk_->retire({&block.record_, 1});
    block.record_ = slot;
    block.record_keys_ = keys;
    give_old_records(block, keys.state);
}

bool BlockStore::has_record(const Block& block) const {
    return droppable_record(block).has_value();
}

std::optional<PageKind> BlockStore::droppable_record(const Block& block) const {
    std::lock_guard lock(mutex_);
    if (block.record_.index != Slot::kNone) return PageKind(block.record_.slot_class);
    if (block.old_records_.empty()) return {};
    return PageKind(block.old_records_[0].slot.slot_class);
}

size_t BlockStore::count_keys(const Block& block) const {
    std::lock_guard lock(mutex_);
    return block.keys_.size();
}

bool BlockStore::has_keys_on_disk(const Block& block) const {
    std::lock_guard lock(mutex_);
    const uint64_t now = block.keys_state_;
    return (block.record_.index != Slot::kNone && block.record_keys_.state == now && disk_->holds(block.record_)) ||
           (block.tier_ == TierKind::kDisk && block.tier_keys_.state == now && now > 0 && disk_->holds(block.tier_slot_));
}

void BlockStore::drop(Block& block) {
    std::lock_guard lock(mutex_);
    release_records(block);
    free_place({block.tier_, block.kind_, block.slot(), block.tier_slot_, {}}, block.tenant());
    block.tier_keys_ = {};
    block.dropped_.store(true, std::memory_order_release);
    block.sealed_.store(false, std::memory_order_release);
    block.stored_.store(Block::pack(nullptr, block.kind_), std::memory_order_release);
    block.tier_.store(TierKind::kDevice, std::memory_order_release);
    moves_.fetch_add(1, std::memory_order_release);
}

uint64_t BlockStore::start_reading() {
    std::lock_guard lock(mutex_);
    reading_.push_back({++readings_, moves_});
    return readings_;
}

void BlockStore::stop_reading(uint64_t reading) {
    std::lock_guard lock(mutex_);
    const auto mine = std::find_if(reading_.begin(), reading_.end(), [&](const Reading& r) { return r.number == reading; });
    *mine = reading_.back();
    reading_.pop_back();
    free_vacated();
    if (reading <= awaited_reading_) room_signal_.notify();
}

uint64_t BlockStore::last_reading() const {
    std::lock_guard lock(mutex_);
    return readings_;
}

bool BlockStore::still_reading(uint64_t last) const {
    std::lock_guard lock(mutex_);
    const bool some = std::any_of(reading_.begin(), reading_.end(), [&](const Reading& r) { return r.number <= last; });
    if (some) awaited_reading_ = std::max(awaited_reading_, last);
    return some;
}

// Frees the places that blocks left before the first present reader came. free_place() signals.
void BlockStore::free_vacated() {
    uint64_t first = UINT64_MAX;
    for (const Reading& r : reading_) first = std::min(first, r.from);
    if (!barriers_.readers) first = UINT64_MAX;
    size_t n = 0;
    while (n < vacated_.size() && vacated_[n].at < first) ++n;
    for (size_t i = 0; i < n; ++i) free_place(vacated_[i].place, vacated_[i].tenant, vacated_[i].replaced);
    vacated_.erase(vacated_.begin(), vacated_.begin() + ptrdiff_t(n));
}

bool BlockStore::has_vacated() const {
    std::lock_guard lock(mutex_);
    return !vacated_.empty();
}

SlotCounts BlockStore::vacated_slots(TierKind tier) const {
    std::lock_guard lock(mutex_);
    SlotCounts slots{};
    for (const Vacated& l : vacated_) slots[size_t(l.place.kind)] += l.place.tier == tier;
    return slots;
}

uint64_t BlockStore::free_bytes() const {
    std::lock_guard lock(mutex_);
    return bytes_free();
}

BlockStore::Usage BlockStore::usage() const {
    std::lock_guard lock(mutex_);
    Usage u;
    u.token_blocks = in_use_[0] - scratch_[0];
    u.channel_blocks = in_use_[1] - scratch_[1];
    u.low_blocks = in_use_[2] - scratch_[2];
    u.passed_blocks = in_use_[3] + in_use_[4];
    u.used = bytes_in_use();
    u.free = bytes_free();
    u.promised = bytes_of(promised_);
    u.cached = held_ - u.used;
    u.peak = peak_;
    return u;
}

// Free bytes that the worst-fitting kind of full block cannot use. Low blocks do not count: a step makes none.
uint64_t BlockStore::bytes_fragmented() const {
    if (!slab_) return 0;
    std::vector<size_t> kept(slab_->count_regions());  // by region: cached slots, which go back when others need the room
    for (size_t kind = 0; kind < kPageKinds; ++kind) {
        for (size_t i = promised_[kind]; i < cached_[kind].size(); ++i) ++kept[slab_->region_of(cached_[kind][i].slot)];
    }
    const uint64_t free = bytes_free();
    uint64_t most = 0;
    for (const PageKind kind : {PageKind::kToken, PageKind::kChannel}) {
        const size_t bytes = geometry_.slot_bytes(kind);
        if (bytes == 0) continue;
        const uint64_t slots = free / bytes, fit = slab_->count_room(int(kind), memory_[size_t(kind)].stride(), kept);
        most = std::max(most, (slots - std::min(slots, fit)) * bytes);
    }
    return most;
}

uint64_t BlockStore::usable_bytes() const {
    std::lock_guard lock(mutex_);
    return bytes_free() - bytes_fragmented();
}

double BlockStore::fragmentation() const {
    std::lock_guard lock(mutex_);
    const uint64_t free = bytes_free();
    return free ? double(bytes_fragmented()) / double(free) : 0.0;
}

}  // namespace ta
