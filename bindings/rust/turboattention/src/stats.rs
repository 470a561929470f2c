use std::ptr;

use crate::error::call;
use crate::plan::count;
use crate::{ffi, text, Error, ErrorKind, MetricsFormat, Pool, Result, Sequence, Tier, TierState};

/// Figures of a pool; the header has what each counts.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct PoolStats {
    pub sequences: u32,
    pub tokens: u64,
    pub bytes_budget: u64,
    pub bytes_used: u64,
    pub bytes_cached: u64,
    pub bytes_peak: u64,
    pub token_blocks: u64,
    pub channel_blocks: u64,
    pub shared_blocks: u64,
    pub token_block_bytes: u64,
    pub channel_block_bytes: u64,
    pub token_bits_per_element: f64,
    pub channel_bits_per_element: f64,
    pub appended_tokens: u64,
    pub closed_pages: u64,
    pub reopened_blocks: u64,
    pub copied_blocks: u64,
    pub saturated_values: u64,
    pub clamped_values: u64,
    pub low_blocks: u64,
    pub low_block_bytes: u64,
    pub bytes_free: u64,
    pub bytes_reclaimable: u64,
    pub bytes_promised: u64,
    /// Blocks without the pages of layers with windows, in use, beside the others.
    pub passed_blocks: u64,
}

/// Whether a step would find room in the device tier.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fit {
    /// At once: nothing leaves the device tier for it and nothing comes from disk.
    pub now: bool,
    /// Now or after others have left. If not, only other sequences that end can make room.
    pub after_eviction: bool,
    /// The first entry that does not fit, with those before it, after eviction.
    pub first_lacking: Option<usize>,
    /// What the device tier lacks after eviction.
    pub bytes_lacking: u64,
    /// Of blocks that the step adds, without what is promised to its sequences.
    pub bytes_new: u64,
    /// That come to memory first.
    pub blocks_from_disk: u64,
    /// Their bytes.
    pub bytes_from_disk: u64,
}

/// Memory in which a tier has blocks: [`Pool::memory`](crate::Pool::memory).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct MemoryRange {
    /// Of the GPU whose memory it is; `None`: the host's.
    pub device_ordinal: Option<u32>,
    /// Its first byte.
    pub data: *mut std::os::raw::c_void,
    /// Its size.
    pub bytes: u64,
}

/// Figures of one tier; docs/tiers.md explains them.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct TierStats {
    pub state: TierState,
    pub bytes_budget: u64,
    pub bytes_used: u64,
    pub bytes_free: u64,
    pub largest_free: u64,
    pub fragmentation: f64,
    pub blocks: u64,
    pub token_blocks: u64,
    pub channel_blocks: u64,
    pub low_blocks: u64,
    pub passed_blocks: u64,
    pub reason: String,
    pub blocks_in: u64,
    pub blocks_out: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub fallen_blocks: u64,
    pub hits: u64,
    pub misses: u64,
    pub misses_failed: u64,
    pub evicted_blocks: u64,
    pub evicted_age_seconds: f64,
    pub requests_queued: u64,
    pub requests_failed: u64,
    pub requests_corrupt: u64,
}

/// What moved and why, what steps waited for and staged; docs/tiers.md explains it.
#[derive(Clone, Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct MoveStats {
    pub queued_tickets: u64,
    pub bytes_asked: u64,
    pub bytes_prefetched: u64,
    pub bytes_needed: u64,
    pub bytes_evicted: u64,
    pub failed_blocks: u64,
    pub corrupt_blocks: u64,
    pub prefetch_used: u64,
    pub prefetch_late: u64,
    pub prefetch_wasted: u64,
    pub waits_for_room: u64,
    pub waits_for_blocks: u64,
    pub wait_seconds: f64,
    pub dropped_blocks: u64,
    pub host_steps: u64,
    pub staged_steps: u64,
    pub staged_pages: u64,
    pub staged_bytes: u64,
    pub bytes_by_copy_engine: u64,
    pub bytes_by_kernel: u64,
    pub copy_engine_from_down: u64,
    pub copy_engine_from_up: u64,
}

