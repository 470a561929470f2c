mod common;
use common::*;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use turboattention::*;

/// Two ranks of a local group, each with a pool.
fn ranks() -> Vec<(Group, Pool)> {
    let id = GroupId::new(GroupKind::Local).unwrap();
    let join = |rank| {
        let pool = pool();
        let options = GroupOptions { operation_ms: 5000, ..GroupOptions::new(GroupKind::Local, id, rank, 2) };
        (Group::join(pool.context(), &options).unwrap(), pool)
    };
    let ranks = vec![join(0), join(1)];
    ranks.iter().for_each(|(group, _)| group.wait_ready().unwrap());
    ranks
}

#[test]
fn transfers() {
    let ranks = ranks();
    let ((source, pool), (destination, there)) = (&ranks[0], &ranks[1]);
    let mut a = filled(pool, 300);
    let want = attend(&mut a);
    let receive = destination.receive(there, 0, 7).unwrap();
    let send = source.send(&a, 1, 7, SendMode::Copy).unwrap();
    let (mut b, info) = receive.wait().unwrap();
    assert_eq!((info.length, info.blocks, info.peer, info.tag, info.error()), (300, 5, 0, 7, None));
    send.wait().unwrap();
    assert_eq!(attend(&mut b), want);
    assert!(source.descriptor().unwrap() >= 0);
    assert_eq!(source.take_finished(usize::MAX).unwrap(), [send.ticket()]);
    assert_eq!(source.take_finished(1 << 58).unwrap(), []);

    // futures; the receive waits before anything is sent
    let (done, result) = mpsc::channel();
    let receive = destination.receive(there, 0, 8).unwrap();
    let waiter = std::thread::spawn(move || done.send(block_on(receive)).unwrap());
    std::thread::sleep(Duration::from_millis(20));
    block_on(source.send(&a, 1, 8, SendMode::Move).unwrap()).unwrap();
    assert_eq!(result.recv().unwrap().unwrap().0.len().unwrap(), 300);
    waiter.join().unwrap();
    assert_eq!(kind(a.len()), ErrorKind::Stale);

    let info = destination.info().unwrap();
    assert_eq!((info.state, info.rank, info.ranks, info.kind), (GroupState::Ready, 1, 2, GroupKind::Local));
    assert_eq!(destination.peer(0).unwrap().route, PeerRoute::HostMemory);

    let lonely = destination.receive(there, 0, 9).unwrap();
    assert_eq!(lonely.wait_for(Some(Duration::from_millis(5))).unwrap().state, MoveState::Queued);
    lonely.cancel().unwrap();
    assert_eq!(kind(lonely.wait()), ErrorKind::Cancelled);
    source.abort().unwrap();
    assert_eq!(kind(source.health()), ErrorKind::Cancelled);
    let start = Instant::now();
    while destination.health().is_ok() && start.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = destination.health().unwrap_err();
    assert_eq!((error.kind, error.place().rank), (ErrorKind::PeerLost, Some(0)));
}

/// A rank that drops its group leaves it.
#[test]
fn dropped_groups() {
    let mut ranks = ranks();
    drop(ranks.remove(0));
    let start = Instant::now();
    while ranks[0].0.health().is_ok() && start.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ranks[0].0.health().unwrap_err().kind, ErrorKind::PeerLost);
}

/// What arrives for a receive that was dropped is released.
#[test]
fn dropped_receives() {
    let ranks = ranks();
    let ((source, pool), (destination, there)) = (&ranks[0], &ranks[1]);
    let a = filled(pool, 300);
    for tag in 0..20 {
        let receive = destination.receive(there, 0, tag).unwrap();
        let send = source.send(&a, 1, tag, SendMode::Copy).unwrap();
        if tag % 2 == 0 {
            let _ = send.wait();
        }
        drop(receive); // before, while or after it arrives
        send.cancel().unwrap(); // nobody may come for it
        let _ = send.wait();
    }
    let start = Instant::now();
    while there.stats().unwrap().sequences > 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", there.stats().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn fetches() {
    let ranks = ranks();
    let spaces: Vec<_> = ranks.iter().map(|(_, pool)| Namespace::new(pool, [1; 32], 0).unwrap()).collect();
    for (space, (group, _)) in spaces.iter().zip(&ranks) {
        space.join(group).unwrap();
    }
    assert_eq!(kind(spaces[0].join(&ranks[0].0)), ErrorKind::Invalid);
    let keys = [[1; 32], [2; 32], [3; 32]];
    filled(&ranks[0].1, 200).publish(&spaces[0], &keys).unwrap();
    let start = Instant::now();
    loop {
        let places = spaces[1].lookup(&ranks[1].0, &keys, Some(Duration::from_millis(100))).unwrap();
        if places.iter().all(|place| place.answer == PrefixAnswer::Yes) {
            assert!(places.iter().all(|place| place.rank == 0 && place.tier == Tier::Device));
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", places);
    }
    assert_eq!(block_on(spaces[1].fetch(&ranks[1].0, &keys).unwrap()).unwrap().length, 192);
    assert_eq!(spaces[1].match_prefix(&keys).unwrap().1, 192);
    spaces[1].leave(&ranks[1].0).unwrap();
    assert_eq!(kind(spaces[1].leave(&ranks[1].0)), ErrorKind::State);
}

#[test]
fn partitions() {
    let want = attend(&mut filled(&pool(), 300));
    let threads: Vec<_> = ranks()
        .into_iter()
        .map(|(group, pool)| {
            std::thread::spawn(move || {
                let mut seq = Sequence::new(&pool).unwrap();
                seq.partition(&group, &PartitionOptions { tag: 5, ..Default::default() }).unwrap();
                let mut out = vec![0.0; 300 * Q_HEADS * DIM];
                step(&mut Plan::new(&pool).unwrap(), &mut seq, 300, &data(), &mut out).unwrap();
                assert_eq!(kind(seq.fork()), ErrorKind::State);
                (attend(&mut seq), group, seq) // released when both are done: a slower rank may still need the part of a faster one
            })
        })
        .collect();
    let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert_eq!(results[0].0, results[1].0); // the same bits
    assert!(want.iter().zip(&results[0].0).all(|(a, b)| (a - b).abs() < 1e-3));
}
