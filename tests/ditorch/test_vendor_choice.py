"""How the vendor's library is found, and what is said when it is not."""

from __future__ import annotations

import ctypes.util
from collections.abc import Callable
from pathlib import Path

from on_chip import ROOT, run_each, run_new_python, run_python

EMUCHIP = ROOT / "ditorch" / "lib" / "libemuchip.so"
B_MINI = ROOT / "ditorch" / "chips" / "b-mini.toml"
WHO = "import ditorch; print(ditorch.vendor(), ditorch.device, ditorch.chip().chip_type)"


def failures(*environments: dict[str, str]) -> list[str]:
    """What `import ditorch` says with each of the environments; none of them gives a chip."""
    code = (
        "import os, sys\n"
        f"for environment in {list(environments)!r}:\n"
        "    os.environ.update(environment)\n"
        "    try:\n"
        "        import ditorch\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
        "    for name in environment:\n"
        "        del os.environ[name]\n"
        "    for name in [name for name in sys.modules if name.startswith('ditorch.vendors')]:\n"
        "        del sys.modules[name]\n"
    )
    done = run_python(code, None)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == len(environments), done.stdout
    return said


def test_a_program_with_an_unknown_chip_ends_with_a_sentence() -> None:
    done = run_new_python("import ditorch", "b-maxi")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("ImportError: DITORCH_CHIP is 'b-maxi': chip 'b-maxi': expected")


def test_the_vendor_is_found() -> None:
    expected = [
        ({"DITORCH_CHIP": str(B_MINI)}, "emuchip emuchip:0 B-MINI"),
        ({"EMUCHIP_CHIP": str(B_MINI)}, "emuchip emuchip:0 B-MINI"),
        (
            {"DITORCH_VENDOR_LIBRARY": str(EMUCHIP), "EMUCHIP_CHIP": str(B_MINI)},
            "emuchip emuchip:0 B-MINI",
        ),
        ({"DITORCH_VENDOR": "cpu", "DITORCH_CHIP": "b-mini"}, "cpu cpu "),
    ]
    results = run_each(WHO, [environment for environment, _ in expected])
    for (environment, who), done in zip(expected, results, strict=True):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(who), environment


def real_chip(folder: Path, driver: str) -> Path:
    """The file of a chip that `driver` drives."""
    file = folder / f"{driver}.toml"
    file.write_text(f'driver = "{driver}"\n{B_MINI.read_text()}')
    return file


def test_a_chips_driver_chooses_the_vendor(tmp_path: Path) -> None:
    cpu = str(real_chip(tmp_path, "cpu"))
    ours, named = run_each(
        WHO, [{"DITORCH_CHIP": cpu}, {"DITORCH_CHIP": cpu, "DITORCH_VENDOR": "npu9000"}]
    )
    assert ours.stdout.startswith("cpu cpu "), ours.stderr
    assert "DITORCH_VENDOR is 'npu9000', expected one of" in named.stderr
    unknown, emulated = failures(
        {"DITORCH_CHIP": str(real_chip(tmp_path, "npu9000"))},
        {"DITORCH_CHIP": cpu, "DITORCH_VENDOR": "emuchip"},
    )
    assert "npu9000.toml' is 'npu9000', expected one of library, emuchip, npu" in unknown
    assert "cpu.toml', a real chip that cpu drives" in emulated


def test_what_is_not_there_is_refused_with_the_reason(
    tmp_path: Path, make_chip: Callable[..., Path]
) -> None:
    text = tmp_path / "libtext.so"
    text.write_text("not a library")
    malformed = make_chip("b-mini", capacity_bytes='"lots"')
    vendor, chip, key, nameless, missing, unloadable, foreign = failures(
        {"DITORCH_VENDOR": "npu9000"},
        {"DITORCH_CHIP": "b-maxi"},
        {"DITORCH_CHIP": str(malformed)},
        {"DITORCH_VENDOR": "emuchip"},
        {"DITORCH_VENDOR_LIBRARY": str(tmp_path / "libnone.so")},
        {"DITORCH_VENDOR_LIBRARY": str(text)},
        {"DITORCH_VENDOR_LIBRARY": _library_of_someone_else()},
    )
    assert vendor.startswith("DITORCH_VENDOR is 'npu9000', expected one of library, emuchip, npu")
    assert chip.startswith("DITORCH_CHIP is 'b-maxi': ") and "b-mini" in chip
    assert "capacity_bytes" in key
    assert "no chip is named" in nameless
    assert "is not a file" in missing
    assert f"the vendor library {text} does not load" in unloadable
    assert "does not speak ditorch's runtime ABI version 1" in foreign


def _library_of_someone_else() -> str:
    """The path of a library that loads and implements no ABI of ditorch's."""
    name = ctypes.util.find_library("m")
    assert name is not None
    ctypes.CDLL(name)
    return next(word for word in Path("/proc/self/maps").read_text().split() if word.endswith(name))
