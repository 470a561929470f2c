"""KV formats at equal true bits on a small language model: KL of its predictions to those of exact attention."""

import json
from functools import cache

import numpy as np

from . import evaluate, formats, tinylm
from .attention import FloatAttention, LibraryAttention
from .report import Table

OURS = ["ours, 8 bits", "ours, K 8, V 4", "ours, K 8, V 2", "ours, 4 bits", "ours, K 4, V 2", "ours, K 2, V 4", "ours, mixed 4/2",
        "ours, 2 bits"]
TEXT = """KL(exact || this cache) of the predictions in bits per byte, the mean over {positions:,} positions; +- is its standard error, from
runs of neighbouring blocks of 256 positions. Change of the loss of {exact:.5f} bits per byte. Retrieval: prompts of which every byte of
the answer is the likeliest one. Bits per element with all scales, zero points, norms and padding, and with the tokens that are
still float (KIVI's residual) or stay at 8 bits (our first block), after {tokens} tokens; "long context" is without these. Text:
{windows} windows of {tokens} bytes of {text}. Every query sees the cache that a decoding engine has at its position (ours: in
steps of 64 tokens, which see their own keys and values at 8 bits)."""

STUDY = ("Another study, with a model of 28 M parameters, head_dim 128 and a context of 8k, found at about 4.4 bits: ours .00065, KIVI-4 "
         "(g 64) .00070, INT4 per token .00136, TurboQuant .00168, NVFP4 .00196.")


def add_options(parser):
    tinylm.add_options(parser)
    parser.add_argument("--only", default="", help="rows whose name has this text, and exact")


@cache
def observed():
    """(K, V) of each layer over a window of sample.txt"""
    seen = []

    class Watched(FloatAttention):
        def _attend(self, layer, q, k, v):
            seen.append((k, v))
            return super()._attend(layer, q, k, v)

    tinylm.predict(tinylm.Model(), Watched(), tinylm.read_windows(tinylm.MODEL / "sample.txt", 1)[0])
    return seen


def scales():
    """Largest magnitude of K and of V in each layer, for formats that have one scale for all."""
    return [[float(np.abs(x).max()) for x in of_layers] for of_layers in zip(*observed())]


def constant_share():
    """Of the square of K that the mean of each channel has."""
    keys = [k for k, _ in observed()]
    return float(sum((k.mean(axis=0) ** 2).sum() for k in keys) / sum((k**2).sum(axis=(1, 2)).mean() for k in keys))


def published(head_dim=64, of_scales=((), ())):
    return [formats.fp8(of_scales), formats.kivi(4, 32), formats.kivi(4, 64), formats.kivi(4, 64, residual=64),
            formats.int4_per_token(head_dim), formats.turboquant(4, head_dim, qjl=False), formats.turboquant(4, head_dim, qjl=True),
            formats.nvfp4(of_scales), formats.kivi(2, 32), formats.kivi(2, 64), formats.kivi(2, 64, residual=64),
            formats.turboquant(2, head_dim, qjl=False), formats.turboquant(2, head_dim, qjl=True)]


def make_attention(name, model):
    if name not in OURS:
        return FloatAttention(next(f for f in published(model.head_dim, scales()) if f.name == name))
    import turboattention as ta

    if "mixed" in name:
        bits = {key: np.array(value, np.uint8) for key, value in json.loads((tinylm.MODEL / "head_map.json").read_text()).items()}
    elif name.endswith("bits"):
        bits = {"bits": int(name.split()[1])}
    else:
        k, v = (int(part.split()[1]) for part in name.split(", ")[1:])
        bits = {key: np.full((model.layers, model.kv_heads), value, np.uint8) for key, value in (("k_bits", k), ("v_bits", v))}
    return LibraryAttention(model, ta.Context(threads=1), max_tokens=tinylm.WINDOW, **bits)


def run(options):
    windows, prompts = tinylm.texts(options)
    others = {f.name: f for f in published()}
    names = [name for name in [*OURS, *others] if options.only in name]
    rows = evaluate.rows(__name__, names, windows, prompts, options.jobs)
    for row in rows:
        row["retrieval"] = f"{row['found']}/{row['prompts']}"
    columns = {"name": ("format", ""), "bits": ("bits", ".2f"), "bits_long": ("long context", ".2f"), "kl": ("KL to exact", ".5f"),
               "kl_error": ("+-", ".5f"), "change": ("loss, %", "+.2f"), "retrieval": ("retrieval", ">")}
    text = TEXT.format(positions=sum(len(w) - 1 for w in windows), exact=rows[0]["loss"], tokens=len(windows[0]), windows=len(windows),
                       text=options.text.name)
    notes = dict.fromkeys(f"{f.family}: {f.source}." + (f" Left out: {f.left_out}." if f.left_out else "")
                          for f in others.values() if f.name in names)
    notes = [*notes,
             f"{100 * constant_share():.0f}% of the square of this model's keys is a constant of each channel. Formats with a scale or "
             "norm for each token pay for it, those with one for each channel do not.", STUDY]
    return [Table("formats", "Formats at equal true bits", columns, rows, text, notes, lambda figure: draw(rows, figure))]


def draw(rows, figure):
    figure.set_size_inches(9, 5.5)
    axes = figure.subplots()
    families = {f.name: f.family for f in published()}
    points = {}
    for row in rows[1:]:
        points.setdefault(families.get(row["name"], "ours"), []).append((row["bits"], row["kl"], row["kl_error"]))
    for (family, values), marker in zip(points.items(), "osD^v<>"):
        x, y, error = zip(*values)
        axes.errorbar(x, y, error, fmt=marker, markersize=5, label=family, color="black" if family == "ours" else None)
    axes.legend()
    axes.set_yscale("log")
    axes.set_xlabel("bits per element, all metadata")
    axes.set_ylabel("KL to exact, bits per byte")
    axes.grid(color="#ddd")
