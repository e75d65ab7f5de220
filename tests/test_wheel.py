"""tools/wheel: an sdist, and a wheel that works in an empty environment."""

from __future__ import annotations

import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "wheel"


def test_what_the_tool_does_not_know_is_one_sentence() -> None:
    done = subprocess.run([TOOL, "--nothing"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "wheel: --nothing: expected --output FOLDER or --torch VERSION\n"


@pytest.mark.exhaustive  # compiles everything once more
@pytest.mark.timeout(1800)
def test_the_wheel_plans_and_trains_in_an_empty_environment(tmp_path: Path) -> None:
    done = subprocess.run(
        [TOOL, "--output", tmp_path], capture_output=True, text=True, timeout=1700
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "planned and trained with torch 2." in done.stdout

    (wheel,) = tmp_path.glob("hyperhetero-*.whl")
    name = r"hyperhetero-[0-9.]+\+torch(2\.\d+)-cp31[12]-cp31[12]-manylinux_2_\d+_x86_64\.whl"
    matched = re.fullmatch(name, wheel.name)
    assert matched, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
        (metadata,) = (name for name in held if name.endswith(".dist-info/METADATA"))
        needed = archive.read(metadata).decode()
    assert f"Requires-Dist: torch=={matched[1]}.*\n" in needed
    libraries = [name for name in held if ".so" in name]
    for ours in ("ditorch/_ditorch", "dicomm/_c10d", "dicomm/lib/libdicomm", "heteropp/_planner"):
        assert any(name.startswith(ours) for name in libraries), ours
    foreign = ("libtorch", "libc10", "libibverbs", "libOpenCL")
    assert not [name for name in libraries if Path(name).name.startswith(foreign)]

    (sdist,) = tmp_path.glob("hyperhetero-*.tar.gz")
    with tarfile.open(sdist) as archive:
        sources = archive.getnames()
    assert any(name.endswith("csrc/CMakeLists.txt") for name in sources)
    assert not [name for name in sources if name.endswith(".so")]
