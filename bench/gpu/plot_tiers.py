"""Draws what moves of blocks reach, and decode and chunks of prompts over blocks in host memory, from the output of `ta bench tiers
--json`, of the parts that it has. Needs matplotlib.

usage: plot_tiers.py tiers.json out.svg
"""
import json
import sys

from plot import draw


def size(n):
    return f"{n / 1e6:.1f} MB" if n >= 1e6 else f"{n / 1e3:.0f} KB"


def size_of_context(chunks, tokens):
    return next(row["over"] for row in chunks if row["tokens"] == tokens)


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = json.load(file)["rows"]
    moves = [row for row in rows if row["part"] == "moves" and row["route"] == "auto" and row.get("node") != "far"]
    panels = []
    for what, title in [("demote", "To the host"), ("promote", "To the GPU"), ("both", "Both at once, the sum")]:
        series = {}
        for row in moves:
            if row["what"] == what:
                series.setdefault(size(row["block_bytes"]), []).append((row["blocks"], row["percent"]))
        if series:
            panels.append((f"{title}: % of large copies, over blocks in a batch", "%", series))
    decode = {}
    for row in rows:
        if row["part"] == "decode":
            decode.setdefault(row["pages"], []).append((int(row["percent_on_host"]) + 1, row["times_resident"]))
    if decode:
        panels.append(("Decode, times all resident, over 1 + % of blocks on the host", "x", decode))
    chunks = [row for row in rows if row["part"] == "chunk" and row["what"] in ("in place", "auto")]  # forced ones are like auto
    for tokens in sorted({row["tokens"] for row in chunks if row["tokens"] >= 256}):
        chunk = {}
        for row in chunks:
            if row["tokens"] == tokens:
                chunk.setdefault(row["what"], []).append((int(row["percent_on_host"]) + 1, row["p50_us"] / 1000))
        panels.append((f"{tokens} tokens over {size_of_context(chunks, tokens)}, ms a layer, over 1 + % on the host", "", chunk))
    draw(panels, sys.argv[2])


main()
