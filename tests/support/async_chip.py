"""The asynchronous chip of the tests, built when first asked for and whenever its source changes.

Set DITORCH_VENDOR_LIBRARY to `library()` for a process that shall have it; see async_chip/chip.h.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).parent / "async_chip"
ABI = ROOT / "csrc" / "ditorch" / "abi"
SKELETON = ROOT / "tools" / "new_vendor" / "files" / "src"
KERNELS = [
    SKELETON / f"{name}.c"
    for name in (
        *("attention", "elements", "grouped_matmul", "indexed", "map", "matmul", "philox"),
        *("reduce", "scan", "softmax", "sort", "tensors"),
    )
]
KEPT = ROOT / "build" / "async_chip"


@cache
def library() -> Path:
    files = sorted([*SOURCE.iterdir(), *ABI.glob("*.h"), *SKELETON.glob("*.h"), *KERNELS])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    made = KEPT / digest / "libasyncchip.so"
    if made.exists():
        return made
    made.parent.mkdir(parents=True, exist_ok=True)
    with (
        (made.parent / "lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=made.parent) as scratch,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers, one build
        if made.exists():
            return made
        fresh = Path(scratch) / made.name
        common = ["-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-pthread", f"-I{ABI}"]
        _compile("gcc", "-std=c11", *common, "-fvisibility=hidden", "-c", *KERNELS, folder=scratch)
        _compile(
            *("g++", "-std=c++20", "-shared", *common, f"-I{SKELETON}", *SOURCE.glob("*.cpp")),
            *Path(scratch).glob("*.o"), "-o", fresh, folder=scratch,
        )  # fmt: skip
        os.replace(fresh, made)
    return made


def _compile(*command: str | Path, folder: str) -> None:
    subprocess.run(command, cwd=folder, check=True, timeout=250)


def environment(seed: int = 1, delay_us: int = 300, kernels: bool = True) -> dict[str, str]:
    return {
        "DITORCH_VENDOR_LIBRARY": str(library()),
        "ASYNC_CHIP_SEED": str(seed),
        "ASYNC_CHIP_DELAY_US": str(delay_us),
        "ASYNC_CHIP_KERNELS": str(int(kernels)),
    }


def hold(milliseconds: int, others: bool = False) -> None:
    """Lets what this process submits to its chip's default stream from now on wait.

    It waits until release(), or for so many milliseconds. others: all streams there are but that.
    """
    library = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"])
    (library.async_chip_hold_others if others else library.async_chip_hold)(milliseconds)


def copies_to_host() -> tuple[int, int]:
    """How many copies this process's chip has made to the host, and the bytes of the largest."""
    library = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"])
    library.async_chip_copies_to_host.restype = ctypes.c_size_t
    most_bytes = ctypes.c_size_t()
    return library.async_chip_copies_to_host(ctypes.byref(most_bytes)), most_bytes.value


def imports() -> tuple[int, int]:
    """How many allocations of other processes this one's chip has imported, and still holds."""
    library = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"])
    library.async_chip_imports.restype = ctypes.c_size_t
    live = ctypes.c_size_t()
    return library.async_chip_imports(ctypes.byref(live)), live.value


def exports() -> int:
    """How often memory of this process's chip was made known to others."""
    library = ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"])
    library.async_chip_exports.restype = ctypes.c_size_t
    return library.async_chip_exports()


def release() -> None:
    ctypes.CDLL(os.environ["DITORCH_VENDOR_LIBRARY"]).async_chip_release()
