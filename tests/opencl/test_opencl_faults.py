"""What goes wrong with a device or its cache is one sentence, or mended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from on_opencl import DEADLINE_S, KEPT, ROOT, environment, lines, run

EXAMPLE = ROOT / "ditorch" / "align" / "example.py"
SMALL = ["--", "--dim", "32", "--heads", "2", "--batch", "2", "--length", "16", "--gain", "5",
         "--dtype", "float32", "--learning-rate", "3e-2", "--steps", "8"]  # fmt: skip

SOFTMAX = """
import torch, ditorch
x = torch.randn(3, 7)
error = (x.to("device").softmax(-1).cpu() - x.softmax(-1)).abs().max().item()
assert error < 1e-6 and ditorch.kernel_counts()["_softmax"] == 1, error
print("done")
"""


@pytest.fixture(scope="module")
def interposed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("interposed") / "libinterposed.so"
    source = Path(__file__).parent / "interposed.c"
    command = ["gcc", "-shared", "-fPIC", "-DCL_TARGET_OPENCL_VERSION=200", str(source)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=120)
    return library


def said_of(fault: str, interposed: Path, cache: Path) -> str:
    """The last line of the process, which fails without a crash."""
    done = subprocess.run(
        [sys.executable, "-c", SOFTMAX],
        env=environment(FAULT=fault, LD_PRELOAD=str(interposed), XDG_CACHE_HOME=str(cache)),
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        ("no_svm", "has no shared virtual memory (SVM), which ditorch needs"),
        ("no_build", "does not build the kernels of softmax.cl, CL_BUILD_PROGRAM_FAILURE (-11): "),
        ("lost", "failed to launch a kernel: CL_OUT_OF_RESOURCES (-5)"),
    ],
)
def test_a_bad_device_is_one_sentence(
    fault: str, wanted: str, interposed: Path, tmp_path: Path
) -> None:
    said = said_of(fault, interposed, tmp_path)
    assert wanted in said and " (driver " in said


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    assert lines(SOFTMAX) == ["done"]  # keeps what the next lines damage
    cache = tmp_path / "cache"
    with suppress(shutil.Error):  # other tests' compilers take files of theirs away meanwhile
        shutil.copytree(KEPT, cache)
    binaries = list((cache / "hyperhetero" / "opencl").glob("softmax-*.bin"))
    sound = {file: file.read_bytes() for file in binaries}
    assert sound
    for i, file in enumerate(binaries):
        content = sound[file]
        half = len(content) // 2
        file.write_bytes(content[:half] if i % 2 else content[:half] + b"?" + content[half + 1 :])
    damaged = {file: file.read_bytes() for file in binaries}
    assert lines(SOFTMAX, XDG_CACHE_HOME=str(cache)) == ["done"]
    assert any(file.read_bytes() != damaged[file] for file in binaries)
    assert {file.name for file in (cache / "hyperhetero" / "opencl").iterdir()} >= {
        file.name for file in binaries
    }


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "hyperhetero").write_text("a file where a folder would be")
    assert lines(SOFTMAX, XDG_CACHE_HOME=str(tmp_path)) == ["done"]


@pytest.mark.parametrize("given", ["lots", "0", "99999999999999999", "1e9"])
def test_memory_that_makes_no_sense_is_refused(given: str) -> None:
    done = run("import ditorch", DITORCH_OPENCL_MEMORY_BYTES=given)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert f"DITORCH_OPENCL_MEMORY_BYTES is '{given}', expected bytes, at most the " in said


@pytest.mark.exhaustive  # its compiler takes minutes; emulated chips' faults are named so every day
@pytest.mark.timeout(3 * DEADLINE_S)
def test_a_fault_in_one_kernel_is_named(interposed: Path, tmp_path: Path) -> None:
    """A comparison of two captures names it, and so do the losses alone."""
    wrong = environment(FAULT="softmax", LD_PRELOAD=str(interposed), XDG_CACHE_HOME=str(tmp_path))

    def align(*arguments: str | Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "ditorch_align", *map(str, arguments)]
        done = subprocess.run(
            command, env=wrong, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert done.returncode == 1, done.stderr  # it failed, and not for bad input
        return json.loads(done.stdout)

    run, isolate = tmp_path / "run", tmp_path / "isolate"
    looking = "--steps", "2", "--tool-steps", "1", "--tools", "capture"
    align("run", EXAMPLE, "--chips", "opencl", *looking, "--json", "-o", run, *SMALL)
    captures = [run / name / "tools" / "capture" for name in ("reference", "opencl")]
    for found in (
        align("compare", *captures, "--json"),
        align("isolate", EXAMPLE, "--chip", "opencl", "--json", "-o", isolate, *SMALL),
    ):
        assert found["first_bad"]["operator"] == "aten._softmax.default"
        assert found["first_bad"]["module"] == "layers.0.attention"
