"""What type checkers know of a program: scripts/build-wheel gives this to mypy --strict. It is not run."""

from typing import Any, assert_type

import numpy as np

import turboattention as ta

context = ta.Context(threads=1)
tiers, groups = ta.Tiers(host_bytes=1 << 20), [ta.LayerGroup(1, 1, head_dim=64)]
pool = context.create_pool(layers=2, kv_heads=2, head_dim=64, budget_bytes=1 << 20, tiers=tiers, layer_groups=groups)
k = np.zeros((3, 2, 64), np.float32)


def attend(seq: ta.Sequence, array: ta.Array, keys: ta.Keys) -> Any:
    with pool.create_plan().step([seq], [3]) as step:
        assert_type(step, ta.Step)
        step.append(0, k, array)
        return step.attend(0, k)


try:
    attend(pool.create_sequence(), k, [bytes(32)])
except ta.ExhaustedError as error:
    assert_type(error, ta.ExhaustedError)
except ta.Error as error:
    assert_type((error.kind, error.bytes, error.tier), tuple[ta.Status, int | None, ta.Tier | None])
assert_type(pool.describe(), ta.PoolDescription)
assert_type(pool.create_sequence().move(ta.Tier.HOST, 0, 0).wait(), ta.MoveInfo)
