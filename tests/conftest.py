"""Says at the end which tests were skipped for want of a package."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from installed import account


@pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own summary
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)]
    for line in account(reasons):
        terminalreporter.write_line(line, yellow=True)
