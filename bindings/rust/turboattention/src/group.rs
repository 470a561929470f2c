use std::fmt;
use std::future::Future;
use std::os::raw::c_void;
use std::os::unix::io::RawFd;
use std::pin::Pin;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use crate::error::call;
use crate::moves::{finished, nanoseconds, take};
use crate::wake::{watch, Job, Source, Watcher};
use crate::{
    ffi, text, Context, Error, ErrorKind, GroupKind, GroupState, MoveState, PartitionOutput, PeerRoute, Pool, Result, SendMode,
    Sequence,
};

/// Names a group. One rank makes it and gives it to the others by means of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct GroupId(pub [u8; 128]);

impl GroupId {
    /// Makes an id.
    ///
    /// # Errors
    /// `Unsupported` (no NCCL).
    pub fn new(kind: GroupKind) -> Result<Self> {
        let mut id = ffi::ta_group_id { bytes: [0; 128] };
        // SAFETY: `id` is writable.
        call(|err| unsafe { ffi::ta_group_make_id(kind as i32, &mut id, err) })?;
        Ok(GroupId(id.bytes))
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupId(..)")
    }
}

/// Options of [`Group::join`]; make them with [`GroupOptions::new`] and `..`. A field that is 0 is at its default.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How ranks reach each other.
    pub kind: GroupKind,
    /// The same at all ranks.
    pub id: GroupId,
    /// 0 to `ranks` - 1.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// Until all ranks have joined; 30000, as the next two in milliseconds.
    pub connect_ms: i32,
    /// A transfer without progress for so long ends; 30000.
    pub operation_ms: i32,
    /// A rank that was not heard of for so long is lost; 10000.
    pub silence_ms: i32,
    /// Host memory that each arriving transfer may take.
    pub staging_bytes: u64,
    /// Of [`GroupKind::Nccl`]: takes ranks of one host for ranks of several.
    pub hosts_apart: bool,
}

impl GroupOptions {
    /// What is required; the rest is at its default.
    pub fn new(kind: GroupKind, id: GroupId, rank: u32, ranks: u32) -> Self {
        let (connect_ms, operation_ms, silence_ms, staging_bytes, hosts_apart) = (0, 0, 0, 0, false);
        GroupOptions { kind, id, rank, ranks, connect_ms, operation_ms, silence_ms, staging_bytes, hosts_apart }
    }
}

/// This rank of a group of contexts. Clones are the same rank, which leaves the group, and so ends it, with the last of them
/// and of its transfers.
///
/// ```
/// # use turboattention::*;
/// # fn main() -> Result<()> {
/// # let pool = || Pool::new(&Context::new(ContextOptions::default())?, PoolOptions::new(1, 1, 64, 1 << 20));
/// let (here, there) = (pool()?, pool()?); // of two contexts
/// let id = GroupId::new(GroupKind::Local)?; // goes to all ranks
/// let source = Group::join(here.context(), &GroupOptions::new(GroupKind::Local, id, 0, 2))?;
/// let destination = Group::join(there.context(), &GroupOptions::new(GroupKind::Local, id, 1, 2))?;
/// source.wait_ready()?;
/// destination.wait_ready()?;
///
/// let seq = Sequence::new(&here)?;
/// let send = source.send(&seq, 1, 42, SendMode::Copy)?; // to rank 1, with a number of the caller's
/// let (copy, info) = destination.receive(&there, 0, 42)?.wait()?;
/// send.wait()?;
/// # assert_eq!((copy.len()?, info.tag), (0, 42));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Group(Arc<Handle>);

struct Handle {
    raw: NonNull<ffi::ta_group>,
    watcher: Watcher,
}

// SAFETY: calls on one ta_group may overlap, from any thread; it is destroyed once nobody has it.
unsafe impl Send for Handle {}
unsafe impl Sync for Handle {}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: the only destroy of the handle.
        unsafe { ffi::ta_group_destroy(self.raw.as_ptr()) }
    }
}

/// What a group is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupInfo {
    /// Whether it can be used.
    pub state: GroupState,
    /// This one.
    pub rank: u32,
    /// How many there are.
    pub ranks: u32,
    /// How ranks reach each other.
    pub kind: GroupKind,
    /// 22809: 2.28.9; 0: not of [`GroupKind::Nccl`].
    pub nccl_version: i32,
    /// Differs from group to group; the same at all ranks.
    pub generation: u64,
    /// Why the group has ended; else empty.
    pub reason: String,
}

