"""Says in a wheel's version and requirements which torch its C++ was built against.

python tools/pin_wheel.py WHEEL TORCH FOLDER    writes the wheel that says so to the folder

torch's C++ interfaces keep for one minor version: a virtual function more, or a member more of a
class, and a library that was built before calls the wrong one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def pin(metadata: str, torch: str) -> str:
    """Returns a wheel's METADATA for the minor version of `torch`. Raises ValueError."""
    minor = ".".join(torch.split(".")[:2])
    metadata, versions = re.subn(r"(?m)^Version: (.+)$", rf"Version: \1+torch{minor}", metadata)
    metadata, needs = re.subn(
        r"(?m)^Requires-Dist: torch(?=[<>=~!; ]|$).*$", f"Requires-Dist: torch=={minor}.*", metadata
    )
    if (versions, needs) != (1, 1):
        raise ValueError(
            f"METADATA has {versions} versions and needs torch {needs} times, not once"
        )
    return metadata


def main(wheel: str, torch: str, output: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tool = [sys.executable, "-m", "wheel"]
        subprocess.run([*tool, "unpack", wheel, "--dest", scratch], check=True)
        (root,) = Path(scratch).iterdir()
        (information,) = root.glob("*.dist-info")
        metadata = information / "METADATA"
        metadata.write_text(pin(metadata.read_text(), torch))
        version = re.search(r"(?m)^Version: (.+)$", metadata.read_text())
        assert version
        information.rename(root / f"hyperhetero-{version[1]}.dist-info")
        subprocess.run([*tool, "pack", root, "--dest-dir", output], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
