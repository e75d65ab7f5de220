"""Which vendor is chosen and what is said of the others.

Plugins that cannot be installed here are played by small fakes of their public surface
(fake_plugins/).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forks
import torch
from on_chip import DEADLINE_S, ROOT, environment, run_each, run_python

FAKES = Path(__file__).parent / "fake_plugins"
FAKE_PATH = f"{ROOT}:{FAKES}"
B_MINI = str(ROOT / "ditorch" / "chips" / "b-mini.toml")
PLUGINS = {"FAKE_PLUGIN_CHIP_FILE": B_MINI}
_OF_PLUGINS = ["npu", "mlu", "musa", "mojo", "privateuse1"]
ORDER = ["library", "emuchip", *_OF_PLUGINS, "cuda", "rocm", "xpu", "mps", "opencl", "cpu"]


def run_with_plugins(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs code where torch_npu, torch_mlu, torch_musa and torch_other are installed."""
    return run_python(code, None, PYTHONPATH=FAKE_PATH, **PLUGINS, **extra)


def show(*options: str, chip: str | None = None, **extra: str) -> subprocess.CompletedProcess[str]:
    return forks.run(["-m", "ditorch", *options], environment(chip, **extra), timeout_s=DEADLINE_S)


def test_a_plugins_device_is_adopted_under_its_own_name() -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.randn(4, 4, device='device')\n"
        "print(ditorch.vendor(), ditorch.device, x.device, torch.device('device:0'))\n"
        "print(ditorch.chip())\n"
        "print(ditorch.is_emulated(), ditorch.pacing(), ditorch.device_clock())\n"
        "assert torch.equal((x + x).cpu(), 2 * x.cpu())\n"
        "ditorch.enable(cuda_compat=True)\n"
        "print(torch.ones(1).cuda().device, torch.cuda.get_device_name(0))\n"
    )
    makers = {"npu": "Huawei", "mlu": "Cambricon", "musa": "Moore Threads"}
    environments = [{"DITORCH_VENDOR": vendor, **PLUGINS} for vendor in makers]
    results = run_each(code, environments, PYTHONPATH=FAKE_PATH)
    for (vendor, maker), done in zip(makers.items(), results, strict=True):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"{vendor} {vendor}:0 {vendor}:0 {vendor}:0",
            f"Chip(vendor='{maker}', chip_type='{vendor.upper()} (fake)', memory_bytes=1073741824)",
            "False None None",
            f"{vendor}:0 {vendor.upper()} (fake)",
        ]


