"""What a step frees on the host is there for the next, and no page is mapped anew."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import numpy as np
from heteropp.runtime.ranks.host_memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def step():
    return [np.ones(6 << 17) for _ in range(8)]  # 6 MiB each
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    run = [sys.executable, "-c", STEPS, how]
    return int(subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is for glibc's allocator")
def test_pages_are_kept() -> None:
    assert faults("kept") < 100 < 10_000 < faults("given back")
