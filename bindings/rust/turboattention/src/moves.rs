use std::future::Future;
use std::ops::Range;
use std::os::raw::c_void;
use std::os::unix::io::RawFd;
use std::pin::Pin;
use std::ptr;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use crate::error::call;
use crate::pool::Handle;
use crate::wake::{watch, Job, Source, Watcher};
use crate::{ffi, Error, ErrorKind, MoveState, Pool, Result, Sequence, Tier};

/// A batch of moves that was asked for. It goes on in the background, whether this is kept or not.
///
/// As a future it ends as [`Move::wait`] does; any executor will do.
///
/// ```
/// # use turboattention::*;
/// async fn swap_out(seq: &Sequence) -> Result<u64> {
///     let blocks = seq.len()? as u64 / 64;
///     Ok(seq.move_to(Tier::Host, 0..blocks)?.await?.moved)
/// }
/// ```
#[must_use = "whether the move succeeds is known when it is finished"]
#[derive(Debug)]
pub struct Move {
    pool: Pool,
    ticket: ffi::ta_ticket,
    watched: bool,
}

/// How far a move is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoveInfo {
    /// Whether it is finished.
    pub state: MoveState,
    /// Asked for.
    pub blocks: u64,
    /// Moved by it.
    pub moved: u64,
    /// Were there already.
    pub present: u64,
    /// Not full, pinned, released, or on another move; of a prefetch also: no room.
    pub skipped: u64,
    /// Could not move.
    pub failed: u64,
    status: ffi::ta_status,
    block: i64,
}

impl Move {
    pub(crate) fn of(pool: &Pool, ticket: ffi::ta_ticket) -> Self {
        Move { pool: pool.clone(), ticket, watched: false }
    }
}

impl MoveInfo {
    fn new(raw: &ffi::ta_move_info) -> Result<Self> {
        Ok(MoveInfo {
            state: MoveState::known(raw.state)?,
            blocks: raw.blocks,
            moved: raw.moved,
            present: raw.present,
            skipped: raw.skipped,
            failed: raw.failed,
            status: raw.status,
            block: raw.block,
        })
    }

    /// Of the first block that failed.
    pub fn error(&self) -> Option<Error> {
        (self.status != ffi::TA_OK).then(|| Error::of_ticket(self.status, self.block, -1, "a block could not move".into()))
    }

    fn ended(self) -> Result<Self> {
        match self.state {
            MoveState::Failed => Err(self.error().unwrap_or_else(|| Error::new(ErrorKind::Internal, "a move failed"))),
            MoveState::Cancelled => Err(Error::new(ErrorKind::Cancelled, "the move was cancelled")),
            _ => Ok(self),
        }
    }
}

/// Whether a `ta_move_state` is the last one.
pub(crate) fn finished(state: ffi::ta_move_state) -> bool {
    state != ffi::TA_MOVE_QUEUED && state != ffi::TA_MOVE_RUNNING
}

/// For C: `None` is no limit.
pub(crate) fn nanoseconds(timeout: Option<Duration>) -> i64 {
    timeout.map_or(-1, |t| i64::try_from(t.as_nanos()).unwrap_or(i64::MAX))
}

/// Takes up to `most` of the waiting items. `piece` fills in a part of the list and says how many it has put there; if they are
/// fewer than the part, there are no more now. If a later piece fails, what was taken is returned, and the next call fails.
pub(crate) fn take<T: Clone + Default>(
    most: usize,
    mut piece: impl FnMut(&mut [T], &mut u64, *mut ffi::ta_error) -> ffi::ta_status,
) -> Result<Vec<T>> {
    const PIECE: usize = 1024; // `most` may be larger than memory
    let mut list = vec![];
    loop {
        let (taken, mut n) = (list.len(), 0);
        let room = PIECE.min(most - taken);
        list.resize(taken + room, T::default());
        let result = call(|err| piece(&mut list[taken..], &mut n, err));
        list.truncate(taken + n as usize);
        match result {
            Ok(()) if n == room as u64 && list.len() < most => {}
            Err(error) if taken == 0 => return Err(error),
            _ => return Ok(list),
        }
    }
}

