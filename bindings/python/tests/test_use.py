"""Lifetimes, callbacks, signals, fork, threads, leaks: what wrong use and the rest of a program may do."""

import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import HEADS, LAYERS, DIM, feed

import turboattention as ta


def test_parents_may_go_first(numbers):
    context = ta.Context(threads=2)
    pool = context.create_pool(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, budget_bytes=64 << 20)
    plan, seq = pool.create_plan(), pool.create_sequence()
    del context, pool
    gc.collect()
    feed(plan, seq, 70)
    step = plan.step(seq, 1)
    plan.close()
    for layer in range(LAYERS):
        step.append(layer, numbers(1), numbers(1))
    step.end()
    assert len(seq) == 71


def test_what_was_closed_says_so(make_pool, context):
    pool = make_pool()
    plan, seq, released = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    released.release()
    ended = plan.step(seq, 0)
    ended.abort()
    closed = make_pool()
    ids = closed.create_sequence()
    closed.close()
    lost = pool.create_plan()
    lost.close()
    x = np.zeros((1, HEADS, DIM), np.float32)
    for call in (released.length, released.release, ended.end, ended.abort, lambda: ended.append(0, x, x), closed.stats, ids.length,
                 lambda: lost.step(seq)):
        with pytest.raises(ta.StateError):
            call()
    context.close()
    with pytest.raises(ta.StateError):
        context.info()
    feed(plan, seq, 5)


def test_a_pool_is_closed_beside_create_plan(make_pool):
    for _ in range(200):
        pool, begun = make_pool(budget_bytes=1 << 20), threading.Event()
        closer = threading.Thread(target=lambda: (begun.wait(), pool.close()))
        closer.start()
        with pytest.raises(ta.StateError):
            while True:
                pool.create_plan()
                begun.set()
        closer.join()


def test_what_was_closed_inside_a_with(context, make_pool):
    with make_pool() as pool:
        pool.close()
    with make_pool() as pool, pool.create_sequence() as seq, pool.create_plan() as plan:
        seq.release(), plan.close()
    with make_pool() as pool, pool.create_sequence():
        pool.close()
    with pytest.raises(KeyError):
        with make_pool() as pool, pool.create_sequence() as seq:
            seq.close(), pool.close()
            raise KeyError
    with context:
        context.close()


def test_close_may_come_again(context, make_pool):
    pool = make_pool()
    plan, seq, left = pool.create_plan(), pool.create_sequence(), pool.create_sequence()
    for handle in [seq, plan, pool, left, context] * 2:  # left goes with its pool
        handle.close()
    with pytest.raises(ta.StateError):
        seq.release()


@pytest.mark.parametrize("wrong", [-1, 2.0, "2", 1 << 70])
def test_a_number_that_is_wrong_is_named(context, pool, wrong):
    good = {"layers": 2, "kv_heads": 1, "head_dim": 64, "budget_bytes": 1 << 20, "bits": 4, "max_sequences": 0, "v_head_dim": 0}
    errors = ta.ArgumentError if isinstance(wrong, int) else TypeError
    for name in good:
        with pytest.raises(errors, match=rf"^{name} "):
            context.create_pool(**good | {name: wrong})
    shape = {"layers": 1, "kv_heads": HEADS, "head_dim": DIM, "v_head_dim": 0}
    for name in shape:
        with pytest.raises(errors, match=rf"^{name} "):
            context.create_calibrator(**shape | {name: wrong})
    x = np.zeros((1, HEADS, DIM), np.float32)
    step = pool.create_plan().step(pool.create_sequence(), 1)
    for call in lambda: step.append(wrong, x, x), lambda: step.attend(wrong, x), \
            lambda: context.create_calibrator(layers=1, kv_heads=HEADS, head_dim=DIM).observe(wrong, x, x):
        with pytest.raises(errors, match="^layer "):
            call()
    step.abort()


def test_steps_commit_or_abort(pool):
    plan, seq = pool.create_plan(), pool.create_sequence()
    with pytest.raises(KeyError):
        with plan.step(seq, 5):
            raise KeyError
    with pytest.raises(ta.StateError):  # an append is lacking: the step is aborted, and the plan can go on
        with plan.step(seq, 5):
            pass
    with plan.step(seq, 5) as step:
        step.abort()
    plan.step(seq, 5)  # dropped
    with pytest.raises(ta.StateError):
        with plan.step(seq), plan.step(seq):
            pass
    feed(plan, seq, 3)
    plan.step(seq, np.int64(2), n_query=np.array([1])).abort()
    assert len(seq) == 3


