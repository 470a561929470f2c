"""Draws the JSON of `ta bench ... --json`: one panel for each part. Called by ta plot: plot.py OUT <FILE.json"""
import json
import sys

try:
    import matplotlib
except ImportError:
    sys.exit(3)
matplotlib.use("Agg")
import matplotlib.pyplot as plt

MEASURES = [("gb_s", "GB/s"), ("tera_ops_s", "10^12 operations a second"), ("p50_us", "median, us"), ("ranks_us", "us"), ("beside_us", "us"), ("fetch_ms", "ms")]
RESULTS = ("_us", "_ms", "gb_s", "tera_ops_s", "percent", "difference", "difference_of_one", "times_faster", "times_resident")
# Candidates for a panel's axis: the first one with three values or more.
AXES = ["percent_on_host", "block_bytes", "tokens", "queries", "blocks", "batch"]
DERIVED = {"part", "bytes", "exchanged_bytes", "copy_engine_from_down", "copy_engine_from_up"}


def is_number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def measure_of(rows):
    for key, unit in MEASURES:
        if all(is_number(r.get(key)) and r[key] > 0 for r in rows):
            return key, unit
    key = next((k for k in rows[0] if k.endswith(RESULTS) and all(is_number(r.get(k)) for r in rows)), None)
    return key, key


def axis_of(rows):
    return next((k for k in AXES if all(is_number(r.get(k)) for r in rows) and len({r[k] for r in rows}) >= 3), None)


def label_of(row, leave_out):
    return ", ".join(str(v) if isinstance(v, str) else f"{k.replace('_', ' ')} {v:g}" for k, v in row.items()
                     if k not in leave_out and not k.endswith(RESULTS) and (isinstance(v, str) or is_number(v)))


def draw(panel, part, rows):
    measure, unit = measure_of(rows)
    if measure is None:
        panel.set_axis_off()
        panel.set_title(f"{part}: no number in all rows")
        return
    shared = {k for k in rows[0] if all(r.get(k) == rows[0][k] for r in rows)}
    x = axis_of(rows)
    if x is None:
        names = [label_of(r, shared | DERIVED) or part for r in rows]
        panel.barh(range(len(rows)), [r[measure] for r in rows])
        panel.set_yticks(range(len(rows)), names, fontsize=7)
        panel.invert_yaxis()
        panel.set_xlabel(unit)
    else:
        series = {}
        for r in rows:
            series.setdefault(label_of(r, shared | DERIVED | {x}), []).append((r[x], r[measure]))
        for name, points in series.items():
            panel.plot(*zip(*sorted(points)), marker="o", label=name or part)
        if min(r[x] for r in rows) > 0:
            panel.set_xscale("log", base=2)
        panel.set_xlabel(x.replace("_", " "))
        panel.set_ylabel(unit)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        if len(series) > 1:
            panel.legend(fontsize=7)
    panel.set_title(part)


report = json.load(sys.stdin.buffer)
parts = {}
for row in report["rows"]:
    parts.setdefault(row["part"], []).append(row)
figure, panels = plt.subplots(len(parts), 1, figsize=(9, 3.6 * len(parts)), squeeze=False, constrained_layout=True)
for panel, (part, rows) in zip(panels[:, 0], parts.items()):
    draw(panel, part, rows)
figure.suptitle(f"{report.get('device', '')}\n{report.get('library', '')}", fontsize=8)
figure.savefig(sys.argv[1])
