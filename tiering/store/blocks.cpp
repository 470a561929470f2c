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
        // Passed blocks are few beside others, and their padding is much: no memory is taken for a pool full of them.
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

// Zeroes the slots that another tenant's bytes are in. Not under the lock: it takes as long as writing them.
Status BlockStore::clear(std::span<const PageKind> wanted, std::span<const AcquiredSlot> slots,
                         std::span<const Tenant> tenants) {
    std::vector<DeviceRange> ranges;
    for (size_t i = 0; i < slots.size(); ++i) {
        const Tenant tenant = tenants.empty() ? 0 : tenants[i];
        if (slots[i].tenant == kNobody) continue;
        if (slots[i].tenant == tenant && tenant != kUnknownTenant) continue;  // two unknown ones may differ
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
    // Fragmentation may leave less than that, and others may take some meanwhile.
    std::vector<PageKind> wanted(most, kind);
    std::vector<AcquiredSlot> taken;
    scratch.reserve(most);
    for (; !wanted.empty(); wanted.resize(wanted.size() / 2)) {
        taken.clear();
        if (!take_slots(wanted, taken, nullptr).ok()) continue;
        for (const AcquiredSlot& t : taken) scratch.push_back({t.slot, t.tenant});
        std::lock_guard lock(mutex_);
        scratch_[size_t(kind)] += scratch.size();
        break;
    }
    return scratch;
}

void BlockStore::release_scratch(PageKind kind, const Scratch& scratch, Tenant tenant) {
    release_slot(kind, scratch.slot, scratch.tenant == tenant ? tenant : kUnknownTenant);
    std::lock_guard lock(mutex_);
    --scratch_[size_t(kind)];
}

bool BlockStore::has_scratch() const {
    std::lock_guard lock(mutex_);
    return std::any_of(std::begin(scratch_), std::end(scratch_), [](uint64_t n) { return n > 0; });
}

// A slot that was not kept from before.
Result<BlockStore::AcquiredSlot> BlockStore::cut_slot(PageKind kind) {
    const size_t bytes = geometry_.slot_bytes(kind);
    if (uint8_t* slot = memory_[size_t(kind)].take()) {
        held_ += bytes;
        return AcquiredSlot{slot, true,
                            slab_has_tenants_ || (has_hooks_ && !slab_) ? kUnknownTenant : 0};  // of hooks: anybody's
    }
    if (!slab_) return fail(TA_E_MEMORY, "the allocator has no %zu bytes for a block", bytes).tier(TA_TIER_DEVICE).bytes(bytes);
    return fail(TA_E_TIER_FULL, "the device tier is fragmented: no room for a slot of %zu bytes between the others", bytes)
        .tier(TA_TIER_DEVICE)
        .bytes(bytes);
}

// So that release never allocates.
void BlockStore::reserve_cached() {
    for (size_t kind = 0; kind < kPageKinds; ++kind) cached_[kind].reserve(kCachedSlots + promised_[kind]);
}

Status BlockStore::take_slots(std::span<const PageKind> wanted, std::vector<AcquiredSlot>& slots, size_t* failed,
                              const SlotCounts& promised) {
    slots.reserve(wanted.size());
    SlotCounts need{};
    for (PageKind kind : wanted) ++need[size_t(kind)];
    const uint64_t more = bytes_of(need), of_promises = bytes_of(promised);
    std::lock_guard lock(mutex_);
    if (const uint64_t free = bytes_free(); more - of_promises > free) return beyond_budget(wanted, free + of_promises, failed);
    reserve_cached();
    for (size_t kind = 0; kind < kPageKinds; ++kind) promised_[kind] -= promised[kind];
    // Cached slots that are not wanted now make room; slots that others were promised stay. Of these some may be about to come.
    uint64_t reused[kPageKinds];
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
        Result<AcquiredSlot> fresh = cut_slot(kind);
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
                    Result<AcquiredSlot> slot = cut_slot(PageKind(kind));
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
        // Then what comes goes back to where slots come from, and is cut there again.
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

// Zeroes a slot that nobody uses any more where it is about to go back to hooks: here and not under the lock, since many may go
// at once. Returns whose bytes are in it then.
Tenant BlockStore::zero_if_given(PageKind kind, uint8_t* slot, Tenant tenant) {
    if (!has_hooks_ || slab_) return tenant;
    {
        std::lock_guard lock(mutex_);
        if (has_room_to_keep(kind)) return tenant;
    }
    std::memset(slot, 0, geometry_.slot_bytes(kind));
    return kNobody;
}

// A slot that nobody uses: kept for reuse while there are few.
void BlockStore::put_back(PageKind kind, const Cached& slot) {
    if (has_room_to_keep(kind)) {
        cached_[size_t(kind)].push_back(slot);
    } else {
        give(kind, slot);
    }
}

// Back to where slots come from. The system hands out zeroed memory only; hooks may have other uses for it.
void BlockStore::give(PageKind kind, const Cached& slot) {
    if (slot.tenant != 0 && slab_) slab_has_tenants_ = true;
    if (slot.tenant != kNobody && has_hooks_ && !slab_) std::memset(slot.slot, 0, geometry_.slot_bytes(kind));
    memory_[size_t(kind)].give(slot.slot);
    held_ -= geometry_.slot_bytes(kind);
}

void BlockStore::release_slot(PageKind kind, uint8_t* slot) {
    release_slot(kind, slot, kUnknownTenant);  // a move that failed left something there
}

void BlockStore::release_slot(PageKind kind, uint8_t* slot, Tenant tenant) {
    tenant = zero_if_given(kind, slot, tenant);
    std::lock_guard lock(mutex_);
    free_place({TierKind::kDevice, kind, slot, {}, {}}, tenant);
}

void BlockStore::release(const Block& block) {
    if (block.dropped()) return;
    Tenant tenant = block.tenant();
    if (block.tier() == TierKind::kDevice) tenant = zero_if_given(block.kind(), block.slot(), tenant);
    std::lock_guard lock(mutex_);
    const bool keep = keep_records_.load(std::memory_order_acquire) && block.published();
    const bool has_record = block.record_.index != Slot::kNone;
    const bool is_record = block.tier_ == TierKind::kDisk && block.tier_keys_.state > 0;
    if (is_record && keep && !has_record) return;
    // One that turned out to be damaged where it lies has been published again: its record may be the only whole one.
    const bool replaced = block.stuck() || (keep && has_record);
    if (has_record && !keep) give_record(block.record_, replaced);
    free_place({block.tier_, block.kind_, block.slot(), block.tier_slot_, {}}, tenant, replaced);
}

void BlockStore::give_record(Slot slot, bool replaced) {
    replaced ? disk_->retire({&slot, 1}) : disk_->release({&slot, 1});
}

// `replaced`: what a record there promised, another one does that may not be on the medium yet.
void BlockStore::free_place(const Place& place, Tenant tenant, bool replaced) {
    room_signal_.notify();  // behind the caller's lock
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
    return {block.tier_, block.kind_, block.tier_ == TierKind::kDisk ? nullptr : block.slot(), block.tier_slot_,
            block.tier_keys_};
}

bool BlockStore::move(Block& block, const Place& to) {
    std::lock_guard lock(mutex_);
    return move_locked(block, to);
}

bool BlockStore::move_to_record(Block& block) {
    std::lock_guard lock(mutex_);
    // Whoever made the record had the block's kind, which it keeps for good.
    const Slot record = block.record_;
    if (record.index == Slot::kNone || block.tier_ == TierKind::kDisk || !disk_->holds(record)) return false;
    block.record_ = Slot{};
    if (move_locked(block, {TierKind::kDisk, block.kind_, nullptr, record, block.record_keys_})) return true;
    block.record_ = record;
    return false;
}

bool BlockStore::move_locked(Block& block, const Place& to) {
    if (to.kind != block.kind_ && block.keeps_kind()) return false;
    if (to.tier > block.tier_ && block.pins() > 0) return false;
    const bool is_record = block.tier_ == TierKind::kDisk && block.tier_keys_.state > 0;
    if (is_record && block.published() && block.record_.index == Slot::kNone) {
        block.record_ = block.tier_slot_;  // the next process shall find it, too
        block.record_keys_ = block.tier_keys_;
        on_disk_.fetch_sub(1, std::memory_order_release);
    } else {
        vacated_.push_back({moves_,
                            {block.tier_, block.kind_, block.slot(), block.tier_slot_, {}},
                            block.tenant(),
                            is_record && block.published()});
    }
    if (to.tier == TierKind::kDisk) {
        on_disk_.fetch_add(1, std::memory_order_release);
        // A newer one takes its place, unless a flush has meanwhile written one with more keys.
        if (block.record_.index != Slot::kNone && to.keys.state >= block.record_keys_.state) {
            disk_->retire({&block.record_, 1});
            block.record_ = Slot{};
        }
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
    if (block.record_.index == Slot::kNone) return false;
    disk_->release({&block.record_, 1});
    block.record_ = Slot{};
    dropped_records_.fetch_add(1, std::memory_order_relaxed);
    return true;
}

void BlockStore::set_record(Block& block, Slot slot, const RecordKeys& keys) {
    std::lock_guard lock(mutex_);
    // Meanwhile it may have moved to disk, under its keys, or its namespace have ended.
    const bool present = block.record_.index != Slot::kNone;
    const uint64_t state_there = block.tier_ == TierKind::kDisk ? block.tier_keys_.state : 0;
    const bool unwanted = !block.published() || state_there >= keys.state || (present && block.record_keys_.state > keys.state);
    if (unwanted) return disk_->release({&slot, 1});
    if (present) disk_->retire({&block.record_, 1});
    block.record_ = slot;
    block.record_keys_ = keys;
}

bool BlockStore::has_record(const Block& block) const {
    std::lock_guard lock(mutex_);
    return block.record_.index != Slot::kNone;
}

bool BlockStore::has_all_keys_on_disk(const Block& block) const {
    std::lock_guard lock(mutex_);
    const uint64_t now = block.keys_state_;
    return (block.record_.index != Slot::kNone && block.record_keys_.state == now && disk_->holds(block.record_)) ||
           (block.tier_ == TierKind::kDisk && block.tier_keys_.state == now && now > 0 && disk_->holds(block.tier_slot_));
}

void BlockStore::drop(Block& block) {
    std::lock_guard lock(mutex_);
    if (block.record_.index != Slot::kNone) disk_->release({&block.record_, 1});
    block.record_ = Slot{};
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
    room_signal_.notify();
}

uint64_t BlockStore::last_reading() const {
    std::lock_guard lock(mutex_);
    return readings_;
}

bool BlockStore::still_reading(uint64_t last) const {
    std::lock_guard lock(mutex_);
    return std::any_of(reading_.begin(), reading_.end(), [&](const Reading& r) { return r.number <= last; });
}

// Frees the places that blocks left before the first of the present readers came.
void BlockStore::free_vacated() {
    uint64_t first = UINT64_MAX;
    for (const Reading& r : reading_) first = std::min(first, r.from);
    if (!barriers_.readers) first = UINT64_MAX;
    size_t n = 0;
    while (n < vacated_.size() && vacated_[n].at < first) ++n;
    for (size_t i = 0; i < n; ++i) free_place(vacated_[i].place, vacated_[i].tenant, vacated_[i].replaced);
    vacated_.erase(vacated_.begin(), vacated_.begin() + ptrdiff_t(n));
    if (n == 0) return;
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

}  // namespace ta
