"""A vendor's library as tools/new-vendor writes it, unedited; and one whose memory is hidden."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import forks
import pytest
from installed import need
from on_chip import ROOT, run_checks, run_python
from training_step import losses

NEW_VENDOR = ROOT / "tools" / "new-vendor"
PROGRAM = ROOT / "tools" / "new_vendor" / "__main__.py"
HIDDEN_MEMORY = Path(__file__).parent / "vendors_in_c" / "hidden_memory.c"
DEADLINE_S = 120


def new_vendor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forks.run([str(PROGRAM), *arguments], os.environ, cwd, timeout_s=DEADLINE_S)


def build(folder: Path) -> Path:
    need("make", "make")
    done = subprocess.run(
        ["make", "-s", "-C", str(folder), "CFLAGS=-O2 -Werror"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    (library,) = folder.glob("lib*.so")
    return library


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of an unedited skeleton."""
    folder = tmp_path_factory.mktemp("vendors")
    done = subprocess.run(
        [str(NEW_VENDOR), "acme"], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    return build(folder / "acme")


@pytest.fixture(scope="module")
def make_hidden(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """make_hidden(has_kernels) -> a library whose device pointers the host cannot follow."""

    @cache
    def make(has_kernels: bool) -> Path:
        folder = tmp_path_factory.mktemp("hidden") / "hidden"
        done = new_vendor("hidden", "--output", str(folder), cwd=ROOT)
        assert done.returncode == 0, done.stderr
        (folder / "src" / "memory.c").write_text(HIDDEN_MEMORY.read_text())
        header = folder / "src" / "chip.h"
        header.write_text(header.read_text().replace("256 << 20", "64 << 20"))
        if not has_kernels:
            (folder / "src" / "operators.c").unlink()
        return build(folder)

    return make


def test_an_unedited_skeleton_is_a_device(acme: Path) -> None:
    code = (
        "import os, torch, ditorch\n"
        "torch.manual_seed(0)\n"
        "x = torch.randn(5, 7)\n"
        "y = x.to('device') @ x.to('device').mT\n"
        "assert torch.allclose(y.cpu(), x @ x.mT, atol=1e-5)\n"
        "print(y.device, torch.acme.get_device_name(), ditorch.kernel_counts().get('mm'))\n"
        "assert not torch.acme._is_in_bad_fork()\n"
        "if not (child := os.fork()):\n"  # a driver would not work there
        "    os._exit(0 if torch.acme._is_in_bad_fork() else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "y.cumprod(0)\n"
        "print(ditorch.fallback_counts(), ditorch.peer_handle(y))\n"
    )
    done = run_python(code, None, DITORCH_VENDOR_LIBRARY=str(acme))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["acme:0", "acme", "acme", "1", "{'cumprod':", "1}", "None"]


RUN_CONFORMANCE = """
import collections, warnings
warnings.simplefilter("ignore")
from ditorch.conform.check import Unsupported
from ditorch.conform.runtime import checks

counts, failures = collections.Counter(), []
for check in checks():
    if wanted and check.group not in wanted:
        continue
    try:
        check.run()
        counts[check.group] += 1
    except Unsupported as reason:
        print("unsupported:", check.name, "-", reason)
    except Exception as error:
        failures.append(f"{check.group}: {check.name}: {error!r}")
assert not failures, failures
assert wanted or (len(counts) == 12 and sum(counts.values()) >= 95), counts
"""


def conformance(*groups: str) -> str:
    """A script of the runtime checks, of all groups if none is named."""
    return f"wanted = {groups!r}\n{RUN_CONFORMANCE}"


def test_an_unedited_skeleton_conforms(acme: Path) -> None:
    done = run_python(conformance(), None, DITORCH_VENDOR_LIBRARY=str(acme))
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_emulated_chip_conforms() -> None:
    done = run_python(conformance(), "b-mini")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_chip_whose_memory_the_host_cannot_reach(make_hidden: Callable[[bool], Path]) -> None:
    files = ["check_memory.py", "check_random.py", "check_files.py", "check_autocast.py",
             "check_training.py"]  # fmt: skip
    run_checks(None, *files, DITORCH_VENDOR_LIBRARY=str(make_hidden(False)))


def test_kernels_and_fallbacks_share_memory_the_host_cannot_reach(
    make_hidden: Callable[[bool], Path],
) -> None:
    code = conformance("memory", "storage", "copy") + (
        "import torch, ditorch\n"
        "x = torch.randn(4, 6, device='device')\n"
        "assert x.data_ptr() >> 52 == 1, hex(x.data_ptr())\n"
        "expected = 2 * (x.cpu() @ x.cpu().mT) + 3\n"
        "bias = torch.ones(4, device='device')\n"
        "y = torch.addmm(bias, x, x.mT, beta=3, alpha=2)\n"
        "y = y.cumprod(0)\n"  # the host's own
        "assert torch.allclose(y.cpu(), expected.cumprod(0), rtol=1e-4)\n"
    )
    done = run_python(code, None, DITORCH_VENDOR_LIBRARY=str(make_hidden(True)))
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_host_computes_nothing_of_a_training_step(make_hidden: Callable[[bool], Path]) -> None:
    library = str(make_hidden(True))
    strict = partial(run_python, chip=None, DITORCH_VENDOR_LIBRARY=library, DITORCH_STRICT="1")
    expected = losses(partial(run_python, chip=None), "Mixtral", "eager")
    assert losses(strict, "Mixtral", "eager") == pytest.approx(expected, rel=1e-4)


def test_the_skeletons_sums_with_products_are_its_own(make_hidden: Callable[[bool], Path]) -> None:
    library = str(make_hidden(True))
    strict = {"DITORCH_VENDOR_LIBRARY": library, "DITORCH_STRICT": "1"}
    run_checks(None, "check_products.py", DTYPES="float32", **strict)


@pytest.mark.exhaustive
def test_the_skeletons_kernels_agree_with_the_cpu(make_hidden: Callable[[bool], Path]) -> None:
    files = ["check_elementwise.py", "check_composed.py", "check_indexed.py"]
    files += ["check_attention.py", "check_flash_attention.py", "check_dropped_attention.py"]
    files += ["check_capped_attention.py", "check_fused_adam.py"]
    run_checks(None, *files, DITORCH_VENDOR_LIBRARY=str(make_hidden(True)))


@pytest.mark.long
def test_operators_on_memory_the_host_cannot_reach(make_hidden: Callable[[bool], Path]) -> None:
    library = str(make_hidden(False))
    run_checks(None, "check_against_cpu.py", DITORCH_VENDOR_LIBRARY=library, ONE_OPERATOR_IN="10")


@pytest.mark.parametrize("name", ["cpu", "device", "nn", "Acme", "9x", "a-b", ""])
def test_a_name_torch_cannot_take_is_refused(name: str, tmp_path: Path) -> None:
    done = new_vendor(name, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"new-vendor: {name!r} cannot be the name of a device: ")
    assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "acme").mkdir()
    done = new_vendor("acme", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "new-vendor: acme is there already; name another folder with --output\n"
    assert list((tmp_path / "acme").iterdir()) == []
    file = tmp_path / "file"
    file.touch()
    done = new_vendor("acme", "--output", str(file / "acme"), cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
