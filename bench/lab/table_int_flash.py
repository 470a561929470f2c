"""INT-FlashAttention (arXiv 2409.16997), tables 1 and 2: error of O with normal and with uniform inputs."""

import numpy as np

from .formats import e4m3, round_float
from .report import Table

HEADS = 2
TEXT = """Error of O in percent: sum |O - exact| / sum |exact| over {rows} queries of {heads} heads and {draws} draws; exact is float64
attention over the same float32 inputs; every query sees all keys. head_dim {d}, inputs {inputs}."""
INPUTS = {"normal": "N(0, 1)", "uniform": "U(-0.5, 0.5)"}
COLUMNS = {"fp8": "FP8 e4m3", "fp8_e5m2": "FP8 e5m2", "half": "half INT8", "full": "full INT8, P by running maximum",
           "full_page": "full INT8, P by page", "int8_page": "INT8_PAGE"}


def add_options(parser):
    parser.add_argument("--head-dim", type=int, default=64)


def e5m2(x):
    return round_float(x, 2, -14, np.float32(57344))


def exact(q, k, v):
    s = np.einsum("qhd,khd->hqk", q, k, dtype=np.float64, optimize=True) / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v, dtype=np.float64, optimize=True)


def fp8_attention(q, k, v, to_float8, largest, tile=64):
    """FlashAttention whose Q, K, V have one scale each and whose P is rounded in [0, 1] below the running maximum."""

    def stored(x):
        scale = np.float32(np.abs(x).max() / largest)
        return to_float8(x / scale) * scale

    q, k, v = (stored(x).transpose(1, 0, 2) for x in (q, k, v))
    m = np.full((*q.shape[:2], 1), -np.inf, np.float32)
    total, out = np.zeros_like(m), np.zeros_like(q)
    for at in range(0, k.shape[1], tile):
        s = q @ k[:, at:at + tile].transpose(0, 2, 1) / np.float32(np.sqrt(q.shape[-1]))
        before, m = m, np.maximum(m, s.max(axis=-1, keepdims=True))
        p, alpha = np.exp(s - m), np.exp(before - m)
        total = total * alpha + p.sum(axis=-1, keepdims=True)
        out = out * alpha + to_float8(p) @ v[:, at:at + tile]
    return (out / total).transpose(1, 0, 2)


def variants(context):
    import turboattention as ta

    def dense(**options):
        return lambda q, k, v: context.attend_dense(q, k, v, mask=ta.Mask.FULL, **options)

    kinds = ta.DenseVariant
    return {"fp8": lambda q, k, v: fp8_attention(q, k, v, e4m3, 448),
            "fp8_e5m2": lambda q, k, v: fp8_attention(q, k, v, e5m2, 57344),
            "half": dense(variant=kinds.INT_FLASH_HALF),
            "full": dense(variant=kinds.INT_FLASH, p=ta.P.S8_127_RUNNING),
            "full_page": dense(variant=kinds.INT_FLASH),
            "int8_page": dense(variant=kinds.INT8_PAGE)}


def errors(context, kind, keys, d, rows, draws):
    difference, size = dict.fromkeys(COLUMNS, 0.0), 0.0
    for draw in range(draws):
        random = np.random.default_rng([keys, draw])
        shapes = (rows, HEADS, d), (keys, HEADS, d), (keys, HEADS, d)
        q, k, v = (random.standard_normal(shape, np.float32) if kind == "normal" else random.random(shape, np.float32) - np.float32(0.5)
                   for shape in shapes)
        o = exact(q, k, v)
        size += np.abs(o).sum()
        for name, attend in variants(context).items():
            difference[name] += np.abs(attend(q, k, v) - o).sum()
    return {name: float(100 * difference[name] / size) for name in COLUMNS}


def run(options):
    import turboattention as ta

    context = ta.Context(threads=2)
    lengths, rows, draws = ([1024, 2048], 64, 1) if options.short else ([1024, 2048, 4096, 8192, 16384], 256, 4)
    columns = {"keys": ("keys", "d"), **{name: (heading, ".3f") for name, heading in COLUMNS.items()}}
    tables = []
    for number, (kind, inputs) in enumerate(INPUTS.items(), 1):
        table_rows = [{"keys": keys, **errors(context, kind, keys, options.head_dim, rows, draws)} for keys in lengths]
        text = TEXT.format(rows=rows, heads=HEADS, draws=draws, d=options.head_dim, inputs=inputs)
        name = "int_flash" if kind == "normal" else "int_flash_uniform"
        tables.append(Table(name, f"INT-FlashAttention, table {number}: {kind} inputs", columns, table_rows, text,
                            draw=lambda figure, rows=table_rows: draw_lines(rows, figure)))
    less = [[100 * (1 - row["full"] / row["fp8"]) for row in table.rows] for table in tables]
    claim = ", ".join(f"{min(values):.0f} to {max(values):.0f}% with {kind} inputs" for values, kind in zip(less, INPUTS))
    tables[-1].notes = [*NOTES, f"Full INT8 by the running maximum has less error than FP8 e4m3 by {claim}; the paper's abstract says 82%."]
    return tables


NOTES = [
    "Half and full INT8 are `TA_DENSE_INT_FLASH_HALF` and `TA_DENSE_INT_FLASH`: a scale for each row of Q and each token of K, V float or "
    "with one scale. P has 127 levels of the running maximum, as published, or of each page's (the library's default). INT8_PAGE is the "
    "library's own.",
    "FP8: Q, K and V have one scale each, P is rounded below the running maximum, sums are float32.",
    "The figures of the paper's tables were not at hand, nor its head_dim and how it takes the mean of relative errors; the mean of "
    "|difference| / |exact| over elements has no limit, since exact values come as near to 0 as one likes. So only its abstract's claim "
    "can be compared."]


def draw_lines(rows, figure):
    axes = figure.subplots()
    for name, heading in COLUMNS.items():
        axes.plot([row["keys"] for row in rows], [row[name] for row in rows], marker="o", markersize=3, label=heading)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("keys")
    axes.set_ylabel("error of O, %")
    axes.grid(color="#ddd")
    axes.legend(fontsize=7)
