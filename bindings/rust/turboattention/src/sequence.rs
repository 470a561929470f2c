use std::fmt;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::{ControlFlow, Range};
use std::path::Path;
use std::ptr;

use crate::error::call;
use crate::pool::c_path;
use crate::progress::{with_progress, with_sink};
use crate::{ffi, Error, ErrorKind, Pool, Result};

/// A list of tokens in a pool. Released when it is dropped.
pub struct Sequence {
    pool: Pool,
    id: ffi::ta_seq,
}

impl Drop for Sequence {
    fn drop(&mut self) {
        // SAFETY: the handle is alive. A sequence that has gone (a closed pool, a move to another rank) is not there to be
        // released.
        let _ = call(|err| unsafe { ffi::ta_seq_release(self.pool.raw(), self.id, err) });
    }
}

fn keep_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn first_and_count(tokens: Range<usize>) -> Result<(i64, i64)> {
    match tokens.end.checked_sub(tokens.start) {
        Some(n) => Ok((i64::try_from(tokens.start).unwrap_or(i64::MAX), i64::try_from(n).unwrap_or(i64::MAX))),
        None => Err(Error::new(ErrorKind::Invalid, "a range of tokens that ends before it begins")),
    }
}

impl Sequence {
    /// Creates an empty sequence. [`ErrorKind::Limit`](crate::ErrorKind::Limit): the pool has as many as it may.
    pub fn new(pool: &Pool) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_create(pool.raw(), &mut id, err) })?;
        Ok(Self::from_raw(pool, id))
    }

    /// Takes over an id that a C call gave, or [`Sequence::into_raw`]. An id that is none makes calls fail with
    /// [`ErrorKind::Stale`](crate::ErrorKind::Stale).
    pub fn from_raw(pool: &Pool, id: u64) -> Self {
        Sequence { pool: pool.clone(), id }
    }

    /// The id, which is the caller's to release.
    pub fn into_raw(self) -> u64 {
        let id = self.id;
        let mut this = std::mem::ManuallyDrop::new(self);
        // SAFETY: `this` is not used again.
        unsafe { ptr::drop_in_place(&mut this.pool) };
        id
    }

    /// Its number in the pool, which files and transfers name.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The number of tokens.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> Result<usize> {
        let mut n = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_length(self.pool.raw(), self.id, &mut n, err) })?;
        Ok(n as usize)
    }

    /// Creates a sequence with the same tokens, sharing their blocks; a block is copied when one of the two first writes to it.
    pub fn fork(&self) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_fork(self.pool.raw(), self.id, &mut id, err) })?;
        Ok(Self::from_raw(&self.pool, id))
    }

    /// Drops all tokens from `len` on.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_truncate(self.pool.raw(), self.id, len, err) })
    }

    /// Forgets the tokens of the blocks that are wholly in a range of tokens, and returns how many that were. Positions and the
    /// length stay, attention passes over them, and blocks that nobody else has are freed. Tokens of a block that is only in part
    /// in the range stay, as do those of the last block until it is full.
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid): tokens beyond the sequence. [`ErrorKind::State`](crate::ErrorKind::State)
    /// comes of later calls that would need such a block: a save, an export, a publish, a transfer, a truncate to inside of it.
    pub fn forget(&mut self, tokens: Range<usize>) -> Result<usize> {
        let ((first, n), mut forgotten) = (first_and_count(tokens)?, 0);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_forget(self.pool.raw(), self.id, first, n, &mut forgotten, err) })?;
        Ok(forgotten as usize)
    }

    /// Context shift: forgets a range of tokens, as [`Sequence::forget`] does, and closes the gap: attention sees the tokens before
    /// it as many positions later as the range has tokens. It begins and ends at multiples of 64. The length stays, and a new token
    /// has the position that it says, in Q and in K. Stored keys are not changed; docs/shift.md explains it.
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported): the pool was made without
    /// [`PoolOptions::rotary`](crate::PoolOptions::rotary), or with windows, `batch_invariant` or
    /// [`Eviction::Attention`](crate::Eviction::Attention); or the sequence is partitioned.
    /// [`ErrorKind::State`](crate::ErrorKind::State) comes of later steps with a query before the gap or in it.
    pub fn shift(&mut self, tokens: Range<usize>) -> Result<()> {
        let (first, n) = first_and_count(tokens)?;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_shift(self.pool.raw(), self.id, first, n, err) })
    }

    /// Promises room in the device tier for the next `tokens` tokens: steps that bring no more, of any size, do not wait for room
    /// or fail for lack of it. The promise ends with the sequence, a suspend, or the next call, which replaces it; 0 tokens end
    /// it. A fork has none. `wait_ms`: how long to wait for room, in milliseconds; 0: as a step does
    /// ([`TierOptions::begin_wait_ms`](crate::TierOptions::begin_wait_ms)); -1: not at all.
    /// [`ErrorKind::TierFull`](crate::ErrorKind::TierFull): there is none, and the former promise holds.
    pub fn reserve(&self, tokens: usize, wait_ms: i32) -> Result<()> {
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_reserve(self.pool.raw(), self.id, tokens, wait_ms, err) })
    }

    /// How early its blocks leave a full tier under [`Eviction::Priority`](crate::Eviction::Priority): the lower the earlier; 0
    /// at first.
    pub fn set_priority(&self, priority: i32) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_set_priority(self.pool.raw(), self.id, priority, err) })
    }

    /// Recomputes the hash of every full page, wherever it is. [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) names the
    /// first bad one.
    pub fn verify(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_verify(self.pool.raw(), self.id, err) })
    }

    /// Writes it to a new file, which is there, complete and synced, on success, and not there else.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        self.save_with(path, keep_on)
    }

    /// Likewise, with a function that is told the bytes done and the total, and can stop the work. It may use this crate, but
    /// not the same pool.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn f(seq: Sequence, deadline: std::time::Instant) -> Result<()> {
    /// use std::ops::ControlFlow::{Break, Continue};
    /// seq.save_with("chat.seq", |_, _| if std::time::Instant::now() < deadline { Continue(()) } else { Break(()) })?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn save_with(&self, path: impl AsRef<Path>, mut progress: impl FnMut(u64, u64) -> ControlFlow<()>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        with_progress(&mut progress, |progress, err| {
            // SAFETY: the handle is alive, path and progress live for the call.
            unsafe { ffi::ta_seq_save(self.pool.raw(), self.id, path.as_ptr(), progress, err) }
        })
    }

    /// Makes a sequence of a file, all of it or nothing. The pool has the shape and settings of the one that saved it.
    pub fn load(pool: &Pool, path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(pool, path, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    pub fn load_with(
        pool: &Pool,
        path: impl AsRef<Path>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Self> {
        let (path, mut id) = (c_path(path.as_ref())?, 0);
        with_progress(&mut progress, |progress, err| {
            // SAFETY: the handle is alive, path and progress live for the call.
            unsafe { ffi::ta_seq_load(pool.raw(), path.as_ptr(), progress, &mut id, err) }
        })?;
        Ok(Self::from_raw(pool, id))
    }

    /// The bytes of the file that [`Sequence::save`] would write, for programs that carry sequences by means of their own.
    /// [`ErrorKind::Memory`]: there is none for them; else as for [`Sequence::save`], but for the errors of files.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn f(seq: Sequence, pool: Pool) -> Result<()> {
    /// let bytes = seq.export()?; // to another machine, say
    /// let same = Sequence::import(&pool, &bytes)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn export(&self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        self.export_by(&mut |offset, bytes| {
            let (start, end) = (offset as usize, offset as usize + bytes.len());
            if all.len() < end {
                all.try_reserve(end - all.len()).map_err(|error| Error::new(ErrorKind::Memory, error.to_string()))?;
                all.resize(end, 0);
            }
            all[start..end].copy_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }

    /// The same, written from where `to` stands, which stands behind it afterwards; returns how many bytes there are. What comes
    /// first is written last. `to` may use this crate, but not the same pool. [`ErrorKind::Io`]: `to` has failed, as the text
    /// says, and a part may be written.
    pub fn export_to(&self, to: &mut (impl Write + Seek)) -> Result<u64> {
        let io = |error: io::Error| Error::new(ErrorKind::Io, error.to_string());
        let start = to.stream_position().map_err(io)?;
        let n = self.export_by(&mut |offset, bytes| {
            to.seek(SeekFrom::Start(start + offset)).and_then(|_| to.write_all(bytes)).map_err(io)
        })?;
        to.seek(SeekFrom::Start(start + n)).map_err(io)?;
        Ok(n)
    }

    fn export_by(&self, write: &mut dyn FnMut(u64, &[u8]) -> Result<()>) -> Result<u64> {
        let mut n = 0;
        with_sink(write, |sink, err| {
            // SAFETY: the handle is alive, the sink lives for the call.
            unsafe { ffi::ta_seq_export(self.pool.raw(), self.id, sink, &mut n, err) }
        })?;
        Ok(n)
    }

    /// Makes a sequence of the bytes of an export or of a file, all of them or nothing, as [`Sequence::load`] does.
    pub fn import(pool: &Pool, bytes: &[u8]) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the handle is alive; the bytes live for the call.
        call(|err| unsafe { ffi::ta_seq_import(pool.raw(), bytes.as_ptr().cast(), bytes.len() as u64, &mut id, err) })?;
        Ok(Self::from_raw(pool, id))
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sequence").field(&self.id).finish()
    }
}

