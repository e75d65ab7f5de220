"""Layers that are declared on plain modules do what the called tensor-parallel layers do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clusters import tiny_model
from hspmd_ranks import Ranks
from torch import Tensor, nn

from heteropp.layout.boxes import Box
from heteropp.layout.hspmd.annotation import DUPLICATE, Annotation, AnnotationError, holdings
from heteropp.layout.hspmd.declaration import declared, rows
from heteropp.layout.hspmd.module import annotate
from heteropp.layout.hspmd.tensor import annotated, moved
from heteropp.layout.parameter import Parameter
from heteropp.models.gpt2.model import GPT2Model
from heteropp.models.llama.stage import MLP
from heteropp.models.parallel.tensor_parallel import (
    ColumnParallelLinear,
    ProcessGroup,
    RowParallelLinear,
    TensorParallelGroup,
    VocabularyParallelEmbedding,
    copy_to_group,
)
from heteropp.models.stage_module import fill

Groups = tuple[tuple[int, ...], ...]
WORLD = 3
INPUTS, OUTPUTS, VOCAB, ROWS = 8, 12, 10, 6
KIND: dict[str, Any] = {"dtype": torch.float64}
# A gradient is g^T x in one layer and (x^T g)^T in the other, which a BLAS may sum in two orders.
ROUNDING = 8 * torch.finfo(torch.float64).eps
# one replica; and two, of unlike degrees and shares
LAYOUTS: dict[str, tuple[Groups, tuple[int, ...]]] = {
    "tp 2": (((0, 1),), (1,)),
    "tp 2 and tp 1": (((0, 1), (2,)), (2, 1)),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


class Layout:
    """The replicas of a test, and the one that this rank is in."""

    def __init__(self, rank: int, name: str, sequence_parallel: bool = False) -> None:
        self.groups, self.shares = LAYOUTS[name]
        self.sequence_parallel = sequence_parallel
        self.own: tuple[int, ...] = ()
        for members in self.groups:
            group = dist.new_group(list(members))
            if rank in members:
                assert isinstance(group, dist.ProcessGroup)
                self.own, self.group = members, ProcessGroup(group, sequence_parallel)

    def declare(self, module: nn.Module, parameters: Sequence[Parameter]) -> dict[str, Any]:
        return declared(module, parameters, self.groups, self.shares, self.sequence_parallel)

    def rows(self, sequence_parallel: bool = False) -> Annotation:
        return rows(self.groups, self.shares, sequence_parallel)

    def columns(self) -> Annotation:
        """The last dimension of activations is cut within a group."""
        pairs = [(members, {1: len(members)}) for members in self.groups]
        return Annotation.of(pairs, 0, self.shares)

    def filled(
        self, module: nn.Module, parameters: Sequence[Parameter], values: dict[str, Tensor]
    ) -> nn.Module:
        """Gives a called module this rank's slices."""
        for parameter in parameters:
            target = module.get_parameter(parameter.name)
            boxes = parameter.boxes(self.group.size, self.group.index)
            fill(target, boxes, values[parameter.name])
        return module

    def gradients(
        self, module: nn.Module | None, parameters: Sequence[Parameter]
    ) -> dict[str, Tensor]:
        """The whole gradients of a called module, summed over the replicas as training does."""
        result = {}
        for parameter in parameters:
            whole = torch.zeros(parameter.shape, **KIND)
            if module is not None:
                tp, index = self.group.size, self.group.index
                states = parameter.gradient_states(tp, self.sequence_parallel)
                if states.splits or states.summands > 1 or index == 0:
                    (box,) = parameter.boxes(tp, index)
                    gradient = module.get_parameter(parameter.name).grad
                    assert gradient is not None
                    whole[box.within(Box.whole(parameter.shape))] = gradient
            dist.all_reduce(whole)
            result[parameter.name] = whole
        return result


