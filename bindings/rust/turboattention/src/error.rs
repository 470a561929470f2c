use std::ffi::CStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::ptr::addr_of_mut;

use crate::{ffi, text, Tier};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $status:ident,)*) => {
        /// Why a call failed. docs/errors.md says what to do about each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ErrorKind {
            $($(#[$doc])* $kind,)*
            /// A status that this crate is too old to know.
            Other(i32),
        }

        impl ErrorKind {
            pub(crate) fn from_raw(status: ffi::ta_status) -> Self {
                match status {
                    $(ffi::$status => Self::$kind,)*
                    other => Self::Other(other),
                }
            }

            /// The `ta_status`.
            pub fn code(self) -> i32 {
                match self {
                    $(Self::$kind => ffi::$status,)*
                    Self::Other(status) => status,
                }
            }
        }
    };
}

kinds! {
    /// A value outside its range, an argument that is not allowed.
    Invalid = TA_E_INVALID,
    /// The library is too old for an option that is set.
    Struct = TA_E_STRUCT,
    /// A tensor's shape or strides do not fit the call.
    Shape = TA_E_SHAPE,
    /// A tensor's element type is not accepted here.
    DType = TA_E_DTYPE,
    /// A pointer is not aligned to its type.
    Alignment = TA_E_ALIGNMENT,
    /// A valid wish that this build or device cannot serve; the text says what it can.
    Unsupported = TA_E_UNSUPPORTED,
    /// Wrong order of calls: the text says which belongs first.
    State = TA_E_STATE,
    /// In use.
    Busy = TA_E_BUSY,
    /// The sequence, namespace or ticket was released.
    Stale = TA_E_STALE,
    /// The pool is closed.
    Closed = TA_E_CLOSED,
    /// The object was made by the parent process.
    Forked = TA_E_FORKED,
    /// A callback asked to stop, or a rank of a group cancelled.
    Cancelled = TA_E_CANCELLED,
    /// The allocator has no memory.
    Memory = TA_E_MEMORY,
    /// The byte budget does not hold the new blocks, or the disk not the file.
    TierFull = TA_E_TIER_FULL,
    /// A maximum, such as `max_sequences`, or a namespace's quota.
    Limit = TA_E_LIMIT,
    /// NaN, Inf or a magnitude above 2^56 in the inputs.
    NonFinite = TA_E_NONFINITE,
    /// A page does not match its hash; a file is damaged.
    Corrupt = TA_E_CORRUPT,
    /// A CUDA call failed.
    Device = TA_E_DEVICE,
    /// An earlier error ended the GPU for this process.
    DeviceLost = TA_E_DEVICE_LOST,
    /// Reading or writing a file failed.
    Io = TA_E_IO,
    /// A rank died, left or was silent: the group has ended.
    PeerLost = TA_E_PEER_LOST,
    /// A rank did not do its part in time.
    Timeout = TA_E_TIMEOUT,
    /// Ranks asked for different things.
    Mismatch = TA_E_MISMATCH,
    /// A defect of the library.
    Internal = TA_E_INTERNAL,
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // SAFETY: takes any value; never null, static storage.
        f.write_str(&unsafe { CStr::from_ptr(ffi::ta_status_name(self.code())) }.to_string_lossy())
    }
}

/// Where and why a call failed. A call that fails has changed nothing.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Error {
    /// Why.
    pub kind: ErrorKind,
    /// Index into the call's list of sequences.
    pub sequence: Option<usize>,
    /// Index of the 64-token block within the sequence.
    pub block: Option<u64>,
    /// One English sentence.
    pub message: Box<str>,
    place: Box<Place>,
}

/// More about the place where a call failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// Model layer.
    pub layer: Option<u32>,
    /// Kv head, or query head when the text says so.
    pub head: Option<u32>,
    /// Position of the wrong argument in the C call.
    pub argument: Option<u32>,
    /// Which one is full, or has the block or file that the call failed at.
    pub tier: Option<Tier>,
    /// Of a group: whose fault it is.
    pub rank: Option<u32>,
    /// Row of the tensor that has a bad value.
    pub token: Option<u64>,
    /// How many bytes are lacking, or were refused.
    pub bytes: Option<u64>,
}

impl Error {
    /// Layer, head, tensor row, lacking bytes and so on.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// An error that this crate finds before the library is asked.
    pub(crate) fn new(kind: ErrorKind, message: impl Into<Box<str>>) -> Self {
        Error { kind, sequence: None, block: None, message: message.into(), place: Box::default() }
    }

    /// What became of a move or transfer, which says less.
    pub(crate) fn of_ticket(status: ffi::ta_status, block: i64, rank: i32, message: String) -> Self {
        let mut error = Self::new(ErrorKind::from_raw(status), message);
        error.block = known(block);
        error.place.rank = known(rank);
        error
    }

    pub(crate) fn unknown_value(what: &str, value: i32) -> Self {
        Self::new(ErrorKind::Internal, format!("the library returned a {} that this crate does not know: {}", what, value))
    }

    fn from_raw(err: &ffi::ta_error) -> Self {
        Error {
            kind: ErrorKind::from_raw(err.code),
            sequence: known(err.sequence),
            block: known(err.block),
            message: text(&err.message).into(),
            place: Box::new(Place {
                layer: known(err.layer),
                head: known(err.head),
                argument: known(err.argument),
                tier: known(err.tier).and_then(Tier::from_raw),
                rank: known(err.rank),
                token: known(err.token),
                bytes: known(err.bytes),
            }),
        }
    }
}

/// Fields that do not apply are -1.
fn known<T, U: TryFrom<T>>(field: T) -> Option<U> {
    U::try_from(field).ok()
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.kind)
    }
}

impl std::error::Error for Error {}

/// Makes a call, and an [`Error`] of what it reports.
#[inline]
pub(crate) fn call(f: impl FnOnce(*mut ffi::ta_error) -> ffi::ta_status) -> Result<()> {
    let mut err = MaybeUninit::<ffi::ta_error>::uninit();
    // SAFETY: in bounds.
    unsafe { addr_of_mut!((*err.as_mut_ptr()).code).write(ffi::TA_OK) };
    let status = f(err.as_mut_ptr());
    if status == ffi::TA_OK {
        return Ok(());
    }
    // SAFETY: a code that is not TA_OK was written by the library, which fills in all of it or nothing.
    Err(unsafe {
        if (*err.as_ptr()).code == status {
            Error::from_raw(err.assume_init_ref())
        } else {
            Error::new(ErrorKind::from_raw(status), "the library gave no text")
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small() {
        assert!(std::mem::size_of::<Error>() <= 64, "{}", std::mem::size_of::<Error>());
    }

    #[test]
    fn kinds_are_codes() {
        assert_eq!(ErrorKind::from_raw(ErrorKind::PeerLost.code()), ErrorKind::PeerLost);
        assert_eq!(ErrorKind::from_raw(12345), ErrorKind::Other(12345));
        assert_eq!(ErrorKind::Other(12345).code(), 12345);
    }
}
