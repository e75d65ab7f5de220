"""The C++ tests of libdicomm and a short run of its oracle of random operations."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest
from installed import need

import dicomm

HERE = Path(__file__).parent
LIBRARY = Path(dicomm.__file__).parent / "lib" / "libdicomm.so"
BUILD = HERE.parents[1] / "build" / "cpp-tests"


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder of the built programs; quick when nothing changed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers, one build
        configure = ["cmake", "-S", HERE / "cpp", "-B", BUILD, "-G", "Ninja"]
        configure += [f"-DDICOMM_LIBRARY={LIBRARY}", "-DCMAKE_BUILD_TYPE=None"]
        for command in [*configure, "-DCMAKE_CXX_FLAGS=-O1"], ["cmake", "--build", BUILD]:
            ended = subprocess.run(command, capture_output=True, text=True)
            assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return BUILD


def run(program: Path, *arguments: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=200, env=environment
    )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-8000:]


def test_the_cpp_suite(programs: Path) -> None:
    need("doctest-dev", str(programs / "dicomm_tests"))
    # test_p2p.py has such a message every day, tools/sanitize this one in CI
    run(programs / "dicomm_tests", "--test-case-exclude=*2 GiB*")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("ranks_are", ["threads", "processes"])
def test_random_operations_against_a_model(programs: Path, transport: str, ranks_are: str) -> None:
    arguments = ["--seed", "1", "--operations", "7500", "--ranks", "3", "--transport", transport]
    if ranks_are == "processes":
        arguments.append("--processes")
    run(programs / "dicomm_oracle", *arguments)
