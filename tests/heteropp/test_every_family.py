"""Every family of docs/models.md: it trains as transformers does, and keeps documents apart."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from layouts import plan_of
from parity import Ranks, Trained
from test_hugging_face_training import STEPS, three_vendors

from heteropp.models.documents import Documents
from heteropp.models.hugging_face.config import family_config
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.hugging_face.small import small_config
from heteropp.models.hugging_face.usual import usual_config
from heteropp.models.parallel.tensor_parallel import SoloGroup

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
FAMILIES = re.findall(r"^\| (\w+) \| \w+ \| \d", PAGE.read_text(), re.MULTILINE)
EVERYDAY = ("gemma3_text", "gpt_oss")
LENGTH = 32

assert len(FAMILIES) > 100


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(chips=three_vendors(tmp_path_factory.mktemp("chips")))
    yield found
    found.close()


def small(family: str, dtype: str) -> HuggingFaceModel:
    config = small_config(usual_config(family)[0]).values()
    return read(config, family, sequence_length=LENGTH, dtype=dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_on_three_unlike_stages(ranks: Ranks, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model = small(family, "float32")
    config = copy.deepcopy(family_config(model.config))
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in whole.state_dict().values():  # none of which is a plain 0 or 1
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator) * 0.05)
    whole.save_pretrained(tmp_path / "folder")
    saved = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert saved["model_type"].removesuffix("_text") == family.removesuffix("_text")
    tp = 2 if model.allows_tp(2) else 1
    layout = (1, model.layers - 2, 1), (1, 2, 1), (tp, 1, tp)
    plan = plan_of(model, *layout)
    plain = ranks.plainly(plan, STEPS, weights=tmp_path / "folder")
    check(ranks.train(plan, STEPS, weights=tmp_path / "folder"), plain)
    if tp > 1:  # also with halves of a sequence on a rank
        plan = plan_of(model, *layout, shares={0: (1,)}, sequence_parallel=True)
        check(ranks.train(plan, STEPS, weights=tmp_path / "folder"), plain)


def check(got: Trained, plain: Trained) -> None:
    assert got.losses == pytest.approx(plain.losses, rel=2e-6)
    for name, expected in plain.parameters.items():
        # by norms: AdamW makes a whole step of a gradient that is nothing but rounding
        error = (got.parameters[name] - expected).norm() / expected.norm()
        assert error <= 1e-5, f"{name}: {error:.3g}"


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=() if f in EVERYDAY else pytest.mark.exhaustive) for f in FAMILIES],
)
def test_documents_of_a_sequence_are_as_if_alone(family: str) -> None:
    model = small(family, "float64")
    if problem := model.documents_problem():
        assert "goes from one document to the next" in problem
        return
    stage = model.build((0, model.layers), SoloGroup(), "cpu", torch.float64)
    stage.initialise(0)
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(model.vocab, (2, LENGTH), generator=generator)
    numbers = torch.zeros(LENGTH, dtype=torch.int64)
    cut, none = 13, torch.full((LENGTH,), -100)
    one, other = slice(0, cut), slice(cut, LENGTH)

    def gradients(tokens: torch.Tensor, targets: torch.Tensor, numbers: torch.Tensor) -> list:
        stage.zero_grad(set_to_none=True)
        (documents,) = Documents.of_step(numbers.unsqueeze(0), LENGTH)
        stage(tokens, targets, 0, documents).backward()
        return [None if p.grad is None else p.grad.clone() for p in stage.parameters()]

    packed = gradients(tokens, targets, numbers.index_fill(0, torch.arange(cut, LENGTH), 1))
    first = gradients(tokens, torch.cat((targets[one], none[other])), numbers)
    moved = torch.cat((tokens[other], tokens[one])), torch.cat((targets[other], none[one]))
    second = gradients(*moved, numbers)
    for together, a, b in zip(packed, first, second, strict=True):
        if together is not None:
            assert (together - a - b).abs().max() <= 2e-5 * max(1.0, together.abs().max().item())
