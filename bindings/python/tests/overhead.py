"""What Python adds to a step of 64 tokens, against the same calls in C, in one process that takes turns.

usage: overhead.py [rounds]    needs a C compiler (cc) and the header (beside this file in the repository)
"""

import ctypes
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

import turboattention as ta

STEP_IN_C = """
#include <turboattention.h>
int step(ta_plan* plan, ta_seq seq, float* x, float* out) {
    ta_error err;
    int32_t n = 64;
    ta_tensor in = ta_tensor_make(x, TA_DTYPE_F32, n, 1, 64), to = ta_tensor_make(out, TA_DTYPE_F32, n, 1, 64);
    return ta_plan_begin(plan, 1, &seq, &n, 0, &err) || ta_append(plan, 0, &in, &in, &err) ||
           ta_attend(plan, 0, &in, &to, 0, 0, &err) || ta_plan_end(plan, &err);
}
int nothing(ta_plan* plan, ta_seq seq, float* x, float* out) { return !plan || !seq || !x || !out; }
"""


def compile_c(folder):
    source, library = folder / "step.c", folder / "step.so"
    source.write_text(STEP_IN_C)
    include = pathlib.Path(__file__).resolve().parents[3] / "include"
    wheel = next(pathlib.Path(ta.__file__).parent.glob("libturboattention.so*"))
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-I", include, source, wheel, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))
    for function in functions.step, functions.nothing:
        function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    return functions


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    context = ta.Context(threads=1)
    pool = context.create_pool(layers=1, kv_heads=1, head_dim=64, bits=8, budget_bytes=1 << 20)
    plan, seq = pool.create_plan(), pool.create_sequence()
    x = np.full((64, 1, 64), 0.5, np.float32)
    out = np.empty_like(x)

    with tempfile.TemporaryDirectory() as folder:
        c = compile_c(pathlib.Path(folder))
    arguments = plan.address, seq.id, x.ctypes.data, out.ctypes.data

    def in_c():
        assert c.step(*arguments) == 0

    def in_python():
        with plan.step(seq, 64) as step:
            step.append(0, x, x)
            step.attend(0, x, out)

    def by_ctypes():  # what in_c takes beside the step
        assert c.nothing(*arguments) == 0

    times = {in_c: [], in_python: [], by_ctypes: []}
    for _ in range(rounds):
        for call, taken in times.items():
            seq.truncate(0)
            start = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - start)
    c_ns, python_ns, empty_ns = (statistics.median(taken) for taken in times.values())
    c_ns -= empty_ns
    print(f"step of 64 tokens, 1 layer, 1 head of 64: C {c_ns:.0f} ns, Python {python_ns:.0f} ns, "
          f"difference {python_ns - c_ns:+.0f} ns")


if __name__ == "__main__":
    main()
