"""Several documents in a sequence, with attention within each; answers alone are learnt.

The truth is a plain loop of one process that learns each document alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from layouts import plan_of, scheduled, two_pipelines
from parity import STEPS, TOLERANCE, Ranks, Trained
from plain_llama import PlainLlama
from test_cli_data import make
from test_conversations import messages, write_chats, write_tokenizer
from test_gpt2 import tiny as tiny_gpt2
from test_mixed_lengths import Command, Plain, Text, alone, check, learnt_alone
from training_run import Training, make_plan, refusal, tiny_model, write_cluster

from heteropp.cost.planned import rank_memory
from heteropp.data.sequences import Sequences
from heteropp.data.targets import NOT_COUNTED
from heteropp.data.token_file import TokenFile, open_token_file
from heteropp.data.tokenizer import Bytes, Encoded
from heteropp.data.writer import token_writer
from heteropp.description.plan import Plan, write_plan
from heteropp.models.llama.model import LlamaModel
from heteropp.models.spec import ModelSpec


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def conversations(path: Path, count: int, longest: int, seed: int = 0) -> TokenFile:
    """Documents of up to so many tokens, half of them with one short answer, at the end."""
    choices = random.Random(seed)
    with token_writer(path, Bytes()) as writer:
        for _ in range(count):
            size = choices.randint(4, longest)
            tokens = np.array(choices.choices(range(97, 123), range(26, 0, -1), k=size))
            answer = [[size - choices.randint(1, 3), size]] if choices.random() < 0.5 else []
            writer.append(Encoded(tokens, np.array(answer, np.int64).reshape(-1, 2)))
        writer.finish()
    return open_token_file(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Most fit a sequence of 16 tokens, some just, and some are cut."""
    return conversations(tmp_path_factory.mktemp("data") / "chats.tokens", 160, 21)


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    return conversations(tmp_path_factory.mktemp("data") / "validation.tokens", 31, 21, seed=1)


def pieces(sequences: Sequences, numbers: range) -> Iterator[Text]:
    """Each document of the sequences, alone."""
    for number in numbers:
        (inputs,), (targets,), (documents,) = map(torch.from_numpy, sequences.read([number]))
        for document in range(int(documents.max()) + 1):
            own = documents == document
            first_row = number * sequences.length + int(own.nonzero()[0])
            yield inputs[own].unsqueeze(0), targets[own], first_row


def plainly(plan: Plan, data: TokenFile, steps: int = STEPS) -> Plain:
    assert isinstance(plan.model, LlamaModel)
    sequences, count = Sequences(data, plan.model, 0, "document"), plan.global_batch

    def texts_of(step: int) -> Iterator[Text]:
        return pieces(sequences, range(step * count, (step + 1) * count))

    return learnt_alone(plan.model, texts_of, steps)


def plain_loss(plan: Plan, parameters: dict[str, torch.Tensor], data: TokenFile) -> float:
    assert isinstance(plan.model, LlamaModel)
    module = PlainLlama(replace(plan.model, dropout=0.0), 0)
    module.fill(parameters)
    sequences = Sequences(data, plan.model, None, "document")
    total, counted = 0.0, 0
    for inputs, targets, _ in pieces(sequences, range(sequences.count)):
        logits = alone(module, inputs)
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        counted += int((targets != NOT_COUNTED).sum())
    return total / counted


LAYOUTS: dict[str, Callable[[LlamaModel], Plan]] = {
    "one rank": lambda m: plan_of(m, (8,), (1,), (1,)),
    "unlike stages": lambda m: plan_of(
        m, (2, 4, 2), (2, 1, 2), (1, 2, 1), shares={0: (1, 3), 2: (2, 2)}, zero_stage=2
    ),
    "sequence parallel, dropout": lambda m: plan_of(
        replace(m, dropout=0.2), (4, 4), (1, 1), (2, 2), sequence_parallel=True
    ),
    "two pipelines": two_pipelines,
    "zb-v": lambda m: scheduled(plan_of(m, (4, 4), (2, 1), (1, 2)), "zb-v", 2),
    "interleaved": lambda m: scheduled(
        plan_of(m, (4, 4), (1, 1), (1, 2), selective_recompute=True), "interleaved-1f1b", 2
    ),
    "offload": lambda m: plan_of(m, (4, 4), (2, 1), (1, 1), offload=True),
}
ON_CI = ("sequence parallel, dropout", "two pipelines", "zb-v")


