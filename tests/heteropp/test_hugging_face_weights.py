"""Folders of any family that transformers knows: read into boxes, and written back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from safetensors.torch import load_file, save_file
from tiny_decoders import write_folder
from torch import Tensor
from training_run import Training, make_plan

from heteropp.cli.export import app
from heteropp.description.files import FileError
from heteropp.layout.boxes import Box
from heteropp.models.hugging_face.model import HuggingFaceModel
from heteropp.models.hugging_face.reading import read
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.models.spec import ModelError, Parameter
from heteropp.state.hugging_face.export import export
from heteropp.state.hugging_face.weights import Weights, check_from, load_weights

FAMILIES = ("qwen2", "gemma3_text", "phi3", "mixtral", "deepseek_v3", "gpt_oss")
ON_CI = ("llama", "gemma2", "glm4", "qwen3_moe")
MORE = (
    *("afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "cohere", "cohere2"),
    *("cohere2_moe", "cwm", "deepseek_v2", "deepseek_v32", "doge", "ernie4_5", "ernie4_5_moe"),
    *("exaone4", "exaone_moe", "flex_olmo", "gemma", "glm", "glm4_moe", "glm_moe_dsa", "granite"),
    *("helium", "hy_v3", "kimi_linear", "longcat_flash", "mimo_v2_flash", "minicpm3", "minimax"),
    *("minimax_m2", "ministral", "ministral3", "mistral", "olmo", "olmo2", "olmo3"),
    *("olmo_hybrid", "qwen2_moe", "qwen3", "qwen3_next", "qwen3_5_text", "seed_oss", "smollm3"),
    *("solar_open", "starcoder2", "youtu"),
)
MARKED = [
    *((family, pytest.mark.long) for family in ON_CI),
    *((family, pytest.mark.exhaustive) for family in MORE),
]
# with their experts one by one, and in bfloat16 with tables in float32
HALVES = ("mixtral", "deepseek_v3", "gemma3_text")


@dataclass
class Folder:
    path: Path
    theirs: Any  # transformers' model of it
    model: HuggingFaceModel

    @property
    def held(self) -> dict[str, Tensor]:
        """What from_pretrained holds, by our names."""
        prefix = f"{self.theirs.base_model_prefix}."
        return {key.removeprefix(prefix): v for key, v in self.theirs.state_dict().items()}


Folders = Callable[[str], Folder]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    @cache
    def made(family: str) -> Folder:
        path = tmp_path_factory.mktemp("folder") / family
        theirs = write_folder(path, family, torch.bfloat16 if family in HALVES else torch.float32)
        return Folder(path, theirs, read(json.loads((path / "config.json").read_text()), family))

    return made


def every(*families: str) -> Any:
    more = [pytest.param(each, marks=mark) for each, mark in MARKED]
    return pytest.mark.parametrize("family", [*families, *more])


class Rank(SoloGroup):
    """One of a tensor-parallel group that sends nothing."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.at = size, index

    @property
    def index(self) -> int:  # type: ignore[override]
        return self.at


def part(whole: Tensor, parameter: Parameter, tp: int, index: int) -> Tensor:
    """A rank's share of each piece of a parameter, one behind the other."""
    cut = parameter.split_dimension
    if cut is None:
        return whole
    pieces = whole.split(parameter.packed or whole.shape[cut], cut)
    return torch.cat([piece.chunk(tp, cut)[index] for piece in pieces], cut)


@every(*FAMILIES)
def test_ranks_hold_their_slices_of_what_transformers_loads(folders: Folders, family: str) -> None:
    folder = folders(family)
    model, held = folder.model, folder.held
    check_from(folder.path, model)
    parameters = {parameter.name: parameter for parameter in model.parameters()}
    filled = set()
    for tp in (tp for tp in (1, 2) if model.allows_tp(tp)):
        for rank in (Rank(tp, index) for index in range(tp)):
            for layers in ((0, 1), (1, model.layers)):
                module = model.build(layers, rank, "cpu", getattr(torch, model.dtype))
                load_weights(folder.path, module)
                for name, value in module.named_parameters():
                    name = model.global_name(name)
                    whole, parameter = held[name], parameters[name]
                    expected = part(whole, parameter, tp, rank.index)
                    assert torch.equal(value, expected.to(value.dtype)), (name, tp)
                    filled.add(name)
    stored = {key: tensor for key, tensor in held.items() if key not in model.tied}
    assert filled == set(stored) and set(parameters) == filled


