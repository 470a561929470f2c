use std::any::Any;
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::ptr;

use crate::error::call;
use crate::{ffi, Result};

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
