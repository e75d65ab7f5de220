"""DITORCH_STRICT=1 turns what the host would compute into an error."""

from __future__ import annotations

from functools import partial

import pytest
from on_chip import run_checks, run_python
from sampled import sampled
from training_step import losses

MODEL = """
import torch, ditorch
from torch import nn
class Running(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, 0)
model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.SiLU(), Running()))
model = model.to("device")
x = torch.ones(2, 4, dtype=torch.float32).to("device")
"""


def test_the_operator_the_dtypes_and_the_module_are_named() -> None:
    code = MODEL + "try:\n    model(x)\nexcept NotImplementedError as error:\n    print(error)\n"
    done = run_python(code, "b-mini", DITORCH_STRICT="1")
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[0]
    for part in ("DITORCH_STRICT=1", "aten::cumprod", "(Float)", "Sequential.1.1", "emuchip"):
        assert part in line, line


def test_outside_of_modules_it_says_so_and_the_next_operator_runs() -> None:
    code = MODEL + (
        "try:\n    x.double().cumprod(0)\nexcept NotImplementedError as error:\n    print(error)\n"
        "print((x @ x.t() + 1).sum().item())\n"
    )
    done = run_python(code, "b-mini", DITORCH_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert "(Double) in no module's forward" in done.stdout
    assert done.stdout.splitlines()[-1] == "20.0"


def test_without_it_the_host_computes() -> None:
    done = run_python(MODEL + "print(model(x).shape)", "b-mini")
    assert done.stdout.strip() == "torch.Size([2, 4])", done.stderr


def test_another_value_is_refused() -> None:
    done = run_python("import ditorch", "b-mini", DITORCH_STRICT="yes")
    assert done.returncode != 0
    assert "DITORCH_STRICT is 'yes', expected 0 or 1" in done.stderr


@pytest.mark.parametrize("chip", sampled(["d", "b-mini"], 1, everyday=1))
def test_sums_with_products_are_the_chips_own(chip: str) -> None:
    run_checks(chip, "check_products.py", DITORCH_STRICT="1")


def test_a_copy_that_the_host_makes_is_named() -> None:
    code = (
        "import torch, ditorch\n"
        "x = torch.ones(3, 2, dtype=torch.complex64).to('device')\n"
        "assert x.clone().real.sum().item() == 6\n"  # bytes need no kernel
        "try:\n    x.t().contiguous()\nexcept NotImplementedError as error:\n    print(error)\n"
    )
    done = run_python(code, "b-mini", DITORCH_STRICT="1")
    assert done.returncode == 0, done.stderr
    assert "aten::copy_ of (ComplexFloat, ComplexFloat) in no module's" in done.stdout


@pytest.mark.parametrize(
    ("family", "attention"),
    sampled(
        [("Mixtral", "sdpa"), ("Llama", "eager"), ("Qwen3", "sdpa"), ("Qwen3Moe", "eager")],
        2,
        everyday=1,
    ),
)
def test_the_host_computes_nothing_of_a_training_step(family: str, attention: str) -> None:
    found = losses(partial(run_python, chip="b-mini", DITORCH_STRICT="1"), family, attention)
    assert found == pytest.approx(
        losses(partial(run_python, chip=None), family, attention), rel=1e-4
    )
    assert found[2] < found[0]
