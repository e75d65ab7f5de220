"""Checkpoints appear whole or not at all, and a resumed run is the run that was not interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training_run
from layouts import lay_out, two_pipelines
from parity import STEPS, TOLERANCE, Ranks
from safetensors.torch import load_file
from sampled import sampled
from tiny_decoders import tiny_config
from training_run import (
    CHIP,
    Training,
    checkpoint_parameters,
    make_plan,
    start,
    start_with,
    tiny_model,
    wait,
    write_cluster,
)

from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan, Schedule, write_plan
from heteropp.layout.boxes import Box
from heteropp.models.hugging_face.reading import read
from heteropp.process_groups.control import Control
from heteropp.state.checkpoint.manifest import (
    Checkpoint,
    CheckpointError,
    Manifest,
    check_resumable,
    find,
    steps,
)
from heteropp.state.checkpoint.reader import Reader
from heteropp.state.checkpoint.writer import Writer
from heteropp.state.slices.block_files import HeldSlice, Tensors
from heteropp.state.slices.parameter_slice import ParameterSlice, Shard

PLAN = make_plan(tiny_model(), (2, 2), (2, 1), (1, 2), (True, False))
SETTINGS = ("--decay-steps", "6", "--warmup-steps", "2", "--checkpoint-every", "2", "--keep", "2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Training:
    """Six steps without a stop."""
    return Training(tmp_path_factory.mktemp("whole"), PLAN, "--steps", "6", *SETTINGS).finish()


@pytest.fixture
def copy(whole: Training, tmp_path: Path) -> Path:
    """The folder of a finished run, to damage."""
    folder = tmp_path / "copy"
    shutil.copytree(whole.output.parent, folder)
    return folder


def resume(folder: Path, *arguments: str) -> None:
    process = start(folder, "--checkpoint-every", "2", *arguments)
    code, _, stderr = wait(process, 120)
    assert code == 0, stderr


def changed_paths(run: Path) -> dict[str, str]:
    """The options of a resume that differ: it has the first start's own copies."""
    kept = run / "starts" / "1"
    return {"plan": str(kept / "plan.json"), "cluster": str(kept / "cluster.toml")}


def refusal(folder: Path, *arguments: str) -> str:
    """The one sentence of a resume that is refused."""
    sentence = training_run.refusal(folder, "--resume", "--steps", "8", *arguments)
    assert sentence.count("\n") == 1, sentence
    return sentence


def test_a_resumed_run_equals_an_uninterrupted_one(whole: Training, copy: Path) -> None:
    newest = copy / "run" / "checkpoints" / "step-000006"
    damaged = next(newest.glob("layers.*"))
    damaged.write_bytes(b"")
    (newest.parent / ".step-000006.partial").mkdir()  # what a crash leaves
    for name in ("plan.json", "cluster.toml", CHIP):  # the run keeps its own
        (copy / name).unlink()
    process = start_with(copy, "--resume", str(copy / "run"), "--resume-from", "4")
    code, _, stderr = wait(process, 120)
    assert code == 0, stderr
    starts = [json.loads((copy / "run" / "starts" / n / "start.json").read_text()) for n in "12"]
    assert starts[1]["options"] == {**starts[0]["options"], **changed_paths(copy / "run")}
    assert starts[1]["command"][1:] == ["--resume", str(copy / "run"), "--resume-from", "4"]
    assert torch.__version__.startswith(starts[1]["versions"]["torch"])  # and what it is built for
    assert starts[1]["hyperparameters"]["warmup_steps"] == 2
    metrics = [json.loads(line) for line in (copy / "run" / "metrics.jsonl").open()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [line[name] for line in metrics] == [line[name] for line in whole.metrics]
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == ["step-000004", "step-000006", "step-000006.aside"]
    theirs = whole.output / "checkpoints" / "step-000006"
    files = sorted(path.name for path in newest.glob("*.safetensors"))
    assert files == sorted(path.name for path in theirs.glob("*.safetensors"))
    for name in files:
        tensors, expected = load_file(newest / name), load_file(theirs / name)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key], expected[key]) for key in tensors)


