//! Tickets as futures. While somebody awaits a ticket of a pool or group, one thread wakes the futures of this pool or group.
//! Otherwise there is no such thread.
//!
//! A job is dropped without the lock: its waker may own another ticket's future, whose drop takes the lock.
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::thread;
use std::time::Duration;

use crate::{ffi, Error, ErrorKind, Pool, Result, Sequence};

/// Who knows how far tickets are.
pub(crate) trait Source: Send + Sync + 'static {
    /// Waits for a ticket for so long; whether it is finished, or not known any more.
    fn finished(&self, ticket: ffi::ta_ticket, patience: Duration) -> bool;
    /// The sequence of a receive that is done.
    fn received(&self, ticket: ffi::ta_ticket) -> Option<u64>;
    fn watcher(&self) -> &Watcher;
}

/// What is to be done when a ticket is finished.
pub(crate) enum Job {
    Wake(Waker),
    /// Nobody wants what was received.
    Release(Pool),
}

pub(crate) struct Watcher {
    state: Mutex<State>,
    process: u32,
}

impl Default for Watcher {
    fn default() -> Self {
        Watcher { state: Mutex::default(), process: process::id() }
    }
}

#[derive(Default)]
struct State {
    jobs: Vec<(ffi::ta_ticket, Job)>,
    running: bool,
}

impl State {
    fn take(&mut self, ticket: ffi::ta_ticket) -> Option<Job> {
        let found = self.jobs.iter().position(|job| job.0 == ticket);
        found.map(|i| self.jobs.swap_remove(i).1)
    }
}

impl Watcher {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a ticket.
    pub(crate) fn forget(&self, ticket: ffi::ta_ticket) {
        if self.process != process::id() {
            return; // in a forked child the thread that had the lock is not there to unlock it
        }
        let forgotten = self.lock().take(ticket);
        drop(forgotten);
    }
}

/// Has a job done when a ticket is finished, in place of an earlier one.
pub(crate) fn watch<S: Source>(source: &Arc<S>, ticket: ffi::ta_ticket, job: Job) -> Result<()> {
    let mut state = source.watcher().lock();
    let earlier = state.take(ticket);
    if !state.running {
        let source = Arc::clone(source);
        let started = thread::Builder::new().name("turboattention".into()).spawn(move || run(&*source));
        if let Err(e) = started {
            drop(state);
            return Err(Error::new(ErrorKind::Limit, format!("no thread to wait for tickets: {}", e)));
        }
        state.running = true;
    }
    state.jobs.push((ticket, job));
    drop(state);
    drop(earlier);
    Ok(())
}

fn run<S: Source>(source: &S) {
    // A millisecond at a time on one of them, then a look at all.
    let mut first = 0;
    loop {
        let tickets: Vec<_> = {
            let mut state = source.watcher().lock();
            if state.jobs.is_empty() {
                state.running = false;
                return;
            }
            state.jobs.iter().map(|job| job.0).collect()
        };
        first = (first + 1) % tickets.len();
        source.finished(tickets[first], Duration::from_millis(1));
        for ticket in tickets.into_iter().filter(|&ticket| source.finished(ticket, Duration::ZERO)) {
            let job = source.watcher().lock().take(ticket);
            // What a waker of the caller's panics of must not end this thread, which others wait for.
            let _ = catch_unwind(AssertUnwindSafe(|| match job {
                Some(Job::Wake(waker)) => waker.wake(),
                Some(Job::Release(pool)) => {
                    if let Some(id) = source.received(ticket) {
                        drop(Sequence::from_raw(&pool, id));
                    }
                }
                None => {}
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::raw::{c_int, c_uint};
    use std::sync::mpsc::{self, Sender};
    use std::sync::Condvar;
    use std::task::Wake;

    const LONG: Duration = Duration::from_secs(20);

    /// Tickets finish all at once.
    #[derive(Default)]
    struct Fake {
        watcher: Watcher,
        done: Mutex<bool>,
        changed: Condvar,
    }

    impl Source for Fake {
        fn finished(&self, _: ffi::ta_ticket, patience: Duration) -> bool {
            *self.changed.wait_timeout_while(self.done.lock().unwrap(), patience, |done| !*done).unwrap().0
        }
        fn received(&self, _: ffi::ta_ticket) -> Option<u64> {
            None
        }
        fn watcher(&self) -> &Watcher {
            &self.watcher
        }
    }

    /// Owns a future of another ticket, and says that it was woken, or panics.
    struct Owner(Arc<Fake>, ffi::ta_ticket, Option<Sender<()>>);

    impl Wake for Owner {
        fn wake(self: Arc<Self>) {
            self.2.as_ref().expect("somebody to tell").send(()).unwrap();
        }
    }

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.watcher.forget(self.1);
        }
    }

    fn owner(source: &Arc<Fake>, ticket: ffi::ta_ticket, woken: Option<Sender<()>>) -> Job {
        Job::Wake(Arc::new(Owner(source.clone(), ticket, woken)).into())
    }

    #[test]
    fn a_waker_may_own_another_future() {
        let (source, (done, result)) = (Arc::new(Fake::default()), mpsc::channel());
        thread::spawn(move || {
            watch(&source, 1, owner(&source, 2, None)).unwrap();
            watch(&source, 1, owner(&source, 3, None)).unwrap(); // drops the first one
            source.watcher.forget(1);
            done.send(source.watcher.lock().jobs.len()).unwrap();
        });
        assert_eq!(result.recv_timeout(LONG), Ok(0));
    }

    #[test]
    fn a_waker_may_panic() {
        let (source, (woken, result)) = (Arc::new(Fake::default()), mpsc::channel());
        watch(&source, 1, owner(&source, 3, None)).unwrap();
        watch(&source, 2, owner(&source, 4, Some(woken.clone()))).unwrap();
        *source.done.lock().unwrap() = true;
        source.changed.notify_all();
        assert_eq!(result.recv_timeout(LONG), Ok(()));
        watch(&source, 5, owner(&source, 6, Some(woken))).unwrap();
        assert_eq!(result.recv_timeout(LONG), Ok(()));
    }

    extern "C" {
        fn fork() -> c_int;
        fn alarm(seconds: c_uint) -> c_uint;
        fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
        fn _exit(status: c_int) -> !;
    }

    #[test]
    fn a_forked_child_needs_no_lock() {
        let (source, mut status) = (Fake::default(), -1);
        let held = source.watcher.lock();
        let child = unsafe { fork() };
        if child == 0 {
            unsafe { alarm(5) }; // ends a child that waits
            source.watcher.forget(1);
            unsafe { _exit(0) };
        }
        drop(held);
        assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
