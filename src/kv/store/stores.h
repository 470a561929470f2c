// The stores attached to the namespaces of a pool; each has at most one.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "src/kv/store/attached.h"

namespace ta::store {

// Belongs to the pool's handle. Internally synchronised.
class Stores {
  public:
    Stores() = default;
    // Call it first. Does not fail, since the pool exists already.
    void serve(std::shared_ptr<Pool> pool) noexcept;
    ~Stores() { end_all({}); }
    Stores(const Stores&) = delete;
    Stores& operator=(const Stores&) = delete;

    Status attach(Tenant space, CallbackSet<ta_block_store>&& set, const Settings& settings);
    // TA_E_STATE: the namespace has no store.
    Status detach(Tenant space);
    // For a namespace or a pool that has ended: waiting loads fail with `why`.
    void end(Tenant space, const Status& why);
    void end_all(const Status& why);

    Result<uint64_t> load(Tenant space, std::span<const uint8_t> keys);
    Result<uint64_t> flush(Tenant space, int64_t nanoseconds);
    Result<Stats> stats(Tenant space) const;
    std::map<Tenant, Stats> all_stats() const;

    // True if a load has this ticket.
    static bool is_ticket(uint64_t ticket) { return (ticket & Tickets::kMark) != 0; }
    // True if a store was ever attached.
    bool used() const { return used_.load(std::memory_order_relaxed); }
    Tickets& tickets() { return tickets_; }

  private:
    Result<std::shared_ptr<Attached>> find(Tenant space) const;
    std::shared_ptr<Attached> take(Tenant space);

    std::shared_ptr<Pool> pool_;
    Tickets tickets_;
    std::atomic<bool> used_{false};
    mutable std::mutex mutex_;
    std::unordered_map<Tenant, std::shared_ptr<Attached>> stores_;
};

}  // namespace ta::store
