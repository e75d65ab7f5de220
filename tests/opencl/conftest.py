"""OpenCL's part of a machine: tests skip where its driver or our library over it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import lack, need

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "ditorch" / "lib" / "libditorch_opencl.so"


@pytest.fixture(autouse=True, scope="session")
def _driver() -> None:
    need("pocl-opencl-icd", *map(str, Path("/etc/OpenCL/vendors").glob("*.icd")))
    if not LIBRARY.exists():
        lack("ditorch was built without OpenCL's headers", "tools/packages opencl && tools/setup")
