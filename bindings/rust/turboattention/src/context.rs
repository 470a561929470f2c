use std::alloc::Layout;
use std::ffi::CStr;
use std::fmt;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::error::call;
use crate::{ffi, text, CpuIsa, DeviceKind, Error, ErrorKind, LogLevel, Result};

/// Where the library gets host memory for pages and workspaces.
///
/// # Safety
/// `allocate` returns memory that fits the layout, is nobody else's and can be used until `deallocate`; or null. Both are
/// called from any thread, also while a lock of the library is held: they must not call this crate.
pub unsafe trait HostAllocator: Send + Sync + 'static {
    /// Gets memory; null: there is none.
    fn allocate(&self, layout: Layout) -> *mut u8;
    /// Takes memory back, which is zeroed.
    ///
    /// # Safety
    /// `data` came from `allocate` with the same layout.
    unsafe fn deallocate(&self, data: *mut u8, layout: Layout);
}

/// Receives the library's messages.
///
/// ```
/// use turboattention::*;
/// let log = Log::new(LogLevel::Info, |level, message| eprintln!("{:?}: {}", level, message));
/// let context = Context::new(ContextOptions { log: Some(log), ..Default::default() })?;
/// # Ok::<(), Error>(())
/// ```
pub struct Log {
    level: LogLevel,
    log: Box<LogFn>,
}
type LogFn = dyn Fn(LogLevel, &str) + Send + Sync;

impl Log {
    /// Messages up to a level go to a function, from any thread. It may use this crate, and must not block for long.
    pub fn new(level: LogLevel, log: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        Log { level, log: Box::new(log) }
    }
}

/// Options of [`Context::new`]; make them with `..Default::default()`.
#[derive(Default)]
pub struct ContextOptions {
    /// What to compute on; a GPU needs a library that was built with CUDA.
    pub device: DeviceKind,
    /// Which GPU, as `cudaSetDevice` numbers them.
    pub device_ordinal: i32,
    /// 1 to 1024, the calling one included; 0: the CPUs that the process may run on.
    pub threads: i32,
    /// Which CPU kernels run.
    pub cpu_isa: CpuIsa,
    /// `None`: the C library's.
    pub allocator: Option<Box<dyn HostAllocator>>,
    /// `None`: nobody.
    pub log: Option<Log>,
}

/// What a context is and uses.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ContextInfo {
    /// What it computes on.
    pub device: DeviceKind,
    /// Which GPU.
    pub device_ordinal: i32,
    /// 90: sm_90; 0 on a CPU.
    pub compute_capability: i32,
    /// The device's name.
    pub device_name: String,
    /// What is missing here and why; empty when nothing is.
    pub degraded: String,
    /// Threads that compute, the calling one included.
    pub threads: i32,
    /// The kernels in use.
    pub cpu_isa: CpuIsa,
    /// The best that this CPU has.
    pub cpu_isa_best: CpuIsa,
    /// Host memory of pages and workspaces.
    pub bytes_in_use: u64,
    /// The most that there was of it.
    pub bytes_peak: u64,
    /// GPU memory.
    pub device_bytes_in_use: u64,
    /// The most that there was of it.
    pub device_bytes_peak: u64,
}

/// A device with its kernels and worker threads. Clones are the same context. It ends when all of them, and all objects made
/// from it, are gone.
#[derive(Clone)]
pub struct Context(Arc<Handle>);

struct Handle {
    raw: NonNull<ffi::ta_context>,
    device: DeviceKind,
}

// SAFETY: calls on one ta_context may overlap, from any thread; it is destroyed once nobody has it.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the only destroy of the handle.
        unsafe { ffi::ta_context_destroy(self.raw.as_ptr()) }
    }
}

unsafe extern "C" fn log(level: ffi::ta_log_level, message: *const c_char, user: *mut c_void) {
    // SAFETY: `user` is the box that Context::new gave away, `message` lives for the call.
    let (log, message) = unsafe { (&*user.cast::<Box<LogFn>>(), CStr::from_ptr(message)) };
    let level = LogLevel::from_raw(level).unwrap_or(LogLevel::Debug);
    let _ = catch_unwind(AssertUnwindSafe(|| log(level, &message.to_string_lossy())));
}

