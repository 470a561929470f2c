// Loads: blocks of a prefix that a store has are brought, checked and published.
#include <algorithm>
#include <functional>
#include <utility>

#include "src/kv/store/attached.h"

namespace ta::store {

// A checked value of a batch.
struct Attached::Value {
    StoredBlock block;
    std::span<uint8_t> slot;
};

// The blocks of a batch that came, and the other blocks of the load, until they are published.
struct Attached::Arrivals {
    // `check`: as Residency::Loading::check.
    Arrivals(Pool& pool, Residency::Holder holder, std::function<Status()> check)
        : hold(pool.residency(), holder), others_see(pool.residency(), mine) {
        mine.holder = holder;
        mine.check = std::move(check);
    }
    Residency::BlockHold hold;
    std::vector<BlockPtr> chain;  // by index
    Residency::Loading mine;
    Residency::LoadHold others_see;
    std::vector<uint64_t> came, present;  // indices that were asked for: came: brought by the store; present: published by
                                          // others meanwhile
};

// Ends cancelled loads in the queue at once, instead of after the present load.
void Attached::end_cancelled() {
    std::list<std::shared_ptr<Load>> ended;
    {
        const std::lock_guard lock(mutex_);
        for (auto i = loads_.begin(); i != loads_.end();) {
            const auto load = i++;
            if ((*load)->cancelled) ended.splice(ended.end(), loads_, load);
        }
    }
    for (const auto& load : ended) tickets_.finish(*load, fail(TA_E_CANCELLED, "the load was cancelled"));
}

// An error ends the load.
Status Attached::check_load(const Load& load) {
    end_cancelled();
    if (load.cancelled) return fail(TA_E_CANCELLED, "the load was cancelled");
    const std::lock_guard lock(mutex_);
    return stopping_ ? fail(TA_E_CANCELLED, "the store was detached") : Status();
}

// Chooses the first blocks that `chain` lacks, and counts the others as present.
std::vector<uint64_t> Attached::choose_wanted(Load& load, std::span<const std::optional<TierKind>> chain, size_t most) {
    std::vector<uint64_t> wanted;
    for (size_t i = 0; i < chain.size(); ++i) {
        Load::Counts& counts = load.counts[i];
        if (chain[i]) {
            if (counts == Load::Counts::kSkipped) counts = Load::Counts::kPresent;
        } else if (wanted.size() < most) {
            wanted.push_back(i);
        }
    }
    return wanted;
}

Status Attached::bring(Load& load) {
    const size_t n = load.keys.size(), value_bytes = most_value_bytes(pool_);
    const size_t at_once = size_t(std::max<uint64_t>(settings_.batch_bytes / value_bytes, 1));
    std::vector<uint64_t> indices(n);
    for (size_t i = 0; i < n; ++i) indices[i] = i;
    uint64_t missed = 0;
    size_t first = 0;  // the first missing block of the round before
    for (bool begun = false;; begun = true) {
        TA_RETURN_IF_ERROR(pool_.check_open());
        Result<std::vector<std::optional<TierKind>>> found = pool_.prefixes().find_tiers(source_.space, load.keys, indices);
        if (!found.ok()) return std::move(found).status();
        const std::vector<uint64_t> wanted = choose_wanted(load, found.value(), at_once);
        tickets_.update(load);
        // If blocks leave as fast as they come, the load ends.
        if (wanted.empty() || (begun && wanted.front() <= first)) break;
        if (begun && missed > 0) break;
        first = size_t(wanted.front());
        TA_RETURN_IF_ERROR(check_load(load));
        if (!may_ask()) {
            count([&](Stats& s) { s.misses += wanted.size(); });
            break;
        }
        const std::shared_ptr<Batch> batch = make_batch(wanted.size(), value_bytes);
        for (const uint64_t i : wanted) {
            Result<BlockKey> key = key_in_store(source_, load.keys[size_t(i)]);
            if (!key.ok()) return std::move(key).status();
            uint8_t* const room = batch->memory.get() + batch->items.size() * value_bytes;
            batch->keys.push_back(key.value());
            batch->items.push_back({nullptr, room, value_bytes, TA_STORE_ABSENT, 0});
            load.counts[size_t(i)] = Load::Counts::kSkipped;  // until it comes, even if it was here before
        }
        if (call(Function::kGet, batch) != Answer::kGood) {
            count([&](Stats& s) { s.misses += wanted.size(); });
            TA_RETURN_IF_ERROR(check_load(load));
            break;
        }
        Result<std::vector<Value>> good = check_values(*batch, wanted);
        if (!good.ok()) return std::move(good).status();
        Arrivals arrivals(pool_, this, [&] { return check_load(load); });
        const Status s = good.value().empty() ? Status() : take_in(load, good.value(), arrivals);
        for (const uint64_t i : arrivals.came) load.counts[size_t(i)] = Load::Counts::kMoved;
        for (const uint64_t i : arrivals.present) load.counts[size_t(i)] = Load::Counts::kPresent;
        missed = wanted.size() - arrivals.came.size() - arrivals.present.size();
        count([&](Stats& c) {
            c.hits += arrivals.came.size();
            c.misses += missed;
        });
        tickets_.update(load);
        if (!s.ok()) return s.clone();
    }
    return {};
}

// The values of a batch up to the first bad one. Tells the store to remove a bad one; holds no block meanwhile.
Result<std::vector<Attached::Value>> Attached::check_values(const Batch& batch, std::span<const uint64_t> indices) {
    std::vector<Value> good;
    const size_t room = most_value_bytes(pool_);
    for (size_t n = 0; n < indices.size(); ++n) {
        const ta_store_item& item = batch.items[n];
        if (item.result != TA_STORE_DONE) break;
        const std::span<uint8_t> value(batch.memory.get() + n * room, std::min<uint64_t>(item.bytes, room));
        Result<StoredBlock> b = item.bytes > room ? fail(TA_E_CORRUPT, "a value of the store has %llu bytes; the most is %zu",
                                                         (unsigned long long)item.bytes, room)
                                                  : check_value(source_, batch.keys[n], indices[n], value);
        count([&](Stats& s) { s.bytes_got += value.size(); });
        if (!b.ok()) {
            const Status why = std::move(b).status();
            if (why.code() == TA_E_STALE || why.code() == TA_E_CLOSED) return why.clone();
            refuse(batch.keys[n], why);
            break;
        }
        good.push_back({b.value(), value.subspan(sizeof(ValueHeader))});
    }
    return good;
}

// Takes in values and publishes their blocks, even if a later one fails.
Status Attached::take_in(Load& load, std::span<const Value> values, Arrivals& arrivals) {
    std::vector<uint64_t> all(load.keys.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    Result<std::vector<BlockPtr>> found = pool_.prefixes().find_blocks(source_.space, load.keys, all);
    if (!found.ok()) return std::move(found).status();
    arrivals.chain = found.take();
    // Makes the load an owner of the blocks that are here already: others may move them, and nobody drops them.
    for (size_t i = 0; i < arrivals.chain.size(); ++i) {
        if (arrivals.chain[i]) arrivals.others_see.add({arrivals.chain[i], i});
    }
    uint64_t bytes = 0;
    for (const Value& v : values) {
        if (!arrivals.chain[size_t(v.block.index)]) bytes += pool_.geometry().slot_bytes(PageKind(v.block.kind));
    }
    TA_RETURN_IF_ERROR(pool_.prefixes().check_quota(source_.space, bytes));
    TA_RETURN_IF_ERROR(pool_.residency().promise_room(arrivals.mine, bytes));
    Status status;
    std::vector<uint64_t> fresh, others;
    for (const auto& [stored, slot] : values) {
        BlockPtr& place = arrivals.chain[size_t(stored.index)];
        if (place) {  // others have published it meanwhile
            others.push_back(stored.index);
            continue;
        }
        Result<BlockPtr> block = pool_.residency().new_block(PageKind(stored.kind), arrivals.mine);
        if (block.ok()) {
            block.value()->set_tenant(source_.space);
            status = fill_block(pool_, *block.value(), stored, slot);
        } else {
            status = std::move(block).status();
        }
        if (!status.ok()) {
            status = std::move(status).block(int64_t(stored.index));
            break;
        }
        place = block.value();
        arrivals.others_see.add({block.take(), stored.index});
        fresh.push_back(stored.index);
    }
    const auto n = size_t(std::find(arrivals.chain.begin(), arrivals.chain.end(), nullptr) - arrivals.chain.begin());
    TA_RETURN_IF_ERROR(
        pool_.publish_blocks(source_.space, std::span(load.keys).first(n), std::span(arrivals.chain).first(n), this));
    std::erase_if(fresh, [n](uint64_t i) { return i >= n; });
    arrivals.came = std::move(fresh);
    arrivals.present = std::move(others);
    return status;
}

void Attached::refuse(const BlockKey& key, const Status& why) {
    count([](Stats& s) { ++s.refused; });
    note_failed(why.detail() ? why.detail()->message : "a value of the store was refused");
    const std::shared_ptr<Batch> batch = make_batch(1, 0);
    batch->keys.push_back(key);
    batch->items.push_back({});
    (void)call(Function::kRemove, batch);
}

}  // namespace ta::store