@every(*FAMILIES)
def test_a_slice_is_in_the_dtype_of_the_folder(folders: Folders, family: str) -> None:
    folder = folders(family)
    weights, held = Weights(folder.path, folder.model), folder.held
    for parameter in folder.model.parameters():
        half = Box(tuple((size // 2, size) for size in parameter.shape))
        value, whole = weights.read(parameter, half), held[parameter.name]
        assert value.dtype == whole.dtype, parameter.name
        assert torch.equal(value, whole[half.within(Box.whole(whole.shape))]), parameter.name


@every(*FAMILIES)
def test_what_is_written_is_what_transformers_would_save(
    folders: Folders, tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForCausalLM

    folder, output = folders(family), tmp_path / "copy"
    held = folder.held
    export(folder.model, lambda p: held[p.name].float(), output, file_bytes=20_000)
    assert_same_tensors(output, folder.path)
    config = json.loads((output / "config.json").read_text())
    assert config["architectures"] == [type(folder.theirs).__name__]
    theirs = AutoModelForCausalLM.from_pretrained(output).eval()
    assert type(theirs) is type(folder.theirs) and theirs.dtype == folder.theirs.dtype
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = [each(tokens, use_cache=False).logits for each in (theirs, folder.theirs)]
    assert logits[0].isfinite().all() and torch.equal(*logits)
    files = list(output.glob("*.safetensors"))
    assert len(files) > 1 and max(map(tensor_bytes, files)) <= 20_000
    check_from(output, folder.model)


def assert_same_tensors(folder: Path, of: Path) -> None:
    """Whichever files they are in."""
    expected, found = stored(of), stored(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def stored(folder: Path) -> dict[str, Tensor]:
    files = folder.glob("*.safetensors")
    return {name: value for path in files for name, value in load_file(path).items()}


def tensor_bytes(path: Path) -> int:
    """The size is of a file with more than one tensor; a tensor alone may be larger."""
    tensors = load_file(path)
    return sum(value.nbytes for value in tensors.values()) if len(tensors) > 1 else 0


# ---------------------------------------------------------------- folders of other forms


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replaces, adds or takes away tensors of a folder of one file."""
    path = folder / "model.safetensors"
    changed = {**load_file(path), **tensors}
    save_file({name: value for name, value in changed.items() if value is not None}, path)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def same(folder: Path, of: Folder) -> None:
    check_from(folder, of.model)
    weights = Weights(folder, of.model)
    for parameter in of.model.parameters():
        value = weights.read(parameter, Box.whole(parameter.shape))
        assert torch.equal(value, of.held[parameter.name]), parameter.name


def test_what_a_family_leaves_aside_is_left_aside(folders: Folders, tmp_path: Path) -> None:
    """An earlier release's tables, a tied head's copy, and layers that predict further tokens."""
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    head = {"lm_head.weight": folders("gemma3_text").held["embed_tokens.weight"]}
    further = {"model.layers.61.enorm.weight": torch.ones(32)}
    for family, extra in (("qwen3", table), ("gemma3_text", head), ("deepseek_v3", further)):
        copy = tmp_path / family
        shutil.copytree(folders(family).path, copy)
        change(copy, **extra)
        same(copy, folders(family))


def test_folders_without_the_head_or_converted_already(folders: Folders, tmp_path: Path) -> None:
    tied, experts = folders("gemma3_text"), folders("qwen3_moe")
    tied.theirs.model.save_pretrained(tmp_path / "base")
    assert "norm.weight" in stored(tmp_path / "base")
    same(tmp_path / "base", tied)
    experts.theirs.save_pretrained(tmp_path / "converted", save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in stored(tmp_path / "converted")
    same(tmp_path / "converted", experts)
    shutil.copytree(tied.path, tmp_path / "head alone")
    change(
        tmp_path / "head alone",
        **{"model.embed_tokens.weight": None, "lm_head.weight": tied.held["embed_tokens.weight"]},
    )
    same(tmp_path / "head alone", tied)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.norm.weight"
BAD: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no config": ("qwen3", lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "an expert's tensor is missing": (
        "qwen3_moe",
        lambda f: change(f, **{EXPERT: None}),
        f"it holds no tensor {EXPERT}",
    ),
    "a tensor is missing": (
        "qwen3",
        lambda f: change(f, **{NORM: None}),
        f"it holds no tensor {NORM}",
    ),
    "one too many": (
        "qwen3",
        lambda f: change(f, **{"model.layers.3.mlp.up_proj.weight": torch.ones(48, 32)}),
        "tensor model.layers.3.mlp.up_proj.weight: nothing of the model's",
    ),
    "an expert too many": (
        "qwen3_moe",
        lambda f: change(
            f,
            **{
                f"model.layers.1.mlp.experts.4.{name}_proj.weight": torch.ones(16, 32)
                for name in ("gate", "up")
            },
        ),
        "tensor model.layers.1.mlp.experts.4.gate_proj.weight: nothing of the model's",
    ),
    "an expert of another shape": (
        "qwen3_moe",
        lambda f: change(f, **{EXPERT: torch.ones(8, 32)}),
        f"{EXPERT} has shape (8, 32); expected (16, 32)",
    ),
    "another shape": (
        "qwen3",
        lambda f: change(f, **{NORM: torch.ones(31)}),
        f"{NORM} has shape (31,); expected (32,)",
    ),
    "integers": (
        "qwen3_moe",
        lambda f: change(f, **{EXPERT: torch.ones(16, 32, dtype=torch.int8)}),
        f"{EXPERT} has dtype I8; expected one of F64, F32, F16, BF16",
    ),
    "another head than the tied one": (
        "gemma3_text",
        lambda f: change(f, **{"lm_head.weight": torch.ones(256, 32).bfloat16()}),
        "lm_head.weight is not the same as model.embed_tokens.weight, to which config.json ties it",
    ),
    "another model": (
        "qwen3",
        lambda f: change_config(f, intermediate_size=96),
        "config.json: intermediate_size is 96; the model has 48",
    ),
    "another family": (
        "qwen3",
        lambda f: change_config(f, model_type="qwen2"),
        "config.json: model_type is qwen2; the model has qwen3",
    ),
    "too short a context": (
        "qwen3",
        lambda f: change_config(f, max_position_embeddings=32),
        "max_position_embeddings is 32; the model has",
    ),
    "quantized": (
        "gpt_oss",
        lambda f: change_config(f, quantization_config={"quant_method": "mxfp4"}),
        "config.json: its weights are quantized (quantization_config); expected whole ones",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_one_sentence(folders: Folders, tmp_path: Path, kind: str) -> None:
    family, damage, expected = BAD[kind]
    folder = tmp_path / "folder"
    shutil.copytree(folders(family).path, folder)
    check_from(folder, folders(family).model)
    damage(folder)
    with pytest.raises(FileError) as error:
        check_from(folder, folders(family).model)
    assert expected in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_another_release_of_transformers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heteropp.models.hugging_face.config.RELEASE", "5.99")
    with pytest.raises(
        ModelError, match=r"needs transformers 5.99; 5.* is installed \(pip install"
    ):
        read({"model_type": "qwen3", "hidden_size": 48}, "model")


# ---------------------------------------------------------------- the commands


@pytest.mark.long
def test_a_run_keeps_what_it_does_not_change(folders: Folders, tmp_path: Path) -> None:
    """A folder becomes a folder, by way of ranks and a checkpoint, at a rate that moves nothing.

    The router's corrections are among it, which have no gradient.
    """
    folder, output = folders("deepseek_v3").path, tmp_path / "exported"
    (folder / "tokenizer.json").write_text("{}")
    model = replace(folders("deepseek_v3").model, sequence_length=16)
    plan = make_plan(model, (2, 1), (1, 1), (2, 1), [False, False])
    given = ("--from", str(folder), "--steps", "1", "--learning-rate", "1e-30")
    training = Training(tmp_path / "run", plan, *given, "--warmup-steps", "0", device="cpu")
    training.finish()
    arguments = [str(training.output), "--output", str(output), "--from", str(folder)]
    result = run_command(app, arguments)
    assert result.exit_code == 0, result.output
    assert_same_tensors(output, folder)
    configs = [json.loads((each / "config.json").read_text()) for each in (output, folder)]
    assert configs[0].pop("torch_dtype") == configs[1].pop("dtype") == "bfloat16"
    assert configs[0] == configs[1] and (output / "tokenizer.json").exists()
