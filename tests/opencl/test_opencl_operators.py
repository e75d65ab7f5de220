"""Every operator of the device against float64 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_opencl import lines

SCRIPTS = Path(__file__).parent / "scripts"
LONG = pytest.mark.long
DTYPES = [
    "float32",
    *(pytest.param(name, marks=LONG) for name in ("bfloat16", "float64")),
    pytest.param("float16", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operators", ["matmul", "rows"])
def test_operators_agree_with_the_cpu(operators: str, dtype: str) -> None:
    assert lines((SCRIPTS / f"{operators}.py").read_text(), DTYPE=dtype)[-1] == "done"