/// What lies between this rank and another.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupPeer {
    /// The other one.
    pub rank: u32,
    /// How blocks come.
    pub route: PeerRoute,
    /// At which its GPU's memory was read when the group was made; 0: not measured.
    pub bytes_per_s: u64,
    /// Why no faster route is taken; else empty.
    pub why: String,
}

/// A transfer that is finished: see [`Group::take_finished`] and [`Transfer::ticket`].
pub type Finished = u64;

impl Group {
    /// Joins a group and returns; [`Group::wait_ready`] waits for the other ranks.
    ///
    /// # Errors
    /// `Invalid` (a value outside its range, an id of another kind, a rank that joined already), `Mismatch` (another rank, or
    /// the communicator, says another number of ranks), `Stale` (the group of this id has ended), `Limit` (threads),
    /// `Unsupported` (of processes: /dev/shm cannot be used, or more than 63 ranks; of NCCL: no library, or a rank without a
    /// GPU), `Memory` (/dev/shm is full).
    pub fn join(context: &Context, options: &GroupOptions) -> Result<Self> {
        // SAFETY: no communicator is given.
        unsafe { Self::join_raw(context, options, ptr::null_mut()) }
    }

    /// Likewise, on an `ncclComm_t` of the same ranks.
    ///
    /// # Safety
    /// The communicator is valid, nobody uses it until the group is ready, and it is freed after the group has ended.
    ///
    /// # Errors
    /// As [`Group::join`].
    pub unsafe fn join_nccl(context: &Context, options: &GroupOptions, nccl_comm: *mut c_void) -> Result<Self> {
        // SAFETY: as the caller says.
        unsafe { Self::join_raw(context, options, nccl_comm) }
    }

    unsafe fn join_raw(context: &Context, options: &GroupOptions, nccl_comm: *mut c_void) -> Result<Self> {
        let id = ffi::ta_group_id { bytes: options.id.0 };
        let raw_options = ffi::ta_group_options {
            rank: options.rank,
            ranks: options.ranks,
            kind: options.kind as i32,
            id: &id,
            connect_ms: options.connect_ms,
            operation_ms: options.operation_ms,
            silence_ms: options.silence_ms,
            staging_bytes: options.staging_bytes,
            nccl_comm,
            hosts_apart: i32::from(options.hosts_apart),
            ..ffi::ta_group_options::new()
        };
        let mut raw = ptr::null_mut();
        // SAFETY: the handle is alive; options and id live for the call.
        call(|err| unsafe { ffi::ta_group_create(context.raw(), &raw_options, &mut raw, err) })?;
        // SAFETY: not null on success.
        let raw = unsafe { NonNull::new_unchecked(raw) };
        Ok(Group(Arc::new(Handle { raw, watcher: Watcher::default() })))
    }

    /// The C handle, for calls of [`ffi`]. It lives as long as this.
    pub fn raw(&self) -> *mut ffi::ta_group {
        self.0.raw.as_ptr()
    }

