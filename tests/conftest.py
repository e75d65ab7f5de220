"""Says at the end which tests were skipped for want of a package."""

from __future__ import annotations

import pytest
from installed import account


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)]
    for line in account(reasons):
        terminalreporter.write_line(line, yellow=True)
