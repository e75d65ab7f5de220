"""libdicomm without torch: groups that are parts of one communicator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import dicomm

HERE = Path(__file__).parent
LIBRARIES = Path(dicomm.__file__).parent / "lib"


def test_overlapping_groups_on_one_communicator(tmp_path: Path) -> None:
    program = tmp_path / "collective_groups"
    subprocess.run(
        [
            os.environ.get("CXX", "g++"), "-std=c++20", "-O1",
            f"-I{HERE.parents[1] / 'csrc' / 'dicomm'}", HERE / "collective_groups.cpp",
            f"-L{LIBRARIES}", "-ldicomm", f"-Wl,-rpath,{LIBRARIES}", "-pthread", "-o", program,
        ],
        check=True,
    )  # fmt: skip
    ended = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
