"""Python processes whose chip is this machine's OpenCL device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forks

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "opencl-cache"  # a driver takes seconds to build a kernel
DEADLINE_S = 280


def environment(**extra: str) -> dict[str, str]:
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("DITORCH_", "EMUCHIP_"))}
    chosen["DITORCH_VENDOR"] = "opencl"
    chosen["DITORCH_OPENCL_MEMORY_BYTES"] = str(1 << 30)  # a full chip is no full machine
    chosen["XDG_CACHE_HOME"] = str(KEPT)
    return chosen | extra


def run(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-c", code], environment(**extra), ROOT, timeout_s=DEADLINE_S)


def lines(code: str, **extra: str) -> list[str]:
    """What the code prints; it must end well."""
    done = run(code, **extra)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run_checks(*files: str, chosen: str = "", **extra: str) -> None:
    """Checks that emulated chips pass, too: some of tests/ditorch/checks."""
    options = ["-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py", "-k", chosen]
    paths = [f"tests/ditorch/checks/{file}" for file in files]
    done = forks.run(["-m", "pytest", *options, *paths], environment(**extra), ROOT, timeout_s=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
