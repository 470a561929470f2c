use std::any::Any;
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::{ptr, slice};

use crate::error::call;
use crate::{ffi, Error, Result};

struct State<'a> {
    report: &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    panic: Option<Box<dyn Any + Send>>,
}

unsafe extern "C" fn report(user: *mut c_void, done: u64, total: u64) -> i32 {
    // SAFETY: `user` is the State below, of the thread that makes the call.
    let state = unsafe { &mut *user.cast::<State<'_>>() };
    match catch_unwind(AssertUnwindSafe(|| (state.report)(done, total))) {
        Ok(ControlFlow::Continue(())) => 0,
        Ok(ControlFlow::Break(())) => 1,
        Err(panic) => {
            state.panic = Some(panic);
            1
        }
    }
}

/// Makes a call that reports its progress. A panic of the callback goes on when the call has returned.
pub(crate) fn with_progress(
    callback: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
    f: impl FnOnce(*const ffi::ta_progress, *mut ffi::ta_error) -> ffi::ta_status,
) -> Result<()> {
    let mut state = State { report: callback, panic: None };
    let progress = ffi::ta_progress {
        report: Some(report),
        user: ptr::addr_of_mut!(state).cast(),
        ..ffi::ta_progress::new() // no release: the call does not outlive this frame
    };
    let result = call(|err| f(&progress, err));
    match state.panic {
        Some(panic) => resume_unwind(panic),
        None => result,
    }
}

/// What takes the bytes of an export, with the offset where they stand.
pub(crate) type Write<'a> = dyn FnMut(u64, &[u8]) -> Result<()> + 'a;

struct SinkState<'a> {
    write: &'a mut Write<'a>,
    /// What it panicked with or returned instead of `Ok`.
    ended: Option<std::thread::Result<Error>>,
}

unsafe extern "C" fn write(user: *mut c_void, offset: u64, data: *const c_void, bytes: u64) -> i32 {
    // SAFETY: `user` is the SinkState below, of the thread that makes the call; the library lends so many bytes.
    let (state, bytes) = unsafe { (&mut *user.cast::<SinkState<'_>>(), slice::from_raw_parts(data.cast(), bytes as usize)) };
    state.ended = match catch_unwind(AssertUnwindSafe(|| (state.write)(offset, bytes))) {
        Ok(Ok(())) => return 0,
        Ok(Err(error)) => Some(Ok(error)),
        Err(panic) => Some(Err(panic)),
    };
    1
}

/// Makes a call that writes to a sink. If `to` fails, the call returns its error; if `to` panics, the panic goes on when the
/// call has returned.
pub(crate) fn with_sink<'a>(
    to: &'a mut Write<'a>,
    f: impl FnOnce(*const ffi::ta_sink, *mut ffi::ta_error) -> ffi::ta_status,
) -> Result<()> {
    let mut state = SinkState { write: to, ended: None };
    let sink = ffi::ta_sink {
        write: Some(write),
        user: ptr::addr_of_mut!(state).cast(),
        ..ffi::ta_sink::new() // no release: the call does not outlive this frame
    };
    let result = call(|err| f(&sink, err));
    match state.ended {
        Some(Err(panic)) => resume_unwind(panic),
        Some(Ok(error)) => Err(error),
        None => result,
    }
}
