"""Loaded by pytest in each child: gives the suite the device, and writes a line for each test, and
one at the end, which a child that dies does not write.

CLIENT_TESTS_OUTPUT names the file of lines of JSON; CLIENT_TESTS_DONE one with the tests that
need not run again, and CLIENT_TESTS_SLICE is K/N of those that are left.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

_device_type = os.environ["CLIENT_TESTS_DEVICE"]
if _device_type != "cpu":
    import ditorch  # noqa: F401  (before PyTorch's tests look for devices)

_output = Path(os.environ["CLIENT_TESTS_OUTPUT"])


def for_whatever_device() -> None:
    """PyTorch's suites: a copy that another vendor carries asks for that vendor's device alone."""
    from torch.testing._internal import common_device_type  # which forbids to set torch's flags

    instantiate = common_device_type.instantiate_device_type_tests

    def for_this_device(generic: Any, scope: Any, **named: Any) -> None:
        if named.get("only_for") not in ("cpu", ("cpu",), ["cpu"]):
            named.pop("only_for", None)
        instantiate(generic, scope, **named)

    common_device_type.instantiate_device_type_tests = for_this_device


if "PYTORCH_TESTING_DEVICE_ONLY_FOR" in os.environ:
    for_whatever_device()
torch.set_num_threads(1)
torch.cpu.get_device_name = lambda device=None: "cpu"  # every other device's module has these
torch.cpu.is_bf16_supported = lambda: True


def line(**what: Any) -> None:
    with _output.open("a") as file:
        file.write(json.dumps(what) + "\n")


def device_free(name: str) -> str:
    """The same test on the CPU and on a chip has one name."""
    for device in (_device_type, "privateuse1", "cpu"):
        name = name.replace(f"{device.upper()}::", "Device::")
        name = name.replace(f"_{device}_", "_device_").removesuffix(f"_{device}")
    return name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(Path(os.environ["CLIENT_TESTS_DONE"]).read_text().splitlines())
    part, parts = map(int, os.environ["CLIENT_TESTS_SLICE"].split("/"))
    items[:] = [item for item in items[part - 1 :: parts] if device_free(item.nodeid) not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    line(begun=device_free(nodeid))


def pytest_sessionfinish() -> None:
    line(finished=True)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
    elif report.failed:
        reason = str(report.longrepr)[-1500:]
    line(name=device_free(report.nodeid), outcome=report.outcome, reason=reason)
