"""What tests need of the system: Debian's packages, which tools/packages installs, and rights.

A test that lacks some is skipped, and the end of the run counts them; where HYPERHETERO_TEST_ALL is
set, as in CI, it fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import NoReturn

import pytest

LACKS = re.compile(r"(?:Skipped: )?(.+); (.+) runs (?:it|them)")
NAMESPACES = ("no namespaces can be made here", "root on a whole machine")


def need(package: str, *found: str) -> None:
    """Skips the test where none of a package's programs, or files, is there."""
    if not any(Path(one).exists() if "/" in one else shutil.which(one) for one in found):
        lack(f"{package} is not installed", f"apt-get install {package}")


def own_mounts() -> list[str]:
    """The start of a command line whose program mounts what no other process sees.

    Skips the test where nobody lets it, as in most containers.
    """
    for rights in ([], ["--user", "--map-root-user"]):
        alone = ["unshare", *rights, "--mount"]
        trial = [*alone, "mount", "-t", "tmpfs", "memory", "/dev/shm"]
        if not subprocess.run(trial, capture_output=True).returncode:
            return alone
    lack(*NAMESPACES)


def lack(what: str, remedy: str) -> NoReturn:
    """Skips the test for want of something."""
    sentence = f"{what}; {remedy} runs it"
    if os.environ.get("HYPERHETERO_TEST_ALL"):
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


def account(reasons: list[str]) -> list[str]:
    """A line for each thing that tests were skipped for want of; reasons: of all skips."""
    lacking = Counter(found.groups() for reason in reasons if (found := LACKS.fullmatch(reason)))
    lines = []
    for (what, remedy), count in sorted(lacking.items()):
        tests, them = ("test", "it") if count == 1 else ("tests", "them")
        lines.append(f"{count} {tests} skipped: {what}; {remedy} runs {them}")
    return lines
