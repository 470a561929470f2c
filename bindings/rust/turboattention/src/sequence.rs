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
    /// Creates an empty sequence.
    ///
    /// # Errors
    /// `Limit` (the pool has as many as it may).
    pub fn new(pool: &Pool) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_create(pool.raw(), &mut id, err) })?;
        Ok(Self::from_raw(pool, id))
    }

    /// Takes over an id from a C call or from [`Sequence::into_raw`]. With an invalid id calls fail with
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
    ///
    /// # Errors
    /// `Stale`.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> Result<usize> {
        let mut n = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_length(self.pool.raw(), self.id, &mut n, err) })?;
        Ok(n as usize)
    }

    /// Creates a sequence with the same tokens, which shares their blocks; a block is copied when one of the two first writes
    /// to it.
    ///
    /// # Errors
    /// `Stale`, `Busy` (it is in an open step), `Limit` (the pool has as many as it may), `State` (it is partitioned).
    pub fn fork(&self) -> Result<Self> {
        let mut id = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_fork(self.pool.raw(), self.id, &mut id, err) })?;
        Ok(Self::from_raw(&self.pool, id))
    }

    /// Drops all tokens from `len` on.
    ///
    /// # Errors
    /// `Invalid` (more than the length), `State` (a length inside a block that was dropped, or windows have passed what later
    /// tokens need), `Stale`, `Busy` (it is in an open step), `Unsupported` (a partitioned sequence with universal open
    /// scales).
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        let len = i64::try_from(len).unwrap_or(i64::MAX);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_truncate(self.pool.raw(), self.id, len, err) })
    }

    /// Forgets the tokens of the blocks that are wholly in a range of tokens, and returns the number of these tokens. Positions
    /// and the length stay, attention skips the tokens, and blocks that nobody else has are freed. A block that is only partly
    /// in the range keeps its tokens, and so does the last block until it is full. Later calls that need a forgotten block fail
    /// with [`ErrorKind::State`]: a save, an export, a publish, a transfer, a truncate to a length inside of it.
    ///
    /// # Errors
    /// `Invalid` (tokens beyond the sequence), `Stale`, `Busy` (it is in an open step), `Memory`.
    pub fn forget(&mut self, tokens: Range<usize>) -> Result<usize> {
        let ((first, n), mut forgotten) = (first_and_count(tokens)?, 0);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_forget(self.pool.raw(), self.id, first, n, &mut forgotten, err) })?;
        Ok(forgotten as usize)
    }

    /// Context shift: forgets a range of tokens, as [`Sequence::forget`] does, and closes the gap: attention sees the tokens before
    /// it as many positions later as the range has tokens. It begins and ends at multiples of 64. The length stays, and a new
    /// token has the position that the length says, in Q and in K. Stored keys are not changed; docs/shift.md explains it.
    /// Later steps with a query before the gap or in it fail with [`ErrorKind::State`].
    ///
    /// # Errors
    /// `Invalid` (no multiples of 64, or tokens beyond the sequence), `Stale`, `Busy` (it is in an open step), `Memory`,
    /// `Unsupported` (the pool was made without [`PoolOptions::rotary`](crate::PoolOptions::rotary), or with windows, batch
    /// invariance or [`Eviction::Attention`](crate::Eviction::Attention); or the sequence is partitioned).
    pub fn shift(&mut self, tokens: Range<usize>) -> Result<()> {
        let (first, n) = first_and_count(tokens)?;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_shift(self.pool.raw(), self.id, first, n, err) })
    }

    /// Promises room in the device tier for the next `tokens` tokens: steps that bring no more than these, of any size, do not
    /// wait for room or fail for lack of it. The promise ends with the sequence, a suspend, or the next call, which replaces
    /// it; 0 tokens end it. A fork has none. `wait_ms`: how long to wait for room, in milliseconds; 0: as a step does
    /// ([`TierOptions::begin_wait_ms`](crate::TierOptions::begin_wait_ms)); -1: not at all.
    ///
    /// # Errors
    /// `TierFull` (there is no room; the former promise holds), `Invalid`, `Stale`, `Busy` (it is in an open step, or moves
    /// take its blocks to disk as fast as they are brought back), `Limit` (2^40 tokens), `Memory`, of blocks on disk `Io` and
    /// `Corrupt`.
    pub fn reserve(&self, tokens: usize, wait_ms: i32) -> Result<()> {
        let tokens = i64::try_from(tokens).unwrap_or(i64::MAX);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_reserve(self.pool.raw(), self.id, tokens, wait_ms, err) })
    }

    /// How early its blocks leave a full tier under [`Eviction::Priority`](crate::Eviction::Priority): the lower, the earlier;
    /// 0 at first.
    ///
    /// # Errors
    /// `Stale`.
    pub fn set_priority(&self, priority: i32) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_set_priority(self.pool.raw(), self.id, priority, err) })
    }

    /// Recomputes the hash of every full page, in whatever tier.
    ///
    /// # Errors
    /// `Corrupt` (names the first bad page), `Io` (a block on disk cannot be read), `Stale`, `Busy` (it is in an open step).
    pub fn verify(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_verify(self.pool.raw(), self.id, err) })
    }

    /// Writes it to a new file. On success the file is complete and synced; otherwise there is no file.
    ///
    /// # Errors
    /// `Invalid` (the path exists), `Io`, `TierFull` (no space on disk), `Corrupt`, `Cancelled`, `State` (blocks were dropped,
    /// or the sequence is partitioned), `Stale`, `Busy` (it is in an open step).
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
    ///
    /// # Errors
    /// As [`Sequence::save`]; `Cancelled`: the function stopped it.
    pub fn save_with(&self, path: impl AsRef<Path>, mut progress: impl FnMut(u64, u64) -> ControlFlow<()>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        with_progress(&mut progress, |progress, err| {
            // SAFETY: the handle is alive, path and progress live for the call.
            unsafe { ffi::ta_seq_save(self.pool.raw(), self.id, path.as_ptr(), progress, err) }
        })
    }

    /// Creates a sequence from a file, all of it or nothing. The pool must have the shape and settings of the one that saved
    /// it.
    ///
    /// # Errors
    /// `Invalid` (a file of another pool, no regular file), `Corrupt`, `Io` (a symbolic link, too), `Unsupported` (another
    /// version of the format), `Cancelled`, `TierFull`, `Limit` (too many sequences, or salts of namespaces that files named),
    /// `Memory`.
    pub fn load(pool: &Pool, path: impl AsRef<Path>) -> Result<Self> {
        Self::load_with(pool, path, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    ///
    /// # Errors
    /// As [`Sequence::load`]; `Cancelled`: the function stopped it.
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

    /// The bytes of the file that [`Sequence::save`] would write, for programs that transport sequences by their own means.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn f(seq: Sequence, pool: Pool) -> Result<()> {
    /// let bytes = seq.export()?; // to another machine, say
    /// let same = Sequence::import(&pool, &bytes)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Corrupt`, `State` (blocks were dropped, or the sequence is partitioned), `Stale`, `Busy` (it is in an open step), `Io`
    /// (a block on disk cannot be read), `Memory` (there is none for the bytes).
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

    /// The same, written to `to` from its present position on; afterwards `to` is behind the bytes. Returns their number. The
    /// first bytes are written last. `to` may use this crate, but not the same pool.
    ///
    /// # Errors
    /// As [`Sequence::export`]; `Io`: `to` has failed, as the text says, and a part may be written.
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

    /// Creates a sequence from the bytes of an export or of a file, all of it or nothing, as [`Sequence::load`] does.
    ///
    /// # Errors
    /// As [`Sequence::load`], but for those of files.
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
    /// Writes all sequences to a new file; `published`: published blocks, too.
    ///
    /// # Errors
    /// As [`Sequence::save`]; `Busy` (a sequence is in an open step), `Limit` (an index of more than 4 GiB).
    pub fn save(&self, path: impl AsRef<Path>, published: bool) -> Result<()> {
        self.save_with(path, published, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    ///
    /// # Errors
    /// As [`Pool::save`]; `Cancelled`: the function stopped it.
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
    ///
    /// # Errors
    /// As [`Sequence::load`].
    pub fn load(&self, path: impl AsRef<Path>) -> Result<Vec<(u64, Sequence)>> {
        self.load_with(path, keep_on)
    }

    /// Likewise, with a function as that of [`Sequence::save_with`].
    ///
    /// # Errors
    /// As [`Pool::load`]; `Cancelled`: the function stopped it.
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
