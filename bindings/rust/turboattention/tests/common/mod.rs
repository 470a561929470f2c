//! A model's shape, and data for it as in examples/c/decode.c.
#![allow(dead_code)]
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use turboattention::*;

pub const LAYERS: u32 = 2;
pub const Q_HEADS: usize = 8;
pub const KV_HEADS: usize = 2;
pub const DIM: usize = 128;
pub const PROMPT: usize = 1000;

pub struct Data {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
}

pub fn data() -> Data {
    Data {
        q: (0..PROMPT * Q_HEADS * DIM).map(|i| (i * 97 % 1999) as f32 / 999.0 - 1.0).collect(),
        k: (0..PROMPT * KV_HEADS * DIM).map(|i| (i * 79 % 2003) as f32 / 1001.0 - 1.0).collect(),
        v: (0..PROMPT * KV_HEADS * DIM).map(|i| (i % 1009) as f32 / 1009.0).collect(),
    }
}

pub fn context() -> Context {
    Context::new(ContextOptions { threads: 1, ..Default::default() }).unwrap()
}

pub fn options() -> PoolOptions {
    PoolOptions::new(LAYERS, KV_HEADS as u32, DIM as u32, 64 << 20)
}

pub fn pool() -> Pool {
    Pool::new(&context(), options()).unwrap()
}

pub fn tiered() -> Pool {
    let tiers = TierOptions { host_bytes: 32 << 20, begin_wait_ms: 50, ..Default::default() };
    Pool::new(&context(), PoolOptions { tiers: Some(tiers), ..options() }).unwrap()
}

/// One step of n tokens, the first ones of the data.
pub fn step(plan: &mut Plan, seq: &mut Sequence, n: usize, data: &Data, out: &mut [f32]) -> Result<()> {
    let mut step = plan.begin([(seq, n)])?;
    for layer in 0..LAYERS {
        step.append(layer, Tensor::new(&data.k, [n, KV_HEADS, DIM])?, Tensor::new(&data.v, [n, KV_HEADS, DIM])?)?;
        step.attend(layer, Tensor::new(&data.q, [n, Q_HEADS, DIM])?, TensorMut::new(out, [n, Q_HEADS, DIM])?)?;
    }
    step.end()
}

/// A sequence of n tokens.
pub fn filled(pool: &Pool, n: usize) -> Sequence {
    let mut seq = Sequence::new(pool).unwrap();
    step(&mut Plan::new(pool).unwrap(), &mut seq, n, &data(), &mut vec![0.0; n * Q_HEADS * DIM]).unwrap();
    seq
}

/// What attention in layer 0 gives for the last query. A step that brings no tokens needs no appends.
pub fn attend(seq: &mut Sequence) -> Vec<f32> {
    let mut plan = Plan::new(seq.pool()).unwrap();
    let mut out = vec![0.0; Q_HEADS * DIM];
    let mut step = plan.begin([Entry::new(seq, 0).queries(1)]).unwrap();
    step.attend(0, Tensor::new(&data().q, [1, Q_HEADS, DIM]).unwrap(), TensorMut::new(&mut out, [1, Q_HEADS, DIM]).unwrap())
        .unwrap();
    step.end().unwrap();
    out
}

pub fn kind<T>(result: Result<T>) -> ErrorKind {
    result.err().expect("an error").kind
}

/// A folder that goes when it is dropped.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("turboattention-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a future to its end, as any executor would.
pub fn block_on<F: std::future::Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut future = Box::pin(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}