impl Source for Handle {
    fn finished(&self, ticket: ffi::ta_ticket, patience: Duration) -> bool {
        let mut info = ffi::ta_move_info::new();
        let ns = nanoseconds(Some(patience));
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_move_wait(self.raw.as_ptr(), ticket, ns, &mut info, err) }).is_err() || finished(info.state)
    }
    fn received(&self, _: ffi::ta_ticket) -> Option<u64> {
        None
    }
    fn watcher(&self) -> &Watcher {
        &self.watcher
    }
}

impl Pool {
    /// Can be read (poll, epoll) while [`Pool::take_finished_moves`] has some. It belongs to the pool.
    ///
    /// # Errors
    /// `Unsupported` (the pool has no tier below the device, and no namespace had a store), `Limit` (no more descriptors).
    pub fn descriptor(&self) -> Result<RawFd> {
        let mut descriptor = -1;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_kv_pool_descriptor(self.raw(), &mut descriptor, err) })?;
        Ok(descriptor)
    }

    /// Takes up to `most` [`Move::ticket`]s that are finished, each once, the oldest first, from the first [`Pool::descriptor`]
    /// on.
    ///
    /// # Errors
    /// `Unsupported` (as [`Pool::descriptor`]), `State` (nobody has asked for the descriptor).
    pub fn take_finished_moves(&self, most: usize) -> Result<Vec<u64>> {
        // SAFETY: the handle is alive, the list has so many elements.
        take(most, |list, n, err| unsafe {
            ffi::ta_move_take_finished(self.raw(), list.as_mut_ptr(), list.len() as u64, n, err)
        })
    }
}

impl Move {
    /// Its number in the pool.
    pub fn ticket(&self) -> u64 {
        self.ticket
    }

    /// How far it is.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 moves ago).
    pub fn info(&self) -> Result<MoveInfo> {
        let mut info = ffi::ta_move_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_move_query(self.pool.raw(), self.ticket, &mut info, err) })?;
        MoveInfo::new(&info)
    }

    /// Waits until it is finished.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 moves ago), `Cancelled`, and of the first block that failed `TierFull`, `Io`,
    /// `Corrupt` and others; of a load from a store `Limit` (the quota), `Stale` (the namespace ended), `Closed`.
    pub fn wait(&self) -> Result<MoveInfo> {
        self.wait_for(None)?.ended()
    }

    /// Waits for so long, `None`: without limit; [`MoveInfo::state`] says whether it is finished.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 moves ago).
    pub fn wait_for(&self, timeout: Option<Duration>) -> Result<MoveInfo> {
        let mut info = ffi::ta_move_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_move_wait(self.pool.raw(), self.ticket, nanoseconds(timeout), &mut info, err) })?;
        MoveInfo::new(&info)
    }

    /// Blocks that have not moved yet stay where they are.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 moves ago).
    pub fn cancel(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_move_cancel(self.pool.raw(), self.ticket, err) })
    }
}

impl Future for Move {
    type Output = Result<MoveInfo>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let info = self.info()?;
        if finished(info.state as i32) {
            return Poll::Ready(info.ended());
        }
        watch(&self.pool.0, self.ticket, Job::Wake(context.waker().clone()))?;
        self.watched = true;
        Poll::Pending
    }
}

impl Drop for Move {
    fn drop(&mut self) {
        if self.watched {
            self.pool.0.watcher.forget(self.ticket);
        }
    }
}

/// Where the blocks of a sequence are.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct Residency {
    pub pinned_blocks: u32,
    pub device_blocks: u64,
    pub host_blocks: u64,
    pub disk_blocks: u64,
    pub device_bytes: u64,
    pub host_bytes: u64,
    pub disk_bytes: u64,
    /// By [`TierOptions::drop_coldest`](crate::TierOptions::drop_coldest) or [`Sequence::forget`]; in no tier.
    pub dropped_blocks: u64,
    pub peer_blocks: u64,
    pub peer_bytes: u64,
}

/// How long blocks are to be kept: [`Sequence::retain`]. Make them with `..Default::default()`; a field that is 0 is at its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// 1 to 63; 0: 32, which all blocks have at first. Blocks of a lower priority are demoted, evicted and dropped before all
    /// others; among blocks of one priority [`Eviction`](crate::Eviction) decides.
    pub priority: u32,
    /// Milliseconds, after which the blocks have priority 32 again, up to 2^53; 0: for ever.
    pub duration_ms: i64,
}