def values(parameters: Sequence[Parameter]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {p.name: torch.randn(p.shape, generator=generator, **KIND) for p in parameters}


def plain(module: nn.Module, parameters: Sequence[Parameter]) -> nn.Module:
    assert module.double().load_state_dict(values(parameters))
    return module


def difference(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None:
        assert one is other
        return 0.0
    assert one.shape == other.shape
    return float((one - other).abs().max() / other.abs().max())


# ---------------------------------------------------------------- layers


class Called(nn.Module):
    """A called layer behind what stands before it."""

    def __init__(self, layer: nn.Module, before: TensorParallelGroup | None = None) -> None:
        super().__init__()
        self.layer, self.before = layer, before

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.before is None else copy_to_group(x, self.before))


class Plain(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@dataclass
class Case:
    plain: Callable[[], nn.Module]
    called: Callable[[TensorParallelGroup], nn.Module]
    parameters: list[Parameter]
    bound: float  # the largest difference, relative to the largest value


def linear(cut: int, bias: bool) -> Case:
    parameters = [Parameter("layer.weight", (OUTPUTS, INPUTS), cut)]
    if bias:
        parameters.append(Parameter("layer.bias", (OUTPUTS,), 0 if cut == 0 else None))

    def called(group: TensorParallelGroup) -> nn.Module:
        if cut == 0:
            return Called(ColumnParallelLinear(INPUTS, OUTPUTS, group, bias=bias, **KIND), group)
        return Called(RowParallelLinear(INPUTS, OUTPUTS, group, bias=bias, **KIND))

    return Case(lambda: Plain(nn.Linear(INPUTS, OUTPUTS, bias=bias)), called, parameters, ROUNDING)


CASES = {
    "column": linear(0, bias=False),
    "column with bias": linear(0, bias=True),
    "row": linear(1, bias=False),
    "row with bias": linear(1, bias=True),
    "vocabulary": Case(
        lambda: Plain(nn.Embedding(VOCAB, OUTPUTS)),
        lambda group: Called(VocabularyParallelEmbedding(VOCAB, OUTPUTS, group, **KIND)),
        [Parameter("layer.weight", (VOCAB, OUTPUTS), 0)],
        0.0,
    ),
}


def run_layer(rank: int, case: str, layout_name: str) -> dict[str, float]:
    """How far results and gradients of the declared layer are from the called one's."""
    layout, kind = Layout(rank, layout_name), CASES[case]
    torch.manual_seed(2)
    is_embedding, is_row = case == "vocabulary", case.startswith("row")
    whole = torch.randint(VOCAB, (ROWS,)) if is_embedding else torch.randn(ROWS, INPUTS, **KIND)
    module = plain(kind.plain(), kind.parameters)
    annotate(module, **layout.declare(module, kind.parameters))
    x = annotated(whole, layout.columns() if is_row else layout.rows())
    if not is_embedding:
        x.requires_grad_()
    y = module(x)
    toward = annotated(torch.randn(ROWS, OUTPUTS, **KIND), y.annotation)
    (y * toward).sum().backward()
    found: dict[str, float] = {}
    called = None
    if layout.own:
        called = layout.filled(kind.called(layout.group), kind.parameters, values(kind.parameters))
        local = x.local.detach().clone().requires_grad_(not is_embedding)
        result = called(local)
        (result * toward.local).sum().backward()
        found["result"] = difference(y.local, result)
        if not is_embedding:
            found["input"] = difference(x.grad.local, local.grad)
    for name, gradient in layout.gradients(called, kind.parameters).items():
        parameter = module.get_parameter(name)
        part = annotated(gradient, parameter.annotation).local
        found[name] = difference(parameter.grad.local, part)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_declared_layer_does_what_the_called_one_does(
    ranks: Ranks, case: str, layout: str
) -> None:
    for found in ranks.run(run_layer, case, layout):
        for name, worst in found.items():
            assert worst <= CASES[case].bound, name


# ---------------------------------------------------------------- blocks


class PlainMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.gate = nn.Linear(16, 32, bias=False)
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class CalledMLP(MLP):
    """Llama's MLP behind a norm."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__(tiny_model(), group, **KIND)
        self.norm, self.group = nn.LayerNorm(16, **KIND), group

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to_group(self.norm(x), self.group))


MLP_PARAMETERS = [
    Parameter("norm.weight", (16,), None),
    Parameter("norm.bias", (16,), None),
    Parameter("gate.weight", (32, 16), 0),
    Parameter("up.weight", (32, 16), 0),
    Parameter("down.weight", (16, 32), 1),
]


def run_mlp(rank: int, layout_name: str, sequence_parallel: bool) -> tuple[float, list[str]]:
    """How far Llama's MLP, declared, is from the called one, and whose gradient lies, before it
    is summed, in another way than the parameter says.
    """
    layout = Layout(rank, layout_name, sequence_parallel)
    torch.manual_seed(2)
    start, toward = (torch.randn(ROWS, 16, **KIND) for _ in range(2))
    module = plain(PlainMLP(), MLP_PARAMETERS)
    annotate(module, **layout.declare(module, MLP_PARAMETERS))
    between = layout.rows(sequence_parallel)
    x, target = annotated(start, between).requires_grad_(), annotated(toward, between)
    y = module(x)
    (y * target).sum().backward()
    worst, called = 0.0, None
    if layout.own:
        called = layout.filled(CalledMLP(layout.group), MLP_PARAMETERS, values(MLP_PARAMETERS))
        local = x.local.detach().clone().requires_grad_()
        result = called(local)
        (result * target.local).sum().backward()
        worst = max(difference(y.local, result), difference(x.grad.local, local.grad))
    for name, gradient in layout.gradients(called, MLP_PARAMETERS).items():
        parameter = module.get_parameter(name)
        part = annotated(gradient, parameter.annotation).local
        worst = max(worst, difference(parameter.grad.local, part))
    # without the hooks that sum gradients
    leaves = {
        p.name: annotated(values([p])[p.name], p.annotation(layout.groups)).requires_grad_()
        for p in MLP_PARAMETERS
    }
    (
        torch.func.functional_call(module, leaves, annotated(start, between)) * target
    ).sum().backward()
    unlike = [
        f"{p.name}: {leaves[p.name].grad.annotation}"
        for p in MLP_PARAMETERS
        if leaves[p.name].grad.annotation != p.gradient_annotation(layout.groups, sequence_parallel)
    ]
    return worst, unlike


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_declared_mlp_and_its_unsummed_gradients(
    ranks: Ranks, layout: str, sequence_parallel: bool
) -> None:
    for worst, unlike in ranks.run(run_mlp, layout, sequence_parallel):
        assert worst < 1e-12
        assert unlike == []


GPT2 = GPT2Model(
    name="tiny",
    **{"layers": 2, "hidden": 16, "heads": 4, "intermediate": 32, "vocab": 32},
    **{"sequence_length": 8, "positions": 8, "dtype": "float64", "tied_embeddings": False},
)


class PlainGPT2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, inner = GPT2.hidden, GPT2.intermediate
        self.attention_norm = nn.LayerNorm(hidden, GPT2.norm_eps)
        names = ("query", "key", "value", "output")
        self.attention = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in names})
        self.mlp_norm = nn.LayerNorm(hidden, GPT2.norm_eps)
        self.mlp = nn.ModuleDict({"up": nn.Linear(hidden, inner), "down": nn.Linear(inner, hidden)})

    def forward(self, x: Tensor) -> Tensor:
        heads, normal = (*x.shape[:2], GPT2.heads, -1), self.attention_norm(x)
        query, key, value = (
            self.attention[name](normal).view(heads).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention["output"](mixed.transpose(1, 2).reshape(x.shape))
        up = self.mlp["up"](self.mlp_norm(x))
        return x + self.mlp["down"](F.gelu(up, approximate="tanh"))


class PlainGPT2(nn.Module):
    """GPT-2 as one would write it for one device, under the names of our stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(GPT2.vocab, GPT2.hidden)
        self.positions = nn.Embedding(GPT2.positions, GPT2.hidden)
        self.layers = nn.Sequential(*(PlainGPT2Block() for _ in range(GPT2.layers)))
        self.norm = nn.LayerNorm(GPT2.hidden, GPT2.norm_eps)
        self.head = nn.Linear(GPT2.hidden, GPT2.vocab, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        x = self.layers(self.embedding(tokens) + self.positions(positions))
        logits = self.head(self.norm(x)).view(-1, GPT2.vocab)
        return F.cross_entropy(logits, targets.view(-1), reduction="sum")


def run_gpt2(rank: int, layout_name: str) -> tuple[float, dict[str, float]]:
    """The loss of a declared GPT-2, and how far it and its gradients are from our stage's."""
    layout, parameters = Layout(rank, layout_name), GPT2.parameters()
    torch.manual_seed(2)
    text = torch.randint(GPT2.vocab, (3 * sum(layout.shares), GPT2.sequence_length + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(GPT2.sequence_length).expand_as(tokens)
    module = plain(PlainGPT2(), parameters)
    arguments = layout.declare(module, parameters)
    arguments["outputs"]["head"] = layout.rows()  # the loss sees all classes
    annotate(module, **arguments)
    inputs = [annotated(each, layout.rows()) for each in (tokens, positions, targets)]
    loss = module(*inputs)
    loss.backward()
    copies = Annotation.of([(ranks, {DUPLICATE: len(ranks)}) for ranks in layout.groups])
    ours = moved(loss.detach(), copies).local
    called, theirs = None, torch.zeros((), **KIND)
    if layout.own:
        called = GPT2.build((0, GPT2.layers), layout.group, "cpu", torch.float64)
        layout.filled(called, parameters, values(parameters))
        result = called(inputs[0].local.view(-1), inputs[2].local.view(-1))
        result.backward()
        theirs = result.detach() * (layout.group.index == 0)
    dist.all_reduce(theirs)
    found = {"loss": difference(ours, theirs) if layout.own else 0.0}
    gradients = layout.gradients(called, parameters)
    for name, gradient in gradients.items():
        parameter = module.get_parameter(name)
        part = annotated(gradient, parameter.annotation).local
        if not name.endswith("key.bias"):  # which changes no score
            found[name] = difference(parameter.grad.local, part)
    return theirs.item(), found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_declared_gpt2_does_what_our_stage_does(ranks: Ranks, layout: str) -> None:
    for loss, found in ranks.run(run_gpt2, layout):
        assert loss > 0
        assert {name: worst for name, worst in found.items() if worst > 1e-12} == {}


# ---------------------------------------------------------------- parameters


def test_a_parameter_s_boxes_are_what_its_annotation_says() -> None:
    groups = ((4, 2), (0,), (1, 3, 5, 7))
    for parameter in GPT2.parameters():
        expected = {
            rank: parameter.boxes(len(ranks), i) for ranks in groups for i, rank in enumerate(ranks)
        }
        found = holdings(parameter.annotation(groups), parameter.shape)
        assert {h.rank: (h.box,) for h in found} == expected
        assert all(h.summand is None for h in found)
        unsummed = holdings(parameter.gradient_annotation(groups), parameter.shape)
        assert [(h.box, h.summand) for h in unsummed] == [(h.box, (h.subgroup, 0)) for h in found]


def test_pieces_of_a_packed_parameter_are_cut_each_by_itself() -> None:
    parameter = Parameter("qkv", (12, 5), 0, packed=(8, 2, 2))
    spans = [[box.ranges[0] for box in parameter.boxes(2, index)] for index in range(2)]
    assert spans == [[(0, 4), (8, 9), (10, 11)], [(4, 8), (9, 10), (11, 12)]]
    assert parameter.boxes(1, 0) == (Box.whole((12, 5)),)
    with pytest.raises(ValueError, match="parameter qkv: 4 parts do not divide dimension 0"):
        parameter.boxes(4, 0)


def test_a_partial_parameter_s_gradient_is_a_sum_over_the_group() -> None:
    parameter = Parameter("norm", (3,), None, partial=True)
    unsummed = holdings(parameter.gradient_annotation([[0, 1], [2]]), parameter.shape)
    assert [h.summand for h in unsummed] == [(0, 0), (0, 1), (1, 0)]
    assert {h.box for h in unsummed} == {Box.whole((3,))}


@pytest.mark.parametrize(
    ("layer", "parameter"),
    [
        (nn.LayerNorm(4), Parameter("0.weight", (4,), 0)),
        (nn.Embedding(4, 4), Parameter("0.weight", (4, 4), 1)),
        (nn.Linear(4, 4), Parameter("0.weight", (4, 4), 0, packed=(2, 2))),
    ],
)
def test_a_layer_that_cannot_be_declared_is_named(layer: nn.Module, parameter: Parameter) -> None:
    with pytest.raises(AnnotationError, match=rf"parameter 0.weight of a {type(layer).__name__} "):
        declared(nn.Sequential(layer), [parameter], [[0, 1]])
