"""Losses on named sets: wherever a run says them, after a resume, and one sentence if bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layouts import plan_of
from plain_llama import plain_loss
from training_run import (
    Training,
    checkpoint_parameters,
    refusal,
    tiny_model,
    write_cluster,
    write_text,
)

import heteropp
from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.source import open_tokens
from heteropp.data.tokenizer import Bytes
from heteropp.description.plan import write_plan

MODEL = tiny_model(dtype="float64")
PLAN = plan_of(MODEL, (2, 2), (2, 1), (1, 1))
SETS = {"wiki": b"abcdefgh", "code": b"if (x) {}", "bare.tokens": b"what is it?"}


@pytest.fixture
def sets(tmp_path: Path) -> dict[str, Path]:
    """Token files of unlike lengths."""
    files = {name: tmp_path / name.replace("wiki", "w.tokens") for name in SETS}
    for i, (name, text) in enumerate(SETS.items(), 1):
        convert([Document(text * 10 * i, "")] * 3, files[name], Bytes())
    return files


def given(sets: dict[str, Path]) -> list[str]:
    """The options; one set is called as its file is."""
    texts = [f"wiki={sets['wiki']}", f"code={sets['code']}", str(sets["bare.tokens"])]
    return [argument for text in texts for argument in ("--validation", text)]


def test_every_set_has_its_loss(tmp_path: Path, sets: dict[str, Path]) -> None:
    """It is as a plain model has it, on the screen, in the summary and for TensorBoard, too."""
    options = ("--steps", "4", "--validate-every", "2", "--json", "--track", "tensorboard")
    training = Training(tmp_path, PLAN, *options, *given(sets))
    code, stdout, stderr = training.wait()
    assert code == 0, stderr
    found = {m["step"]: m["validation_losses"] for m in training.metrics}
    assert found[1] == found[3] == {}
    assert list(found[2]) == list(SETS)
    parameters = checkpoint_parameters(training.output / "checkpoints" / "step-000004")
    cache, total, tokens = tmp_path / "cache", 0.0, 0
    for name, path in sets.items():
        expected = plain_loss(MODEL, parameters, data := open_tokens(path, cache))
        assert found[4][name] == pytest.approx(expected, rel=1e-12), name
        counted = counted_tokens(data)
        total, tokens = total + expected * counted, tokens + counted
    last = training.metrics[-1]
    assert last["validation_loss"] == pytest.approx(total / tokens, rel=1e-12)
    summary = json.loads(stdout)
    assert summary["validation_losses"] == found[4]
    assert summary["validation_loss"] == last["validation_loss"]
    each = ", ".join(f"{name} {loss:.4f}" for name, loss in found[4].items())
    assert f"step 4/4  validation loss {last['validation_loss']:.4f} ({each})" in stderr
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(training.output / "tensorboard"))
    events.Reload()
    for name in SETS:
        shown = {event.step: event.value for event in events.Scalars(f"validation_loss/{name}")}
        assert shown == pytest.approx({2: found[2][name], 4: found[4][name]}, rel=1e-6)


def counted_tokens(data: Any) -> int:
    from heteropp.data.sequences import NOT_COUNTED, Sequences

    sequences = Sequences(data, MODEL)
    return int((sequences.read(range(sequences.count))[1] != NOT_COUNTED).sum())


@pytest.mark.long
def test_a_resumed_run_goes_on_with_its_sets(tmp_path: Path, sets: dict[str, Path]) -> None:
    """It is told nothing of them, nor is one that an earlier release began with one set."""
    write_plan(PLAN, tmp_path / "plan.json")
    options: dict[str, Any] = {
        "validation": {"wiki": sets["wiki"], "code": str(sets["code"])},
        "validate_every": 2,
        "data": write_text(tmp_path / "text"),
        "device": "cpu",
        "decay_steps": 6,
    }
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    heteropp.train(tmp_path / "plan.json", output=whole, steps=6, **options)
    heteropp.train(tmp_path / "plan.json", output=stopped, steps=3, **options)
    heteropp.train(output=stopped, resume=True, steps=6)
    every = {m["step"]: m["validation_losses"] for m in lines(whole)}
    assert {step: list(losses) for step, losses in every.items() if losses} == {
        2: ["wiki", "code"], 4: ["wiki", "code"], 6: ["wiki", "code"],
    }  # fmt: skip
    resumed = {m["step"]: m["validation_losses"] for m in lines(stopped)}
    assert resumed.pop(3)  # its end, then
    assert resumed == {step: losses for step, losses in every.items() if step != 3}

    as_an_earlier_release(stopped, sets["wiki"])
    heteropp.train(output=stopped, resume=True, steps=8)
    assert list(lines(stopped)[-1]["validation_losses"]) == [sets["wiki"].name]
    assert (stopped / "loss.png").read_bytes().startswith(b"\x89PNG")


def lines(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").open()]


def as_an_earlier_release(output: Path, validation: Path) -> None:
    """Writes what a run left as one of an earlier release left it, which had one set."""
    start = max((output / "starts").glob("*/start.json"))
    content = json.loads(start.read_text())
    content["options"]["validation"] = str(validation)
    start.write_text(json.dumps(content))
    told = lines(output)
    for line in told:
        del line["validation_losses"]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))


def test_bad_sets_are_one_sentence(tmp_path: Path, sets: dict[str, Path]) -> None:
    write_plan(PLAN, tmp_path / "plan.json")
    write_cluster(tmp_path, PLAN.world_size)
    write_text(tmp_path / "text")
    wiki, code = sets["wiki"], sets["code"]
    for texts, expected in (
        ([f"a={wiki}", f"a={code}"], "--validation has the name a twice"),
        ([str(wiki), f"{wiki.name}={code}"], f"has the name {wiki.name} twice"),
        ([f"={wiki}"], "has no name; expected FILE or NAME=FILE, such as wiki=wiki.tokens"),
        (["a="], "--validation a= has no file"),
        ([f"a={tmp_path / 'none.tokens'}"], "none.tokens"),
    ):
        arguments = [argument for text in texts for argument in ("--validation", text)]
        said = refusal(tmp_path, *arguments)
        assert expected in " ".join(said.split()) and not (tmp_path / "run").exists(), said
    for bad in ({"": wiki}, {"a/b": wiki}, {"a=b": wiki}, {3: wiki}):
        with pytest.raises(heteropp.InputError, match="validation has the name"):
            heteropp.train(tmp_path / "plan.json", device="cpu", validation=bad)


@pytest.mark.exhaustive
def test_a_file_may_have_an_equals_sign_in_its_name(
    tmp_path: Path, sets: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets["wiki"].rename(tmp_path / "a=b.tokens")
    monkeypatch.chdir(tmp_path)
    training = Training(tmp_path, PLAN, "--validation", "a=b.tokens", "--steps", "1", device="cpu")
    assert list(training.finish().metrics[0]["validation_losses"]) == ["a=b.tokens"]
    heteropp.train(output=training.output, resume=True, steps=2)
    assert list(training.metrics[1]["validation_losses"]) == ["a=b.tokens"]