impl Pool {
    /// The pool's figures now.
    ///
    /// # Errors
    /// Those of every call.
    pub fn stats(&self) -> Result<PoolStats> {
        let mut s = ffi::ta_kv_pool_stats::new();
        // SAFETY: the handle is alive, `s` writable.
        call(|err| unsafe { ffi::ta_kv_pool_get_stats(self.raw(), &mut s, err) })?;
        Ok(PoolStats {
            sequences: s.sequences,
            tokens: s.tokens,
            bytes_budget: s.bytes_budget,
            bytes_used: s.bytes_used,
            bytes_cached: s.bytes_cached,
            bytes_peak: s.bytes_peak,
            token_blocks: s.token_blocks,
            channel_blocks: s.channel_blocks,
            shared_blocks: s.shared_blocks,
            token_block_bytes: s.token_block_bytes,
            channel_block_bytes: s.channel_block_bytes,
            token_bits_per_element: s.token_bits_per_element,
            channel_bits_per_element: s.channel_bits_per_element,
            appended_tokens: s.appended_tokens,
            closed_pages: s.closed_pages,
            reopened_blocks: s.reopened_blocks,
            copied_blocks: s.copied_blocks,
            saturated_values: s.saturated_values,
            clamped_values: s.clamped_values,
            low_blocks: s.low_blocks,
            low_block_bytes: s.low_block_bytes,
            bytes_free: s.bytes_free,
            bytes_reclaimable: s.bytes_reclaimable,
            bytes_promised: s.bytes_promised,
            passed_blocks: s.passed_blocks,
        })
    }

