"""Captures of two runs compared, and captured calls run again on another chip."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_chip import DEADLINE_S, run_python
from test_capture import start_run
from torch import nn

from ditorch.precision.capture import Capture
from ditorch.precision.captures.depart import depart
from ditorch.precision.captures.replay import replay
from ditorch.precision.results import Findings
from ditorch.precision.standards import load_standards

SOFTMAX_LINE, GELU_LINE = "captured_run.py:32 in Attention.forward", "captured_run.py:46"
ALL = {"tensors": "all"}


@pytest.fixture(scope="session")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """captured("d-mini", fault="softmax") -> the folder of such a run; each is run once."""
    made: dict[str, Path] = {}

    def run(chip: str, **arguments: Any) -> Path:
        key = json.dumps([chip, arguments])
        if key not in made:
            folder = tmp_path_factory.mktemp("captured") / "run"
            assert start_run(chip, folder, **arguments).wait(DEADLINE_S) == 0
            made[key] = folder
        return made[key]

    return run


def compare(reference: Path, other: Path) -> Findings:
    return depart(reference, other, standards=load_standards())


def on_cpu(output: Path, *, width: int = 8, value: float = 1.0, **chosen: Any) -> Path:
    """A capture of a tiny program, taken in this process."""
    torch.manual_seed(0)
    layer = nn.Linear(width, width)
    with Capture(output=output, **chosen):
        x = layer(torch.full((2, width), value)).relu()
        (x * 3).sum().backward()
    return output


def test_two_right_chips_do_not_depart(captured: Callable[..., Path]) -> None:
    reference, other = captured("a-mini", steps=2, capture=ALL), captured("d-mini", steps=2)
    found = compare(reference, other)
    assert found.passed, found.summary
    assert found.first_bad is None
    assert (found.steps, found.rank) == (2, 0)
    assert "A-MINI" in found.reference
    assert "D-MINI" in found.chip
    assert sum(each.calls for each in found.operators) > 300
    assert any(each.errors.max_rel > 0 for each in found.operators)  # they are not the same chip


@pytest.mark.parametrize("kept", [{}, ALL], ids=["by statistics", "by tensors"])
def test_the_first_call_that_departs_is_named(captured: Callable[..., Path], kept: Any) -> None:
    reference = captured("a-mini", steps=2, capture=ALL)
    found = compare(reference, captured("d-mini", steps=2, fault="softmax", capture=kept))
    assert not found.passed
    assert found.first_bad is not None
    assert (found.first_bad.module, found.first_bad.operator) == (
        "layers.1.attention",
        "aten._softmax.default",
    )
    assert (found.first_bad.step, found.first_bad.phase) == (0, "forward")
    assert found.first_bad.source.endswith(SOFTMAX_LINE)
    assert found.summary.startswith(
        "first departs at layers.1.attention, aten._softmax.default #0, step 0, forward "
    )
    assert "its inputs agreed" in found.summary
    assert [each.operator for each in found.operators if not each.passed] == [
        "aten._softmax.default"
    ]


def test_a_fault_of_a_backward_kernel_is_named(captured: Callable[..., Path]) -> None:
    other = captured("d-mini", steps=2, fault="gelu_backward", capture=ALL)
    found = compare(captured("a-mini", steps=2, capture=ALL), other)
    assert found.first_bad is not None
    assert (found.first_bad.module, found.first_bad.operator) == (
        "layers.2.mlp.1",
        "aten.gelu_backward.default",
    )
    assert (found.first_bad.step, found.first_bad.phase) == (0, "backward")
    assert GELU_LINE in found.first_bad.source


def test_captures_that_were_loaded_are_compared(captured: Callable[..., Path]) -> None:
    """A capture with any one output changed no longer passes."""
    reference = captured("a-mini", steps=2, capture=ALL)
    changed = reference.parent / "changed"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(reference, changed)
    assert compare(reference, changed).passed
    path = changed / "rank00000/step000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    call = next(
        each["call"] for each in lines if "call" in each and "mm" in each["call"]["operator"]
    )
    call["outputs"][0]["digest"] = call["inputs"][0]["digest"]
    call["outputs"][0]["shape"] = call["inputs"][0]["shape"]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = compare(reference, changed)
    assert not found.passed
    assert found.first_bad is not None
    assert (found.first_bad.step, found.first_bad.operator) == (1, call["operator"])


def test_captured_calls_run_again_on_another_chip(captured: Callable[..., Path]) -> None:
    reference = captured("a-mini", steps=2, capture=ALL)
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import captured_run
from ditorch.precision.captures.replay import replay
from ditorch.precision.standards import load_standards

def run():
    found = replay(
        Path({str(reference)!r}), standards=load_standards(), steps="0",
        operators="mm, *softmax*, add, _foreach_mul_, randint",
    )
    print(found.model_dump_json())

run()
planted = captured_run.plant("softmax")
run()
"""
    done = run_python(code, "d-mini")
    assert done.returncode == 0, done.stderr
    right, wrong = map(Findings.model_validate_json, done.stdout.splitlines())

    assert right.passed, right.summary
    assert "D-MINI" in right.chip
    assert "A-MINI" in right.reference
    assert right.notes == [
        "not run again: aten.randint.generator: its argument of type Generator cannot be made "
        "again (1)"
    ]
    products = next(each for each in right.operators if each.operator == "aten.mm.default")
    assert products.calls > 20
    assert products.reference_errors is not None
    assert 0 < products.errors.rmse != products.reference_errors.rmse > 0  # each chip's own

    assert not wrong.passed
    assert [each.operator for each in wrong.operators if not each.passed] == [
        "aten._softmax.default"
    ]
    assert wrong.first_bad is not None
    assert wrong.first_bad.module == "layers.1.attention"
    assert wrong.first_bad.source.endswith(SOFTMAX_LINE)


