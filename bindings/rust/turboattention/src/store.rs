use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::slice;
use std::time::{Duration, SystemTime};

use crate::error::call;
use crate::moves::nanoseconds;
use crate::{ffi, text, Key, Move, Namespace, Result, StoreResult, Switch};

/// A key of a store and its value.
#[derive(Debug)]
pub struct StoreItem<'a> {
    raw: &'a mut ffi::ta_store_item,
    method: Method,
    /// Of `get`: bytes at `data`. `raw.bytes` is the size of the value that was given.
    room: usize,
}

/// Of [`BlockStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Exists,
    Get,
    Put,
    Remove,
}

impl<'a> StoreItem<'a> {
    fn new(raw: &'a mut ffi::ta_store_item, method: Method) -> Self {
        let mut room = 0;
        if method == Method::Get {
            room = raw.bytes as usize;
            raw.bytes = 0; // no value yet
        }
        StoreItem { raw, method, room }
    }

    /// Looks random; tells nothing of tokens, salt and shape.
    pub fn key(&self) -> &Key {
        // SAFETY: the library lends 32 bytes for the call.
        unsafe { &*self.raw.key.cast() }
    }

    /// Of `put`: the value. Empty in other methods.
    pub fn value(&self) -> &[u8] {
        match self.method == Method::Put && !self.raw.data.is_null() {
            // SAFETY: the library lends so many bytes for the call, which have a value, and nobody writes to them.
            true => unsafe { slice::from_raw_parts(self.raw.data.cast(), self.raw.bytes as usize) },
            false => &[],
        }
    }

    /// For `get`: this is the value. It is refused if it is larger than any block's value. In other methods this does nothing.
    pub fn give(&mut self, value: &[u8]) {
        if self.method != Method::Get {
            return;
        }
        if value.len() <= self.room && !self.raw.data.is_null() {
            // SAFETY: the library lends so many bytes for the call, which are nobody else's.
            unsafe { self.raw.data.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len()) };
        }
        self.raw.bytes = value.len() as u64;
        self.set(StoreResult::Done);
    }

    /// What became of it: `Absent` at first.
    pub fn set(&mut self, result: StoreResult) {
        self.raw.result = result as i32;
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

fn run(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64, method: Method) -> i32 {
    // SAFETY: `user` is the box that attach_store gave away; the library lends the items for the call.
    let (store, items) = unsafe { (&*user.cast::<Box<dyn BlockStore>>(), slice::from_raw_parts_mut(items, n as usize)) };
    let left = Duration::from_nanos(left.max(0) as u64);
    let function: Function = match method {
        Method::Exists => |store, items, left| store.exists(items, left),
        Method::Get => |store, items, left| store.get(items, left),
        Method::Put => |store, items, left| store.put(items, left),
        Method::Remove => |store, items, left| store.remove(items, left),
    };
    match catch_unwind(AssertUnwindSafe(|| {
        let mut items: Vec<_> = items.iter_mut().map(|raw| StoreItem::new(raw, method)).collect();
        function(store.as_ref(), &mut items, left)
    })) {
        Ok(true) => 0,
        _ => -1,
    }
}

unsafe extern "C" fn exists(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, Method::Exists)
}

unsafe extern "C" fn get(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, Method::Get)
}

unsafe extern "C" fn put(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, Method::Put)
}

unsafe extern "C" fn remove(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, left: i64) -> i32 {
    run(user, items, n, left, Method::Remove)
}

unsafe extern "C" fn release(user: *mut c_void) {
    // SAFETY: called once, after the last of the other functions has returned.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(unsafe { Box::from_raw(user.cast::<Box<dyn BlockStore>>()) })));
}

impl Namespace {
    /// Attaches a store: from now on published blocks are put to it, too, and [`Namespace::load`] brings blocks from it.
    ///
    /// # Errors
    /// `Invalid` (an option outside its range), `Stale`, `State` (the namespace has a store), `Limit` (threads).
    pub fn attach_store(&self, store: impl BlockStore + 'static, options: &StoreOptions) -> Result<()> {
        let set = ffi::ta_block_store {
            exists: Some(exists),
            get: Some(get),
            put: Some(put),
            remove: Some(remove),
            user: Box::into_raw(Box::<Box<dyn BlockStore>>::new(Box::new(store))).cast(),
            release: Some(release),
            ..ffi::ta_block_store::new()
        };
        // SAFETY: the functions take what the trait promises; the library releases the box, also when the call fails.
        unsafe { self.attach_raw_store(&set, options) }
    }

    /// Likewise with a C store, for example one that `ta_valkey_store_open` of turboattention_valkey.h has filled in. The set
    /// is copied. The library calls its `release` once it does not need the set any more, also if this call fails.
    ///
    /// # Safety
    /// The functions of the set must keep the rules of `ta_block_store`, and must be callable with its `user` from other
    /// threads until it is released.
    ///
    /// # Errors
    /// As [`Namespace::attach_store`]; `Invalid` (a function is missing), `Struct`.
    pub unsafe fn attach_raw_store(&self, set: &ffi::ta_block_store, options: &StoreOptions) -> Result<()> {
        let raw = ffi::ta_store_options {
            timeout_ms: options.timeout_ms,
            write_through: options.write_through as i32,
            authenticate: options.authenticate as i32,
            batch_bytes: options.batch_bytes,
            ..ffi::ta_store_options::new()
        };
        // SAFETY: the handle is alive, both structs live for the call; the set is as the caller says.
        call(|err| unsafe { ffi::ta_namespace_attach_store(self.pool.raw(), self.id, set, &raw, err) })
    }

