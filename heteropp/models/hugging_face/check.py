"""Proof before trust: one step of a family made small, by transformers unsplit and by us split.

Loss and every gradient must be the same. Both run on the host in float64, so that
nothing differs by rounding but what a family computes in float32 whatever the dtype.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from heteropp.layout.boxes import Box
from heteropp.models.hugging_face.config import family_config
from heteropp.models.hugging_face.family import base_name
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.hugging_face.remote_code import RemoteCode
from heteropp.models.hugging_face.small import LENGTH, small_config
from heteropp.models.hugging_face.stage import HuggingFaceStage
from heteropp.models.parallel.tensor_parallel import SoloGroup, TensorParallelGroup
from heteropp.models.spec import ModelError
from heteropp.models.stage_module import fill

TOLERANCE = 1e-4  # relative, of the loss and of each gradient's largest element
SEQUENCES = 3  # so that a rank of two has half of one
DEADLINE_S = 60


@dataclass(frozen=True)
class Check:
    """What one degree of tensor parallelism came to."""

    tp: int
    error: float  # the largest, relative
    worst: str  # what it is of: "loss", or a parameter's name
    problem: str = ""  # why there is no error to tell, in a clause
    sequence_parallel: bool = False
    is_refused: bool = False  # before anything ran, as plans of this degree are

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= TOLERANCE

    def explain(self) -> str:
        """Says in a clause what is wrong."""
        return self.problem or (
            f"{self.worst} differs from transformers' by {self.error:.1e} of its size; expected at "
            f"most {TOLERANCE:.0e}"
        )


def small_model(
    values: dict[str, Any], tp: int = 1, code: RemoteCode | None = None
) -> HuggingFaceModel:
    """Returns the model of a config.json, made small for a group of tp. Raises ModelError."""
    config = small_config(values, tp, code).values()
    return read(config, "small", code, sequence_length=LENGTH, dtype="float64")


def check(
    values: dict[str, Any],
    tp: int = 1,
    sequence_parallel: bool = False,
    code: RemoteCode | None = None,
) -> Check:
    """Holds three stages of a config's family against transformers. Raises ModelError."""
    model = small_model(values, tp, code)
    problem = model.tp_problem(tp)
    if sequence_parallel and problem is None:
        problem = model.sequence_parallel_problem()
    if problem:
        return Check(tp, 0.0, "", problem, sequence_parallel, is_refused=True)
    try:
        with _one_thread():
            initial = noisy_values(model)
            expected = _unsplit(model, initial)
            loss, gradients = split(model, initial, tp, sequence_parallel)
    except ModelError:
        raise
    except Exception as error:  # of whatever the family's modules run into
        text = " ".join(str(error).split())[:200]
        problem = f"its modules fail: {type(error).__name__}: {text}"
        return Check(tp, 0.0, "", problem, sequence_parallel)
    if not any(expected[p.name].any() for p in model.parameters((0, 1))):
        problem = "no gradient reaches its first layer, so that nothing is compared"
        return Check(tp, 0.0, "", problem, sequence_parallel)
    errors = {"loss": _error(loss, expected["loss"])}
    for name, gradient in gradients.items():
        errors[name] = _error(gradient, expected[name])
    worst = max(errors, key=lambda name: errors[name])
    return Check(tp, errors[worst], worst, "", sequence_parallel)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Has torch compute on one thread a rank, as tiny products take longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _error(got: Tensor, expected: Tensor) -> float:
    difference = (got - expected).abs().max().item()
    error = difference / (expected.abs().max().item() or 1.0)
    return error if error == error else float("inf")


