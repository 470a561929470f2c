"""The groups in numpy are those of the library."""

import numpy as np
import pytest

from lab import distr, table_distr


def test_order_by_hand():
    # One row: bit n of a channel's code is +-q > 0. Channels of one sign share a code; within one they stay in order.
    channels = distr.order(np.array([[1, -1, 2, -3, 0]], np.float32))
    positive, negative, zero = [0, 2], [1, 3], [4]
    places = {tuple(group): list(channels).index(group[0]) for group in (positive, negative, zero)}
    for group in positive, negative, zero:
        assert list(channels[places[tuple(group)]:][:len(group)]) == group
    assert places[(4,)] == 0  # no bit is set: the first of the Gray code


def test_sampled_by_hand():
    q = np.array([[5, -1, 4, -3, 3]], np.float32)
    channels = list(distr.order(q))
    expected = q.copy()
    for first in range(0, 5, 2):
        group = channels[first:first + 2]
        expected[0, group] = q[0, group[0]]
    assert np.array_equal(distr.sampled(q, 2), expected)


@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("group_size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_the_library_makes_the_same_groups(d, group_size, rows):
    context = pytest.importorskip("turboattention").Context(threads=2)
    random = np.random.default_rng(5)
    q, k, v = random.standard_normal((3, 300, 1, d), np.float32)
    q[:, 0, d // 2:] = q[:, 0, :d // 2] + q[:, 0, d // 2:] / 4  # some channels are alike
    for causal in False, True:
        got = table_distr.by_library(context, q, k, v, group_size, rows, causal)
        _, expected = table_distr.exact(distr.sampled(q[:, 0], group_size, rows)[:, None], k, v, causal)
        assert np.abs(got - expected).max() < 2e-5