def test_ids_of_another_pool_are_refused(make_pool):
    a, b = make_pool(), make_pool()
    seq_a, seq_b = a.create_sequence(), b.create_sequence()
    with pytest.raises(ta.ArgumentError):
        a.create_plan().step(seq_b, 1)
    with pytest.raises(ta.ArgumentError):
        a.create_plan().step([seq_a, seq_b], 1)
    with pytest.raises(ta.ArgumentError):
        seq_a.publish(b.create_namespace(b"s" * 32), b"")
    with pytest.raises(TypeError):
        a.create_plan().step(seq_a.id, 1)
    with pytest.raises(ta.ArgumentError):
        a.create_plan().step([seq_a], [1, 2])


def test_exceptions_in_callbacks(make_pool, tmp_path, capfd):
    pool = make_pool()
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 200)

    def fail(*_):
        raise LookupError("of the caller")

    with pytest.raises(LookupError):
        seq.save(tmp_path / "file", progress=fail)
    with pytest.raises(ta.StateError) as caught:
        seq.save(tmp_path / "file", progress=lambda done, total: False)
    assert caught.value.kind is ta.Status.CANCELLED and not os.listdir(tmp_path)

    unraisable, hook = [], sys.unraisablehook
    sys.unraisablehook = unraisable.append
    try:
        tiers = ta.Tiers(host_bytes=1 << 20, disk_bytes=1 << 20, disk_path=tmp_path / "tier")
        ta.Context(log=fail, log_level=ta.LogLevel.DEBUG).create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20,
                                                                     tiers=tiers).close()
    finally:
        sys.unraisablehook = hook
    assert all(isinstance(u.exc_value, LookupError) for u in unraisable)


def test_a_store_that_raises_has_failed(pool, monkeypatch):
    class Broken:
        def fail(self, *_):
            raise LookupError("of the store")

        get = pop = __contains__ = __setitem__ = fail

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: unraisable.append(u.exc_type))
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 100)
    space = pool.create_namespace(bytes(31) + b"s")
    space.attach_store(Broken(), timeout_ms=60000)
    seq.publish(space, [bytes(32)])
    assert space.flush_store(0.1) == 1
    info = space.load([bytes(31) + b"1"]).wait(60)
    assert info.state is ta.MoveState.DONE and info.moved == 0
    stats = space.store_stats()
    assert stats.calls_failed > 0 and stats.puts == 0
    space.detach_store()
    assert unraisable and set(unraisable) == {LookupError}
    assert space.match([bytes(32)])[1] == 64  # the pool is as it was


@pytest.mark.parametrize("yes, no", [(1, 0), (np.True_, np.False_), ([0], [])])
def test_a_store_may_say_in_its_own_way_what_it_has(pool, yes, no):
    class Store(dict):
        def __contains__(self, key):
            return yes if super().__contains__(key) else no

    store, keys = Store(), [bytes(32)]
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 100)
    space = pool.create_namespace(bytes(31) + b"s")
    space.attach_store(store, timeout_ms=60000)
    seq.publish(space, keys)
    assert space.flush_store(30) == 0 and len(store) == 1
    stats = space.store_stats()
    assert stats.puts == 1 and stats.calls_failed == 0


