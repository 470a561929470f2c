"""SAS by hand, and head maps."""

import numpy as np
import pytest

from lab import table_turbo


def test_sas():
    x = -np.array([0, 1, 0.5, 6, 6.01, np.inf], np.float32)
    half = 0.9996 - 0.9922 / 2 + 0.4626 / 4 - 0.1025 / 8
    assert np.allclose(table_turbo.sas(x), [0.9996, 0.9996 * np.exp(-1), half, 0.9996 * np.exp(-6), 0, 0], rtol=1e-5)


def test_weights_are_below_the_maximum_so_far():
    """Tiles of two keys: -7 is the first tile's maximum and stays, though it is more than 6 below the last one."""
    s = np.array([[-7, -7.5, 0, -7, -np.inf, -np.inf]], np.float32)
    table_turbo.sas_weights(s, tile=2)
    first = np.float32(0.9996)
    assert np.allclose(s, [[first * np.exp(-7), table_turbo.sas(np.float32(-0.5)) * np.exp(-7), first, 0, 0, 0]], rtol=1e-5)


@pytest.mark.parametrize("ranking", table_turbo.RANKINGS)
def test_half_of_the_heads_have_2_bits(ranking):
    pytest.importorskip("turboattention")
    both = np.stack(list(table_turbo.head_map(ranking).values()))
    assert both.dtype == np.uint8 and both.shape == (2, 6, 2) and (both == 2).sum() == 12 == (both == 4).sum()
