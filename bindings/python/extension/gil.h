/* Calls that may wait for the GIL, below frames that must not be unwound.
 *
 * Until Python 3.13 a thread that waits for the GIL while the interpreter ends is ended by pthread_exit, which unwinds its stack.
 * Frames of C++ that are noexcept, as nanobind's and the library's are, then abort the process. Here such a thread sleeps for ever,
 * as it does from Python 3.14 on; the end of the process ends it. */
#pragma once

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

/* PyEval_RestoreThread */
void restore_gil(PyThreadState* state);
/* PyGILState_Ensure */
PyGILState_STATE ensure_gil(void);
/* PyObject_CallObject */
PyObject* call_back(PyObject* callback, PyObject* arguments);

#ifdef __cplusplus
}

// This thread has not the GIL meanwhile.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked() { restore_gil(state_); }

  private:
    PyThreadState* const state_;
};

// This thread has the GIL meanwhile.
class Locked {
  public:
    Locked() : state_(ensure_gil()) {}
    Locked(const Locked&) = delete;
    Locked& operator=(const Locked&) = delete;
    ~Locked() { PyGILState_Release(state_); }

  private:
    const PyGILState_STATE state_;
};
#endif
