//! The feature `stub` where there is no library.
#![cfg(feature = "stub")]
use turboattention::*;

#[test]
fn without_library() {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--ignored", "--exact", "in_child", "--nocapture"]).env("LD_LIBRARY_PATH", "");
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "run by without_library"]
fn in_child() {
    let reason = match ffi::load() {
        Ok(()) => return, // the system has one
        Err(reason) => reason,
    };
    assert!(reason.contains("libturboattention.so"), "{}", reason);
    let error = Context::new(ContextOptions::default()).unwrap_err();
    assert_eq!((error.kind, &*error.message), (ErrorKind::Unsupported, reason));
    assert_eq!((version(), build_info(), ErrorKind::Io.to_string()), (0, "unknown", "unknown".into()));
    // A call of the sys crate fills in its ta_error, too.
    let mut err = ffi::ta_error::default();
    assert_eq!(unsafe { ffi::ta_context_health(std::ptr::null(), &mut err) }, ffi::TA_E_UNSUPPORTED);
    assert_eq!((err.code, err.layer, err.bytes), (ffi::TA_E_UNSUPPORTED, -1, -1));
    assert!(err.message[..17].iter().map(|&c| c as u8).eq(*b"ta_context_health"));
}
