mod common;
use common::*;
use turboattention::*;

/// The numbers of examples/c/decode.c.
#[test]
fn decode() {
    let (pool, data) = (pool(), data());
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    let mut out = vec![0.0; PROMPT * Q_HEADS * DIM];
    let want = ["0.0000", "0.4958", "0.4952", "0.4946", "0.4940", "0.4934", "0.4929", "0.4923", "0.4917", "0.4911"];
    for (i, want) in want.iter().enumerate() {
        step(&mut plan, &mut seq, if i == 0 { PROMPT } else { 1 }, &data, &mut out).unwrap();
        assert_eq!(format!("{:.4}", out[0]), *want, "step {}", i);
    }
    assert_eq!(seq.len().unwrap(), PROMPT + 9);
}

#[test]
fn steps_that_are_dropped_are_aborted() {
    let (pool, data) = (pool(), data());
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    let k = Tensor::new(&data.k, [1, KV_HEADS, DIM]).unwrap();

    let mut open = plan.begin([(&mut seq, 1)]).unwrap();
    assert_eq!(kind(open.append(LAYERS, k, k)), ErrorKind::Invalid);
    open.append(0, k, k).unwrap();
    drop(open);
    assert_eq!(seq.len().unwrap(), 0);

    let open = plan.begin([(&mut seq, 1)]).unwrap();
    assert_eq!(kind(open.end()), ErrorKind::State); // no layer was appended
    plan.begin([(&mut seq, 1)]).unwrap().abort().unwrap();

    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _open = plan.begin([(&mut seq, 1)]).unwrap();
        panic!("oops");
    }));
    assert!(panic.is_err());

    std::mem::forget(plan.begin([(&mut seq, 1)]).unwrap()); // the next begin aborts it
    step(&mut plan, &mut seq, 1, &data, &mut [0.0; Q_HEADS * DIM]).unwrap();
    assert_eq!(seq.len().unwrap(), 1);
}

#[test]
fn batches_and_options() {
    let (pool, data) = (pool(), data());
    let (mut a, mut b) = (filled(&pool, 100), filled(&pool, 10));
    let mut plan = Plan::new(&pool).unwrap();
    let (mut out, mut lse) = (vec![F16(0); 3 * Q_HEADS * DIM], vec![0.0; 3 * Q_HEADS]);
    let zeros = [0.0; Q_HEADS];
    let options = AttendOptions {
        mask: Mask::Full,
        scale: 0.1,
        softcap: 30.0,
        window: 50,
        alibi_slopes: Some(zeros[..].into()),
        sinks: Some(zeros[..].into()),
        exp: Exp::Exact,
        p: P::U16,
    };
    let mut step = plan.begin([Entry::new(&mut a, 1), Entry::new(&mut b, 0).queries(2)]).unwrap();
    for layer in 0..LAYERS {
        step.append(
            layer,
            Tensor::new(&data.k, [1, KV_HEADS, DIM]).unwrap(),
            Tensor::new(&data.v, [1, KV_HEADS, DIM]).unwrap(),
        )
        .unwrap();
        let q = Tensor::new(&data.q, [3, Q_HEADS, DIM]).unwrap();
        let out = TensorMut::new(&mut out, [3, Q_HEADS, DIM]).unwrap();
        step.attend_with(layer, q, out, Some(lse[..].as_mut().into()), &options).unwrap();
    }
    step.end().unwrap();
    assert_eq!((a.len().unwrap(), b.len().unwrap()), (101, 10));
    assert!(out[0].0 != 0 && lse.iter().all(|lse| (2.0..10.0).contains(lse)), "{:?}", lse);

    // [heads, tokens, channels]
    let mut apart = vec![0.0f32; 2 * Q_HEADS * DIM];
    let mut step = plan.begin([Entry::new(&mut a, 0).queries(2)]).unwrap();
    let view = TensorMut::strided(&mut apart, [2, Q_HEADS, DIM], [DIM, 2 * DIM]).unwrap();
    step.attend(0, Tensor::new(&data.q, [2, Q_HEADS, DIM]).unwrap(), view).unwrap();
    step.end().unwrap();
    assert!(apart[2 * Q_HEADS * DIM - 1] != 0.0);
}