unsafe extern "C" fn allocate(bytes: usize, alignment: usize, user: *mut c_void) -> *mut c_void {
    // SAFETY: as above.
    let allocator = unsafe { &*user.cast::<Box<dyn HostAllocator>>() };
    let allocate = || Layout::from_size_align(bytes, alignment).map_or(ptr::null_mut(), |layout| allocator.allocate(layout));
    catch_unwind(AssertUnwindSafe(allocate)).unwrap_or(ptr::null_mut()).cast()
}

unsafe extern "C" fn deallocate(data: *mut c_void, bytes: usize, alignment: usize, user: *mut c_void) {
    // SAFETY: as above; the layout is one that `allocate` accepted.
    let allocator = unsafe { &*user.cast::<Box<dyn HostAllocator>>() };
    let deallocate = || unsafe { allocator.deallocate(data.cast(), Layout::from_size_align_unchecked(bytes, alignment)) };
    let _ = catch_unwind(AssertUnwindSafe(deallocate));
}

unsafe extern "C" fn release<T>(user: *mut c_void) {
    // SAFETY: called once, after the last of the other functions has returned.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(user.cast::<T>()) })));
}

impl Context {
    /// Creates a context.
    ///
    /// # Errors
    /// `Invalid` (a value outside its range, no such GPU), `Unsupported` (no CUDA in the build, no driver, too old a GPU,
    /// instructions that this CPU lacks; with the feature `stub` also: no library), `Limit` (threads could not be started).
    pub fn new(options: ContextOptions) -> Result<Self> {
        ffi::load().map_err(|reason| Error::new(ErrorKind::Unsupported, reason))?;
        let mut raw_options = ffi::ta_context_options {
            device: options.device as i32,
            device_ordinal: options.device_ordinal,
            threads: options.threads,
            cpu_isa: options.cpu_isa as i32,
            ..ffi::ta_context_options::new()
        };
        // The library releases the boxes, also when the call fails.
        let log_set = options.log.map(|Log { level, log: function }| ffi::ta_log_sink {
            level: level as i32,
            log: Some(log),
            user: Box::into_raw(Box::<Box<LogFn>>::new(function)).cast(),
            release: Some(release::<Box<LogFn>>),
            ..ffi::ta_log_sink::new()
        });
        let allocator_set = options.allocator.map(|allocator| ffi::ta_allocator {
            allocate: Some(allocate),
            deallocate: Some(deallocate),
            user: Box::into_raw(Box::<Box<dyn HostAllocator>>::new(allocator)).cast(),
            release: Some(release::<Box<dyn HostAllocator>>),
            ..ffi::ta_allocator::new()
        });
        raw_options.log = log_set.as_ref().map_or(ptr::null(), |set| set);
        raw_options.allocator = allocator_set.as_ref().map_or(ptr::null(), |set| set);
        let mut raw = ptr::null_mut();
        // SAFETY: the options and what they point to live for the call.
        call(|err| unsafe { ffi::ta_context_create(&raw_options, &mut raw, err) })?;
        // SAFETY: not null on success.
        Ok(Context(Arc::new(Handle { raw: unsafe { NonNull::new_unchecked(raw) }, device: options.device })))
    }

    /// What the context is and uses.
    ///
    /// # Errors
    /// Those of every call.
    pub fn info(&self) -> Result<ContextInfo> {
        let mut info = ffi::ta_context_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_context_get_info(self.raw(), &mut info, err) })?;
        Ok(ContextInfo {
            device: DeviceKind::known(info.device)?,
            device_ordinal: info.device_ordinal,
            compute_capability: info.compute_capability,
            device_name: text(&info.device_name),
            degraded: text(&info.degraded),
            threads: info.threads,
            cpu_isa: CpuIsa::known(info.cpu_isa)?,
            cpu_isa_best: CpuIsa::known(info.cpu_isa_best)?,
            bytes_in_use: info.bytes_in_use,
            bytes_peak: info.bytes_peak,
            device_bytes_in_use: info.device_bytes_in_use,
            device_bytes_peak: info.device_bytes_peak,
        })
    }

    /// Whether the GPU can be used.
    ///
    /// # Errors
    /// `DeviceLost`, once it was lost.
    pub fn health(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_context_health(self.raw(), err) })
    }

    /// The C handle, for calls of [`ffi`]. It lives as long as this.
    pub fn raw(&self) -> *mut ffi::ta_context {
        self.0.raw.as_ptr()
    }

    pub(crate) fn device(&self) -> DeviceKind {
        self.0.device
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.0.device).finish_non_exhaustive()
    }
}