def test_a_store_of_c(pool):
    class Item(ctypes.Structure):
        _fields_ = [("key", ctypes.POINTER(ctypes.c_ubyte)), ("data", ctypes.c_void_p), ("bytes", ctypes.c_uint64),
                    ("result", ctypes.c_int32), ("reserved", ctypes.c_int32)]

    function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(Item), ctypes.c_uint64, ctypes.c_int64)
    release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    class Store(ctypes.Structure):
        _fields_ = [("struct_size", ctypes.c_uint32), ("reserved", ctypes.c_uint32), *((name, function) for name in
                    ("exists", "get", "put", "remove")), ("user", ctypes.c_void_p), ("release", release)]

    def put(user, items, n, nanoseconds):
        for i in range(n):
            there[bytes(items[i].key[:32])] = ctypes.string_at(items[i].data, items[i].bytes)
            items[i].result = 1  # TA_STORE_DONE
        return 0

    there, released, absent = {}, [], function(lambda *_: 0)
    store = Store(ctypes.sizeof(Store), 0, absent, absent, function(put), absent, 7, release(released.append))
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 100)
    space = pool.create_namespace(bytes(31) + b"s")
    for wrong in {}, {"store": {}, "address": ctypes.addressof(store)}:
        with pytest.raises(ta.ArgumentError, match="a store or the address"):
            space.attach_store(**wrong)
    space.attach_store(address=ctypes.addressof(store), timeout_ms=60000)
    seq.publish(space, bytes(32))
    assert space.flush_store(30) == 0 and len(there) == 1 and not released
    with pytest.raises(ta.StateError):
        space.attach_store(address=ctypes.addressof(store))
    assert released == [7]
    space.detach_store()
    assert released == [7, 7]


def test_log_is_delivered_and_let_go(tmp_path):
    class Log:
        lines = []

        def __call__(self, level, message):
            self.lines.append((level, message))

    import weakref
    log = Log()
    watch = weakref.ref(log)
    context = ta.Context(log=log, log_level=ta.LogLevel.DEBUG, threads=1)
    (tmp_path / "tier").write_bytes(b"")
    pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20,
                               tiers=ta.Tiers(host_bytes=1 << 20, disk_bytes=1 << 22))
    del log
    gc.collect()
    assert watch() is not None
    del context, pool
    gc.collect()
    assert watch() is None
    assert all(isinstance(level, ta.LogLevel) and message for level, message in Log.lines)


def test_memory_by_functions_of_c():
    libc = ctypes.CDLL(None)
    libc.aligned_alloc.restype = ctypes.c_void_p
    libc.aligned_alloc.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    taken = []

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    def allocate(size, alignment, user):
        memory = libc.aligned_alloc(alignment, (size + alignment - 1) // alignment * alignment)
        taken.append(memory)
        return memory

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)
    def deallocate(memory, size, alignment, user):
        taken.remove(memory)
        libc.free(memory)

    address = [ctypes.cast(f, ctypes.c_void_p).value for f in (allocate, deallocate)]
    context = ta.Context(threads=1, allocator=ta.Allocator(*address))
    pool = context.create_pool(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, budget_bytes=1 << 22)
    feed(pool.create_plan(), pool.create_sequence(), 70)
    assert taken
    del context, pool
    gc.collect()
    assert not taken
    with pytest.raises(ta.ArgumentError):
        ta.Context(allocator=ta.Allocator(0, 0))


def two_ranks():
    """Of this process: two pools and the groups that join them."""
    group_id = ta.make_group_id()
    contexts = [ta.Context(threads=1) for _ in range(2)]
    groups = [context.create_group(group_id, rank=i, ranks=2) for i, context in enumerate(contexts)]
    for group in groups:
        assert group.wait(60) is ta.GroupState.READY
    return [context.create_pool(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, budget_bytes=64 << 20) for context in contexts], groups


def test_a_receive_that_nobody_takes():
    pools, (sender, receiver) = two_ranks()
    seq = pools[0].create_sequence()
    feed(pools[0].create_plan(), seq, 100)
    seq.send(sender, 1, tag=0)
    received = receiver.receive(pools[1], 0, tag=0)
    assert received.wait(60).state is ta.MoveState.DONE and pools[1].stats().sequences == 1
    del received
    assert pools[1].stats().sequences == 0
    for tag in range(1, 20):  # dropped while it goes on
        seq.send(sender, 1, tag)
        receiver.receive(pools[1], 0, tag)
    end = time.monotonic() + 60
    while pools[1].stats().sequences and time.monotonic() < end:
        pass
    assert pools[1].stats().sequences == 0
    lonely = receiver.receive(pools[1], 0, tag=77).ticket  # nobody sends
    while lonely not in receiver.take_finished():
        assert select.select([receiver], [], [], 10)[0]
    taken = receiver.receive(pools[1], 0, tag=78)
    seq.send(sender, 1, tag=78)
    with taken.take(60) as got:
        del taken
        gc.collect()
        assert len(got) == 100