def tokens_of(model: HuggingFaceModel) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, [rows] each; one target does not count."""
    generator = torch.Generator().manual_seed(1)
    both = torch.randint(model.vocab, (2, SEQUENCES * LENGTH), generator=generator)
    both[1, 3] = -100
    return both[0], both[1]


def noisy_values(model: HuggingFaceModel) -> dict[str, Tensor]:
    """Returns every parameter whole, none of which is a plain 0 or 1."""
    generator = torch.Generator().manual_seed(2)
    result = {}
    for name, value in model.initial_values((0, model.layers), 0):
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        result[name] = value.double() + 0.05 * noise
    return result


def _unsplit(model: HuggingFaceModel, initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the loss and the gradients of transformers' own model, by our names."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(family_config(model.config))
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        whole = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    whole.config._experts_implementation = "eager"
    base = base_name(whole)
    names = {id(module): name for name, module in whole.named_modules()}
    head = names[id(whole.get_output_embeddings())]

    def theirs(name: str) -> str:
        return name if name.startswith(f"{head}.") else f"{base}.{name}"

    values = {theirs(name): value for name, value in initial.items()}
    keys = whole.load_state_dict(values, strict=False)
    tied = {theirs(name) for name in model.tied}
    missing = {key for key in keys.missing_keys if key not in tied}
    if missing or keys.unexpected_keys:
        names_ = ", ".join(sorted({*missing, *keys.unexpected_keys}))
        raise ModelError(f"transformers' model has other parameters: {names_}")
    tokens, targets = tokens_of(model)
    found = whole.train()(input_ids=tokens.view(-1, LENGTH), use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        found.logits.reshape(len(targets), -1), targets, reduction="sum"
    )
    if getattr(config, "output_router_logits", False):
        loss = loss + _auxiliary_loss(whole, found.router_logits, _counted(targets))
    loss.backward()
    parameters = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    result = {"loss": loss.detach()}
    for parameter in model.parameters():
        value = parameters[theirs(parameter.name)]
        result[parameter.name] = torch.zeros_like(value) if value.grad is None else value.grad
    return result


def _counted(targets: Tensor) -> Tensor:
    """Returns how many targets of each sequence count."""
    return (targets.view(SEQUENCES, -1) >= 0).sum(1).double()


def _auxiliary_loss(whole: Any, logits: tuple[Tensor, ...], counted: Tensor) -> Tensor:
    """Returns transformers' loss of routers for each sequence by itself, by which tokens count it.

    logits: of each layer, [rows, experts].
    """
    function = vars(sys.modules[type(whole).__module__])["load_balancing_loss_func"]
    by_sequence = zip(*(each.chunk(SEQUENCES) for each in logits), strict=True)
    losses = [function(each, whole.num_experts, whole.num_experts_per_tok) for each in by_sequence]
    return whole.router_aux_loss_coef * (torch.stack(losses) * counted).sum()


def split(
    model: HuggingFaceModel, initial: dict[str, Tensor], tp: int, sequence_parallel: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and the gradients of three stages, whole, by parameter."""
    groups: list[TensorParallelGroup] = [SoloGroup()]
    if tp > 1:
        groups = list(_threads(tp, sequence_parallel))
    with ThreadPoolExecutor(tp) as pool:
        started = [pool.submit(_rank, model, initial, group) for group in groups]
    failures = [each.exception() for each in started]
    # those of ranks that waited for another one come last
    for failure in sorted(failures, key=lambda each: isinstance(each, BrokenBarrierError)):
        if failure is not None:
            raise failure
    ranks = [each.result() for each in started]
    result = {p.name: torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()}
    parameters = {p.name: p for p in model.untied().parameters()}
    for index, (_, gradients) in enumerate(ranks):
        for name, gradient in gradients:
            parameter, whole = parameters[name], result[model.global_name(name)]
            if parameter.split_dimension is None:
                if index == 0 or parameter.gradient_states(tp, sequence_parallel).summands > 1:
                    whole += gradient
                continue
            boxes = parameter.boxes(tp, index)
            pieces = gradient.reshape(-1).split([box.size for box in boxes])
            for box, piece in zip(boxes, pieces, strict=True):
                whole[box.within(Box.whole(whole.shape))] += piece.view(box.shape)
    return ranks[0][0], result


