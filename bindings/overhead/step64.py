"""bindings/overhead/step64.c in Python."""
import time

import numpy as np

import turboattention as ta

TOKENS, DIM, ROUNDS, STEPS = 64, 64, 750, 20


def main():
    pool = ta.Context(threads=1).create_pool(layers=1, kv_heads=1, head_dim=DIM, bits=8, budget_bytes=1 << 20)
    plan, seq = pool.create_plan(), pool.create_sequence()
    x = (np.arange(TOKENS * DIM) * 79 % 2003).astype(np.float32).reshape(TOKENS, 1, DIM) / np.float32(1001) - 1
    out = np.empty_like(x)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter_ns()
        for _ in range(STEPS):
            with plan.step(seq, TOKENS) as step:
                step.append(0, x, x)
                step.attend(0, x, out)
            seq.truncate(0)
        best = min(best, (time.perf_counter_ns() - start) / STEPS)
    print(round(best))


main()