impl Pool {
    /// Writes all sequences to a new file; `published`: what is published, too.
    pub fn save(&self, path: impl AsRef<Path>, published: bool) -> Result<()> {
        self.save_with(path, published, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    pub fn save_with(
        &self,
        path: impl AsRef<Path>,
        published: bool,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<()> {
        let path = c_path(path.as_ref())?;
        let flags = if published { ffi::TA_SAVE_PUBLISHED } else { 0 };
        with_progress(&mut progress, |progress, err| {
            // SAFETY: the handle is alive, path and progress live for the call.
            unsafe { ffi::ta_kv_pool_save(self.raw(), path.as_ptr(), flags, progress, err) }
        })
    }

    /// Adds the sequences of a file, all or none, each with the id that it had where it was saved.
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Vec<(u64, Sequence)>> {
        self.load_with(path, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    pub fn load_with(
        &self,
        path: impl AsRef<Path>,
        mut progress: impl FnMut(u64, u64) -> ControlFlow<()>,
    ) -> Result<Vec<(u64, Sequence)>> {
        let (path, mut n) = (c_path(path.as_ref())?, 0);
        // SAFETY: the handle is alive, the path lives for the call; without a list the number alone is written.
        call(|err| unsafe { ffi::ta_kv_pool_load(self.raw(), path.as_ptr(), ptr::null(), ptr::null_mut(), 0, &mut n, err) })?;
        let mut list = vec![ffi::ta_loaded_seq::default(); n as usize + 1]; // its pointer is that of memory also where n is 0
        with_progress(&mut progress, |progress, err| {
            // SAFETY: the list has at least n elements.
            unsafe { ffi::ta_kv_pool_load(self.raw(), path.as_ptr(), progress, list.as_mut_ptr(), n, &mut n, err) }
        })?;
        list.truncate(n as usize);
        Ok(list.iter().map(|l| (l.saved, Sequence::from_raw(self, l.loaded))).collect())
    }
}