#[test]
fn v_of_its_own_channels() {
    let shape = PoolOptions { v_head_dim: 32, ..PoolOptions::new(1, 2, 48, 1 << 20) };
    let pool = Pool::new(&context(), shape).unwrap();
    let description = pool.describe().unwrap();
    assert_eq!((description.options.v_head_dim, description.block_head_dim), (32, 64));
    let layer_groups = vec![LayerGroup { first: 1, layers: 1, window: 100, ..Default::default() }];
    let windowed = PoolOptions { layer_groups: layer_groups.clone(), ..PoolOptions::new(2, 2, 64, 1 << 20) };
    let description = Pool::new(&context(), windowed).unwrap().describe().unwrap();
    assert_eq!(description.options.layer_groups, layer_groups);
    assert!(description.passed_token_block_bytes < description.token_block_bytes);
    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    let (k, v, mut out) = ([0.5f32; 5 * 2 * 48], [0.25f32; 5 * 2 * 32], [0f32; 5 * 2 * 32]);
    let k = Tensor::new(&k, [5, 2, 48]).unwrap();
    let mut step = plan.begin([(&mut seq, 5)]).unwrap();
    step.append(0, k, Tensor::new(&v, [5, 2, 32]).unwrap()).unwrap();
    step.attend(0, k, TensorMut::new(&mut out, [5, 2, 32]).unwrap()).unwrap();
    step.end().unwrap();
    assert!(out.iter().all(|x| (x - 0.25).abs() < 0.01), "{:?}", out);
}

#[test]
fn layers_of_other_shapes() {
    let wide = LayerGroup { first: 1, layers: 1, kv_heads: 1, head_dim: 128, v_head_dim: 96, ..Default::default() };
    let (bits, offset) = (Some(vec![8, 4, 2]), vec![0.125; 2 * 64 + 128]);
    let shape = PoolOptions {
        k_bits: bits.clone(),
        v_bits: bits.clone(),
        numerics: Numerics { k_offset: Some(offset.clone()), ..Default::default() },
        layer_groups: vec![wide],
        ..PoolOptions::new(2, 2, 64, 1 << 20)
    };
    let context = context();
    let pool = Pool::new(&context, shape.clone()).unwrap();
    let description = pool.describe().unwrap();
    assert_eq!((&description.options.layer_groups[..], &description.options.k_bits), (&[wide][..], &bits));
    assert_eq!(description.options.numerics.k_offset.as_ref(), Some(&offset));
    let again = Pool::new(&context, description.options).unwrap();
    assert_eq!(again.describe().unwrap().fingerprint, description.fingerprint);

    let (mut plan, mut seq) = (Plan::new(&pool).unwrap(), Sequence::new(&pool).unwrap());
    let (k, v, q, mut out) = ([0.5f32; 70 * 128], [0.25f32; 70 * 128], [0.1f32; 70 * 2 * 128], [0f32; 70 * 2 * 128]);
    let mut step = plan.begin([(&mut seq, 70)]).unwrap();
    let (k0, v0) = (Tensor::new(&k, [70, 2, 64]).unwrap(), Tensor::new(&v, [70, 2, 64]).unwrap());
    step.append(0, k0, v0).unwrap();
    step.attend(0, Tensor::new(&q, [70, 4, 64]).unwrap(), TensorMut::new(&mut out, [70, 4, 64]).unwrap()).unwrap();
    assert!(out.iter().all(|x| (x - 0.25).abs() < 0.01), "{:?}", &out[..4]);
    assert_eq!(kind(step.append(1, k0, v0)), ErrorKind::Shape);
    step.append(1, Tensor::new(&k, [70, 1, 128]).unwrap(), Tensor::new(&v, [70, 1, 96]).unwrap()).unwrap();
    out.fill(0.0);
    step.attend(1, Tensor::new(&q, [70, 2, 128]).unwrap(), TensorMut::new(&mut out, [70, 2, 96]).unwrap()).unwrap();
    step.end().unwrap();
    assert!(out[..70 * 2 * 96].iter().all(|x| (x - 0.25).abs() < 0.01), "{:?}", &out[..4]);

    let maps = PoolOptions { k_bits: Some(vec![4; 4]), ..shape.clone() };
    assert_eq!(kind(Pool::new(&context, maps)), ErrorKind::Shape);
    let offset = Numerics { k_offset: Some(vec![0.0; 2 * 2 * 64 + 1]), ..Default::default() };
    assert_eq!(kind(Pool::new(&context, PoolOptions { numerics: offset, ..shape.clone() })), ErrorKind::Shape);
    let twice =
        PoolOptions { k_bits: None, v_bits: None, numerics: Numerics::default(), layer_groups: vec![wide, wide], ..shape };
    assert_eq!(kind(Pool::new(&context, twice)), ErrorKind::Invalid);
}

