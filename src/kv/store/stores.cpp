#include "src/kv/store/stores.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "src/core/checked.h"

namespace ta::store {

void Stores::serve(std::shared_ptr<Pool> pool) noexcept {
    pool_ = std::move(pool);
    tickets_.serve(*pool_);
}

Status Stores::attach(Tenant space, CallbackSet<ta_block_store>&& set, const Settings& settings) {
    TA_RETURN_IF_ERROR(pool_->check_open());
    TA_RETURN_IF_ERROR(pool_->prefixes().check(space));
    {
        const std::lock_guard lock(mutex_);
        if (stores_.contains(space))
            return fail(TA_E_STATE, "namespace 0x%llx has a store already", (unsigned long long)space).argument(1);
        const auto attached = std::make_shared<Attached>(*pool_, space, settings, tickets_);
        TA_RETURN_IF_ERROR(attached->start(std::move(set)));
        stores_.emplace(space, attached);
        used_.store(true, std::memory_order_relaxed);
    }
    // The namespace may have ended before the store was there.
    Status s = pool_->prefixes().check(space);
    if (!s.ok()) end(space, s);
    return s;
}

std::shared_ptr<Attached> Stores::take(Tenant space) {
    const std::lock_guard lock(mutex_);
    const auto found = stores_.find(space);
    if (found == stores_.end()) return nullptr;
    std::shared_ptr<Attached> attached = std::move(found->second);
    stores_.erase(found);
    return attached;
}

Status Stores::detach(Tenant space) {
    TA_RETURN_IF_ERROR(pool_->prefixes().check(space));
    const std::shared_ptr<Attached> attached = take(space);
    if (!attached) return fail(TA_E_STATE, "namespace 0x%llx has no store", (unsigned long long)space).argument(1);
    attached->stop(fail(TA_E_CANCELLED, "the store was detached"));
    return {};
}

void Stores::end(Tenant space, const Status& why) {
    if (const std::shared_ptr<Attached> attached = take(space)) attached->stop(why.clone());
}

void Stores::end_all(const Status& why) {
    std::unordered_map<Tenant, std::shared_ptr<Attached>> all;
    {
        const std::lock_guard lock(mutex_);
        all.swap(stores_);
    }
    for (const auto& [space, attached] : all) attached->stop(why.clone());
}

Result<std::shared_ptr<Attached>> Stores::find(Tenant space) const {
    TA_RETURN_IF_ERROR(pool_->prefixes().check(space));
    const std::lock_guard lock(mutex_);
    const auto found = stores_.find(space);
    if (found != stores_.end()) return found->second;
    return fail(TA_E_STATE, "namespace 0x%llx has no store", (unsigned long long)space).argument(1);
}

Result<uint64_t> Stores::load(Tenant space, std::span<const uint8_t> keys) {
    Result<std::shared_ptr<Attached>> found = find(space);
    if (!found.ok()) return std::move(found).status();
    // Limits the load to what all tiers together can hold.
    const TierSettings& tiers = pool_->tier_settings();
    uint64_t bytes = pool_->blocks().budget();  // on a CPU the budget may be any number
    for (const uint64_t tier : {tiers.peer_budget, tiers.host_budget, tiers.disk_budget})
        bytes = checked_add(bytes, tier).value_or(UINT64_MAX);
    const uint64_t asked = keys.size() / kPrefixKeyBytes,
                   most = std::min<uint64_t>(asked, bytes / least_block_bytes(pool_->geometry()) + 1);
    Result<std::vector<BlockKey>> hashed = pool_->prefixes().hash_keys(space, keys.first(size_t(most) * kPrefixKeyBytes));
    if (!hashed.ok()) return std::move(hashed).status();
    Result<std::shared_ptr<Load>> load = tickets_.add(hashed.take(), asked);
    if (!load.ok()) return std::move(load).status();
    const uint64_t ticket = load.value()->ticket;
    bool taken = false;
    try {
        taken = found.value()->load(load.value());
    } catch (...) {
        tickets_.forget(*load.value());
        throw;
    }
    if (taken) return ticket;
    tickets_.forget(*load.value());
    return fail(TA_E_STATE, "namespace 0x%llx has no store", (unsigned long long)space).argument(1);
}

Result<uint64_t> Stores::flush(Tenant space, int64_t nanoseconds) {
    Result<std::shared_ptr<Attached>> found = find(space);
    if (!found.ok()) return std::move(found).status();
    return found.value()->flush(nanoseconds);
}

Result<Stats> Stores::stats(Tenant space) const {
    Result<std::shared_ptr<Attached>> found = find(space);
    if (!found.ok()) return std::move(found).status();
    return found.value()->stats();
}

std::map<Tenant, Stats> Stores::all_stats() const {
    const std::lock_guard lock(mutex_);
    std::map<Tenant, Stats> all;
    for (const auto& [space, store] : stores_) all.emplace(space, store->stats());
    return all;
}

}  // namespace ta::store
