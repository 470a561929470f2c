//! A pool on a GPU. Without a GPU, or without CUDA in the library, these tests say so and pass.
mod common;
#[path = "../examples/gpu/device.rs"]
mod device;
use common::*;
use device::Buffer;
use turboattention::*;

/// The context, or the test ends.
macro_rules! gpu {
    () => {
        match gpu() {
            Some(context) => context,
            None => return,
        }
    };
}

fn gpu() -> Option<Context> {
    match Context::new(ContextOptions { device: DeviceKind::Cuda, ..Default::default() }) {
        Ok(context) => {
            device::open().unwrap();
            Some(context)
        }
        Err(error) => {
            assert_eq!(error.kind, ErrorKind::Unsupported, "{}", error);
            eprintln!("NOT TESTED: {}", error);
            None
        }
    }
}

fn close(got: &[f32], want: &[f32]) {
    let (difference, norm) = got.iter().zip(want).fold((0.0, 0.0), |(d, n), (g, w)| (d + (g - w) * (g - w), n + w * w));
    assert!(norm > 0.0 && (difference / norm).sqrt() < 0.01, "{} of {}", difference, norm);
}

#[test]
fn steps_on_a_stream_give_what_a_cpu_gives() {
    let context = gpu!();
    let (pool, data) = (Pool::new(&context, options()).unwrap(), data());
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    plan.set_stream(device::stream().unwrap()).unwrap();
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| Buffer::new(x).unwrap());
    let (mut out, lse) = (Buffer::new(&vec![0.0; data.q.len()]).unwrap(), Buffer::new(&[0.0; PROMPT * Q_HEADS]).unwrap());

    let cpu = common::pool();
    let (mut cpu_plan, mut cpu_seq) = (Plan::new(&cpu).unwrap(), Sequence::new(&cpu).unwrap());
    let mut want = vec![0.0; data.q.len()];
    for n in [PROMPT, 1, 1, 70] {
        let mut step = plan.begin([(&mut seq, n)]).unwrap();
        for layer in 0..LAYERS {
            step.append(layer, k.tensor([n, KV_HEADS, DIM]), v.tensor([n, KV_HEADS, DIM])).unwrap();
            // SAFETY: the buffer has as many floats, and lives until they were read.
            let lse = unsafe { FloatsMut::from_raw(lse.address() as *mut f32, n * Q_HEADS) };
            let (q, out) = (q.tensor([n, Q_HEADS, DIM]), out.tensor_mut([n, Q_HEADS, DIM]));
            step.attend_with(layer, q, out, Some(lse), &AttendOptions::default()).unwrap();
        }
        step.end().unwrap();
        common::step(&mut cpu_plan, &mut cpu_seq, n, &data, &mut want).unwrap();
        close(&out.read().unwrap()[..n * Q_HEADS * DIM], &want[..n * Q_HEADS * DIM]);
        assert!(lse.read().unwrap()[..n * Q_HEADS].iter().all(|lse| lse.is_finite()));
    }
    assert_eq!(seq.len().unwrap(), PROMPT + 72);
    seq.verify().unwrap();
}

#[test]
fn memory_of_the_host_is_refused() {
    let context = gpu!();
    let (pool, data) = (Pool::new(&context, options()).unwrap(), data());
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    let k = Buffer::new(&data.k[..KV_HEADS * DIM]).unwrap();
    let good = k.tensor([1, KV_HEADS, DIM]);
    let slice = Tensor::new(&data.k, [1, KV_HEADS, DIM]).unwrap();
    let (shape, strides) = ([1, KV_HEADS as i64, DIM as i64], [(KV_HEADS * DIM) as i64, DIM as i64]);
    // SAFETY: readable; the library says that the GPU cannot reach it.
    let pageable = unsafe { Tensor::from_raw(data.k.as_ptr().cast(), DType::F32, shape, strides) };
    let mut step = plan.begin([(&mut seq, 1)]).unwrap();
    assert_eq!(kind(step.append(0, slice, good)), ErrorKind::Invalid);
    assert_eq!(kind(step.append(0, good, pageable)), ErrorKind::Invalid);
    for layer in 0..LAYERS {
        step.append(layer, good, good).unwrap();
    }
    step.end().unwrap();
    assert_eq!(seq.len().unwrap(), 1);
    device::synchronize().unwrap();
    let none = Context::new(ContextOptions { device: DeviceKind::Cuda, device_ordinal: 99, ..Default::default() });
    assert_eq!(kind(none), ErrorKind::Invalid);
}

#[test]
fn dense_on_gpu_memory() {
    let context = gpu!();
    let data = data();
    let [q, k, v] = [&data.q, &data.k, &data.v].map(|x| Buffer::new(x).unwrap());
    let mut out = Buffer::new(&vec![0.0; data.q.len()]).unwrap();
    let mut want = vec![0.0; data.q.len()];
    let (of_q, of_kv) = ([PROMPT, Q_HEADS, DIM], [PROMPT, KV_HEADS, DIM]);
    let options = DenseOptions::default();
    let [cq, ck, cv] = [(&data.q, of_q), (&data.k, of_kv), (&data.v, of_kv)].map(|(x, shape)| Tensor::new(x, shape).unwrap());
    common::context().attend_dense(cq, ck, cv, TensorMut::new(&mut want, of_q).unwrap(), None, &options).unwrap();
    context.attend_dense(q.tensor(of_q), k.tensor(of_kv), v.tensor(of_kv), out.tensor_mut(of_q), None, &options).unwrap();
    close(&out.read().unwrap(), &want);
}
