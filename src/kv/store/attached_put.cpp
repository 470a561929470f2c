// Puts published blocks into the store: when events tell of them, all again after the store has failed, and all for a flush.
#include <algorithm>
#include <utility>

#include "src/kv/store/attached.h"

namespace ta::store {
namespace {

constexpr size_t kAskedAtOnce = 256;  // keys in one kExists call

}  // namespace

bool Attached::take_events() {
    {
        const std::lock_guard lock(mutex_);
        rung_ = false;
    }
    std::vector<PrefixEvent> events;
    (void)pool_.prefixes().take(source_.space, *feed_, kAskedAtOnce, events);  // if the namespace has ended, whoever ended it
                                                                               // also stops this
    for (const PrefixEvent& e : events) {
        if (e.kind == PrefixEvent::Kind::kPublished) pending_.push_back({e.key, e.index});
    }
    if (events.size() < kAskedAtOnce) return false;
    const std::lock_guard lock(mutex_);
    rung_ = true;
    return true;
}

void Attached::put_some() {
    if (pending_.empty()) (void)take_events();
    if (pending_.empty() && std::exchange(behind_, false)) {
        const std::vector<Published> all = pool_.prefixes().entry_keys(source_.space);
        pending_.assign(all.begin(), all.end());
    }
    if (pending_.empty()) return;
    // After a failure a single block shows whether the store is back.
    const size_t n = std::min(pending_.size(), pause_.count() > 0 ? 1 : kAskedAtOnce);
    const std::vector<Published> some(pending_.begin(), pending_.begin() + ptrdiff_t(n));
    pending_.erase(pending_.begin(), pending_.begin() + ptrdiff_t(n));
    uint64_t stored = 0;
    (void)put(some, stored);  // if the store fails, call() has these blocks put again later
}

void Attached::flush_some() {
    Flush& f = *flush_;
    if (!std::exchange(f.begun, true)) {
        // The entries include the pending blocks. If the store fails meanwhile, call() notes that some may be missing.
        while (take_events()) pending_.clear();
        pending_.clear();
        behind_ = false;
        const std::vector<Published> all = pool_.prefixes().entry_keys(source_.space);
        f.left.assign(all.begin(), all.end());
        const std::lock_guard lock(mutex_);
        f.missing = f.left.size();
    }
    const size_t n = std::min(f.left.size(), kAskedAtOnce);
    const std::vector<Published> some(f.left.begin(), f.left.begin() + ptrdiff_t(n));
    f.left.erase(f.left.begin(), f.left.begin() + ptrdiff_t(n));
    uint64_t stored = 0;
    const bool goes = some.empty() || put(some, stored);
    {
        const std::lock_guard lock(mutex_);
        f.missing -= std::min(f.missing, stored);
    }
    if (!goes || f.left.empty()) end_flush();
}

void Attached::end_flush() {
    const std::lock_guard lock(mutex_);
    if (!flush_) return;
    flush_->done = true;
    flush_.reset();
    flushed_.notify_all();
}

bool Attached::put(std::span<const Published> blocks, uint64_t& stored) {
    const std::shared_ptr<Batch> asked = make_batch(blocks.size(), 0);
    for (const Published& p : blocks) {
        Result<BlockKey> key = key_in_store(source_, p.key);
        if (!key.ok()) return true;  // the namespace has ended
        asked->keys.push_back(key.value());
        asked->items.push_back({});
    }
    const auto failed = [&](uint64_t n) { count([n](Stats& s) { s.put_failures += n; }); };
    if (const Answer answer = call(Function::kExists, asked); answer != Answer::kGood) {
        if (answer == Answer::kFailed) failed(blocks.size());
        return false;
    }
    const size_t at_once = size_t(std::max<uint64_t>(settings_.batch_bytes / most_value_bytes(pool_), 1));
    std::vector<Published> absent;
    std::vector<BlockKey> keys;
    for (size_t i = 0; i < blocks.size(); ++i) {
        if (asked->items[i].result == TA_STORE_DONE) {
            ++stored;
            count([](Stats& s) { ++s.puts_present; });
            continue;
        }
        absent.push_back(blocks[i]);
        keys.push_back(asked->keys[i]);
    }
    for (size_t first = 0; first < absent.size(); first += at_once) {
        const size_t n = std::min(at_once, absent.size() - first);
        if (put_values(std::span(absent).subspan(first, n), std::span(keys).subspan(first, n), stored)) continue;
        failed(absent.size() - first);
        return false;
    }
    return true;
}

bool Attached::put_values(std::span<const Published> blocks, std::span<const BlockKey> keys, uint64_t& stored) {
    const size_t value_bytes = most_value_bytes(pool_);
    const std::shared_ptr<Batch> batch = make_batch(blocks.size(), value_bytes);
    {
        const Residency::BlockHold hold(pool_.residency());
        std::vector<uint8_t> slot;
        for (size_t i = 0; i < blocks.size(); ++i) {
            const Published& p = blocks[i];
            Result<std::vector<BlockPtr>> found = pool_.prefixes().find_blocks(source_.space, {&p.key, 1}, {&p.index, 1});
            if (!found.ok()) return true;
            const BlockPtr block = std::move(found.value()[0]);
            if (!block) {  // dropped meanwhile: the store need not have it
                ++stored;
                continue;
            }
            uint8_t* const to = batch->memory.get() + batch->items.size() * value_bytes;
            Result<size_t> bytes = write_value(source_, *block, p.index, keys[i], slot, to);
            if (!bytes.ok()) {
                const Status why = std::move(bytes).status();
                note_failed(why.detail() ? why.detail()->message : "a block could not be read");
                count([](Stats& s) { ++s.put_failures; });
                continue;
            }
            batch->keys.push_back(keys[i]);
            batch->items.push_back({nullptr, to, bytes.value(), TA_STORE_ABSENT, 0});
        }
    }
    if (batch->items.empty()) return true;
    if (call(Function::kPut, batch) != Answer::kGood) return false;
    uint64_t done = 0, bytes = 0;
    for (const ta_store_item& item : batch->items) {
        if (item.result != TA_STORE_DONE) continue;
        ++done;
        bytes += item.bytes;
    }
    stored += done;
    const uint64_t refused = batch->items.size() - done;
    count([&](Stats& s) {
        s.puts += done;
        s.bytes_put += bytes;
        s.put_failures += refused;
    });
    if (refused > 0) note_failed("put did not take all values");
    return true;
}

}  // namespace ta::store
