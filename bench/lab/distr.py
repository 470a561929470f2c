"""DistrAttention's groups of channels in numpy, as docs/numerics.md defines them, for blocks of any number of rows."""

from functools import cache

import numpy as np

PROJECTIONS, MAX_ROWS, SEED = 16, 128, 16
MASK = (1 << 64) - 1


def _splitmix64(seed, count):
    words = []
    for i in range(1, count + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
        words.append(z ^ z >> 31)
    return np.array(words, np.uint64)


@cache
def _signs(rows):
    """Of projection n and row r: [PROJECTIONS, rows]. The library has those of MAX_ROWS rows."""
    bits = np.unpackbits(_splitmix64(SEED, PROJECTIONS * rows // 64).view(np.uint8), bitorder="little")
    return (1 - 2.0 * bits).astype(np.float32).reshape(PROJECTIONS, rows)


def order(q):
    """Channels [d] of a block q [rows, d] by hash: channels that follow each other make a group."""
    y = np.zeros((PROJECTIONS, q.shape[1]), np.float32)
    signs = _signs(-(-len(q) // MAX_ROWS) * MAX_ROWS)
    for r in range(len(q)):  # in this order, since float32 sums depend on it
        y += signs[:, r:r + 1] * q[r]
    code = ((y > 0) << np.arange(PROJECTIONS)[:, None]).sum(axis=0)
    for shift in 8, 4, 2, 1:  # place in the reflected Gray code
        code = code ^ code >> shift
    return np.argsort(code, kind="stable")


def sampled(q, group_size, rows=MAX_ROWS, beside=()):
    """q [n, d] in which each channel is replaced by the one that stands for its group. Its scores are DistrAttention's. beside: other
    query heads [n, d] that share the groups, which the library's do not."""
    out = np.empty_like(q)
    for at in range(0, len(q), rows):
        block = q[at:at + rows]
        channels = order(np.concatenate([block, *(other[at:at + rows] for other in beside)]))
        for first in range(0, len(channels), group_size):
            group = channels[first:first + group_size]
            out[at:at + rows, group] = block[:, group[(len(group) - 1) // 2], None]
    return out
