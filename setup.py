"""Builds the C++ side with CMake; everything else is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs csrc/CMakeLists.txt once; its libraries land inside the Python packages."""

    def run(self) -> None:
        import pybind11
        import torch

        output = ROOT if self.inplace else Path(self.build_lib).resolve()
        build = ROOT / "build" / f"cmake-{sys.version_info.major}.{sys.version_info.minor}"
        build.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                "cmake", "-S", ROOT / "csrc", "-B", build, "-G", "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
                f"-DTORCH_DIR={Path(torch.__file__).parent}",
                f"-DHYPERHETERO_OUTPUT={output}",
            ],
            check=True,
        )  # fmt: skip
        subprocess.run(["cmake", "--build", build], check=True)


setup(
    ext_modules=[Extension("hyperhetero", sources=[])],  # marks the wheel as platform-specific
    cmdclass={"build_ext": CMakeBuild},
)
