//! Sequences, prefixes, files, tiers.
#![deny(unsafe_op_in_unsafe_fn)]
mod common;
use common::*;
use std::collections::HashMap;
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::os::raw::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use turboattention::*;

fn keys(n: u8, of: u8) -> Vec<Key> {
    (0..n)
        .map(|i| {
            let mut key = Key::default();
            key[..3].copy_from_slice(&[of, i, 1]);
            key
        })
        .collect()
}

#[test]
fn sequences() {
    let pool = pool();
    let a = filled(&pool, 200);
    let mut b = a.fork().unwrap();
    b.truncate(130).unwrap();
    b.verify().unwrap();
    b.set_priority(3).unwrap();
    assert_eq!(kind(b.truncate(131)), ErrorKind::Invalid);
    assert_eq!((a.len().unwrap(), b.len().unwrap()), (200, 130));
    let stats = pool.stats().unwrap();
    assert_eq!((stats.sequences, stats.tokens, stats.shared_blocks), (2, 330, 3));
    let id = a.into_raw();
    assert_eq!(pool.stats().unwrap().sequences, 2);
    drop(Sequence::from_raw(&pool, id));
    assert_eq!(pool.stats().unwrap().sequences, 1);
    assert_eq!(kind(Sequence::from_raw(&pool, id).len()), ErrorKind::Stale);
}

#[test]
fn admission_and_suspend() {
    let pool = tiered();
    let (a, mut b) = (Sequence::new(&pool).unwrap(), filled(&pool, 100));
    let budget = pool.stats().unwrap().bytes_budget;
    a.reserve(100, 0).unwrap();
    let stats = pool.stats().unwrap();
    assert!(stats.bytes_promised > 0 && stats.bytes_reclaimable > 0);
    assert_eq!(stats.bytes_free + stats.bytes_promised + stats.bytes_used, budget);
    let error = a.reserve(1 << 30, -1).unwrap_err();
    assert_eq!(error.kind, ErrorKind::TierFull);
    assert!(error.place().bytes.is_some());
    assert_eq!(kind(a.reserve(usize::MAX, -1)), ErrorKind::Limit);
    assert_eq!(kind(a.reserve(1, -2)), ErrorKind::Invalid);
    assert_eq!(pool.stats().unwrap().bytes_promised, stats.bytes_promised);

    let fit = pool.fit([(Some(&a), 100), (Some(&b), 1), (None, 70)]).unwrap();
    assert!(fit.now && fit.after_eviction && fit.first_lacking.is_none() && fit.bytes_new > 0, "{:?}", fit);
    let lacks = pool.fit([(Some(&a), 1), (None, 1 << 30)]).unwrap();
    assert!(!lacks.after_eviction && lacks.first_lacking == Some(1) && lacks.bytes_lacking > 0, "{:?}", lacks);
    assert_eq!(kind(pool.fit([(Some(&a), 1), (Some(&a), 1)])), ErrorKind::Invalid);
    assert_eq!(kind(pool.fit([(Some(&filled(&common::pool(), 1)), 1)])), ErrorKind::Invalid);
    a.reserve(0, 0).unwrap();
    assert_eq!(pool.stats().unwrap().bytes_promised, 0);

    let want = attend(&mut b);
    assert_eq!(kind(pool.take_finished_moves(9)), ErrorKind::State);
    assert!(pool.descriptor().unwrap() >= 0);
    let suspended = b.suspend(Tier::Host).unwrap();
    assert_eq!(suspended.wait().unwrap().moved, 2);
    let mut finished = vec![];
    while finished.is_empty() {
        finished = pool.take_finished_moves(9).unwrap();
    }
    assert_eq!(finished, [suspended.ticket()]);
    assert_eq!(b.residency().unwrap().device_bytes, 0);
    assert_eq!(attend(&mut b), want);
    assert_eq!(kind(b.suspend(Tier::Device)), ErrorKind::Invalid);
    assert_eq!(kind(b.suspend(Tier::Disk)), ErrorKind::Unsupported);
}

