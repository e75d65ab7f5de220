"""Module.to(chip) keeps the Parameters and all that refers to them.

The truth is torch's own: each program runs with a move to the chip and with `.double()`, which
stays on the CPU and assigns `parameter.data` too. Both must tell the same, number for number.
"""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import ditorch

Move = Callable[[nn.Module], nn.Module]
Program = Callable[[Move, Move], list]  # there, back -> what it saw


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[2].register_buffer("twin", model[2].running_mean)
    return model


def numbers(*tensors: torch.Tensor | None) -> list:
    return [None if x is None else x.detach().cpu().double().tolist() for x in tensors]


def loss_of(model: nn.Module) -> torch.Tensor:
    first = next(model.parameters())
    rows = torch.linspace(-1, 1, 12).view(3, 4).to(first)
    return (model(rows) - rows.flip(0) * rows).square().sum()


def identity(there: Move, back: Move) -> list:
    model = tied()
    before = list(model.parameters())
    there(model)
    moved = [a is b for a, b in zip(before, model.parameters(), strict=True)]
    shared = model[1].weight is model[0].weight
    back(model)
    returned = [a is b for a, b in zip(before, model.parameters(), strict=True)]
    return [moved, shared, returned, model[1].weight is model[0].weight, numbers(*before)]


def early_optimizer(there: Move, back: Move) -> list:
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    there(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
    devices = {p.device == q.device for p in model.parameters() for q in (p.grad, p.data)}
    back(model)
    return [devices, numbers(*model.parameters())]


def gradients(there: Move, back: Move) -> list:
    model = tied()
    loss_of(model).backward()
    weight, grad = model[0].weight, model[0].weight.grad
    there(model)
    kept = weight.grad is grad
    with_grad = numbers(*(p.grad for p in model.parameters()))
    loss_of(model).backward()  # accumulates on the moved gradient
    back(model)
    return [kept, with_grad, numbers(*(p.grad for p in model.parameters()))]


def early_graph(there: Move, back: Move) -> list:
    """A graph, and with it the gradient's accumulator, that is older than the move."""
    model = tied()
    held = model[0].weight.view(-1).square().sum()
    there(model)
    try:
        held.backward()
        outcome = "ran"
    except RuntimeError as error:
        outcome = type(error).__name__
    model.zero_grad()
    loss_of(model).backward()
    return [outcome, numbers(model[0].weight.grad)]


def frozen(there: Move, back: Move) -> list:
    model = tied()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    there(model)
    loss_of(model).backward()
    return [
        [p.requires_grad for p in model.parameters()],
        numbers(*(p.grad for p in model.parameters())),
    ]


def hooks(there: Move, back: Move) -> list:
    model, seen = tied(), []
    weight = model[0].weight
    weight.register_hook(lambda grad: grad * 2)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is weight))
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model.register_full_backward_hook(lambda *_: seen.append("backward"))
    weight.note = "kept"
    there(model)
    loss_of(model).backward()
    return [seen, model[0].weight.note, numbers(weight.grad)]


def references(there: Move, back: Move) -> list:
    model = tied()
    weak, table = weakref.ref(model[0].weight), {model[0].weight: "first"}
    there(model)
    found = [weak() is model[0].weight, table.get(model[0].weight)]
    back(model)
    found += [weak() is model[0].weight, table.get(model[0].weight)]
    table.clear()
    del model
    gc.collect()
    return [*found, weak() is None]


def flat_storage(there: Move, back: Move) -> list:
    """Parameters that are views of one buffer get storages of their own, as torch has it."""
    flat = torch.arange(20.0)
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(flat[:16].view(4, 4))
    model.bias = nn.Parameter(flat[16:])
    weight = model.weight
    there(model)
    together = model.weight.untyped_storage().data_ptr() == model.bias.untyped_storage().data_ptr()
    with torch.no_grad():
        model.weight.zero_()
    return [together, weight is model.weight, model.bias.storage_offset(), flat.sum().item()]


