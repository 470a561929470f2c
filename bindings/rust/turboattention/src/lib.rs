//! Attention over very long, compressed KV caches: keys and values are kept as INT8, INT4 or INT2 pages, and attention runs on
//! the integer codes. This is the safe layer over the C library of the same name.
//!
//! A [`Context`] is a device, a [`Pool`] the cache, a [`Sequence`] one conversation in it, and a [`Plan`] makes steps over a
//! batch of sequences:
//!
//! ```
//! use turboattention::*;
//! # fn main() -> Result<()> {
//! let context = Context::new(ContextOptions::default())?;
//! let pool = Pool::new(&context, PoolOptions::new(1, 2, 64, 16 << 20))?; // layers, kv heads, channels, bytes
//! let (mut plan, mut seq) = (Plan::new(&pool)?, Sequence::new(&pool)?);
//!
//! let (k, q) = (vec![0.5f32; 10 * 2 * 64], vec![0.1f32; 10 * 8 * 64]); // 10 tokens, 2 kv heads, 8 query heads
//! let mut out = vec![0f32; q.len()];
//! let mut step = plan.begin([(&mut seq, 10)])?; // reserves memory for the new tokens
//! let k = Tensor::new(&k, [10, 2, 64])?;
//! step.append(0, k, k)?;
//! step.attend(0, Tensor::new(&q, [10, 8, 64])?, TensorMut::new(&mut out, [10, 8, 64])?)?;
//! step.end()?; // the tokens belong to the sequence; without it they are gone
//!
//! assert_eq!(seq.len()?, 10);
//! assert!((out[0] - 0.5).abs() < 0.01);
//! # Ok(())
//! # }
//! ```
//!
//! # Life of objects
//!
//! Objects keep what they need alive, so they may be dropped in any order. [`Context`], [`Pool`], [`Namespace`] and [`Group`]
//! are handles that can be cloned; the object itself ends with the last of them. A [`Sequence`] is released when it is dropped.
//! [`Pool::close`] ends a pool for all its users, whose calls fail with [`ErrorKind::Closed`] from then on.
//!
//! # Errors
//!
//! Each function lists the [`ErrorKind`]s that it may fail with, besides those of every call: `Invalid` (an argument that
//! cannot be), `Closed` (the pool), `Forked`, `Memory`, `Internal`, `Struct` (the library is too old for an option that is set)
//! and, where the GPU is needed, `Device` and `DeviceLost`. A call that fails has changed nothing.
//!
//! # Threads
//!
//! [`Context`], [`Pool`], [`Sequence`], [`Namespace`] and [`Group`] are `Send` and `Sync`. A [`Plan`] and a [`Calibrator`] are
//! `Send`: one thread at a time.
//!
//! # Panics
//!
//! A callback that panics does not unwind through the library:
//!
//! - a log or an allocator counts as having done nothing, so an allocation fails;
//! - a progress callback, or the writer of [`Sequence::export_to`], stops the work, and the panic goes on where the call was made;
//! - of a [`BlockStore`] the batch counts as failed, as if the method had returned `false`.
//!
//! With `panic = "abort"` the process ends, as always.
//!
//! # GPUs
//!
//! Work on a GPU goes on after the call that asked for it, so slices are refused there ([`ErrorKind::Invalid`]): views of GPU
//! memory are made with [`Tensor::from_raw`], whose caller promises that it lives for long enough.
//!
//! # Features
//!
//! `pkg-config` (default) links the installed library; `static` its archive; `vendored` builds it with cmake, `cuda` with the
//! kernels for GPUs; `stub` links nothing and loads `libturboattention.so.1` at run time, for documentation, `cargo check`, and
//! programs that go on without it.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs, clippy::missing_errors_doc)]

mod context;
mod dense;
mod enums;
mod error;
mod group;
mod moves;
mod plan;
mod pool;
mod prefix;
mod progress;
mod sequence;
mod stats;
mod store;
mod tensor;
mod wake;

pub use context::{Context, ContextInfo, ContextOptions, HostAllocator, Log};
pub use dense::{BitMaps, Calibrator, DenseOptions, State};
pub use enums::*;
pub use error::{Error, ErrorKind, Place, Result};
pub use group::{
    Finished, Group, GroupId, GroupInfo, GroupOptions, GroupPeer, PartitionOptions, Receive, Transfer, TransferInfo,
};
pub use moves::{BlockInfo, Move, MoveInfo, Residency, Retention};
pub use plan::{AttendOptions, Entry, Plan, Step, StepOptions, Stream};
pub use pool::{LayerGroup, Numerics, Pool, PoolDescription, PoolOptions, Rotary, TierOptions};
pub use prefix::{Key, Namespace, NamespaceStats, PrefixEvent, PrefixPlace};
pub use sequence::Sequence;
pub use stats::{Fit, MemoryRange, MoveStats, PoolStats, TierStats};
pub use store::{BlockStore, StoreItem, StoreOptions, StoreStats};
pub use tensor::{Bf16, Element, Floats, FloatsMut, Tensor, TensorMut, F16};
/// The C calls.
pub use turboattention_sys as ffi;

use std::ffi::CStr;

/// The version of the library that is loaded: major * 10000 + minor * 100 + patch.
pub fn version() -> u32 {
    // SAFETY: takes nothing.
    unsafe { ffi::ta_version() }
}

/// The version of the binary interface of the library that is loaded.
pub fn abi_version() -> u32 {
    // SAFETY: takes nothing.
    unsafe { ffi::ta_abi_version() }
}

/// One line on the library that is loaded: version, compiler, what was built in.
pub fn build_info() -> &'static str {
    // SAFETY: never null, static storage.
    unsafe { CStr::from_ptr(ffi::ta_build_info()) }.to_str().unwrap_or("")
}

/// The text of a field `char[N]`.
pub(crate) fn text(field: &[std::os::raw::c_char]) -> String {
    let bytes: Vec<u8> = field.iter().take_while(|&&c| c != 0).map(|&c| c as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