#[test]
fn namespaces() {
    let pool = pool();
    let space = Namespace::new(&pool, [1; 32], 0).unwrap();
    assert_eq!(kind(Namespace::new(&pool, [1; 32], 0)), ErrorKind::Invalid);
    let a = filled(&pool, 200);
    assert_eq!(kind(a.publish(&space, &keys(4, 1))), ErrorKind::Invalid);
    a.publish(&space, &keys(3, 1)).unwrap();
    drop(a);
    let (b, length) = space.match_prefix(&[keys(2, 1), keys(1, 9)].concat()).unwrap();
    assert_eq!((length, b.len().unwrap()), (128, 128));
    let (events, hashed) = (space.take_events(10).unwrap(), space.hash_keys(&keys(3, 1)).unwrap());
    assert_eq!((events.len(), events[0].kind), (4, PrefixEventKind::Reset));
    for event in &events[1..] {
        assert_eq!((event.kind, event.key), (PrefixEventKind::Published, hashed[event.index as usize]));
    }
    let stats = space.stats().unwrap();
    assert_eq!((stats.entries, stats.hits, stats.misses, stats.published), (3, 2, 1, 3));
    assert_eq!(kind(space.flush()), ErrorKind::Unsupported);
    let clone = space.clone();
    space.destroy().unwrap();
    assert_eq!(kind(clone.stats()), ErrorKind::Stale);
    let other = Namespace::new(&common::pool(), [1; 32], 0).unwrap();
    assert_eq!(kind(b.publish(&other, &keys(1, 1))), ErrorKind::Invalid);
}

#[test]
fn all_that_waits() {
    let pool = tiered();
    pool.descriptor().unwrap();
    let (a, b, space) = (filled(&pool, 64), filled(&pool, 200), Namespace::new(&pool, [1; 32], 0).unwrap());
    const N: u64 = 1500;
    for i in 0..N {
        let mut key = Key::default();
        key[..8].copy_from_slice(&i.to_le_bytes());
        a.publish(&space, &[key]).unwrap();
    }
    let numbers = |most| space.take_events(most).unwrap().iter().map(|e| e.number).collect::<Vec<_>>();
    assert_eq!(numbers(0), []);
    assert_eq!(numbers(1100), (1..=1100).collect::<Vec<_>>());
    assert_eq!(numbers(usize::MAX), (1101..=N + 1).collect::<Vec<_>>());
    assert_eq!(numbers(1 << 58), []);

    let mut want = vec![];
    for _ in 0..N / 2 {
        for tier in [Tier::Host, Tier::Device] {
            let moved = b.move_to(tier, 1..2).unwrap();
            moved.wait().unwrap();
            want.push(moved.ticket());
        }
    }
    let mut got = pool.take_finished_moves(1100).unwrap();
    while got.len() < want.len() {
        got.append(&mut pool.take_finished_moves(usize::MAX).unwrap());
    }
    assert_eq!(got, want);
    assert_eq!(pool.take_finished_moves(1 << 58).unwrap(), []);
    space.clone().destroy().unwrap();
    assert_eq!(kind(space.take_events(usize::MAX)), ErrorKind::Stale);
}

struct Table(Arc<Mutex<HashMap<Key, Vec<u8>>>>);

impl BlockStore for Table {
    fn exists(&self, items: &mut [StoreItem], left: Duration) -> bool {
        assert!(left <= Duration::from_secs(2));
        let values = self.0.lock().unwrap();
        items
            .iter_mut()
            .for_each(|i| i.set(if values.contains_key(i.key()) { StoreResult::Done } else { StoreResult::Absent }));
        true
    }
    fn get(&self, items: &mut [StoreItem], _: Duration) -> bool {
        let values = self.0.lock().unwrap();
        for item in items {
            if let Some(value) = values.get(item.key()) {
                item.give(value);
            }
        }
        true
    }
    fn put(&self, items: &mut [StoreItem], _: Duration) -> bool {
        for item in items {
            self.0.lock().unwrap().insert(*item.key(), item.value().to_vec());
            item.set(StoreResult::Done);
        }
        true
    }
    fn remove(&self, _: &mut [StoreItem], _: Duration) -> bool {
        panic!("oops")
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        panic!("drop")
    }
}

