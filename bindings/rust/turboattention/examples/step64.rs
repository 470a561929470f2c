//! bindings/overhead/step64.c in Rust.
use std::time::Instant;
use turboattention::*;

fn main() -> Result<()> {
    let context = Context::new(ContextOptions { threads: 1, ..Default::default() })?;
    let pool = Pool::new(&context, PoolOptions { bits: 8, ..PoolOptions::new(1, 1, 64, 1 << 20) })?;
    let (mut plan, mut seq) = (Plan::new(&pool)?, Sequence::new(&pool)?);
    let x: Vec<f32> = (0..64 * 64).map(|i| (i * 79 % 2003) as f32 / 1001.0 - 1.0).collect();
    let mut out = vec![0f32; 64 * 64];
    let mut best = u128::MAX;
    for _ in 0..750 {
        let start = Instant::now();
        for _ in 0..20 {
            let t = Tensor::new(&x, [64, 1, 64])?;
            let mut step = plan.begin([(&mut seq, 64)])?;
            step.append(0, t, t)?;
            step.attend(0, t, TensorMut::new(&mut out, [64, 1, 64])?)?;
            step.end()?;
            seq.truncate(0)?;
        }
        best = best.min(start.elapsed().as_nanos() / 20);
    }
    println!("{}", best);
    Ok(())
}
