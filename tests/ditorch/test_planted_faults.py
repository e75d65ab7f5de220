"""Faults planted below the tools, in an unmodified script: each is found and named unaided.

`planted.py` has the faults. By looking at operators, every one is found with its layer and source
line; from loss curves alone, `isolate` names those that move the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import forks
import pytest
from on_chip import ROOT, environment
from sampled import sampled

from ditorch.precision.captures.depart import depart
from ditorch.precision.isolation.isolate import isolate
from ditorch.precision.isolation.runs import Runs
from ditorch.precision.overflow import first_of_all_ranks
from ditorch.precision.results import Where, read_findings
from ditorch.precision.standards import load_standards

HERE = Path(__file__).parent
EXAMPLE = ROOT / "ditorch" / "align" / "example.py"
PLANTED = HERE / "planted.py"
DATA_PARALLEL = HERE / "data_parallel.py"

SMALL = ["--dim", "32", "--heads", "2", "--batch", "2", "--length", "16", "--dtype", "float32",
         "--learning-rate", "3e-2", "--steps", "8"]  # fmt: skip
BAR = 1e-4  # in single precision a healthy chip's first losses are 100 times closer
CHIP = "b"


@pytest.fixture(scope="module", autouse=True)
def runs_share_a_server() -> Iterator[None]:
    """Loading torch once for all of this file's runs."""
    with Runs(EXAMPLE):
        yield


@dataclass(frozen=True)
class Fault:
    operator: str
    modules: list[str]  # in the order of the model
    line: str  # of the example
    options: tuple[str, ...] = ()  # of the example
    also: frozenset[str] = frozenset()  # operators that the chip makes of the guilty one
    overflows: bool = False
    moves_loss: bool = True


FAULTS = {
    "accumulation": Fault(
        "aten.mm.default", ["head"], "self.head(self.norm(x))", options=("--gain", "3")
    ),
    "softmax": Fault(
        "aten._softmax.default",
        ["layers.0.attention", "layers.1.attention"],
        "torch.softmax(scores",
        options=("--gain", "5", "--dtype", "float16", "--steps", "1"),
        overflows=True,
    ),
    "backward": Fault(
        "aten.silu_backward.default", ["layers.1.feed_forward"], "F.silu(self.gate(x))"
    ),
    "in-place": Fault(
        "aten.masked_fill_.Scalar",
        ["layers.0.attention", "layers.1.attention"],
        "scores.masked_fill_(future",
        also=frozenset({"aten.masked_fill.Scalar"}),
    ),
    "elements": Fault(
        "aten.silu.default",
        ["layers.0.feed_forward", "layers.1.feed_forward"],
        "F.silu(self.gate(x))",
        moves_loss=False,
    ),
}


def is_at(where: Where | None, file: Path, text: str) -> bool:
    lines = [n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line]
    assert len(lines) == 1, f"{file} has {text!r} in lines {lines}"
    assert where is not None
    return f"{file.relative_to(ROOT)}:{lines[0]} in " in where.source


def arguments(name: str) -> list[str]:
    return [name, str(EXAMPLE), *SMALL, *FAULTS[name].options]


@pytest.mark.parametrize(
    "name", ["in-place", *sampled((name for name in FAULTS if name != "in-place"), 6)]
)
def test_looking_at_operators_names_operator_layer_and_line(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]

    def is_guilty(where: Where | None) -> bool:
        assert where is not None
        found = (where.operator, where.module)
        return found == (fault.operator, fault.modules[0]) and is_at(where, EXAMPLE, fault.line)

    output = str(tmp_path)
    captured = [tmp_path / "capture-cpu", tmp_path / "capture-chip"]
    reference_capture, capture = ({"output": str(each), "tensors": "all"} for each in captured)
    tools = {"compare": {"output": output}, "overflow": {"output": output}}
    with Runs(PLANTED, [*arguments(name), "--steps", "1"]) as runs:
        run = runs.run("cpu", tmp_path / "cpu", capture=reference_capture)
        assert run.exit_code == 0, run.last_words()
        run = runs.run(CHIP, tmp_path / "chip", capture=capture, **tools)
        assert run.exit_code == 0, run.last_words()

    compared = read_findings(tmp_path / "compare-rank0.json")
    assert not compared.passed
    assert is_guilty(compared.first_bad), compared.summary
    failed = {each.operator for each in compared.operators if not each.passed}
    assert failed - fault.also == {fault.operator}

    overflowed = read_findings(tmp_path / "overflow-rank0.json")
    assert overflowed.passed is not fault.overflows, overflowed.summary
    if fault.overflows:
        assert is_guilty(overflowed.first_bad), overflowed.summary

    departed = depart(*captured, standards=load_standards())
    assert not departed.passed
    assert is_guilty(departed.first_bad), departed.summary


@pytest.mark.parametrize("name", sampled(FAULTS, len(FAULTS)))
def test_isolate_names_operator_and_layer_from_losses_alone(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    findings = isolate(PLANTED, arguments(name), chip=CHIP, output=tmp_path, bar=BAR)
    if not fault.moves_loss:
        assert "nothing to isolate" in findings.summary
        return
    assert findings.guilty == [fault.operator], findings.summary
    assert findings.guilty_modules == fault.modules, findings.summary
    assert is_at(findings.first_bad, EXAMPLE, fault.line), findings.summary
    assert fault.operator in findings.summary


def test_an_overflow_on_one_rank_is_told_from_what_it_spoils_elsewhere(tmp_path: Path) -> None:
    processes = [
        forks.start(
            [str(PLANTED), "overflow", str(DATA_PARALLEL), str(tmp_path / "store")],
            environment(
                CHIP,
                RANK=str(rank),
                WORLD_SIZE="2",
                DITORCH_PRECISION=f"overflow = {{output = '{tmp_path}'}}",
            ),
            ROOT,
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    findings = [read_findings(tmp_path / f"overflow-rank{rank}.json") for rank in range(2)]
    spoiled, guilty = (each.first_bad for each in findings)
    assert guilty is not None
    assert (guilty.operator, guilty.module) == ("aten.sum.dim_IntList", "pool")
    assert is_at(guilty, DATA_PARALLEL, "x.sum(dim=1)"), guilty
    assert spoiled is not None
    assert spoiled.operator.startswith("c10d.")
    assert is_at(spoiled, DATA_PARALLEL, "dist.all_reduce(")
    first = first_of_all_ranks(findings)
    assert first is not None
    assert first.kind == "nan"
    assert first.where == guilty
    assert (first.where.rank, first.where.step) == (1, 0)
