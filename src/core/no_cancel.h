// A call of the ABI is no cancellation point.
#pragma once

#include <pthread.h>

#include <utility>

namespace ta {

// A frame of its own, which `without_cancel` may be unwound above.
template <class Work>
[[gnu::noinline]] auto run_apart(Work&& work) noexcept {
    return std::forward<Work>(work)();
}

// What `work`, which does not throw, returns. While it runs pthread_cancel of this thread is put off: a thread that is cancelled
// in a read, a write or a wait would unwind through functions that do not throw, and the process would end. No system call.
//
// NOTES: where the thread's cancellation is asynchronous, what was put off ends the thread within the last call here. So
// neither this function nor one between it and the caller of the ABI is noexcept or has anything to destroy. The state alone
// would not do: a cancellation that is on its way looks at nothing but the type (glibc).
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
