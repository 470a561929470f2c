"""Every call of the package, and what arrays it takes."""

import json
import os
import select
import threading
from types import MappingProxyType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from conftest import DIM, HEADS, LAYERS, feed

import turboattention as ta


def reference(q, k, v):
    """Causal attention in float64."""
    tokens, heads, dim = q.shape
    k, v = (np.repeat(x, heads // x.shape[1], axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(dim)
    scores[:, ~np.tri(tokens, k.shape[0], k.shape[0] - tokens, dtype=bool)] = -np.inf
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights / total, v), (top + np.log(total))[..., 0].T


def test_a_step_is_attention(make_pool, numbers):
    pool = make_pool(bits=8)
    plan, seq = pool.create_plan(), pool.create_sequence()
    q, k, v = numbers(100, 2 * HEADS), numbers(100), numbers(100)
    lse = np.empty((100, 2 * HEADS), np.float32)
    with plan.step(seq, 100) as step:
        for layer in range(LAYERS):
            step.append(layer, k, v)
            out = step.attend(layer, q, lse=lse)
    want, want_lse = reference(q, k, v)
    assert np.linalg.norm(out - want) < 0.02 * np.linalg.norm(want)
    assert np.abs(lse - want_lse).max() < 0.05
    assert len(seq) == seq.length() == 100


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_element_types_are_taken_as_they_are(pool, numbers, dtype):
    x = numbers(70)
    x = x.astype(dtype).astype(np.float32)  # values that all three have
    outputs = []
    for given in (x, x.astype(dtype), x.astype(dtype).view(np.uint16) if dtype is ml_dtypes.bfloat16 else x.astype(dtype)):
        out = np.empty(given.shape, given.dtype)
        with pool.create_plan().step(pool.create_sequence(), 70) as step:
            for layer in range(LAYERS):
                step.append(layer, given, given)
                assert step.attend(layer, given, out) is out
        outputs.append(out.view(ml_dtypes.bfloat16).astype(np.float32) if out.dtype == np.uint16 else out.astype(np.float32))
    assert np.array_equal(outputs[0].astype(dtype).astype(np.float32), outputs[1])
    assert np.array_equal(outputs[1], outputs[2])


class OnlyDLPack:
    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_views_are_used_in_place(pool, numbers):
    """Strides, other protocols, and an output that is a part of an array give the bits of plain arrays."""
    packed = numbers(50, 3 * HEADS)
    q, k, v = (packed[:, i * HEADS:(i + 1) * HEADS] for i in range(3))

    def run(q, k, v, out):
        with pool.create_plan().step(pool.create_sequence(), 50) as step:
            for layer in range(LAYERS):
                step.append(layer, k, v)
                step.attend(layer, q, out)

    want = np.empty((50, HEADS, DIM), np.float32)
    run(*map(np.ascontiguousarray, (q, k, v)), want)
    wide = np.zeros((50, HEADS + 1, DIM), np.float32)
    run(q, k, v, wide[:, :HEADS])
    assert np.array_equal(wide[:, :HEADS], want) and not wide[:, HEADS].any()
    for wrap in OnlyDLPack, memoryview:
        out = np.zeros_like(want)
        run(wrap(q), wrap(k), wrap(v), wrap(out))
        assert np.array_equal(out, want)


def test_bad_arrays_are_refused(pool, numbers):
    x = numbers(2)
    frozen = numbers(2)
    frozen.flags.writeable = False

    class OnGpu:
        __cuda_array_interface__ = {"shape": (2, HEADS, DIM), "typestr": "<f4", "data": (4096, False), "version": 3, "stream": None}

    with pool.create_plan().step(pool.create_sequence(), 2) as step:
        def refused(kind, *arguments, call=step.append):
            with pytest.raises(ta.ArgumentError) as caught:
                call(0, *arguments)
            assert caught.value.kind == kind
            return caught.value.message

        refused(ta.Status.SHAPE, x[0], x)
        refused(ta.Status.SHAPE, x[..., ::2], x)
        refused(ta.Status.SHAPE, np.broadcast_to(x[:1], x.shape), x)
        refused(ta.Status.SHAPE, x[:1], x)
        assert "not 1 to 3" in refused(ta.Status.SHAPE, x[None], x)
        assert "k is float64" in refused(ta.Status.DTYPE, x.astype(np.float64), x)
        refused(ta.Status.DTYPE, x.astype(">f4"), x)
        refused(ta.Status.INVALID, OnGpu(), x)
        with pytest.raises(TypeError):
            step.append(0, x.tolist(), x)
        for layer in range(LAYERS):
            step.append(layer, x, x)
        refused(ta.Status.INVALID, x, frozen, call=step.attend)
        refused(ta.Status.INVALID, x, OnlyDLPack(frozen), call=step.attend)
        refused(ta.Status.SHAPE, x, None, np.empty((2, HEADS + 1), np.float32), call=step.attend)
        refused(ta.Status.DTYPE, x, None, np.empty((2, HEADS)), call=step.attend)
        with pytest.raises(ta.ArgumentError):
            step.attend(LAYERS - 1, x, sinks=np.zeros(3, np.float32))


def test_a_cuda_array_says_what_it_is(context):
    good = {"shape": (1, 1, DIM), "typestr": "<f4", "data": (4096, False), "version": 3}

    def give(interface):
        class OnGpu:
            __cuda_array_interface__ = interface

        return context.attend_dense(OnGpu(), OnGpu(), OnGpu())

    with pytest.raises(ta.ArgumentError, match="GPU memory"):
        give(good)
    for part, wrong in (("typestr", b"<f4"), ("typestr", 5), ("typestr", "\ud800"), ("shape", [1, 1, DIM]), ("shape", (1, 1.5, DIM)),
                        ("data", 4096), ("data", (None, False)), ("data", (4096,)), ("strides", (4, "4", 4)), ("strides", (4,)),
                        ("strides", 4), ("stream", "1")):
        with pytest.raises(TypeError, match=f"k.__cuda_array_interface__.*{part}"):
            give({**good, part: wrong})
    for wrong in None, [], {}:
        with pytest.raises(TypeError, match="k.__cuda_array_interface__"):
            give(wrong)


def test_no_rows(context, pool, numbers):
    """numpy gives empty arrays strides of 0."""
    none, some = numbers(0), numbers(5)
    lse = np.empty((0, HEADS), np.float32)
    assert context.attend_dense(none, some, some, lse=lse).shape == none.shape
    for wrap in memoryview, OnlyDLPack:
        context.attend_dense(wrap(none), some, some, wrap(np.empty_like(none)), lse=wrap(lse))
    assert context.merge_states([none, none], [lse, lse], lse=lse).shape == none.shape
    with pool.create_plan().step(pool.create_sequence(), 5, 0) as step:
        for layer in range(LAYERS):
            step.append(layer, some, some)
            assert step.attend(layer, none, lse=lse).shape == none.shape


def test_what_no_argument_can_be(context, make_pool):
    pool = make_pool()
    plan, seq = pool.create_plan(), pool.create_sequence()
    for error, name, options in ((TypeError, "n_new", {"n_new": "3"}), (TypeError, "n_new", {"n_new": ["3"]}),
                                 (TypeError, "n_new", {"n_new": [1.0]}), (TypeError, "n_new", {"n_new": 1.5}),
                                 (ta.ArgumentError, "n_new", {"n_new": 1 << 40}),
                                 (ta.ArgumentError, "n_new", {"n_new": [-1 << 70]}), (TypeError, "n_query", {"n_query": [None]}),
                                 (TypeError, "tree_parent", {"n_new": 2, "tree_parent": [1.5, 2]}),
                                 (ta.ArgumentError, "tree_parent", {"n_new": 1, "tree_parent": [1 << 31]}),
                                 (TypeError, "query_positions", {"query_positions": ["0"]}),
                                 (TypeError, "drafts", {"drafts": "yes"}), (TypeError, "layers_in_order", {"layers_in_order": 2})):
        with pytest.raises(error, match=name):
            plan.step(seq, **options)
    for error, name, options in ((TypeError, "hadamard", ta.Numerics(hadamard="no")),
                                 (TypeError, "profile must be a Profile", ta.Numerics(profile="PAPER")),
                                 (TypeError, "sink_blocks", ta.Numerics(sink_blocks=1.5)),
                                 (ta.ArgumentError, "q_bits", ta.Numerics(q_bits=-8))):
        with pytest.raises(error, match=name):
            make_pool(numerics=options)
    for error, name, options in ((TypeError, "host_bytes", ta.Tiers(host_bytes=8e9)), (TypeError, "host_bytes", ta.Tiers(host_bytes=None)),
                                 (ta.ArgumentError, "host_bytes", ta.Tiers(host_bytes=-1)),
                                 (TypeError, "eviction must be an Eviction", ta.Tiers(eviction="LRU")),
                                 (TypeError, "peer must be a Context", ta.Tiers(peer=1))):
        with pytest.raises(error, match=name):
            make_pool(tiers=options)
    for error, name, group in ((TypeError, "window", ta.LayerGroup(0, 1, window="8")), (ta.ArgumentError, "first", ta.LayerGroup(-1, 1))):
        with pytest.raises(error, match=name):
            make_pool(layer_groups=[group])
    group, space = context.create_group(ta.make_group_id(), rank=0, ranks=1), pool.create_namespace(bytes(31) + b"n")
    space.attach_store({})
    move = make_pool(tiers=ta.Tiers(host_bytes=1 << 20)).create_sequence().prefetch(0, 0)
    for wait in group.wait, move.wait, space.flush_store, lambda seconds: space.lookup(group, bytes(32), seconds):
        with pytest.raises(ValueError, match="seconds"):
            wait(float("nan"))
    for log in 5, "print":
        with pytest.raises(TypeError, match="log must be callable"):
            ta.Context(log=log)
    for call in seq.save, pool.save, pool.load, pool.load_sequence:
        with pytest.raises(TypeError, match="progress must be callable"):
            call("/no/such/file", progress=5)
    for store, options in ((5, {}), (set(), {}), (MappingProxyType({}), {}), ([], {"write_through": False})):
        with pytest.raises(TypeError, match="store must be a mapping with"):
            pool.create_namespace(os.urandom(32)).attach_store(store, **options)
    pool.create_namespace(os.urandom(32)).attach_store(MappingProxyType({}), write_through=False)
    with pytest.raises(TypeError, match="allocate"):
        ta.Context(allocator=ta.Allocator(allocate=None, deallocate=1))
    x = np.zeros((1, HEADS, DIM), np.float32)
    with pytest.raises(TypeError, match="q_offsets"):
        context.attend_dense(x, x, x, q_offsets=[0, 1.0])
    with pytest.raises(ta.ArgumentError, match="k_offsets"):
        context.attend_dense(x, x, x, k_offsets=[0, 1 << 63])


def test_a_store_whose_methods_are_given(pool):
    """By the object itself, not by its class."""
    kept = {}
    store = SimpleNamespace(get=kept.get, pop=kept.pop, __contains__=kept.__contains__, __setitem__=kept.__setitem__)
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 100)
    space = pool.create_namespace(bytes(31) + b"g")
    space.attach_store(store, timeout_ms=60000)
    seq.publish(space, bytes(32))
    assert space.flush_store(30) == 0 and len(kept) == 1
    assert space.store_stats().calls_failed == 0


