"""Isolate without a planted fault: the search itself, its limits, and what it says when there is
nothing to find. The faults it finds are in test_planted_faults.py."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import forks
import pytest
from hypothesis import given
from hypothesis import strategies as st
from on_chip import DEADLINE_S, ROOT, environment

from ditorch.chips import load_chip
from ditorch.precision.isolation.isolate import isolate, smallest_set
from ditorch.precision.isolation.runs import RunError, Runs, chip_digest
from ditorch.precision.loss import mean_relative_error
from ditorch.precision.results import read_findings

EXAMPLE = ROOT / "ditorch" / "align" / "example.py"
PLANTED = ROOT / "tests" / "ditorch" / "planted.py"
SMALL = ["--dim", "32", "--heads", "2", "--batch", "4", "--length", "16", "--dtype", "float32",
         "--learning-rate", "3e-2"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def runs_share_a_server() -> Iterator[None]:
    """Loading torch once for all of this file's runs."""
    with Runs(EXAMPLE):
        yield


@given(st.integers(1, 60), st.data())
def test_the_smallest_set_is_found_in_few_questions(count: int, data: st.DataObject) -> None:
    items = [f"item{i}" for i in range(count)]
    guilty = data.draw(st.sets(st.sampled_from(items), min_size=1, max_size=4))
    questions = []

    def agrees(some: list[str]) -> bool:
        questions.append(some)
        return guilty <= set(some)

    assert set(smallest_set(items, agrees)) == guilty
    assert len(questions) <= len(guilty) * (1 + math.ceil(math.log2(count)))


def test_losses_that_agree_leave_nothing_to_isolate(tmp_path: Path) -> None:
    told: list[str] = []
    findings = isolate(
        EXAMPLE, [*SMALL, "--steps", "4"], chip="d", output=tmp_path, progress=told.append
    )
    assert findings.passed
    assert re.fullmatch(r"losses agree: MRE 0\.0\d+%, below 1\.5\d*%; nothing to isolate",
                        findings.summary)  # fmt: skip
    assert not findings.guilty
    assert [len(curve.losses) for curve in findings.losses] == [4, 4]
    assert len(told) == 2
    assert read_findings(tmp_path / "isolate-rank0.json") == findings


def test_a_changed_chip_file_is_another_trial(tmp_path: Path) -> None:
    script, chip, output = tmp_path / "train.py", tmp_path / "mine.toml", tmp_path / "out"
    script.write_text(
        "import torch, ditorch\n"
        "weight = torch.ones(4, device='device', requires_grad=True)\n"
        "weight.sum().backward()\n"
    )
    chip.write_text(load_chip("b-mini").path.read_text())

    def trials() -> int:
        assert isolate(script, chip=str(chip), output=output).passed
        (output / "isolate-rank0.json").unlink()  # as if it had been killed before the end
        return len(list(output.glob("isolate-trials/*/done.json")))

    assert (trials(), trials()) == (2, 2)
    chip.write_text(chip.read_text() + "# changed\n")
    assert trials() == 3


def test_another_library_of_the_vendor_is_another_chip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "libmine.so"
    monkeypatch.setenv("DITORCH_VENDOR_LIBRARY", str(built))
    digests = []
    for content in (b"one", b"two"):
        built.write_bytes(content)
        digests.append((chip_digest("library"), chip_digest("cpu")))
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] == digests[1][1] == ""


@pytest.mark.exhaustive
def test_a_second_fault_that_acts_later_is_found_as_well(tmp_path: Path) -> None:
    args = ["in-place+backward", str(EXAMPLE), *SMALL, "--steps", "4"]
    findings = isolate(PLANTED, args, chip="b", output=tmp_path, bar=1e-4)
    assert findings.guilty == ["aten.masked_fill_.Scalar", "aten.silu_backward.default"]
    assert findings.guilty_modules == [
        "layers.0.attention",
        "layers.1.attention",
        "layers.1.feed_forward",
    ]
    healed = findings.losses[-1]
    assert healed.name == f"b with {' and '.join(findings.guilty)} on the host"
    assert mean_relative_error(findings.losses[0].losses, healed.losses) < 1e-6


def test_what_no_operator_is_guilty_of_is_not_blamed_on_one(tmp_path: Path) -> None:
    script = tmp_path / "other_data.py"
    script.write_text(
        "import torch, ditorch\n"
        "on_chip = ditorch.device.type != 'cpu'\n"
        "weight = torch.ones(4, device='device', requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for step in range(5):\n"
        "    x = torch.full((4,), 3.0 if on_chip and step > 1 else 2.0).to('device')\n"
        "    ((weight * x).sum() ** 2 + 1).backward()\n"
        "    optimizer.step()\n"
    )
    findings = isolate(script, chip="a-mini", output=tmp_path / "out")
    assert not findings.passed
    assert not findings.guilty
    assert findings.summary.startswith("not an operator's arithmetic: MRE")
    assert "depart at step 2" in findings.notes[0]


def test_a_script_that_fails_on_the_chip_is_an_error_with_its_reason(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch, ditorch\n"
        "weight = torch.ones(4, device='device', requires_grad=True)\n"
        "weight.sum().backward()\n"
        "assert ditorch.device.type == 'cpu', 'this chip will not do'\n"
    )
    with pytest.raises(RunError, match=r"fails on b-mini after 1 losses: .*this chip will not do"):
        isolate(script, chip="b-mini", output=tmp_path)
    with pytest.raises(ValueError, match="there is no such script"):
        isolate(tmp_path / "absent.py", chip="b-mini", output=tmp_path)
    with pytest.raises(ValueError, match="reference_losses is empty"):
        isolate(script, chip="b-mini", output=tmp_path, reference_losses=[])
    with pytest.raises(ValueError, match="max_runs is 2, expected at least 3"):
        isolate(script, chip="b-mini", output=tmp_path, max_runs=2)


@pytest.mark.exhaustive
def test_a_killed_isolation_goes_on_and_its_runs_are_limited(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ditorch.precision.isolation.isolate import isolate\n"
        "isolate(Path(sys.argv[1]), sys.argv[2:-2], chip='b', output=Path(sys.argv[-2]),\n"
        "    bar=0.001, max_runs=int(sys.argv[-1]),\n"
        "    progress=lambda text: print(text, flush=True))\n"
    )
    command = ["-c", code, str(PLANTED), "in-place", str(EXAMPLE), *SMALL,
               "--steps", "3", str(tmp_path)]  # fmt: skip
    first = forks.start([*command, "100"], environment(None))
    for line in first.lines():
        if line.startswith("run 5"):
            first.kill()
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("isolate-trials/*/done.json")}
    assert len(kept) == 4
    for path in kept:
        assert "exit_code" in json.loads(path.read_text())

    again = forks.run([*command, "6"], environment(None), timeout_s=DEADLINE_S)
    assert again.returncode == 0, again.stderr
    assert all(path.stat().st_mtime_ns == written for path, written in kept.items())
    assert len(list(tmp_path.glob("isolate-trials/*/done.json"))) == 6
    findings = read_findings(tmp_path / "isolate-rank0.json")
    assert re.search(r"6 runs were not enough: \d+ operators suspected$", findings.summary)
    assert not findings.passed