/// A block of a sequence: [`Sequence::describe_blocks`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockInfo {
    /// Where it is; `None`: it was dropped, or is another rank's.
    pub tier: Option<Tier>,
    /// It is not full, or was cut by a truncate.
    pub open: bool,
    /// By [`TierOptions::drop_coldest`](crate::TierOptions::drop_coldest) or [`Sequence::forget`].
    pub dropped: bool,
    /// Of a partitioned sequence: it is another rank's.
    pub absent: bool,
    /// It has the pages of layers without a window alone.
    pub passed: bool,
    /// It is in a namespace.
    pub published: bool,
    /// In its tier, all layers.
    pub bytes: u64,
    /// Sequences that have it, and keys under which it is published; 0: it is in no tier.
    pub owners: u32,
    /// That were not taken back.
    pub pins: u32,
    /// Now: [`Retention::priority`].
    pub priority: u32,
    /// Milliseconds for which it keeps that; `None`: for ever.
    pub retained_ms: Option<u64>,
}

impl BlockInfo {
    fn new(raw: &ffi::ta_block_info) -> Result<Self> {
        let has = |flag| raw.flags & flag != 0;
        let in_no_tier = has(ffi::TA_BLOCK_DROPPED) || has(ffi::TA_BLOCK_ABSENT);
        Ok(BlockInfo {
            tier: if in_no_tier { None } else { Some(Tier::known(raw.tier)?) },
            open: has(ffi::TA_BLOCK_OPEN),
            dropped: has(ffi::TA_BLOCK_DROPPED),
            absent: has(ffi::TA_BLOCK_ABSENT),
            passed: has(ffi::TA_BLOCK_PASSED),
            published: has(ffi::TA_BLOCK_PUBLISHED),
            bytes: raw.bytes,
            owners: raw.owners,
            pins: raw.pins,
            priority: raw.priority,
            retained_ms: u64::try_from(raw.retained_ms).ok(),
        })
    }
}

fn first_and_count(blocks: &Range<u64>) -> Result<(u64, u64)> {
    match blocks.end.checked_sub(blocks.start) {
        Some(n) => Ok((blocks.start, n)),
        None => Err(Error::new(ErrorKind::Invalid, "a range of blocks that ends before it begins")),
    }
}