#[test]
fn drafts_and_trees() {
    let (pool, data) = (pool(), data());
    let (mut a, mut b) = (filled(&pool, 100), filled(&pool, 10));
    let mut plan = Plan::new(&pool).unwrap();
    let append = |step: &mut Step<'_>| {
        for layer in 0..LAYERS {
            let k = Tensor::new(&data.k, [5, KV_HEADS, DIM]).unwrap();
            step.append(layer, k, k).unwrap();
        }
    };
    let drafts = StepOptions { wait_ms: -1, drafts: Switch::On, ..Default::default() };
    let mut step = plan.begin_with([(&mut a, 3), (&mut b, 2)], &drafts).unwrap();
    append(&mut step);
    step.end_keeping(&[2, 0]).unwrap();
    assert_eq!((a.len().unwrap(), b.len().unwrap()), (102, 10));

    let tree = StepOptions { tree_parent: Some(&[-1, 0, 0, -1, -1]), ..Default::default() };
    assert_eq!(kind(plan.begin_with([(&mut a, 3)], &tree).map(drop)), ErrorKind::Invalid);
    for (keep, want) in [(None, None), (Some(&[3][..]), None), (Some(&[4, 0]), None), (Some(&[3, 2]), Some((104, 11)))] {
        let mut step = plan.begin_with([(&mut a, 3), (&mut b, 2)], &tree).unwrap();
        append(&mut step);
        let end = match keep {
            None => step.end(),
            Some(keep) => step.end_keeping(keep),
        };
        match want {
            None => assert_eq!(kind(end), ErrorKind::Invalid),
            Some(lengths) => assert_eq!((end, (a.len().unwrap(), b.len().unwrap())), (Ok(()), lengths)),
        }
    }
    let mut step = plan.begin([(&mut a, 5)]).unwrap();
    append(&mut step);
    assert_eq!(kind(step.end_keeping(&[1])), ErrorKind::Invalid); // no drafts
    assert_eq!(a.len().unwrap(), 104);
    assert_eq!(kind(plan.begin_with([(&mut a, 1)], &StepOptions { wait_ms: -2, ..drafts }).map(drop)), ErrorKind::Invalid);
    let in_order = StepOptions { layers_in_order: Switch::On, ..Default::default() };
    let mut step = plan.begin_with([(&mut a, 5)], &in_order).unwrap();
    append(&mut step);
    let mut out = vec![0.0; 5 * Q_HEADS * DIM];
    let view = TensorMut::new(&mut out, [5, Q_HEADS, DIM]).unwrap();
    assert_eq!(kind(step.attend(0, Tensor::new(&data.q, [5, Q_HEADS, DIM]).unwrap(), view)), ErrorKind::State);
}

