#!/usr/bin/env python3
"""Writes trace.csv: a thousand requests in bursts, most of them with one of four beginnings, and a few clients that go away.

usage: examples/serve/make_trace.py > examples/serve/trace.csv
"""

import random

TEXT_BYTES = 20480
BEGINNINGS = (0, 4096, 9000, 14000)

rng = random.Random(31)
now = 0.0
print("arrival_ms,offset,prompt,output,cancel")
for i in range(1000):
    now += rng.expovariate(1 / 25) if i % 100 < 70 else rng.expovariate(1 / 260)  # a burst, then a lull
    prompt = min(1200, max(8, int(rng.lognormvariate(5.2, 0.8))))
    shared = rng.random() < 0.7
    offset = rng.choice(BEGINNINGS) if shared else rng.randrange(TEXT_BYTES - prompt)
    output = min(96, max(1, int(rng.expovariate(1 / 24))))
    cancel = rng.randrange(1, output + 1) if rng.random() < 0.05 else -1
    print(f"{now:.0f},{offset},{prompt},{output},{cancel}")
