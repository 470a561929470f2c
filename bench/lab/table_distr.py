"""DistrAttention (arXiv 2507.17245), tables 3 and 4 and figure 9: error by rows of a block and by channels of a group, per head_dim."""

import numpy as np

from . import distr, tinylm
from .attention import FloatAttention
from .report import Table

DIMS = 32, 64, 128
GROUPS = 2, 3, 4
ROWS = 1, 2, 4, 8, 16, 32, 64, 128
INPUTS = {"uniform": "U(0, 1)", "normal": "N(0, 1)", "tinylm": "a language model's Q, K, V"}


def add_options(parser):
    pass


def draws(kind, d, tokens, count):
    """(q, k, v, another query head of that k and v) float32 [tokens, 1, d] each"""
    if kind == "tinylm":
        seen, model = [], tinylm.Model()

        class Watched(FloatAttention):
            def _attend(self, layer, q, k, v):
                seen.extend((q[:, h:h + 1], k[:, h // 2:h // 2 + 1], v[:, h // 2:h // 2 + 1], q[:, h + 1:h + 2])
                            for h in range(0, model.heads, 2))
                return super()._attend(layer, q, k, v)

        tinylm.predict(model, Watched(), tinylm.read_windows(tinylm.MODEL / "sample.txt", 1, tokens)[0])
        return [tuple(map(np.ascontiguousarray, one)) for one in seen]
    first, second = np.random.default_rng([d, tokens]), np.random.default_rng([d, tokens, 2])

    def draw(random, n):
        return (random.random if kind == "uniform" else random.standard_normal)((n, tokens, 1, d), np.float32)

    return [(*draw(first, 3), *draw(second, 1)) for _ in range(count)]


def exact(q, k, v, causal):
    s = q[:, 0].astype(np.float64) @ k[:, 0].T / np.sqrt(q.shape[-1])
    masked = np.where(np.tri(len(q), dtype=bool), s, -np.inf) if causal else s
    p = np.exp(masked - masked.max(axis=1, keepdims=True))
    return s, (p / p.sum(axis=1, keepdims=True) @ v[:, 0])[:, None]


def by_library(context, q, k, v, group_size, rows, causal):
    """The library's blocks have 128 rows, and fewer at a sequence's end: calls with fewer query tokens make smaller blocks."""
    import turboattention as ta

    out = np.empty_like(q)
    for at in range(0, len(q), rows):
        end = min(at + rows, len(q)) if causal else len(k)
        options = {"variant": ta.DenseVariant.DISTR, "group_size": group_size, "mask": ta.Mask.CAUSAL if causal else ta.Mask.FULL}
        out[at:at + rows] = context.attend_dense(q[at:at + rows], k[:end], v[:end], **options)
    return out


def errors(context, data, group_size, rows):
    """In percent: sum |scores - exact| / sum |exact|, the same of O, and of O if all weights were alike."""
    of_s, of_o, alike = np.zeros(2), np.zeros(2), 0.0
    for (q, k, v, _), causal in data:
        s, o = exact(q, k, v, causal)
        grouped = distr.sampled(q[:, 0], group_size, rows).astype(np.float64) @ k[:, 0].T / np.sqrt(q.shape[-1])
        of_s += np.abs(grouped - s).sum(), np.abs(s).sum()
        of_o += np.abs(by_library(context, q, k, v, group_size, rows, causal) - o).sum(), np.abs(o).sum()
        mean = np.cumsum(v, axis=0) / np.arange(1, len(v) + 1)[:, None, None] if causal else v.mean(axis=0)
        alike += np.abs(mean - o).sum()
    return float(100 * of_s[0] / of_s[1]), float(100 * of_o[0] / of_o[1]), float(100 * alike / of_o[1])


def errors_of_shared(data, group_size, rows):
    """The first two, where two query heads of a kv head have the same groups."""
    of_s, of_o = np.zeros(2), np.zeros(2)
    for (q, k, v, other), causal in data:
        s, o = exact(q, k, v, causal)
        got_s, got_o = exact(distr.sampled(q[:, 0], group_size, rows, [other[:, 0]])[:, None], k, v, causal)
        of_s += np.abs(got_s - s).sum(), np.abs(s).sum()
        of_o += np.abs(got_o - o).sum(), np.abs(o).sum()
    return float(100 * of_s[0] / of_s[1]), float(100 * of_o[0] / of_o[1])


def run(options):
    import turboattention as ta

    context = ta.Context(threads=2)
    tokens, count = (256, 1) if options.short else (1024, 8)
    rows_list, dims = ((1, 128), (32, 128)) if options.short else (ROWS, DIMS)
    cases = [(kind, d) for kind in INPUTS for d in dims if kind != "tinylm"] + [("tinylm", 64)]
    found, shared = {}, {}
    for kind, d in cases:
        data = [(one, kind == "tinylm") for one in draws(kind, d, tokens, count)]
        for group_size in GROUPS:
            for rows in rows_list:
                found[kind, d, group_size, rows] = errors(context, data, group_size, rows)
            shared[kind, d, group_size] = errors_of_shared(data, group_size, rows_list[-1])
    by_rows, by_group = [], []
    for kind, d in cases:
        for i, what in enumerate(("S", "O")):
            start = {"inputs": INPUTS[kind], "d": d, "of": what, "alike": found[kind, d, 2, rows_list[0]][2] if what == "O" else None}
            by_rows.append({**start, **{f"l{rows}": found[kind, d, 2, rows][i] for rows in rows_list}})
            by_group.append({**start, **{f"g{g}": found[kind, d, g, rows_list[-1]][i] for g in GROUPS},
                             **{f"s{g}": shared[kind, d, g][i] for g in GROUPS}})
    head = {"inputs": ("inputs", ""), "d": ("d", "d"), "of": ("error of", ""), "alike": ("all weights alike", ".2f")}
    return [
        Table("distr", "DistrAttention: error by the rows of a block, G* 2 (table 3)",
              {**head, **{f"l{r}": (f"l {r}", ".2f") for r in rows_list}}, by_rows, TEXT.format(tokens=tokens, count=count), NOTES),
        Table("distr_groups", f"Error by the channels of a group (table 4), blocks of {rows_list[-1]} rows",
              {**head, **{f"g{g}": (f"G* {g}", ".2f") for g in GROUPS}, **{f"s{g}": (f"G* {g}, shared", ".2f") for g in GROUPS}},
              by_group, SHARED),
        Table("distr_dims", "Both, per head_dim", {"inputs": ("inputs", ""), "d": ("d", "d"), "g": ("G*", "d"),
                                                          **{f"l{r}": (f"l {r}", ".2f") for r in rows_list}},
              [{"inputs": INPUTS[kind], "d": d, "g": g, **{f"l{r}": found[kind, d, g, r][1] for r in rows_list}}
               for kind, d in cases for g in GROUPS], "Error of O in percent.", draw=lambda figure: draw(found, dims, rows_list, figure))]


TEXT = """Error in percent: sum |difference| / sum |exact|, of scores S (before the softmax) and of O, against float64. l rows of a block
share groups of G* channels. {tokens} tokens, {count} draws; the language model: {tokens} tokens, all layers and kv heads, causal. "All
weights alike" is the error of the mean of V: with V from U(0, 1) O is near 0.5 whatever the scores are."""
SHARED = """Shared: two query heads of a kv head have the same groups, by the hash of the rows of both, 256 of them. U(0, 1) and N(0, 1):
heads that have nothing in common."""
NOTES = [
    "O is that of the library (`TA_DENSE_DISTR`), S that of the same groups in numpy (`lab.distr`), which a test compares with it.",
    "The paper's tables and figure were not at hand, so nothing is compared with its figures. The script that its authors published for "
    "them draws Q and K from U(0, 1), 100 times 64 x 32, measures S, and has l 1, 2, 4, 8 with G* 2, and G* 2, 4, 8, 16 with l 2. The "
    "library has G* up to 4.",
    "Figure 9 is drawn by a script that times a GPU kernel per head_dim. This table is made on a CPU and has the error per head_dim in "
    "its place."]


def draw(found, dims, rows_list, figure):
    all_axes = figure.subplots(1, len(dims), sharey=True)
    for axes, d in zip(all_axes, dims):
        for kind in INPUTS:
            for style, g in zip(("-", "--", ":"), GROUPS):
                if (kind, d, g, rows_list[0]) in found:
                    axes.plot(rows_list, [found[kind, d, g, r][1] for r in rows_list], style, color=f"C{list(INPUTS).index(kind)}",
                              label=f"{INPUTS[kind]}, G* {g}")
        axes.set_title(f"d {d}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("rows of a block")
        axes.grid(color="#ddd")
    all_axes[0].set_ylabel("error of O, %")
    all_axes[len(dims) // 2].legend(fontsize=6)
