"""The model of block sizes against figures worked out by hand."""

from types import SimpleNamespace

import pytest

from lab import report
from lab.table_blocks import DEVICES, Device, choose, fits, moved_bytes, registers, run, shared_bytes


def test_costs_by_hand():
    assert shared_bytes(128, 64, 128) == 2 * 128 * (128 + 64 + 64) == 64 << 10
    # A warp: O 16 x 128 floats, S 16 x 64, P 16 x 64 halves, q 16 x 64 halves: 8192 + 4096 + 2048 + 2048 bytes for 32 threads
    assert registers(128, 64, 128, 2) == 16384 // 128 + 40
    # 256 tokens in 2 blocks: q and o once, k and v twice
    assert moved_bytes(128, 64, 256) == 2 * 64 * (256 + 256 + 2 * 256 + 2 * 256)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("d", [32, 64, 128])
def test_nothing_better_fits(device, d):
    l, m = choose(device, d)
    assert l % 16 == 0 == m % 16 and fits(device, l, m, d, 2)
    assert not any(fits(device, more, k, d, 2) for more in range(l + 16, 1025, 16) for k in range(32, 1025, 16))
    assert not fits(device, l, m + 16, d, 2)


def test_what_limits():
    assert choose(Device("little shared memory", "", 40 << 10, 48), 128) == (64, 48)  # 2 * 128 * (64 + 96) bytes
    assert choose(Device("few warps", "", 1 << 20, 5), 32)[0] == 64
    assert choose(Device("nothing fits", "", 8 << 10, 48), 128) is None


@pytest.mark.parametrize("device", [None, ("nothing fits", "8", "48")])
def test_the_table_has_a_picture(tmp_path, device):
    tables = run(SimpleNamespace(device=device, tokens=16384))
    report.write(tables, tmp_path, {"command": "", "commit": "", "machine": ""})
    picture = (tmp_path / "blocks.svg").read_text()
    assert ("RTX 3090, L40" in picture) == (device is None) and "blocks.svg" in (tmp_path / "blocks.md").read_text()
