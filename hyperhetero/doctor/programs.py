"""Programs that some commands start."""

from __future__ import annotations

import shutil
import subprocess

from hyperhetero.doctor.findings import Finding, optional

COMPILERS = ("g++", "clang++", "c++")
BROWSERS = ("chromium", "chromium-headless-shell", "google-chrome")
VERSION_S = 10  # for a compiler to say its version


def compiler() -> Finding:
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    return optional(
        "C++ compiler",
        path is not None,
        f"{path}, version {_version(path)}" if path else f"none of {', '.join(COMPILERS)}",
        "no build from source, no vendor's library from tools/new-vendor, no torch.compile on "
        "CPUs; an installed wheel needs none",
    )


def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "-dumpversion"], capture_output=True, text=True, timeout=VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def ssh() -> Finding:
    return _program("ssh", ("ssh",), "heteropp-cluster init --hosts cannot ask other machines")


def scheduler() -> Finding:
    return _program(
        "Slurm", ("scontrol",), "heteropp-cluster init has no nodes to read; list machines by hand"
    )


def browser() -> Finding:
    return _program("Chromium", BROWSERS, "the tests of pages are skipped; users need none")


def _program(name: str, programs: tuple[str, ...], cost: str) -> Finding:
    path = next(filter(None, map(shutil.which, programs)), None)
    return optional(name, path is not None, path or f"no {programs[0]} on the PATH", cost)
