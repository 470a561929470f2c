"""Attention for tinylm.Model: exact, over values that a format has quantized and dequantized, and of the library."""

from contextlib import contextmanager

import numpy as np

ROWS = 128  # query tokens of one matrix product


def exact_weights(s):
    s -= s.max(axis=-1, keepdims=True)
    np.exp(s, out=s)


class FloatAttention:
    """Attention in float32 over a whole text at once, in which each query sees the cache that a decoding engine would have at its
    position: `format` (formats.Format) says which of the earlier tokens are stored as it has them, and which are still float.
    format None: exact attention. weights(s): what a softmax divides by its sum, of scores s [..., keys], in their place."""

    def __init__(self, format=None, weights=exact_weights):
        self.format, self.weights = format, weights
        self.chunk = 1 << 30

    def reset(self):
        pass

    @contextmanager
    def step(self, first, n):
        assert first == 0, "the whole text comes at once"
        yield self._attend

    def bits(self, tokens):
        """Bits per element of a cache of so many tokens, and of a very long one."""
        return (16.0, 16.0) if self.format is None else (self.format.bits(tokens), self.format.bits(1 << 30))

    def _attend(self, layer, q, k, v):
        if self.format is None:
            return attend(q, k, v, weights=self.weights)
        f, positions = self.format, np.arange(len(q))
        return attend(q, f.k(k, layer), f.v(v, layer), f.kept(k), f.kept(v), f.k_stored(positions), f.v_stored(positions),
                      self.weights)


def attend(q, k, v, k_float=None, v_float=None, k_stored=None, v_stored=None, weights=exact_weights):
    """Causal attention of q [n, heads, d] over k, v [n, kv_heads, d], float32. Query i sees tokens j < k_stored[i] of k and the rest of
    k_float, likewise for v; stored is None: all of k and v."""
    n, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    scale = np.float32(1 / np.sqrt(d))
    out = np.empty_like(q)
    k, v, k_float, v_float = (None if x is None else np.ascontiguousarray(x.transpose(1, 0, 2)) for x in (k, v, k_float, v_float))
    for begin in range(0, n, ROWS):
        end = min(begin + ROWS, n)
        rows = np.arange(begin, end)
        future = rows[:, None] < np.arange(begin, end)
        for h in range(kv_heads):
            x = q[begin:end, h * group:(h + 1) * group].transpose(1, 0, 2) * scale  # [group, rows, d]
            s = x @ k[h, :end].T
            if k_stored is not None:
                at = int(k_stored[begin])
                fresh = np.arange(at, end) >= k_stored[begin:end, None]
                s[:, :, at:] = np.where(fresh, x @ k_float[h, at:end].T, s[:, :, at:])
            s[:, :, begin:][:, future] = -np.inf
            weights(s)
            total = s.sum(axis=-1, keepdims=True)
            if v_stored is None:
                o = s @ v[h, :end]
            else:
                at = int(v_stored[begin])
                fresh = np.arange(at, end) >= v_stored[begin:end, None]
                o = np.where(fresh, s[:, :, at:], 0) @ v_float[h, at:end]
                s[:, :, at:][:, fresh] = 0
                o += s @ v[h, :end]
            out[begin:end, h * group:(h + 1) * group] = (o / total).transpose(1, 0, 2)
    return out


class LibraryAttention:
    """The library, fed in chunks as an engine would: a chunk sees its own keys and values at 8 bits, those before it as stored."""

    def __init__(self, model, context, *, max_tokens, chunk=64, numerics=None, **bits):
        """bits: those of Context.create_pool"""
        self.chunk = chunk
        blocks = max_tokens // 64 + 3
        budget = blocks * (2 * 64 * 2 * model.layers * model.kv_heads * model.head_dim + 65536)
        self.pool = context.create_pool(layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim, budget_bytes=budget,
                                        numerics=numerics, **bits)
        self.plan, self.sequence = self.pool.create_plan(), self.pool.create_sequence()
        self.elements = 2 * model.layers * model.kv_heads * model.head_dim

    def reset(self):
        self.sequence.truncate(0)

    @contextmanager
    def step(self, first, n):
        with self.plan.step(self.sequence, n) as step:
            def attend(layer, q, k, v):
                step.append(layer, np.ascontiguousarray(k), np.ascontiguousarray(v))
                return step.attend(layer, np.ascontiguousarray(q))

            yield attend

    def bits(self, tokens):
        """Bits per element, with all metadata: of what the cache holds now, and of full blocks that are not at the sequence's start."""
        stats, pool = self.pool.stats(), self.pool.describe()
        assert stats.tokens == tokens
        block = pool.channel_block_bytes or pool.token_block_bytes
        return 8 * stats.bytes_used / stats.tokens / self.elements, 8 * block / 64 / self.elements