def test_numbers_of_numpy_are_arguments(make_pool):
    pool = make_pool(numerics=ta.Numerics(hadamard=np.bool_(True), sink_blocks=np.int8(2)), tiers=ta.Tiers(host_bytes=np.int64(1 << 20)))
    what = pool.describe()
    assert what.numerics.hadamard is True and what.numerics.sink_blocks == 2 and what.tiers.host_bytes == 1 << 20
    assert make_pool(numerics=ta.Numerics(hadamard=np.bool_(False))).describe().numerics.hadamard is False
    plan = pool.create_plan()
    for n_new in np.int64(2), np.array([2]), [np.uint8(2)]:
        with plan.step(pool.create_sequence(), n_new, drafts=np.True_) as step:
            step.abort()


def test_errors_have_fields(pool, numbers):
    x = numbers(3)
    x[1, 1, 5] = np.nan
    with pytest.raises(ta.DataError) as caught:
        with pool.create_plan().step([pool.create_sequence(), pool.create_sequence()], [1, 2]) as step:
            step.append(1, x, x)
    error = caught.value
    assert (error.kind, error.layer, error.sequence, error.token, error.head) == (ta.Status.NONFINITE, 1, 1, 1, 1)
    assert error.message and error.block is None and isinstance(error, ta.Error)
    assert "NONFINITE" in str(error) and ta.status_name(error.kind) == "TA_E_NONFINITE"
    import pickle
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)
    small = pool.create_plan()
    with pytest.raises(ta.ExhaustedError) as caught:
        small.step(pool.create_sequence(), 1 << 22)
    assert caught.value.kind == ta.Status.TIER_FULL and caught.value.tier == ta.Tier.DEVICE and caught.value.bytes > 0
    assert "tier DEVICE" in str(caught.value)


