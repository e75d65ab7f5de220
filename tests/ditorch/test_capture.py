"""Captures: what is in the files, the budget, and that a killed run leaves readable ones."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from on_chip import DEADLINE_S, ROOT, environment
from torch import Tensor, nn

from ditorch.precision import place
from ditorch.precision.capture import Capture
from ditorch.precision.captures.depart import depart
from ditorch.precision.captures.recording import RecordedStep, Recording, open_capture
from ditorch.precision.captures.records import CallRecord, LeftOut, Manifest
from ditorch.precision.captures.statistics import digest_of, distance, on_host, statistics_of
from ditorch.precision.standards import load_standards

RUN = Path(__file__).with_name("captured_run.py")


def start_run(chip: str | None, output: Path, **arguments: Any) -> forks.Forked:
    arguments["output"] = str(output)
    return forks.start([str(RUN), json.dumps(arguments)], environment(chip), ROOT)


def bytes_on_disk(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed meanwhile
            continue
    return total


def calls_of(step: RecordedStep, operator: str) -> list[CallRecord]:
    return [call for call in step.calls if call.operator == operator]


def recorded(output: Path) -> tuple[Recording, RecordedStep]:
    recording = open_capture(output)[0]
    return recording, recording.step(0)


def test_a_long_run_keeps_its_budget(tmp_path: Path) -> None:
    budget_bytes, steps = 400_000, 120
    selected = {"operators": "addmm, mm", "tensors": "all", "budget_bytes": budget_bytes}
    run = start_run("b-mini", tmp_path / "run", steps=steps, layers=1, capture=selected)
    for line in run.lines():
        if line.strip().isdigit():
            assert bytes_on_disk(tmp_path / "run") <= budget_bytes
    assert run.wait(DEADLINE_S) == 0
    assert bytes_on_disk(tmp_path / "run") <= budget_bytes
    recording = open_capture(tmp_path / "run")[0]
    left_out = recording.manifest.left_out
    assert left_out.tensors > 0
    assert left_out.first_step_without_all_tensors is not None
    # Statistics go on after tensors have stopped, until they too have no room.
    assert recording.steps == list(range(len(recording.steps)))
    assert len(recording.steps) > left_out.first_step_without_all_tensors + 1
    assert len(recording.steps) + left_out.steps == steps
    assert len(calls_of(recording.step(recording.steps[-1]), "aten.addmm.default")) == 5


def test_a_killed_run_leaves_every_finished_step_readable(tmp_path: Path) -> None:
    whole = start_run("b-mini", tmp_path / "whole", steps=3, layers=1)
    assert whole.wait(DEADLINE_S) == 0
    keeping = {"tensors": "all"}
    run = start_run("b-mini", tmp_path / "killed", steps=10_000, layers=1, capture=keeping)
    for line in run.lines():
        if line.strip() == "4":
            run.send_signal(signal.SIGKILL)
            break
    assert run.wait(DEADLINE_S) == -signal.SIGKILL
    (tmp_path / "killed/rank00000/.step000099.jsonl.1").write_bytes(b'{"step": 99')
    (tmp_path / "killed/rank00000/step000098.safetensors").write_bytes(b"\x00")

    recording = open_capture(tmp_path / "killed")[0]
    assert recording.steps[:4] == [0, 1, 2, 3]
    assert max(recording.steps) < 98
    for number in recording.steps:
        for call in recording.step(number).calls:
            for use in (*call.inputs, *call.outputs):
                assert not use.digest or recording.tensor(use) is not None
    found = depart(tmp_path / "whole", tmp_path / "killed", standards=load_standards())
    assert found.passed, found.summary
    assert found.steps == 3

    with Capture(output=tmp_path / "killed", existing="resume", tensors="all"):
        torch.ones(3) + 1  # step 0 is there: not captured again
    left = sorted(path.name for path in (tmp_path / "killed/rank00000").iterdir())
    assert not [name for name in left if "98" in name or "99" in name]
    assert open_capture(tmp_path / "killed")[0].steps == recording.steps


def test_a_tensor_is_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(32, 32)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with Capture(output=tmp_path / "run", tensors="all"):
        for _ in range(3):
            x = torch.ones(8, 32)
            for _ in range(5):
                x = x @ weight
            optimizer.step()
    folder = tmp_path / "run/rank00000"
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    one_of_each = weight.nbytes + 6 * 8 * 32 * 4  # the weight, ones and five products
    assert one_of_each <= sizes["step000000.safetensors"] < one_of_each + 2000
    assert list(sizes) == ["step000000.safetensors"]  # later steps only repeat it
    recording = open_capture(tmp_path / "run")[0]
    again = calls_of(recording.step(2), "aten.mm.default")[0].inputs[1]
    stored = recording.tensor(again)
    assert stored is not None
    assert torch.equal(stored, weight)


def test_inputs_are_as_before_and_outputs_as_after_the_call(tmp_path: Path) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    with Capture(output=tmp_path / "run", tensors="all"):
        x.mul_(2)
        torch.add(x, 1, out=torch.empty(2, 3))
        transposed = x.t() * torch.tensor(True)
        values, _ = x.max(0)
        torch._foreach_neg_([x, values])
    recording, step = recorded(tmp_path / "run")

    def tensors(operator: str) -> dict[str, Tensor | None]:
        (call,) = calls_of(step, operator)
        return {
            f"{side} {use.name}": recording.tensor(use)
            for side, uses in (("in", call.inputs), ("out", call.outputs))
            for use in uses
        }

    before = torch.arange(6.0).reshape(2, 3)
    doubled = tensors("aten.mul_.Tensor")
    assert torch.equal(doubled["in self"], before)
    assert torch.equal(doubled["out self"], 2 * before)
    added = tensors("aten.add.out")
    assert added["in out"] is None  # written, not read
    assert torch.equal(added["out out"], 2 * before + 1)
    product = tensors("aten.mul.Tensor")
    assert torch.equal(product["in self"], 2 * before.t())
    assert product["in self"].stride() == (1, 3)
    assert product["in other"].dtype == torch.bool
    assert torch.equal(product["out out"], transposed)
    most = tensors("aten.max.dim")
    assert most["out out.1"].tolist() == [1, 1, 1]
    assert tensors("aten._foreach_neg_.default")["out self.1"].tolist() == [-6, -8, -10]
    assert not calls_of(step, "aten.t.default")  # views compute nothing
    assert not calls_of(step, "aten.empty.memory_format")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j, 0]),
        torch.tensor([float("nan"), float("inf"), 0.0, -1.0]),
        torch.tensor([True, False]),
        torch.ones(3, dtype=torch.float8_e4m3fn),
        torch.ones(1).expand(4),
        torch.tensor([1, 65535], dtype=torch.uint16),
    ],
    ids=str,
)
def test_every_kind_of_tensor_comes_back(tmp_path: Path, tensor: Tensor) -> None:
    with Capture(output=tmp_path / "run", tensors="all"):
        tensor.clone()
    recording, step = recorded(tmp_path / "run")
    (call,) = calls_of(step, "aten.clone.default")
    again = recording.tensor(call.inputs[0])
    assert again is not None
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert again.tolist() == pytest.approx(tensor.tolist(), nan_ok=True)


def test_statistics_are_those_of_numpy(tmp_path: Path) -> None:
    x = torch.randn(700, 9, generator=torch.Generator().manual_seed(0))
    x[3, 4], x[5, 6], x[0, 0] = float("nan"), float("-inf"), 0.0
    with Capture(output=tmp_path / "run"):
        x.clone()
    _, step = recorded(tmp_path / "run")
    found = step.statistics[step.calls[0].inputs[0].digest]
    values = x.double().numpy().ravel()
    finite = values[np.isfinite(values)]
    assert (found.elements, found.nans, found.infs, found.zeros) == (6300, 1, 1, 1)
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean())
    assert found.norm == pytest.approx(np.linalg.norm(finite))
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize("elements", [1, 40, 1024, 100_000])
def test_sketches_tell_the_distance(elements: int) -> None:
    generator = torch.Generator().manual_seed(elements)
    x = torch.randn(elements, generator=generator)
    estimated, true = [], []
    for size in (1e-6, 1e-3, 1.0):
        for _ in range(10):
            y = x + size * torch.randn(elements, generator=generator)
            ours, theirs = (statistics_of(each, digest_of(each)) for each in on_host([x, y]))
            estimated.append(distance(ours, theirs))
            true.append((x.double() - y.double()).norm().item())
    ratios = np.array(estimated) / np.array(true)
    assert ratios.min() > 0.3
    assert ratios.max() < 2.0
    assert ratios.mean() == pytest.approx(1.0, abs=0.2)


def test_sampling_takes_the_same_calls_in_every_run(tmp_path: Path) -> None:
    def run(name: str, **chosen: Any) -> dict[int, set[Any]]:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
        with Capture(output=tmp_path / name, **chosen):
            for _ in range(6):
                model(torch.ones(2, 4))
                place.next_step()
        recording = open_capture(tmp_path / name)[0]
        return {step: {call.key for call in recording.step(step).calls} for step in recording.steps}

    everything = run("all")
    sampled = run("sampled", every=4)
    assert sampled == run("sampled again", every=4)
    counts = Counter({"all": sum(map(len, everything.values()))})
    assert 0.1 < sum(map(len, sampled.values())) / counts["all"] < 0.5
    assert len({frozenset(calls) for calls in sampled.values()}) > 1  # not the same each step
    assert sorted(run("steps", every_steps=4)) == [0, 4]
    assert sorted(run("selected", steps="1:3", modules="7")) == [1, 2]


def test_a_folder_that_has_a_capture_is_not_overwritten_unasked(tmp_path: Path) -> None:
    def run(**chosen: Any) -> None:
        with Capture(output=tmp_path / "run", **chosen):
            torch.ones(3) + 1

    run()
    before = (tmp_path / "run/rank00000/step000000.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"rank00000: there is a capture already; .*overwrite"):
        run()
    assert (tmp_path / "run/rank00000/step000000.jsonl").read_bytes() == before
    run(existing="overwrite", tensors="all")
    assert list((tmp_path / "run").rglob("*.safetensors"))


def test_a_resumed_capture_remembers_what_its_budget_left_out(tmp_path: Path) -> None:
    chosen = {"budget_bytes": 64 << 10, "tensors": "all"}

    def run(**other: Any) -> Manifest:
        with Capture(output=tmp_path / "run", existing="resume", **{**chosen, **other}):
            for step in range(3):
                torch.full((16_000,), float(step)) + 1
                place.next_step()
        return open_capture(tmp_path / "run")[0].manifest

    first = run().left_out
    assert first.tensors > 0
    assert first.first_step_without_all_tensors == 0
    assert run().left_out == first
    for name, other in {"tensors": "none", "every": 2, "every_steps": 2, "steps": "1:"}.items():
        with pytest.raises(
            ValueError, match=r"rank00000: \w+ is .* where the capture to resume has"
        ):
            run(**{name: other})
    assert open_capture(tmp_path / "run")[0].manifest.tensors == "all"


def test_steps_without_room_are_counted_once_however_often_a_run_is_resumed(tmp_path: Path) -> None:
    def left_out() -> LeftOut:
        with Capture(output=tmp_path / "run", existing="resume", budget_bytes=64 << 10):
            for step in range(60):
                torch.full((3,), float(step)) + 1
                place.next_step()
        return open_capture(tmp_path / "run")[0].manifest.left_out

    first = left_out()
    assert first.steps > 0
    assert left_out() == first


def test_arguments_out_of_range_and_folders_that_cannot_be(tmp_path: Path) -> None:
    for name in ("every", "every_steps"):
        with pytest.raises(ValueError, match=f"{name} is 0, expected at least 1"):
            Capture(output=tmp_path, **{name: 0})
    for name in ("tensors", "existing"):
        with pytest.raises(ValueError, match=f"{name} is 'some', expected one of"):
            Capture(output=tmp_path, **{name: "some"})
    with pytest.raises(ValueError, match="budget_bytes is 10, expected at least"):
        Capture(output=tmp_path, budget_bytes=10)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ValueError, match=r"rank00000: cannot be written: Not a directory"),
        Capture(output=tmp_path / "file"),
    ):
        pass


def test_files_are_of_ranks_and_steps_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "3")
    with Capture(output=tmp_path / "elsewhere"):
        torch.ones(3) + 1
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
    names = {str(path.relative_to(tmp_path / "elsewhere")) for path in tmp_path.rglob("*.*")}
    assert names == {
        "capture-rank3.json", "rank00003/manifest.json", "rank00003/step000000.jsonl"
    }  # fmt: skip
