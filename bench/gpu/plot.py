"""Draws decode speed-up over F16 cuDNN, and prefill TOPS, over context length, from the --sweep --json output of bench_decode,
bench_prefill and peers.py. Needs nothing but Python.

usage: plot.py decode.json prefill.json peers.json out.svg
"""
import json
import math
import re
import sys

WIDTH, HEIGHT, LEFT, TOP, GAP = 460, 300, 60, 40, 90
COLOURS = ["#1f6fb4", "#d1495b", "#3a7d44", "#8d6a9f", "#777777"]


def load(path):
    with open(path, encoding="utf-8") as file:
        return {row["name"]: row for row in json.load(file)["benchmarks"]}


def length_of(name):
    return int(re.search(r"n(\d+)", name)[1])


def panel(x0, title, unit, series):
    """Lines over a logarithmic context axis; `series` is {label: [(n, value)]}."""
    points = [p for values in series.values() for p in values]
    low, high = math.log2(min(n for n, _ in points)), math.log2(max(n for n, _ in points))
    top = max(v for _, v in points) * 1.1
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(k for k in (1, 2, 5, 10) if top / (k * step) <= 6)
    x = lambda n: x0 + (math.log2(n) - low) / (high - low) * WIDTH
    y = lambda v: TOP + HEIGHT - v / top * HEIGHT
    out = [f'<text x="{x0}" y="{TOP - 16}" font-weight="bold">{title}</text>']
    for i in range(int(top / step) + 1):
        v = i * step
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{x0 - 8}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}{unit}</text>')
    for k in range(int(low), int(high) + 1):
        label = f"{2 ** k}" if k < 10 else f"{2 ** (k - 10)}k"
        out.append(f'<text x="{x(2 ** k):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{label}</text>')
    for colour, (label, values) in zip(COLOURS, series.items()):
        path = " ".join(f"{x(n):.1f},{y(v):.1f}" for n, v in sorted(values))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        n, v = max(values)
        out.append(f'<text x="{x(n) + 6:.1f}" y="{y(v) + 4:.1f}" fill="{colour}">{label}</text>')
    return out


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
    body = panel(LEFT, "Decode, batch 8, 32/8 heads: times F16 cuDNN", "x", speedup)
    body += panel(LEFT + WIDTH + GAP + 40, "Prefill, 32/8 heads: TOPS", "", tops)
    width, height = LEFT + 2 * WIDTH + 2 * GAP + 80, TOP + HEIGHT + 40
    with open(sys.argv[4], "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
                   f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n')
        file.write("\n".join(body) + "\n</svg>\n")


if __name__ == "__main__":
    main()
