// The tiers of a pool: making them, eviction, promotion for steps, and blocks for loads.
#include "tiering/room/residency.h"

#include <algorithm>
#include <bitset>
#include <cstring>
#include <functional>
#include <unordered_set>
#include <utility>

#include "tiering/disk/disk.h"
#include "tiering/disk/latch.h"
#include "tiering/host/host.h"
#include "tiering/room/candidates.h"
#include "tiering/store/fall.h"
#include "tiering/verify/block_check.h"

namespace ta {
namespace {

// Decode takes up to 16% longer in a layer that is observed (bench/results/h200-attention.md), and may take 2% longer in all.
constexpr uint32_t kAttentionLayersOnGpu = 8;

std::unique_ptr<EvictionPolicy> make_policy(const TierSettings& settings) {
    switch (settings.eviction) {
        case Eviction::kPriority:
            return make_priority_policy();
        case Eviction::kAttention:
            return make_attention_policy(settings.half_life);
        case Eviction::kLru:
            break;
    }
    return make_lru_policy();
}

}  // namespace

// Checks that this pool can have such tiers, as far as that is known before they are made.
Status Residency::check_tiers(const TierSettings& settings) const {
    const bool on_gpu = context_.device() != nullptr;
    if (!settings.peer != (settings.peer_budget == 0))
        return fail(TA_E_INVALID, "options.tiers.peer and peer_bytes: a peer tier asks for both");
    if (geometry_.falls && settings.host_budget == 0 && settings.disk_budget == 0)
        return fail(TA_E_INVALID, "falling_precision asks for a host or a disk tier");
    if (geometry_.falls && settings.drop_coldest) {
        return fail(TA_E_UNSUPPORTED,
                    "falling_precision and drop_coldest: how much must be dropped is not known where blocks become "
                    "smaller as they go down");
    }
    if (geometry_.falls && on_gpu && !encoder_)
        return fail(TA_E_UNSUPPORTED, "the device does not encode blocks: precision cannot fall there");
    const uint64_t memory = machine_memory();
    if (settings.host_budget > memory) {
        return fail(TA_E_MEMORY, "the host tier asks for %llu bytes; the machine has %llu",
                    (unsigned long long)settings.host_budget, (unsigned long long)memory)
            .tier(TA_TIER_HOST)
            .bytes(settings.host_budget - memory);
    }
    return {};
}

Status Residency::make_peer_tier(const TierSettings& settings) {
    PeerTierOptions o;
    o.budget = settings.peer_budget;
    for (size_t kind = 0; kind < kPageKinds; ++kind) o.slot_bytes[kind] = geometry_.slot_bytes(PageKind(kind));
    Result<std::unique_ptr<PeerTier>> peer = PeerTier::create(context_, settings.peer, o);
    if (!peer.ok()) return std::move(peer).status();
    peer_ = peer.take();
    tiers_.set(TierKind::kPeer, peer_.get());
    Device* const device = settings.peer->device();
    if (!device) return {};
    peer_verifier_ = make_peer_verifier(*device, pages_);
    return peer_verifier_->open();
}

Status Residency::make_host_tier(const TierSettings& settings) {
    HostTierOptions o;
    o.budget = settings.host_budget;
    for (size_t kind = 0; kind < kPageKinds; ++kind) o.slot_bytes[kind] = geometry_.slot_bytes(PageKind(kind));
    o.memory.node = settings.numa_node;
    if (Device* device = context_.device()) {
        if (o.memory.node < 0) o.memory.node = device->numa_node();
        o.memory.needs_registration = true;
        o.memory.register_chunk = [device](void* data, size_t bytes) {
            return device->register_host(static_cast<uint8_t*>(data), bytes);
        };
        o.memory.unregister_chunk = [device](void* data, size_t) { device->unregister_host(static_cast<uint8_t*>(data)); };
    }
    Result<std::unique_ptr<HostTier>> host = HostTier::create(system_memory(), context_.threads(), o);
    if (!host.ok()) return std::move(host).status();
    host_ = settings.wrap_host ? settings.wrap_host(host.take()) : host.take();
    tiers_.set(TierKind::kHost, host_.get());
    return {};
}

// With the published blocks that a persistent file brings along. They stay there until the pool is complete.
Status Residency::open_disk_tier(const TierSettings& settings) {
    DiskTierOptions o;
    o.persistent = !settings.disk_path.empty();
    o.path = o.persistent ? settings.disk_path : settings.disk_folder;
    o.budget = settings.disk_budget;
    for (size_t kind = 0; kind < kPageKinds; ++kind) o.slot_bytes[kind] = geometry_.slot_bytes(PageKind(kind));
    o.fingerprint = pages_.fingerprint;
    o.check = make_block_check(geometry_, pages_.fingerprint);
    o.check_found = make_value_check(geometry_, numerics_.encode.k_turning);
    o.device = context_.device();
    const Seams& seams = context_.seams();
    o.deadline = seams.io_deadline;
    o.retry_after = seams.io_retry_after;
    Result<std::unique_ptr<DiskTier>> disk = DiskTier::open(seams.files, o);
    if (!disk.ok()) return std::move(disk).status();
    disk_ = disk.take();
    tiers_.set(TierKind::kDisk, disk_.get());
    store_.attach(tiers_);
    store_.keep_records();
    return {};
}

Residency::Residency(Context& context, const Pages& pages, Residents& residents, uint64_t budget)
    : context_(context),
      pages_(pages),
      residents_(residents),
      store_(context.allocator(), context.device(), pages.geometry, budget),
      reader_(context.device(), pages, store_, disk_) {}

Status Residency::open(const TierSettings& settings) {
    settings_ = settings;
    if (settings.staging_bytes == 0) settings_.staging_bytes = store_.budget() / 8;
    Device* device = context_.device();
    const uint32_t by_default = device ? kAttentionLayersOnGpu : 1;
    const uint32_t of_layers = settings.attention_layers > 0 ? settings.attention_layers : by_default;
    settings_.attention_layers = std::min(of_layers, geometry_.layers);
    policy_ = make_policy(settings);
    if (device) verifier_ = make_verifier(*device, pages_);
    if (geometry_.falls && device) encoder_ = make_encoder(*device, pages_);
    TA_RETURN_IF_ERROR(check_tiers(settings));
    if (settings.peer) TA_RETURN_IF_ERROR(make_peer_tier(settings));
    if (settings.host_budget > 0) TA_RETURN_IF_ERROR(make_host_tier(settings));
    if (settings.disk_budget > 0) TA_RETURN_IF_ERROR(open_disk_tier(settings));
    return {};
}

Status Residency::start(uint64_t first_ticket) {
    if (tiers_.empty()) return {};
    store_.attach(tiers_);
    const auto make = [this](TierKind tier, std::span<const PageKind> wanted, Deadline until) {
        return make_room(tier, wanted, false, until);
    };
    mover_ = std::make_unique<Mover>(MoveHost{context_.device(), pages_, store_, reader_, tiers_, disk_.get(), verifier_.get(),
                                              peer_verifier_.get(), encoder_.get(), settings_.patience.plans, make},
                                     first_ticket);
    TA_RETURN_IF_ERROR(mover_->start(settings_.route));
    store_.keep_records(false);
    return {};
}

// Full blocks of `tier` of at least so many bytes, or all there are: by their priorities, then in the order of the policy. Sinks and
// pinned blocks stay; shared ones go when the others are not enough. `for_disk`: nothing that a plan may be reading now, or was
// promised to.
std::vector<MoveItem> Residency::coldest(TierKind tier, uint64_t bytes, bool for_disk, const BlockFilter& passes) const {
    std::vector<MoveItem> items, unused = residents_.unused(tier, passes ? UINT64_MAX : bytes);
    const auto stays = [&](const MoveItem& item) { return passes && !passes(*item.block, item.index); };
    std::erase_if(unused, stays);
    auto next_unused = unused.begin();
    const auto take = [&](MoveItem&& item) {
        bytes -= std::min<uint64_t>(bytes, geometry_.slot_bytes(item.block->kind()));
        items.push_back(std::move(item));
    };
    std::lock_guard lock(residents_.lock());
    Candidates candidates(geometry_, tier, steps_.load(std::memory_order_relaxed));
    candidates.set_filter(passes);
    const auto see = [&](const Resident& s) {
        if (!(for_disk && s.stays_readable()) && !s.blocks.empty())
            candidates.add(s, uint32_t(numerics_.sink_blocks), s.blocks.size());
    };
    residents_.visit(std::cref(see));
    for_each_level(store_.given_priorities(), [&](const RetentionLevel& level) {
        // Before all others what is published and nobody uses.
        while (bytes > 0 && next_unused != unused.end() && level.has(next_unused->block->retention()))
            take(std::move(*next_unused++));
        if (bytes == 0) return true;
        candidates.set_level(level);
        candidates.set_shared(false);
        // NOTES: an item is an owner too: both choices come before the first item of the level.
        const std::vector<Victim> alone = policy_->choose(candidates, bytes, Loss::kMoved);
        uint64_t found = 0;
        for (const Victim v : alone) found += candidates.bytes(v.owner, v.block);
        std::vector<Victim> shared;
        if (found < bytes) {
            candidates.set_shared(true, for_disk ? shared_and_readable(residents_) : std::unordered_set<const Block*>());
            shared = policy_->choose(candidates, bytes - found, Loss::kMoved);
        }
        for (const Victim v : alone) take(candidates.item(v));
        std::unordered_set<const Block*> listed;
        for (const Victim v : shared) {
            if (MoveItem item = candidates.item(v); listed.insert(item.block.get()).second) take(std::move(item));
        }
        return bytes == 0;
    });
    // At last what loads have read, which belongs to no sequence yet.
    for (const Loading* load : loads_) {
        for (const MoveItem& item : load->blocks) {
            if (bytes == 0) return items;
            if (item.block->tier() == tier && may_leave(*item.block) && !stays(item)) take(MoveItem(item));
        }
    }
    return items;
}

Residency::LoadHold::LoadHold(Residency& residency, Loading& loading) : residency_(residency), loading_(loading) {
    std::lock_guard lock(residency_.residents_.lock());
    residency_.loads_.push_back(&loading_);
}

Residency::LoadHold::~LoadHold() {
    std::lock_guard lock(residency_.residents_.lock());
    std::erase(residency_.loads_, &loading_);
    residency_.promised_ -= std::exchange(loading_.promised, 0);
}

void Residency::LoadHold::add(MoveItem item) {
    std::lock_guard lock(residency_.residents_.lock());
    loading_.blocks.push_back(std::move(item));
}

bool Residency::make_room(TierKind tier, std::span<const PageKind> wanted, bool for_all, Deadline until) {
    if (tier == TierKind::kDisk && disk_->reclaim(kErasePatience)) return true;
    if (tier != TierKind::kDisk && evict(tier, evicted_at_once(tier, wanted), until)) return true;
    return drop_unused(tier, wanted, for_all);
}

bool Residency::drop_unused(TierKind tier, std::span<const PageKind> wanted, bool for_all) {
    uint64_t bytes = bytes_of(wanted);
    if (tier == TierKind::kDevice) {
        const uint64_t free = store_.free_bytes();
        bytes = std::max<uint64_t>(1, bytes - std::min(bytes, free));
    }
    if (residents_.drop_unused(tier, bytes, for_all) == 0) return false;
    // A slot of a persistent disk is free only when its record was erased.
    if (tier == TierKind::kDisk) disk_->wait_for_erased(kErasePatience);
    return true;
}

uint64_t Residency::evicted_at_once(TierKind tier, std::span<const PageKind> wanted) const {
    const uint64_t budget = tier == TierKind::kDevice ? store_.budget() : tiers_[tier]->stats().budget;
    return std::max(bytes_of(wanted), budget / kEvictedPart);
}

bool Residency::evict(TierKind tier, uint64_t bytes, Deadline until) {
    if (tier != TierKind::kDevice && tiers_[tier]->health().state == TierState::kFailed) return false;  // what is there is lost
    residents_.take_in_attention(false);
    // If the tier below takes nothing more, the next one may. The disk takes only blocks that no plan holds.
    for (std::optional<TierKind> to = tiers_.below(tier); to; to = tiers_.below(*to)) {
        if (evict_to(tier, *to, bytes, until)) return true;
    }
    if (tier != TierKind::kDevice || tiers_.empty()) return false;
    // Full blocks are not enough.
    const std::vector<MoveItem> items = suspend_idle(bytes);
    bool moved = false;
    for (std::optional<TierKind> to = tiers_.below(tier); to && !items.empty() && !moved; to = tiers_.below(*to)) {
        const MoveProgress progress = mover_->run(items, *to, MoveReason::kEviction, until);
        moved = progress.moved > 0;
        if (!moved) note_failed(progress);
    }
    reopen_suspended(items);
    return moved;
}

// Open blocks that were sealed to leave and did not are open again, so that the next step needs no copy of them.
void Residency::reopen_suspended(std::span<const MoveItem> items) {
    std::lock_guard lock(residents_.lock());
    const SharedOpenBlocks shared(residents_);
    const auto see = [&](const Resident& s) {
        if (s.blocks.empty()) return;
        const BlockPtr& last = s.blocks.back();
        const auto is_last = [&](const MoveItem& item) { return item.block == last; };
        if (!last->suspended() || last->moving() || last->tier() != TierKind::kDevice ||
            std::none_of(items.begin(), items.end(), is_last))
            return;
        const long owners = idle_owners(shared, s, *last) + 1;  // and the item
        if (!s.may_be_read() && last.use_count() <= owners) last->reopen();
    };
    residents_.visit(std::cref(see));
}

// Sink blocks and open blocks in the device tier of so many bytes, or all there are, of idle sequences, those first that were not
// used for longest. Open ones are sealed.
std::vector<MoveItem> Residency::suspend_idle(uint64_t bytes) {
    std::vector<MoveItem> items;
    std::lock_guard lock(residents_.lock());
    std::vector<const Resident*> idle;
    const auto see = [&](const Resident& s) {
        if (s.is_idle() && !s.blocks.empty()) idle.push_back(&s);
    };
    residents_.visit(std::cref(see));
    std::sort(idle.begin(), idle.end(), [](const Resident* a, const Resident* b) { return a->last_used < b->last_used; });
    const std::unordered_set<const Block*> held = shared_and_readable(residents_);
    const SharedOpenBlocks shared(residents_);
    std::unordered_set<const Block*> listed;
    const auto add = [&](const Resident& s, uint64_t b) {
        Block& block = *s.blocks[size_t(b)];
        if (block.dropped() || block.tier() != TierKind::kDevice || held.contains(&block) || listed.contains(&block)) return;
        const long owners = idle_owners(shared, s, block);
        if (!block.sealed() && (s.blocks[size_t(b)].use_count() > owners || !suspend_block(block, b).ok())) return;
        if (!may_leave(block)) return;
        listed.insert(&block);
        items.push_back({s.blocks[size_t(b)], b, s.last_used_at});
        bytes -= std::min<uint64_t>(bytes, geometry_.slot_bytes(block.kind()));
    };
    for (const Resident* s : idle) {
        if (bytes == 0) break;
        const uint64_t last = s->blocks.size() - 1;
        for (uint64_t b = 0; b < std::min<uint64_t>(numerics_.sink_blocks, last); ++b) add(*s, b);
        add(*s, last);
    }
    return items;
}

// NOTES: a step that wrote the block has ended, but a GPU may not be done with it; reading its memory waits for that.
Status Residency::suspend_block(Block& block, uint64_t index) {
    Device* const device = context_.device();
    if (!device) {
        block.mark_suspended();
        block.seal(geometry_, pages_.fingerprint, index, kPageTokens);
        return {};
    }
    std::vector<uint8_t> copy(geometry_.slot_bytes(block.kind()));
    TA_RETURN_IF_ERROR(device->read(copy.data(), block.slot(), copy.size()));
    block.write_trailer(geometry_, pages_.fingerprint, index, kPageTokens, copy.data());
    const size_t trailer = geometry_.payload_bytes(block.kind());  // behind it
    TA_RETURN_IF_ERROR(device->write(block.slot() + trailer, copy.data() + trailer, copy.size() - trailer));
    block.mark_suspended();
    block.mark_sealed();
    return {};
}

bool Residency::evict_to(TierKind from, TierKind to, uint64_t bytes, Deadline until) {
    std::bitset<kPageKinds> tried;  // in vain
    const auto kind_there = [&](const Block& block, uint64_t index) {
        return size_t(kind_moved(geometry_, numerics_, block, index, from, to));
    };
    const BlockFilter untried = [&](const Block& block, uint64_t index) { return !tried[kind_there(block, index)]; };
    for (;;) {
        const std::vector<MoveItem> items = coldest(from, bytes, to == TierKind::kDisk, tried.any() ? untried : BlockFilter());
        if (items.empty()) return false;
        const MoveProgress progress = mover_->run(items, to, MoveReason::kEviction, until);
        if (progress.moved > 0) return true;
        // Blocks that turned out to be damaged are not chosen again.
        const auto is_stuck = [](const MoveItem& item) { return item.block->stuck(); };
        if (std::any_of(items.begin(), items.end(), is_stuck)) continue;
        note_failed(progress);
        if (progress.status.code() != TA_E_TIER_FULL || tiers_[to]->health().state != TierState::kOk) return false;
        // The tier may have slots of another size.
        const TierStats stats = tiers_[to]->stats();
        for (const MoveItem& item : items) tried.set(kind_there(*item.block, item.index));
        for (size_t kind = 0; kind < kPageKinds; ++kind) {
            if (stats.slots_free[kind] == 0) tried.set(kind);
        }
        if (tried.all()) return false;
    }
}

void Residency::note_failed(const MoveProgress& eviction) {
    if (eviction.status.ok() || eviction.status.code() == TA_E_TIER_FULL) return;
    std::lock_guard lock(failed_evictions_mutex_);
    ++failed_evictions_;
    failed_eviction_ = eviction.status.clone();
}

uint64_t Residency::failed_evictions() const {
    std::lock_guard lock(failed_evictions_mutex_);
    return failed_evictions_;
}

// Says why blocks cannot leave the device; empty where a tier below has room for one.
std::string Residency::full_below() const {
    std::string text;
    for (std::optional<TierKind> below = tiers_.below(TierKind::kDevice); below; below = tiers_.below(*below)) {
        const TierKind kind = *below;
        const Tier* const there = tiers_[kind];
        PageKind leaves = geometry_.all_8_bits ? PageKind::kToken : PageKind::kChannel;
        if (geometry_.falls) leaves = kind_in_tier(leaves, kind);
        const TierStats stats = there->stats();
        if (stats.slots_free[size_t(leaves)] > 0) break;
        text += text.empty() ? "nothing can leave for the " : ", nor for the ";
        text += name_of(kind);
        text += " tier, which is full (" + std::to_string(stats.used) + " of " + std::to_string(stats.budget) + " bytes)";
    }
    return text;
}

Status Residency::with_cause(Status s, uint64_t before) const {
    if (const TierHealth health = disk_ ? disk_->health() : TierHealth{}; health.state != TierState::kOk) {
        const char* state = health.state == TierState::kReadOnly ? "is read-only" : "does not answer";
        return std::move(s).because((std::string("the disk tier ") + state + ": " + health.reason).c_str());
    }
    {
        std::lock_guard lock(failed_evictions_mutex_);
        if (failed_evictions_ != before && failed_eviction_.detail())
            return std::move(s).because(failed_eviction_.detail()->message);
    }
    const std::string full = full_below();
    return full.empty() ? std::move(s) : std::move(s).because(full.c_str());
}

void Residency::keep_room(bool filled) {
    if (!mover_) return;
    constexpr std::chrono::seconds kPause{1};  // after an eviction that moved nothing, or where nothing might leave
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    std::optional<TierKind> to = tiers_.below(TierKind::kDevice);
    while (to && tiers_[*to]->health().state == TierState::kFailed) to = tiers_.below(*to);
    if (!to) return;
    const uint64_t budget = store_.budget(), used = budget - store_.free_bytes();
    const auto part = [&](int percent) { return budget / 100 * uint64_t(percent) + budget % 100 * uint64_t(percent) / 100; };
    if (used <= part(settings_.high_percent)) return;
    uint64_t last = keeping_room_.load();
    bool in_vain = last == 0 && !filled;
    if (last != 0) {
        Result<MoveProgress> progress = mover_->query(last);
        if (progress.ok() && progress.value().state <= TA_MOVE_RUNNING) return;
        in_vain = progress.ok() && progress.value().moved == 0;
    }
    if (in_vain && now.count() < keep_room_after_.load()) return;
    residents_.take_in_attention(false);
    std::vector<MoveItem> items = coldest(TierKind::kDevice, used - part(settings_.low_percent), *to == TierKind::kDisk);
    keep_room_after_ = (now + std::chrono::steady_clock::duration(kPause)).count();
    if (items.empty()) {
        keeping_room_.compare_exchange_strong(last, 0);  // another step's that found some stays
        return;
    }
    if (Result<uint64_t> ticket = mover_->submit(std::move(items), *to, MoveReason::kEviction); ticket.ok())
        keeping_room_ = ticket.value();
}

void Residency::stop_keeping_room() {
    if (const uint64_t ticket = keeping_room_.load(); mover_ && ticket != 0) (void)mover_->cancel(ticket);
}

Residency::Lookups Residency::look_up(std::span<Resident* const> seqs) const {
    Lookups l;
    for (const Resident* s : seqs) {
        if (!mover_ && !may_lack_blocks()) {
            l.found[size_t(TierKind::kDevice)] += s->blocks.size();
            continue;
        }
        for (const BlockPtr& b : s->blocks) {
            if (b->dropped()) continue;
            const TierKind tier = b->tier();
            ++l.found[size_t(tier)];
            const PrefetchMark::Seen seen = b->prefetch().look();
            if (seen.arrived || (seen.asked && tier != TierKind::kDevice)) l.prefetched.push_back({b.get(), seen});
        }
    }
    // Sequences of a step may share blocks.
    const auto by_block = [](const Lookups::Prefetched& a, const Lookups::Prefetched& b) { return a.block < b.block; };
    const auto same = [](const Lookups::Prefetched& a, const Lookups::Prefetched& b) { return a.block == b.block; };
    std::sort(l.prefetched.begin(), l.prefetched.end(), by_block);
    l.prefetched.erase(std::unique(l.prefetched.begin(), l.prefetched.end(), same), l.prefetched.end());
    return l;
}

void Residency::count_step(const Lookups& l) {
    BlockStore::PrefetchCounters& prefetches = store_.prefetches();
    for (const Lookups::Prefetched& p : l.prefetched) {
        if (p.block->prefetch().settle(p.seen)) ++(p.seen.arrived ? prefetches.used : prefetches.late);
    }
    const bool brought = l.found[size_t(TierKind::kDisk)] > 0 && tiers_.below(TierKind::kDevice) == TierKind::kHost;
    if (brought || l.found[size_t(TierKind::kHost)] > 0) ++counters_.host_steps;
    for (size_t t = 0; t < kTiers; ++t) {
        counters_.hits[t] += l.found[t];
        for (size_t above = 0; above < t; ++above) counters_.absent[above] += l.found[t];
    }
}

Status Residency::check_not_lost(std::span<Resident* const> seqs) const {
    const TierHealth health = peer_ ? peer_->health() : TierHealth{};
    if (health.state == TierState::kOk) return {};
    Status lost;
    for (size_t i = 0; i < seqs.size(); ++i) {
        for (size_t b = 0; b < seqs[i]->blocks.size(); ++b) {
            Block& block = *seqs[i]->blocks[b];
            if (block.dropped() || block.tier() != TierKind::kPeer) continue;
            block.set_stuck();
            if (!lost.ok()) continue;
            lost = fail(TA_E_DEVICE_LOST, "the block lay in the peer tier: %s", health.reason)
                       .tier(TA_TIER_PEER)
                       .sequence(int64_t(i))
                       .block(int64_t(b));
        }
    }
    return lost;
}

Status Residency::make_resident(std::span<Resident* const> seqs, Deadline until) {
    if (store_.blocks_on_disk() == 0) return {};
    const auto is_full = [](const MoveProgress& p) { return p.failed > 0 && p.status.code() == TA_E_TIER_FULL; };
    const auto on_disk = [](const MoveItem& item) { return item.block->tier() == TierKind::kDisk; };
    // Memory below the device, the fastest first; the device itself where all of it is full.
    std::vector<TierKind> places;
    for (std::optional<TierKind> t = tiers_.below(TierKind::kDevice); t && is_memory_below(*t); t = tiers_.below(*t))
        places.push_back(*t);
    places.push_back(TierKind::kDevice);
    for (size_t i = 0; i < seqs.size(); ++i) {
        std::vector<MoveItem> items;
        for (size_t b = 0; b < seqs[i]->blocks.size(); ++b) {
            const BlockPtr& block = seqs[i]->blocks[b];
            if (block->tier() == TierKind::kDisk) items.push_back({block, b});
        }
        if (items.empty()) continue;
        size_t place = 0;
        MoveProgress progress = mover_->run(items, places[place], MoveReason::kNeeded, until);
        while (is_full(progress) && ++place < places.size()) {
            std::erase_if(items, std::not_fn(on_disk));
            progress = mover_->run(items, places[place], MoveReason::kNeeded, until);
        }
        place = std::min(place, places.size() - 1);
        if (progress.failed > 0 && progress.status.code() == TA_E_CORRUPT) {
            // If only the copy that arrived was bad, the record may be read again.
            std::erase_if(items, [&](const MoveItem& item) { return !on_disk(item) || item.block->stuck(); });
            if (!items.empty()) {
                MoveProgress again = mover_->run(items, places[place], MoveReason::kNeeded, until);
                if (again.failed == 0 && again.moved == progress.failed) progress = std::move(again);
            }
        }
        if (progress.failed == 0) continue;
        if (progress.status.code() != TA_E_TIER_FULL) counters_.failed[size_t(TierKind::kDisk)] += progress.failed;
        return std::move(progress.status).sequence(int64_t(i));
    }
    return {};
}

// Full blocks of so many bytes, those first that were read first. False: none went.
bool Residency::demote(Loading& mine, TierKind from, TierKind to, uint64_t bytes) {
    size_t& first = mine.above[size_t(from)];
    const auto stays = [](const Block& b) { return !b.sealed() || b.stuck(); };
    while (first < mine.blocks.size() && (stays(*mine.blocks[first].block) || mine.blocks[first].block->tier() > from)) ++first;
    std::vector<MoveItem> items;
    for (size_t i = first; i < mine.blocks.size() && bytes > 0; ++i) {
        const Block& block = *mine.blocks[i].block;
        if (stays(block) || block.tier() != from) continue;
        items.push_back(mine.blocks[i]);
        bytes -= std::min<uint64_t>(bytes, geometry_.slot_bytes(block.kind()));
    }
    if (items.empty()) return false;
    const MoveProgress progress = mover_->run(items, to, MoveReason::kEviction);
    note_failed(progress);
    return progress.moved > 0;
}

// The tiers below may be full of nothing but these blocks, and coldest() does not find what no sequence has. From each tier to
// the next one at first, then to those further down.
bool Residency::demote(Loading& mine, uint64_t bytes) {
    for (size_t further = 0; further + 1 < kTiers; ++further) {
        bool any = false;
        for (std::optional<TierKind> from = TierKind::kDevice; from; from = tiers_.below(*from)) {
            std::optional<TierKind> to = tiers_.below(*from);
            for (size_t n = 0; n < further && to; ++n) to = tiers_.below(*to);
            if (!to) continue;
            any = true;
            if (demote(mine, *from, *to, bytes)) return true;
        }
        if (!any) return false;
    }
    return false;
}

Result<BlockPtr> Residency::new_block(PageKind kind, Loading& mine) {
    const PageKind wanted[] = {kind};
    const uint64_t failed_before = failed_evictions();
    const RoomSignal& room = store_.room_signal();
    const Deadline moves_end = room.now() + settings_.patience.moves;
    RoomSignal::Watch watch(room);
    for (;;) {
        const bool moving = mover_ && blocks_are_held();
        Result<std::vector<BlockPtr>> taken = store_.acquire(wanted);
        if (taken.ok()) {
            const uint64_t come = std::min<uint64_t>(mine.promised, geometry_.slot_bytes(kind));
            mine.promised -= come;
            promised_ -= come;
            return std::move(taken.value()[0]);
        }
        Status s = std::move(taken).status();
        if (s.code() != TA_E_TIER_FULL) return s;
        if (!mover_) {
            if (drop_unused(TierKind::kDevice, wanted, true)) continue;
            return s;
        }
        // As for a begin, what blocks have left is room as soon as those are done who read there.
        if (!mine.patience_ends) mine.patience_ends = room.now() + settings_.patience.plans;
        if (store_.has_vacated() && watch.wait(*mine.patience_ends)) continue;
        const uint64_t bytes = evicted_at_once(TierKind::kDevice, wanted);
        if (evict(TierKind::kDevice, bytes, kNoDeadline) || demote(mine, bytes) ||
            drop_unused(TierKind::kDevice, wanted, false))
            continue;
        // If others neither move blocks now nor made room while this was looking for some, there is none.
        if (!moving && !blocks_are_held() && !watch.signalled()) return with_cause(std::move(s), failed_before);
        if (!watch.wait(moves_end)) return with_cause(std::move(s), failed_before);
    }
}

}  // namespace ta