#[test]
fn stores() {
    let values = Arc::new(Mutex::new(HashMap::new()));
    let (first, second) = (pool(), common::pool());
    let space = Namespace::new(&first, [1; 32], 0).unwrap();
    assert_eq!(kind(space.load(&keys(1, 1))), ErrorKind::State);
    space.attach_store(Table(values.clone()), &StoreOptions::default()).unwrap();
    assert_eq!(kind(space.attach_store(Table(values.clone()), &StoreOptions::default())), ErrorKind::State);
    assert_eq!(Arc::strong_count(&values), 2); // the second one was released
    filled(&first, 200).publish(&space, &keys(3, 1)).unwrap();
    assert_eq!(space.flush_store(None).unwrap(), 0);
    assert_eq!((values.lock().unwrap().len(), space.store_stats().unwrap().puts), (3, 3));
    space.detach_store().unwrap();
    assert_eq!(Arc::strong_count(&values), 1);
    let space = Namespace::new(&second, [1; 32], 0).unwrap();
    let options = StoreOptions { write_through: Switch::Off, ..StoreOptions::default() };
    space.attach_store(Table(values.clone()), &options).unwrap();
    let moved = space.load(&keys(4, 1)).unwrap().wait().unwrap();
    assert_eq!((moved.moved, moved.skipped), (3, 1));
    assert_eq!(space.match_prefix(&keys(4, 1)).unwrap().1, 192);
    // What is damaged is refused; that the store cannot remove it changes nothing.
    let third = common::pool();
    let space = Namespace::new(&third, [1; 32], 0).unwrap();
    values.lock().unwrap().values_mut().for_each(|value| value[200] ^= 1);
    space.attach_store(Table(values), &options).unwrap();
    assert_eq!(space.load(&keys(3, 1)).unwrap().wait().unwrap().moved, 0);
    let stats = space.store_stats().unwrap();
    assert_eq!((stats.refused, stats.calls_failed), (1, 1));
    assert!(stats.failed.is_some() && !stats.failure.is_empty());
}

/// A store as C has it: `user` is a `RawTable`.
#[derive(Default)]
struct RawTable {
    values: Mutex<HashMap<Key, Vec<u8>>>,
    released: AtomicU32,
}

/// Calls `f` with the key of each item and the item, whose result is `Done` where that says so.
unsafe fn each(items: *mut ffi::ta_store_item, n: u64, f: impl Fn(Key, &mut ffi::ta_store_item) -> bool) -> i32 {
    for item in unsafe { std::slice::from_raw_parts_mut(items, n as usize) } {
        let key = unsafe { *item.key.cast::<Key>() };
        item.result = if f(key, item) { ffi::TA_STORE_DONE } else { ffi::TA_STORE_ABSENT };
    }
    0
}

unsafe extern "C" fn exists(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, _: i64) -> i32 {
    let values = unsafe { (*user.cast::<RawTable>()).values.lock().unwrap() };
    unsafe { each(items, n, |key, _| values.contains_key(&key)) }
}

unsafe extern "C" fn get(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, _: i64) -> i32 {
    let values = unsafe { (*user.cast::<RawTable>()).values.lock().unwrap() };
    let copy = |value: &Vec<u8>, item: &mut ffi::ta_store_item| {
        assert!(value.len() as u64 <= item.bytes);
        unsafe { item.data.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), value.len()) };
        item.bytes = value.len() as u64;
    };
    unsafe { each(items, n, |key, item| values.get(&key).map(|value| copy(value, item)).is_some()) }
}

unsafe extern "C" fn put(user: *mut c_void, items: *mut ffi::ta_store_item, n: u64, _: i64) -> i32 {
    let table = unsafe { &*user.cast::<RawTable>() };
    let bytes = |item: &ffi::ta_store_item| unsafe { std::slice::from_raw_parts(item.data.cast(), item.bytes as usize) };
    unsafe { each(items, n, |key, item| table.values.lock().unwrap().insert(key, bytes(item).to_vec()).is_none()) }
}

unsafe extern "C" fn release(user: *mut c_void) {
    unsafe { (*user.cast::<RawTable>()).released.fetch_add(1, Ordering::Relaxed) };
}