    /// Waits while the group connects, at most for `timeout`; `None`: without limit.
    ///
    /// # Errors
    /// Those of every call.
    pub fn poll(&self, timeout: Option<Duration>) -> Result<GroupState> {
        let mut state = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_group_poll(self.raw(), nanoseconds(timeout), &mut state, err) })?;
        GroupState::known(state)
    }

    /// Waits until all ranks have joined, or says why the group has ended.
    ///
    /// # Errors
    /// As [`Group::health`].
    pub fn wait_ready(&self) -> Result<()> {
        self.poll(None)?;
        self.health()
    }

    /// Ok while the group connects or is ready, else why it has ended; [`Place::rank`](crate::Place::rank) is the rank at
    /// fault.
    ///
    /// # Errors
    /// `PeerLost`, `Timeout` (a rank did not join), `Mismatch`, `Cancelled` (it was aborted).
    pub fn health(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_group_health(self.raw(), err) })
    }

    /// Ends the group at all ranks.
    ///
    /// # Errors
    /// Those of every call.
    pub fn abort(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_group_abort(self.raw(), err) })
    }

    /// What the group is.
    ///
    /// # Errors
    /// Those of every call.
    pub fn info(&self) -> Result<GroupInfo> {
        let mut info = ffi::ta_group_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_group_get_info(self.raw(), &mut info, err) })?;
        Ok(GroupInfo {
            state: GroupState::known(info.state)?,
            rank: info.rank,
            ranks: info.ranks,
            kind: GroupKind::known(info.kind)?,
            nccl_version: info.nccl_version,
            generation: info.generation,
            reason: text(&info.reason),
        })
    }

    /// How this rank and another are connected. The group must be ready.
    ///
    /// # Errors
    /// `Invalid` (no such rank), `State` (the group is not ready), and what [`Group::health`](crate::Group::health) says.
    pub fn peer(&self, rank: u32) -> Result<GroupPeer> {
        let mut peer = ffi::ta_group_peer::new();
        // SAFETY: the handle is alive, `peer` writable.
        call(|err| unsafe { ffi::ta_group_get_peer(self.raw(), rank, &mut peer, err) })?;
        let route = PeerRoute::known(peer.route)?;
        Ok(GroupPeer { rank: peer.rank, route, bytes_per_s: peer.bytes_per_s, why: text(&peer.why) })
    }

    /// Can be read (poll, epoll) while [`Group::take_finished`] has tickets, or since the state changed. It belongs to the
    /// group.
    ///
    /// # Errors
    /// `Unsupported` (the system gave none).
    pub fn descriptor(&self) -> Result<RawFd> {
        let mut descriptor = -1;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_group_descriptor(self.raw(), &mut descriptor, err) })?;
        Ok(descriptor)
    }

    /// Takes up to `most` transfers that are finished, each once, the oldest first.
    ///
    /// # Errors
    /// Those of every call.
    pub fn take_finished(&self, most: usize) -> Result<Vec<Finished>> {
        // SAFETY: the handle is alive, the list has so many elements.
        take(most, |list, n, err| unsafe {
            ffi::ta_group_take_finished(self.raw(), list.as_mut_ptr(), list.len() as u64, n, err)
        })
    }

    /// Offers a sequence to another rank, where [`Group::receive`] with the same tag takes it.
    ///
    /// # Errors
    /// `Invalid` (no such rank), `Stale`, `Busy` (it is in an open step), `State` (the group is not ready; a block was dropped;
    /// the sequence is partitioned; the pool is of another context), of a move on a GPU `NonFinite`, and what
    /// [`Group::health`](crate::Group::health) says.
    pub fn send(&self, seq: &Sequence, to: u32, tag: u64, mode: SendMode) -> Result<Transfer> {
        let mut ticket = 0;
        // SAFETY: the handles are alive.
        call(|err| unsafe {
            ffi::ta_seq_send(self.raw(), seq.pool().raw(), seq.id(), to, tag, mode as i32, &mut ticket, err)
        })?;
        Ok(Transfer::new(self, ticket))
    }

    /// Takes a sequence that rank `from` sends with this tag into a pool of the same shape and settings.
    ///
    /// # Errors
    /// `Invalid` (no such rank), `State` (the group is not ready; the pool is of another context), and what
    /// [`Group::health`](crate::Group::health) says.
    pub fn receive(&self, pool: &Pool, from: u32, tag: u64) -> Result<Receive> {
        let mut ticket = 0;
        // SAFETY: the handles are alive.
        call(|err| unsafe { ffi::ta_seq_receive(self.raw(), pool.raw(), from, tag, &mut ticket, err) })?;
        Ok(Receive { transfer: Transfer::new(self, ticket), pool: pool.clone(), taken: false })
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Group").field(&self.raw()).finish()
    }
}

impl Source for Handle {
    fn finished(&self, ticket: ffi::ta_ticket, patience: Duration) -> bool {
        let mut info = ffi::ta_transfer_info::new();
        let ns = nanoseconds(Some(patience));
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_transfer_wait(self.raw.as_ptr(), ticket, ns, &mut info, err) }).is_err()
            || finished(info.state)
    }
    fn received(&self, ticket: ffi::ta_ticket) -> Option<u64> {
        let mut info = ffi::ta_transfer_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_transfer_query(self.raw.as_ptr(), ticket, &mut info, err) }).ok()?;
        (info.seq != 0).then_some(info.seq)
    }
    fn watcher(&self) -> &Watcher {
        &self.watcher
    }
}

