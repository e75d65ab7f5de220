"""LoRA on any family trains over unlike stages as peft trains it, and is exported as peft's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from layouts import plan_of, scheduled
from parity import Ranks, Trained
from plain_llama import TransformersDecoder
from safetensors import safe_open
from sampled import sampled
from tiny_decoders import tiny_config, write_folder
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_run import Training, checkpoint_parameters, refusal, write_cluster

from heteropp.cli import export, search
from heteropp.cost.planned import rank_memory
from heteropp.description.files import FileError
from heteropp.description.model import read_model
from heteropp.description.plan import Plan, Schedule, read_plan
from heteropp.models.hugging_face.check import noisy_values, small_model, split, tokens_of
from heteropp.models.hugging_face.lora import is_added, with_lora
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.spec import ModelError

STEPS = 5
SETTINGS = "r=4,alpha=64"  # what it adds is not small beside what it is added to


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("decoder") / family
        write_folder(folder, family, noise=0.05, layers=4)
        return folder

    return make


def model_of(folder: Path, targets: str = "all-linear") -> HuggingFaceModel:
    model = read_model(folder, 32, f"{SETTINGS},targets={targets}")
    assert isinstance(model, HuggingFaceModel)
    return model


def error_of(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


# ---------------------------------------------------------------- one step


FAMILIES = ("llama", "phi3", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4", "gemma3_text")
EVERYDAY = ("phi3", "deepseek_v3")


@pytest.mark.parametrize(
    ("family", "tp", "rows_cut"),
    sampled(
        [
            *((family, 2, True) for family in EVERYDAY),
            *((family, 1, False) for family in FAMILIES),
            *((family, 2, False) for family in FAMILIES),
            *((family, 2, True) for family in FAMILIES if family not in EVERYDAY),
        ],
        4,
        everyday=len(EVERYDAY),
    ),
)
def test_gradients_of_any_family_are_those_of_peft(family: str, tp: int, rows_cut: bool) -> None:
    """Also of packed layers, of latent ones and of those that no rank has a part of."""
    values = tiny_config(family, layers=4).to_dict()
    model = with_lora(small_model(values), "r=4,alpha=8,targets=all-linear")
    initial = noisy_values(model)
    loss, gradients = split(model, initial, tp, rows_cut)
    theirs = TransformersDecoder(model, 0)
    theirs.fill(initial)
    tokens, targets = tokens_of(model)
    logits = theirs(tokens.view(-1, model.sequence_length))
    expected = cross_entropy(logits, targets, reduction="sum")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    trained = {p.name for p in model.parameters() if p.trains}
    assert trained and all(map(is_added, trained))
    for name, parameter in theirs.named_parameters():
        assert (parameter.grad is not None) == (name in trained)
        if parameter.grad is not None:
            assert error_of(gradients[name], parameter.grad) < 1e-5, name
        else:
            assert not gradients[name].any()


# ---------------------------------------------------------------- several


def unlike_stages(model: HuggingFaceModel, zero_stage: int = 1) -> Plan:
    return plan_of(model, (1, 2, 1), (1, 2, 1), (2, 1, 2), zero_stage=zero_stage)


def check(ranks: Ranks, plan: Plan, got: Trained, folder: Path, **plainly: Any) -> None:
    plain = ranks.plainly(plan, STEPS, weights=folder, **plainly)
    assert got.losses == pytest.approx(plain.losses, rel=2e-6)
    assert got.norms == pytest.approx(plain.norms, rel=2e-6)
    for parameter in plan.model.parameters():
        ours, expected = got.parameters[parameter.name], plain.parameters[parameter.name]
        if not parameter.trains:
            assert torch.equal(ours, expected), parameter.name
        elif parameter.name.endswith("lora_A.weight"):
            assert error_of(ours, expected) <= 1e-5, parameter.name
        else:  # it was zero: all of it is of these few steps
            assert error_of(ours, expected) <= 2e-4, parameter.name


@dataclass(frozen=True)
class Run:
    plan: Plan
    folder: Path  # of the weights that it began with
    checkpoints: Path
    resumed: Trained  # the last two steps


@pytest.fixture(scope="module")
def run(ranks: Ranks, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Interrupted after three steps."""
    folder, checkpoints = folders("qwen3"), tmp_path_factory.mktemp("run") / "checkpoints"
    plan = unlike_stages(model_of(folder))
    ranks.train(plan, 3, weights=folder, checkpoints=checkpoints)
    return Run(plan, folder, checkpoints, ranks.train(plan, STEPS, checkpoints=checkpoints))


