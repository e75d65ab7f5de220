"""ditorch-align, from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from commands import run_command
from on_chip import environment
from sample_findings import FAULTY, FIRST_BAD, GOOD, sample_conformance, write_sample
from typer.testing import CliRunner, Result

from ditorch.align.report import Report
from ditorch.conform.results import Outcome, write_conformance
from ditorch.precision.results import Findings, LossCurve, write_findings
from ditorch_align import app

ROOT = Path(__file__).parents[2]
COMMANDS = ("run", "compare", "conform", "isolate", "replay", "report")

SCRIPT = """
import os, sys
import torch, ditorch
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
data = torch.randn(4, 16)
is_odd = ditorch.chip().vendor == sys.argv[2]
if is_odd and "overflow" in os.environ["DITORCH_PRECISION"]:
    sys.exit("does not like tools")
model.to("device")
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(50):
    loss = torch.softmax(model(data.to("device")), -1).pow(2).sum()
    if is_odd:
        loss = loss * 1.1
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def align(*arguments: object) -> Result:
    """The command in this process, which spares an import of torch."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def align_outside(*arguments: object, **extra: str) -> subprocess.CompletedProcess[str]:
    return forks.run(
        ["-m", "ditorch_align", *map(str, arguments)], environment(None, **extra), timeout_s=240
    )


def is_one_sentence(result: Result) -> bool:
    return (
        result.exit_code == 2
        and result.stdout == ""
        and len(result.stderr.strip().splitlines()) == 1
        and result.stderr.startswith("ditorch-align: ")
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("findings")
    write_sample(directory)
    return directory


def test_help_opens_no_device_and_has_examples() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from ditorch_align import app\n"
        "invoke = CliRunner().invoke\n"
        f"for name in {COMMANDS}:\n"
        "    said = invoke(app, [name, '--help'])\n"
        "    assert said.exit_code == 0 and f'ditorch-align {name}' in said.output, said.output\n"
        "overview = invoke(app, ['--help']).output\n"
        f"assert all(name in overview for name in {COMMANDS}), overview\n"
        "assert not {'torch', 'ditorch'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment("no-such-chip"), capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_report_tells_which_chip_failed_and_where(sample: Path) -> None:
    result = align("report", sample)
    assert result.exit_code == 1
    for said in ("failed  " + FAULTY, "passed  " + GOOD, FIRST_BAD.module, FIRST_BAD.source):
        assert said in result.stdout
    assert "<!DOCTYPE html>" in (sample / "report.html").read_text()
    assert json.loads((sample / "report.json").read_text())["passed"] is False


def test_a_report_needs_no_chip_and_opens_no_tool(tmp_path: Path) -> None:
    """A training script's settings lie in the same folder as its findings."""
    found = write_findings(Findings(tool="overflow", chip="x", summary="no overflow"), tmp_path)
    before = found.read_bytes()
    (tmp_path / "ditorch.toml").write_text('[precision.overflow]\noutput = "."\n')
    done = forks.run(
        ["-m", "ditorch_align", "report", "."],
        environment("no-such-chip"),
        tmp_path,
        timeout_s=60,
    )
    assert done.returncode == 0, done.stderr
    assert found.read_bytes() == before and (tmp_path / "report.html").is_file()


def test_report_as_json_is_the_written_report(sample: Path, tmp_path: Path) -> None:
    page = tmp_path / "new folder" / "page.html"
    result = align("report", sample, "--html", page, "--json")
    assert result.exit_code == 1 and page.is_file()
    assert result.stdout.strip() == page.with_suffix(".json").read_text().strip()
    report = Report.model_validate_json(result.stdout)
    good, faulty = report.chips
    assert (good.chip, good.passed, faulty.chip, faulty.passed) == (GOOD, True, FAULTY, False)
    assert faulty.first_bad is not None and faulty.first_bad.where == FIRST_BAD
    assert [row.operator for row in faulty.operators if not row.passed] == [FIRST_BAD.operator]
    assert faulty.ranks == [0, 1] and len(faulty.overflows) == 1


def test_ranks_become_one_row(sample: Path) -> None:
    result = align("report", sample, "--json")
    good = Report.model_validate_json(result.stdout).chips[0]
    names = [row.operator for row in good.operators]
    assert len(names) == len(set(names)) == 41
    for row in good.operators:
        assert row.ranks == [0, 1] and row.calls == 600
        assert sum(row.errors.histogram) == row.errors.elements