def test_options_of_attend(pool, numbers):
    q, k = numbers(40), numbers(40)
    outputs = []
    for options in ({}, {"mask": ta.Mask.FULL}, {"window": 4}, {"scale": 0.5}, {"softcap": 2.0}, {"exp": ta.Exp.SAS},
                    {"p": ta.P.S8_119}, {"alibi_slopes": np.float32([1, 2])}, {"sinks": np.float32([1, 2])}):
        with pool.create_plan().step(pool.create_sequence(), 40) as step:
            for layer in range(LAYERS):
                step.append(layer, k, k)
                out = step.attend(layer, q, **options)
        assert not any(np.array_equal(out, other) for other in outputs)
        outputs.append(out)


def test_pools_sequences_files(make_pool, tmp_path):
    numerics = ta.Numerics(profile=ta.Profile.PAPER, sink_blocks=2, hadamard=True, k_offset=np.ones((LAYERS, HEADS, DIM)))
    bits = np.full((LAYERS, HEADS), 4, np.uint8)
    bits[0, 1] = 2
    pool = make_pool(numerics=numerics, k_bits=bits, v_bits=bits)
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 200)
    seq.verify()
    fork = seq.fork()
    fork.truncate(130)
    fork.set_priority(2)
    assert pool.stats().sequences == 2 and pool.stats().asdict()["tokens"] == 330
    what = pool.describe()
    assert what.numerics.sink_blocks == 2 and what.numerics.profile is ta.Profile.PAPER and what.numerics.hadamard is True
    assert np.array_equal(what.k_bits, bits) and (what.numerics.k_offset == 1).all() and what.tiers is None

    seen = []
    seq.save(tmp_path / "seq", progress=lambda done, total: seen.append((done, total)))
    assert seen and seen[-1][0] <= seen[-1][1]
    again = make_pool(numerics=numerics, k_bits=bits, v_bits=bits)
    assert again.load_sequence(tmp_path / "seq").length() == 200
    pool.save(tmp_path / "pool")
    assert {saved: loaded.length() for saved, loaded in again.load(tmp_path / "pool").items()} == {seq.id: 200, fork.id: 130}
    with pytest.raises(ta.ArgumentError):
        pool.save(tmp_path / "pool", ta.SaveFlags.PUBLISHED)
    assert "# EOF" in pool.metrics() and json.loads(pool.metrics(ta.MetricsFormat.JSON))
    with pytest.raises(ta.ArgumentError):
        pool.create_plan().set_stream(8)