def test_a_sequence_moves_away_inside_a_with():
    pools, (sender, receiver) = two_ranks()
    with pools[0].create_sequence() as seq:
        feed(pools[0].create_plan(), seq, 100)
        sent = seq.send(sender, 1, 5, ta.SendMode.MOVE)
        with receiver.receive(pools[1], 0, 5).take(60):
            assert sent.wait(60).state is ta.MoveState.DONE
        with pytest.raises(ta.StateError) as caught:
            seq.length()
        assert caught.value.kind is ta.Status.STALE


@pytest.mark.parametrize("wait", ["group", "transfer", "lookup"])
def test_waits_end_at_a_signal(wait):
    """As Ctrl-C: the handler's exception leaves the wait."""
    context = ta.Context(threads=1)
    pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20)
    group_id = ta.make_group_id()
    group = context.create_group(group_id, rank=0, ranks=2)
    space = pool.create_namespace(b"s" * 32)
    if wait != "group":
        other = ta.Context(threads=1).create_group(group_id, rank=1, ranks=2)
        group.wait(), other.wait()
        space.join(group)
    waits = {"group": group.wait, "transfer": lambda: group.receive(pool, 1, 1).take(), "lookup": lambda: space.lookup(group, bytes(32), None)}

    def on_alarm(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        start = time.monotonic()
        try:
            while wait == "lookup":  # it may be answered before
                waits[wait]()
            waits[wait]()
            pytest.fail("not interrupted")
        except KeyboardInterrupt:
            pass
        assert time.monotonic() - start < 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_save_ends_at_a_signal(make_pool, tmp_path):
    pool = make_pool(budget_bytes=256 << 20)
    seq = pool.create_sequence()
    feed(pool.create_plan(), seq, 64 * 200)

    def on_alarm(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, on_alarm)
    try:
        with pytest.raises(KeyboardInterrupt):
            seq.save(tmp_path / "file", progress=lambda done, total: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not os.listdir(tmp_path)


def test_a_child_process_is_refused():
    """In a process without threads of pytest or numpy's tests."""
    program = """
import os, turboattention as ta
context = ta.Context()
pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20)
seq, plan = pool.create_sequence(), pool.create_plan()
step = plan.step(seq, 1)
child = os.fork()
if child == 0:
    refused = 0
    for call in pool.create_sequence, seq.length, context.info, seq.fork, lambda: plan.step(seq, 1), step.abort:
        try:
            call()
        except ta.StateError as error:
            refused += error.kind is ta.Status.FORKED
    del step, seq, plan, pool, context
    fresh = ta.Context().create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20)
    os._exit(0 if refused == 6 and fresh.create_sequence().length() == 0 else 1)
assert os.waitpid(child, 0)[1] == 0
step.abort()
assert seq.length() == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_child_exits_that_was_forked_during_a_callback():
    """The child lacks the thread that was in the store then."""
    program = """
import os, threading, turboattention as ta
inside, forked = threading.Event(), threading.Event()
class Store(dict):
    def get(self, key, default=None):
        inside.set()
        forked.wait(60)
    def __contains__(self, key):
        self.get(key)
pool = ta.Context(threads=1).create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20)
space = pool.create_namespace(bytes(31) + b"s")
space.attach_store(Store(), timeout_ms=60000)
move = space.load([bytes(32)])
inside.wait()
child = os.fork()
if child:
    forked.set()
    move.wait()
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        assert done.wait(60) == 0
    finally:
        if done.poll() is None:
            os.killpg(done.pid, signal.SIGKILL)


def test_the_end_of_the_interpreter():
    """Objects that are alive, threads that log: no crash, no hang."""
    program = """
import turboattention as ta
lines = []
context = ta.Context(log=lambda *line: lines.append(line), log_level=ta.LogLevel.DEBUG)
pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=1 << 20, tiers=ta.Tiers(host_bytes=1 << 20))
group = context.create_group(ta.make_group_id(), rank=0, ranks=2)
step = pool.create_plan().step(pool.create_sequence(), 1)
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@pytest.mark.parametrize("call", ["wait", "attend", "save", "callback"])
def test_a_daemon_thread_at_the_end_of_the_interpreter(call, tmp_path):
    """It comes back from the library, or from a callback, while the interpreter ends: the process exits as if it were not there."""
    program = """
import sys, threading, time
import numpy as np, turboattention as ta
context = ta.Context(threads=1)
pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, budget_bytes=8 << 20)
group = context.create_group(ta.make_group_id(), rank=0, ranks=2)  # the other rank never comes
seq, x, inside = pool.create_sequence(), np.ones((4096, 1, 64), np.float32), threading.Event()
with pool.create_plan().step(seq, len(x)) as step:
    step.append(0, x, x)
