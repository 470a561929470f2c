//! What needs a process without other tests: memory that must not grow, and fork().
mod common;
use common::*;
use std::os::raw::c_int;
use turboattention::*;

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Steps, forks, errors and all that a request makes, again and again: the memory of the process stays as it is.
/// TA_LEAK_STEPS: how many steps.
fn nothing_leaks() {
    let steps = std::env::var("TA_LEAK_STEPS").map_or(20000, |n| n.parse().unwrap());
    let (pool, data) = (tiered(), data());
    let (mut plan, mut base, mut out) = (Plan::new(&pool).unwrap(), filled(&pool, 64), vec![0.0; Q_HEADS * DIM]);
    let mut before = 0;
    for i in 0..steps {
        step(&mut plan, &mut base, 1, &data, &mut out).unwrap();
        if i % 32 == 0 {
            base.truncate(64).unwrap();
        }
        if i % 8 == 0 {
            let mut fork = base.fork().unwrap();
            assert_eq!(kind(fork.truncate(1000)), ErrorKind::Invalid);
            drop(Plan::new(&pool).unwrap().begin([(&mut fork, 1)]).unwrap());
        }
        if i % 500 == 0 {
            pool.metrics(MetricsFormat::Json).unwrap();
            block_on(base.move_to(Tier::Host, 0..1).unwrap()).unwrap();
            let log = Log::new(LogLevel::Debug, |_, _| {});
            let context = Context::new(ContextOptions { threads: 2, log: Some(log), ..Default::default() }).unwrap();
            filled(&Pool::new(&context, options()).unwrap(), 1);
            Calibrator::new(&context, 1024, 64, 128).unwrap();
        }
        if i == steps / 4 {
            before = resident_bytes();
        }
    }
    let after = resident_bytes();
    assert!(after < before + (8 << 20), "{} bytes more after {} steps", after - before, steps);
}

extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn _exit(status: c_int) -> !;
}

/// In a child process everything fails with `Forked`, and may be dropped; a new context works.
fn forked_children() {
    let pool = tiered();
    let (mut plan, mut seq, data) = (Plan::new(&pool).unwrap(), filled(&pool, 100), data());
    let mut open = plan.begin([(&mut seq, 1)]).unwrap();
    let child = unsafe { fork() };
    if child == 0 {
        std::panic::set_hook(Box::new(|panic| unsafe {
            eprintln!("in the child: {}", panic);
            _exit(1)
        }));
        let k = Tensor::new(&data.k, [1, KV_HEADS, DIM]).unwrap();
        assert_eq!(kind(open.append(0, k, k)), ErrorKind::Forked);
        drop(open);
        assert_eq!(kind(seq.len()), ErrorKind::Forked);
        assert_eq!(kind(pool.stats()), ErrorKind::Forked);
        assert_eq!(kind(seq.move_to(Tier::Host, 0..1)), ErrorKind::Forked);
        drop((plan, seq, pool));
        filled(&common::pool(), 10);
        unsafe { _exit(0) };
    }
    let mut status = -1;
    assert_eq!(unsafe { waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0);
    open.abort().unwrap();
    drop(plan);
    assert_eq!(seq.len().unwrap(), 100);
}

#[test]
fn alone() {
    forked_children();
    nothing_leaks();
}