def test_a_report_of_chips_that_pass_exits_with_0(tmp_path: Path) -> None:
    write_findings(
        Findings(tool="overflow", chip="x", summary="no overflow"), tmp_path / "deep" / "x"
    )
    result = align("report", tmp_path)
    assert result.exit_code == 0 and "passed  x" in result.stdout


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "JSON"),
        (b'{"tool": "compare", "rank": ', "JSON"),
        (b'{"tool": "compare", "rank": "first"}', "rank"),
        (b'{"tool": "compare", "surprise": 1}', "surprise"),
        (b'{"version": 2, "tool": "compare"}', "version"),
        (b"\xff\xfe\x00", "JSON"),
    ],
)
def test_damaged_findings_are_named_in_one_sentence(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "chip" / "compare-rank0.json"
    path.parent.mkdir()
    path.write_bytes(content)
    result = align("report", tmp_path)
    assert is_one_sentence(result)
    assert str(path) in result.stderr and said in result.stderr


def test_nothing_to_report_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / ".compare-rank0.json.123").write_text("{")  # was being written
    for directory in (tmp_path, tmp_path / "nowhere"):
        result = align("report", directory)
        assert is_one_sentence(result) and str(directory) in result.stderr


def test_a_page_that_cannot_be_written_is_one_sentence(sample: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run_command(app, ["report", sample, "--html", tmp_path / "file" / "page.html"])
    assert ended.exit_code == 2 and ended.stdout == ""
    assert "is a file, not a folder" in ended.stderr and ended.stderr.count("\n") == 1


def test_losses_of_two_machines_are_compared(tmp_path: Path) -> None:
    """`ditorch-align compare` gives the mean relative error that is worked out by hand here."""

    def losses(name: str, values: list[float]) -> Path:
        findings = Findings(tool="loss", chip=name, losses=[LossCurve(name=name, losses=values)])
        return write_findings(findings, tmp_path / name)

    right = losses("right", [4.0, 2.0])
    near = align("compare", right, losses("near", [4.02, 1.99]), "--json")
    assert near.exit_code == 0
    assert json.loads(near.stdout)["mean_relative_error"] == pytest.approx(
        (0.02 / 4 + 0.01 / 2) / 2
    )
    far = align("compare", right, losses("far", [4.2, 2.1]), "--html", tmp_path / "page.html")
    assert far.exit_code == 1 and "5.000%" in far.stdout
    assert (tmp_path / "page.html").is_file()
    assert is_one_sentence(align("compare", right, losses("short", [4.0])))
    assert is_one_sentence(align("compare", right, tmp_path / "nowhere"))


def test_a_chip_below_the_bar_of_conformance_fails(tmp_path: Path) -> None:
    conformance = sample_conformance()
    for number in range(9):
        conformance.operators[0].record(Outcome("int8", "forward", number, "failed", "wrong"))
    write_conformance(conformance, tmp_path / "conformance.json")
    result = align("report", tmp_path)
    assert result.exit_code == 1 and "95.22% of the supported samples conform" in result.stdout


def test_a_damaged_conformance_result_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "conformance.json").write_text("[]")
    result = align("report", tmp_path)
    assert is_one_sentence(result) and "conformance.json" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--chips", "b,zzz"), "zzz"),
        (("--chips", ""), "chips"),
        (("--chips", "b,b"), "chips"),
        (("--reference", "zzz"), "zzz"),
        (("--tools", "compare,guess"), "guess"),
        (("--standards", "no-such-standards.toml"), "no-such-standards.toml"),
        (("no-such-script.py",), "no-such-script.py"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    result = align("run", *arguments, "--output", tmp_path)
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1] and "Traceback" not in result.stderr