def an_aliased_view(there: Move, back: Move) -> list:
    """What was taken of a parameter before stays where it was."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1)
    row = model.weight.detach()[0]
    there(model)
    with torch.no_grad():
        model.weight.fill_(2)
    return [str(row.device), row.dtype, row.tolist()]


def parametrized(there: Move, back: Move) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    parametrizations.spectral_norm(model[1]).eval()
    before = list(model.parameters())
    there(model)
    same = [a is b for a, b in zip(before, model.parameters(), strict=True)]
    loss_of(model).backward()
    seen = [same, parametrize.is_parametrized(model[0]), numbers(*(p.grad for p in before))]
    parametrize.remove_parametrizations(model[0], "weight")
    return [*seen, numbers(model[0].weight)]


def state(there: Move, back: Move) -> list:
    model, called = tied(), []
    model.register_state_dict_post_hook(lambda _, state, prefix, __: called.append(len(state)))
    model.register_load_state_dict_pre_hook(lambda *_: called.append("load"))
    saved = copy.deepcopy(model.state_dict())
    there(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weight = model[0].weight
    model.load_state_dict(saved)
    held = model.state_dict()
    shared = held["0.weight"].data_ptr() == held["1.weight"].data_ptr()
    return [called, shared, weight is model[0].weight, list(held), numbers(*held.values())]


def buffers(there: Move, back: Move) -> list:
    model = tied()
    before = model[2].running_mean
    there(model)
    return [before is model[2].running_mean, model[2].twin is model[2].running_mean]


def copies(there: Move, back: Move) -> list:
    model = tied()
    there(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].weight.zero_()
    return [twin[1].weight is twin[0].weight, numbers(model[0].weight, twin[1].weight)]


def recurrent(there: Move, back: Move) -> list:
    torch.manual_seed(0)
    model = nn.LSTM(4, 4)
    before = list(model.parameters())
    there(model)
    model(torch.ones(2, 1, 4).to(before[0]))[0].sum().backward()
    flat = [a is b for a, b in zip(model._flat_weights, before, strict=True)]
    return [flat, numbers(*(p.grad for p in before))]


PROGRAMS: list[Program] = [
    identity, early_optimizer, gradients, early_graph, frozen, hooks, references, flat_storage,
    an_aliased_view, parametrized, state, buffers, copies, recurrent,
]  # fmt: skip


def close(a: object, b: object) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == pytest.approx(b, rel=1e-3, abs=1e-4) if isinstance(a, float) else a == b


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("way", ["to", "to with a dtype", "each parameter"])
def test_a_move_to_the_chip_is_a_change_of_dtype(program: Program, way: str) -> None:
    def each_to_chip(model: nn.Module) -> nn.Module:
        return model._apply(lambda x: x.to("device", non_blocking=True))

    there: Move = {
        "to": lambda model: model.to("device"),
        "to with a dtype": lambda model: model.to("device", torch.float64),
        "each parameter": each_to_chip,
    }[way]
    torch.manual_seed(0)
    on_chip = program(there, lambda model: model.cpu().float())
    torch.manual_seed(0)
    on_cpu = program(lambda model: model.double(), lambda model: model.float())
    assert close(on_chip, on_cpu), f"on the chip: {on_chip}\non the CPU:  {on_cpu}"


def test_on_the_chip_too_a_dtype_changes_in_place() -> None:
    model = tied().to("device")
    before = list(model.parameters())
    for change in (model.half, model.bfloat16, model.double, model.float):
        change()
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert model[1].weight is model[0].weight
    assert {p.dtype for p in before} == {torch.float32}


def test_an_empty_copy_of_the_shapes_is_made_anew() -> None:
    """Module.to_empty makes new Parameters from meta tensors; between devices it keeps the old."""
    model = tied().to_empty(device="device")
    assert model[1].weight is model[0].weight
    model.to_empty(device="cpu")
    assert model[1].weight is model[0].weight
    with torch.device("meta"):
        shapes = nn.Linear(4, 4)
    before = shapes.weight
    shapes.to_empty(device="device")
    assert shapes.weight is not before
    assert shapes.weight.device == ditorch.device
    assert not torch._has_compatible_shallow_copy_type(before, shapes.weight)


def test_other_layouts_are_not_taken_for_dense_ones() -> None:
    x = torch.zeros(2, 2, device="device")
    sparse = torch.eye(2).to_sparse()
    assert not torch._has_compatible_shallow_copy_type(x, sparse)
    assert not torch._has_compatible_shallow_copy_type(sparse, x)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = sparse


def test_the_swapping_of_torchs_future_still_works() -> None:
    model = tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("device")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    before = numbers(model[0].weight)
    loss_of(model).backward()
    optimizer.step()
    assert model[1].weight is model[0].weight
    assert numbers(model[0].weight) != before
