"""What goes by indices and by order on the device, and training steps that have both."""

from __future__ import annotations

from functools import partial

import pytest
from on_opencl import lines, run, run_checks
from sampled import sampled
from training_step import losses


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        pytest.param(["check_indexed.py"], "float32", marks=pytest.mark.long),
        pytest.param(["check_composed.py"], "", marks=pytest.mark.exhaustive),
        pytest.param(["check_indexed.py"], "", marks=pytest.mark.exhaustive),
    ],
    ids=["some", "composed", "indexed"],
)
@pytest.mark.timeout(900)
def test_operators_on_indices_and_order_are_the_devices_own(files: list[str], chosen: str) -> None:
    run_checks(*files, chosen=chosen)


@pytest.mark.exhaustive  # the device's compiler takes most of it
@pytest.mark.timeout(900)
def test_sums_with_products_are_the_devices_own() -> None:
    run_checks("check_products.py", DITORCH_STRICT="1")


FAULTY_INDEX = """
import torch, ditorch

table, busy = torch.ones(4, 3, device="device"), torch.ones(400, 400, device="device")
values = torch.full((2, 3), 7.0, device="device")
for faulty in (-1, 4, 2**40):
    for write in (table.scatter_, table.scatter_add_):
        for _ in range(9):
            busy = busy @ busy / 400
        index = torch.tensor([[0, 1, 2], [3, faulty, 0]], device="device") + 0
        try:
            write(0, index, values)
        except (RuntimeError, IndexError) as error:
            print(f"index {faulty} is out of bounds" in str(error), bool(table.eq(1).all()))
"""


@pytest.mark.long
def test_a_faulty_index_is_named_before_anything_is_written() -> None:
    assert lines(FAULTY_INDEX) == ["True True"] * 6


@pytest.mark.parametrize(
    ("family", "attention"),
    # those with experts, which do all that the others do
    sampled([("Mixtral", "sdpa"), ("Llama", "eager"), ("Qwen3Moe", "eager"), ("Qwen3", "sdpa")], 4),
)
def test_the_host_computes_nothing_of_a_training_step(family: str, attention: str) -> None:
    found = losses(partial(run, DITORCH_STRICT="1"), family, attention)
    assert found == pytest.approx(losses(partial(run, DITORCH_VENDOR=""), family, attention), 1e-4)
