"""Loaded by pytest in each child: gives the suite the device, and writes a line for each test.

CLIENT_TESTS_OUTPUT names the file of lines of JSON; CLIENT_TESTS_DONE one with the tests that
need not run again, and CLIENT_TESTS_SLICE is K/N of those that are left.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import ditorch  # isort: skip  (before PyTorch's tests look for devices)
import pytest
import torch
from torch.testing._internal import common_device_type

_output = Path(os.environ["CLIENT_TESTS_OUTPUT"])
_instantiate = common_device_type.instantiate_device_type_tests

if "PYTORCH_TESTING_DEVICE_ONLY_FOR" in os.environ:  # Ascend's copies of PyTorch's import these
    for vendor in ("torch_npu", "torch_npu.testing"):
        sys.modules.setdefault(vendor, types.ModuleType(vendor))


def for_this_device(generic: Any, scope: Any, **named: Any) -> None:
    """A copy of a suite that another vendor carries names that vendor's device alone."""
    if named.get("only_for") not in ("cpu", ("cpu",), ["cpu"]):
        named.pop("only_for", None)
    _instantiate(generic, scope, **named)


common_device_type.instantiate_device_type_tests = for_this_device
torch.set_num_threads(1)


def line(**what: Any) -> None:
    with _output.open("a") as file:
        file.write(json.dumps(what) + "\n")


def device_free(name: str) -> str:
    """The same test on the CPU and on a chip has one name."""
    name = name.replace("PRIVATEUSE1", "Device").replace("PrivateUse1", "Device")
    name = name.replace("CPU::", "Device::")
    for device in (ditorch.device.type, "cpu"):
        name = name.replace(f"_{device}_", "_device_").removesuffix(f"_{device}")
    return name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(Path(os.environ["CLIENT_TESTS_DONE"]).read_text().splitlines())
    part, parts = map(int, os.environ["CLIENT_TESTS_SLICE"].split("/"))
    items[:] = [item for item in items[part - 1 :: parts] if device_free(item.nodeid) not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    line(begun=device_free(nodeid))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
    elif report.failed:
        reason = str(report.longrepr)[-1500:]
    line(name=device_free(report.nodeid), outcome=report.outcome, reason=reason)
