"""DistrAttention (arXiv 2507.17245), section 3.3.1: rows l and keys m of a block for a device's figures."""

from dataclasses import dataclass

from .report import Table

TILE = 16  # N': rows and columns of a tensor core's tile, and bits of a hash
ELEMENT = 2  # bytes of float16


@dataclass(frozen=True)
class Device:
    """shared_block: bytes of shared memory that a block may have. warps: of a streaming multiprocessor. registers: 32-bit ones of
    it. schedulers: of it, each of which issues one warp at a time."""

    name: str
    capability: str
    shared_block: int
    warps: int
    registers: int = 65536
    schedulers: int = 4


# CUDA C++ Programming Guide, "Features and technical specifications"
DEVICES = [Device("RTX 4090", "8.9", 99 << 10, 48), Device("RTX 3090", "8.6", 99 << 10, 48), Device("L40", "8.9", 99 << 10, 48),
           Device("A100", "8.0", 163 << 10, 64), Device("H100", "9.0", 227 << 10, 64)]


def shared_bytes(l, m, d):
    """A block's q, and k and v of one step."""
    return ELEMENT * d * (l + 2 * m)


def registers(l, m, d, group_size):
    """Of a thread, if a warp has TILE rows: O and S in float32, P and the sampled q in float16, 40 for the rest."""
    lanes = 32
    return TILE * (d * 4 + m * 4 + m * ELEMENT + d // group_size * ELEMENT) // (lanes * 4) + 40


def moved_bytes(l, d, tokens):
    """Of a head, from and to global memory: q and o once, k and v once for each block of l rows."""
    return ELEMENT * d * (2 * tokens + 2 * tokens * tokens / l)


def fits(device, l, m, d, group_size):
    warps = l // TILE
    each = registers(l, m, d, group_size)
    return (shared_bytes(l, m, d) <= device.shared_block and warps % device.schedulers == 0 and warps <= min(device.warps, 32)
            and each <= 255 and 32 * each * warps <= device.registers)


def choose(device, d, group_size=2, least_m=2 * TILE):
    """(l, m), both multiples of TILE, m at least least_m: the largest l, since moved_bytes falls with it, then the largest m, since the
    steps fall with that. None: nothing fits."""
    sizes = range(TILE, 1025, TILE)
    return max(((l, m) for l in sizes for m in sizes if m >= least_m and fits(device, l, m, d, group_size)), default=None)


def add_options(parser):
    parser.add_argument("--tokens", type=int, default=16384, help="for the bytes moved (16384)")
    parser.add_argument("--device", nargs=3, metavar=("NAME", "SHARED", "WARPS"),
                        help="another device: KiB of shared memory that a block may have, warps of a multiprocessor")


def run(options):
    devices = DEVICES
    if options.device:
        name, shared, warps = options.device
        devices = [Device(name, "-", int(shared) << 10, int(warps))]
    rows = []
    for device in devices:
        for d in (32, 64, 128):
            for group_size in (2, 4):
                chosen = choose(device, d, group_size)
                if chosen is None:
                    rows.append({"device": device.name, "capability": device.capability, "d": d, "g": group_size})
                    continue
                l, m = chosen
                rows.append({"device": device.name, "capability": device.capability, "d": d, "g": group_size, "l": l, "m": m,
                             "warps": l // TILE, "shared": shared_bytes(l, m, d) / 1024, "registers": registers(l, m, d, group_size),
                             "moved": moved_bytes(l, d, options.tokens) / moved_bytes(128, d, options.tokens)})
    columns = {"device": ("device", ""), "capability": ("capability", ""), "d": ("d", "d"), "g": ("G*", "d"), "l": ("l", "d"),
               "m": ("m", "d"), "warps": ("warps", "d"), "shared": ("shared, KiB", ".0f"), "registers": ("registers", "d"),
               "moved": ("bytes moved, l 128 = 1", ".2f")}
    return [Table("blocks", "DistrAttention: block sizes by its model", columns, rows, TEXT, NOTES, lambda figure: draw(rows, figure))]


def draw(rows, figure):
    """l and m of devices per head_dim. Devices that have the same blocks share their lines."""
    sizes = {}
    for row in rows:
        sizes.setdefault(row["device"], {})[row["g"], row["d"]] = row.get("l"), row.get("m")
    alike = {}
    for device, chosen in sizes.items():
        alike.setdefault(tuple(chosen.items()), []).append(device)
    groups = sorted({row["g"] for row in rows})
    all_axes = figure.subplots(1, len(groups), sharey=True)
    for axes, g in zip(all_axes, groups):
        for i, (chosen, devices) in enumerate(alike.items()):
            points = [(d, l, m) for (of, d), (l, m) in chosen if of == g and l is not None]
            for at, (name, style) in enumerate((("l, rows", "o-"), ("m, keys", "s--")), 1):
                axes.plot([point[0] for point in points], [point[at] for point in points], style, color=f"C{i}",
                          label=f"{name}: {', '.join(devices)}")
        axes.set_title(f"G* {g}")
        axes.set_xscale("log", base=2)
        axes.set_xticks([32, 64, 128], ["32", "64", "128"])
        axes.set_xlabel("head_dim")
        axes.set_ylim(bottom=0)
        axes.grid(color="#ddd")
    all_axes[0].set_ylabel("size of a block")
    all_axes[0].legend(fontsize=6)


TEXT = """`lab.table_blocks.choose(device, d, group_size)`: l rows of q and m keys in a block, multiples of N' = 16. A head moves
2 d (2 N + 2 N^2 / l) bytes, so the largest l is taken, then the largest m that fits: q, k and v in shared memory, a warp for every
16 rows (as many for each scheduler), O, S, P and q in the registers of its threads."""
NOTES = [
    "The paper's text was not at hand, so its table 2 is not reproduced and nothing here is checked against it. Constraints on shared "
    "memory and warps and the order (l first) are the paper's; how much of shared memory q, k and v take, warps in equal parts, the "
    "registers and the least m of 32 are assumptions of this table. The published code has l 128 and m 64 for every d.",
    "By these figures RTX 4090, RTX 3090 and L40 are alike, so that the model gives them the same blocks.",
    "The library does not use this: l rows share their groups of channels, so l decides results, and it is 128 on every device. Its "
    "GPU kernels have m 64 with two blocks on a multiprocessor and, on sm_90a, m 128."]