#[test]
fn what_does_not_fit_is_refused() {
    let (pool, other, mut data) = (pool(), pool(), data());
    let mut plan = Plan::new(&pool).unwrap();
    assert_eq!(kind(plan.begin([(&mut Sequence::new(&other).unwrap(), 1)]).map(drop)), ErrorKind::Invalid);
    let mut seq = Sequence::new(&pool).unwrap();
    assert_eq!(kind(plan.begin([(&mut seq, usize::MAX)]).map(drop)), ErrorKind::Invalid);
    let mut twice = Sequence::from_raw(&pool, seq.id());
    assert_eq!(kind(plan.begin([(&mut seq, 1), (&mut twice, 1)]).map(drop)), ErrorKind::Invalid);
    let _ = twice.into_raw();

    data.k[KV_HEADS * DIM] = f32::NAN;
    let mut step = plan.begin([(&mut seq, 2)]).unwrap();
    let (bad, good) = (Tensor::new(&data.k, [2, KV_HEADS, DIM]).unwrap(), Tensor::new(&data.v, [2, KV_HEADS, DIM]).unwrap());
    let error = step.append(0, bad, good).unwrap_err();
    assert_eq!((error.kind, error.place().token, error.place().head), (ErrorKind::NonFinite, Some(1), Some(0)));
    assert_eq!(error.block, None);
    assert!(error.to_string().contains("TA_E_NONFINITE"), "{}", error);
    assert_eq!(kind(step.append(0, Tensor::new(&data.v, [3, KV_HEADS, DIM]).unwrap(), good)), ErrorKind::Shape);
    assert_eq!(kind(step.append(0, Tensor::strided(&data.v, [2, KV_HEADS, DIM], [0, DIM]).unwrap(), good)), ErrorKind::Shape);
    step.append(0, good, good).unwrap();
    let (mut out, mut lse) = (vec![0.0f32; 2 * Q_HEADS * DIM], vec![0.0; 2 * Q_HEADS - 1]);
    let q = Tensor::new(&data.q, [2, Q_HEADS, DIM]).unwrap();
    let view = TensorMut::new(&mut out, [2, Q_HEADS, DIM]).unwrap();
    let short = Some(lse[..].as_mut().into());
    assert_eq!(kind(step.attend_with(0, q, view, short, &AttendOptions::default())), ErrorKind::Shape);
    let sinks = AttendOptions { sinks: Some(data.v[..1].into()), ..Default::default() };
    let view = TensorMut::new(&mut out, [2, Q_HEADS, DIM]).unwrap();
    assert_eq!(kind(step.attend_with(0, q, view, None, &sinks)), ErrorKind::Shape);
    drop(step);

    let maps = PoolOptions { k_bits: Some(vec![4; 3]), ..options() };
    assert_eq!(kind(Pool::new(pool.context(), maps)), ErrorKind::Shape);
    let error = Pool::new(pool.context(), PoolOptions::default()).unwrap_err();
    assert_eq!((error.kind, error.place().argument), (ErrorKind::Invalid, Some(1)));
    assert_eq!(kind(plan.set_stream(Stream::default())), ErrorKind::Unsupported);
}

#[test]
fn dense_and_merged() {
    let (context, data) = (context(), data());
    const N: usize = 96;
    let q = Tensor::new(&data.q, [4, Q_HEADS, DIM]).unwrap();
    let attend = |from: usize, to: usize| {
        let (mut out, mut lse) = (vec![0f32; 4 * Q_HEADS * DIM], vec![0f32; 4 * Q_HEADS]);
        let options = DenseOptions {
            variant: DenseVariant::IntFlashHalf,
            attend: AttendOptions { mask: Mask::Full, ..Default::default() },
            ..Default::default()
        };
        let keys = from * KV_HEADS * DIM..;
        let shape = [to - from, KV_HEADS, DIM];
        let (k, v) = (Tensor::new(&data.k[keys.clone()], shape).unwrap(), Tensor::new(&data.v[keys], shape).unwrap());
        let view = TensorMut::new(&mut out, [4, Q_HEADS, DIM]).unwrap();
        context.attend_dense(q, k, v, view, Some(lse[..].as_mut().into()), &options).unwrap();
        (out, lse)
    };
    let (whole, lse) = attend(0, N);
    let parts: Vec<_> = (0..3).map(|i| attend(i * N / 3, (i + 1) * N / 3)).collect();
    let states: Vec<_> = parts
        .iter()
        .map(|(out, lse)| State { out: Tensor::new(out, [4, Q_HEADS, DIM]).unwrap(), lse: lse[..].into() })
        .collect();
    let (mut merged, mut merged_lse) = (vec![0f32; whole.len()], vec![0f32; lse.len()]);
    let view = TensorMut::new(&mut merged, [4, Q_HEADS, DIM]).unwrap();
    context.merge_states(&states, view, Some(merged_lse[..].as_mut().into()), Stream::default()).unwrap();
    assert!(whole.iter().zip(&merged).all(|(a, b)| (a - b).abs() < 0.01));
    assert!(lse.iter().zip(&merged_lse).all(|(a, b)| (a - b).abs() < 0.01));
    let view = TensorMut::new(&mut merged, [4, Q_HEADS, DIM]).unwrap();
    assert_eq!(kind(context.merge_states(&[], view, None, Stream::default())), ErrorKind::Invalid);

    let k = Tensor::new(&data.k, [N, KV_HEADS, DIM]).unwrap();
    let batch = DenseOptions { q_offsets: Some(&[0, 1, 4]), k_offsets: Some(&[0, 50, 96]), ..Default::default() };
    let view = TensorMut::new(&mut merged, [4, Q_HEADS, DIM]).unwrap();
    context.attend_dense(q, k, k, view, None, &batch).unwrap();
    let view = TensorMut::new(&mut merged, [4, Q_HEADS, DIM]).unwrap();
    let wrong = DenseOptions { batch: 3, q_offsets: Some(&[0, 4]), ..Default::default() };
    assert_eq!(kind(context.attend_dense(q, k, k, view, None, &wrong)), ErrorKind::Invalid);
}

