"""The libraries' own headers against what dicomm declares of them."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_declared_interface_is_that_of_the_headers():
    source = Path(__file__).with_name("abi_check.cpp")
    options = ["-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{ROOT}/csrc/dicomm"]
    done = subprocess.run(["g++", *options, source], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
