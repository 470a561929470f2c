//! Sequences, prefixes, files, tiers.
mod common;
use common::*;
use std::ops::ControlFlow;
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
