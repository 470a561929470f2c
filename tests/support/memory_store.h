// A block store in memory, which tests make fail, stall, lose and lie.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/tiers.h"

namespace ta::testing {

// Several namespaces may have it. Thread-safe.
class MemoryStore {
  public:
    enum Function { kExists, kGet, kPut, kRemove };
    using Value = std::vector<uint8_t>;

    // Counters of an attachment's calls.
    struct Client {
        MemoryStore* store;
        std::atomic<int> released{0}, running{0}, at_once{0}, after_release{0};
        std::mutex mutex;
        std::set<std::thread::id> threads;
    };

    // A set for one attachment; `client` lives as long as the store.
    ta_block_store attach(Client** client = nullptr) {
        clients_.push_back(std::make_unique<Client>());
        Client* const c = clients_.back().get();
        c->store = this;
        if (client) *client = c;
        auto s = sized<ta_block_store>();
        s.exists = [](void* user, ta_store_item* items, uint64_t n, int64_t left) {
            return call(user, kExists, items, n, left);
        };
        s.get = [](void* user, ta_store_item* items, uint64_t n, int64_t left) { return call(user, kGet, items, n, left); };
        s.put = [](void* user, ta_store_item* items, uint64_t n, int64_t left) { return call(user, kPut, items, n, left); };
        s.remove = [](void* user, ta_store_item* items, uint64_t n, int64_t left) {
            return call(user, kRemove, items, n, left);
        };
        s.user = c;
        s.release = [](void* user) { ++static_cast<Client*>(user)->released; };
        return s;
    }

    // Called before each function, without a lock; anything but 0 is what it returns.
    void before(std::function<int32_t(Function, ta_store_item*, uint64_t)> what) {
        const std::lock_guard lock(mutex_);
        before_ = std::make_shared<decltype(what)>(std::move(what));
    }
    void well() {
        const std::lock_guard lock(mutex_);
        before_.reset();
    }
    std::map<std::string, Value> values() {
        const std::lock_guard lock(mutex_);
        return values_;
    }
    void set(std::map<std::string, Value> values) {
        const std::lock_guard lock(mutex_);
        values_ = std::move(values);
    }
    int calls(Function f) const { return calls_[f]; }

  private:
    static int32_t call(void* user, Function f, ta_store_item* items, uint64_t n, int64_t left) {
        Client& c = *static_cast<Client*>(user);
        if (c.running++ > 0) ++c.at_once;
        if (c.released > 0) ++c.after_release;
        {
            const std::lock_guard lock(c.mutex);
            c.threads.insert(std::this_thread::get_id());
        }
        const int32_t r = n == 0 || left < 0 ? 99 : c.store->run(f, items, n);
        --c.running;
        return r;
    }
    int32_t run(Function f, ta_store_item* items, uint64_t n) {
        std::shared_ptr<std::function<int32_t(Function, ta_store_item*, uint64_t)>> before;
        {
            const std::lock_guard lock(mutex_);
            before = before_;
        }
        ++calls_[f];
        if (before) {
            if (const int32_t r = (*before)(f, items, n); r != 0) return r;
        }
        const std::lock_guard lock(mutex_);
        for (uint64_t i = 0; i < n; ++i) {
            ta_store_item& item = items[i];
            const std::string key(reinterpret_cast<const char*>(item.key), 32);
            const auto found = values_.find(key);
            if (f == kPut) {
                const auto* data = static_cast<const uint8_t*>(item.data);
                values_[key].assign(data, data + item.bytes);
            } else if (found == values_.end()) {
                continue;
            } else if (f == kRemove) {
                values_.erase(found);
            } else if (f == kGet) {
                if (found->second.size() <= item.bytes)
                    std::copy(found->second.begin(), found->second.end(), static_cast<uint8_t*>(item.data));
                item.bytes = found->second.size();
            }
            item.result = TA_STORE_DONE;
        }
        return 0;
    }

    std::mutex mutex_;
    std::map<std::string, Value> values_;
    std::shared_ptr<std::function<int32_t(Function, ta_store_item*, uint64_t)>> before_;
    std::atomic<int> calls_[4] = {};
    std::vector<std::unique_ptr<Client>> clients_;
};

// ---- calls on a namespace with a store

inline void attach_store(const KvPool& pool, ta_namespace space, const ta_block_store& store, int32_t timeout_ms = 0,
                         ta_switch authenticate = TA_DEFAULT, ta_switch write_through = TA_DEFAULT, uint64_t batch_bytes = 0) {
    auto o = sized<ta_store_options>();
    o.timeout_ms = timeout_ms;
    o.authenticate = authenticate;
    o.write_through = write_through;
    o.batch_bytes = batch_bytes;
    ta_error err;
    require(ta_namespace_attach_store(pool.get(), space, &store, &o, &err), err);
}
inline uint64_t flush_store(const KvPool& pool, ta_namespace space, int64_t nanoseconds = -1) {
    uint64_t missing = 12345;
    ta_error err;
    require(ta_namespace_flush_store(pool.get(), space, nanoseconds, &missing, &err), err);
    return missing;
}
inline ta_ticket start_load(const KvPool& pool, ta_namespace space, const std::vector<uint8_t>& keys) {
    ta_ticket ticket = 0;
    ta_error err;
    require(ta_namespace_load(pool.get(), space, keys.data(), keys.size() / 32, &ticket, &err), err);
    return ticket;
}
inline ta_move_info load_from_store(const KvPool& pool, ta_namespace space, const std::vector<uint8_t>& keys) {
    return wait(pool, start_load(pool, space, keys));
}
inline ta_store_stats store_stats(const KvPool& pool, ta_namespace space) {
    auto s = sized<ta_store_stats>();
    ta_error err;
    require(ta_namespace_get_store_stats(pool.get(), space, &s, &err), err);
    return s;
}
// Until it holds, up to 20 s.
inline bool soon(const std::function<bool()>& holds) {
    for (int i = 0; i < 4000; ++i) {
        if (holds()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return holds();
}

}  // namespace ta::testing