def _rank(
    model: HuggingFaceModel, initial: dict[str, Tensor], group: TensorParallelGroup
) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Runs forward and backward of all stages, as one rank of each one's group."""
    try:
        return _passes(model, initial, group)
    except BaseException:
        if isinstance(group, ThreadGroup):
            group.shared.barrier.abort()  # the others wait for this one
        raise


def _passes(
    model: HuggingFaceModel, initial: dict[str, Tensor], group: TensorParallelGroup
) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    stages = []
    for layers in _cut(model.layers):
        stage = model.build(layers, group, "cpu", torch.float64)
        _fill(stage, initial)
        stages.append(stage)
    tokens, targets = tokens_of(model)
    inputs, outputs, x = [], [], tokens
    for stage in stages:
        x = x if stage.is_first else x.detach().requires_grad_()
        inputs.append(x)
        if stage.auxiliary_loss is not None:
            stage.routing = stage.new_routing(SEQUENCES)
        x = stage(x, targets)
        outputs.append(x)
    loss = outputs[-1].detach() + _ask(stages, _counted(targets))
    gradient = None
    for start, end in zip(inputs[::-1], outputs[::-1], strict=True):
        torch.autograd.backward(end, gradient)
        gradient = start.grad
    gradients = [
        (name, parameter.grad)
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    ]
    return loss, gradients


def _ask(stages: list[HuggingFaceStage], counted: Tensor) -> Tensor:
    """Returns the auxiliary loss of stages that have run forward, 0 without one, and notes what it
    asks of their routers.
    """
    routings = [stage.routing for stage in stages if stage.routing is not None]
    if not routings:
        return counted.new_zeros(())
    loss, totals = routings[0].loss, sum(routing.totals for routing in routings)
    assert isinstance(totals, Tensor)
    for routing in routings:
        routing.gradients = counted.unsqueeze(1) * loss.gradients(totals)
    return (counted * loss.of(totals)).sum()


def _cut(layers: int) -> list[tuple[int, int]]:
    """Cuts layers into three stages, as unlike as they can be."""
    if layers < 3:
        return [(i, i + 1) for i in range(layers)]
    return [(0, 1), (1, layers - 1), (layers - 1, layers)]


@torch.no_grad()
def _fill(stage: HuggingFaceStage, values: dict[str, Tensor]) -> None:
    model = stage.model
    parameters = {p.name: p for p in model.untied().parameters()}
    for name, target in stage.named_parameters():
        fill(target, stage.boxes(parameters[name]), values[model.global_name(name)])


def _threads(size: int, sequence_parallel: bool) -> list[ThreadGroup]:
    shared = _Shared(size)
    return [ThreadGroup(shared, index, sequence_parallel) for index in range(size)]


class _Shared:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=DEADLINE_S)
        self.given: list[Tensor] = [torch.empty(0)] * size


class ThreadGroup:
    """A tensor-parallel group whose ranks are threads of one process."""

    def __init__(self, shared: _Shared, index: int, sequence_parallel: bool = False) -> None:
        self.shared, self.index, self.size = shared, index, len(shared.given)
        self.sequence_parallel = sequence_parallel

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        def combine(given: list[Tensor]) -> Tensor:
            stacked = torch.stack(given)
            return stacked.amax(0) if maximum else stacked.sum(0)

        tensor.copy_(self._exchange(tensor, combine))

    def all_gather(self, output: Tensor, piece: Tensor) -> None:
        output.copy_(self._exchange(piece, torch.cat))

    def reduce_scatter(self, piece: Tensor, whole: Tensor) -> None:
        total = self._exchange(whole, lambda given: torch.stack(given).sum(0))
        piece.copy_(total.chunk(self.size)[self.index])

    @torch.no_grad()
    def _exchange(self, own: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.shared.given[self.index] = own.detach()
        self.shared.barrier.wait()
        result = combine(self.shared.given)
        self.shared.barrier.wait()  # all have it before anyone writes again
        return result
