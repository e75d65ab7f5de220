"""Folders of weights that transformers wrote: read into any layout, trained, and written back."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import training_run
from commands import run_command
from sampled import sampled
from torch import Tensor
from training_run import Training, make_plan

from heteropp.cli.export import app
from heteropp.data.sequences import Sequences
from heteropp.data.source import open_tokens
from heteropp.description.files import FileError
from heteropp.description.model import read_model
from heteropp.layout.boxes import Box
from heteropp.models.llama.model import LlamaModel
from heteropp.models.parallel.tensor_parallel import SoloGroup
from heteropp.state.checkpoint.manifest import find
from heteropp.state.checkpoint.reader import Reader
from heteropp.state.hugging_face.export import export
from heteropp.state.hugging_face.weights import (
    Weights,
    check_from,
    load_weights,
)

LENGTH = 48
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # so that all three kinds of wavelength occur
}
KINDS: dict[str, dict] = {
    "grouped, in several files": {"num_key_value_heads": 2},
    "scaled and tied": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "halves": {"num_key_value_heads": 2, "dtype": torch.bfloat16, "rms_norm_eps": 1e-5},
}
# of each stage, (layers, tensor-parallel degree)
LAYOUTS = {
    "tp 2": ((4, 2),),
    "pp 3": ((1, 1), (2, 1), (1, 1)),
    "uneven": ((3, 1), (1, 2)),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Makes a folder with a model of each kind."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = {}
    for kind, changes in KINDS.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=64,
            initializer_range=0.05,
            **changes,
        )
        made[kind] = tmp_path_factory.mktemp("folder") / kind
        model = LlamaForCausalLM(config).to(changes.get("dtype"))
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)  # else they cannot be told apart
        size = "100KB" if "several" in kind else "1GB"
        model.save_pretrained(made[kind], max_shard_size=size)
        (made[kind] / "tokenizer.json").write_text('{"kind": "' + kind + '"}')
    assert len(list(made["grouped, in several files"].glob("*.safetensors"))) > 2
    return made


def theirs(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def model_of(folder: Path) -> LlamaModel:
    """Reads the model as a plan would have it: float32, and shorter sequences."""
    return replace(read_model(folder), dtype="float32", sequence_length=LENGTH)


class Threads(SoloGroup):
    """One thread a rank of a tensor-parallel group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()
        self.barrier = threading.Barrier(size, timeout=60)
        self.given: list[Tensor] = [torch.empty(0)] * size

    @property
    def index(self) -> int:  # type: ignore[override]
        return self.here.index

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None:
        self.given[self.index] = tensor.clone()
        self.barrier.wait()
        given = torch.stack(self.given)
        tensor.copy_(given.amax(0) if maximum else given.sum(0))
        self.barrier.wait()

    def run(self, rank) -> list[Tensor]:
        """What rank() gives in each thread."""
        results: list[Tensor] = [torch.empty(0)] * self.size

        def enter(index: int) -> None:
            self.here.index = index
            with torch.no_grad():
                results[index] = rank()

        threads = [threading.Thread(target=enter, args=(i,)) for i in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results


def our_logits(folder: Path, tokens: Tensor, layout: str) -> Tensor:
    """[rows, vocabulary], from stage to stage."""
    model, first, x = model_of(folder), 0, tokens.flatten()
    for layers, tp in LAYOUTS[layout]:
        group = Threads(tp) if tp > 1 else SoloGroup()
        span, received = (first, first + layers), x

        def rank(group=group, span=span, received=received) -> Tensor:
            module = model.build(span, group, "cpu", torch.float32)
            load_weights(folder, module)
            if not module.is_last:
                return module(received)
            seen: list[Tensor] = []
            module.head.register_forward_hook(lambda *call: seen.append(call[2].clone()))
            module(received, torch.zeros_like(tokens.flatten()))
            return seen[0]

        if isinstance(group, Threads):
            pieces = group.run(rank)
            last = span[1] == model.layers
            x = torch.cat(pieces, 1) if last else pieces[0]
        else:
            with torch.no_grad():
                x = rank()
        first += layers
    return x


@pytest.mark.parametrize(
    ("kind", "layout"),
    sampled(
        [
            pair
            for turn in range(3)
            for pair in zip(KINDS, [*LAYOUTS, *LAYOUTS][turn : turn + 3], strict=True)
        ],
        3,
        everyday=3,
    ),
)
def test_logits_are_those_of_transformers(folders: dict[str, Path], kind: str, layout: str) -> None:
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(folders[kind])(tokens).logits.flatten(0, 1)
    ours = our_logits(folders[kind], tokens, layout)
    assert expected.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_written_back_is_the_same_model(
    folders: dict[str, Path], tmp_path: Path, kind: str, source: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder, output = folders[kind], tmp_path / "new" / "copy"
    model = read_model(folder)
    weights = Weights(folders[kind], model)
    export(
        model,
        lambda parameter: weights.read(parameter, Box.whole(parameter.shape)),
        output,
        folder if source else None,
        file_bytes=70_000,
    )
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (folder, output))
    assert after.dtype == before.dtype
    assert after.config.rope_parameters == before.config.rope_parameters
    expected = before.state_dict()
    assert after.state_dict().keys() == expected.keys()
    for name, value in after.state_dict().items():
        assert torch.equal(value, expected[name]), name
    files = {path.name: path.stat().st_size for path in output.iterdir()}
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {name for name in files if "-of-" in name}
    assert all(size < 80_000 for name, size in files.items() if "-of-" in name)
    assert ("tokenizer.json" in files) == source
    assert replace(read_model(output), name=kind) == model
    assert [path.name for path in output.parent.iterdir()] == ["copy"]


def test_an_export_that_cannot_be_written_leaves_nothing(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders["halves"]
    model = read_model(folder)
    weights = Weights(folder, model)

    def read(parameter) -> Tensor:
        if parameter.name.startswith("layers.3"):
            raise OSError(28, "No space left on device")
        return weights.read(parameter, Box.whole(parameter.shape))

    with pytest.raises(FileError, match=r"copy cannot be written: .*No space left on device"):
        export(model, read, tmp_path / "copy", file_bytes=10_000)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileError, match="is there already; expected the name of a new folder"):
        export(model, read, tmp_path)


def change_index(folder: Path, tensor: str, file: str | None) -> None:
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"].pop(tensor)
    if file is not None:
        content["weight_map"][tensor] = file
    path.write_text(json.dumps(content))


def change_tensor(folder: Path, name: str, change) -> None:
    from safetensors.torch import load_file, save_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    path = folder / index["weight_map"][name]
    tensors = load_file(path)
    changed = {key: change(value) if key == name else value for key, value in tensors.items()}
    save_file({key: value for key, value in changed.items() if value is not None}, path)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def second(folder: Path) -> Path:
    """Returns the second of the folder's weight files."""
    return next(folder.glob("model-00002-of-*"))


NAME = "model.layers.2.mlp.up_proj.weight"
BAD = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json cannot be read: No such"),
    "another model": (
        lambda f: change_config(f, intermediate_size=128),
        "config.json: intermediate is 128; the model has 96",
    ),
    "other angles": (
        lambda f: change_config(f, rope_parameters=LLAMA3),
        "config.json: rope_theta is 500000.0; the model has 10000.0",
    ),
    "too short a context": (
        lambda f: change_config(f, max_position_embeddings=32),
        "max_position_embeddings is 32; the model has sequences of 48 tokens",
    ),
    "no weights": (
        lambda f: [path.unlink() for path in f.glob("*.safetensors*")],
        "holds neither model.safetensors nor model.safetensors.index.json",
    ),
    "an index that is none": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "index.json: weight_map: missing",
    ),
    "a missing file": (
        lambda f: second(f).unlink(),
        "cannot be read: No such file",
    ),
    "a truncated file": (lambda f: truncate(second(f)), "is not a whole safetensors file"),
    "a missing tensor": (lambda f: change_index(f, NAME, None), f"holds no tensor {NAME}"),
    "a tensor in no file": (
        lambda f: change_tensor(f, NAME, lambda t: None),
        f"holds no tensor {NAME}, which model.safetensors.index.json says it does",
    ),
    "another shape": (
        lambda f: change_tensor(f, NAME, lambda t: t.t().contiguous()),
        f"{NAME} has shape (64, 96); expected (96, 64)",
    ),
    "integers": (
        lambda f: change_tensor(f, NAME, lambda t: t.to(torch.int8)),
        f"{NAME} has dtype I8; expected one of F64, F32, F16, BF16",
    ),
    "a path out of the folder": (
        lambda f: change_index(f, NAME, "../../model.safetensors"),
        "'../../model.safetensors' is not the name of a safetensors file",
    ),
    "the folder above": (
        lambda f: change_index(f, NAME, ".."),
        "'..' is not the name of a safetensors file",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_folder_is_one_sentence(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(folders["grouped, in several files"], folder)
    model = model_of(folder)
    check_from(folder, model)
    damage, expected = BAD[kind]
    damage(folder)
    with pytest.raises(FileError) as error:
        check_from(folder, model)
    assert expected in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value)


# of each kind, the layout that trains it: (layers, dp, tp) by stage
TRAINED = {
    "grouped, in several files": ((4,), (1,), (2,)),
    "scaled and tied": ((1, 2, 1), (1, 1, 1), (1, 1, 1)),
    "halves": ((3, 1), (2, 1), (1, 2)),
}
RATE, CLIP = 2e-5, 0.3  # see test_parity for the rate


@pytest.fixture(scope="module")
def runs(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Training, Path]]:
    """A step of heteropp-train from each folder, and what heteropp-export makes of it."""
    settings = ("--learning-rate", str(RATE), "--warmup-steps", "0", "--gradient-clip", str(CLIP))
    started = {}
    for kind, (layers, dp, tp) in TRAINED.items():
        plan = make_plan(model_of(folders[kind]), layers, dp, tp, [False] * len(layers))
        home = tmp_path_factory.mktemp("run")
        given = ("--from", str(folders[kind]), "--steps", "1", *settings)
        started[kind] = Training(home, plan, *given, device="cpu")
    for kind, training in started.items():
        training.finish()
        arguments = [str(training.output), "--output", str(training.output / "exported")]
        result = run_command(app, [*arguments, "--from", str(folders[kind])])
        assert result.exit_code == 0, result.output
    return {kind: (run, run.output / "exported") for kind, run in started.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_transformers(
    folders: dict[str, Path], runs: dict[str, tuple[Training, Path]], kind: str
) -> None:
    training, exported = runs[kind]
    module, home = theirs(folders[kind]), training.output.parent
    tokens = open_tokens(home / "text", home / "cache" / "hyperhetero")
    batch = Sequences(tokens, model_of(folders[kind]), seed=0).read(range(16))
    inputs, targets = map(torch.from_numpy, batch)
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    loss = F.cross_entropy(module(inputs).logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
    optimizer.step()
    assert training.losses == pytest.approx([loss.item()], rel=2e-6)
    assert training.metrics[0]["gradient_norm"] == pytest.approx(norm.item(), rel=2e-6)
    ours = theirs(exported).state_dict()
    assert ours.keys() == module.state_dict().keys()
    for name, expected in module.state_dict().items():
        assert relative(ours[name], expected) <= 1e-6, name
    # a first step goes by the gradients' signs; AdamW's average has what the gradients were
    model, reader = checkpoint_of(training)
    expected = dict(module.named_parameters())
    for parameter in model.parameters():
        average = reader.read("average", parameter.name, Box.whole(parameter.shape))
        state = optimizer.state[expected.pop(model.hugging_face().stored(model, parameter).name)]
        assert relative(average, state["exp_avg"]) <= 5e-6, parameter.name
    assert not expected


def relative(ours: Tensor, expected: Tensor) -> Tensor:
    return (ours - expected).abs().max() / expected.abs().max()


def checkpoint_of(training: Training) -> tuple[LlamaModel, Reader]:
    checkpoint = find(training.output / "checkpoints")
    assert checkpoint is not None
    return checkpoint.manifest.model, Reader(checkpoint)


def test_what_is_exported_goes_on_from(runs: dict[str, tuple[Training, Path]]) -> None:
    """The exported folder holds the checkpoint's values bit for bit, and the tokenizer."""
    for kind, (training, exported) in runs.items():
        model, reader = checkpoint_of(training)
        weights = Weights(exported, model)
        for parameter in model.parameters():
            whole = Box.whole(parameter.shape)
            assert torch.equal(
                weights.read(parameter, whole), reader.read("value", parameter.name, whole)
            )
        assert json.loads((exported / "tokenizer.json").read_text()) == {"kind": kind}
        check_from(exported, model)


def test_training_is_refused_before_a_rank_starts(
    folders: dict[str, Path], runs: dict[str, tuple[Training, Path]], tmp_path: Path
) -> None:
    home = runs["halves"][0].output.parent
    given = ("--device", "cpu", "--output", str(tmp_path / "run"), "--from")
    other = str(folders["scaled and tied"])
    for folder, expected in ((str(tmp_path), "config.json cannot be read"), (other, "kv_heads")):
        assert expected in training_run.refusal(home, *given, folder)
    assert not (tmp_path / "run" / "logs").exists()


def refusal(*arguments: object) -> str:
    """What heteropp-export says when it refuses."""
    result = run_command(app, [str(each) for each in arguments])
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def test_bad_exports_are_refused(
    folders: dict[str, Path], runs: dict[str, tuple[Training, Path]], tmp_path: Path
) -> None:
    run = runs["halves"][0].output
    new = tmp_path / "new"
    assert "holds no checkpoint" in refusal(tmp_path, "--output", new)
    assert "is there already" in refusal(run, "--output", tmp_path)
    other = folders["scaled and tied"]
    assert "config.json: kv_heads is 4; the model has 2" in refusal(
        run, "--output", new, "--from", other
    )
    assert "config.json cannot be read" in refusal(run, "--output", new, "--from", tmp_path)
    (tmp_path / "file").touch()
    beneath = tmp_path / "file" / "new"
    assert f"{beneath.parent} is a file, not a folder" in refusal(run, "--output", beneath)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    torn = next((copy / "checkpoints").glob("step-*/layers.2.*"))
    truncate(torn)
    assert f"{torn} is damaged" in refusal(copy, "--output", new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file"]


def test_one_export_at_a_time_writes_a_folder(
    folders: dict[str, Path], runs: dict[str, tuple[Training, Path]], tmp_path: Path
) -> None:
    folder, output = folders["halves"], tmp_path / "copy"
    model = read_model(folder)
    weights = Weights(folder, model)
    said: list[str] = []

    def read(parameter) -> Tensor:
        said.append(refusal(runs["halves"][0].output, "--output", output))
        return weights.read(parameter, Box.whole(parameter.shape))

    export(model, read, output)
    assert f"{output} is used by process {os.getpid()} on host" in said[0]
    check_from(output, model)
    assert os.listdir(tmp_path) == ["copy"]
