use std::time::Duration;

use crate::error::call;
use crate::moves::{nanoseconds, take};
use crate::{ffi, Error, ErrorKind, Group, Pool, PrefixAnswer, PrefixEventKind, Result, Sequence, Tier, Transfer};

/// Stands for all tokens up to the end of a block, and for the model: a cryptographic hash of the caller.
pub type Key = [u8; 32];

/// Keeps what a tenant publishes apart from others. Clones are the same namespace. It does not end with the last of them, but
/// with its pool or by [`Namespace::destroy`].
///
/// ```
/// # use turboattention::*;
/// # fn main() -> Result<()> {
/// # let pool = Pool::new(&Context::new(ContextOptions::default())?, PoolOptions::new(1, 1, 64, 1 << 20))?;
/// # let (mut plan, mut a, x) = (Plan::new(&pool)?, Sequence::new(&pool)?, vec![0.5f32; 200 * 64]);
/// # let mut step = plan.begin([(&mut a, 200)])?;
/// # step.append(0, Tensor::new(&x, [200, 1, 64])?, Tensor::new(&x, [200, 1, 64])?)?;
/// # step.end()?;
/// let space = Namespace::new(&pool, [7; 32], 0)?; // secret random bytes, not sevens
/// let keys = [[1; 32], [2; 32], [3; 32]]; // hashes of tokens 0..64, 0..128, 0..192 of `a`
/// a.publish(&space, &keys)?;
///
/// let (b, length) = space.match_prefix(&[keys[0], keys[1], [9; 32]])?; // a request that begins like `a`
/// assert_eq!((length, b.len()?), (128, 128));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Namespace {
    pub(crate) pool: Pool,
    pub(crate) id: ffi::ta_namespace,
}

/// Figures of a namespace.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NamespaceStats {
    /// Published blocks.
    pub entries: u64,
    /// Their bytes.
    pub bytes: u64,
    /// 0: no limit.
    pub bytes_quota: u64,
    /// Of entries that sequences have, too.
    pub bytes_shared: u64,
    /// Keys found, since creation, as the next ones.
    pub hits: u64,
    /// Keys asked for and not found.
    pub misses: u64,
    /// Blocks published.
    pub published: u64,
    /// Entries dropped for room or quota.
    pub evicted: u64,
}

/// What became of a published block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixEvent {
    /// Hashed: [`Namespace::hash_keys`].
    pub key: Key,
    /// Of the namespace's events, from 1; those that a gap before `Reset` lacks were lost.
    pub number: u64,
    /// Of the block in its sequence.
    pub index: u64,
    /// What became of it.
    pub kind: PrefixEventKind,
    /// Where it is; `Dropped`: was.
    pub tier: Tier,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PrefixPlace {
    /// Whether a rank has it.
    pub answer: PrefixAnswer,
    /// Of `Yes`: this rank if it has the block, else the one where it is nearest.
    pub rank: u32,
    /// Of `Yes`: there.
    pub tier: Tier,
}