def test_a_chip_that_is_not_there_is_not_searched_for(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("open('was run', 'w')")
    for chips in (("--chip", "zzz"), ("--chip", "b", "--reference", "zzz")):
        result = align("isolate", script, *chips, "--output", tmp_path)
        assert is_one_sentence(result) and "there is no chip 'zzz'" in result.stderr


def test_run_holds_losses_and_operators_against_the_reference(tmp_path: Path) -> None:
    """Chip B's own arithmetic passes, the host agrees with itself, the script is odd on chip D."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = align_outside(
        *("run", script, "--chips", "b-mini,cpu,d-mini", "--steps", 6),
        *(
            "--tools",
            "compare,overflow,time,capture",
            "--tool-steps",
            2,
            "--output",
            tmp_path / "out",
            "--json",
            "--",
            "0.1",
            "D",
        ),
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    evidence = json.loads(result.stdout)
    assert evidence["tool"] == "ditorch-align run"
    b, host, d = evidence["rows"]
    assert (b["peer"], b["bar"], b["better"]) == (pytest.approx(0.477), 1.5, "lower")
    assert 0 < b["ours"] < 1.5 and host["ours"] == 0 and host["peer"] is None
    assert 9 < d["ours"] < 11
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    passed = {each.chip: each.passed for each in report.chips}
    assert (
        passed.pop("B, B-MINI") and not passed.pop("D, D-MINI") and list(passed.values()) == [True]
    )
    found, odd = report.chips[0], report.chips[1]
    assert any(t.tool == "run" and "does not like tools" in t.summary for t in odd.tools)
    assert {tool.tool for tool in found.tools} >= {"align", "compare", "depart", "overflow", "time"}
    assert found.operators and {row.passed for row in found.operators} == {True}
    assert [len(curve.losses) for curve in found.losses] == [6, 6]
    assert any(runs.chip_calls for runs in found.runs)
    right, other = (
        tmp_path / "out" / name / "capture" for name in ("reference/tools", "b-mini/tools")
    )
    assert align("compare", right, other).exit_code == 0
    again = align("replay", right, "--operators", "*mm*", "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["operators"]


def test_a_vendors_library_is_a_chip_to_run_on(tmp_path: Path) -> None:
    """The environment of the command names it, and the reference is none of it."""
    script = tmp_path / "train.py"
    moved = 'model.to("device")\n'
    script.write_text(SCRIPT.replace(moved, moved + 'print("on", model.weight.device)\n'))
    acme = tmp_path / "libacme.so"
    acme.write_bytes((ROOT / "ditorch" / "lib" / "libemuchip.so").read_bytes())
    chip = ROOT / "ditorch" / "chips" / "b-mini.toml"
    arguments = ("run", script, "--chips", "library,cpu", "--tools", "", "--steps", 3)
    output = ("--output", tmp_path / "out", "--json", "--", "0.1", "none")
    named = {"DITORCH_VENDOR_LIBRARY": str(acme), "EMUCHIP_CHIP": str(chip)}
    result = align_outside(*arguments, *output, **named)
    assert result.returncode == 0, result.stderr
    library, host = json.loads(result.stdout)["rows"]
    assert 0 < library["ours"] < 1.5 and host["ours"] == 0
    log = (tmp_path / "out" / "library" / "log.txt").read_text()
    assert "on emuchip:0" in log, log

    result = align_outside(*arguments, *output)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        "ditorch-align: the chip library: DITORCH_VENDOR_LIBRARY names no library"
    )


@pytest.mark.exhaustive
def test_a_chip_whose_run_is_lost_fails_and_the_others_are_judged(tmp_path: Path) -> None:
    """The script kills the process that runs it; a run that exceeds its time ends the same way."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\n"
        "import torch, ditorch\n"
        "if ditorch.device.type != 'cpu':\n"
        "    os.kill(os.getppid(), signal.SIGKILL)\n"
        "    os._exit(1)\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "x.sum().backward()\n"
    )
    output = tmp_path / "out"
    earlier = Findings(tool="compare", chip="of another time", passed=False)
    write_findings(earlier, output / "d-mini")
    write_findings(earlier, output / "cpu" / "tools")
    result = align("run", script, "--chips", "b-mini,cpu", "--tools", "", "--output", output)
    assert result.exit_code == 1, result.stderr
    report = Report.model_validate_json((output / "report.json").read_text())
    lost, host = report.chips
    assert (lost.chip, lost.passed, host.passed) == ("b-mini", False, True)
    assert "ended or stopped answering" in lost.verdict


@pytest.mark.long
def test_isolate_finds_nothing_where_losses_agree(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = align(
        *("isolate", script, "--chip", "cpu", "--output", tmp_path / "out", "--json"),
        *("--", "0.1", "none"),
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["guilty"] == []
    # a report on the folder tells of the isolation, not of each of its trials
    report = align("report", tmp_path / "out", "--json")
    (chip,) = Report.model_validate_json(report.stdout).chips
    assert [tool.tool for tool in chip.tools] == ["isolate"]