#[test]
fn raw_stores() {
    let table = RawTable::default();
    let set = ffi::ta_block_store {
        exists: Some(exists),
        get: Some(get),
        put: Some(put),
        remove: Some(exists),
        user: (&table as *const RawTable as *mut RawTable).cast(),
        release: Some(release),
        ..ffi::ta_block_store::new()
    };
    let attach = |space: &Namespace| unsafe { space.attach_raw_store(&set, &StoreOptions::default()) };
    let first = pool();
    let space = Namespace::new(&first, [1; 32], 0).unwrap();
    attach(&space).unwrap();
    assert_eq!(kind(attach(&space)), ErrorKind::State); // and is released
    filled(&first, 200).publish(&space, &keys(3, 1)).unwrap();
    assert_eq!(space.flush_store(None).unwrap(), 0);
    space.detach_store().unwrap();
    let other = Namespace::new(&pool(), [1; 32], 0).unwrap();
    attach(&other).unwrap();
    assert_eq!(other.load(&keys(4, 1)).unwrap().wait().unwrap().moved, 3);
    drop(other); // with its pool
    assert_eq!(table.released.load(Ordering::Relaxed), 3);
}

#[test]
fn files() {
    let (pool, folder) = (pool(), Folder::new());
    let path = |name: &str| folder.0.join(name);
    let mut a = filled(&pool, 200);
    let want = attend(&mut a);
    let mut calls = 0;
    let count = |_, _| {
        calls += 1;
        ControlFlow::Continue(())
    };
    a.save_with(path("a"), count).unwrap();
    assert!(calls > 0);
    assert_eq!(kind(a.save(path("a"))), ErrorKind::Invalid); // exists
    assert_eq!(attend(&mut Sequence::load(&pool, path("a")).unwrap()), want);
    assert_eq!(kind(a.save_with(path("b"), |_, _| ControlFlow::Break(()))), ErrorKind::Cancelled);
    let panic = std::panic::catch_unwind(|| a.save_with(path("b"), |_, _| panic!("oops")));
    assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "oops");
    assert!(!path("b").exists());
    assert_eq!(kind(a.save("a\0b")), ErrorKind::Invalid);
    assert_eq!(kind(Sequence::load(&pool, path("c"))), ErrorKind::Io);

    pool.save(path("all"), true).unwrap();
    let other = common::pool();
    let mut loaded = other.load_with(path("all"), |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!((loaded.len(), loaded[0].0), (1, a.id()));
    assert_eq!(attend(&mut loaded[0].1), want);
    common::pool().save(path("none"), false).unwrap();
    assert!(other.load(path("none")).unwrap().is_empty());

    let mut bytes = std::fs::read(path("a")).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path("bad"), bytes).unwrap();
    assert_eq!(kind(Sequence::load(&pool, path("bad"))), ErrorKind::Corrupt);
}

/// Takes `room` bytes, then fails, or panics where `panics`.
struct Narrow {
    room: usize,
    panics: bool,
}

