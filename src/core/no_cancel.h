// A call of the ABI is no cancellation point.
#pragma once

#include <pthread.h>

#include <utility>

namespace ta {

// Keeps `work` in a frame of its own. The frame of without_cancel may be unwound, and this one may not.
template <class Work>
[[gnu::noinline]] auto run_apart(Work&& work) noexcept {
    return std::forward<Work>(work)();
}

// Returns the result of `work`, which does not throw. Meanwhile pthread_cancel of this thread is put off: one that is cancelled
// in a read, a write or a wait would unwind through functions that do not throw, and the process would end. No system call.
//
// If the thread's cancellation is asynchronous, one that was put off ends the thread within pthread_setcanceltype below. So
// neither this function nor one between it and the caller of the ABI may be noexcept or have anything to destroy. The state alone
// is not enough: glibc looks only at the type when it delivers a cancellation that is on its way.
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
