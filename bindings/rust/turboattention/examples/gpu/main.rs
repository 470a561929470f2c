//! The README's quick start on a GPU: keys, values, queries and results are in GPU memory, and calls enqueue their work on a stream.
//! Prints the same lines; numbers differ from a CPU's in the last digits.
mod device;

use device::Buffer;
use turboattention::*;

const LAYERS: u32 = 2;
const Q: [usize; 2] = [8, 128];
const KV: [usize; 2] = [2, 128];
const PROMPT: usize = 1000;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let context = Context::new(ContextOptions { device: DeviceKind::Cuda, ..Default::default() })?;
    let pool = Pool::new(&context, PoolOptions { bits: 4, ..PoolOptions::new(LAYERS, 2, 128, 64 << 20) })?;
    device::open()?;
    let (mut plan, mut seq) = (Plan::new(&pool)?, Sequence::new(&pool)?);
    plan.set_stream(device::stream()?)?;

    let k = Buffer::new(&(0..PROMPT * KV[0] * KV[1]).map(|i| (i * 79 % 2003) as f32 / 1001.0 - 1.0).collect::<Vec<_>>())?;
    let v = Buffer::new(&(0..PROMPT * KV[0] * KV[1]).map(|i| (i % 1009) as f32 / 1009.0).collect::<Vec<_>>())?;
    let q = Buffer::new(&(0..PROMPT * Q[0] * Q[1]).map(|i| (i * 97 % 1999) as f32 / 999.0 - 1.0).collect::<Vec<_>>())?;
    let mut out = Buffer::new(&vec![0f32; PROMPT * Q[0] * Q[1]])?;

    for i in 0..10 {
        let n = if i == 0 { PROMPT } else { 1 };
        let mut step = plan.begin([(&mut seq, n)])?;
        for layer in 0..LAYERS {
            step.append(layer, k.tensor([n, KV[0], KV[1]]), v.tensor([n, KV[0], KV[1]]))?;
            step.attend(layer, q.tensor([n, Q[0], Q[1]]), out.tensor_mut([n, Q[0], Q[1]]))?;
        }
        step.end()?;
        println!("step {}: out[0] = {:.4}", i, out.read()?[0]);
    }
    Ok(())
}
