//! What stands in for the linker: calls that load the library when the first of them is made.
use std::ffi::CStr;
use std::os::raw::{c_char, c_int, c_void};
use std::ptr;

use crate::{ta_error, TA_ABI_VERSION, TA_E_UNSUPPORTED};

extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
    fn dlerror() -> *mut c_char;
}
const RTLD_NOW: c_int = 2;

/// Opens the library, or says why not. It stays open.
pub(crate) fn open() -> Result<*mut c_void, String> {
    let name = format!("libturboattention.so.{}\0", TA_ABI_VERSION);
    // SAFETY: the name ends in a NUL; dlerror speaks of this thread's last call and is read at once.
    unsafe {
        let handle = dlopen(name.as_ptr().cast(), RTLD_NOW);
        if !handle.is_null() {
            return Ok(handle);
        }
        let reason = dlerror();
        Err(if reason.is_null() { name } else { CStr::from_ptr(reason).to_string_lossy().into_owned() })
    }
}

/// A call of the library, if it has it.
///
/// # Safety
/// `F` is the type of a pointer to a function of this name.
pub(crate) unsafe fn find<F: Copy>(library: *mut c_void, name: &str) -> Option<F> {
    assert!(name.ends_with('\0') && std::mem::size_of::<F>() == std::mem::size_of::<*mut c_void>());
    let address = dlsym(library, name.as_ptr().cast());
    if address.is_null() {
        None
    } else {
        Some(std::mem::transmute_copy(&address))
    }
}

/// What a call returns that cannot be made.
pub(crate) trait Missing {
    fn missing() -> Self;
}
impl Missing for i32 {
    fn missing() -> i32 {
        TA_E_UNSUPPORTED
    }
}
impl Missing for u32 {
    fn missing() -> u32 {
        0
    }
}
impl Missing for () {
    fn missing() {}
}
impl Missing for *const c_char {
    fn missing() -> *const c_char {
        b"unknown\0".as_ptr().cast()
    }
}

/// Fills in the `err` of a call that cannot be made.
///
/// # Safety
/// As for the call: null or writable.
pub(crate) unsafe fn report(err: *mut ta_error, call: &str, reason: &str) {
    if let Some(err) = err.as_mut() {
        *err = ta_error { code: TA_E_UNSUPPORTED, ..Default::default() };
        for place in [&mut err.layer, &mut err.head, &mut err.argument, &mut err.tier, &mut err.rank] {
            *place = -1;
        }
        for place in [&mut err.sequence, &mut err.block, &mut err.token, &mut err.bytes] {
            *place = -1;
        }
        let text = format!("{}: {}", call, reason);
        let end = (0..err.message.len()).rev().find(|&n| text.is_char_boundary(n.min(text.len()))).unwrap_or(0);
        let bytes = &text.as_bytes()[..end.min(text.len())];
        ptr::copy_nonoverlapping(bytes.as_ptr().cast(), err.message.as_mut_ptr(), bytes.len());
    }
}

/// `err` alone is filled in.
macro_rules! report_to {
    (err, $err:expr, $call:expr, $reason:expr) => {
        $crate::stub::report($err, $call, $reason)
    };
    ($other:ident, $value:expr, $call:expr, $reason:expr) => {
        let _ = $value;
    };
}

macro_rules! functions {
    ($(pub fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $output:ty)?;)*) => {
        pub(crate) struct Calls {
            $($name: Option<unsafe extern "C" fn($($type),*) $(-> $output)?>,)*
        }
        fn calls() -> Result<&'static Calls, &'static str> {
            static ONCE: std::sync::Once = std::sync::Once::new();
            static mut CALLS: Result<Calls, String> = Err(String::new());
            // SAFETY: written once, before anybody reads it. The types are those of the header.
            unsafe {
                ONCE.call_once(|| {
                    CALLS = stub::open().map(|library| Calls {
                        $($name: stub::find(library, concat!(stringify!($name), "\0")),)*
                    });
                });
                match &*std::ptr::addr_of!(CALLS) {
                    Ok(calls) => Ok(calls),
                    Err(reason) => Err(reason),
                }
            }
        }
        $(
            /// See `turboattention.h`. `TA_E_UNSUPPORTED` where the library cannot be loaded or lacks this call.
            pub unsafe fn $name($($argument: $type),*) $(-> $output)? {
                let reason = match calls() {
                    Ok(Calls { $name: Some(call), .. }) => return call($($argument),*),
                    Ok(_) => "the library that was loaded lacks this call",
                    Err(reason) => reason,
                };
                let _ = reason;
                $(report_to!($argument, $argument, stringify!($name), reason);)*
                stub::Missing::missing()
            }
        )*
        pub(crate) fn loaded() -> Result<(), &'static str> {
            calls().map(drop)
        }
    };
}

/// Loads the library, unless that was done. The text of the error is the system's.
pub fn load() -> Result<(), &'static str> {
    crate::loaded()
}
