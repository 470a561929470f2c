#include "gil.h"

#include <pthread.h>
#include <unistd.h>

/* NOTES: this is C, since pthread_cleanup_push then needs no unwinding of this frame by the runtime of C++. The wheel has a copy of
 * that runtime of its own, which cannot take part in an unwinding that pthread_exit has begun. */

static void sleep_for_ever(void* unused) {
    (void)unused;
    for (;;) pause();
}

void restore_gil(PyThreadState* state) {
    pthread_cleanup_push(sleep_for_ever, NULL);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}

PyGILState_STATE ensure_gil(void) {
    PyGILState_STATE state;
    pthread_cleanup_push(sleep_for_ever, NULL);
    state = PyGILState_Ensure();
    pthread_cleanup_pop(0);
    return state;
}

PyObject* call_back(PyObject* callback, PyObject* arguments) {
    PyObject* result;
    pthread_cleanup_push(sleep_for_ever, NULL);
    result = PyObject_CallObject(callback, arguments);
    pthread_cleanup_pop(0);
    return result;
}
