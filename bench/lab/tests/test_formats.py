"""Each format against values that were computed by hand from its definition."""

import numpy as np
import pytest

from lab import formats
from lab.attention import attend


def floats(*values):
    return np.array(values, np.float32)


def one_head(x):
    return x[:, None].astype(np.float32)  # [tokens, d] -> [tokens, 1, d]


def test_e4m3():
    x = floats(0, 1.0625, 1.1875, -300, 464, 1e9, 2**-9, 2**-10, 1.5 * 2**-9, 0.3)
    # 8 steps to the octave, ties to even: 1.0625 lies between 1 and 1.125; 464 above the largest; 2**-9 is the least magnitude
    expected = floats(0, 1, 1.25, -288, 448, 448, 2**-9, 0, 2 * 2**-9, 0.3125)
    assert np.array_equal(formats.e4m3(x), expected)


def test_e4m3_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(1).standard_normal(10000).astype(np.float32) * np.exp2(np.arange(10000) % 20 - 12).astype(np.float32)
    assert np.array_equal(formats.e4m3(x), np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_e2m1():
    x = floats(0.2, 0.25, 0.3, 0.75, 1.25, 1.75, 2.5, -3.5, 5, 7)  # ties: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5
    assert np.array_equal(formats.e2m1(x), floats(0, 0, 0.5, 1, 1, 2, 2, -4, 4, 6))


def test_fp8():
    f = formats.fp8(([448.0, 896.0], [224.0, 1.0]))
    x = floats(1.0625, 300, 1000).reshape(3, 1, 1)
    assert np.array_equal(f.k(x, 0).ravel(), floats(1, 288, 448))
    assert np.array_equal(f.k(x, 1).ravel(), floats(1, 288, 896))  # scale 2: 0.53125 -> 0.5; 150 -> 144; 500 -> 448
    assert np.array_equal(f.v(x[:1], 0).ravel(), floats(1))  # scale 1/2: 2.125 -> 2
    assert f.bits(1000) == 8


def test_nvfp4():
    f = formats.nvfp4(([6 * 448.0], [6 * 448.0]))  # tensor scale 1
    x = np.zeros((1, 1, 32), np.float32)
    x[0, 0, :4] = 12, 1.4, -5.1, 9.9  # block scale 12 / 6 = 2: 6, 0.7, -2.55, 4.95 -> 6, 0.5, -3, 4
    x[0, 0, 16:18] = 6.3, 1.05  # 1.05 -> e4m3 1: 6.3 and 1.05 -> 6 and 1
    expected = np.zeros_like(x)
    expected[0, 0, :4] = 12, 1, -6, 8
    expected[0, 0, 16:18] = 6, 1
    assert np.array_equal(f.k(x, 0), expected) and np.array_equal(f.v(x, 0), expected)
    assert f.bits(1000) == 4.5


def test_int4_per_token():
    x = np.zeros((2, 1, 4), np.float32)
    x[0, 0] = -1, 14, 0.4, 6.6  # scale 1, zero -1: codes 0, 15, 1.4 -> 1, 7.6 -> 8
    x[1, 0] = 5, 5, 5, 5
    f = formats.int4_per_token(4)
    assert np.array_equal(f.k(x, 0)[0, 0], floats(-1, 14, 0, 7)) and np.array_equal(f.v(x, 0)[1, 0], floats(5, 5, 5, 5))
    assert f.bits(1000) == 12 and formats.int4_per_token(64).bits(1000) == 4.5


def test_kivi():
    f = formats.kivi(2, group=2, residual=4)
    x = one_head(np.array([[0, 10, 3, 1], [3, 40, 3.4, 2], [1, 0, 0, 0], [1, 3, 6, 9], [7, 7, 7, 7]]))
    # K: channels of tokens 0 and 1, of 2 and 3; token 4 has no group yet. Scales (max - min) / 3: two tokens are both ends.
    assert np.allclose(f.k(x, 0), x, rtol=1e-3)
    # V: channels 0 and 1, 2 and 3 of each token
    assert np.allclose(f.v(x, 0), x, rtol=1e-3)
    wide = formats.kivi(2, group=4, residual=4)
    # channel 1 of tokens 0-3: 10, 40, 0, 3, scale 40/3: 0.75, 3, 0, 0.225 -> 1, 3, 0, 0
    assert np.allclose(wide.k(x, 0)[:4, 0, 1], [40 / 3, 40, 0, 0], rtol=1e-3)
    # token 3: 1, 3, 6, 9, scale 8/3: 0, 0.75, 1.875, 3 -> 0, 1, 2, 3
    assert np.allclose(wide.v(x, 0)[3, 0], [1, 11 / 3, 19 / 3, 9], rtol=1e-3)
    assert list(f.k_stored(np.arange(10))) == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
    assert list(f.v_stored(np.arange(7))) == [0, 0, 0, 0, 0, 1, 2]
    # 10 tokens: 8 of K and 6 of V at 2 + 32/2 bits, the others 16
    assert f.bits(10) == pytest.approx((14 * 18 + 6 * 16) / 20)


def test_a_query_sees_new_tokens_in_float():
    """Attention with stored and float parts against a loop over the queries, each with the cache of its own."""
    random = np.random.default_rng(2)
    n, d = 600, 16
    q, k, v = random.standard_normal((n, 4, d), np.float32), *random.standard_normal((2, n, 2, d), np.float32)
    f = formats.kivi(2, group=8, residual=40)
    positions = np.arange(n)
    got = attend(q, f.k(k, 0), f.v(v, 0), f.kept(k), f.kept(v), f.k_stored(positions), f.v_stored(positions))
    for i in 0, 1, 39, 40, 41, 79, 80, 255, 256, 599:
        a, b = i // 40 * 40, max(i - 40, 0)
        cache_k = np.concatenate([f.k(k[:a], 0), formats.half(k[a:i + 1])]) if a else formats.half(k[:i + 1])
        cache_v = np.concatenate([f.v(v[:b], 0), formats.half(v[b:i + 1])]) if b else formats.half(v[:i + 1])
        for head in range(4):
            s = np.exp(cache_k[:, head // 2].astype(np.float64) @ q[i, head] / 4)
            assert np.allclose(got[i, head], s @ cache_v[:, head // 2] / s.sum(), atol=1e-5)


def test_lloyd_max():
    # In 3 dimensions a coordinate of a random unit vector is uniform: centroids are the middles of equal parts.
    assert np.allclose(formats.lloyd_max(1, 3), [-0.5, 0.5], atol=1e-5)
    assert np.allclose(formats.lloyd_max(2, 3), [-0.75, -0.25, 0.25, 0.75], atol=5e-5)
    # In many it is normal with variance 1/d: +-sqrt(2/pi) and, for 2 bits, Lloyd's +-0.4528, +-1.5104
    assert np.allclose(formats.lloyd_max(1, 4096) * 64, [-0.79788, 0.79788], atol=1e-3)
    assert np.allclose(formats.lloyd_max(2, 4096) * 64, [-1.5104, -0.4528, 0.4528, 1.5104], atol=2e-3)


def test_turboquant_without_rotation():
    x = one_head(np.array([[3, 0, 4]]))  # norm 5, unit 0.6, 0, 0.8; 2 bits in 3 dimensions: centroids +-0.25, +-0.75
    got = formats.turbo_mse(x, 2, np.eye(3, dtype=np.float32))[0, 0]
    assert np.allclose(np.abs(got), [3.75, 1.25, 3.75], atol=1e-3) and got[0] > 0 and got[2] > 0
    # 1 bit leaves (3, 0, 4) - (2.5, +-2.5, 2.5), of norm sqrt(0.25 + 6.25 + 2.25); the projection is the identity
    coarse = formats.turbo_mse(x, 1, np.eye(3, dtype=np.float32))[0, 0]
    got = formats.turbo_prod(x, 2, np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32))[0, 0]
    assert np.allclose(np.abs(got - coarse), np.sqrt(np.pi / 2) / 3 * np.sqrt(8.75), rtol=1e-3)
    assert np.all((got - coarse) * (x[0, 0] - coarse) > 0)


@pytest.mark.parametrize("bits,distortion", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquant_has_the_distortion_of_its_paper(bits, distortion):
    """Theorem 1 prints 0.36, 0.117, 0.03 and 0.009; these are Max's figures for the normal distribution (1960), to which it tends."""
    x = np.random.default_rng(3).standard_normal((2000, 1, 128)).astype(np.float32)
    f = formats.turboquant(bits, 128, qjl=False)
    assert ((f.v(x, 0) - x) ** 2).sum() / (x**2).sum() == pytest.approx(distortion, rel=0.03)
    assert f.bits(1) == bits + 16 / 128 and formats.turboquant(bits, 128, qjl=True).bits(1) == bits + 24 / 128


def test_qjl_has_no_bias():
    """Theorem 2: inner products with what turbo_prod gives back are right in the mean over projections; turbo_mse's are too small."""
    random = np.random.default_rng(4)
    x = random.standard_normal((1, 1, 64)).astype(np.float32)
    rotation = np.linalg.qr(random.standard_normal((64, 64)))[0].astype(np.float32)
    products = [float((formats.turbo_prod(x, 2, rotation, random.standard_normal((64, 64)).astype(np.float32)) * x).sum() / (x * x).sum())
                for _ in range(1000)]
    assert np.mean(products) == pytest.approx(1, abs=4 * np.std(products) / np.sqrt(1000))
    assert float((formats.turbo_mse(x, 1, rotation) * x).sum() / (x * x).sum()) < 0.8


def test_flashq():
    f = formats.flashq(2, block=2, head_dim=2)
    x = one_head(np.array([[119, 10], [-1, 3], [7, 7]]))  # scale 1; channel 0: -1 to 119, step 40; channel 1: 3 to 10, step 3
    assert np.array_equal(f.k(x, 0)[:2, 0], [[119, 9], [-1, 3]])  # (10 - 3) / 3 = 2.33 -> 2
    assert np.allclose(f.kept(one_head(np.array([[238, 1], [1.19, 0.008]])))[:, 0], floats(238, 0, 1.19, 0.01).reshape(2, 2))
    assert list(f.k_stored(np.arange(5))) == [0, 0, 2, 2, 4]
    assert f.bits(5) == pytest.approx((4 * (2 + 8 + 8) + 8 + 16) / 5)