def test_what_cannot_be_run_again(tmp_path: Path) -> None:
    def run_again(output: Path, **selection: Any) -> Findings:
        return replay(output, standards=load_standards(), **selection)

    whole = on_cpu(tmp_path / "all", **ALL)
    assert run_again(whole).passed
    assert run_again(whole, operators="addmm").operators[0].calls == 1
    with pytest.raises(ValueError, match="no call can be run again: no call is selected"):
        run_again(whole, operators="conv2d")
    with pytest.raises(ValueError, match=r"again: aten\..*: the capture does not hold its tensor"):
        run_again(on_cpu(tmp_path / "none"), operators="addmm")
    step = whole / "rank00000/step000000.jsonl"
    step.write_text(step.read_text().replace("aten.relu.default", "aten.__class__.mro"))
    notes = run_again(whole).notes
    assert notes == ["not run again: aten.__class__.mro: this process has no operator "
                     "aten.__class__.mro (1)"]  # fmt: skip


def test_arguments_that_were_tampered_with_are_one_sentence(tmp_path: Path) -> None:
    for number, wrong in enumerate(('{"tensor":99}', '{"tensor":0,"dtype":"float32"}', "{}")):
        output = on_cpu(tmp_path / str(number), **ALL)
        step = output / "rank00000/step000000.jsonl"
        lines = step.read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if "aten.relu.default" in line)
        lines[at] = re.sub(r'"arguments":\[.*?\]', f'"arguments":[{wrong}]', lines[at])
        step.write_text("\n".join(lines) + "\n")
        with pytest.raises(ValueError, match=r"arguments of aten\.relu.* the capture is damaged"):
            replay(output, standards=load_standards())


def test_runs_that_start_differently_are_told_so(tmp_path: Path) -> None:
    found = compare(on_cpu(tmp_path / "a"), on_cpu(tmp_path / "b", value=0.5))
    assert not found.passed
    assert found.first_bad is not None
    assert "already differed by" in found.first_bad_reason


def test_calls_of_one_run_only_are_listed(tmp_path: Path) -> None:
    def run(output: Path, *, fused: bool) -> Path:
        x = torch.linspace(-1, 1, 32).reshape(4, 8)
        with Capture(output=output):
            x = x @ x.t()
            if fused:
                x = torch.rms_norm(x, (4,), eps=1e-5)
            else:
                x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            (x @ x.t()).sum()
        return output

    found = compare(run(tmp_path / "a", fused=True), run(tmp_path / "b", fused=False))
    assert found.passed, found.summary
    notes = "\n".join(found.notes)
    assert "calls of the other run without a counterpart" in notes
    assert sum(each.calls for each in found.operators if "mm" in each.operator) == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("nothing there", "there is no capture here"),
        ("no manifest", r"manifest\.json: cannot be read: No such file"),
        ("version", r"manifest\.json: is of version 2 of the format, expected 1"),
        ("world size", "cannot be compared: of 1 and of 2 ranks"),
        ("no step in common", "no rank has a finished step in both"),
        ("truncated line", r"step000000\.jsonl: line \d+: Invalid JSON"),
        ("truncated file", r"step000000\.jsonl: .* the file is damaged"),
        ("no line at all", r"step000000\.jsonl: line 1: "),
        ("other width", r"cannot be compared: the inputs of aten\.\w+\.default #0 .*\[8, 8\]"),
        ("other program", "only 0 of .* calls of step 0 are in both"),
        ("damaged tensors", r"step000000\.safetensors: cannot be read: "),
        ("changed tensors", r"step000000\.safetensors: tensor \w+ is not what was captured"),
    ],
)
def test_captures_that_cannot_be_compared(tmp_path: Path, damage: str, message: str) -> None:
    a = on_cpu(tmp_path / "a")
    b = on_cpu(
        tmp_path / "b",
        width=9 if damage == "other width" else 8,
        value=0.999 if "tensors" in damage else 1.0,
        **ALL,
    )
    manifest = b / "rank00000/manifest.json"
    step = b / "rank00000/step000000.jsonl"
    text = step.read_text()
    if damage == "nothing there":
        shutil.rmtree(b)
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "version":
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    elif damage == "world size":
        manifest.write_text(manifest.read_text().replace('"world_size": 1', '"world_size": 2'))
    elif damage == "no step in common":
        step.rename(step.with_name("step000007.jsonl"))
    elif damage == "truncated line":
        step.write_text(text[:-20])
    elif damage == "truncated file":
        step.write_text(text[: text.rstrip().rindex("\n") + 1])
    elif damage == "no line at all":
        step.write_text("")
    elif damage == "other program":
        shutil.rmtree(b)
        with Capture(output=b):
            torch.ones(3).cumsum(0)
    elif "tensors" in damage:
        kept = b / "rank00000/step000000.safetensors"
        content = kept.read_bytes()
        kept.write_bytes(
            content[:-8] if damage == "damaged tensors" else content[:-8] + b"12345678"
        )
    with pytest.raises(ValueError, match=message) as raised:
        compare(a, b)
    assert "\n" not in str(raised.value)
