// A queue of changes to a namespace's entries, for one follower. src/kv/prefix.h hands the events out in order. The queue is
// bounded: when it overflows, the follower is told all entries again.
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
        kReset = 1,  // void all earlier events; kPublished of each entry follows
        kPublished,
        kDropped,
        kMoved,  // its block has moved to another tier
    };
    BlockKey key{};
    uint64_t number = 0;  // in its feed, from 1; a gap before a kReset counts lost events
    uint64_t index = 0;   // of the block in its sequence
    Kind kind = Kind::kReset;
    TierKind tier = TierKind::kDevice;
};

// The PrefixStore guards it, except for the bell.
class PrefixFeed {
  public:
    // `bell` is called, with the store's lock held, when the empty queue gets an event, and when the namespace ends. It must
    // not fail.
    explicit PrefixFeed(std::function<void()> bell) : bell_(std::move(bell)) { queue_.reserve(kMostQueued); }
    PrefixFeed(const PrefixFeed&) = delete;
    PrefixFeed& operator=(const PrefixFeed&) = delete;

    // After this nobody calls the bell.
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
    std::vector<PrefixEvent> told_again_;  // is handed out before the queue
    size_t told_ = 0;                      // events of told_again_ that were handed out
    uint64_t numbers_ = 0;
    bool reset_ = true;  // the queue lacks events: all entries are to be told again
    bool ended_ = false;
};

}  // namespace ta