def test_exports(make_pool, tmp_path):
    pool = make_pool()
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 200)
    data = seq.export()
    seq.save(tmp_path / "seq")
    assert type(data) is bytes and data == (tmp_path / "seq").read_bytes()
    again = make_pool()
    for same in data, bytearray(data), memoryview(data), np.frombuffer(data, np.uint8):
        imported = again.import_sequence(same)
        assert imported.length() == 200 and len(imported.export()) == len(data)
    assert np.array_equal(feed(again.create_plan(), imported, 3), feed(pool.create_plan(), seq, 3))
    assert again.import_sequence(pool.create_sequence().export()).length() == 0
    before = again.stats().asdict()
    for cut in 0, 100, len(data) - 1:
        with pytest.raises(ta.DataError):
            again.import_sequence(data[:cut])
    bad = bytearray(data)
    bad[len(bad) // 2] ^= 1
    with pytest.raises(ta.DataError) as caught:
        again.import_sequence(bad)
    assert caught.value.kind is ta.Status.CORRUPT and caught.value.block is not None
    bad.append(0)  # it is not held
    with pytest.raises(ta.ArgumentError):
        make_pool(bits=8).import_sequence(data)
    with pytest.raises(BufferError):
        again.import_sequence(memoryview(data)[::2])
    for none in None, 3, "text":
        with pytest.raises(TypeError):
            again.import_sequence(none)
    assert again.stats().asdict() == before


def test_contexts(context):
    info = context.info()
    assert info.threads == 2 and info.device is ta.Device.CPU and "threads=2" in repr(info)
    context.health()
    assert ta.version() >= 100 and ta.abi_version() == 1 and "turboattention" in ta.build_info()
    with pytest.raises(ta.ArgumentError):
        ta.Context(threads=5000)


def test_peer_tier(make_pool):
    peer = ta.Context(threads=1)
    pool = make_pool(tiers=ta.Tiers(peer=peer, peer_bytes=16 << 20))
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 256)
    assert seq.move(ta.Tier.PEER, 1, 2).wait().moved == 2
    assert seq.residency().peer_blocks == 2 and seq.residency().peer_bytes > 0
    tiers = pool.describe().tiers
    assert tiers.peer is peer and tiers.peer_bytes == 16 << 20
    with pytest.raises(ta.ArgumentError):
        make_pool(tiers=ta.Tiers(peer_bytes=16 << 20))


def test_tiers_and_prefixes(make_pool, tmp_path):
    tiers = ta.Tiers(host_bytes=16 << 20, disk_bytes=16 << 20, disk_path=tmp_path / "tier")
    keys = np.arange(96, dtype=np.uint8)
    with make_pool(tiers=tiers) as pool:
        seq = pool.create_sequence()
        feed(pool.create_plan(), seq, 256)
        move = seq.move(ta.Tier.HOST, 1, 2)
        assert move.wait().state is ta.MoveState.DONE and move.query().moved == 2 and move.ticket
        move.cancel()
        assert seq.residency().host_blocks == 2
        assert seq.prefetch(1, 2).wait(60).state is ta.MoveState.DONE
        seq.pin(1, 1)
        assert seq.residency().pinned_blocks == 1
        seq.unpin(1, 1)
        assert pool.tier_stats(ta.Tier.HOST).bytes_budget == 16 << 20 and pool.move_stats().bytes_asked > 0
        assert pool.describe().tiers.disk_path == str(tmp_path / "tier")

        space = pool.create_namespace(bytes(31) + b"s", quota_bytes=1 << 20)
        seq.publish(space, keys)
        events = space.take_events()
        assert [e.kind for e in events] == [ta.PrefixEventKind.RESET] + 3 * [ta.PrefixEventKind.PUBLISHED]
        hashed = space.hash_keys(keys)
        assert all(e.key == hashed[e.index] for e in events[1:])
        match, length = space.match([keys[:32].tobytes(), keys[32:64]])
        assert length == match.length() == 128
        space.flush()
        assert space.stats().entries == 3
        store = {}
        space.attach_store(store, timeout_ms=60000)
        with pytest.raises(ta.StateError):
            space.attach_store(store)
        assert space.flush_store() == 0 and len(store) == 3 and space.store_stats().puts == 3
        other = make_pool().create_namespace(bytes(31) + b"s")
        other.attach_store(store, timeout_ms=60000, write_through=False)
        assert other.load(keys).wait(60).moved == 3
        assert other.match(keys)[1] == 192
        other.detach_store()
        space.detach_store()
        with pytest.raises(ta.StateError):
            space.load(keys)
        with pytest.raises(ta.ArgumentError):
            space.match(b"short")
        del space, match, seq, move  # the file is free when the last object of the pool has gone
    pool = make_pool(tiers=tiers)
    space = pool.create_namespace(bytes(31) + b"s")
    assert space.match(keys)[1] == 192
    space.destroy()
    with pytest.raises(ta.StateError):
        space.stats()


