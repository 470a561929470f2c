import numpy as np
import pytest

import turboattention as ta

LAYERS, HEADS, DIM = 2, 2, 64


@pytest.fixture
def context():
    return ta.Context(threads=2)


@pytest.fixture
def make_pool(context):
    def make(**options):
        return context.create_pool(**{"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "bits": 4, "budget_bytes": 64 << 20,
                                      **options})

    return make


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture
def numbers():
    random = np.random.default_rng(1)
    return lambda tokens, heads=HEADS: random.standard_normal((tokens, heads, DIM), np.float32)


def feed(plan, sequence, n, seed=1):
    """Appends n tokens in all layers; returns the last layer's output."""
    random = np.random.default_rng(seed)
    q, k, v = (random.standard_normal((n, HEADS, DIM), np.float32) for _ in range(3))
    with plan.step(sequence, n) as step:
        for layer in range(LAYERS):
            step.append(layer, k, v)
            out = step.attend(layer, q)
    return out
