"""tools/vendor-bench: the evidence it prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import on_opencl
import pytest

SHAPES = "f32 rrr 64 64 64"  # what the cache calls products of 64 x 64


def digest(text: bytes) -> bytes:
    """FNV-1a, with which a file of the cache begins."""
    found = 0xCBF29CE484222325
    for byte in text:
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return b"%016x" % found


@pytest.mark.exhaustive
def test_evidence_shows_the_way_that_was_chosen(tmp_path: Path) -> None:
    cache = str(tmp_path)
    on_opencl.lines(
        "import torch, ditorch; x = torch.ones(64, 64, device=ditorch.device); x @ x",
        XDG_CACHE_HOME=cache,
    )
    (kept,) = tmp_path.glob("hyperhetero/opencl/matmul-*.txt")
    chosen = kept.read_bytes()[16:].decode().strip().rpartition(": ")
    assert chosen[0] == SHAPES
    planted = "direct" if chosen[2] == "packed" else "packed"
    content = f"{SHAPES}: {planted}\n".encode()
    kept.write_bytes(digest(content) + content)

    done = subprocess.run(
        [on_opencl.ROOT / "tools" / "vendor-bench", "--json", "--side", "64", "--rounds", "6",
         "--candidates", "1", "--dim", "32"],
        env=on_opencl.environment(XDG_CACHE_HOME=cache),
        capture_output=True, text=True, timeout=on_opencl.DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    evidence = json.loads(done.stdout)
    assert evidence["tool"] == "vendor-bench"
    assert any(f"64 64 64: {planted}" in note for note in evidence["notes"])
    rows = {row["name"]: row for row in evidence["rows"]}
    for peer in ("untuned", "tuned"):
        product = rows[f"OpenCL: product of 64 x 64 beside CLBlast {peer}"]
        assert product["bar"] == pytest.approx(product["peer"], rel=1e-3)
        assert product["better"] == "higher" and product["ours"] > 0
    share = rows["OpenCL: share of a profiled step in which a kernel ran, 4 layers of width 32"]
    assert share["bar"] == 80 and 0 < share["ours"] < 100
    for vendor in ("OpenCL", "emuchip"):
        assert rows[f"{vendor}: host time of an operator: add"]["ours"] > 0
    assert rows["emuchip: time until done: gelu of 65536"]["peer"] > 0
    on_host = rows["emuchip: operators of a training step that the host computes"]
    assert on_host["ours"] < on_host["peer"]
    assert rows["emuchip: ABI 2 over ABI 1, all of these together"]["bar"] == 1
