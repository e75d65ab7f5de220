"""A backward in two halves comes to what a whole one does, bit for bit."""

from __future__ import annotations

import pytest
import torch
from training_run import tiny_model

from heteropp.models.parallel.backward import put_off
from heteropp.models.parallel.tensor_parallel import SoloGroup


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layers", [(0, 4), (1, 3), (3, 4)])
def test_the_halves_of_a_backward_make_the_whole(dtype: str, layers: tuple[int, int]) -> None:
    """Gradients are bitwise equal where weights' gradients are computed after two micro-batches."""
    model = tiny_model(dtype=dtype)
    module = model.build(layers, SoloGroup(), "cpu", getattr(torch, dtype))
    module.initialise(0)
    generator = torch.Generator().manual_seed(0)
    rows = 2 * model.sequence_length
    targets = torch.randint(model.vocab, (rows,), generator=generator)

    def given() -> torch.Tensor:
        if module.is_first:
            return torch.randint(model.vocab, (rows,), generator=generator)
        shape = (rows, model.hidden)
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).requires_grad_()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return module(x, targets) if module.is_last else module(x).sum()

    inputs = [given(), given()]
    for x in inputs:
        forward(x).backward()
    whole = {name: parameter.grad for name, parameter in module.named_parameters()}
    received = [x.grad for x in inputs]
    module.zero_grad()
    for x in inputs:
        x.grad = None

    halves = []
    for x in inputs:
        with put_off() as later:
            output = forward(x)
        later.backward(output, None)
        halves.append(later)
    matrices = [
        parameter
        for name, parameter in module.named_parameters()
        if not name.endswith("norm.weight") and name != "embedding.weight"
    ]
    assert all(matrix.grad is None for matrix in matrices)
    for x, expected in zip(inputs, received, strict=True):
        assert x.grad is None if expected is None else torch.equal(x.grad, expected)
    for later in halves:
        later.run()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.grad, whole[name]), name
