"""Published formats of KV caches, each as the values that it gives back: quantize, then dequantize.

Each follows its paper; what is left out is said at each one and in the table that uses it. Arrays are float32 [tokens, heads, head_dim],
keys after the rotary embedding. Bits are per element, with all scales, zero points and norms, and with what is still float.
"""

from dataclasses import dataclass
from functools import cache
from typing import Callable

import numpy as np


@dataclass(frozen=True)
class Format:
    """k(x, layer), v(x, layer): what the stored tokens give back. k_stored(positions), v_stored(positions): how many of the first
    tokens a query sees as stored; the others, the newest, it sees as kept(x). bits(tokens): of a cache of so many tokens."""

    name: str
    family: str
    source: str
    left_out: str
    k: Callable
    v: Callable
    bits: Callable
    kept: Callable = staticmethod(lambda x: None)
    k_stored: Callable = staticmethod(lambda positions: None)
    v_stored: Callable = staticmethod(lambda positions: None)


def half(x):
    """As stored in float16."""
    return x.astype(np.float16).astype(np.float32)


def round_float(x, mantissa, least_exponent, largest):
    """To the nearest float of so many mantissa bits, ties to even, saturating; below 2**least_exponent the spacing stays the same."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 1, least_exponent) - mantissa).astype(np.float32)
    return np.clip(np.rint(x / step) * step, -largest, largest)


def e4m3(x):
    """OCP 8-bit floating point, arXiv 2209.05433: 4 exponent bits, 3 of mantissa, at most 448."""
    return round_float(x, 3, -6, np.float32(448))


def e2m1(x):
    """OCP Microscaling formats, arXiv 2310.10537: +-0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    return round_float(x, 1, 0, np.float32(6))


def asymmetric(x, bits, axis):
    """Integers of so many bits between the least and the largest value along the axis; scale and zero point are float16."""
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    zero, scale = half(low), half((high - low) / (2**bits - 1))
    codes = np.rint((x - zero) / np.where(scale == 0, 1, scale))
    return np.clip(codes, 0, 2**bits - 1) * scale + zero


def fp8(scales):
    """scales: (K's, V's) lists with a layer's largest magnitude each."""

    def quantizer(largest):
        def quantize(x, layer):
            scale = np.float32(largest[layer] / 448)
            return e4m3(x / scale) * scale

        return quantize

    return Format("FP8 e4m3", "FP8 e4m3",
                  "arXiv 2209.05433; one scale for a layer's K and one for its V, of sample.txt, as vLLM's calibrated ones", "",
                  *map(quantizer, scales), bits=lambda tokens: 8.0)


def nvfp4(scales):
    """scales as for fp8."""

    def quantizer(largest):
        def quantize(x, layer):
            tensor = np.float32(largest[layer] / (6 * 448))
            blocks = x.reshape(*x.shape[:-1], -1, 16)
            scale = e4m3(np.abs(blocks).max(axis=-1, keepdims=True) / 6 / tensor) * tensor
            return (e2m1(blocks / np.where(scale == 0, 1, scale)) * scale).reshape(x.shape)

        return quantize

    return Format("NVFP4", "NVFP4",
                  "arXiv 2509.25149: e2m1, blocks of 16 channels with an e4m3 scale, a float32 scale for a layer's K and one for its V, of "
                  "sample.txt", "random rotation and stochastic rounding, which are for training",
                  *map(quantizer, scales), bits=lambda tokens: 4 + 8 / 16)


def kivi(bits, group, residual=128):
    """K in groups of tokens per channel, V in groups of channels per token. K's tokens stay float16 until there are `residual` of
    them, V's newest `residual` do always."""

    def keys(x, layer):
        n, heads, d = x.shape
        whole = n // group * group
        stored = asymmetric(x[:whole].reshape(-1, group, heads, d), bits, axis=1).reshape(whole, heads, d)
        return np.concatenate([stored, x[whole:]])  # the rest is never seen as stored

    def values(x, layer):
        n, heads, d = x.shape
        return asymmetric(x.reshape(n, heads, -1, group), bits, axis=-1).reshape(x.shape)

    def k_stored(positions):  # what fills the residual is quantized after its own attention
        return positions // residual * residual

    def v_stored(positions):
        return np.maximum(positions - residual, 0)

    def size(tokens):
        share = (k_stored(tokens) + v_stored(tokens)) / (2 * tokens)
        return float(share * (bits + 32 / group) + (1 - share) * 16)

    return Format(f"KIVI-{bits}, g {group}, residual {residual}", "KIVI", "arXiv 2402.02750, algorithm 1; scales and zero points float16",
                  "attention of a prompt over its own float K and V: every token is decoded", keys, values, size, half, k_stored, v_stored)


