"""A compiler without the link to its shared C++ library: our libraries use the shared one still."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[1] / "csrc"
PROJECT = """\
cmake_minimum_required(VERSION 3.22)
project(small LANGUAGES CXX)
include("{included}")
add_library(small SHARED small.cpp)
"""
SOURCE = (
    "#include <sstream>\nint small(int n) { std::ostringstream s; s << n; return s.tellp(); }\n"
)
# as such a compiler does: it does not know the link, and takes the static library in silence
COMPILER = """\
#!/bin/sh
case "$*" in
  -print-file-name=libstdc++.so) echo libstdc++.so ;;
  *) exec {compiler} -static-libstdc++ "$@" ;;
esac
"""


@pytest.mark.parametrize("included", ["", str(CSRC / "shared_libstdcxx.cmake")])
def test_the_static_library_is_in_none_of_ours(tmp_path: Path, included: str) -> None:
    if not included:  # what it is that is mended
        included = str(tmp_path / "nothing.cmake")
        Path(included).write_text("")
    compiler = tmp_path / "g++"
    compiler.write_text(COMPILER.format(compiler=shutil.which("g++")))
    compiler.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(included=included))
    (tmp_path / "small.cpp").write_text(SOURCE)
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"CXX": str(compiler), "PATH": beside_python}
    for command in (["cmake", "-S", ".", "-B", "built"], ["cmake", "--build", "built"]):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
    read = ["readelf", "-d", str(tmp_path / "built" / "libsmall.so")]
    needed = subprocess.run(read, capture_output=True, text=True, check=True, timeout=20).stdout
    assert ("libstdc++.so.6" in needed) == included.startswith(str(CSRC))
