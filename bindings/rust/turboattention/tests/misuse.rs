//! Wrong order, panics, threads, signals.
#![deny(unsafe_op_in_unsafe_fn)]
mod common;
use common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::os::raw::{c_int, c_long};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use turboattention::*;

#[test]
fn any_order() {
    let data = data();
    let mut out = vec![0.0; 10 * Q_HEADS * DIM];
    let context = context();
    let pool = Pool::new(&context, options()).unwrap();
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    drop(context);
    drop(pool);
    step(&mut plan, &mut seq, 10, &data, &mut out).unwrap();
    let pool = seq.pool().clone();
    drop(plan);
    assert_eq!(seq.len().unwrap(), 10);

    let mut plan = Plan::new(&pool).unwrap();
    let mut open = plan.begin([(&mut seq, 1)]).unwrap();
    pool.close().unwrap();
    let k = Tensor::new(&data.k, [1, KV_HEADS, DIM]).unwrap();
    assert_eq!(kind(open.append(0, k, k)), ErrorKind::Closed);
    drop(open);
    assert_eq!(kind(plan.begin([(&mut seq, 1)]).map(drop)), ErrorKind::Closed);
    assert_eq!(kind(seq.len()), ErrorKind::Closed);
    assert_eq!(kind(pool.close()), ErrorKind::Closed);
}

/// Panics when it is told to, and says when it is dropped.
struct Fragile {
    broken: Arc<AtomicBool>,
    alive: Arc<AtomicU32>,
}

impl Drop for Fragile {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
        panic!("drop");
    }
}

// SAFETY: the system's memory.
unsafe impl HostAllocator for Fragile {
    fn allocate(&self, layout: Layout) -> *mut u8 {
        assert!(!self.broken.load(Ordering::Relaxed), "allocate");
        unsafe { System.alloc(layout) }
    }
    unsafe fn deallocate(&self, data: *mut u8, layout: Layout) {
        unsafe { System.dealloc(data, layout) };
        assert!(!self.broken.load(Ordering::Relaxed), "deallocate");
    }
}

#[test]
fn panics_in_callbacks() {
    let (broken, alive) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(1)));
    let (sender, messages) = mpsc::channel();
    let sender = Mutex::new(sender);
    let log = Log::new(LogLevel::Debug, move |level, message| {
        let _ = sender.lock().map(|sender| sender.send((level, message.to_owned())));
        panic!("log");
    });
    let allocator = Box::new(Fragile { broken: broken.clone(), alive: alive.clone() });
    let options = ContextOptions { threads: 1, allocator: Some(allocator), log: Some(log), ..Default::default() };
    let pool = Pool::new(&Context::new(options).unwrap(), common::options()).unwrap();
    let (mut plan, mut seq, data) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap(), data());
    let mut out = vec![0.0; Q_HEADS * DIM];
    broken.store(true, Ordering::Relaxed);
    assert_eq!(kind(step(&mut plan, &mut seq, 1, &data, &mut out)), ErrorKind::Memory);
    broken.store(false, Ordering::Relaxed);
    step(&mut plan, &mut seq, 1, &data, &mut out).unwrap();
    assert!(!messages.recv().unwrap().1.is_empty());
    broken.store(true, Ordering::Relaxed); // memory goes back all the same
    drop((plan, seq, pool));
    assert_eq!(alive.load(Ordering::Relaxed), 0);

    // also of a context that cannot be created
    alive.store(1, Ordering::Relaxed);
    let allocator = Box::new(Fragile { broken, alive: alive.clone() });
    assert!(Context::new(ContextOptions { threads: -1, allocator: Some(allocator), ..Default::default() }).is_err());
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn threads() {
    fn send<T: Send>() {}
    fn sync<T: Send + Sync>() {}
    sync::<Context>();
    sync::<Pool>();
    sync::<Sequence>();
    sync::<Namespace>();
    sync::<Group>();
    sync::<Error>();
    send::<Plan>();
    send::<Step<'_>>();
    send::<Calibrator>();
    send::<Move>();
    send::<Receive>();
    not_sync::<Plan, _>();
    not_sync::<Step<'_>, _>();
    not_sync::<Calibrator, _>();
}

/// Two impls, so that nobody can say which, of a type that is Sync.
trait NotSync<A> {}
struct Sync_;
impl<T> NotSync<()> for T {}
impl<T: Sync> NotSync<Sync_> for T {}
fn not_sync<T: NotSync<A>, A>() {}

/// Many threads work on one pool, until another one closes it.
#[test]
fn races() {
    let (pool, made) = (tiered(), Arc::new(AtomicU32::new(0)));
    let space = Namespace::new(&pool, [1; 32], 0).unwrap();
    let work = |key: Key, pool: Pool, space: Namespace, made: Arc<AtomicU32>| -> Result<()> {
        let (mut plan, data, mut out) = (Plan::new(&pool)?, data(), vec![0.0; 70 * Q_HEADS * DIM]);
        loop {
            let (mut seq, _) = space.match_prefix(&[key])?;
            step(&mut plan, &mut seq, 70, &data, &mut out)?;
            let fork = seq.fork()?;
            let move_ = seq.move_to(Tier::Host, 0..1)?;
            let _ = seq.publish(&space, &[key]);
            std::thread::spawn(move || drop(fork));
            match block_on(move_) {
                Err(error) if error.kind == ErrorKind::Closed => return Err(error),
                _ => {}
            }
            pool.stats()?;
            made.fetch_add(1, Ordering::Relaxed);
        }
    };
    let threads: Vec<_> = (0..4)
        .map(|i| {
            let (pool, space, made) = (pool.clone(), space.clone(), made.clone());
            std::thread::spawn(move || kind(work([i; 32], pool, space, made)))
        })
        .collect();
    while made.load(Ordering::Relaxed) < 40 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    pool.close().unwrap();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), ErrorKind::Closed);
    }
}

extern "C" {
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn siginterrupt(number: c_int, flag: c_int) -> c_int;
    fn setitimer(which: c_int, new: *const [c_long; 4], old: *mut [c_long; 4]) -> c_int;
}
static SIGNALS: AtomicU32 = AtomicU32::new(0);
extern "C" fn count(_: c_int) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

/// Signals interrupt system calls of the library (EINTR); what it does is the same.
#[test]
fn signals() {
    const SIGALRM: c_int = 14;
    let folder = Folder::new();
    let tiers = TierOptions { disk_bytes: 64 << 20, disk_folder: Some(folder.0.clone()), ..Default::default() };
    let pool = Pool::new(&context(), PoolOptions { tiers: Some(tiers), ..options() }).unwrap();
    let mut a = filled(&pool, 500);
    let want = attend(&mut a);
    unsafe {
        signal(SIGALRM, count);
        siginterrupt(SIGALRM, 1);
        setitimer(0, &[0, 100, 0, 100], std::ptr::null_mut());
    }
    for i in 0..10 {
        let path = folder.0.join(i.to_string());
        a.save(&path).unwrap();
        assert_eq!(attend(&mut Sequence::load(&pool, &path).unwrap()), want);
        block_on(a.move_to(Tier::Disk, 1..7).unwrap()).unwrap();
        assert_eq!(attend(&mut a), want);
    }
    unsafe { setitimer(0, &[0; 4], std::ptr::null_mut()) };
    assert!(SIGNALS.load(Ordering::Relaxed) > 10);
}
