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

// Decode takes up to 19% longer in a layer that is observed, a step at 2 bits 2.5% in all (bench/results/h200-attention.md). Wanted: 2%.
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

// Checks what can be known before the tiers are made.
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

// Opens the disk tier. Published blocks that a persistent file has stay there until the pool is complete.
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

// Full blocks of `tier` of at least so many bytes, or all there are: by priority, then in the policy's order. Sinks and pinned
// blocks stay. Shared blocks come only if others are not enough. `for_disk`: without blocks that a plan may be reading, or that
// were promised to one.
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
        // Published blocks that nobody uses come before all others.
        while (bytes > 0 && next_unused != unused.end() && level.has(next_unused->block->retention()))
            take(std::move(*next_unused++));
        if (bytes == 0) return true;
        candidates.set_level(level);
        candidates.set_shared(false);
        // NOTES: an item owns its block, too: both choices are made before the first item of the level.
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
    if (bytes == 0 || loads_.empty()) return items;
    // Last the blocks of loads: those that they have read, which no sequence has, and those that were here, which some may have.
    std::unordered_set<const Block*> others = for_disk ? shared_and_readable(residents_) : std::unordered_set<const Block*>();
    for (const MoveItem& item : items) others.insert(item.block.get());
    for (const Loading* load : loads_) {
        for (const MoveItem& item : load->blocks) {
            if (bytes == 0) return items;
            const bool leaves = item.block->tier() == tier && may_leave(*item.block) && !stays(item);
            if (leaves && others.insert(item.block.get()).second) take(MoveItem(item));
        }
    }
    return items;
}

Residency::BlockHold::BlockHold(const Residency& residency, Holder holder)
    : residency_(residency), holder_(holder ? holder : this) {
    const std::lock_guard lock(residency_.holds_mutex_);
    residency_.holds_.push_back(this);
    residency_.hold_count_.fetch_add(1);
}

Residency::BlockHold::~BlockHold() {
    {
        const std::lock_guard lock(residency_.holds_mutex_);
        std::erase(residency_.holds_, this);
        residency_.hold_count_.fetch_sub(1);
    }
    residency_.store_.room_signal().notify();
}

Residency::HolderWait::HolderWait(const Residency& residency, Holder holder) : residency_(residency), holder_(holder) {
    if (!holder_) return;
    const std::lock_guard lock(residency_.holds_mutex_);
    residency_.waiting_.push_back(holder_);
}

Residency::HolderWait::~HolderWait() {
    if (!holder_) return;
    const std::lock_guard lock(residency_.holds_mutex_);
    residency_.waiting_.erase(std::find(residency_.waiting_.begin(), residency_.waiting_.end(), holder_));
}

bool Residency::HolderWait::others_hold() const {
    if (residency_.blocks_move()) return true;
    const std::lock_guard lock(residency_.holds_mutex_);
    const std::vector<Holder>& waiting = residency_.waiting_;
    return std::any_of(residency_.holds_.begin(), residency_.holds_.end(), [&](const BlockHold* hold) {
        return std::find(waiting.begin(), waiting.end(), hold->holder_) == waiting.end();
    });
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
    add_all({&item, 1});
}

void Residency::LoadHold::add_all(std::span<MoveItem> items) {
    std::lock_guard lock(residency_.residents_.lock());
    loading_.blocks.insert(loading_.blocks.end(), std::move_iterator(items.begin()), std::move_iterator(items.end()));
}

bool Residency::make_room(TierKind tier, std::span<const PageKind> wanted, bool for_all, Deadline until) {
    // While a tier refuses blocks, what others have there would be lost in vain.
    if (tier != TierKind::kDevice && tiers_[tier]->health().state != TierState::kOk) return false;
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
    // On a persistent disk a slot is free only after its record is erased.
    if (tier == TierKind::kDisk) disk_->wait_for_erased(kErasePatience);
    return true;
}

uint64_t Residency::evicted_at_once(TierKind tier, std::span<const PageKind> wanted) const {
    const uint64_t budget = tier == TierKind::kDevice ? store_.budget() : tiers_[tier]->stats().budget;
    return std::max(bytes_of(wanted), budget / kEvictedPart);
}

bool Residency::evict(TierKind tier, uint64_t bytes, Deadline until) {
    if (tier != TierKind::kDevice && tiers_[tier]->health().state == TierState::kFailed) return false;  // its blocks are lost
    residents_.take_in_attention(false);
    // If the tier below takes no more, the next one may. The disk takes only blocks that no plan may be reading.
    for (std::optional<TierKind> to = tiers_.below(tier); to; to = tiers_.below(*to)) {
        if (evict_to(tier, *to, bytes, until)) return true;
    }
    if (tier != TierKind::kDevice || tiers_.empty()) return false;
    return suspend_some(bytes, until);  // full blocks were not enough
}