def test_a_plugin_ditorch_does_not_know_is_adopted_once_imported() -> None:
    code = (
        "import torch, torch_other, ditorch\n"
        "print(ditorch.vendor(), torch.ones(2, device='device').device, ditorch.chip().vendor)\n"
    )
    done = run_with_plugins(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "other other:0 other"


def test_a_plugin_that_does_not_say_its_memory_is_adopted_all_the_same() -> None:
    code = (
        "import runpy, sys, torch, torch_other\n"
        "del torch.other.get_device_properties\n"
        "import ditorch\n"
        "print(ditorch.chip().memory_bytes)\n"
        "sys.argv = ['ditorch']\n"
        "runpy.run_module('ditorch', run_name='__main__')\n"
    )
    done = run_with_plugins(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None\n")
    assert "other:0: chip OTHER (fake) of other, memory unknown; torch" in done.stdout


def test_a_broken_plugin_is_warned_about_and_an_error_once_asked_for() -> None:
    without = {"FAKE_PLUGIN_BROKEN": "npu", "FAKE_PLUGIN_WITHOUT_CHIP": "mlu"}
    why = "torch_npu is installed but does not import (ImportError: libchip.so: cannot open"
    done = run_with_plugins("import ditorch; print(ditorch.vendor())", **without)
    assert done.returncode == 0, done.stderr
    # mlu is installed without a chip: torch's place is then taken, and musa cannot have it
    assert done.stdout.strip() == "cpu"
    assert f"RuntimeWarning: ditorch goes on without npu: {why}" in done.stderr

    done = run_with_plugins("import ditorch", DITORCH_VENDOR="npu", **without)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: DITORCH_VENDOR is 'npu' but {why}")


def test_a_wanted_vendor_that_is_absent_is_an_error_with_the_reason() -> None:
    reasons = {
        "npu": "torch_npu is not installed",
        "cuda": "torch.cuda finds no usable GPU"
        if torch.backends.cuda.is_built()
        else "this build of torch has no CUDA",
        "mps": "this build of torch has no MPS",
        "privateuse1": "no plugin has registered a device with torch",
        "library": "DITORCH_VENDOR_LIBRARY names no library",
    }
    code = (
        "import os\n"
        f"for name in {list(reasons)!r}:\n"
        "    os.environ['DITORCH_VENDOR'] = name\n"
        "    try:\n"
        "        import ditorch\n"
        "    except ImportError as error:\n"
        "        print(error)\n"
    )
    done = run_python(code, None)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"DITORCH_VENDOR is {name!r} but {why}" for name, why in reasons.items()
    ]


def test_a_library_of_ditorchs_cannot_have_a_place_that_is_taken() -> None:
    done = run_with_plugins("import torch_other, ditorch", DITORCH_CHIP="b-mini")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: the device 'other' already has torch's place")


def test_import_ditorch_imports_no_plugin_it_does_not_need() -> None:
    code = (
        "import sys, ditorch\n"
        "print([name for name in sys.modules if name.startswith(('torch_', 'rich', 'typer'))])\n"
    )
    done = run_with_plugins(code, DITORCH_CHIP="b-mini")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_command_shows_every_vendor_in_order_and_what_was_chosen() -> None:
    done = show("--json", chip="b-mini")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [row["vendor"] for row in report["vendors"]] == ORDER
    by_name = {row["vendor"]: row for row in report["vendors"]}
    assert [row["vendor"] for row in report["vendors"] if row["chosen"]] == ["emuchip"]
    assert by_name["npu"]["state"] == "not found"
    assert by_name["npu"]["why"] == "torch_npu is not installed"
    assert by_name["mps"]["quirks"][0] == "float64 tensors become float32"
    assert by_name["cpu"]["state"] == "found" and not by_name["cpu"]["chosen"]
    assert report["chosen"] == {
        "vendor": "emuchip",
        "because": "DITORCH_CHIP names its chip",
        "device": "emuchip:0",
        "chip_vendor": "B",
        "chip_type": "B-MINI",
        "memory_bytes": 64 * 2**20,
        "emulated": True,
    }


def test_the_command_still_shows_the_table_when_the_chosen_vendor_is_broken() -> None:
    plugins = {"PYTHONPATH": FAKE_PATH, "FAKE_PLUGIN_BROKEN": "npu"}
    done = show("--json", DITORCH_VENDOR="npu", **plugins)
    assert done.returncode == 2
    report = json.loads(done.stdout)
    broken = next(row for row in report["vendors"] if row["vendor"] == "npu")
    assert broken["state"] == "broken" and "libchip.so" in broken["why"]
    assert report["chosen"] is None and "libchip.so" in report["error"]
    assert "Traceback" not in done.stderr

    done = show(DITORCH_VENDOR="npu9000")
    assert done.returncode == 2
    assert "privateuse1" in done.stdout
    assert done.stderr.startswith("ditorch: DITORCH_VENDOR is 'npu9000', expected one of library")
    assert "Traceback" not in done.stderr


def test_the_command_says_in_one_sentence_that_the_cpp_part_does_not_load(tmp_path: Path) -> None:
    package = tmp_path / "ditorch"
    package.mkdir()
    for file in (ROOT / "ditorch").iterdir():
        if not file.name.startswith(("_ditorch.", "__pycache__")):
            (package / file.name).symlink_to(file)
    (package / "_ditorch.so").touch()
    command, program = (
        subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment(None),
            capture_output=True, text=True, timeout=DEADLINE_S,
        )
        for arguments in (("-m", "ditorch"), ("-c", "import ditorch"))
    )  # fmt: skip
    assert (command.returncode, command.stdout) == (2, "")
    assert command.stderr.startswith("ditorch: ditorch's C++ part does not load")
    assert len(command.stderr.splitlines()) == 1
    assert "ImportError: ditorch's C++ part does not load" in program.stderr