    /// Detaches the store. Waits for a running function, at most until the function's time is over.
    ///
    /// # Errors
    /// `Stale`, `State` (there is no store).
    pub fn detach_store(&self) -> Result<()> {
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_detach_store(self.pool.raw(), self.id, err) })
    }

    /// Brings blocks from the store: of the first keys, those that are not published, up to the first that the store lacks.
    /// [`Namespace::match_prefix`] finds them when the move is done.
    ///
    /// # Errors
    /// `Stale`, `State` (there is no store), `Limit` (4096 loads wait).
    pub fn load(&self, keys: &[Key]) -> Result<Move> {
        let mut ticket = 0;
        // SAFETY: the handle is alive, the list has so many keys.
        call(|err| unsafe {
            let n = keys.len() as u64;
            ffi::ta_namespace_load(self.pool.raw(), self.id, keys.as_ptr().cast(), n, &mut ticket, err)
        })?;
        Ok(Move::of(&self.pool, ticket))
    }

    /// Puts the published blocks that the store lacks, and waits for that, up to `timeout`; `None`: as long as the store takes.
    /// Returns how many blocks are not known to be in the store then.
    ///
    /// # Errors
    /// `Stale`, `State` (there is no store, or it is only read), `Cancelled` (it was detached meanwhile).
    pub fn flush_store(&self, timeout: Option<Duration>) -> Result<u64> {
        let mut missing = 0;
        let ns = nanoseconds(timeout);
        // SAFETY: the handle is alive.
        call(|err| unsafe { ffi::ta_namespace_flush_store(self.pool.raw(), self.id, ns, &mut missing, err) })?;
        Ok(missing)
    }

    /// The store's figures now.
    ///
    /// # Errors
    /// `Stale`, `State` (there is no store).
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    /// Does the same to the one item of a batch, whatever the method.
    struct Same<F>(F);

    impl<F: Fn(&mut StoreItem) + Send + Sync> BlockStore for Same<F> {
        fn exists(&self, items: &mut [StoreItem], _: Duration) -> bool {
            self.0(&mut items[0]);
            true
        }
        fn get(&self, items: &mut [StoreItem], left: Duration) -> bool {
            self.exists(items, left)
        }
        fn put(&self, items: &mut [StoreItem], left: Duration) -> bool {
            self.exists(items, left)
        }
        fn remove(&self, items: &mut [StoreItem], left: Duration) -> bool {
            self.exists(items, left)
        }
    }

    /// Calls a method with 4 of the 8 bytes of `memory`, or with none. Returns what the library sees then.
    fn call_with(
        method: Method,
        memory: Option<&mut [u8; 8]>,
        f: impl Fn(&mut StoreItem) + Send + Sync + 'static,
    ) -> (u64, i32) {
        let key = [7; 32];
        let (data, bytes) = memory.map_or((ptr::null_mut(), 0), |memory| (memory.as_mut_ptr().cast(), 4));
        let mut item = ffi::ta_store_item { key: key.as_ptr(), data, bytes, result: ffi::TA_STORE_ABSENT, reserved: 0 };
        let mut store: Box<dyn BlockStore> = Box::new(Same(f));
        assert_eq!(run(ptr::addr_of_mut!(store).cast(), &mut item, 1, 1, method), 0);
        (item.bytes, item.result)
    }

    #[test]
    fn a_value_stays_in_its_room() {
        let mut memory = [1; 8];
        let given = call_with(Method::Get, Some(&mut memory), |item| {
            assert_eq!((item.key(), item.value()), (&[7; 32], &[][..])); // what is in the room is no value
            item.give(&[2; 8]);
            item.give(&[3; 8]); // is not let in by the larger one before
            item.give(&[4; 6]);
            assert_eq!(item.value(), []);
        });
        assert_eq!((given, memory), ((6, ffi::TA_STORE_DONE), [1; 8]));
        let given = call_with(Method::Get, Some(&mut memory), |item| {
            item.give(&[2; 8]);
            item.give(&[5; 3]);
        });
        assert_eq!((given, memory), ((3, ffi::TA_STORE_DONE), [5, 5, 5, 1, 1, 1, 1, 1]));
        let nothing = call_with(Method::Get, Some(&mut memory), |item| item.set(StoreResult::Done));
        assert_eq!(nothing, (0, ffi::TA_STORE_DONE)); // which the library refuses
    }

    #[test]
    fn only_get_writes() {
        let mut memory = [1; 8];
        let put = call_with(Method::Put, Some(&mut memory), |item| {
            assert_eq!(item.value(), [1; 4]);
            item.give(&[2; 3]);
        });
        assert_eq!((put, memory), ((4, ffi::TA_STORE_ABSENT), [1; 8]));
        for method in [Method::Exists, Method::Remove] {
            assert_eq!(call_with(method, None, |item| item.give(&[])), (0, ffi::TA_STORE_ABSENT));
        }
    }
}