/// A send or a fetch. It goes on in the background, whether this is kept or not.
///
/// As a future it ends as [`Transfer::wait`] does; any executor will do.
#[must_use = "whether the transfer succeeds is known when it is finished"]
#[derive(Debug)]
pub struct Transfer {
    group: Group,
    ticket: ffi::ta_ticket,
    watched: bool,
}

/// How far a transfer is.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransferInfo {
    /// Whether it is finished.
    pub state: MoveState,
    /// The other rank.
    pub peer: u32,
    /// As given.
    pub tag: u64,
    /// Of the sequence; 0 at a destination that has no offer yet. Of a fetch: keys.
    pub blocks: u64,
    /// Written, at the destination checked.
    pub blocks_moved: u64,
    /// At the destination: were there already.
    pub blocks_shared: u64,
    /// Bytes of the blocks that moved.
    pub bytes_moved: u64,
    /// Tokens of the sequence; of a fetch: that are published under the first keys.
    pub length: usize,
    seq: ffi::ta_seq,
    status: ffi::ta_status,
    block: i64,
    rank: i32,
    reason: String,
}

impl TransferInfo {
    fn new(raw: &ffi::ta_transfer_info) -> Result<Self> {
        Ok(TransferInfo {
            state: MoveState::known(raw.state)?,
            peer: raw.peer,
            tag: raw.tag,
            blocks: raw.blocks,
            blocks_moved: raw.blocks_moved,
            blocks_shared: raw.blocks_shared,
            bytes_moved: raw.bytes_moved,
            length: raw.length.max(0) as usize,
            seq: raw.seq,
            status: raw.status,
            block: raw.block,
            rank: raw.rank,
            reason: text(&raw.reason),
        })
    }

    /// Why it failed or was cancelled.
    pub fn error(&self) -> Option<Error> {
        (self.status != ffi::TA_OK).then(|| Error::of_ticket(self.status, self.block, self.rank, self.reason.clone()))
    }

    fn ended(self) -> Result<Self> {
        match self.state {
            MoveState::Failed | MoveState::Cancelled => {
                Err(self.error().unwrap_or_else(|| Error::new(ErrorKind::Cancelled, "the transfer was cancelled")))
            }
            _ => Ok(self),
        }
    }
}

impl Transfer {
    pub(crate) fn new(group: &Group, ticket: ffi::ta_ticket) -> Self {
        Transfer { group: group.clone(), ticket, watched: false }
    }

    /// Its number in the group.
    pub fn ticket(&self) -> Finished {
        self.ticket
    }

    /// How far it is.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn info(&self) -> Result<TransferInfo> {
        let mut info = ffi::ta_transfer_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_transfer_query(self.group.raw(), self.ticket, &mut info, err) })?;
        TransferInfo::new(&info)
    }

    /// Waits until it is finished.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago), and why it ended: `Cancelled`, `Mismatch` (the pools cannot exchange
    /// blocks), `TierFull` and the others of [`Sequence::load`] (at the destination), `Corrupt`, `Io` (a block at the source),
    /// `Busy` (under falling precision: a block lost bits meanwhile), `Closed` (a pool), `Timeout`, `PeerLost`.
    pub fn wait(&self) -> Result<TransferInfo> {
        self.wait_for(None)?.ended()
    }

    /// Waits for so long, `None`: without limit; [`TransferInfo::state`] says whether it is finished.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn wait_for(&self, timeout: Option<Duration>) -> Result<TransferInfo> {
        let mut info = ffi::ta_transfer_info::new();
        // SAFETY: the handle is alive, `info` writable.
        call(|err| unsafe { ffi::ta_transfer_wait(self.group.raw(), self.ticket, nanoseconds(timeout), &mut info, err) })?;
        TransferInfo::new(&info)
    }

    /// Asks for its end and returns.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn cancel(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_transfer_cancel(self.group.raw(), self.ticket, err) })
    }

    fn poll_info(&mut self, context: &mut TaskContext<'_>) -> Poll<Result<TransferInfo>> {
        let info = self.info()?;
        if finished(info.state as i32) {
            return Poll::Ready(info.ended());
        }
        watch(&self.group.0, self.ticket, Job::Wake(context.waker().clone()))?;
        self.watched = true;
        Poll::Pending
    }
}

