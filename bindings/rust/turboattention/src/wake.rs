//! Tickets as futures: one thread for each pool or group that somebody awaits something of, and none while nobody does.
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

#[derive(Default)]
pub(crate) struct Watcher(Mutex<State>);

#[derive(Default)]
struct State {
    jobs: Vec<(ffi::ta_ticket, Job)>,
    running: bool,
}

impl Watcher {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets a ticket.
    pub(crate) fn forget(&self, ticket: ffi::ta_ticket) {
        self.lock().jobs.retain(|job| job.0 != ticket);
    }
}

/// Has a job done when a ticket is finished, in place of an earlier one.
pub(crate) fn watch<S: Source>(source: &Arc<S>, ticket: ffi::ta_ticket, job: Job) -> Result<()> {
    let mut state = source.watcher().lock();
    state.jobs.retain(|job| job.0 != ticket);
    state.jobs.push((ticket, job));
    if !state.running {
        let source = Arc::clone(source);
        let started = thread::Builder::new().name("turboattention".into()).spawn(move || run(&*source));
        if let Err(e) = started {
            state.jobs.pop();
            return Err(Error::new(ErrorKind::Limit, format!("no thread to wait for tickets: {}", e)));
        }
        state.running = true;
    }
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
            let job = {
                let mut state = source.watcher().lock();
                let found = state.jobs.iter().position(|job| job.0 == ticket);
                found.map(|i| state.jobs.swap_remove(i).1)
            };
            match job {
                Some(Job::Wake(waker)) => waker.wake(),
                Some(Job::Release(pool)) => {
                    if let Some(id) = source.received(ticket) {
                        drop(Sequence::from_raw(&pool, id));
                    }
                }
                None => {}
            }
        }
    }
}
