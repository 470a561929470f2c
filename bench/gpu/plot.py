"""Draws decode speed-up over F16 cuDNN, and prefill TOPS, over context length, from the --sweep --json output of bench_decode,
bench_prefill and peers.py. Needs matplotlib.

usage: plot.py decode.json prefill.json peers.json out.svg
"""
import json
import re
import sys

from matplotlib import pyplot


def load(path):
    with open(path, encoding="utf-8") as file:
        return {row["name"]: row for row in json.load(file)["benchmarks"]}


def length_of(name):
    return int(re.search(r"n(\d+)", name)[1])


def draw(panels, path):
    """One panel beside the other; each is (title, unit of y, {label: [(x, y)]}), x on a logarithmic axis."""
    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 4), squeeze=False, layout="constrained")
    for axes, (title, unit, series) in zip(all_axes[0], panels):
        for label, points in series.items():
            axes.plot(*zip(*sorted(points)), label=label)
        axes.set_title(title, fontsize="medium")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 1024 else f"{x / 1024:g}k")
        axes.yaxis.set_major_formatter(lambda y, _, unit=unit: f"{y:g}{unit}")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#ddd")
        axes.legend()
    figure.savefig(path)


def main():
    decode, prefill, peers = load(sys.argv[1]), load(sys.argv[2]), load(sys.argv[3])
    speedup, tops = {}, {}
    for name, row in decode.items():
        case, bits = name.rsplit(" ", 1)
        speedup.setdefault(bits, []).append((length_of(name), peers[f"{case} cudnn"]["real_time"] / row["real_time"]))
    for name, row in prefill.items():
        kind = name.rsplit(" ", 1)[1]
        tops.setdefault(kind, []).append((length_of(name), row["tops"]))
        peer = peers[f"{name} cudnn"]["real_time"]
        tops.setdefault(f"cuDNN {kind}", []).append((length_of(name), row["tops"] * row["real_time"] / peer))
    draw([("Decode, batch 8, 32/8 heads: times F16 cuDNN", "x", speedup), ("Prefill, 32/8 heads: TOPS", "", tops)], sys.argv[4])


if __name__ == "__main__":
    main()
