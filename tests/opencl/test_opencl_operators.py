"""Every operator of the device against float64 on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from on_opencl import lines
from sampled import sampled

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("operators", "dtype"),
    sampled(
        [
            ("rows", "float32"),
            *(("matmul", "float32"), ("rows", "bfloat16"), ("matmul", "bfloat16")),
            *(("matmul", "float64"), ("rows", "float64")),
            *(("rows", "float16"), ("matmul", "float16")),
        ],
        4,
        everyday=1,
    ),
)
def test_operators_agree_with_the_cpu(operators: str, dtype: str) -> None:
    assert lines((SCRIPTS / f"{operators}.py").read_text(), DTYPE=dtype)[-1] == "done"
