"""Memory is not used again before its work is done, even on a chip that works as late as it may.

vendors_in_c/late.c copies when it is synchronized or queried for the third time, and not before.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forks
import pytest
from installed import need
from on_chip import ROOT, run_python

LATE = Path(__file__).parent / "vendors_in_c" / "late.c"
DEADLINE_S = 120


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process with that chip."""
    need("make", "make")
    folder = tmp_path_factory.mktemp("vendor") / "late"
    program = str(ROOT / "tools" / "new_vendor" / "__main__.py")
    done = forks.run([program, "late", "--output", str(folder)], os.environ, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    for replaced in ("memory.c", "streams.c", "events.c", "operators.c"):
        (folder / "src" / replaced).unlink()
    (folder / "src" / "late.c").write_text(LATE.read_text())
    make = ["make", "-s", "-C", str(folder), "CFLAGS=-O1 -Werror"]
    made = subprocess.run(make, capture_output=True, text=True, timeout=DEADLINE_S)
    assert made.returncode == 0, made.stderr
    return {"DITORCH_VENDOR_LIBRARY": str(folder / "liblate.so")}


START = """
import ctypes, gc, os, resource, torch, ditorch
SIZES = [1, 100, 5_000, 300_000]  # elements; from the heap's bins to pages of their own
"""


def run(code: str, environment: dict[str, str]) -> None:
    done = run_python(START + code, None, **environment)
    assert done.returncode == 0, done.stderr[-3000:] or f"it ended with {done.returncode}"


def test_pinned_memory_outlives_the_copies_into_it(late: dict[str, str]) -> None:
    run(
        """
def others(size):  # tensors that would be given the memory, were it free
    return [torch.zeros(size, pin_memory=pinned) for pinned in (False, True) for _ in range(4)]

for size in SIZES:
    sevens = torch.full((size,), 7.0, device="device")
    torch.accelerator.synchronize()

    sevens.to("cpu", non_blocking=True)  # the result is dropped
    zeros = others(size)
    torch.accelerator.synchronize()
    assert not any(x.any() for x in zeros), size

    target = torch.ones(3 * size + 2, pin_memory=True)
    target[size : 2 * size].copy_(sevens, non_blocking=True)  # a part of a larger block
    kept = target[:1]
    del target
    zeros = others(3 * size + 2)
    torch.accelerator.synchronize()
    assert not any(x.any() for x in zeros) and kept.item() == 1, size
    del kept

    side, other = torch.Stream(device="device"), torch.Stream(device="device")
    target = torch.ones(2, size, pin_memory=True)
    for part, stream in zip(target, (side, other), strict=True):
        with stream:
            part.copy_(sevens, non_blocking=True)
            part.copy_(sevens, non_blocking=True)
    del part, target
    side.synchronize()  # of the two streams, one has finished
    zeros = others(2 * size)
    other.synchronize()
    assert not any(x.any() for x in zeros), size

    held = sevens.to("cpu", non_blocking=True)
    torch.accelerator.synchronize()
    assert held.eq(7).all() and held.is_pinned()
""",
        late,
    )


def test_pinned_memory_is_given_back_once_the_copies_are_done(late: dict[str, str]) -> None:
    run(
        """
x = torch.ones(1 << 20, device="device")
for step in range(100):  # 400 MiB in all
    x.to("cpu", non_blocking=True)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for step in range(200):
    x.to("cpu", non_blocking=True)
    if step % 2:
        torch.accelerator.synchronize()
grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert grown_kib < 100 << 10, f"{grown_kib} KiB"
""",
        late,
    )


def test_a_copy_that_is_not_asked_to_run_on_is_waited_for(late: dict[str, str]) -> None:
    run(
        """
for size in SIZES:
    x = torch.arange(float(size), device="device")
    expected = torch.arange(float(size))
    pinned, pageable = torch.zeros(size, pin_memory=True), torch.zeros(size)
    assert torch.equal(pinned.copy_(x), expected)
    assert torch.equal(pageable.copy_(x, non_blocking=True), expected)  # torch waits for these
    assert torch.equal(torch.zeros(size, 2, pin_memory=True)[:, 0].copy_(x, non_blocking=True),
                       expected)
    assert torch.equal(pinned.double().pin_memory().copy_(x, non_blocking=True), expected.double())
    source = torch.full((size,), 3.0, pin_memory=True)
    y = source.to("device", non_blocking=True)
    source.zero_()  # the chip has read it
    assert y.eq(3).all()
""",
        late,
    )


def test_streams_take_turns(late: dict[str, str]) -> None:
    run(
        """
made = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"]).late_streams
ring = [torch.Stream(device="device") for _ in range(32)]
assert made() == len(set(ring)) == 32
assert [torch.Stream(device="device") for _ in range(64)] == ring * 2
urgent = [torch.Stream(device="device", priority=-1) for _ in range(40)]
assert made() == 64 and not set(urgent) & set(ring) and urgent[32:] == urgent[:8]
for step in range(1000):
    torch.Stream(device="device", priority=-99)  # as urgent as it gets
assert made() == 96
""",
        late,
    )


def test_memory_waits_once_for_each_stream_that_uses_it(late: dict[str, str]) -> None:
    run(
        """
side = torch.Stream(device="device")
x = torch.full((1000,), 7.0, device="device")
torch.accelerator.synchronize()
target = torch.empty(1000, pin_memory=True)
with side:
    target.copy_(x, non_blocking=True)
for _ in range(10_000):
    x.record_stream(side)
pointer, marks = x.data_ptr(), ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"]).late_marks
before = marks()
del x
assert marks() == before + 1
assert torch.zeros(1000, device="device").data_ptr() != pointer
side.synchronize()
assert target.eq(7).all()
held = [torch.empty(1000, device="device") for _ in range(8)]
assert pointer in [x.data_ptr() for x in held]
""",
        late,
    )
