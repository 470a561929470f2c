use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;
use std::time::{Duration, SystemTime};

use crate::error::call;
use crate::moves::nanoseconds;
use crate::{ffi, text, Key, Move, Namespace, Result, StoreResult, Switch};

/// A key of a store and its value.
#[derive(Debug)]
#[repr(transparent)]
pub struct StoreItem(ffi::ta_store_item);

impl StoreItem {
    /// Looks random; tells nothing of tokens, salt and shape.
    pub fn key(&self) -> &Key {
        // SAFETY: the library lends 32 bytes for the call.
        unsafe { &*self.0.key.cast() }
    }

    /// Of `put`: the value.
    pub fn value(&self) -> &[u8] {
        match self.0.data.is_null() {
            true => &[],
            // SAFETY: the library lends so many bytes for the call.
            false => unsafe { slice::from_raw_parts(self.0.data.cast(), self.0.bytes as usize) },
        }
    }

    /// Of `get`: there is this value. One that is larger than what any block takes is refused.
    pub fn give(&mut self, value: &[u8]) {
        if value.len() as u64 <= self.0.bytes && !self.0.data.is_null() {
            // SAFETY: the library lends so many bytes for the call, which are nobody else's.
            unsafe { self.0.data.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len()) };
        }
        self.0.bytes = value.len() as u64;
        self.set(StoreResult::Done);
    }

    /// What became of it: `Absent` at first.
    pub fn set(&mut self, result: StoreResult) {
        self.0.result = result as i32;
    }
}

/// Keeps published blocks outside of the process. Each function gets a batch, sets the items' results, and should return within
/// `left`; what it does later is ignored. `false`, and a panic, fail the batch as a whole. One thread of the library calls it for each
/// namespace that has it.
pub trait BlockStore: Send + Sync {
    /// Which keys have values: `Done`.
    fn exists(&self, items: &mut [StoreItem], left: Duration) -> bool;
    /// [`StoreItem::give`] for those that have values.
    fn get(&self, items: &mut [StoreItem], left: Duration) -> bool;
    /// Stores [`StoreItem::value`] of each, in place of what is there.
    fn put(&self, items: &mut [StoreItem], left: Duration) -> bool;
    /// Removes values.
    fn remove(&self, items: &mut [StoreItem], left: Duration) -> bool;
}

/// How a store is used; the default has all defaults.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// That a function may take, in milliseconds; 0: 2000.
    pub timeout_ms: i32,
    /// What is published is put. Default on.
    pub write_through: Switch,
    /// Values bear a keyed hash that takes the salt to make. Default on.
    pub authenticate: Switch,
    /// Host memory for the values of a call; 0: 32 MiB.
    pub batch_bytes: u64,
}

/// Figures of a namespace's store since it was attached.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoreStats {
    /// It failed, and is asked again after a pause.
    pub pausing: bool,
    /// Blocks that were put.
    pub puts: u64,
    /// That were there already.
    pub puts_present: u64,
    /// Attempts to put that failed.
    pub put_failures: u64,
    /// Blocks that loads brought.
    pub hits: u64,
    /// That they did not get.
    pub misses: u64,
    /// Values that were not what they should be.
    pub refused: u64,
    /// Of values that were put.
    pub bytes_put: u64,
    /// Of values that came.
    pub bytes_got: u64,
    /// Of its functions.
    pub calls: u64,
    /// That returned an error.
    pub calls_failed: u64,
    /// Calls that did not return in time.
    pub timeouts: u64,
    /// Published blocks that are still to be put.
    pub waiting: u64,
    /// When something last failed or was refused.
    pub failed: Option<SystemTime>,
    /// What that was.
    pub failure: String,
}

type Function = fn(&dyn BlockStore, &mut [StoreItem], Duration) -> bool;

