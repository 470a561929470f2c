// Loads: what a store has of a prefix comes, is checked, and is published.
#include <algorithm>
#include <utility>

#include "src/kv/store/attached.h"

namespace ta::store {

// Blocks of a batch that came, and those around them, until they are published.
struct Attached::Arrivals {
    explicit Arrivals(Pool& pool) : hold(pool.residency()), others_see(pool.residency(), mine) {}
    Residency::BlockHold hold;
    std::vector<BlockPtr> chain;  // by index
    Residency::Loading mine;
    Residency::LoadHold others_see;
    uint64_t came = 0;
};

Status Attached::bring(Load& load) {
    const size_t n = load.keys.size(), value_bytes = most_value_bytes(pool_);
    const size_t at_once = size_t(std::max<uint64_t>(settings_.batch_bytes / value_bytes, 1));
    std::vector<uint64_t> indices(n);
    for (size_t i = 0; i < n; ++i) indices[i] = i;
    uint64_t moved = 0, present = 0, missed = 0;
    size_t first = 0;  // that was missing last time
    for (bool begun = false;; begun = true) {
        TA_RETURN_IF_ERROR(pool_.check_open());
        std::vector<uint64_t> wanted;
        {
            Result<std::vector<BlockPtr>> found = pool_.prefixes().find_blocks(source_.space, load.keys, indices);
            if (!found.ok()) return std::move(found).status();
            const std::vector<BlockPtr>& chain = found.value();
            for (size_t i = 0; i < n && wanted.size() < at_once; ++i) {
                if (!chain[i]) wanted.push_back(i);
            }
            if (!begun) present = uint64_t(n - size_t(std::count(chain.begin(), chain.end(), nullptr)));
        }
        tickets_.update(load, moved, present);
        // Blocks that leave as fast as they come are not asked for for ever.
        if (wanted.empty() || (begun && wanted.front() <= first)) break;
        if (begun && missed > 0) break;
        first = size_t(wanted.front());
        if (load.cancelled) return fail(TA_E_CANCELLED, "the load was cancelled");
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
        }
        if (!call(Function::kGet, batch)) {
            count([&](Stats& s) { s.misses += wanted.size(); });
            if (const std::lock_guard lock(mutex_); stopping_) return fail(TA_E_CANCELLED, "the store was detached");
            break;
        }
        Arrivals arrivals(pool_);
        const Status s = take_in(load, *batch, wanted, arrivals);
        moved += arrivals.came;
        missed = wanted.size() - arrivals.came;
        count([&](Stats& c) {
            c.hits += arrivals.came;
            c.misses += missed;
        });
        tickets_.update(load, moved, present);
        if (!s.ok()) return s.clone();
    }
    return {};
}

// Takes in the blocks of a batch up to the first bad one. Blocks that came are published, even if the next one fails.
Status Attached::take_in(Load& load, const Batch& batch, std::span<const uint64_t> indices, Arrivals& arrivals) {
    const Geometry& g = pool_.geometry();
    std::vector<std::pair<StoredBlock, std::span<uint8_t>>> good;
    const size_t room = most_value_bytes(pool_);
    uint64_t bytes = 0;
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
        good.emplace_back(b.value(), value.subspan(sizeof(ValueHeader)));
        bytes += g.slot_bytes(PageKind(b.value().kind));
    }
    if (good.empty()) return {};
    std::vector<uint64_t> all(load.keys.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    Result<std::vector<BlockPtr>> found = pool_.prefixes().find_blocks(source_.space, load.keys, all);
    if (!found.ok()) return std::move(found).status();
    arrivals.chain = found.take();
    // Blocks that are here already are part of the load: others may move them, and nobody drops them.
    for (size_t i = 0; i < arrivals.chain.size(); ++i) {
        if (arrivals.chain[i]) arrivals.others_see.add({arrivals.chain[i], i});
    }
    TA_RETURN_IF_ERROR(pool_.prefixes().check_quota(source_.space, bytes));
    TA_RETURN_IF_ERROR(pool_.residency().promise_room(arrivals.mine, bytes));
    Status status;
    std::vector<size_t> fresh;
    for (auto& [stored, slot] : good) {
        BlockPtr& place = arrivals.chain[size_t(stored.index)];
        if (place) continue;  // somebody else published it meanwhile
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
        fresh.push_back(size_t(stored.index));
    }
    const auto n = size_t(std::find(arrivals.chain.begin(), arrivals.chain.end(), nullptr) - arrivals.chain.begin());
    TA_RETURN_IF_ERROR(pool_.publish_blocks(source_.space, std::span(load.keys).first(n), std::span(arrivals.chain).first(n)));
    arrivals.came = uint64_t(std::count_if(fresh.begin(), fresh.end(), [n](size_t i) { return i < n; }));
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