def progress(done, total):
    inside.set()
    time.sleep(0.02)
def work():
    number = 0
    while True:
        if sys.argv[1] == "wait":
            group.wait(0.05)
        elif sys.argv[1] == "attend":
            context.attend_dense(x, x, x)
        else:
            number += 1
            seq.save(sys.argv[2] + "/%d" % number, progress=progress if sys.argv[1] == "callback" else None)
        inside.set()
class Ends:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # without the GIL: the daemon thread asks for it meanwhile
sys.ends = Ends()
threading.Thread(target=work, daemon=True).start()
assert inside.wait(60)
"""
    done = subprocess.run([sys.executable, "-c", program, call, tmp_path], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)


def test_threads_share_a_pool(pool):
    first = pool.create_sequence()
    feed(pool.create_plan(), first, 130)
    alone = feed(pool.create_plan(), first.fork(), 10, seed=7)
    wrong = []

    def work():
        plan = pool.create_plan()
        for _ in range(20):
            if not np.array_equal(feed(plan, first.fork(), 10, seed=7), alone):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert pool.stats().sequences == 1


def test_a_plan_that_threads_fight_for(pool, numbers):
    """One thread closes, releases and aborts what another uses: calls raise Error or succeed, nothing crashes."""
    stop = time.monotonic() + 2
    x = numbers(1)
    box = {}

    def renew():
        box["plan"], box["seq"] = pool.create_plan(), pool.create_sequence()

    renew()
    other = []

    def work(seed):
        random = np.random.default_rng(seed)
        while time.monotonic() < stop:
            try:
                match random.integers(8):
                    case 0:
                        box["plan"].close()
                    case 1:
                        box["seq"].release()
                    case 2:
                        box["step"].abort()
                    case 3:
                        box["step"].end()
                    case 4:
                        renew()
                    case _:
                        box["step"] = box["plan"].step(box["seq"], 1)
                        for layer in range(LAYERS):
                            box["step"].append(layer, x, x)
                            box["step"].attend(layer, x)
            except (ta.Error, KeyError):
                pass
            except BaseException as error:
                other.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not other
    box.clear()
    gc.collect()
    assert pool.stats().sequences == 0


def test_the_gil_is_free_while_the_library_works(context):
    """Another thread goes on while this one computes, or waits."""
    ticks = 0
    done = threading.Event()

    def count():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            time.sleep(0.001)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        group = context.create_group(ta.make_group_id(), rank=0, ranks=2)  # the other rank never comes
        before = ticks
        group.wait(0.3)
        assert ticks - before > 10
        tokens, seconds = 1024, 0
        while seconds < 0.3:
            tokens *= 2
            x = np.ones((tokens, HEADS, DIM), np.float32)
            before, start = ticks, time.monotonic()
            context.attend_dense(x, x, x)
            seconds = time.monotonic() - start
        assert ticks - before > 10
    finally:
        done.set()
        counter.join()


@pytest.mark.parametrize("steps", [int(os.environ.get("TA_STEPS", 100_000))])
def test_steps_take_constant_memory(steps):
    """TA_STEPS=1000000 for the long run."""

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    context = ta.Context(threads=1)
    pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, bits=8, budget_bytes=1 << 20)
    plan, seq = pool.create_plan(), pool.create_sequence()
    x = np.zeros((1, 1, 64), np.float32)
    out = np.empty_like(x)
    for i in range(steps):
        if i == 2000:
            gc.collect()
            before = resident()
        with plan.step(seq, 1) as step:
            step.append(0, x, x)
            if i % 16 == 0:
                step.attend(0, x, out)
        if i % 128 == 127:
            seq.truncate(0)
        if i % 100 == 99:
            seq.fork(), pool.stats(), seq.residency()
            with pytest.raises(ta.Error):
                seq.truncate(-1)
    gc.collect()
    assert resident() - before < 2 << 20