def test_the_newest_are_kept_and_hold_the_whole_model(whole: Training) -> None:
    names = sorted(path.name for path in (whole.output / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006"]
    parameters = checkpoint_parameters(whole.output / "checkpoints" / names[-1])
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    assert shapes["embedding.weight"] == shapes["head.weight"] == (256, 32)
    assert shapes["layers.3.mlp.down.weight"] == (32, 64)
    assert len(shapes) == 4 * 9 + 3


def test_each_element_is_written_once(whole: Training) -> None:
    found = find(whole.output / "checkpoints")
    assert found is not None
    elements = sum(
        torch.Size(piece.box.shape).numel()
        for file in found.manifest.files
        for piece in file.slices
    )
    parameters = checkpoint_parameters(found.path)
    assert elements == sum(tensor.numel() for tensor in parameters.values())
    # two replicas share the writing of the first stage, two ranks of a group that of the second
    assert {file.rank for file in found.manifest.files} == set(range(PLAN.world_size))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    running = Ranks()
    yield running
    running.close()


# each of them goes on from the one before it
CHAIN: list[tuple[str, Schedule]] = [
    ("two stages", "1f1b"),
    ("dp 3 to 1, uneven", "gpipe"),
    ("selective recompute", "interleaved-1f1b"),
    ("ZeRO-0", "1f1b"),
    ("mixed chips", "chimera"),
    ("ZeRO-2", "zb-v"),
    ("offload", "1f1b"),
    ("micro-batch 4, 1", "zb-h1"),
]


def chain_links(dtype: str) -> Iterator[tuple[Plan, Plan]]:
    plans = [lay_out(*layout, dtype) for layout in CHAIN]
    yield from pairwise(plans)  # type: ignore[misc]  (all of them are plans)
    two = two_pipelines(tiny_model(layers=8, dtype=dtype))
    one = make_plan(two.model, (8,), (1,), (1,), (True,), micro_batches=5)
    yield two, one
    yield one, two
    tied = [lay_out("tied embeddings", schedule, dtype) for schedule in ("zb-v", "1f1b")]
    yield tuple(tied)  # type: ignore[misc]


def marks(dtype: str, link: int) -> tuple[pytest.MarkDecorator, ...]:
    if dtype == "float64" and link == 1:
        return ()
    on_ci = dtype == "float64" and link % 6 == 0
    return (pytest.mark.long if on_ci else pytest.mark.exhaustive,)


LINKS = [
    pytest.param(dtype, link, marks=marks(dtype, link))
    for dtype in TOLERANCE
    for link in range(len(list(chain_links(dtype))))
]


@pytest.mark.parametrize(("dtype", "link"), LINKS)
def test_any_plan_goes_on_from_any_other(
    ranks: Ranks, tmp_path: Path, dtype: str, link: int
) -> None:
    """Three steps under one plan, then the rest under another."""
    first, second = list(chain_links(dtype))[link]
    expected = ranks.plainly(first)
    before = ranks.train(first, steps=3, checkpoints=tmp_path)
    after = ranks.train(second, checkpoints=tmp_path)
    tolerance = TOLERANCE[dtype]
    assert before.losses + after.losses == pytest.approx(expected.losses, rel=tolerance)
    for parameter, value in expected.parameters.items():
        error = (after.parameters[parameter] - value).abs().max() / value.abs().max()
        assert error <= tolerance, f"{parameter}: {error:.3g}"
    assert [step for step, _ in steps(tmp_path)] == [3, STEPS]


@pytest.mark.parametrize(
    "dtype",
    sampled(["float16", "bfloat16", "float32"], 2, everyday=1),
)
def test_the_same_plan_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    plan = make_plan(tiny_model(dtype=dtype), (2, 2), (2, 1), (1, 2), (True, False))
    expected = ranks.train(plan)
    before = ranks.train(plan, steps=3, checkpoints=tmp_path)
    after = ranks.train(plan, checkpoints=tmp_path)
    assert before.losses + after.losses == expected.losses
    assert before.norms + after.norms == expected.norms
    for name, value in expected.parameters.items():
        assert torch.equal(after.parameters[name], value), name


def test_a_checkpoint_is_written_while_the_parameters_change(tmp_path: Path) -> None:
    """It appears when the last rank's part is there, with the values of when it was asked for."""
    store = dist.HashStore()
    parameters = torch.arange(16.0).view(2, 8).unbind()
    pieces = [
        ParameterSlice("embedding.weight", Box(((rank, rank + 1), (0, 8)))) for rank in range(2)
    ]
    writers = [
        Writer(tmp_path, Control(store, rank, 2), keep=1, on_error=pytest.fail) for rank in range(2)
    ]

    def save(rank: int) -> None:
        tensors: Tensors = {"value": parameters[rank].view(1, 8)}
        writers[rank].save(manifest, [HeldSlice(Shard(), pieces[rank], tensors, owned=True)])

    manifest = Manifest(
        step=7,
        model=tiny_model(),
        global_batch=8,
        seed=0,
        tokens_sha256="",
        hyperparameters=Hyperparameters(),
    )
    save(0)
    parameters[0].zero_()
    assert find(tmp_path) is None
    save(1)
    writers[1].finish()  # which is when rank 0 has written the manifest
    found = find(tmp_path)
    assert found is not None and found.manifest.step == 7
    whole = Reader(found).read("value", "embedding.weight", Box(((0, 2), (0, 8))))
    assert torch.equal(whole, torch.arange(16.0).view(2, 8))
    with pytest.raises(CheckpointError, match="does not hold the whole of"):
        Reader(found).read("value", "embedding.weight", Box(((0, 3), (0, 8))))


def test_a_torn_file_is_named(copy: Path) -> None:
    torn = sorted((copy / "run" / "checkpoints" / "step-000006").glob("layers.*"))[0]
    torn.write_bytes(torn.read_bytes()[:-10])
    sentence = refusal(copy)
    assert f"{torn} is damaged: it has" in sentence
    assert "; --resume-from 4 goes on from the last whole one" in sentence


def test_a_flipped_bit_is_named(copy: Path) -> None:
    checkpoints = copy / "run" / "checkpoints"
    for step in ("step-000004", "step-000006"):
        flipped = sorted((checkpoints / step).glob("head.*"))[-1]
        content = bytearray(flipped.read_bytes())
        content[-1] ^= 1
        flipped.write_bytes(content)
    sentence = refusal(copy)
    assert f"{flipped} is damaged: its hash is not the manifest's" in sentence
    assert "; no earlier checkpoint is whole" in sentence


def test_a_missing_file_is_named(copy: Path) -> None:
    missing = sorted((copy / "run" / "checkpoints" / "step-000006").glob("embedding.*"))[0]
    missing.unlink()
    assert f"{missing} cannot be read: No such file" in refusal(copy)


def test_a_torn_manifest_is_named(copy: Path) -> None:
    manifest = copy / "run" / "checkpoints" / "step-000006" / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    assert f"{manifest} is not JSON" in refusal(copy)


def test_a_folder_without_a_manifest_is_no_checkpoint(copy: Path) -> None:
    checkpoints = copy / "run" / "checkpoints"
    (checkpoints / "step-000006" / "manifest.json").unlink()
    found = find(checkpoints)
    assert found is not None and found.manifest.step == 4


def test_another_model_is_refused(copy: Path) -> None:
    model = tiny_model(intermediate=96)
    write_plan(make_plan(model, (2, 2), (2, 1), (1, 2), (True, False)), copy / "plan.json")
    assert "was made with model.intermediate 64, not 96" in refusal(copy)


def test_a_model_of_another_family_is_refused(tmp_path: Path) -> None:
    """Its settings have other names."""
    decoder = read(tiny_config("mixtral").to_dict(), "mixtral", sequence_length=16)
    manifests = [
        Manifest(
            step=1,
            model=model,
            global_batch=1,
            seed=0,
            tokens_sha256="",
            hyperparameters=Hyperparameters(),
        )
        for model in (tiny_model(), decoder)
    ]
    for saved, run in permutations(manifests):
        with pytest.raises(CheckpointError, match=r"was made with model\..*, not ") as found:
            check_resumable(Checkpoint(tmp_path, saved), run)
    assert "was made with model.family hugging_face, not llama" in str(found.value)


def test_another_batch_is_refused(copy: Path) -> None:
    half = make_plan(tiny_model(), (2, 2), (2, 1), (1, 2), (True, False), micro_batches=2)
    write_plan(half, copy / "plan.json")
    assert "was made with global_batch 16, not 8" in refusal(copy)


def test_other_data_is_refused(copy: Path) -> None:
    (copy / "text" / "c.txt").write_text("more")
    assert "was made with other data" in refusal(copy)


def test_other_settings_are_refused(copy: Path) -> None:
    assert "was made with learning_rate 0.001, not 0.5" in refusal(copy, "--learning-rate", "0.5")
    assert "was made with seed 0, not 3" in refusal(copy, "--seed", "3")


def test_a_run_does_not_write_over_another(copy: Path) -> None:
    assert "holds checkpoints of an earlier run; give --resume" in training_run.refusal(copy)


def test_nothing_to_resume_from(copy: Path, tmp_path: Path) -> None:
    assert "holds no checkpoint of step 5 to resume from" in refusal(copy, "--resume-from", "5")
    write_plan(PLAN, tmp_path / "plan.json")
    write_cluster(tmp_path, PLAN.world_size)
    (tmp_path / "text").mkdir()
    assert "holds no checkpoint to resume from" in refusal(tmp_path)
