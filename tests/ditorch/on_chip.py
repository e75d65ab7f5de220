"""A process is one chip, so each chip's checks run in a process of their own.

`checks/check_*.py` are ordinary pytest files that expect `import ditorch` to have found the chip
of the environment; `run_checks` runs some of them on a chip, in a child pytest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import forks
import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKS = Path(__file__).parent / "checks"
DEADLINE_S = 240


def environment(chip: str | Path | None, **extra: str) -> dict[str, str]:
    """The environment of a process whose chip is `chip`; None is a machine without one."""
    chosen = {k: v for k, v in os.environ.items() if not k.startswith(("DITORCH_", "EMUCHIP_"))}
    chosen["PYTHONPATH"] = os.pathsep.join([str(ROOT), chosen.get("PYTHONPATH", "")])
    if chip is not None:
        chosen["DITORCH_CHIP"] = str(chip)
    return chosen | extra


def run_python(
    code: str, chip: str | Path | None, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Torch is imported already, and Python's own end is left out; `run_new_python` has both."""
    return forks.run(["-c", code], environment(chip, **extra), timeout_s=DEADLINE_S)


def run_each(
    code: str, environments: list[dict[str, str]], **common: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs `code` once with each environment."""
    return [run_python(code, None, **common, **extra) for extra in environments]


def run_new_python(
    code: str, chip: str | Path | None, **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment(chip, **extra),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs tools/<name>."""
    return subprocess.run(
        [str(ROOT / "tools" / name), *arguments],
        env=environment(None),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def run_checks(chip: str | Path | None, *files: str, **extra: str) -> None:
    """Runs checks/<files> on the chip; fails with the child's report if one of them does."""
    done = forks.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "python_files=check_*.py",
         *(str(CHECKS / file) for file in files)],
        environment(chip, **extra), ROOT, timeout_s=DEADLINE_S,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.fail(f"on chip {chip}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}", pytrace=False)
