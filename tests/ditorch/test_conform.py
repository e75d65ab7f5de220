"""The conformance suite on an emulated chip, and what it finds when the chip is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from on_chip import environment, run_python

from ditorch.conform.results import Conformance, OperatorResult, read_conformance

HERE = Path(__file__).parent

WITH_CHIP_KERNELS = [
    "addmm", "baddbmm", "bmm", "log_softmax", "mean", "mm", "nn.functional.layer_norm",
    "nn.functional.rms_norm", "softmax", "sum",
]  # fmt: skip
WITHOUT_CHIP_KERNELS = ["cumprod", "erfinv", "kthvalue"]

SUBSET = f"""
import sys
from pathlib import Path
from ditorch.conform.operators import operator_names
from ditorch.conform.suite import run_conformance

run_conformance(
    output=Path(sys.argv[1]),
    only={{"operators"}},
    operators=sorted({{*operator_names()[::35], *{WITH_CHIP_KERNELS}, *{WITHOUT_CHIP_KERNELS}}}),
    dtypes=["float32", "bfloat16", "int64"],
    samples_per_dtype=2,
    workers=1,
    resume=True,
)
"""


@pytest.fixture(scope="module")
def subset(tmp_path_factory: pytest.TempPathFactory) -> tuple[Conformance, list[str]]:
    """One operator in 35; killed when some are done, then resumed. Also its first journal."""
    output = tmp_path_factory.mktemp("conform") / "result.json"
    journal = output.with_suffix(".partial.jsonl")
    command = ["-c", SUBSET, str(output)]
    first = forks.start(command, environment("b"))
    end_s = time.monotonic() + 120
    while not journal.is_file() or len(journal.read_text().splitlines()) < 12:
        assert first.poll() is None and time.monotonic() < end_s
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert not output.exists()
    before = journal.read_text().splitlines(keepends=True)
    again = forks.run(command, environment("b"), timeout_s=240)
    assert again.returncode == 0, again.stderr
    assert not journal.exists()
    return read_conformance(output), [line for line in before[1:] if line.endswith("\n")]


@pytest.mark.exhaustive
def test_an_emulated_chip_conforms(subset: tuple[Conformance, list[str]]) -> None:
    found = subset[0]
    assert len(found.operators) >= 25
    assert len(found.covered) >= 0.95 * len(found.operators)
    assert found.pass_rate >= 0.99, list(found.problems("failed"))
    assert found.tally.supported == sum(sum(o.computed_by.values()) for o in found.operators)
    variants = {v for o in found.operators for by_variant in o.tallies.values() for v in by_variant}
    assert variants == {"function", "method", "in-place", "out=", "out= resized", "gradient"}


LIMITED = """
import sys
from pathlib import Path
from ditorch.conform.operators import operator_names
from ditorch.conform.suite import run_conformance

found = run_conformance(output=Path(sys.argv[1]), only={"operators"}, within_s=1.0, workers=1)
names = [operator.name for operator in found.operators]
assert names and found.left_out == len(operator_names()) - len(names)
assert names == sorted(names) != operator_names()[: len(names)]
"""


@pytest.mark.long
def test_a_limited_time_is_for_any_operators(tmp_path: Path) -> None:
    command = ["-c", LIMITED, str(tmp_path / "result.json")]
    done = forks.run(command, environment("b"), timeout_s=240)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
def test_chip_kernels_and_fallbacks_are_counted_apart(
    subset: tuple[Conformance, list[str]],
) -> None:
    by_name = {operator.name: operator for operator in subset[0].operators}
    for name in WITH_CHIP_KERNELS:
        assert by_name[name].kernels, f"{name} never ran on a kernel of the chip"
    assert by_name["mm"].computed_by["chip"] > 0
    assert by_name["mm"].tallies["float32"]["function"].passed == 2
    for name in WITHOUT_CHIP_KERNELS:
        assert by_name[name].fallbacks.get(name), f"{name} was never computed by the host"
    fallbacks = [o for o in subset[0].operators if o.computed_by.get("host") and not o.kernels]
    assert fallbacks and all(operator.fallbacks for operator in fallbacks)


@pytest.mark.long
def test_a_killed_run_is_resumed_where_it_stopped(
    subset: tuple[Conformance, list[str]],
) -> None:
    found, before = subset
    by_name = {operator.name: operator for operator in found.operators}
    assert len(before) >= 10
    for line in before:
        kept: dict[str, Any] = json.loads(line)
        assert by_name[kept["name"]].elapsed_s == kept["elapsed_s"]  # the very same run


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OperatorResult]:
    """The operators whose kernels `planted_kernels` breaks, and one that it does not."""
    output = tmp_path_factory.mktemp("planted") / "result.json"
    operators = (
        "sin,cos,exp,atan,neg,floor,ceil,erf,erfinv,tan,tanh,sigmoid,exponential,unsqueeze,abs"
    )
    variables = environment("b")
    variables["PYTHONPATH"] += f":{HERE}"
    done = forks.run(
        ["-m", "ditorch_align", "conform", "--only", "operators", "--operators", operators,
         "--dtypes", "float32", "--samples", "1", "--workers", "2", "--deadline", "12",
         "--import", "planted_kernels", "--output", str(output)],
        variables, timeout_s=240,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return {operator.name: operator for operator in read_conformance(output).operators}


INTERRUPTED = """
import sys
from pathlib import Path
from ditorch.conform.suite import run_conformance

