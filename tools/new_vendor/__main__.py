"""Writes the skeleton of a vendor's library: plain C that builds, loads and conforms as it is."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

FILES = Path(__file__).parent / "files"
HEADERS = Path(__file__).parents[2] / "csrc" / "ditorch" / "abi"
LONGEST_NAME = 32

EXAMPLE = """example:
  tools/new-vendor acme && make -C acme
  DITORCH_VENDOR_LIBRARY=$PWD/acme/libacme.so python -m ditorch"""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message} (--help says more)"))


def complain(message: str) -> int:
    print(f"new-vendor: {message}", file=sys.stderr)
    return 2


def malformed(name: str) -> str | None:
    """What is wrong with the name as such; None if nothing is."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return "expected lower-case letters, digits and underscores, beginning with a letter"
    if len(name) > LONGEST_NAME:
        return f"expected at most {LONGEST_NAME} characters"
    if name == "device":
        return "that is ditorch's name for every vendor's device"
    return None


def taken(name: str) -> str | None:
    """What torch has of this name already; None if nothing."""
    try:
        import torch  # here, as it takes seconds
    except ImportError:
        return "torch, which would know if it is free, is not installed; run tools/setup"
    try:
        torch.device(name)
    except RuntimeError:
        pass
    else:
        return "torch has a device of that name"
    for owner in (torch, torch.Tensor):
        if hasattr(owner, name):
            return f"torch needs the name for its own {owner.__name__}.{name}"
    return None


def write(name: str, output: Path) -> None:
    """Writes the whole folder or nothing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{name}-") as scratch:
        made = Path(scratch) / name
        shutil.copytree(FILES, made)
        for file in [path for path in made.rglob("*") if path.is_file()]:
            file.write_text(file.read_text().replace("@NAME@", name))
        (made / "include").mkdir()
        for header in ("runtime.h", "operators.h"):
            shutil.copy(HEADERS / header, made / "include" / header)
        os.rename(made, output)


def main() -> int:
    parser = Parser(
        prog="new-vendor",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="what torch will call the device, for example acme")
    parser.add_argument("--output", type=Path, help="the folder to write; ./NAME if not given")
    arguments = parser.parse_args()
    name: str = arguments.name
    output: Path = arguments.output or Path(name)
    reason = malformed(name)
    if not reason and os.path.lexists(output):
        return complain(f"{output} is there already; name another folder with --output")
    if reason := reason or taken(name):
        return complain(f"{name!r} cannot be the name of a device: {reason}")
    try:
        write(name, output)
    except OSError as error:
        return complain(f"{output} cannot be written: {error.strerror or error}")
    print(f"{output} is written: build it with `make -C {output}`, then read {output}/README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
