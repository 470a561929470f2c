// A call of the ABI is no cancellation point.
#pragma once

#include <pthread.h>

namespace ta {

// While it lives, pthread_cancel of this thread is put off. Without it a thread that is cancelled in a read, a write or a wait
// would unwind through functions that do not throw, and the process would end. No system call.
class NoCancel {
  public:
    NoCancel() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
    ~NoCancel() { pthread_setcancelstate(before_, nullptr); }
    NoCancel(const NoCancel&) = delete;
    NoCancel& operator=(const NoCancel&) = delete;

  private:
    int before_ = PTHREAD_CANCEL_ENABLE;
};

}  // namespace ta
