"""Python, the packages that HyperHetero depends on, and its own libraries."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from hyperhetero.doctor.findings import Finding, optional, required

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "hyperhetero"
PYTHONS = ((3, 11), (3, 12))
LOADING = "import ditorch, dicomm.distributed, heteropp._planner"
LOADING_S = 120  # for Python to import torch on a busy machine
LIBCRYPTO = ("libcrypto.so.3", "libcrypto.so.1.1")  # as csrc/dicomm/transport/tcp/aead.cpp
DEVELOPERS = {"conform", "dev", "docs"}  # extras that no user needs


def python() -> Finding:
    return required(
        "Python",
        sys.version_info[:2] in PYTHONS,
        f"{sys.version.split()[0]} ({sys.executable})",
        "HyperHetero needs Python 3.11 or 3.12",
    )


def packages() -> Finding:
    """The dependencies without an extra, each in its range."""
    try:
        needed = _requirements()
    except PackageNotFoundError:
        return Finding(
            "packages",
            "missing",
            f"the distribution {DISTRIBUTION} is not installed",
            "no command works: pip install it, or run tools/setup in its source",
        )
    problems = [problem for one in needed[""] if (problem := _problem(one))]
    found = f"torch {version('torch')}" if not problems else "; ".join(problems)
    return required("packages", not problems, found, f"pip install --upgrade {DISTRIBUTION}")


def extras() -> Finding:
    """The extras that a user may want, all of whose packages have to be here."""
    try:
        needed = _requirements()
    except PackageNotFoundError:
        needed = {}
    offered = sorted(set(needed) - DEVELOPERS - {""})
    lacking = [extra for extra in offered if any(map(_problem, needed[extra]))]
    found = ", ".join(extra for extra in offered if extra not in lacking) or "none"
    return optional(
        "extras",
        not lacking,
        found,
        f"what these are for does not work; pip install '{DISTRIBUTION}[{','.join(lacking)}]'",
    )


def libraries() -> Finding:
    """The libraries that are built from C++: another process loads them, and opens no chip."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DITORCH_")}
    environment |= {"DITORCH_VENDOR": "cpu", "DITORCH_CONFIG": os.devnull}
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOADING],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LOADING_S,
        )
    except subprocess.TimeoutExpired:
        problem = f"they do not load within {LOADING_S} s"
    else:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        problem = lines[-1] if done.returncode else ""
    return required(
        "our libraries",
        not problem,
        problem or "all that are built from C++ load",
        "no chip and no transport: install the wheel for this torch, or build again",
    )


def libcrypto() -> Finding:
    found = [name for name in LIBCRYPTO if _loads(name)]
    return optional(
        "OpenSSL",
        bool(found),
        f"{found[0]} protects messages between hosts" if found else f"no {LIBCRYPTO[0]}",
        "messages between hosts need RDMA, or DICOMM_SECURITY=none on every rank",
    )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _requirements() -> dict[str, list[Requirement]]:
    """The distribution's dependencies by extra; those of "" are needed without any."""
    from packaging.requirements import Requirement

    found: dict[str, list[Requirement]] = defaultdict(list)
    for text in requires(DISTRIBUTION) or []:
        requirement = Requirement(text)
        marker = str(requirement.marker or "")
        found[marker.partition("extra ==")[2].strip(" \"'")].append(requirement)
    return found


def _problem(requirement: Requirement) -> str:
    """Why a dependency is not fulfilled, or nothing."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return ""
    return f"{requirement.name} is {installed}, expected {requirement.specifier}"