#[test]
fn calibration() {
    let (context, data) = (context(), data());
    let mut calibrator = Calibrator::new(&context, LAYERS, KV_HEADS as u32, DIM as u32).unwrap();
    assert_eq!(kind(calibrator.finish(1)), ErrorKind::State);
    for layer in 0..LAYERS {
        let (k, v) = (Tensor::new(&data.k, [100, KV_HEADS, DIM]).unwrap(), Tensor::new(&data.v, [100, KV_HEADS, DIM]).unwrap());
        calibrator.observe(layer, k, v).unwrap();
    }
    let maps = calibrator.finish(1).unwrap();
    assert_eq!(maps.k_bits[..2].iter().sum::<u8>(), 6);
    assert!(maps.k_priority[0] > 0.0);
    let costs = vec![0.0; 3 * maps.k_bits.len()];
    let free = calibrator.choose(&costs, &costs, 1 << 30).unwrap();
    assert!(free.k_bits.iter().chain(&free.v_bits).all(|&bits| bits == 2));
    assert_eq!(kind(calibrator.choose(&costs, &costs, 1)), ErrorKind::Invalid);
    assert_eq!(kind(calibrator.choose(&costs[1..], &costs, 1 << 30)), ErrorKind::Invalid);
    let pool = Pool::new(&context, PoolOptions { k_bits: Some(maps.k_bits), v_bits: Some(maps.v_bits), ..options() }).unwrap();
    assert_eq!(pool.describe().unwrap().options.bits, 0);

    let one = LayerGroup { first: 0, layers: 1, kv_heads: 1, ..Default::default() };
    let uneven = PoolOptions { layer_groups: vec![one], ..options() };
    let calibrator = Calibrator::with_shape(&context, &uneven).unwrap();
    let costs = vec![0.0; 3 * (1 + (LAYERS as usize - 1) * KV_HEADS)];
    let maps = calibrator.choose(&costs, &costs, 1 << 30).unwrap();
    Pool::new(&context, PoolOptions { k_bits: Some(maps.k_bits), v_bits: Some(maps.v_bits), ..uneven }).unwrap();
    assert_eq!(kind(Calibrator::with_shape(&context, &PoolOptions { head_dim: 20, ..options() })), ErrorKind::Unsupported);
}

#[test]
fn contexts() {
    let context = Context::new(ContextOptions { threads: 2, cpu_isa: CpuIsa::Scalar, ..Default::default() }).unwrap();
    let info = context.info().unwrap();
    assert_eq!((info.threads, info.cpu_isa, info.device), (2, CpuIsa::Scalar, DeviceKind::Cpu));
    assert!(!info.device_name.is_empty());
    context.health().unwrap();
    assert_eq!(abi_version(), ffi::TA_ABI_VERSION);
    assert!(version() >= 100 && build_info().starts_with("turboattention "));
    assert_eq!(kind(Context::new(ContextOptions { threads: -1, ..Default::default() })), ErrorKind::Invalid);
}
