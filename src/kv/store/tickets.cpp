#include "src/kv/store/tickets.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ta::store {

Result<std::shared_ptr<Load>> Tickets::add(std::vector<BlockKey>&& keys, uint64_t asked) {
    auto load = std::make_shared<Load>();
    load->counts.resize(keys.size());
    load->keys = std::move(keys);
    load->progress.blocks = asked;
    const std::lock_guard lock(mutex_);
    if (known_.size() - done_.size() >= kMostWaiting)
        return fail(TA_E_LIMIT, "%zu loads from stores wait already", kMostWaiting);
    load->ticket = ++last_;
    known_.emplace(load->ticket, load);
    return load;
}

void Tickets::forget(const Load& load) {
    const std::lock_guard lock(mutex_);
    known_.erase(load.ticket);
}

void Tickets::count(Load& load) noexcept {
    const auto count = [&](Load::Counts as) { return uint64_t(std::count(load.counts.begin(), load.counts.end(), as)); };
    load.progress.moved = count(Load::Counts::kMoved);
    load.progress.present = count(Load::Counts::kPresent);
}

void Tickets::update(Load& load) {
    const std::lock_guard lock(mutex_);
    load.progress.state = TA_MOVE_RUNNING;
    count(load);
}

void Tickets::finish(Load& load, Status status) noexcept {
    const std::lock_guard lock(mutex_);
    count(load);
    MoveProgress& p = load.progress;
    p.skipped = p.blocks - p.moved - p.present;
    p.state = status.ok()                                         ? TA_MOVE_DONE
              : load.cancelled && status.code() == TA_E_CANCELLED ? TA_MOVE_CANCELLED
                                                                  : TA_MOVE_FAILED;
    p.status = std::move(status);
    load.keys = {};
    load.counts = {};
    done_.push_back(load.ticket);
    if (done_.size() > kMostFinished) {
        known_.erase(done_.front());
        done_.erase(done_.begin());
    }
    finished_.notify_all();
    mover_ ? mover_->tell_finished(load.ticket) : told_.add(load.ticket);
}

Result<std::shared_ptr<Load>> Tickets::find(uint64_t ticket) const {
    const auto found = known_.find(ticket);
    if (found != known_.end()) return found->second;
    return fail(TA_E_STALE, "%llu is no ticket of this pool, or one that finished long ago", (unsigned long long)ticket);
}

Result<MoveProgress> Tickets::wait(uint64_t ticket, int64_t nanoseconds) const {
    std::unique_lock lock(mutex_);
    Result<std::shared_ptr<Load>> found = find(ticket);
    if (!found.ok()) return std::move(found).status();
    const std::shared_ptr<Load> load = found.take();
    const auto over = [&load] { return load->progress.state >= TA_MOVE_DONE; };
    constexpr int64_t kForEver = int64_t{1} << 60;  // of a clock that counts nanoseconds
    if (nanoseconds < 0 || nanoseconds > kForEver) {
        finished_.wait(lock, over);
    } else if (nanoseconds > 0) {
        finished_.wait_for(lock, std::chrono::nanoseconds(nanoseconds), over);
    }
    const MoveProgress& p = load->progress;
    return MoveProgress{p.state, p.blocks, p.moved, p.present, p.skipped, p.failed, p.status.clone()};
}

Status Tickets::cancel(uint64_t ticket) {
    {
        const std::lock_guard lock(mutex_);
        Result<std::shared_ptr<Load>> found = find(ticket);
        if (!found.ok()) return std::move(found).status();
        found.value()->cancelled = true;
    }
    room_->notify();
    return {};
}

Result<int> Tickets::descriptor() {
    if (mover_) return mover_->finished_descriptor();
    const std::lock_guard lock(mutex_);
    told_.expect(FinishedTickets::kMost);
    if (!told_.open()) return fail(TA_E_LIMIT, "the system gives no event descriptor");
    return told_.descriptor();
}

Result<uint64_t> Tickets::take_finished(std::span<uint64_t> out) {
    if (mover_) return mover_->take_finished(out);
    if (told_.descriptor() < 0) return fail(TA_E_STATE, "nobody waits for tickets: ta_kv_pool_descriptor belongs first");
    return told_.take(out);
}

}  // namespace ta::store