impl Write for Narrow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() <= self.room {
            self.room -= bytes.len();
            return Ok(bytes.len());
        }
        assert!(!self.panics, "oops");
        Err(io::Error::new(io::ErrorKind::Other, "full"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Narrow {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Ok(0)
    }
}

#[test]
fn exports() {
    let (pool, folder) = (pool(), Folder::new());
    let mut a = filled(&pool, 200);
    let want = attend(&mut a);
    let mut bytes = a.export().unwrap();
    a.save(folder.0.join("a")).unwrap();
    assert!(bytes == std::fs::read(folder.0.join("a")).unwrap());
    assert_eq!(attend(&mut Sequence::import(&pool, &bytes).unwrap()), want);
    let empty = Sequence::new(&pool).unwrap().export().unwrap();
    assert_eq!(Sequence::import(&common::pool(), &empty).unwrap().len().unwrap(), 0);

    let mut to = io::Cursor::new(b"before".to_vec());
    to.set_position(6);
    let n = a.export_to(&mut to).unwrap();
    to.write_all(b"after").unwrap();
    let to = to.into_inner();
    assert_eq!((n as usize, &to[..6], &to[6 + bytes.len()..]), (bytes.len(), &b"before"[..], &b"after"[..]));
    assert!(to[6..6 + bytes.len()] == bytes);

    for room in [0, bytes.len() / 2, bytes.len() - 1] {
        let error = a.export_to(&mut Narrow { room, panics: false }).unwrap_err();
        assert_eq!((error.kind, &*error.message), (ErrorKind::Io, "full"));
        let panic = std::panic::catch_unwind(|| a.export_to(&mut Narrow { room, panics: true }));
        assert_eq!(*panic.unwrap_err().downcast::<&str>().unwrap(), "oops");
    }

    for cut in [0, 100, bytes.len() - 1] {
        assert_eq!(kind(Sequence::import(&pool, &bytes[..cut])), ErrorKind::Corrupt);
    }
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    assert_eq!(kind(Sequence::import(&pool, &bytes)), ErrorKind::Corrupt);
    assert_eq!(pool.stats().unwrap().sequences, 1);
}

#[test]
fn tiers() {
    let pool = tiered();
    let mut a = filled(&pool, 700);
    let want = attend(&mut a);
    let move_ = a.move_to(Tier::Host, 1..9).unwrap();
    let info = move_.wait().unwrap();
    assert_eq!((info.state, info.moved, info.error()), (MoveState::Done, 8, None));
    assert_eq!(move_.info().unwrap(), info);
    move_.cancel().unwrap(); // done already
    let r = a.residency().unwrap();
    assert_eq!((r.device_blocks, r.host_blocks), (3, 8));
    assert_eq!(attend(&mut a), want);
    let stats = pool.tier_stats(Tier::Host).unwrap();
    assert_eq!((stats.blocks, stats.state), (8, TierState::Ok));
    assert!(stats.hits > 0);
    assert_eq!(kind(pool.tier_stats(Tier::Disk)), ErrorKind::Unsupported);

    assert_eq!(block_on(a.prefetch(1..9).unwrap()).unwrap().moved, 8); // as a future
    a.pin(2..5).unwrap();
    assert_eq!(a.residency().unwrap().pinned_blocks, 3);
    assert_eq!(block_on(a.move_to(Tier::Host, 1..9).unwrap()).unwrap().skipped, 3);
    a.unpin(2..5).unwrap();
    assert_eq!(kind(a.unpin(2..5)), ErrorKind::State);
    #[allow(clippy::reversed_empty_ranges)]
    let reversed = 5..2;
    assert_eq!(kind(a.pin(reversed)), ErrorKind::Invalid);
    assert_eq!(kind(a.move_to(Tier::Host, 0..100)), ErrorKind::Invalid);
    let moves = pool.move_stats().unwrap();
    assert!(moves.bytes_asked > 0 && moves.bytes_prefetched > 0 && moves.host_steps > 0, "{:?}", moves);
    assert!(pool.metrics(MetricsFormat::OpenMetrics).unwrap().ends_with("# EOF\n"));
    assert!(pool.metrics(MetricsFormat::Json).unwrap().trim_end().ends_with('}'));
    let queued = a.move_to(Tier::Device, 0..11).unwrap();
    queued.wait_for(Some(Duration::ZERO)).unwrap();
    queued.wait_for(None).unwrap();
}

#[test]
fn forgotten_retained_described() {
    let pool = pool();
    let mut a = filled(&pool, 200);
    let want = attend(&mut a);
    assert_eq!(a.forget(60..160).unwrap(), 64); // block 1 is the only whole one
    assert_eq!(a.forget(0..192).unwrap(), 128); // blocks 0 and 2
    assert_ne!(attend(&mut a), want);
    let r = a.residency().unwrap();
    assert_eq!((r.dropped_blocks, r.device_blocks, a.len().unwrap()), (3, 1, 200));
    assert_eq!(kind(a.forget(0..201)), ErrorKind::Invalid);
    assert_eq!(kind(a.forget(0..usize::MAX)), ErrorKind::Invalid);
    assert_eq!(kind(a.export()), ErrorKind::State);
    #[allow(clippy::reversed_empty_ranges)]
    let (tokens, blocks) = (5..2, 5..2);
    assert_eq!(kind(a.forget(tokens)), ErrorKind::Invalid);
    assert_eq!(kind(a.describe_blocks(blocks)), ErrorKind::Invalid);

    let (b, mut plan, data) = (filled(&pool, 200), Plan::new(&pool).unwrap(), data());
    b.publish(&Namespace::new(&pool, [1; 32], 0).unwrap(), &keys(1, 1)).unwrap();
    b.pin(1..2).unwrap();
    b.retain(0..2, Some(Retention { priority: 50, duration_ms: 1 << 40 })).unwrap();
    b.retain(2..3, Some(Retention { priority: 3, ..Default::default() })).unwrap();
    assert_eq!(kind(b.retain(2..4, None)), ErrorKind::State); // not full
    assert_eq!(kind(b.retain(2..5, None)), ErrorKind::Invalid);
    for wrong in [Retention { priority: 64, duration_ms: 0 }, Retention { priority: 1, duration_ms: -1 }] {
        assert_eq!(kind(b.retain(0..1, Some(wrong))), ErrorKind::Invalid);
    }
    let list = b.describe_blocks(0..4).unwrap();
    assert_eq!(list.iter().map(|b| b.priority).collect::<Vec<_>>(), [50, 50, 3, 32]);
    assert!(list[0].retained_ms.unwrap() > 1 << 39 && list[2].retained_ms.is_none());
    assert_eq!(list.iter().map(|b| (b.owners, b.pins)).collect::<Vec<_>>(), [(2, 0), (1, 1), (1, 0), (1, 0)]);
    assert!(list[0].published && !list[1].published && !list[2].open && list[3].open);
    assert!(list.iter().all(|b| b.tier == Some(Tier::Device) && b.bytes > 0 && !b.dropped && !b.absent && !b.passed));
    b.retain(0..3, None).unwrap();
    assert!(b.describe_blocks(0..3).unwrap().iter().all(|b| b.priority == 32 && b.retained_ms.is_none()));
    let dropped = &a.describe_blocks(1..2).unwrap()[0];
    assert_eq!((dropped.tier, dropped.dropped, dropped.owners, dropped.bytes), (None, true, 0, 0));
    assert!(b.describe_blocks(4..4).unwrap().is_empty());
    assert!(b.locate_blocks(0..3).unwrap().iter().all(|at| !at.is_null()));
    assert!(a.locate_blocks(1..2).unwrap()[0].is_null());
    assert_eq!(kind(b.locate_blocks(0..5)), ErrorKind::Invalid);
    assert_eq!(kind(pool.memory(Tier::Device)), ErrorKind::Unsupported);
    assert_eq!(kind(b.describe_blocks(0..5)), ErrorKind::Invalid);
    assert_eq!(kind(b.describe_blocks(0..u64::MAX)), ErrorKind::Invalid);
    step(&mut plan, &mut a, 1, &data, &mut [0.0; Q_HEADS * DIM]).unwrap(); // goes on
}

#[test]
fn shifted() {
    let still = vec![0.0; LAYERS as usize * DIM / 2]; // turns nothing
    let rotary = Rotary { pairs: RotaryPairs::Adjacent, channels: DIM as u32, angles: still.clone() };
    let (context, with) = (context(), |rotary: Rotary| PoolOptions { rotary: Some(rotary), ..options() });
    let pool = Pool::new(&context, with(rotary.clone())).unwrap();
    let description = pool.describe().unwrap();
    assert_eq!(description.options.rotary.as_ref(), Some(&rotary));
    Pool::new(&context, description.options).unwrap();

    let (mut a, mut plan, data) = (filled(&pool, 200), Plan::new(&pool).unwrap(), data());
    let mut b = a.fork().unwrap();
    let mut ask = |seq: &mut Sequence, positions: &[i64]| -> Result<Vec<f32>> {
        let options = StepOptions { query_positions: Some(positions), ..Default::default() };
        let (q, mut out) = (Tensor::new(&data.q, [1, Q_HEADS, DIM])?, vec![0.0; Q_HEADS * DIM]);
        let mut step = plan.begin_with([Entry::new(seq, 0).queries(1)], &options)?;
        step.attend(0, q, TensorMut::new(&mut out, [1, Q_HEADS, DIM])?)?;
        step.end()?;
        Ok(out)
    };
    assert_eq!(ask(&mut a, &[199]), Ok(attend(&mut a)));
    ask(&mut a, &[100]).unwrap();
    a.shift(64..128).unwrap();
    assert_eq!((b.forget(64..128).unwrap(), a.len().unwrap()), (64, 200));
    let (shifted, forgotten) = (ask(&mut a, &[199]).unwrap(), ask(&mut b, &[199]).unwrap());
    assert!(shifted.iter().zip(&forgotten).all(|(a, b)| (a - b).abs() < 1e-5));
    assert_eq!(kind(ask(&mut a, &[100])), ErrorKind::State); // in the gap
    for wrong in [&[][..], &[198, 199], &[-1], &[200]] {
        assert_eq!(kind(ask(&mut a, wrong)), ErrorKind::Invalid);
    }
    #[allow(clippy::reversed_empty_ranges)]
    let backwards = 128..64;
    for wrong in [60..128, 64..192 + 64, 0..usize::MAX, backwards] {
        assert_eq!(kind(a.shift(wrong)), ErrorKind::Invalid);
    }

    let one = Rotary { channels: 4, angles: vec![0.5, 0.25], ..Default::default() }; // of all layers
    let description = Pool::new(&context, with(one.clone())).unwrap().describe().unwrap();
    assert_eq!(description.options.rotary, Some(one));
    let few = Rotary { angles: still[1..].to_vec(), ..rotary };
    assert_eq!(kind(Pool::new(&context, with(few))), ErrorKind::Shape);
    let odd = Rotary { channels: 3, angles: vec![0.5], ..Default::default() };
    assert_eq!(kind(Pool::new(&context, with(odd))), ErrorKind::Invalid);
    assert_eq!(common::pool().describe().unwrap().options.rotary, None);
    assert_eq!(kind(filled(&common::pool(), 64).shift(0..64)), ErrorKind::Unsupported);
}

#[test]
fn peer_tier() {
    let tiers = TierOptions { peer: Some(context()), peer_bytes: 32 << 20, ..Default::default() };
    let pool = Pool::new(&context(), PoolOptions { tiers: Some(tiers), ..options() }).unwrap();
    let a = filled(&pool, 700);
    assert_eq!(a.move_to(Tier::Peer, 1..9).unwrap().wait_for(None).unwrap().moved, 8);
    let r = a.residency().unwrap();
    assert_eq!((r.peer_blocks, r.device_blocks), (8, 3));
    let tiers = pool.describe().unwrap().options.tiers.unwrap();
    assert_eq!(tiers.peer_bytes, 32 << 20);
    assert!(tiers.peer.is_some());
    let alone = TierOptions { peer: None, ..tiers };
    let refused = Pool::new(&context(), PoolOptions { tiers: Some(alone), ..options() });
    assert_eq!(refused.err().unwrap().kind, ErrorKind::Invalid);
}

#[test]
fn descriptions() {
    let mut offset = vec![0.0; LAYERS as usize * KV_HEADS * DIM];
    offset[5] = 2.0;
    let tiers = TierOptions { host_bytes: 32 << 20, disk_bytes: 8 << 20, begin_wait_ms: 50, ..Default::default() };
    let numerics = Numerics { k_offset: Some(offset.clone()), ..Default::default() };
    let context = context();
    let pool = Pool::new(&context, PoolOptions { numerics, tiers: Some(tiers), ..options() }).unwrap();
    let d = pool.describe().unwrap();
    assert_eq!((d.options.layers, d.options.bits, d.device), (LAYERS, 4, DeviceKind::Cpu));
    assert_eq!(d.options.k_bits, Some(vec![4; LAYERS as usize * KV_HEADS]));
    assert_eq!((d.options.numerics.exp, d.options.numerics.hadamard), (Exp::Poly, Switch::On));
    assert_eq!(d.options.numerics.k_offset, Some(offset));
    let tiers = d.options.tiers.as_ref().unwrap();
    assert_eq!(tiers.begin_wait_ms, 50);
    assert!(tiers.disk_folder.as_ref().unwrap().is_absolute());
    let again = Pool::new(&context, d.options).unwrap();
    assert_eq!(again.describe().unwrap().fingerprint, d.fingerprint);
    assert!(again != pool && pool.clone() == pool);
}
