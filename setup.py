"""Builds the C++ side with CMake; everything else is in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
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


class PlatformDistribution(Distribution):
    """Marks the wheel as one for this platform and this Python, although CMake builds all of it."""

    def has_ext_modules(self) -> bool:
        return True


setup(distclass=PlatformDistribution, cmdclass={"build_ext": CMakeBuild})
