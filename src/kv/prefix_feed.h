// Queue of changes to a namespace's entries, for one who follows it: src/kv/prefix.h hands events out in their order. It is
// bounded; when it overflows, all entries are told again.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "tiering/disk/request.h"
#include "tiering/tier.h"

namespace ta {

struct PrefixEvent {
    enum class Kind : int32_t {
        kReset = 1,  // all that was told before is void; kPublished of each entry follows
        kPublished,
        kDropped,
        kMoved,  // its block is in another tier
    };
    BlockKey key{};
    uint64_t number = 0;  // in its feed, from 1; a gap before a kReset: so many were lost
    uint64_t index = 0;   // of the block in its sequence
    Kind kind = Kind::kReset;
    TierKind tier = TierKind::kDevice;
};

// Its store guards it, but for the bell.
class PrefixFeed {
  public:
    // `bell` is called with the store's lock held when there are events again after all were taken, and when the namespace ends.
    // It does not fail.
    explicit PrefixFeed(std::function<void()> bell) : bell_(std::move(bell)) { queue_.reserve(kMostQueued); }
    PrefixFeed(const PrefixFeed&) = delete;
    PrefixFeed& operator=(const PrefixFeed&) = delete;

    // From then on nobody calls the bell.
    void silence() {
        const std::lock_guard lock(bell_mutex_);
        bell_ = nullptr;
    }

  private:
    friend class PrefixStore;
    static constexpr size_t kMostQueued = 8192;

    void ring() {
        const std::lock_guard lock(bell_mutex_);
        if (bell_) bell_();
    }
    void add(PrefixEvent event) noexcept {
        event.number = ++numbers_;
        reset_ = reset_ || queue_.size() == kMostQueued;
        if (reset_) return;
        queue_.push_back(event);
        if (queue_.size() == 1) ring();
    }

    std::mutex bell_mutex_;
    std::function<void()> bell_;
    std::vector<PrefixEvent> queue_;
    std::vector<PrefixEvent> told_again_;  // goes before the queue
    size_t told_ = 0;                      // of told_again_
    uint64_t numbers_ = 0;
    bool reset_ = true;  // the queue lacks events: all entries are told again
    bool ended_ = false;
};

}  // namespace ta
