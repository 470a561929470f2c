#include "src/kv/store/calls.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace ta::store {
namespace {

constexpr std::chrono::milliseconds kGrace{100};  // how long the end waits for a function beyond its time

}  // namespace

Result<std::unique_ptr<Calls>> Calls::start(CallbackSet<ta_block_store>&& set) {
    std::unique_ptr<Calls> calls(new Calls);
    calls->state_->set = std::move(set);
    try {
        calls->thread_ = std::thread([state = calls->state_] { run(*state); });
    } catch (const std::system_error& e) {
        return fail(TA_E_LIMIT, "a thread of the store could not be started: %s", e.what());
    }
    return calls;
}

Calls::~Calls() {
    if (!thread_.joinable()) return;
    stop();
    bool ended;
    {
        std::unique_lock lock(state_->mutex);
        const Clock::time_point until =
            std::max(state_->running ? state_->deadline : Clock::time_point{}, Clock::now()) + kGrace;
        ended = state_->answered.wait_until(lock, until, [this] { return state_->ended; });
    }
    ended ? thread_.join() : thread_.detach();
}

Calls::End Calls::call(Function function, const std::shared_ptr<Batch>& batch, std::chrono::milliseconds timeout,
                       int32_t& returned) {
    for (size_t i = 0; i < batch->items.size(); ++i) {
        batch->items[i].key = batch->keys[i].data();
        batch->items[i].result = TA_STORE_ABSENT;
    }
    State& s = *state_;
    std::unique_lock lock(s.mutex);
    if (s.stopping) return End::kStopped;
    if (s.running) return End::kBusy;
    s.batch = batch;
    s.function = function;
    s.deadline = Clock::now() + timeout;
    s.running = true;
    const uint64_t number = ++s.calls;
    s.asked.notify_one();
    s.answered.wait_until(lock, s.deadline, [&] { return s.stopping || s.returned == number; });
    if (s.returned == number) {
        returned = s.result;
        return End::kReturned;
    }
    return s.stopping ? End::kStopped : End::kLate;
}

void Calls::stop() {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    state_->asked.notify_one();
    state_->answered.notify_all();
}

void Calls::run(State& s) {
    std::unique_lock lock(s.mutex);
    for (;;) {
        s.asked.wait(lock, [&s] { return s.stopping || s.running; });
        if (s.stopping) break;
        std::shared_ptr<Batch> batch = std::move(s.batch);
        const ta_store_fn functions[] = {s.set->exists, s.set->get, s.set->put, s.set->remove};
        const ta_store_fn function = functions[size_t(s.function)];
        const auto left = std::chrono::nanoseconds(s.deadline - Clock::now()).count();
        lock.unlock();
        const int32_t result = function(s.set->user, batch->items.data(), batch->items.size(), std::max<int64_t>(left, 0));
        batch.reset();  // after kLate this is the batch's last owner
        lock.lock();
        s.running = false;
        s.returned = s.calls;
        s.result = result;
        s.answered.notify_all();
    }
    s.batch.reset();
    CallbackSet<ta_block_store> set = std::move(s.set);
    lock.unlock();
    set = {};  // calls the set's release
    lock.lock();
    s.ended = true;
    s.answered.notify_all();
}

}  // namespace ta::store