def int4_per_token(head_dim):
    def quantize(x, layer):
        return asymmetric(x, 4, axis=-1)

    return Format("INT4 per token", "INT4 per token",
                  "KV4 of QServe, arXiv 2405.04532: each token's head has a float16 scale and zero point",
                  "SmoothAttention, which scales channels of K by a calibration", quantize, quantize, lambda tokens: 4 + 32 / head_dim)


@cache
def lloyd_max(bits, d):
    """Codebook of least squared error for a coordinate of a random unit vector in d dimensions, whose density is
    ~ (1 - x^2)^((d - 3) / 2) (TurboQuant, lemma 1)."""
    x = np.linspace(-1, 1, 400001)
    density = np.clip(1 - x * x, 0, None) ** ((d - 3) / 2)
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    mass, moment = mass / mass[-1], moment / mass[-1]
    levels = 2**bits
    centroids = np.interp((np.arange(levels) + 0.5) / levels, mass, x)
    for _ in range(10000):
        edges = np.concatenate([[-1], (centroids[1:] + centroids[:-1]) / 2, [1]])
        m, f = np.interp(edges, x, mass), np.interp(edges, x, moment)
        m[0] = f[0] = 0
        before, centroids = centroids, np.diff(f) / np.diff(m)
        if np.abs(centroids - before).max() < 1e-9:
            break
    return centroids.astype(np.float32)


def turbo_mse(x, bits, rotation):
    """TurboQuant, algorithm 1: the unit vector along x is rotated and each coordinate takes its nearest centroid; norm float16."""
    norm = half(np.linalg.norm(x, axis=-1, keepdims=True))
    unit = x / np.where(norm == 0, 1, norm) @ rotation.T
    centroids = lloyd_max(bits, x.shape[-1])
    codes = np.searchsorted((centroids[1:] + centroids[:-1]) / 2, unit)
    return centroids[codes] @ rotation * norm


def turbo_prod(x, bits, rotation, projection):
    """TurboQuant, algorithm 2: turbo_mse of a bit less, and of what it leaves the signs of a random projection (QJL) and the norm."""
    coarse = turbo_mse(x, bits - 1, rotation)
    rest = x - coarse
    norm = half(np.linalg.norm(rest, axis=-1, keepdims=True))
    signs = np.where(rest @ projection.T < 0, np.float32(-1), np.float32(1))
    return coarse + np.float32(np.sqrt(np.pi / 2) / x.shape[-1]) * norm * (signs @ projection)


def turboquant(bits, head_dim, qjl, seed=1):
    random = np.random.default_rng(seed)
    q, r = np.linalg.qr(random.standard_normal((head_dim, head_dim)))
    rotation = (q * np.sign(np.diag(r))).astype(np.float32)
    projection = random.standard_normal((head_dim, head_dim)).astype(np.float32)

    def values(x, layer):
        return turbo_mse(x, bits, rotation)

    def keys(x, layer):
        return turbo_prod(x, bits, rotation, projection)

    k_norms = 2 if qjl else 1
    return Format(f"TurboQuant, {bits} bits{', QJL on K' if qjl else ''}", "TurboQuant", "arXiv 2504.19874; norms float16",
                  "more bits for outlier channels, entropy coding", keys if qjl else values, values,
                  lambda tokens: bits + (k_norms + 1) / 2 * 16 / head_dim)


def flashq(bits, block, head_dim):
    """TurboAttention's FlashQ, arXiv 2412.08585: blocks of tokens to INT8 with one scale, then channels of a block to fewer bits in
    integers, as docs/numerics.md (2, 3) defines them. Tokens of a block that is not full have 8 bits and a scale each."""

    def stage1(x, axes):
        scale = np.abs(x).max(axis=axes, keepdims=True) / np.float32(119)
        return np.clip(np.rint(x / np.where(scale == 0, 1, scale)), -119, 119), scale

    def kept(x):
        q, scale = stage1(x, -1)
        return q * scale

    def quantize(x, layer):
        n, heads, d = x.shape
        whole = n // block * block
        q, scale = stage1(x[:whole].reshape(-1, block, heads, d), (1, 3))
        low = q.min(axis=1, keepdims=True)
        step = np.maximum(1, np.ceil((q.max(axis=1, keepdims=True) - low) / (2**bits - 1)))
        stored = (np.rint((q - low) / step) * step + low) * scale
        return np.concatenate([stored.reshape(whole, heads, d), x[whole:]])  # the rest is never seen as stored

    def stored(positions):
        return positions // block * block

    def size(tokens):
        share = float(stored(tokens) / tokens)  # 8 bits of step and 8 of zero point for each channel, float32 for the block
        return share * (bits + 16 / block + 32 / (block * head_dim)) + (1 - share) * (8 + 32 / head_dim)

    return Format(f"FlashQ {bits} bits, blocks of {block}", "FlashQ", "arXiv 2412.08585", "", quantize, quantize, size, kept,
                  stored, stored)
