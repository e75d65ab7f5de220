"""Runs a user's parts on meta tensors: do they fit each other, and can a pipeline train them?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heteropp.models.custom.definition import ModelDefinition
from heteropp.models.custom.parts import held_part
from heteropp.models.parallel.backward import put_off
from heteropp.models.parallel.tensor_parallel import SoloGroup, TensorParallelGroup
from heteropp.models.spec import ModelError

SEQUENCES = 2
NOT_COUNTED = -100  # a target below 0, which torch's losses leave out too


def check_forward(
    definition: ModelDefinition, group: TensorParallelGroup | None = None
) -> tuple[int, int]:
    """Returns the hidden size, and the last size of the logits. Raises ModelError.

    group: of which this is a rank; None: of one.
    """
    dtype = getattr(torch, definition.dtype)
    parts = {
        name: held_part(definition, name, group or SoloGroup(), "meta", dtype)
        for name in definition.makes()
    }
    length = definition.sequence_length
    tokens = torch.zeros(SEQUENCES, length, dtype=torch.int64, device="meta")
    x = _run("the embedding", parts["embedding"], tokens)
    if x.dim() != 3 or x.shape[:2] != tokens.shape or x.dtype != dtype:
        raise ModelError(
            f"the embedding makes {list(x.shape)} {x.dtype} of {list(tokens.shape)}; expected "
            f"[sequences, length, hidden] {dtype}"
        )
    for kind in definition.blocks:
        y = _run(f"block {kind}", parts[kind], x)
        if y.shape != x.shape or y.dtype != x.dtype:
            raise ModelError(
                f"block {kind} makes {list(y.shape)} {y.dtype} of {list(x.shape)} {x.dtype}; "
                "expected the same, as the next block takes"
            )
    logits = _run("the head", parts["head"], x)
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise ModelError(
            f"the head makes {list(logits.shape)} of {list(x.shape)}; expected "
            "[sequences, length, vocab]"
        )
    return x.shape[-1], logits.shape[-1]


def check_loss(definition: ModelDefinition, vocab: int) -> None:
    """Tries a loss of the definition's own: is it a sum over rows? Raises ModelError."""
    loss = definition.loss
    if loss is None:
        return
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, vocab, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (6,), generator=generator)
    ignored = torch.cat((targets[:5], targets.new_full((1,), NOT_COUNTED)))
    try:
        whole, first, second = (
            loss(logits[part], targets[part]) for part in (slice(6), slice(3), slice(3, 6))
        )
        without, five = loss(logits, ignored), loss(logits[:5], targets[:5])
    except Exception as error:
        raise ModelError(f"the loss fails: {type(error).__name__}: {error}") from error
    if not isinstance(whole, Tensor) or whole.dim():
        raise ModelError("the loss is no scalar; expected the sum over the rows")
    if not torch.allclose(whole, first + second) or not torch.allclose(without, five):
        raise ModelError(
            "the loss is no sum over the rows, of which those with a target below 0 take no part"
        )


def _run(name: str, module: nn.Module, x: Tensor) -> Tensor:
    """Runs a part, and looks whether it keeps anything, or draws random numbers."""
    before = _state(module)
    random = _RandomOperators()
    try:
        with random, put_off() as later:
            # activations come as views of what a gradient is asked for
            y = module(x.detach().requires_grad_().view_as(x) if x.is_floating_point() else x)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"{name} cannot compute {list(x.shape)} {x.dtype}: {type(error).__name__}: {text}"
        ) from error
    if not isinstance(y, Tensor):
        raise ModelError(f"{name} gives a {type(y).__name__}; expected a tensor")
    try:
        later.backward(y, torch.empty_like(y))
        later.run()
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"{name} cannot compute its backward: {type(error).__name__}: {text}"
        ) from error
    if random.names:
        raise ModelError(
            f"{name} draws random numbers ({', '.join(sorted(random.names))}), which a forward "
            "that is run again would draw anew"
        )
    for key, value in _state(module).items():
        if before.get(key) != value:
            raise ModelError(
                f"{name} changes {key} in its forward; expected a module that keeps nothing "
                "between micro-batches"
            )
    return y


def _state(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Returns which tensors a module has beside its parameters, and how often each was written."""
    found: dict[str, Any] = dict(module.named_buffers())
    for name, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, Tensor):
                found[f"{name}.{key}".lstrip(".")] = value
    return {name: (id(tensor), tensor._version) for name, tensor in found.items()}


class _RandomOperators(TorchDispatchMode):
    """Notes the names of operators that draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import torch's compiler to do so, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