    /// Whether a step with these sequences and new tokens would find room now; `None` is a new, empty sequence. It reserves
    /// nothing; [`Sequence::reserve`] does.
    ///
    /// ```
    /// # use turboattention::*;
    /// # fn main() -> Result<()> {
    /// # let context = Context::new(ContextOptions::default())?;
    /// # let pool = Pool::new(&context, PoolOptions::new(1, 1, 64, 1 << 20))?;
    /// # let chat = Sequence::new(&pool)?;
    /// assert!(pool.fit([(Some(&chat), 1), (None, 100)])?.now);
    /// assert_eq!(pool.fit([(Some(&chat), 1), (None, 1 << 30)])?.first_lacking, Some(1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Invalid` (a sequence that is there twice or is of another pool, counts that do not fit), `Stale`, `Limit` (too many
    /// tokens).
    pub fn fit<'a>(&self, batch: impl IntoIterator<Item = (Option<&'a Sequence>, usize)>) -> Result<Fit> {
        let (mut ids, mut new) = (vec![], vec![]);
        for (seq, tokens) in batch {
            if seq.map_or(false, |seq| seq.pool() != self) {
                return Err(Error::new(ErrorKind::Invalid, "a sequence of another pool"));
            }
            ids.push(seq.map_or(0, Sequence::id));
            new.push(count(tokens)?);
        }
        let (n, mut f) = (u32::try_from(ids.len()).unwrap_or(u32::MAX), ffi::ta_fit::new());
        // SAFETY: the handle is alive, the lists have n elements, `f` is writable.
        call(|err| unsafe { ffi::ta_kv_pool_fit(self.raw(), n, ids.as_ptr(), new.as_ptr(), &mut f, err) })?;
        Ok(Fit {
            now: f.now != 0,
            after_eviction: f.after_eviction != 0,
            first_lacking: usize::try_from(f.first_lacking).ok(),
            bytes_lacking: f.bytes_lacking,
            bytes_new: f.bytes_new,
            blocks_from_disk: f.blocks_from_disk,
            bytes_from_disk: f.bytes_from_disk,
        })
    }

    /// Where a tier's memory is, so that a transfer library can register it. The memory stays until the pool ends.
    ///
    /// # Errors
    /// `Unsupported` (the pool has no such tier, the disk tier, or the device tier on a CPU).
    pub fn memory(&self, tier: Tier) -> Result<MemoryRange> {
        let mut r = ffi::ta_memory_range::new();
        // SAFETY: the handle is alive, `r` writable.
        call(|err| unsafe { ffi::ta_kv_pool_get_memory(self.raw(), tier as i32, &mut r, err) })?;
        Ok(MemoryRange { device_ordinal: u32::try_from(r.device_ordinal).ok(), data: r.data, bytes: r.bytes })
    }

    /// The figures of a tier now.
    ///
    /// # Errors
    /// `Unsupported` (the pool has no such tier).
    pub fn tier_stats(&self, tier: Tier) -> Result<TierStats> {
        let mut s = ffi::ta_tier_stats::new();
        // SAFETY: the handle is alive, `s` writable.
        call(|err| unsafe { ffi::ta_kv_pool_get_tier_stats(self.raw(), tier as i32, &mut s, err) })?;
        Ok(TierStats {
            state: TierState::known(s.state)?,
            bytes_budget: s.bytes_budget,
            bytes_used: s.bytes_used,
            bytes_free: s.bytes_free,
            largest_free: s.largest_free,
            fragmentation: s.fragmentation,
            blocks: s.blocks,
            token_blocks: s.token_blocks,
            channel_blocks: s.channel_blocks,
            low_blocks: s.low_blocks,
            passed_blocks: s.passed_blocks,
            reason: text(&s.reason),
            blocks_in: s.blocks_in,
            blocks_out: s.blocks_out,
            bytes_in: s.bytes_in,
            bytes_out: s.bytes_out,
            fallen_blocks: s.fallen_blocks,
            hits: s.hits,
            misses: s.misses,
            misses_failed: s.misses_failed,
            evicted_blocks: s.evicted_blocks,
            evicted_age_seconds: s.evicted_age_seconds,
            requests_queued: s.requests_queued,
            requests_failed: s.requests_failed,
            requests_corrupt: s.requests_corrupt,
        })
    }

    /// The figures of the pool's moves now.
    ///
    /// # Errors
    /// Those of every call.
    pub fn move_stats(&self) -> Result<MoveStats> {
        let mut s = ffi::ta_move_stats::new();
        // SAFETY: the handle is alive, `s` writable.
        call(|err| unsafe { ffi::ta_kv_pool_get_move_stats(self.raw(), &mut s, err) })?;
        Ok(MoveStats {
            queued_tickets: s.queued_tickets,
            bytes_asked: s.bytes_asked,
            bytes_prefetched: s.bytes_prefetched,
            bytes_needed: s.bytes_needed,
            bytes_evicted: s.bytes_evicted,
            failed_blocks: s.failed_blocks,
            corrupt_blocks: s.corrupt_blocks,
            prefetch_used: s.prefetch_used,
            prefetch_late: s.prefetch_late,
            prefetch_wasted: s.prefetch_wasted,
            waits_for_room: s.waits_for_room,
            waits_for_blocks: s.waits_for_blocks,
            wait_seconds: s.wait_seconds,
            dropped_blocks: s.dropped_blocks,
            host_steps: s.host_steps,
            staged_steps: s.staged_steps,
            staged_pages: s.staged_pages,
            staged_bytes: s.staged_bytes,
            bytes_by_copy_engine: s.bytes_by_copy_engine,
            bytes_by_kernel: s.bytes_by_kernel,
            copy_engine_from_down: s.copy_engine_from_down,
            copy_engine_from_up: s.copy_engine_from_up,
        })
    }

    /// What the statistics have, of all tiers, as text.
    ///
    /// # Errors
    /// Those of every call.
    pub fn metrics(&self, format: MetricsFormat) -> Result<String> {
        let mut needed = 0;
        let mut write = |buffer: *mut u8, len: usize| {
            // SAFETY: the handle is alive, the buffer has `len` bytes or is null.
            call(|err| unsafe {
                ffi::ta_kv_pool_write_metrics(self.raw(), format as i32, buffer.cast(), len as u64, &mut needed, err)
            })
            .map(|()| needed as usize)
            .or_else(|error| if needed as usize > len { Ok(needed as usize) } else { Err(error) })
        };
        let mut buffer = Vec::new();
        let mut len = write(ptr::null_mut(), 0)?;
        while len > buffer.len() {
            buffer.resize(len + 256, 0); // numbers grow between the calls
            len = write(buffer.as_mut_ptr(), buffer.len())?;
        }
        buffer.truncate(len - 1); // without the NUL
        String::from_utf8(buffer).map_err(|_| Error::new(ErrorKind::Internal, "metrics that are not UTF-8"))
    }
}
