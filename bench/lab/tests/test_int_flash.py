"""INT-FlashAttention's table: its formats and its error against values computed by hand, its settings against the library."""

import numpy as np
import pytest

from lab import table_int_flash as table
from lab.formats import e4m3


def floats(*values):
    return np.array(values, np.float32)


def inputs(name, keys=256, rows=8, seed=1):
    random = np.random.default_rng(seed)
    return [table.INPUTS[name](random, (n, table.HEADS, 64)) for n in (rows, keys, keys)]


def test_e5m2():
    x = floats(0, 1.125, 1.375, -300, 0.51, 0.47, 1e9, 2**-16, 1.5 * 2**-16)
    # 4 steps to the octave, ties to even: 1.125 lies between 1 and 1.25, 1.375 between 1.25 and 1.5; 2**-16 is the least magnitude
    assert np.array_equal(table.e5m2(x), floats(0, 1, 1.5, -320, 0.5, 0.5, 57344, 2**-16, 2 * 2**-16))


def test_e5m2_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(1).standard_normal(10000).astype(np.float32) * np.exp2(np.arange(10000) % 30 - 18).astype(np.float32)
    assert np.array_equal(table.e5m2(x), x.astype(ml_dtypes.float8_e5m2).astype(np.float32))


def test_the_authors_error():
    reference = np.array([[[1.0, -2.0, 0.5, 4.0, 0.0, 1.0, 1.0, 1.0]]])
    out = reference + np.array([[[0.1, 0.1, 0.0, -0.4, 1e-5, 0.0, 0.0, 0.0]]])
    # 0.1, 0.05, 0 and 0.1; where the reference is 0, 1e-5 / 1e-5
    assert table.group_errors(out, reference) == pytest.approx([100 * 0.25 / 4, 100 / 4], rel=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_attention_without_rounding_is_exact(scale):
    q, k, v = inputs("N(0, 1)", keys=200)  # the last tile is not full
    out = table.fp8_attention(q, k, v, scale, table.as_is)
    assert np.allclose(out, table.exact(q, k, v, scale), atol=1e-5)


def test_scales_of_fp8():
    q, k, v = inputs("U(0, 1)")
    v = v * np.float32(2**-12)  # below e4m3's normal values: a scale keeps what rounding without one loses
    o = table.exact(q, k, v, 0.125)

    def error(largest):
        return np.abs(table.fp8_attention(q, k, v, 0.125, e4m3, largest) - o).sum() / o.sum()

    assert error(448) < 0.02 < 0.5 < error(None)


@pytest.mark.parametrize("settings", [table.AUTHORS, table.OURS], ids=["authors", "ours"])
def test_columns_are_of_the_settings(settings):
    """Every column attends with the settings' scale: its error is far below what the other settings' scale would make."""
    import turboattention as ta

    q, k, v = (settings.stored(x) for x in inputs("U(-0.5, 0.5)"))
    o = table.exact(q, k, v, settings.scale(64))
    other = next(s for s in (table.AUTHORS, table.OURS) if s is not settings)
    wrong = np.abs(table.exact(q, k, v, other.scale(64)) - o).sum()
    out = table.attend_all(ta.Context(threads=1), settings, q, k, v)
    assert set(out) == set(settings.columns)
    for name, values in out.items():
        assert np.abs(values - o).sum() < wrong / 4, name


def test_verdicts():
    rows = [{"inputs": "a", "keys": 1, "full": 1, "fp8_stored": 10, "fp8_e5m2": 0.5, "less": 90.0},
            {"inputs": "a", "keys": 2, "full": 3, "fp8_stored": 2, "fp8_e5m2": 4, "less": -50.0},
            {"inputs": "b", "keys": 1, "full": 1, "fp8_stored": 10, "fp8_e5m2": 8, "less": 90.0}]
    assert table.verdict(rows, "a") == (
        "Inputs a: reproduces at 1 keys only. Full INT8 against FP8 as the authors run it: 1 keys 90% less, 2 keys 50% more. "
        "With FP8's O in float: 1 keys 100% more, 2 keys 25% less.")
    assert table.verdict(rows, "b").startswith("Inputs b: reproduces. ")
    assert table.verdict(rows[1:2], "a").startswith("Inputs a: does not reproduce. ")
