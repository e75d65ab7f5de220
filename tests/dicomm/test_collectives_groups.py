"""libdicomm without torch: collectives of groups of any size, order and layout over nodes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import dicomm

HERE = Path(__file__).parent
LIBRARIES = Path(dicomm.__file__).parent / "lib"


@pytest.mark.parametrize(
    "program",
    [
        "collective_groups",
        "collective_messages",
        pytest.param("collective_oracle", marks=pytest.mark.long),
    ],
)
def test_program_finds_nothing_wrong(program: str, tmp_path: Path) -> None:
    built = tmp_path / program
    subprocess.run(
        [
            os.environ.get("CXX", "g++"), "-std=c++20", "-O1",
            f"-I{HERE.parents[1] / 'csrc' / 'dicomm'}", HERE / f"{program}.cpp",
            f"-L{LIBRARIES}", "-ldicomm", f"-Wl,-rpath,{LIBRARIES}", "-pthread", "-o", built,
        ],
        check=True,
    )  # fmt: skip
    ended = subprocess.run([built], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
