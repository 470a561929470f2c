"""Pools on a GPU: arrays of PyTorch in place, streams, what is refused.

Skipped where there is no PyTorch, no GPU or no CUDA in the library (the wheel of scripts/build-wheel --cuda has it).
"""

import gc

import numpy as np
import pytest
from conftest import DIM, HEADS, LAYERS, feed

import turboattention as ta

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif("cuda: no" in ta.build_info(), reason="the library was built without CUDA"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class OnlyCudaArray:
    """As Numba's arrays: no DLPack."""

    def __init__(self, tensor, **fields):
        bits = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
        self.tensor = bits
        self.__cuda_array_interface__ = {**bits.__cuda_array_interface__, **fields}


def as_it_is(tensor):
    return tensor


@pytest.fixture(scope="module")
def gpu():
    return ta.Context(device=ta.Device.CUDA)


@pytest.fixture
def make_gpu_pool(gpu):
    def make(**options):
        return gpu.create_pool(**{"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "bits": 8, "budget_bytes": 64 << 20, **options})

    return make


def random(tokens, heads=HEADS, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, DIM, generator=generator).to(dtype).cuda()


def on_stream_of_torch(plan):
    plan.set_stream(torch.cuda.current_stream().cuda_stream)
    return plan


def run(plan, sequence, q, k, v, out, lse=None, **options):
    with plan.step(sequence, k.shape[0]) as step:
        for layer in range(LAYERS):
            step.append(layer, k, v)
            assert step.attend(layer, q, out, lse, **options) is out


def exact(q, k, v):
    """Causal attention of the last tokens in float64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
    scores = (q @ k.mT / DIM**0.5).masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1).T


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def test_contexts(gpu):
    info = gpu.info()
    assert info.device is ta.Device.CUDA and info.compute_capability >= 80 and info.device_name
    gpu.health()
    with pytest.raises(ta.ArgumentError):
        ta.Context(device=ta.Device.CUDA, device_ordinal=99)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrap", [as_it_is, OnlyCudaArray])
def test_device_arrays_are_used_in_place(make_gpu_pool, dtype, wrap):
    """Parts of a packed array in, a part of an array out; nothing is allocated on the way."""
    pool = make_gpu_pool()
    plan, sequence = on_stream_of_torch(pool.create_plan()), pool.create_sequence()
    packed = random(200, 4 * HEADS, dtype)
    q, k, v = packed.split([2 * HEADS, HEADS, HEADS], 1)
    wide = torch.zeros(200, 2 * HEADS + 1, DIM, dtype=dtype, device="cuda")
    lse = torch.zeros(200, 2 * HEADS, device="cuda")
    want, want_lse = exact(q, k, v)
    arrays = [wrap(x) for x in (q, k, v, wide[:, :-1])]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with plan.step(sequence, 200) as step:
        for layer in range(LAYERS):
            step.append(layer, arrays[1], arrays[2])
            step.attend(layer, arrays[0], arrays[3], lse)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    assert error(wide[:, :-1], want) < 0.02 and not wide[:, -1].any()
    assert (lse - want_lse).abs().max() < 0.05 and len(sequence) == 200


def test_protocols_give_the_same_bits(make_gpu_pool):
    pool = make_gpu_pool(bits=4)
    q, k, v = random(130, 2 * HEADS), random(130, seed=2), random(130, seed=3)
    outputs = []
    for wrap in as_it_is, OnlyCudaArray, torch.Tensor.pin_memory:  # the last: host memory that the GPU reads in place
        given = [wrap(x if wrap is not torch.Tensor.pin_memory else x.cpu()) for x in (q, k, v)]
        outputs.append(torch.empty_like(q))
        plan = on_stream_of_torch(pool.create_plan())
        with plan.step(pool.create_sequence(), 130) as step:
            for layer in range(LAYERS):
                step.append(layer, *given[1:])
                step.attend(layer, given[0], outputs[-1])
        torch.cuda.synchronize()
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_cupy(make_gpu_pool):
    cupy = pytest.importorskip("cupy")
    pool = make_gpu_pool()
    tensors = random(50), random(50, seed=2), random(50, seed=3)
    want, out = torch.empty_like(tensors[0]), cupy.empty(tensors[0].shape, np.float32)
    run(pool.create_plan(), pool.create_sequence(), *tensors, want)
    run(pool.create_plan(), pool.create_sequence(), *map(cupy.asarray, tensors), out)
    torch.cuda.synchronize()
    assert np.array_equal(cupy.asnumpy(out), want.cpu().numpy())


def test_a_gpu_gives_what_a_cpu_gives(pool, make_gpu_pool, numbers):
    gpu_pool = make_gpu_pool(bits=4)
    plan, gpu_plan = pool.create_plan(), on_stream_of_torch(gpu_pool.create_plan())
    sequence, gpu_sequence = pool.create_sequence(), gpu_pool.create_sequence()
    for n in 200, 1, 1, 70:
        arrays = q, k, v = numbers(n, 4 * HEADS), numbers(n), numbers(n)
        want, out = np.empty_like(q), torch.empty(q.shape, device="cuda")
        run(plan, sequence, q, k, v, want)
        run(gpu_plan, gpu_sequence, *(torch.from_numpy(x).cuda() for x in arrays), out)
        assert error(out.cpu(), torch.from_numpy(want)) < 0.01
    gpu_sequence.verify()


def test_a_stream_orders_the_work(make_gpu_pool):
    """Calls return at once, and see what the stream writes before them."""
    pool = make_gpu_pool()
    q, k, v = (random(64, seed=s) for s in (1, 2, 3))
    want, _ = exact(q, k, v)
    late = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    out = torch.empty_like(q)
    stream = torch.cuda.Stream()
    plan = pool.create_plan()
    plan.set_stream(stream.cuda_stream)
    sequence = pool.create_sequence()
    with torch.cuda.stream(stream):
        run(plan, sequence, q, k, v, out)  # kernels are loaded
        sequence.truncate(0)
        stream.synchronize()
        torch.cuda._sleep(200_000_000)  # 0.1 s
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
        run(plan, sequence, *late, out)
        assert not stream.query()
    stream.synchronize()
    assert error(out, want) < 0.02
    del plan


def test_dlpack_waits_for_the_stream_of_the_array(make_gpu_pool):
    """Arrays that another stream still writes: PyTorch has the plan's stream wait."""
    pool = make_gpu_pool()
    q, k, v = (random(64, seed=s) for s in (1, 2, 3))
    want, _ = exact(q, k, v)
    late = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    out = torch.empty_like(q)
    stream, producer = torch.cuda.Stream(), torch.cuda.Stream()
    plan = pool.create_plan()
    plan.set_stream(stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(200_000_000)
        for to, x in zip(late, (q, k, v)):
            to.copy_(x)
        run(plan, pool.create_sequence(), *late, out)
        assert not producer.query()
    stream.synchronize()
    assert error(out, want) < 0.02


def test_a_stream_that_an_array_names(make_gpu_pool):
    """__cuda_array_interface__ of version 3 says which stream the array is used on."""
    pool = make_gpu_pool()
    x, out = random(3), torch.empty(3, HEADS, DIM, device="cuda")
    stream = torch.cuda.Stream()
    plan = pool.create_plan()
    with plan.step(pool.create_sequence(), 3) as step:
        with pytest.raises(ta.ArgumentError) as caught:
            step.append(0, OnlyCudaArray(x, version=3, stream=stream.cuda_stream), x)
        assert caught.value.kind is ta.Status.INVALID and "stream" in caught.value.message
        for layer in range(LAYERS):
            step.append(layer, OnlyCudaArray(x, version=3, stream=1), OnlyCudaArray(x, version=3, stream=None))
            step.attend(layer, x, OnlyCudaArray(out, version=3, stream=1))
        with pytest.raises(ta.StateError):
            plan.set_stream(stream.cuda_stream)
    torch.cuda.synchronize()


def test_what_cannot_work_is_refused(pool, make_gpu_pool, numbers):
    gpu_pool = make_gpu_pool()
    x = random(2)
    out = torch.empty_like(x)

    def refused(kind, call, *arguments, **options):
        with pytest.raises(ta.ArgumentError) as caught:
            call(0, *arguments, **options)
        assert caught.value.kind is kind, caught.value

    with pool.create_plan().step(pool.create_sequence(), 2) as step:  # of a CPU
        refused(ta.Status.INVALID, step.append, x, x)
        refused(ta.Status.INVALID, step.append, OnlyCudaArray(x), x)
        refused(ta.Status.INVALID, step.attend, numbers(2), out)
        step.abort()
    sequence = gpu_pool.create_sequence()
    with gpu_pool.create_plan().step(sequence, 2) as step:
        refused(ta.Status.INVALID, step.append, numbers(2), x)
        refused(ta.Status.INVALID, step.append, x, x.cpu())
        for dtype in torch.float64, torch.int8, torch.int16, torch.complex64:
            refused(ta.Status.DTYPE, step.append, x.to(dtype), x)
            refused(ta.Status.DTYPE, step.append, OnlyCudaArray(x.to(dtype)), x)
        refused(ta.Status.SHAPE, step.append, x[0], x)
        refused(ta.Status.SHAPE, step.append, x[:1], x)
        refused(ta.Status.SHAPE, step.append, x[..., ::2], x)
        refused(ta.Status.SHAPE, step.append, x[:1].expand(2, -1, -1), x)
        refused(ta.Status.SHAPE, step.append, OnlyCudaArray(x[..., ::2]), x)
        with pytest.raises(BufferError):  # PyTorch's own: detach()
            step.append(0, x.clone().requires_grad_(), x)
        step.append(0, x, x)
        refused(ta.Status.INVALID, step.attend, x)  # out is needed
        refused(ta.Status.INVALID, step.attend, x, numbers(2))
        refused(ta.Status.INVALID, step.attend, x, x)  # overlaps
        refused(ta.Status.INVALID, step.attend, x, OnlyCudaArray(out, data=(out.data_ptr(), True)))  # read-only
        refused(ta.Status.DTYPE, step.attend, x, out.to(torch.int8))
        refused(ta.Status.DTYPE, step.attend, x, out, torch.empty(2, HEADS, dtype=torch.float64, device="cuda"))
        refused(ta.Status.SHAPE, step.attend, x, out, torch.empty(2, HEADS + 1, device="cuda"))
        refused(ta.Status.INVALID, step.attend, x, out, np.empty((2, HEADS), np.float32))
        refused(ta.Status.INVALID, step.attend, x, out, sinks=np.zeros(HEADS, np.float32))
        step.attend(0, x, out, sinks=torch.zeros(HEADS, device="cuda"), alibi_slopes=torch.ones(HEADS, device="cuda"))
        for layer in range(1, LAYERS):
            step.append(layer, x, x)
    torch.cuda.synchronize()
    assert len(sequence) == 2


@pytest.mark.skipif(not (torch.cuda.is_available() and torch.cuda.device_count() > 1), reason="one GPU")
def test_arrays_of_another_gpu_are_refused(make_gpu_pool):
    pool = make_gpu_pool()
    x, other = random(1), random(1).to("cuda:1")
    with pool.create_plan().step(pool.create_sequence(), 1) as step:
        for array in other, OnlyCudaArray(other):
            with pytest.raises(ta.ArgumentError) as caught:
                step.append(0, x, array)
            assert caught.value.kind is ta.Status.INVALID and "GPU 1" in caught.value.message
        step.abort()


def test_nan_is_reported_by_a_later_call(make_gpu_pool):
    pool = make_gpu_pool()
    plan, sequence = pool.create_plan(), pool.create_sequence()
    x = random(2)
    x[1, 0, 3] = torch.nan
    run(plan, sequence, x, x, x, torch.empty_like(x))
    torch.cuda.synchronize()
    with pytest.raises(ta.DataError) as caught:
        plan.step(sequence, 1)
    assert caught.value.kind is ta.Status.NONFINITE


def test_dense_merged_calibrated(gpu):
    q, k, v = random(100, 4 * HEADS), random(300, seed=2), random(300, seed=3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream())
        out, lse = torch.empty_like(q), torch.empty(100, 4 * HEADS, device="cuda")
        gpu.attend_dense(q, k, v, out, lse, stream=stream.cuda_stream)
        want, want_lse = exact(q, k, v)
        assert error(out, want) < 0.03 and (lse - want_lse).abs().max() < 0.05
        parts, lses = [], []
        for half in slice(0, 100), slice(100, 300):
            parts.append(torch.empty_like(q))
            lses.append(torch.empty_like(lse))
            gpu.attend_dense(q, k[half], v[half], parts[-1], lses[-1], mask=ta.Mask.FULL, stream=stream.cuda_stream)
        whole, merged = torch.empty_like(q), torch.empty_like(q)
        gpu.attend_dense(q, k, v, whole, mask=ta.Mask.FULL, stream=stream.cuda_stream)
        assert gpu.merge_states(parts, lses, merged, stream=stream.cuda_stream) is merged
        assert error(merged, whole) < 0.03
        two = torch.empty_like(q)
        gpu.attend_dense(q, k, v, two, q_offsets=[0, 40, 100], k_offsets=[0, 100, 300], stream=stream.cuda_stream)
        assert error(two[:40], exact(q[:40], k[:100], v[:100])[0]) < 0.03
        with pytest.raises(ta.ArgumentError):
            gpu.attend_dense(q, k, v)
    stream.synchronize()
    calibrator = gpu.create_calibrator(layers=1, kv_heads=HEADS, head_dim=DIM)
    calibrator.observe(0, k, v)
    k_bits, v_bits, _, _ = calibrator.finish(1)
    assert sorted(k_bits[0]) == [2, 4] == sorted(v_bits[0])


def test_blocks_in_host_memory_give_the_same_bits(make_gpu_pool):
    pool = make_gpu_pool(bits=4, tiers=ta.Tiers(host_bytes=16 << 20))
    plan, sequence = on_stream_of_torch(pool.create_plan()), pool.create_sequence()
    x = random(500)
    run(plan, sequence, x, x, x, torch.empty_like(x))
    want, got = torch.empty_like(x[:1]), torch.empty_like(x[:1])

    def attend(out):
        with plan.step(sequence, 0, 1) as step:
            step.attend(0, x[:1], out)
        torch.cuda.synchronize()

    attend(want)
    assert sequence.move(ta.Tier.HOST, 0, 7).wait(30).state is ta.MoveState.DONE
    assert sequence.residency().host_blocks == 7
    attend(got)
    assert torch.equal(got, want)


def test_a_graph_of_a_step(make_gpu_pool):
    """Captured by PyTorch, replayed between begin and end."""
    pool = make_gpu_pool(bits=4)
    plan, sequence, twin = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    stream = torch.cuda.Stream()
    plan.set_stream(stream.cuda_stream)
    x, out = random(1), torch.empty(1, HEADS, DIM, device="cuda")
    prompt = random(100, seed=5)
    other_plan = pool.create_plan()
    other_plan.set_stream(stream.cuda_stream)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for s in sequence, twin:
            run(other_plan, s, prompt, prompt, prompt, torch.empty_like(prompt))
        run(plan, sequence, x, x, x, out)
        run(other_plan, twin, x, x, x, out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        step = plan.step(sequence, 1)
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(LAYERS):
                step.append(layer, x, x)
                step.attend(layer, x, out)
        graph.replay()
        step.end()
        run(other_plan, twin, x, x, x, torch.empty_like(out))
        for seed in range(6, 9):
            x.copy_(random(1, seed=seed))
            with plan.step(sequence, 1):
                graph.replay()
            want = torch.empty_like(out)
            run(other_plan, twin, x, x, x, want)
            stream.synchronize()
            assert torch.equal(out, want)
    assert len(sequence) == len(twin) == 105


def test_steps_take_constant_memory(make_gpu_pool):
    pool = make_gpu_pool()
    plan, sequence = on_stream_of_torch(pool.create_plan()), pool.create_sequence()
    x = random(1)
    out = torch.empty_like(x)
    for i in range(3000):
        if i == 500:
            torch.cuda.synchronize()
            gc.collect()
            free, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        run(plan, sequence, x, x, x, out)
        if i % 128 == 127:
            sequence.truncate(0)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated and free - torch.cuda.mem_get_info()[0] < 8 << 20


def test_the_context_leaves_pytorch_alone(make_gpu_pool):
    """The current device and stream of PyTorch are what they were, and CPU pools go on beside it."""
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    pool = make_gpu_pool()
    x = random(5)
    run(pool.create_plan(), pool.create_sequence(), x, x, x, torch.empty_like(x))
    cpu = ta.Context(threads=1).create_pool(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, budget_bytes=1 << 22)
    assert np.isfinite(feed(cpu.create_plan(), cpu.create_sequence(), 5)).all()
    torch.cuda.synchronize()
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before
