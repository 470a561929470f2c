// The life of an engine in Rust: docs/embedding.md explains it.
use turboattention::*;

const LAYERS: u32 = 2;
const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const CHUNK: usize = 128;
const PROMPT: usize = 300;
const BLOCKS: usize = PROMPT / 64;
const ANSWER: usize = 256;

fn rows(first: usize, n: usize, heads: usize, salt: usize) -> Vec<f32> {
    let value = |t: usize, c: usize| ((t * 131 + c) * salt % 255) as f32 / 128.0 - 127.0 / 128.0;
    (0..n * heads * DIM).map(|i| value(first + i / (heads * DIM), i % (heads * DIM))).collect()
}

fn layers(step: &mut Step<'_>, first: usize, n: usize) -> Result<f32> {
    let mut out = vec![0f32; n * Q_HEADS * DIM];
    let (k, v) = (rows(first, n, KV_HEADS, 83), rows(first, n, KV_HEADS, 89));
    let q = rows(first, n, Q_HEADS, 79);
    for layer in 0..LAYERS {
        step.append(layer, Tensor::new(&k, [n, KV_HEADS, DIM])?, Tensor::new(&v, [n, KV_HEADS, DIM])?)?;
        step.attend(layer, Tensor::new(&q, [n, Q_HEADS, DIM])?, TensorMut::new(&mut out, [n, Q_HEADS, DIM])?)?;
    }
    Ok(out[(n - 1) * Q_HEADS * DIM])
}

fn run(plan: &mut Plan, seq: &mut Sequence, first: usize, n: usize) -> Result<f32> {
    let mut step = plan.begin([(seq, n)])?;
    let last = layers(&mut step, first, n)?;
    step.end()?;
    Ok(last)
}

/// The sequence of a request and the tokens that it has; `None`: there is no room for it now.
fn admit(space: &Namespace, keys: &[Key], answer: usize) -> Result<Option<(Sequence, usize)>> {
    let (mut seq, length) = space.match_prefix(keys)?;
    let have = length / CHUNK * CHUNK;
    seq.truncate(have)?;
    match seq.reserve(PROMPT - have + answer, -1) {
        Err(e) if e.kind == ErrorKind::TierFull => return Ok(None), // the request stays in the queue: e.place().bytes lack
        promised => promised?,
    }
    Ok(Some((seq, have)))
}

fn prefill(plan: &mut Plan, seq: &mut Sequence, space: &Namespace, keys: &[Key], have: usize) -> Result<f32> {
    let mut last = 0.0;
    for first in (have..PROMPT).step_by(CHUNK) {
        last = run(plan, seq, first, CHUNK.min(PROMPT - first))?;
    }
    seq.publish(space, keys)?;
    Ok(last)
}

fn main() -> Result<()> {
    let context = Context::new(ContextOptions::default())?;
    let tiers = TierOptions { host_bytes: 8 << 20, ..TierOptions::default() };
    let shape = PoolOptions::new(LAYERS, KV_HEADS as u32, DIM as u32, 4 << 20);
    let pool = Pool::new(&context, PoolOptions { bits: 4, tiers: Some(tiers), ..shape })?;
    let mut plan = Plan::new(&pool)?;
    let mut salt = [0u8; 32]; // secret and random in earnest
    salt[0] = 1;
    let space = Namespace::new(&pool, salt, 0)?;
    let mut keys = [[0u8; 32]; BLOCKS];
    for i in 0..BLOCKS * 32 {
        keys[i / 32][i % 32] = (i + 1) as u8;
    }

    let fit = pool.fit([(None, PROMPT + ANSWER)])?;
    println!("fits: {}, {} bytes", fit.now as u8, fit.bytes_new);

    let (mut cold, have) = admit(&space, &keys, ANSWER)?.expect("room");
    println!("cold: {} matched, prefill {:.6}", have, prefill(&mut plan, &mut cold, &space, &keys, have)?);
    let (mut seq, have) = admit(&space, &keys, ANSWER)?.expect("room");
    println!("warm: {} matched, prefill {:.6}", have, prefill(&mut plan, &mut seq, &space, &keys, have)?);
    println!("too long: {}", if admit(&space, &keys, 1 << 20)?.is_some() { "admitted" } else { "queued" });
    for t in PROMPT..PROMPT + 3 {
        println!("decode: token {}, {:.6}", t, run(&mut plan, &mut seq, t, 1)?);
    }

    let mut other = seq.fork()?;
    other.truncate(PROMPT)?;
    println!("fork: {:.6}", run(&mut plan, &mut other, PROMPT + 7, 1)?);

    const DRAFTS: usize = 4;
    const ACCEPTED: usize = 2;
    let how = StepOptions { drafts: Switch::On, ..StepOptions::default() };
    let mut step = plan.begin_with([(&mut other, DRAFTS)], &how)?;
    layers(&mut step, PROMPT + 8, DRAFTS)?;
    step.end_keeping(&[ACCEPTED])?;
    println!("verified: {} tokens, next {:.6}", other.len()?, run(&mut plan, &mut other, PROMPT + 17, 1)?);

    let mut step = plan.begin([(&mut seq, 1)])?;
    layers(&mut step, PROMPT + 3, 1)?;
    drop(step); // a step that was not ended is aborted
    println!("cancelled: {} tokens", seq.len()?);

    let info = seq.move_to(Tier::Host, 0..BLOCKS as u64)?.wait()?;
    println!("swapped out: {} blocks", info.moved);
    seq.move_to(Tier::Device, 0..BLOCKS as u64)?.wait()?;
    println!("swapped in: {:.6}", run(&mut plan, &mut seq, PROMPT + 3, 1)?);
    pool.close()
}