bool Residency::suspend_some(uint64_t bytes, Deadline until) {
    std::vector<MoveItem> suspended;  // each block once: who reopens them counts their owners
    std::unordered_set<const Block*> listed;
    const auto choose = [&](const BlockFilter& passes) {
        std::vector<MoveItem> items = suspend_idle(bytes, passes);
        for (const MoveItem& item : items) {
            if (listed.insert(item.block.get()).second) suspended.push_back(item);
        }
        return items;
    };
    bool moved = false;
    for (std::optional<TierKind> to = tiers_.below(TierKind::kDevice); to && !moved; to = tiers_.below(*to))
        moved = move_some(TierKind::kDevice, *to, until, choose);
    reopen_suspended(suspended);
    return moved;
}

// Reopens blocks that were sealed to leave but did not, so that the next step needs no copy of them.
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
        const long owners = idle_owners(shared, s, *last) + 1;  // and the item itself
        if (!s.may_be_read() && last.use_count() <= owners) last->reopen();
    };
    residents_.visit(std::cref(see));
}

// Sink blocks and open blocks of idle sequences in the device tier: at least so many bytes, or all there are. The sequences
// unused for longest come first. Seals open blocks.
std::vector<MoveItem> Residency::suspend_idle(uint64_t bytes, const BlockFilter& passes) {
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
        if (passes && !passes(block, b)) return;
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

// NOTES: the step that wrote the block has ended, but a GPU may still be writing; reading its memory waits for that.
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

// Lives while an eviction chooses and moves blocks. Declared before these.
class Residency::Choosing {
  public:
    explicit Choosing(Residency& residency) : residency_(residency) { residency_.choosing_.fetch_add(1); }
    ~Choosing() {
        residency_.choosing_.fetch_sub(1);
        if (found_) residency_.store_.room_signal().notify();
    }
    Choosing(const Choosing&) = delete;
    Choosing& operator=(const Choosing&) = delete;
    // If there were none, nobody waits for them.
    void found_some() { found_ = true; }

  private:
    Residency& residency_;
    bool found_ = false;
};

bool Residency::evict_to(TierKind from, TierKind to, uint64_t bytes, Deadline until) {
    Choosing choosing(*this);
    return move_some(from, to, until, [&](const BlockFilter& passes) {
        std::vector<MoveItem> items = coldest(from, bytes, to == TierKind::kDisk, passes);
        if (!items.empty()) choosing.found_some();
        return items;
    });
}

bool Residency::move_some(TierKind from, TierKind to, Deadline until, const Choice& choose) {
    std::bitset<kPageKinds> tried;  // no room for these kinds
    const auto kind_there = [&](const Block& block, uint64_t index) {
        return size_t(kind_moved(geometry_, numerics_, block, index, from, to));
    };
    const BlockFilter untried = [&](const Block& block, uint64_t index) {
        return !tried[kind_there(block, index)] && !block.refuses(to);
    };
    for (bool again = false;; again = true) {
        const std::vector<MoveItem> items = choose(again ? untried : BlockFilter());
        if (items.empty()) return false;
        const MoveProgress progress = mover_->run(items, to, MoveReason::kEviction, until);
        if (progress.moved > 0) return true;
        // Blocks that turned out to be damaged, or that somebody pinned or reserved meanwhile, are not chosen again.
        const auto is_stuck = [&](const MoveItem& item) { return item.block->stuck() || item.block->refuses(to); };
        if (std::any_of(items.begin(), items.end(), is_stuck)) continue;
        note_failed(progress);
        if (progress.status.code() != TA_E_TIER_FULL || tiers_[to]->health().state != TierState::kOk) return false;
        // Another kind may fit: the tier may have free slots of its size.
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

// Says why blocks cannot leave the device. Empty: a tier below has room for a block.
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
    constexpr std::chrono::seconds kPause{1};  // after an eviction that moved nothing, or if no block could leave
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
    Choosing choosing(*this);
    std::vector<MoveItem> items = coldest(TierKind::kDevice, used - part(settings_.low_percent), *to == TierKind::kDisk);
    keep_room_after_ = (now + std::chrono::steady_clock::duration(kPause)).count();
    if (items.empty()) {
        keeping_room_.compare_exchange_strong(last, 0);  // unless another step's eviction found some
        return;
    }
    choosing.found_some();
    if (Result<uint64_t> ticket = mover_->submit(std::move(items), *to, MoveReason::kEviction); ticket.ok())
        keeping_room_ = ticket.value();
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

Status Residency::make_resident(std::span<Resident* const> seqs, Deadline until, Deadline moves_end) {
    if (store_.blocks_on_disk() == 0) return {};
    RoomSignal::Watch watch(store_.room_signal());
    for (;;) {
        std::optional<BlockOfStep> of_others;
        TA_RETURN_IF_ERROR(promote(seqs, until, of_others));
        if (!of_others) return {};
        TA_RETURN_IF_ERROR(check_open());
        if (!watch.wait(moves_end)) {
            return fail(TA_E_BUSY, "another call promotes the block from the disk, and was not done in time")
                .tier(TA_TIER_DISK)
                .sequence(int64_t(of_others->sequence))
                .block(int64_t(of_others->block));
        }
    }
}

// Promotes the blocks that no other call promotes. `of_others` gets the first block that another call promotes.
Status Residency::promote(std::span<Resident* const> seqs, Deadline until, std::optional<BlockOfStep>& of_others) {
    const auto is_full = [](const MoveProgress& p) { return p.failed > 0 && p.status.code() == TA_E_TIER_FULL; };
    const auto on_disk = [](const MoveItem& item) { return item.block->tier() == TierKind::kDisk; };
    // Where to promote to: memory below the device, fastest first. If all of it is full, the device itself.
    std::vector<TierKind> places;
    for (std::optional<TierKind> t = tiers_.below(TierKind::kDevice); t && is_memory_below(*t); t = tiers_.below(*t))
        places.push_back(*t);
    places.push_back(TierKind::kDevice);
    for (size_t i = 0; i < seqs.size(); ++i) {
        std::vector<MoveItem> items;
        for (size_t b = 0; b < seqs[i]->blocks.size(); ++b) {
            const BlockPtr& block = seqs[i]->blocks[b];
            if (block->tier() != TierKind::kDisk) continue;
            if (!block->moving()) {
                items.push_back({block, b});
            } else if (!of_others) {
                of_others = {i, b};
            }
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
            // If only the copy was damaged, reads the record again.
            std::erase_if(items, [&](const MoveItem& item) { return !on_disk(item) || item.block->stuck(); });
            if (!items.empty()) {
                MoveProgress again = mover_->run(items, places[place], MoveReason::kNeeded, until);
                if (again.failed == 0 && again.moved == progress.failed) progress = std::move(again);
            }
        }
        if (const auto still = std::find_if(items.begin(), items.end(), on_disk);
            progress.skipped > 0 && still != items.end() && !of_others)
            of_others = {i, size_t(still->index)};  // it began to move meanwhile
        if (progress.failed == 0) continue;
        if (progress.status.code() != TA_E_TIER_FULL) counters_.failed[size_t(TierKind::kDisk)] += progress.failed;
        return std::move(progress.status).sequence(int64_t(i));
    }
    return {};
}

Result<std::vector<BlockPtr>> Residency::new_blocks(std::span<const PageKind> kinds, std::span<const Tenant> tenants,
                                                    Loading& mine) {
    Result<std::vector<BlockPtr>> taken = store_.acquire(kinds, nullptr, tenants);
    if (!taken.ok()) return taken;
    const uint64_t come = std::min(mine.promised, bytes_of(kinds));
    mine.promised -= come;
    promised_ -= come;
    return taken;
}

Result<BlockPtr> Residency::new_block(PageKind kind, Loading& mine) {
    const PageKind wanted[] = {kind};
    const uint64_t failed_before = failed_evictions();
    const RoomSignal& room = store_.room_signal();
    const Deadline moves_end = room.now() + settings_.patience.moves;
    RoomSignal::Watch watch(room);
    for (;;) {
        const bool moving = blocks_move();
        Result<std::vector<BlockPtr>> taken = new_blocks(wanted, {}, mine);
        if (taken.ok()) return std::move(taken.value()[0]);
        Status s = std::move(taken).status();
        if (s.code() != TA_E_TIER_FULL) return s;
        TA_RETURN_IF_ERROR(check_open());
        if (mine.check) TA_RETURN_IF_ERROR(mine.check());
        if (!mover_) {
            if (drop_unused(TierKind::kDevice, wanted, true)) continue;
            return s;
        }
        // Like a begin, waits for readers of places that blocks have left: these places then become free.
        if (!mine.patience_ends) mine.patience_ends = room.now() + settings_.patience.plans;
        if (store_.has_vacated() && watch.wait(*mine.patience_ends)) continue;
        const uint64_t bytes = evicted_at_once(TierKind::kDevice, wanted);
        if (evict(TierKind::kDevice, bytes, kNoDeadline) || drop_unused(TierKind::kDevice, wanted, false)) continue;
        // No room will come if nobody moves blocks and nobody has made room during this look.
        const HolderWait wait(*this, mine.holder);
        if (!moving && !wait.others_hold() && !watch.signalled()) return with_cause(std::move(s), failed_before);
        if (!watch.wait(moves_end)) return with_cause(std::move(s), failed_before);
    }
}

}  // namespace ta