def learnt_by(ranks: Ranks, plan: Plan, data: TokenFile, **options: object) -> Trained:
    return ranks.train(plan, data=data.path, within="document", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.long if name in ON_CI else pytest.mark.exhaustive)
        for name in LAYOUTS
    ],
)
def test_packed_documents_train_what_each_alone_does(
    ranks: Ranks, data: TokenFile, validation: TokenFile, layout: str
) -> None:
    """Losses, norms of gradients, every parameter, and the loss of validation."""
    plan = LAYOUTS[layout](tiny_model(layers=8, dtype="float64"))
    targets = Sequences(data, plan.model, 0, "document").read(range(plan.global_batch * STEPS))[1]
    by_sequence = (targets != NOT_COUNTED).sum(1)
    assert (by_sequence == 0).any() and by_sequence.sum(), "some replicas have none to learn"
    got = learnt_by(ranks, plan, data, validation=validation.path)
    check(got, plainly(plan, data), TOLERANCE["float64"])
    expected = plain_loss(plan, got.parameters, validation)
    assert got.validation_loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.long
def test_attention_across_documents_trains_otherwise(ranks: Ranks, data: TokenFile) -> None:
    plan = LAYOUTS["unlike stages"](tiny_model(layers=8, dtype="float64"))
    across = ranks.train(plan, data=data.path, validation=data.path)
    apart = learnt_by(ranks, plan, data, validation=data.path)
    assert abs(across.losses[-1] / apart.losses[-1] - 1) > 1e-3


def test_steps_and_micro_batches_with_nothing_to_learn(ranks: Ranks, tmp_path: Path) -> None:
    """Such a step changes nothing; validation is the mean of what is learnt in all batches."""
    with token_writer(tmp_path / "late.tokens", Bytes()) as writer:
        # of this seed no gradient is as small as Adam's epsilon, which would magnify its rounding
        tokens = np.random.default_rng(2).integers(200, size=16 * 40)
        writer.append(Encoded(tokens, np.array([[9, 12], [600, 603], [630, 640]])))
        writer.finish()
    late = open_token_file(tmp_path / "late.tokens")
    plan = plan_of(tiny_model(dtype="float64"), (2, 2), (2, 1), (1, 2))
    plan = replace(plan, global_batch=8, pipelines=(replace(plan.pipelines[0], micro_batches=2),))
    sequences = Sequences(late, plan.model, 0, "document")
    counts = [sequences.counted(range(8 * step, 8 * step + 8)) for step in range(10)]
    assert 0 in counts and any(counts)
    got = learnt_by(ranks, plan, late, validation=late.path, steps=10)
    assert [loss == 0 for loss in got.losses] == [not count for count in counts]
    check(got, plainly(plan, late, 10), TOLERANCE["float64"])
    expected = plain_loss(plan, got.parameters, late)
    assert got.validation_loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.long
def test_a_resumed_run_goes_on_bit_for_bit(ranks: Ranks, data: TokenFile, tmp_path: Path) -> None:
    plan = LAYOUTS["unlike stages"](tiny_model(layers=8, dtype="float32"))
    whole = learnt_by(ranks, plan, data)
    learnt_by(ranks, plan, data, steps=2, checkpoints=tmp_path)
    rest = learnt_by(ranks, plan, data, checkpoints=tmp_path)
    assert rest.losses == whole.losses[2:]
    for name, value in whole.parameters.items():
        assert torch.equal(rest.parameters[name], value), name


# ---------------------------------------------------------------- the command