def test_unlike_stages_train_what_peft_trains_and_go_on_from_a_checkpoint(
    ranks: Ranks, run: Run
) -> None:
    through = ranks.train(run.plan, STEPS, weights=run.folder)
    check(ranks, run.plan, through, run.folder)
    assert run.resumed.losses == through.losses[3:]
    for name, value in through.parameters.items():
        assert torch.equal(run.resumed.parameters[name], value), name


def test_a_checkpoint_has_the_value_alone_of_what_is_frozen(run: Run) -> None:
    averages, values = set(), set()
    for path in run.checkpoints.glob("step-000005/*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                quantity, name = key.partition("[")[0].split("/")
                (values if quantity == "value" else averages).add(name)
    names = {parameter.name for parameter in run.plan.model.parameters()}
    assert values == names
    assert averages == {name for name in names if is_added(name)}


def test_embeddings_that_are_tied_and_frozen(
    ranks: Ranks, folders: Folders, tmp_path: Path
) -> None:
    folder = folders("gemma3_text")
    plan = unlike_stages(model_of(folder, "q_proj"))
    assert plan.model.tied
    check(ranks, plan, ranks.train(plan, STEPS, weights=folder, checkpoints=tmp_path), folder)
    parameters = checkpoint_parameters(tmp_path / "step-000005")
    assert parameters.keys() == {parameter.name for parameter in plan.model.parameters()}


@pytest.mark.parametrize(
    ("family", "zero_stage"), sampled(product(["qwen2", "qwen3", "deepseek_v3"], [0, 1, 2]), 9)
)
def test_so_do_other_families(ranks: Ranks, folders: Folders, family: str, zero_stage: int) -> None:
    folder = folders(family)
    plan = unlike_stages(model_of(folder), zero_stage)
    check(ranks, plan, ranks.train(plan, STEPS, weights=folder), folder)


@pytest.mark.parametrize("zero_stage", sampled([2, 0], 2))
def test_a_model_of_16_bits_goes_on_to_the_bit(
    ranks: Ranks, tmp_path: Path, zero_stage: int
) -> None:
    folder, checkpoints = tmp_path / "decoder", tmp_path / "checkpoints"
    write_folder(folder, "qwen2", dtype=torch.bfloat16, noise=0.05, layers=4)
    plan = plan_of(model_of(folder), (1, 3), (2, 1), (1, 2), zero_stage=zero_stage)
    through = ranks.train(plan, STEPS, weights=folder)
    ranks.train(plan, 3, weights=folder, checkpoints=checkpoints)
    resumed = ranks.train(plan, STEPS, checkpoints=checkpoints)
    assert resumed.losses == through.losses[3:]
    for name, value in through.parameters.items():
        assert torch.equal(resumed.parameters[name], value), name


@pytest.mark.parametrize("family", sampled(["deepseek_v3", "qwen2"], 2))
def test_so_do_rows_that_are_cut(ranks: Ranks, folders: Folders, family: str) -> None:
    folder = folders(family)
    plan = plan_of(
        model_of(folder), (2, 2), (1, 2), (2, 2), shares={0: (1,)}, sequence_parallel=True
    )
    plan = scheduled(plan, "zb-v", 2)
    check(ranks, plan, ranks.train(plan, STEPS, weights=folder), folder)


@pytest.mark.parametrize(
    ("schedule", "offload"), sampled(product(["zb-v", "gpipe"], [False, True]), 4)
)
def test_so_do_other_schedules(
    ranks: Ranks, folders: Folders, schedule: Schedule, offload: bool
) -> None:
    folder = folders("qwen2")
    plan = plan_of(
        model_of(folder, "down_proj+q_proj"), (2, 2), (1, 2), (2, 1), zero_stage=2, offload=offload
    )
    plan = scheduled(plan, schedule, 2)
    check(ranks, plan, ranks.train(plan, STEPS, weights=folder), folder)


def test_a_first_stage_without_lora_runs_no_backward(ranks: Ranks, folders: Folders) -> None:
    """Such a stage is there where layers of another kind have all targets."""
    folder = folders("qwen3_moe")
    model = model_of(folder)
    bare = {part.name: part for part in model.base().parts}
    parts = tuple(bare[p.name] if p.name == model.order[0] else p for p in model.parts)
    model = replace(model, parts=parts)
    plan = plan_of(model, (1, 3), (2, 1), (1, 1), zero_stage=2)
    one = plan_of(model, (4,), (1,), (1,))
    got, expected = (ranks.train(each, STEPS, weights=folder) for each in (plan, one))
    assert got.losses == pytest.approx(expected.losses, rel=2e-6)
    assert got.norms == pytest.approx(expected.norms, rel=2e-6)
    first, _, last = rank_memory(plan)
    assert first.gradients + first.optimizer < 0.1 * (last.gradients + last.optimizer)


# ---------------------------------------------------------------- export


def exported(run: Run, output: Path, *arguments: str) -> Path:
    given = [str(run.checkpoints), "--output", str(output), "--from", str(run.folder), *arguments]
    result = run_command(export.app, given)
    assert result.exit_code == 0, result.output
    return output


def logits(model: Any) -> Tensor:
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=tokens, use_cache=False).logits
    return found


@pytest.fixture(scope="module")
def learnt(run: Run) -> Tensor:
    """The logits of what the last checkpoint has."""
    model = run.plan.model
    assert isinstance(model, HuggingFaceModel)
    trained = TransformersDecoder(model, 0)
    trained.fill(checkpoint_parameters(run.checkpoints / "step-000005"))
    return logits(trained.whole)


def test_peft_loads_the_adapter(run: Run, learnt: Tensor, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(run.folder)
    before = logits(base)
    adapted = PeftModel.from_pretrained(base, exported(run, tmp_path / "adapter"))
    torch.testing.assert_close(logits(adapted), learnt, rtol=1e-5, atol=1e-5)
    assert (before - learnt).abs().max() > 1e-3
    whole = AutoModelForCausalLM.from_pretrained(exported(run, tmp_path / "whole", "--merged"))
    torch.testing.assert_close(logits(whole), learnt, rtol=1e-5, atol=1e-5)
    merged = adapted.merge_and_unload().state_dict()
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-7)
    given = [str(run.checkpoints), "--output", str(tmp_path / "new"), "--from", str(tmp_path)]
    result = run_command(export.app, given)
    assert result.exit_code == 2 and "config.json cannot be read" in result.stderr
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- commands


@pytest.mark.exhaustive  # test_fine_tuning.py runs them in CI
def test_the_commands_search_train_and_export(tmp_path: Path) -> None:
    """A model of 16 bits, of a family that we have a form of our own of, and Muon."""
    folder = tmp_path / "small"
    write_folder(folder, "llama", dtype=torch.bfloat16, layers=2)
    write_cluster(tmp_path, 2)
    given = [
        *("--cluster", str(tmp_path / "cluster.toml"), "--model", str(folder), "--lora", "r=2"),
        *("--global-batch", "16", "--output", str(tmp_path / "plan.json"), "--optimizer", "muon"),
    ]
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    result = run_command(search.app, given)
    assert result.exit_code == 0, result.output
    plan = read_plan(tmp_path / "plan.json")
    arguments = ("--from", str(folder), "--device", "cpu", "--learning-rate", "0.01")
    training = Training(tmp_path, plan, *arguments, "--steps", "2").finish()
    given = ("--device", "cpu", "--output", str(tmp_path / "other"))
    assert "--from is missing" in refusal(tmp_path, *given)
    output = tmp_path / "adapter"
    result = run_command(export.app, [str(training.output), "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "LoRA of model small as of step 2" in result.output
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]  # peft's of a Llama
    with safe_open(output / "adapter_model.safetensors", "pt") as file:
        assert "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight" in file.keys()  # noqa: SIM118
        assert all(file.get_tensor(key).any() for key in file.keys())  # noqa: SIM118


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=0", "r is 0; expected a whole number"),
        ("alpha=3", "r is missing; expected a whole number"),
        ("r=4,alpha=x", "alpha is x; expected a whole number"),
        ("r=4,rank=3", "has setting 'rank=3'; expected r=RANK"),
        ("r=4,r=5", "has setting r twice"),
        ("r=4,targets=foo", "target 'foo' is no Linear layer of a block; expected all-linear, or"),
        ("r=4,targets=lm_head", "target 'lm_head' is no Linear layer of a block"),
    ],
)
def test_bad_settings_are_one_sentence(folders: Folders, text: str, expected: str) -> None:
    with pytest.raises(FileError, match=expected) as error:
        read_model(folders("qwen3"), 32, text)
    assert "config.json: LoRA" in str(error.value) and "\n" not in str(error.value)


def test_what_peft_takes_otherwise_is_refused() -> None:
    model = small_model(tiny_config("qwen3_moe", layers=4).to_dict())
    with pytest.raises(ModelError, match="peft takes LoRA targets gate_proj, up_proj of"):
        with_lora(model, "r=4,targets=gate_proj+up_proj")


def test_models_without_a_hugging_face_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is no Hugging Face folder, whose models alone"):
        read_model("quickstart", None, "r=4")


def test_without_peft_one_sentence_says_what_is_missing(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heteropp.models.hugging_face.lora.find_spec", lambda _: None)
    with pytest.raises(FileError, match=r"needs the peft library \(pip install"):
        read_model(folders("qwen3"), 32, "r=4")