impl Future for Transfer {
    type Output = Result<TransferInfo>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        self.poll_info(context)
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        if self.watched {
            self.group.0.watcher.forget(self.ticket);
        }
    }
}

/// A receive. If it is dropped before it gave its sequence, it is cancelled, and a sequence that still arrives is released.
///
/// As a future it ends as [`Receive::wait`] does; any executor will do.
#[must_use = "a receive that is dropped is cancelled"]
#[derive(Debug)]
pub struct Receive {
    transfer: Transfer,
    pool: Pool,
    taken: bool,
}

impl Receive {
    /// Its number in the group.
    pub fn ticket(&self) -> Finished {
        self.transfer.ticket()
    }

    /// How far it is.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn info(&self) -> Result<TransferInfo> {
        self.transfer.info()
    }

    /// Waits for so long, `None`: without limit; [`TransferInfo::state`] says whether it is finished.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn wait_for(&self, timeout: Option<Duration>) -> Result<TransferInfo> {
        self.transfer.wait_for(timeout)
    }

    /// Waits until it is finished, and takes the sequence.
    ///
    /// # Errors
    /// As [`Transfer::wait`]; `State`: the sequence was taken already.
    pub fn wait(mut self) -> Result<(Sequence, TransferInfo)> {
        let info = self.transfer.wait();
        self.take(info)
    }

    /// Asks for its end and returns.
    ///
    /// # Errors
    /// `Stale` (it finished more than 4096 transfers ago).
    pub fn cancel(&self) -> Result<()> {
        self.transfer.cancel()
    }

    /// Of a receive that is finished.
    fn take(&mut self, info: Result<TransferInfo>) -> Result<(Sequence, TransferInfo)> {
        let info = info?;
        if self.taken || info.seq == 0 {
            return Err(Error::new(ErrorKind::State, "the sequence was taken already"));
        }
        self.taken = true;
        Ok((Sequence::from_raw(&self.pool, info.seq), info))
    }
}

impl Future for Receive {
    type Output = Result<(Sequence, TransferInfo)>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        self.transfer.poll_info(context).map(|info| self.take(info))
    }
}

impl Drop for Receive {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        let _ = self.cancel(); // of one that has failed, or in a forked child
        if self.info().map_or(false, |info| !finished(info.state as i32) || info.seq != 0) {
            self.transfer.watched = false; // the job below stays
            let _ = watch(&self.transfer.group.0, self.transfer.ticket, Job::Release(self.pool.clone()));
        }
    }
}

/// Options of [`Sequence::partition`]; make them with `..Default::default()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartitionOptions {
    /// Which ranks get the results.
    pub output: PartitionOutput,
    /// Has block 0; block i is at rank (`first_rank` + i) mod ranks.
    pub first_rank: u32,
    /// Of [`PartitionOutput::One`].
    pub output_rank: u32,
    /// Of the sequence in the group; no other partitioned sequence of this rank has it.
    pub tag: u64,
}

impl Sequence {
    /// Spreads it over the ranks of a group. All ranks make this call on a sequence of the same length with the same options,
    /// and the same calls on it from then on. docs/sharing.md says which of these wait for other ranks.
    ///
    /// # Errors
    /// `Invalid` (an option outside its range, the tag of another sequence), `Stale`, `Busy` (it is in an open step), `State`
    /// (the group is not ready; the sequence is partitioned already; its universal scales are not known: end a step with new
    /// tokens first), `Unsupported` (more than 64 ranks, a sequence that was shifted, a pool that is batch invariant), and what
    /// [`Group::health`](crate::Group::health) says.
    pub fn partition(&mut self, group: &Group, options: &PartitionOptions) -> Result<()> {
        let options = ffi::ta_partition_options {
            output: options.output as i32,
            first_rank: options.first_rank,
            output_rank: options.output_rank,
            tag: options.tag,
            ..ffi::ta_partition_options::new()
        };
        // SAFETY: the handles are alive.
        call(|err| unsafe { ffi::ta_seq_partition(group.raw(), self.pool().raw(), self.id(), &options, err) })
    }
}