@pytest.mark.exhaustive
def test_the_command_chooses_by_the_data_and_keeps_to_it(tmp_path: Path) -> None:
    """A file of conversations trains, by the two commands, what each alone does."""
    tokenizer, choices = write_tokenizer(tmp_path / "model"), random.Random(0)
    rows = []
    for n in range(120):
        answer = "It is " + "so " * choices.randint(1, 30 if n % 9 else 90)
        rows.append(messages([("user", f"What is {n}?"), ("assistant", answer)]))
    source = write_chats(tmp_path / "chats.jsonl", rows)
    chats = make(tmp_path / "chats.tokens", source, "--chat", "--tokenizer", tokenizer)
    model = tiny_model(dtype="float64", vocab=330, sequence_length=128)
    plan = plan_of(model, (2, 2), (2, 1), (1, 2))
    plan = replace(plan, global_batch=8, pipelines=(replace(plan.pipelines[0], micro_batches=2),))
    settings = ("--learning-rate", "3e-3", "--gradient-clip", "0.3", "--warmup-steps", "2")
    begun = ("--data", str(chats.path), *settings, "--decay-steps", str(STEPS))
    training = Training(tmp_path, plan, *begun, "--steps", "2")
    code, stdout, stderr = training.wait()
    assert code == 0, stdout + stderr
    cut = (np.diff(chats.ends, prepend=0) > 129).sum()
    assert 0 < cut < 20
    assert f"{cut} of 120 documents are longer than a sequence of 128 tokens, and cut" in stderr
    resume = (*begun, "--resume", "--steps", str(STEPS))
    said = refusal(tmp_path, *resume, "--attention-within", "sequence")
    assert "made with attention_within document, not sequence; a resumed run keeps its" in said
    assert training.losses == pytest.approx(plainly(plan, chats).losses[:2], rel=1e-12)
    Training(tmp_path, plan, *resume).finish()
    assert training.losses == pytest.approx(plainly(plan, chats).losses, rel=1e-12)


@pytest.mark.long
def test_a_checkpoint_from_before_means_within_a_sequence(tmp_path: Path) -> None:
    plan = make_plan(tiny_model(), (4,), (1,), (1,), (False,))
    Training(tmp_path, plan, "--steps", "1").finish()
    path = tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest.pop("attention_within") == "sequence"
    path.write_text(json.dumps(manifest))
    again = ("--resume", "--steps", "2", "--attention-within", "document")
    assert "made with attention_within sequence, not document" in refusal(tmp_path, *again)


def test_bad_requests_are_one_sentence(tmp_path: Path) -> None:
    chats = conversations(tmp_path / "chats.tokens", 160, 21)

    def refused(model: ModelSpec, *arguments: str, capacity_bytes: int = 1 << 30) -> str:
        plan = make_plan(model, (4,), (1,), (1,), (False,))  # type: ignore[arg-type]
        write_plan(plan, tmp_path / "plan.json")
        write_cluster(tmp_path, 1, capacity_bytes)
        said = refusal(tmp_path, "--data", str(chats.path), *arguments)
        assert len(said.strip().splitlines()) == 1
        return said

    asked = ("--attention-within", "document")
    assert "--attention-within is rows; expected document or sequence" in refused(
        tiny_model(), "--attention-within", "rows"
    )
    said = refused(tiny_gpt2())
    assert "chats.tokens, of conversations, needs a model whose attention can stay within" in said
    assert "GPT-2's positions count" in said and "--attention-within sequence lets it" in said
    assert "--attention-within document needs a model" in refused(tiny_gpt2(), *asked)
    model = tiny_model(sequence_length=64)
    plan = make_plan(model, (4,), (1,), (1,), (False,))
    (memory,) = rank_memory(plan)
    said = refused(model, capacity_bytes=memory.total + 4096)
    assert "stage 0 needs" in said and "where attention is within documents" in said
    command = Command(tmp_path, chats.path)
    said = command.refusal(*command.arguments(*asked))
    assert "--attention-within is not for --bucket" in said