def test_admission_and_suspend(make_pool):
    block = make_pool().stats().token_block_bytes
    pool = make_pool(budget_bytes=8 * block, tiers=ta.Tiers(host_bytes=1 << 20))
    plan, seq, idle = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    seq.reserve(100)
    stats = pool.stats()
    assert 0 < stats.bytes_promised == 8 * block - stats.bytes_free
    assert stats.bytes_reclaimable == 0
    for tokens, wait_ms, error in [(1 << 20, -1, ta.ExhaustedError), (-1, 0, ta.ArgumentError), (1, -2, ta.ArgumentError)]:
        with pytest.raises(error):
            seq.reserve(tokens, wait_ms=wait_ms)
    assert pool.stats().bytes_promised == stats.bytes_promised
    fit = pool.fit([seq, None], [100, 1])
    assert fit.now is True and fit.after_eviction is True and (fit.first_lacking, fit.bytes_lacking) == (-1, 0)
    assert pool.fit(seq, 100).bytes_new == 0  # promised
    lacks = pool.fit([seq, None], [100, 1 << 20])
    assert not lacks.after_eviction and lacks.first_lacking == 1 and lacks.bytes_lacking > 0
    with pytest.raises(ta.ArgumentError):
        pool.fit([seq, seq], 1)
    with pytest.raises(ta.ArgumentError, match="another pool"):
        pool.fit(make_pool().create_sequence(), 1)
    with pytest.raises(TypeError):
        pool.fit([1], 1)

    feed(plan, idle, 70)
    feed(plan, seq, 100)
    assert pool.stats().bytes_promised == 0
    with pytest.raises(ta.ExhaustedError):
        plan.step(seq, 1 << 20, wait_ms=-1)
    with pytest.raises(ta.StateError):
        pool.take_finished_moves()
    descriptor = pool.descriptor()
    suspended = idle.suspend(ta.Tier.HOST)
    assert suspended.wait().moved == 2
    assert select.select([descriptor], [], [], 30)[0]
    assert pool.take_finished_moves() == [suspended.ticket]
    assert idle.residency().device_bytes == 0
    with pytest.raises(ta.ArgumentError):
        idle.suspend(ta.Tier.DEVICE)
    feed(plan, idle, 1)
    assert len(idle) == 71


def test_v_of_its_own_channels(context):
    pool = context.create_pool(layers=1, kv_heads=2, head_dim=48, v_head_dim=32, budget_bytes=1 << 20)
    description = pool.describe()
    assert (description.v_head_dim, description.block_head_dim) == (32, 64)
    groups = (ta.LayerGroup(first=1, layers=1, window=100),)
    windowed = context.create_pool(layers=2, kv_heads=2, head_dim=64, budget_bytes=1 << 20, layer_groups=groups).describe()
    assert windowed.layer_groups == groups and windowed.passed_token_block_bytes > 0
    k, v = np.full((5, 2, 48), 0.5, np.float32), np.full((5, 2, 32), 0.25, np.float32)
    with pool.create_plan().step(pool.create_sequence(), 5) as step:
        step.append(0, k, v)
        out = step.attend(0, k)
    assert out.shape == v.shape and np.abs(out - v).max() < 0.01


