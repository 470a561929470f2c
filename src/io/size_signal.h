// A write beyond RLIMIT_FSIZE sends SIGXFSZ to the writing thread, which by default ends the program. This scope blocks the
// signal on its thread, so that the write only fails with an error and no handler of the program runs. A signal that was
// already pending stays pending.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

namespace ta {

class NoSizeSignal {
  public:
    NoSizeSignal() {
        sigemptyset(&signal_);
        sigaddset(&signal_, SIGXFSZ);
        pthread_sigmask(SIG_BLOCK, &signal_, &before_);
        was_blocked_ = sigismember(&before_, SIGXFSZ) == 1;
        was_pending_ = was_blocked_ && is_pending();
    }
    ~NoSizeSignal() {
        constexpr timespec kNow{};
        if (!was_pending_ && is_pending()) sigtimedwait(&signal_, nullptr, &kNow);
        if (!was_blocked_) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }
    NoSizeSignal(const NoSizeSignal&) = delete;
    NoSizeSignal& operator=(const NoSizeSignal&) = delete;

  private:
    static bool is_pending() {
        sigset_t pending;
        return sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
    }

    sigset_t signal_, before_;
    bool was_blocked_, was_pending_;
};

}  // namespace ta
