"""What takes longest comes first; the end says which tests were skipped for want of a package."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from installed import account


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that ask for more time than others begin, so that no worker is alone with one."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # below pytest's own summary
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] for r in skipped if isinstance(r.longrepr, tuple)]
    for line in account(reasons):
        terminalreporter.write_line(line, yellow=True)
