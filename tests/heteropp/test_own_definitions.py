"""What a model's own definition may say, and what contradicts itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import plan_of

import heteropp
from heteropp.description.plan import PlanError, validate
from heteropp.models.custom.model import CustomModel
from heteropp.models.hugging_face.check import noisy_values, split
from heteropp.models.hugging_face.small import LENGTH
from heteropp.models.parallel.tensor_parallel import SoloGroup

DEFINITION = """
import torch
from torch import nn
import heteropp

class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 8)
    def forward(self, tokens):
        return self.tokens(tokens)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.heads = 2
    def forward(self, x):
        return x + self.down(self.up(x))

class Counting(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return super().forward(x)

class Remembering(Block):
    def forward(self, x):
        self.last = x
        return super().forward(x)

class Dropping(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1)

class Widening(Block):
    def forward(self, x):
        return self.up(x)

class Shaped(Block):
    def forward(self, x):
        return x + self.down(self.up(x).view(*x.shape[:-1], 2, 8).flatten(-2))

class Sharing(Block):
    def __init__(self):
        super().__init__()
        self.again = nn.Linear(8, 16)
        self.again.weight = self.up.weight

class Scaling(nn.Module):
    def forward(self, x):
        return 2 * x

class Derived(Block):
    def __init__(self):
        super().__init__()
        self.twice = 2 * self.up.weight

class InPlace(Block):
    def forward(self, x):
        x += self.down(self.up(x))
        return x

class Placed(Block):
    def forward(self, x):
        return super().forward(x) + torch.ones(8)

class Heads(Block):
    def forward(self, x):
        return x + self.down(self.up(x).unflatten(-1, (-1, 8)).flatten(-2))

class OneWay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("one way")

class Stuck(Block):
    def forward(self, x):
        return OneWay.apply(super().forward(x))

class Padded(Embedding):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(32, 8, padding_idx=0)

class Wide(Embedding):
    def forward(self, tokens):
        return super().forward(tokens).double()

class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Linear(8, 32)
    def forward(self, x):
        return self.logits(x)

def mean_loss(logits, targets):
    return nn.functional.cross_entropy(logits, targets)

CUT = {"*.up": "column", "*.down": "row", "*": "replicated"}

def model():
    kwargs = dict(
        name="x", sequence_length=16, embedding=Embedding, blocks={"one": Block},
        order=["one"] * 4, head=Head, cut=CUT,
    )
    kwargs.update(CHANGES)
    return heteropp.ModelDefinition(**kwargs)
"""

CONTRADICTIONS = {
    'blocks={"one": Counting}': "block one changes seen in its forward",
    'blocks={"one": Remembering}': "block one changes last in its forward",
    'blocks={"one": Dropping}': "block one draws random numbers",
    'blocks={"one": Stuck}': "block one cannot compute its backward: ValueError: one way",
    'blocks={"one": Widening}': r"block one makes \[2, 16, 16\] .* of \[2, 16, 8\]",
    'blocks={"one": Shaped}': "with tensor-parallel degree 2, block one cannot compute",
    'cut={"*.up": "column"}': "no rule cuts embedding.tokens.weight",
    'cut={**CUT, "*.middle": "row"}': r"'\*.middle' fits the name of no layer",
    'cut={"*.tokens": "column", **CUT}': "rule column for tokens.weight, which is of a Embedding",
    'cut={"*.tokens.weight": "column", **CUT}': "rule column for tokens.weight, which is of",
    'cut={"*.logits.*": "vocabulary", **CUT}': "rule vocabulary for logits.weight, which",
    'cut={**CUT, "*.up": "sideways"}': "rule 'sideways' for up.weight: expected column, row",
    'cut={**CUT, "*.up": ("packed", 3)}': "one.up.weight has 16 rows, which pieces",
    'tied={"head.logits.weight": "embedding.words"}': "tied names 'embedding.words'",
    'tied={"head.bias": "embedding.tokens.weight"}': "tied names 'head.bias'",
    'order=["two"]': "order has 'two'; blocks are one",
    "order=[]": "order is empty",
    'no_weight_decay=["*.norm"]': r"'\*.norm' fits the name of no layer",
    'head=lambda: "head"': "makes a str; expected an nn.Module",
    "embedding=Head": "the embedding cannot compute",
    'blocks={"one": Sharing}, cut=None': "again.weight are one parameter",
    'blocks={"one": Scaling}': "one has no parameters",
    'blocks={"one": Derived}': "one cannot be copied: RuntimeError: Only Tensors created",
    'blocks={"one": InPlace}': "block one cannot compute",
    'blocks={"one": Placed}': "block one cannot compute",
    'blocks={"one": Heads}': "with tensor-parallel degree 4, block one .* tp_divides names",
    'embedding=Padded, cut={"*.tokens": "vocabulary", **CUT}': "its layer has padding_idx 0",
    "embedding=Wide": "the embedding makes .* torch.float64 of .*; expected",
    "loss=mean_loss": "the loss is no sum over the rows",
    "loss=lambda logits: logits": "the loss fails: TypeError",
    'blocks={"one": Block()}': "one is a Block; expected what makes a module",
    'blocks={"one": int}': "makes a int; expected an nn.Module",
    "dtype='half'": "dtype is 'half'; expected one of",
    "order=6": "order is 6; expected a list",
    "cut=['*.up']": r"cut is \['\*.up'\]; expected a dictionary by name",
    'cut={**CUT, 3: "row"}': "cut is .*; expected a dictionary by name",
    'cut={**CUT, "*.up": ("packed",)}': r"rule \('packed',\) for one.up.weight: expected",
    'cut={**CUT, "*.up": ("packed", "2")}': "for one.up.weight: expected the number of pieces",
    'cut={**CUT, "*.up": ("packed", (8.0, 8.0))}': "for one.up.weight: expected the number",
    "no_weight_decay='*.bias'": r"no_weight_decay is '\*.bias'; expected a list of names",
    "no_weight_decay=3": "no_weight_decay is 3; expected a list of names",
    'tied={"head.logits.weight": ["embedding.tokens.weight"]}': (
        "tied is .*; expected names of parameters by name"
    ),
    "tp_divides={2: 2}": "tp_divides is {2: 2}; expected a dictionary by name",
    "tp_divides={'heads': 0}": "tp_divides has heads 0; expected a positive number",
    "sequence_length=-4": "sequence_length is -4; expected 1 to",
    'tied={"head.logits.weight": "embedding.tokens.weight"}, no_weight_decay=["head.*"]': (
        "is tied to embedding.tokens.weight, which is of another shape, cut or weight decay"
    ),
}


@pytest.mark.parametrize("changes", CONTRADICTIONS)
def test_a_definition_that_contradicts_itself_is_refused(tmp_path: Path, changes: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{DEFINITION}\nCHANGES = dict({changes})\n")
    with pytest.raises(heteropp.FileError, match=CONTRADICTIONS[changes]):
        heteropp.read_model(f"{file}:model")


def test_a_file_that_defines_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(heteropp.FileError, match=r"nowhere.py is no Python file"):
        heteropp.read_model(f"{tmp_path / 'nowhere.py'}:model")
    file = tmp_path / "own.py"
    file.write_text("def model():\n    return 3\n")
    with pytest.raises(heteropp.FileError, match=r"gives a int; expected a heteropp\.ModelDef"):
        heteropp.read_model(f"{file}:model")
    with pytest.raises(heteropp.FileError, match="has no function other"):
        heteropp.read_model(f"{file}:other")
    file = tmp_path / "leaving.py"
    file.write_text("def model():\n    raise SystemExit(3)\n")
    with pytest.raises(heteropp.FileError, match="model fails: SystemExit: 3"):
        heteropp.read_model(f"{file}:model")


def test_a_model_that_says_not_how_it_is_cut_has_tp_1(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{DEFINITION}\nCHANGES = dict(cut=None, order=6 * ['one'])\n")
    model: Any = heteropp.read_model(f"{file}:model")
    assert model.tp_degrees(16) == [1]
    with pytest.raises(PlanError, match="tensor-parallel degree 2 needs a definition that says"):
        validate(plan_of(model, (6,), (1,), (2,)))
    plan = heteropp.plan(model, "quickstart", global_batch=8, planner="exact")
    assert {stage.tp for stage in plan.pipelines[0].stages} == {1}


@pytest.mark.parametrize("others", ["", ', "*": "replicated"'])
def test_a_part_that_is_one_layer_is_cut_as_its_parameters_are(tmp_path: Path, others: str) -> None:
    """Loss and gradients of two tensor-parallel ranks are those of one."""
    file = tmp_path / "own.py"
    cut = '"embedding.weight": "vocabulary", "one.up": "column", "one.down": "row"'
    cut += ', "head.weight": "column", "head.bias": "column"'
    layers = "embedding=lambda: nn.Embedding(32, 8), head=lambda: nn.Linear(8, 32)"
    changes = f"dict(sequence_length={LENGTH}, dtype='float64', {layers}, cut={{{cut}{others}}})"
    file.write_text(f"{DEFINITION}\nCHANGES = {changes}\n")
    model: Any = heteropp.read_model(f"{file}:model")
    initial = noisy_values(model)
    (one, of_one), (two, of_two) = (split(model, initial, tp) for tp in (1, 2))
    torch.testing.assert_close(two, one)
    torch.testing.assert_close(of_two, of_one)


def test_a_file_that_plans_while_it_is_imported_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{DEFINITION}\nCHANGES = {{}}\nheteropp.plan(model, 'x', global_batch=8)\n")
    with pytest.raises(heteropp.FileError, match="put what it runs under if __name__"):
        heteropp.read_model(f"{file}:model")


def test_models_that_differ_in_code_alone_are_traced_apart(tmp_path: Path) -> None:
    """Their names, shapes and cuts are the same."""
    steps_s = []
    for times in (1, 8):
        file = tmp_path / f"own_{times}.py"
        again = (
            f"class Again(Block):\n    def forward(self, x):\n        for _ in range({times}):\n"
        )
        again += "            x = super().forward(x)\n        return x\n"
        changes = 'CHANGES = dict(blocks={"one": Again}, order=6 * ["one"])'
        file.write_text(f"{DEFINITION}\n{again}\n{changes}\n")
        plan = heteropp.plan(f"{file}:model", "quickstart", global_batch=8, planner="exact")
        steps_s.append(heteropp.simulate(plan, "quickstart").step_s)
    assert steps_s[1] > 2 * steps_s[0]


def test_a_complex_buffer_stays_complex(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    turning = (
        "class Turning(Block):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('turns', torch.full((8,), 1j))\n"
        "    def forward(self, x):\n        return super().forward((x * self.turns).imag)\n"
    )
    file.write_text(f'{DEFINITION}\n{turning}\nCHANGES = dict(blocks={{"one": Turning}})\n')
    model = heteropp.read_model(f"{file}:model")
    stage = model.build((0, 4), SoloGroup(), "cpu", torch.float64)
    assert dict(stage.named_buffers())["layers.0.turns"].dtype.is_complex


def test_a_plan_of_another_definition_is_not_trained(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{DEFINITION}\nCHANGES = dict()\n")
    model = heteropp.read_model(f"{file}:model")
    assert isinstance(model, CustomModel) and model.training_problem() is None
    assert "another order" in str(replace(model, order=("one",) * 3, layers=3).training_problem())


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a cut beyond the shape": (
        lambda model: model["parts"][1]["parameters"][0].update(split_dimension=2),
        "part one: parameter up.weight has split_dimension 2; expected one of the 2 of its shape",
    ),
    "a cut before the shape": (
        lambda model: model["parts"][1]["parameters"][0].update(split_dimension=-1),
        "has split_dimension -1",
    ),
    "a negative size": (
        lambda model: model["parts"][1]["parameters"][0].update(shape=[-16, 8]),
        "has shape [-16, 8]; expected no negative sizes",
    ),
    "pieces of another size": (
        lambda model: model["parts"][1]["parameters"][0].update(packed=[4, 4]),
        "has packed [4, 4]; expected sizes that make up what is cut, 16",
    ),
    "a tied name of nothing": (
        lambda model: model.update(tied_names=[["head.logits.weight", "embedding.words"]]),
        "tied_names has embedding.words; expected parameters of the embedding and the head",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_plan_whose_parts_cannot_be_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"{DEFINITION}\nCHANGES = {{}}\n")
    plan_file = tmp_path / "plan.json"
    heteropp.write_plan(plan_of(heteropp.read_model(f"{file}:model"), (4,), (1,), (2,)), plan_file)
    content = json.loads(plan_file.read_text())
    damage, expected = DAMAGE[kind]
    damage(content["model"])
    plan_file.write_text(json.dumps(content))
    with pytest.raises(heteropp.FileError, match=re.escape(expected)):
        heteropp.read_plan(plan_file)