def test_layers_of_other_shapes(context):
    groups = (ta.LayerGroup(first=1, layers=1, kv_heads=1, head_dim=128, v_head_dim=96),)
    offset = np.arange(2 * 64 + 128, dtype=np.float32) / 1024
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 64, "budget_bytes": 1 << 20, "layer_groups": groups}
    bits = {"k_bits": np.uint8([8, 4, 2]), "v_bits": np.uint8([4, 4, 8])}
    pool = context.create_pool(**shape, **bits, numerics=ta.Numerics(k_offset=offset))
    what = pool.describe()
    assert what.layer_groups == groups and what.bits == 0 and (what.numerics.k_offset == offset).all()
    assert what.k_bits.tolist() == [8, 4, 2] and what.v_bits.tolist() == [4, 4, 8]
    again = context.create_pool(**shape, k_bits=what.k_bits, v_bits=what.v_bits, numerics=what.numerics).describe()
    assert again.fingerprint == what.fingerprint
    seq = pool.create_sequence()
    with pool.create_plan().step(seq, 70) as step:
        for layer, heads, k_channels, v_channels in (0, 2, 64, 64), (1, 1, 128, 96):
            k, v = np.full((70, heads, k_channels), 0.5, np.float32), np.full((70, heads, v_channels), 0.25, np.float32)
            if layer == 1:
                with pytest.raises(ta.ArgumentError) as caught:
                    step.append(layer, k[..., :64], v[..., :64])
                assert caught.value.kind is ta.Status.SHAPE
            step.append(layer, k, v)
            out = step.attend(layer, k)
            assert out.shape == v.shape and np.abs(out - v).max() < 0.01
        with pytest.raises(ta.ArgumentError):
            step.attend(2, k)
    assert len(seq) == 70
    for wrong in ({"k_bits": np.full(4, 4, np.uint8)}, {"numerics": ta.Numerics(k_offset=np.zeros(255))},
                  {"layer_groups": groups * 2}, {"layer_groups": (ta.LayerGroup(0, 1, head_dim=20),)}):
        with pytest.raises(ta.ArgumentError):
            context.create_pool(**{**shape, **wrong})


def test_forget_retain_describe(pool):
    plan, seq, other = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    feed(plan, seq, 200)
    assert seq.forget(60, 100) == 64, "of block 1, the only whole one"
    assert seq.forget(first=0, n=192) == 128
    where = seq.residency()
    assert (where.dropped_blocks, where.device_blocks, len(seq)) == (3, 1, 200)
    for first, n in (0, 201), (-1, 1), (0, -1), (200, 1):
        with pytest.raises(ta.ArgumentError):
            seq.forget(first, n)
    with pytest.raises(ta.StateError):
        seq.export()

    feed(plan, other, 200)
    other.publish(pool.create_namespace(b"s" * 32), bytes(32))
    other.pin(1, 1)
    other.retain(0, 2, priority=50, duration_ms=1 << 40)
    other.retain(2, 1, priority=3)
    for arguments, error in [((2, 2), ta.StateError), ((2, 3), ta.ArgumentError)]:
        with pytest.raises(error):
            other.retain(*arguments)
    for options in {"priority": 64}, {"duration_ms": -1}, {"duration_ms": (1 << 53) + 1}:
        with pytest.raises(ta.ArgumentError):
            other.retain(0, 1, **options)
    blocks = other.describe_blocks(0, 4)
    assert [b.priority for b in blocks] == [50, 50, 3, 32]
    assert [b.pins for b in blocks] == [0, 1, 0, 0] and [b.owners for b in blocks] == [2, 1, 1, 1]
    assert [b.flags for b in blocks] == [ta.BlockFlags.PUBLISHED, ta.BlockFlags(0), ta.BlockFlags(0), ta.BlockFlags.OPEN]
    assert 1 << 39 < blocks[0].retained_ms <= 1 << 40 and blocks[2].retained_ms == -1
    assert all(b.tier is ta.Tier.DEVICE for b in blocks) and blocks[1].bytes == pool.stats().channel_block_bytes
    other.retain(0, 3)
    assert [b.priority for b in other.describe_blocks(first=0, n=3)] == 3 * [32]
    dropped, = seq.describe_blocks(1, 1)
    assert (dropped.flags, dropped.owners, dropped.bytes) == (ta.BlockFlags.DROPPED, 0, 0)
    places = other.locate_blocks(0, 4)
    assert len(set(places)) == 4 and all(places)
    assert seq.locate_blocks(first=1, n=1) == [None] and other.fork().locate_blocks(0, 4) == places
    assert other.describe_blocks(4, 0) == other.locate_blocks(4, 0) == []
    for first, n in (0, 5), (4, 1), (0, 1 << 60):
        for call in other.describe_blocks, other.locate_blocks:
            with pytest.raises(ta.ArgumentError):
                call(first, n)
    with plan.step(other, 1) as step:
        for call in (lambda: other.forget(0, 1), lambda: other.retain(0, 1), lambda: other.describe_blocks(0, 1),
                     lambda: other.locate_blocks(0, 1)):
            with pytest.raises(ta.StateError) as caught:
                call()
            assert caught.value.kind is ta.Status.BUSY
        step.abort()


def test_where_a_tier_is(make_pool):
    pool = make_pool(tiers=ta.Tiers(host_bytes=16 << 20))
    memory = pool.memory(ta.Tier.HOST)
    assert memory.device_ordinal == -1 and memory.data > 0 and 0 < memory.bytes <= 16 << 20
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 200)
    assert seq.move(ta.Tier.HOST, 1, 1).wait(60).moved == 1
    assert memory.data <= seq.locate_blocks(1, 1)[0] < memory.data + memory.bytes
    for tier in ta.Tier.DEVICE, ta.Tier.DISK, ta.Tier.PEER:
        with pytest.raises(ta.ArgumentError) as caught:
            pool.memory(tier)
        assert caught.value.kind is ta.Status.UNSUPPORTED