output = Path(sys.argv[1])
journal = output.with_suffix(".partial.jsonl")

def run(seed, progress):
    return run_conformance(
        output=output, only={"operators"}, operators=["abs", "neg", "sign"], dtypes=["float32"],
        samples_per_dtype=1, seed=seed, workers=1, resume=True, progress=progress)

def interrupt(done, total, name):
    if done == 2:
        raise KeyboardInterrupt

try:
    run(0, interrupt)
except KeyboardInterrupt:
    pass
kept = journal.read_bytes() + b'{"torn'
journal.write_bytes(kept)
try:
    run(1, interrupt)
except ValueError as error:
    print(error)
assert journal.read_bytes() == kept
counts = []
found = run(0, lambda done, total, name: counts.append(done))
assert counts == [3] and len(found.operators) == 3, counts
"""


def test_a_run_with_other_settings_is_not_resumed_and_not_lost(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = forks.run(["-c", INTERRUPTED, str(output)], environment("b"), timeout_s=240)
    assert done.returncode == 0, done.stderr
    journal = output.with_suffix(".partial.jsonl")
    assert done.stdout == (
        f"{journal}: seed is 1 where the run to resume has 0, expected the same\n"
    )


FAULTS = [  # operator, variant, status, reason
    ("sin", "function", "failed", "wrong values: 1 of "),
    ("cos", "in-place", "failed", "the in-place form did not write"),
    ("exp", "function", "failed", "changed argument 0, which the CPU leaves alone"),
    ("atan", "function", "failed", "NaN in other places; at [0, 0] nan, expected "),
    ("neg", "function", "failed", "inf in other places; at [0, 0] inf, expected "),
    ("floor", "function", "failed", "wrong dtype torch.float64, expected torch.float32"),
    ("ceil", "function", "failed", "wrong shape [1, 20, 20], expected [20, 20]"),
    ("erf", "function", "failed", "raised RuntimeError: the planted kernel is out of order"),
    ("erfinv", "function", "unsupported", "the vendor has no kernel for it"),
    ("tan", "function", "failed", "process died with SIGABRT"),
    ("tanh", "function", "failed", "did not end within 12 s"),
    ("sigmoid", "gradient", "failed", "wrong values"),
    ("exponential", "in-place", "failed", "an equal seed did not give equal random numbers"),
    ("unsqueeze", "function", "failed", "result 0 does not share memory with argument 0"),
]


@pytest.mark.long
def test_a_wrong_kernel_is_named_with_its_fault(planted: dict[str, OperatorResult]) -> None:
    for operator, variant, status, reason in FAULTS:
        found = [p for p in planted[operator].problems if p.variant == variant]
        assert [p.status for p in found] == [status], operator
        assert reason in found[0].reason, operator
        assert found[0].dtype == "float32"
    # right ones pass beside them
    assert planted["abs"].tally.passed > 0 and not planted["abs"].problems
    assert planted["sigmoid"].tallies["float32"]["function"].passed == 1


def test_bad_input_is_one_sentence_and_exit_code_2(make_chip: Callable[..., Path]) -> None:
    code = """
from typer.testing import CliRunner
from ditorch_align import app

for arguments in (
    ["--operators", "no_such_operator*"],
    ["--dtypes", "float31"],
    ["--only", "everything"],
    ["--only", "operators", "--operators", "mm", "--import", "no_such_module"],
    ["--only", "operators", "--operators", "mm", "--output", "/proc/no/where.json"],
):
    done = CliRunner().invoke(app, ["conform", *arguments])
    lines = [line for line in done.stderr.splitlines() if line.startswith("ditorch-align: ")]
    print(done.exit_code, len(lines), lines[0], done.exception)
"""
    done = run_python(code, make_chip("b"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and all(line.startswith("2 1 ditorch-align: ") for line in lines), lines
    for line, named in zip(
        lines, ("no_such_operator*", "float31", "everything", "no_such_module", "/proc/no"),
        strict=True,
    ):  # fmt: skip
        assert named in line


def test_torchs_own_device_tests_run_on_the_device() -> None:
    """The class that PyTorch's generic tests are written as, made for the device and run."""
    code = """
import unittest
import torch, ditorch
from torch.testing._internal.common_device_type import dtypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase

class TestOurs(TestCase):
    @ops([op for op in op_db if op.name in ("add", "linalg.inv", "cumsum")],
         allowed_dtypes=(torch.float32,))
    def test_samples(self, device, dtype, op):
        for sample in op.sample_inputs(device, dtype):
            found = op(sample.input, *sample.args, **sample.kwargs)
            self.assertEqual(found.device.type, ditorch.device.type)
            host = sample.transform(lambda t: t.cpu() if isinstance(t, torch.Tensor) else t)
            self.assertEqual(found.cpu(), op(host.input, *host.args, **host.kwargs))

instantiate_device_type_tests(TestOurs, globals(), only_for="privateuse1")
done = unittest.TextTestRunner().run(
    unittest.defaultTestLoader.loadTestsFromTestCase(TestOursPRIVATEUSE1))
print(done.testsRun, len(done.failures), len(done.errors), len(done.skipped))
"""
    done = run_python(code, "b")
    assert done.stdout.split() == ["3", "0", "0", "0"], done.stdout + done.stderr
