"""Compares an operator of a chip with the truth in float64, and judges it by the standard.

DITORCH_CHIP=b-mini python examples/judge_operator.py
"""

import torch

import ditorch
from ditorch.precision.standards import load_standards
from ditorch.precision.verdict import judge

torch.manual_seed(0)
x, weight = torch.randn(128, 1024), torch.randn(1024, 64)
truth = x.double() @ weight.double()
scale = x.double().abs() @ weight.double().abs()  # of the terms that each element sums
of_the_chip = (x.to("device") @ weight.to("device")).cpu()

for name, found in {
    "of the chip": of_the_chip,
    "with a wrong element": of_the_chip.index_put(
        (torch.tensor(3), torch.tensor(5)), torch.tensor(0.0)
    ),
}.items():
    verdict = judge(
        "aten.mm.default",
        "out",
        found,
        truth,
        standards=load_standards(),
        dtype=found.dtype,
        scale=scale,
        reduction_length=x.shape[1],  # how many products each element sums
    )
    print(f"mm {name} ({ditorch.device}): {'passed' if verdict.passed else 'FAILED'}")
    print(f"  allowed: {verdict.threshold}; {verdict.reason or 'every element is within it'}")
