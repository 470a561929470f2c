"""TurboAttention (arXiv 2412.08585): FlashQ and SAS apart, block sizes, head ranking, buffer, by error and compression."""

import json
from functools import partial

import numpy as np

from . import evaluate, formats, tinylm
from .attention import FloatAttention, LibraryAttention
from .report import Table
from .table_formats import observed

PARTS = ["SAS alone", "FlashQ 4 bits alone", "FlashQ 4 bits and SAS", "FlashQ 2 bits alone", "FlashQ 2 bits and SAS",
         "FlashQ 4/2 bits and SAS", "profile accurate, 4 bits"]
BLOCKS = [f"FlashQ {bits} bits, blocks of {block}" for bits in (4, 2) for block in (32, 64, 128)]
RANKINGS = ["priority", "priority, reversed", "range", "spread of ranges", "random 1", "random 2", "random 3", "found by tinylm calibrate"]
BUFFERS = ["universal scale, token by token", "a scale for each token, token by token", "whole blocks at once"]


def add_options(parser):
    tinylm.add_options(parser)


def sas(x):
    """SAS, section 4 of the paper, with the constants of docs/numerics.md, 7: about e^x for -6 <= x <= 0, else 0."""
    y = np.minimum(-x, 7)  # 7: -inf, too, is beyond 6
    whole = np.floor(y)
    f = y - whole
    power = ((np.float32(-0.1025) * f + np.float32(0.4626)) * f - np.float32(0.9922)) * f + np.float32(0.9996)
    return np.where(y > 6, 0, np.exp(-whole) * power)


def sas_weights(s, tile=64):
    """As online softmax takes it: below the maximum of the tiles of keys so far, and the exact exponential rescales earlier tiles."""
    parts = [s[..., at:at + tile] for at in range(0, s.shape[-1], tile)]
    tops = np.maximum.accumulate([part.max(axis=-1, keepdims=True) for part in parts], axis=0)
    for part, top in zip(parts, tops):
        part[:] = sas(part - top) * np.exp(top - tops[-1])


def head_map(ranking):
    """Half of each layer's heads at 2 bits, those that rank lowest: k_bits and v_bits uint8 [layers, kv_heads]."""
    import turboattention as ta

    if ranking == "found by tinylm calibrate":
        stored = json.loads((tinylm.MODEL / "head_map.json").read_text())
        return {name: np.array(bits, np.uint8) for name, bits in stored.items()}
    layers, (heads, head_dim) = len(observed()), observed()[0][0].shape[1:]
    if ranking.startswith("priority"):
        calibrator = ta.Context(threads=1).create_calibrator(layers=layers, kv_heads=heads, head_dim=head_dim)
        for layer, (k, v) in enumerate(observed()):
            calibrator.observe(layer, np.ascontiguousarray(k), np.ascontiguousarray(v))
        maps = dict(zip(("k_bits", "v_bits"), calibrator.finish(heads // 2)))
        return maps if ranking == "priority" else {name: 6 - bits for name, bits in maps.items()}
    random = np.random.default_rng(int(ranking.split()[1]) if ranking.startswith("random") else 0)
    maps = {}
    for i, name in enumerate(("k_bits", "v_bits")):
        x = np.stack([layer[i] for layer in observed()])  # [layers, tokens, heads, head_dim]
        rank = {"range": lambda: x.max(axis=(1, 3)) - x.min(axis=(1, 3)),
                "spread of ranges": lambda: (x.max(axis=1) - x.min(axis=1)).std(axis=-1)}.get(
                    ranking, lambda: random.random((layers, heads)))()
        maps[name] = np.where(rank.argsort(axis=-1).argsort(axis=-1) < heads // 2, 2, 4).astype(np.uint8)
    return maps


def make_attention(name, model):
    import turboattention as ta

    paper = partial(ta.Numerics, profile=ta.Profile.PAPER)

    def library(numerics, chunk=64, **bits):
        return LibraryAttention(model, ta.Context(threads=1), max_tokens=tinylm.WINDOW, chunk=chunk, numerics=numerics, **bits)

    if name == "SAS alone":
        return FloatAttention(weights=sas_weights)
    if name in BLOCKS:
        bits, block = int(name.split()[1]), int(name.split()[-1])
        return FloatAttention(formats.flashq(bits, block, model.head_dim))
    if name in RANKINGS:
        return library(paper(), **head_map(name))
    if name in BUFFERS:
        scale = ta.OpenScale.UNIVERSAL if name.startswith("universal") else ta.OpenScale.TOKEN
        return library(paper(open_scale=scale), chunk=1 if name.endswith("token by token") else 64, bits=4)
    if name == "profile accurate, 4 bits":
        return library(ta.Numerics(), bits=4)
    exp = ta.Exp.EXACT if name.endswith("alone") else ta.Exp.SAS
    return library(paper(exp=exp), **({"bits": int(name.split()[1])} if "4/2" not in name else head_map("priority")))


def run(options):
    windows, prompts = tinylm.texts(options)
    groups = [("turbo", "TurboAttention: FlashQ and SAS apart", PARTS), ("turbo_blocks", "Block sizes", BLOCKS),
              ("turbo_ranking", "Head ranking: half of the heads at 2 bits", RANKINGS),
              ("turbo_buffer", "Buffer: the newest tokens at 8 bits, 4 bits", BUFFERS)]
    names = [name for *_, group in groups for name in group]
    rows = {row["name"]: row for row in evaluate.rows(__name__, names, windows, [], options.jobs)}
    columns = {"name": ("", ""), "bits": ("bits", ".2f"), "compression": ("times fp16", ".2f"), "kl": ("KL to exact", ".5f"),
               "kl_error": ("+-", ".5f"), "change": ("loss, %", "+.2f")}
    for row in rows.values():
        row["compression"] = 16 / row["bits"]
    exact = rows[evaluate.EXACT]["loss"]
    text = TEXT.format(positions=sum(len(w) - 1 for w in windows), exact=exact, windows=len(windows), tokens=len(windows[0]),
                       text=options.text.name)
    tables = []
    for name, title, group in groups:
        of_group = [rows[one] for one in group]
        tables.append(Table(name, title, columns, of_group, NOTES[name], draw=lambda figure, of_group=of_group: draw(of_group, figure)))
    tables[0].text = text + "\n\n" + tables[0].text
    return tables


TEXT = """On a small language model: KL(exact || this cache) in bits per byte, the mean over {positions:,} positions with its standard
error, change of the loss of {exact:.5f} bits per byte, bits per element with all metadata. Text: {windows} windows of
{tokens} bytes of {text}. Steps of 64 tokens and `TA_PROFILE_PAPER` where nothing else is said."""
NOTES = {
    "turbo": "SAS alone: over float K and V. FlashQ alone: with the exact exponential. 4/2: the published ranking gives half of the "
             "heads 2 bits.",
    "turbo_blocks": "FlashQ in numpy, exact exponential: the library has blocks of 64 tokens alone. The open block is at 8 bits.",
    "turbo_ranking": "With SAS. The lower half of each layer's heads has 2 bits, K and V apart. This model has two kv heads in each layer.",
    "turbo_buffer": "With SAS. Universal scale: of all tokens so far, for those that join a block that is not full, as published."}


def draw(rows, figure):
    axes = figure.subplots()
    axes.barh([row["name"] for row in rows], [row["kl"] for row in rows], xerr=[row["kl_error"] for row in rows], color="C0")
    axes.invert_yaxis()
    axes.set_xlabel("KL to exact, bits per byte")
    axes.grid(axis="x", color="#ddd")
