"""A markdown table of what the GPU benchmarks printed with --json; cases that peers.py timed too get the speed-up over cuDNN,
over the fastest F16 attention and, where FlashInfer, FlashAttention-3 or SageAttention was there, over the fastest 8-bit one.

usage: table.py FILE.json...
"""
import json
import sys

rows, peers = [], {}
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        for row in json.load(file)["benchmarks"]:
            name, _, last = row["name"].rpartition(" ")
            if last.startswith(("cudnn", "flash", "fa3", "sage")):
                peers.setdefault(name, {})[last] = row["real_time"]
            else:
                rows.append(row)


def peers_of(name):
    return next((peers[case] for case in (name, name.rpartition(" ")[0], name.partition(",")[0]) if case in peers), {})


def against(peer, us):
    return f"{peer:.1f} | {peer / us:.2f}x" if peer else " | "


def fastest(timed, eight_bit):
    return min((time for peer, time in timed.items() if (peer.endswith("fp8") or peer == "sage") == eight_bit), default=None)


print("| case | us | in a row | cuDNN F16 | x | best F16 | x | best 8-bit | x | | error | host us |\n" + "|---" * 12 + "|")
for row in rows:
    us, timed = row["real_time"], peers_of(row["name"])
    share = next((text.format(row[key]) for key, text in (("percent_of_hbm", "{:.1f}% of HBM"), ("tops", "{:.0f} TOPS"), (
        "input_gb_s", "{:.0f} GB/s in"), ("tokens_per_s", "{:.0f} tokens/s")) if key in row), "")
    host = "" if "begin_host_us" not in row else f"{row['begin_host_us']:.1f} + {row.get('attend_host_us', 0):.1f}"
    print(f"| {row['name']} | {us:.2f} | {row.get('in_a_row_us', us):.2f} | {against(timed.get('cudnn'), us)} | "
          f"{against(fastest(timed, False), us)} | {against(fastest(timed, True), us)} | {share} | "
          f"{row.get('rel_l2', float('nan')):.1e} | {host} |")
