"""What tests need of the system: Debian's packages, which tools/packages installs where it can.

A test that lacks one is skipped, and the end of the run counts them; where HYPERHETERO_TEST_ALL is
set, as in CI, it fails.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

LACKS = re.compile(r"(\S+) is not installed; apt-get install \1 runs (?:it|them)$")


def need(package: str, *found: str) -> None:
    """Skips the test where none of a package's programs, or files, is there."""
    if any(Path(one).exists() if "/" in one else shutil.which(one) for one in found):
        return
    sentence = f"{package} is not installed; apt-get install {package} runs it"
    if os.environ.get("HYPERHETERO_TEST_ALL"):
        pytest.fail(sentence, pytrace=False)
    pytest.skip(sentence)


def account(reasons: list[str]) -> list[str]:
    """A line for each package that tests were skipped for want of; reasons: of all skips."""
    lacking = [found[1] for reason in reasons if (found := LACKS.search(reason))]
    lines = []
    for package in sorted(set(lacking)):
        count = lacking.count(package)
        tests, them = ("test", "it") if count == 1 else ("tests", "them")
        lines.append(
            f"{count} {tests} skipped: {package} is not installed; "
            f"apt-get install {package} runs {them}"
        )
    return lines
