#include "src/kv/store/attached.h"

#include <algorithm>
#include <cstdio>
#include <system_error>
#include <utility>

#include "src/core/text.h"

namespace ta::store {
namespace {

constexpr std::chrono::milliseconds kFirstPause{50}, kLongestPause{5000};
constexpr std::chrono::nanoseconds kLongWait = std::chrono::hours(1);

const char* name_of(Calls::Function function) {
    constexpr const char* kNames[] = {"exists", "get", "put", "remove"};
    return kNames[size_t(function)];
}

}  // namespace

Status Attached::start(CallbackSet<ta_block_store>&& set) {
    Result<std::unique_ptr<Calls>> calls = Calls::start(std::move(set));
    if (!calls.ok()) return std::move(calls).status();
    calls_ = calls.take();
    if (settings_.write_through) {
        feed_ = std::make_shared<PrefixFeed>([this] {
            const std::lock_guard lock(mutex_);
            rung_ = true;
            wake_.notify_one();
        });
        TA_RETURN_IF_ERROR(pool_.prefixes().follow(source_.space, feed_));
        rung_ = true;  // for the blocks that are published already
    }
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& e) {
        return fail(TA_E_LIMIT, "a thread of the store could not be started: %s", e.what());
    }
    return {};
}

void Attached::stop(Status why) {
    {
        const std::lock_guard lock(mutex_);
        if (!stopping_) why_ = std::move(why);
        stopping_ = true;
        wake_.notify_one();
        flushed_.notify_all();
    }
    pool_.blocks().room_signal().notify();  // a load may wait on the signal
    if (calls_) calls_->stop();
    if (thread_.joinable()) thread_.join();
    end_all();
    if (feed_) {
        feed_->silence();
        pool_.prefixes().unfollow(source_.space, *feed_);
        feed_.reset();
    }
    calls_.reset();
}

bool Attached::load(const std::shared_ptr<Load>& load) {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;
    loads_.push_back(load);
    wake_.notify_one();
    return true;
}

Result<uint64_t> Attached::flush(int64_t nanoseconds) {
    if (!settings_.write_through)
        return fail(TA_E_STATE, "the store of namespace 0x%llx has no write_through", (unsigned long long)source_.space)
            .argument(1);
    Result<NamespaceStats> published = pool_.prefixes().stats(source_.space);
    if (!published.ok()) return std::move(published).status();
    auto fresh = std::make_shared<Flush>();
    fresh->missing = published.value().entries;
    std::unique_lock lock(mutex_);
    if (!next_flush_) next_flush_ = std::move(fresh);
    const std::shared_ptr<Flush> mine = next_flush_;
    wake_.notify_one();
    const auto over = [&] { return mine->done || stopping_; };
    if (nanoseconds < 0 || nanoseconds > kLongWait.count()) {
        flushed_.wait(lock, over);
    } else {
        flushed_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), over);
    }
    if (stopping_ && !mine->done) return fail(TA_E_CANCELLED, "the store was detached");
    return mine->missing;
}

Stats Attached::stats() const {
    const std::lock_guard lock(mutex_);
    return stats_;
}

void Attached::run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
        run_one(lock);
        if (stopping_) break;
        const bool has_puts = rung_ || !pending_.empty() || behind_;
        if (!loads_.empty() || flush_ || next_flush_) continue;
        if (has_puts && may_ask()) continue;
        wake_.wait_until(lock, has_puts ? paused_until_ : Clock::now() + kLongWait,
                         [&] { return stopping_ || !loads_.empty() || next_flush_ || (rung_ && !has_puts); });
    }
}

// Serves one load, a part of a flush, and a part of what is to be put, so that none starves the others.
void Attached::run_one(std::unique_lock<std::mutex>& lock) {
    std::shared_ptr<Load> load;
    if (!loads_.empty()) {
        load = std::move(loads_.front());
        loads_.pop_front();
    }
    if (!flush_) flush_ = std::move(next_flush_);
    lock.unlock();
    if (load) {
        Status s;
        try {
            s = bring(*load);
        } catch (const std::bad_alloc&) {
            s = fail(TA_E_MEMORY, "no memory for a load from a store");
        }
        {
            const std::lock_guard own(mutex_);
            if (stopping_ && !s.ok() && !why_.ok()) s = why_.clone();
        }
        tickets_.finish(*load, std::move(s));
    }
    try {
        if (flush_) flush_some();
        if (feed_ && may_ask()) put_some();
    } catch (const std::bad_alloc&) {
        note_failed("no memory for what is to be put");
        behind_ = true;
        pending_.clear();
        end_flush();
    }
    lock.lock();
    stats_.waiting = pending_.size() + (flush_ ? flush_->left.size() : 0);
}

void Attached::end_all() {
    std::list<std::shared_ptr<Load>> left;
    Status why;
    {
        const std::lock_guard lock(mutex_);
        left.swap(loads_);
        why = why_.clone();
        flush_.reset();
        next_flush_.reset();
    }
    for (const auto& load : left)
        tickets_.finish(*load, why.ok() ? fail(TA_E_CANCELLED, "the store was detached") : why.clone());
}

std::shared_ptr<Batch> Attached::make_batch(size_t n, size_t value_bytes) const {
    auto batch = std::make_shared<Batch>();
    batch->keys.reserve(n);
    batch->items.reserve(n);
    if (value_bytes > 0) batch->memory = std::make_unique_for_overwrite<uint8_t[]>(n * value_bytes);
    return batch;
}

Attached::Answer Attached::call(Function function, const std::shared_ptr<Batch>& batch) {
    int32_t returned = 0;
    const Calls::End end = calls_->call(function, batch, settings_.timeout, returned);
    if (end == Calls::End::kStopped) return Answer::kNone;
    if (end == Calls::End::kBusy) {
        pause();
        return Answer::kNone;
    }
    count([](Stats& s) { ++s.calls; });
    if (end == Calls::End::kReturned && returned == 0) {
        pause_ = {};
        paused_until_ = {};
        count([](Stats& s) { s.pausing = 0; });
        return Answer::kGood;
    }
    char what[96];
    if (end == Calls::End::kLate) {
        std::snprintf(what, sizeof what, "%s did not return within %lld ms", name_of(function),
                      (long long)settings_.timeout.count());
    } else {
        std::snprintf(what, sizeof what, "%s returned %d", name_of(function), int(returned));
    }
    count([&](Stats& s) { ++(end == Calls::End::kLate ? s.timeouts : s.calls_failed); });
    note_failed(what);
    pause();
    return Answer::kFailed;
}

void Attached::pause() {
    behind_ = feed_ != nullptr;  // the store may come back without what it had
    pause_ = std::clamp(2 * pause_, kFirstPause, kLongestPause);
    paused_until_ = Clock::now() + pause_;
    count([](Stats& s) { s.pausing = 1; });
}

void Attached::note_failed(const char* what) {
    count([&](Stats& s) {
        s.failed_unix_ms =
            std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
        std::snprintf(s.failure, sizeof s.failure, "%s", what);
        make_plain(s.failure);
    });
}

}  // namespace ta::store
