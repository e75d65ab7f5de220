"""How the vendor's library is found, and what is said when it is not."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable
from pathlib import Path

import pytest
from on_chip import ROOT, run_python

EMUCHIP = ROOT / "ditorch" / "lib" / "libemuchip.so"
B_MINI = ROOT / "ditorch" / "chips" / "b-mini.toml"
WHO = "import ditorch; print(ditorch.vendor(), ditorch.device, ditorch.chip().chip_type)"


def failure(**environment: str) -> str:
    """The last line a process prints that cannot import ditorch."""
    done = run_python("import ditorch", None, **environment)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("environment", "who"),
    [
        ({"DITORCH_CHIP": "b-mini"}, "emuchip emuchip:0 B-MINI"),
        ({"DITORCH_CHIP": str(B_MINI)}, "emuchip emuchip:0 B-MINI"),
        ({"EMUCHIP_CHIP": str(B_MINI)}, "emuchip emuchip:0 B-MINI"),
        (
            {"DITORCH_VENDOR_LIBRARY": str(EMUCHIP), "EMUCHIP_CHIP": str(B_MINI)},
            "emuchip emuchip:0 B-MINI",
        ),
        ({"DITORCH_VENDOR": "cpu", "DITORCH_CHIP": "b-mini"}, "cpu cpu "),
    ],
)
def test_the_vendor_is_found(environment: dict[str, str], who: str) -> None:
    done = run_python(WHO, None, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(who)


def test_an_unknown_vendor_is_refused() -> None:
    message = failure(DITORCH_VENDOR="npu9000")
    assert message.startswith("ImportError: DITORCH_VENDOR is 'npu9000', expected one of emuchip")


def test_an_unknown_chip_is_refused() -> None:
    message = failure(DITORCH_CHIP="b-maxi")
    assert message.startswith("ImportError: DITORCH_CHIP is 'b-maxi': ")
    assert "b-mini" in message


def test_a_malformed_chip_file_is_refused(make_chip: Callable[..., Path]) -> None:
    chip = make_chip("b-mini", capacity_bytes='"lots"')
    assert "capacity_bytes" in failure(DITORCH_CHIP=str(chip))


def test_emuchip_without_a_chip_is_refused() -> None:
    assert "no chip is named" in failure(DITORCH_VENDOR="emuchip")


def test_a_missing_library_is_refused(tmp_path: Path) -> None:
    assert "is not a file" in failure(DITORCH_VENDOR_LIBRARY=str(tmp_path / "libnone.so"))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libtext.so"
    path.write_text("not a library")
    assert f"the vendor library {path} does not load" in failure(DITORCH_VENDOR_LIBRARY=str(path))


def test_a_library_that_speaks_no_abi_is_refused() -> None:
    name = ctypes.util.find_library("m")
    code = (
        "import ctypes, os\n"
        f"ctypes.CDLL({name!r})\n"
        "maps = open('/proc/self/maps').read().split()\n"
        f"os.environ['DITORCH_VENDOR_LIBRARY'] = next(m for m in maps if m.endswith({name!r}))\n"
        "import ditorch\n"
    )
    done = run_python(code, None)
    assert done.returncode == 1
    assert "does not speak ditorch's runtime ABI version 1" in done.stderr.splitlines()[-1]