fn run(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64, function: Function) -> i32 {
    // SAFETY: `user` is the box that attach_store gave away; the library lends the items for the call, and StoreItem is one of them.
    let (store, items) =
        unsafe { (&*user.cast::<Box<dyn BlockStore>>(), slice::from_raw_parts_mut(items.cast::<StoreItem>(), n as usize)) };
    let left = Duration::from_nanos(left.max(0) as u64);
    match catch_unwind(AssertUnwindSafe(|| function(store.as_ref(), items, left))) {
        Ok(true) => 0,
        _ => -1,
    }
}

unsafe extern "C" fn exists(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, |store, items, left| store.exists(items, left))
}

unsafe extern "C" fn get(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, |store, items, left| store.get(items, left))
}

unsafe extern "C" fn put(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, |store, items, left| store.put(items, left))
}

unsafe extern "C" fn remove(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, |store, items, left| store.remove(items, left))
}

unsafe extern "C" fn release(user: *mut c_void) {
    // SAFETY: called once, after the last of the other functions has returned.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(user.cast::<Box<dyn BlockStore>>()) })));
}

impl Namespace {
    /// Keeps what is published in a store, too, from now on; [`Namespace::load`] brings blocks from it.
    pub fn attach_store(&self, store: impl BlockStore + 'static, options: &StoreOptions) -> Result<()> {
        let raw = ffi::ta_store_options {
            timeout_ms: options.timeout_ms,
            write_through: options.write_through as i32,
            authenticate: options.authenticate as i32,
            batch_bytes: options.batch_bytes,
            ..ffi::ta_store_options::new()
        };
        let set = ffi::ta_block_store {
            exists: Some(exists),
            get: Some(get),
            put: Some(put),
            remove: Some(remove),
            user: Box::into_raw(Box::<Box<dyn BlockStore>>::new(Box::new(store))).cast(),
            release: Some(release),
            ..ffi::ta_block_store::new()
        };
        // SAFETY: the handle is alive; the library releases the box, also when the call fails.
        call(|err| unsafe { ffi::ta_namespace_attach_store(self.pool.raw(), self.id, &set, &raw, err) })
    }

    /// Lets go of the store. Waits for a function that runs, for as long as its time lasts.
    pub fn detach_store(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_detach_store(self.pool.raw(), self.id, err) })
    }

    /// Brings the blocks of the first keys that are not published from the store, up to the first that it lacks.
    /// [`Namespace::match_prefix`] finds them when the move is done.
    pub fn load(&self, keys: &[Key]) -> Result<Move> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, the list has so many keys.
        call(|err| unsafe {
            let n = keys.len() as u64;
            ffi::ta_namespace_load(self.pool.raw(), self.id, keys.as_ptr().cast(), n, &mut ticket, err)
        })?;
        Ok(Move::of(&self.pool, ticket))
    }

    /// Puts what the store lacks of all that is published now, and waits for that, up to `timeout`; `None`: as long as the store
    /// takes. Returns how many blocks are not known to be in the store then.
    pub fn flush_store(&self, timeout: Option<Duration>) -> Result<u64> {
        let mut missing = 0;
        let ns = nanoseconds(timeout);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_flush_store(self.pool.raw(), self.id, ns, &mut missing, err) })?;
        Ok(missing)
    }

    /// The store's figures now.
    pub fn store_stats(&self) -> Result<StoreStats> {
        let mut s = ffi::ta_store_stats::new();
        // SAFETY: the handle is alive, `s` writable.
        call(|err| unsafe { ffi::ta_namespace_get_store_stats(self.pool.raw(), self.id, &mut s, err) })?;
        let failed = (s.failed_unix_ms > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_millis(s.failed_unix_ms as u64));
        Ok(StoreStats {
            pausing: s.pausing != 0,
            puts: s.puts,
            puts_present: s.puts_present,
            put_failures: s.put_failures,
            hits: s.hits,
            misses: s.misses,
            refused: s.refused,
            bytes_put: s.bytes_put,
            bytes_got: s.bytes_got,
            calls: s.calls,
            calls_failed: s.calls_failed,
            timeouts: s.timeouts,
            waiting: s.waiting,
            failed,
            failure: text(&s.failure),
        })
    }
}