impl Namespace {
    /// Creates a namespace of a pool.
    ///
    /// `salt`: secret random bytes; the same bytes find published blocks again in a later process or at another rank.
    /// `quota_bytes` of published blocks; 0: no limit.
    ///
    /// # Errors
    /// `Invalid` (a salt of zeros, or one that the pool has a namespace with), `Limit` (65536 namespaces).
    pub fn new(pool: &Pool, salt: [u8; 32], quota_bytes: u64) -> Result<Self> {
        let options = ffi::ta_namespace_options { quota_bytes, salt, ..ffi::ta_namespace_options::new() };
        let mut id = 0;
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_create(pool.raw(), &options, &mut id, err) })?;
        Ok(Namespace { pool: pool.clone(), id })
    }

    /// Drops the published blocks, also from a disk tier that lasts; sequences keep their blocks.
    ///
    /// # Errors
    /// `Stale`.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_destroy(self.pool.raw(), self.id, err) })
    }

    /// Its figures now.
    ///
    /// # Errors
    /// `Stale`.
    pub fn stats(&self) -> Result<NamespaceStats> {
        let mut s = ffi::ta_namespace_stats::new();
        // SAFETY: the handle is alive, `s` writable.
        call(|err| unsafe { ffi::ta_namespace_get_stats(self.pool.raw(), self.id, &mut s, err) })?;
        Ok(NamespaceStats {
            entries: s.entries,
            bytes: s.bytes,
            bytes_quota: s.bytes_quota,
            bytes_shared: s.bytes_shared,
            hits: s.hits,
            misses: s.misses,
            published: s.published,
            evicted: s.evicted,
        })
    }

    /// Writes published blocks to the disk tier that lasts, and waits until they survive a power failure.
    ///
    /// # Errors
    /// `Stale`, `Unsupported` (no disk tier that lasts), `TierFull`, `Io`, `Corrupt`.
    pub fn flush(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_flush(self.pool.raw(), self.id, err) })
    }

    /// Makes the keys of which events speak.
    ///
    /// # Errors
    /// `Stale`.
    pub fn hash_keys(&self, keys: &[Key]) -> Result<Vec<Key>> {
        let mut hashed = vec![Key::default(); keys.len()];
        // SAFETY: the handle is alive, both lists have so many keys.
        call(|err| unsafe {
            let (n, to) = (keys.len() as u64, hashed.as_mut_ptr().cast());
            ffi::ta_namespace_hash_keys(self.pool.raw(), self.id, keys.as_ptr().cast(), n, to, err)
        })?;
        Ok(hashed)
    }

    /// Takes up to `most` events, each once, the oldest first. The first is a `Reset`.
    ///
    /// # Errors
    /// `Stale`.
    pub fn take_events(&self, most: usize) -> Result<Vec<PrefixEvent>> {
        // SAFETY: the handle is alive, the list has so many elements.
        let list = take(most, |list: &mut [ffi::ta_prefix_event], n, err| unsafe {
            ffi::ta_namespace_take_events(self.pool.raw(), self.id, list.as_mut_ptr(), list.len() as u64, n, err)
        })?;
        let event = |e: &ffi::ta_prefix_event| {
            let (kind, tier) = (PrefixEventKind::known(e.kind)?, Tier::known(e.tier)?);
            Ok(PrefixEvent { key: e.key, number: e.number, index: e.index, kind, tier })
        };
        list.iter().map(event).collect()
    }

    /// Creates a sequence that begins with the blocks of the first keys, as many as are published without a gap, maybe none.
    /// Also returns the number of their tokens.
    ///
    /// # Errors
    /// `Stale`, `Limit` (the pool has as many sequences as it may).
    pub fn match_prefix(&self, keys: &[Key]) -> Result<(Sequence, usize)> {
        let (mut id, mut length) = (0, 0);
        // SAFETY: the handle is alive, the list has so many keys.
        call(|err| unsafe {
            let n = keys.len() as u64;
            ffi::ta_seq_match_prefix(self.pool.raw(), self.id, keys.as_ptr().cast(), n, &mut id, &mut length, err)
        })?;
        Ok((Sequence::from_raw(&self.pool, id), length as usize))
    }

    /// Shares it with the ranks of a group that have one of the same salt, until [`Namespace::leave`].
    ///
    /// # Errors
    /// `Invalid` (one of this salt and fingerprint of this rank has joined already), `Stale`, `Limit` (threads), `State` (the
    /// group is not ready, or the pool is of another context), and what [`Group::health`](crate::Group::health) says.
    pub fn join(&self, group: &Group) -> Result<()> {
        // SAFETY: the handles are alive.
        call(|err| unsafe { ffi::ta_namespace_join(group.raw(), self.pool.raw(), self.id, err) })
    }

    /// Ends what [`Namespace::join`] began; blocks that were fetched stay.
    ///
    /// # Errors
    /// `State` (it has not joined), `Stale`, and what [`Group::health`](crate::Group::health) says.
    pub fn leave(&self, group: &Group) -> Result<()> {
        // SAFETY: the handles are alive.
        call(|err| unsafe { ffi::ta_namespace_leave(group.raw(), self.pool.raw(), self.id, err) })
    }

    /// Says which ranks have the blocks of keys, as far as ranks have announced: a hint. Waits for ranks that have not, up to
    /// `timeout`; `None`: without limit.
    ///
    /// # Errors
    /// `Stale`, `State` (the namespace has not joined), and what [`Group::health`](crate::Group::health) says.
    pub fn lookup(&self, group: &Group, keys: &[Key], timeout: Option<Duration>) -> Result<Vec<PrefixPlace>> {
        let mut list = vec![ffi::ta_prefix_place::default(); keys.len()];
        // SAFETY: the handles are alive, both lists have so many elements.
        call(|err| unsafe {
            let (n, ns, places) = (keys.len() as u64, nanoseconds(timeout), list.as_mut_ptr());
            ffi::ta_namespace_lookup(group.raw(), self.pool.raw(), self.id, keys.as_ptr().cast(), n, ns, places, err)
        })?;
        let place = |p: &ffi::ta_prefix_place| {
            Ok(PrefixPlace { answer: PrefixAnswer::known(p.answer)?, rank: p.rank, tier: Tier::known(p.tier)? })
        };
        list.iter().map(place).collect()
    }

    /// Brings the blocks of the first keys that this rank lacks from other ranks, and publishes them here.
    /// [`TransferInfo::length`](crate::TransferInfo::length) says how many tokens [`Namespace::match_prefix`] finds then.
    ///
    /// # Errors
    /// As [`Namespace::lookup`]; of the transfer also `Limit` (the quota) and `Stale` (the namespace ended).
    pub fn fetch(&self, group: &Group, keys: &[Key]) -> Result<Transfer> {
        let mut ticket = 0;
        // SAFETY: the handles are alive, the list has so many keys.
        call(|err| unsafe {
            let n = keys.len() as u64;
            ffi::ta_namespace_fetch(group.raw(), self.pool.raw(), self.id, keys.as_ptr().cast(), n, &mut ticket, err)
        })?;
        Ok(Transfer::new(group, ticket))
    }
}

impl Sequence {
    /// Publishes its first blocks, which must be full, one for each key; the published blocks outlive it.
    ///
    /// # Errors
    /// `Invalid` (more keys than full blocks; the sequence or one of its blocks is of another namespace or pool), `Stale`,
    /// `Busy` (it is in an open step), `Limit` (the quota, and sequences use what is published), `State` (a block was dropped,
    /// or the sequence is partitioned), `Corrupt`, on a GPU `NonFinite` (once, as a begin).
    pub fn publish(&self, namespace: &Namespace, keys: &[Key]) -> Result<()> {
        if namespace.pool != *self.pool() {
            return Err(Error::new(ErrorKind::Invalid, "a namespace of another pool"));
        }
        // SAFETY: the handle is alive, the list has so many keys.
        call(|err| unsafe {
            let n = keys.len() as u64;
            ffi::ta_seq_publish(self.pool().raw(), self.id(), namespace.id, keys.as_ptr().cast(), n, err)
        })
    }
}
