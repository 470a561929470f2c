// Keeps calls of the ABI from being cancellation points.
#pragma once

#include <pthread.h>

#include <utility>

namespace ta {

// Runs `work` in a frame of its own: without_cancel's frame may be unwound, this one must not be.
template <class Work>
[[gnu::noinline]] auto run_apart(Work&& work) noexcept {
    return std::forward<Work>(work)();
}

// Returns the result of `work`, which does not throw. Meanwhile pthread_cancel of this thread is deferred. Without that, a
// thread cancelled in a read, a write or a wait would unwind through noexcept functions, and the process would end. No system
// call is needed.
//
// If the thread's cancellation is asynchronous, a deferred one ends the thread within pthread_setcanceltype below. So neither
// this function nor any between it and the caller of the ABI may be noexcept or have anything to destroy. Setting the state
// alone is not enough: when glibc delivers a cancellation that is under way, it looks at the type only.
template <class Work>
auto without_cancel(Work&& work) {
    int state, type;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &type);
    const auto result = run_apart(std::forward<Work>(work));
    pthread_setcancelstate(state, nullptr);
    pthread_setcanceltype(type, nullptr);
    return result;
}

}  // namespace ta
