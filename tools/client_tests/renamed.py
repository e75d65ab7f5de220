"""A suite that another vendor carries names that vendor's device; a copy of it names ours."""

from __future__ import annotations

import re
import shutil
from pathlib import Path


def renamed(source: Path, tests: str, copies: Path, vendor: str, device_type: str) -> Path:
    """The suite's tests with `device_type` where they say `vendor`, in a folder of their own.

    The vendor's module of torch, torch.npu or torch_npu.npu, becomes the device's.
    """
    copy = copies / device_type
    shutil.copytree(source / tests, copy / tests)
    for file in (copy / tests).rglob("*.py"):
        text = re.sub(rf"(?m)^( *)import torch_{vendor}\b.*$", r"\1pass", file.read_text())
        text = re.sub(rf"\btorch_{vendor}\.{vendor}\b", f"torch.{device_type}", text)
        file.write_text(re.sub(rf"\b(is_)?{vendor}\b", rf"\1{device_type}", text))
    return copy