def test_shift_and_positions(make_pool, numbers):
    still = np.zeros((LAYERS, DIM // 2))  # turns nothing
    pool = make_pool(rotary=ta.Rotary(still, pairs=ta.RotaryPairs.ADJACENT))
    rotary = pool.describe().rotary
    assert rotary.pairs is ta.RotaryPairs.ADJACENT and rotary.channels == DIM and (rotary.angles == still).all()
    assert rotary.angles.shape == still.shape and make_pool(rotary=rotary).describe().fingerprint == pool.describe().fingerprint
    plan, seq, q = pool.create_plan(), pool.create_sequence(), numbers(1)
    feed(plan, seq, 200)
    fork = seq.fork()

    def ask(of, *positions):
        with plan.step(of, 0, 1, query_positions=positions) as step:
            return step.attend(0, q)

    whole = ask(seq, 199)
    assert not np.array_equal(ask(seq, 100), whole)
    seq.shift(first=64, n=64)
    assert fork.forget(64, 64) == 64 and len(seq) == 200
    shifted = ask(seq, 199)
    assert np.abs(shifted - ask(fork, 199)).max() < 1e-5 and np.abs(shifted - whole).max() > 1e-3
    with pytest.raises(ta.StateError) as caught:
        ask(seq, 100)  # in the gap
    assert caught.value.kind is ta.Status.STATE
    for positions in (), (198, 199), (-1,), (200,):
        with pytest.raises(ta.ArgumentError):
            ask(seq, *positions)
    with pytest.raises(ta.ArgumentError, match="query_positions needs one number for each query token"):
        plan.step([seq, fork], [0, 0], [1, 2], query_positions=np.array([199, 199]))
    for first, n in (60, 64), (64, 60), (64, 192), (-64, 64):
        with pytest.raises(ta.ArgumentError):
            seq.shift(first, n)

    one = make_pool(rotary=ta.Rotary([0.5, 0.25])).describe().rotary  # of all layers
    assert one.channels == 4 and one.angles.tolist() == [[0.5, 0.25]] and one.pairs is ta.RotaryPairs.HALVES
    for wrong in ta.Rotary(np.zeros((LAYERS + 1, 2))), ta.Rotary(np.zeros((LAYERS, 2)), channels=6):
        with pytest.raises(ta.ArgumentError, match="angles") as caught:
            make_pool(rotary=wrong)
        assert caught.value.kind is ta.Status.SHAPE
    with pytest.raises(ta.ArgumentError):
        make_pool(rotary=ta.Rotary([2000.0]))
    plain = make_pool()
    assert plain.describe().rotary is None
    with pytest.raises(ta.ArgumentError) as caught:
        plain.create_sequence().shift(0, 0)
    assert caught.value.kind is ta.Status.UNSUPPORTED


def test_drafts_and_trees(pool, numbers):
    plan, a, b = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    k = numbers(5)

    def begin(**options):
        step = plan.step([a, b], [3, 2], **options)
        for layer in range(LAYERS):
            step.append(layer, k, k)
        return step

    with begin(drafts=True, wait_ms=-1) as step:
        with pytest.raises(ta.ArgumentError):
            step.end([1])
        step.end([2, 0])
    assert (len(a), len(b)) == (2, 0)
    with pytest.raises(ta.ArgumentError):
        begin(tree_parent=[-1, 0, 0])
    step = begin(tree_parent=[-1, 0, 0, -1, -1])
    with pytest.raises(ta.ArgumentError):
        step.end()  # no chain
    step.end([3, 2])
    assert (len(a), len(b)) == (4, 1)
    step = begin()
    with pytest.raises(ta.ArgumentError):
        step.end(1)  # no drafts
    step.abort()
    step = begin(layers_in_order=True)
    with pytest.raises(ta.StateError):
        step.attend(0, k)
    step.abort()
    assert (len(a), len(b)) == (4, 1)


def test_dense_merged_calibrated(context, numbers):
    q, k, v = numbers(8), numbers(32), numbers(32)
    lse = np.empty((8, HEADS), np.float32)
    out = context.attend_dense(q, k, v, lse=lse, mask=ta.Mask.FULL)
    parts, lses = [], []
    for half in (slice(0, 16), slice(16, 32)):
        lses.append(np.empty_like(lse))
        parts.append(context.attend_dense(q, k[half], v[half], lse=lses[-1], mask=ta.Mask.FULL))
    merged_lse = np.empty_like(lse)
    merged = context.merge_states(parts, lses, lse=merged_lse)
    assert np.abs(merged - out).max() < 0.02 and np.abs(merged_lse - lse).max() < 0.01
    two = context.attend_dense(q, k, v, q_offsets=[0, 4, 8], k_offsets=[0, 10, 32], variant=ta.DenseVariant.INT_FLASH)
    assert np.isfinite(two).all() and not np.array_equal(two, out)

    class Lies(list):
        def __len__(self):
            return 2

    for wrong in lses[:1], Lies(lses[:1]), lses + lses[:1], []:
        with pytest.raises(ta.ArgumentError, match="one lse for each part"):
            context.merge_states(parts, wrong)
    assert np.array_equal(context.merge_states(parts, iter(lses)), merged)
    for wrong in [], [0], np.zeros(1, np.int64):
        for options in {"q_offsets": wrong}, {"k_offsets": wrong}, {"q_offsets": wrong, "k_offsets": wrong}:
            with pytest.raises(ta.ArgumentError, match="one number more") as caught:
                context.attend_dense(q, k, v, **options)
            assert caught.value.kind is ta.Status.INVALID

    calibrator = context.create_calibrator(layers=1, kv_heads=HEADS, head_dim=DIM)
    calibrator.observe(0, k, v)
    k_bits, v_bits, k_priority, _ = calibrator.finish(1)
    assert sorted(k_bits[0]) == [2, 4] == sorted(v_bits[0]) and k_priority.shape == (1, HEADS)
    least = calibrator.choose(np.zeros((1, HEADS, 3)), np.zeros((1, HEADS, 3)), 1 << 30)
    assert (np.array(least) == 2).all(), "what costs nothing"
    k_bits, v_bits = calibrator.choose([[[0, 1, 9], [np.inf, 0, 9]]], [[[5, 5, 0], [0, 0, 7]]], 1 << 30)
    assert k_bits.tolist() == [[8, 4]] and v_bits.tolist() == [[2, 4]]
    with pytest.raises(ta.ArgumentError, match="costs are"):
        calibrator.choose([1, 2], [3], 1 << 30)
    with pytest.raises(ta.ArgumentError, match="block_bytes is 1"):
        calibrator.choose(np.zeros((1, HEADS, 3)), np.zeros((1, HEADS, 3)), 1)

    shape = dict(layers=2, kv_heads=2, head_dim=64, layer_groups=[ta.LayerGroup(first=1, layers=1, kv_heads=1, head_dim=128)])
    k_bits, v_bits = context.create_calibrator(**shape).choose(np.zeros((3, 3)), np.zeros((3, 3)), 1 << 30)
    assert k_bits.tolist() == [2, 2, 2] == v_bits.tolist()
    context.create_pool(budget_bytes=1 << 20, k_bits=k_bits, v_bits=v_bits, **shape)
    with pytest.raises(ta.ArgumentError, match="heads of all layers"):
        context.create_calibrator(**shape).choose(np.zeros((2, 2, 3)), np.zeros((2, 2, 3)), 1 << 30)
    for wrong in {"head_dim": 20}, {"layer_groups": [ta.LayerGroup(first=2, layers=1)]}:
        with pytest.raises(ta.ArgumentError):
            context.create_calibrator(**{**shape, **wrong})


def test_groups(make_pool):
    group_id = ta.make_group_id()
    both = threading.Barrier(2, timeout=60)
    outputs, failures = {}, []

    def rank(me):
        context = ta.Context(threads=1)
        group = context.create_group(group_id, rank=me, ranks=2)
        pool = context.create_pool(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, budget_bytes=64 << 20)
        plan, key = pool.create_plan(), bytes(32)
        assert group.wait() is ta.GroupState.READY
        assert group.info().ranks == 2 and group.peer(1 - me).route is ta.PeerRoute.HOST_MEMORY
        group.health()
        space = pool.create_namespace(b"x" * 32)
        space.join(group)
        if me == 0:
            seq = pool.create_sequence()
            feed(plan, seq, 100)
            seq.publish(space, key)
            sent = seq.send(group, 1, tag=5)
            assert sent.wait().state is ta.MoveState.DONE
            assert select.select([group], [], [], 10)[0] and group.take_finished() == [sent.ticket]
            group.receive(pool, 1, tag=77).cancel()
        else:
            received = group.receive(pool, 0, tag=5)
            assert received.take().length() == 100 and received.query().blocks == 2
            with pytest.raises(ta.StateError):
                received.take()
            while space.lookup(group, key, 10)[0].answer is not ta.PrefixAnswer.YES:
                pass
            assert space.fetch(group, key).wait().length == 64
            assert space.match(key)[1] == 64
        spread = pool.create_sequence()
        spread.partition(group, tag=3, output=ta.PartitionOutput.ALL)
        outputs[me] = feed(plan, spread, 200)
        with pytest.raises(ta.PeerError) as caught:
            group.receive(pool, 1 - me, tag=1000).take(0.01)
        assert caught.value.kind is ta.Status.TIMEOUT
        both.wait()
        space.leave(group)
        both.wait()
        group.abort()
        with pytest.raises((ta.PeerError, ta.StateError)):
            group.health()

    def run(me):
        try:
            rank(me)
        except BaseException as failure:
            failures.append(failure)
            both.abort()

    other = threading.Thread(target=run, args=(1,))
    other.start()
    run(0)
    other.join()
    assert not failures, failures
    assert np.array_equal(outputs[0], outputs[1])