impl Sequence {
    /// Asks for blocks to be moved to a tier. If the tier is full, colder blocks leave it.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step), `Unsupported` (no such tier, or none
    /// below the device).
    pub fn move_to(&self, tier: Tier, blocks: Range<u64>) -> Result<Move> {
        let ((first, n), mut ticket) = (first_and_count(&blocks)?, 0);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_move(self.pool().raw(), self.id(), first, n, tier as i32, &mut ticket, err) })?;
        Ok(Move { pool: self.pool().clone(), ticket, watched: false })
    }

    /// Asks for blocks to be moved to the device tier, as many as fit.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step), `Unsupported` (no tier below the
    /// device).
    pub fn prefetch(&self, blocks: Range<u64>) -> Result<Move> {
        let ((first, n), mut ticket) = (first_and_count(&blocks)?, 0);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_prefetch(self.pool().raw(), self.id(), first, n, &mut ticket, err) })?;
        Ok(Move { pool: self.pool().clone(), ticket, watched: false })
    }

    /// Asks for all blocks, also the open one, to be moved to a tier below the device, so that an idle sequence has no bytes
    /// there. The next step brings back what it needs. Pinned blocks stay, and so do blocks that sequences in open steps or
    /// with a reservation have, too.
    ///
    /// # Errors
    /// `Invalid` (the device tier), `Stale`, `Busy` (it is in an open step), `Unsupported` (no such tier).
    pub fn suspend(&self, tier: Tier) -> Result<Move> {
        let mut ticket = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_suspend(self.pool().raw(), self.id(), tier as i32, &mut ticket, err) })?;
        Ok(Move { pool: self.pool().clone(), ticket, watched: false })
    }

    /// Keeps full blocks in their tier or a faster one. Pins are counted.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step), `State` (a block is not full).
    pub fn pin(&self, blocks: Range<u64>) -> Result<()> {
        let (first, n) = first_and_count(&blocks)?;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_pin(self.pool().raw(), self.id(), first, n, err) })
    }

    /// Takes a pin back.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step), `State` (a block is not full, or not
    /// pinned).
    pub fn unpin(&self, blocks: Range<u64>) -> Result<()> {
        let (first, n) = first_and_count(&blocks)?;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_seq_unpin(self.pool().raw(), self.id(), first, n, err) })
    }

    /// Gives full blocks a priority. They have it in all sequences that share them, and when they are published; files do not
    /// have it. `None`: the usual priority.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence, or a field outside its range), `Stale`, `Busy` (it is in an open step), `State`
    /// (a block is not full).
    pub fn retain(&self, blocks: Range<u64>, retention: Option<Retention>) -> Result<()> {
        let (first, n) = first_and_count(&blocks)?;
        let raw = retention.map(|r| ffi::ta_retention {
            priority: r.priority,
            duration_ms: r.duration_ms,
            ..ffi::ta_retention::new()
        });
        let raw = raw.as_ref().map_or(ptr::null(), |raw| raw);
        // SAFETY: the handle is alive, the struct lives for the call.
        call(|err| unsafe { ffi::ta_seq_retain(self.pool().raw(), self.id(), first, n, raw, err) })
    }

    /// Describes its blocks as they are now, one element for each.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn f(seq: &Sequence) -> Result<()> {
    /// let prompt = 0..seq.len()? as u64 / 64; // the full blocks
    /// seq.retain(prompt.clone(), Some(Retention { priority: 48, duration_ms: 60_000 }))?;
    /// let bytes: u64 = seq.describe_blocks(prompt)?.iter().filter(|b| b.tier == Some(Tier::Device)).map(|b| b.bytes).sum();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step).
    pub fn describe_blocks(&self, blocks: Range<u64>) -> Result<Vec<BlockInfo>> {
        let (first, n) = self.count_blocks(&blocks)?;
        let mut list = vec![ffi::ta_block_info::default(); n as usize];
        // SAFETY: the handle is alive, the list has n elements.
        call(|err| unsafe { ffi::ta_seq_describe_blocks(self.pool().raw(), self.id(), first, n, list.as_mut_ptr(), err) })?;
        list.iter().map(BlockInfo::new).collect()
    }

    /// Where its blocks lie; null: in no memory (on disk, dropped, another rank's). A full block has the bytes of
    /// docs/FORMAT.md, on a GPU in its memory. Pin what is to be read: other blocks may leave at any time.
    ///
    /// # Errors
    /// `Invalid` (blocks beyond the sequence), `Stale`, `Busy` (it is in an open step).
    pub fn locate_blocks(&self, blocks: Range<u64>) -> Result<Vec<*const c_void>> {
        let (first, n) = self.count_blocks(&blocks)?;
        let mut list = vec![ptr::null(); n as usize];
        // SAFETY: the handle is alive, the list has n elements.
        call(|err| unsafe { ffi::ta_seq_locate_blocks(self.pool().raw(), self.id(), first, n, list.as_mut_ptr(), err) })?;
        Ok(list)
    }

    /// Refuses lists that might take more memory than there is.
    fn count_blocks(&self, blocks: &Range<u64>) -> Result<(u64, u64)> {
        let (first, n) = first_and_count(blocks)?;
        if n > self.len()? as u64 / 64 + 1 {
            return Err(Error::new(ErrorKind::Invalid, "the sequence has fewer blocks than are listed"));
        }
        Ok((first, n))
    }

    /// Where its blocks are now.
    ///
    /// # Errors
    /// `Stale`, `Busy` (it is in an open step).
    pub fn residency(&self) -> Result<Residency> {
        let mut r = ffi::ta_residency::new();
        // SAFETY: the handle is alive, `r` writable.
        call(|err| unsafe { ffi::ta_seq_residency(self.pool().raw(), self.id(), &mut r, err) })?;
        Ok(Residency {
            pinned_blocks: r.pinned_blocks,
            device_blocks: r.device_blocks,
            host_blocks: r.host_blocks,
            disk_blocks: r.disk_blocks,
            device_bytes: r.device_bytes,
            host_bytes: r.host_bytes,
            disk_bytes: r.disk_bytes,
            dropped_blocks: r.dropped_blocks,
            peer_blocks: r.peer_blocks,
            peer_bytes: r.peer_bytes,
        })
    }
}
