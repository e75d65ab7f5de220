"""Documents of mixed lengths in one step, under a plan for each length.

The truth is a plain loop of one process that learns each document alone, as long as it is.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import string
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import forks
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import plan_of
from parity import CLIP, RATE, STEPS, TOLERANCE, WARMUP, Ranks, Trained
from plain_llama import Attention, adamw, plain_module
from sampled import sampled
from training_run import (
    checkpoint_parameters,
    several_pipelines,
    tiny_model,
    wait,
    write_cluster,
)

from heteropp.cli.train import app
from heteropp.cost.planned import rank_memory
from heteropp.data.source import open_tokens
from heteropp.data.targets import NOT_COUNTED
from heteropp.data.token_file import TokenFile
from heteropp.data.whole_documents import WholeDocuments, pack
from heteropp.description.files import FileError
from heteropp.description.plan import Plan, PlanError, validate, write_plan
from heteropp.models.llama.model import LlamaModel
from heteropp.models.spec import ModelSpec
from heteropp.runtime.mixed_lengths.deliveries import deliveries
from heteropp.runtime.mixed_lengths.memory import memory_bytes
from heteropp.runtime.mixed_lengths.parameters import alike
from heteropp.runtime.mixed_lengths.plans import by_length, passes, with_micro_batches
from heteropp.state.slices.quantities import Quantity
from heteropp.state.switching.table import table

SHORT, MIDDLE, LONG = 8, 16, 32
DOCUMENTS = 24  # of a step


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mostly short documents; some at the very limit of a sequence, some beyond the longest."""
    folder = tmp_path_factory.mktemp("documents")
    letters = random.Random(1)
    sizes = [letters.choice((2, 3, 5, 7, SHORT, SHORT, 9, 12, MIDDLE)) for _ in range(90)]
    sizes += [17, 20, 25, LONG, LONG, 33, 60]
    for n, size in enumerate(sizes):
        text = "".join(letters.choices(string.ascii_lowercase, range(26, 0, -1), k=size))
        (folder / f"{n:03}.txt").write_text(text)
    return folder


def of_length(plan: Plan, length: int, micro_batches: int | None = None) -> Plan:
    plan = replace(plan, model=replace(plan.model, sequence_length=length))
    (pipeline, *others) = plan.pipelines
    if micro_batches is None or others:
        return plan
    return replace(
        plan,
        global_batch=micro_batches * plan.micro_batch,
        pipelines=(replace(pipeline, micro_batches=micro_batches),),
    )


@dataclass(frozen=True)
class Plain:
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def plainly(model: ModelSpec, tokens: TokenFile, count: int, steps: int = STEPS) -> Plain:
    """A plain loop of one process, each document alone and as long as it is."""
    documents = WholeDocuments(tokens, model, seed=0)

    def texts_of(step: int) -> Iterator[Text]:
        return texts(documents, range(step * count, (step + 1) * count))

    return learnt_alone(model, texts_of, steps)


def learnt_alone(
    model: ModelSpec, texts_of: Callable[[int], Iterable[Text]], steps: int = STEPS
) -> Plain:
    """A plain loop that learns the texts of each step one by one; without targets it skips it."""
    torch.set_num_threads(1)
    module = plain_module(model, seed=0)
    (optimizer,) = adamw(model, module)
    losses, norms = [], []
    for step in range(steps):
        rate = RATE[model.dtype] * min(1, (step + 1) / WARMUP)
        if step >= WARMUP:
            progress = (step - WARMUP) / (max(steps, STEPS) - WARMUP)
            rate *= 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss, counted = torch.zeros((), dtype=getattr(torch, model.dtype)), 0
        for inputs, targets, first_row in texts_of(step):
            logits = alone(module, inputs, first_row)
            loss = loss + F.cross_entropy(logits, targets, reduction="sum")
            counted += int((targets != NOT_COUNTED).sum())
        mean = loss / max(1, counted)
        losses.append(mean.item())
        norms.append(0.0)
        if counted:
            mean.backward()
            norms[-1] = torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP).item()
            optimizer.step()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return Plain(losses, norms, parameters)


Text = tuple[torch.Tensor, torch.Tensor, int]  # inputs [1, length], targets [length], first row


def texts(documents: WholeDocuments, numbers: Sequence[int]) -> Iterator[Text]:
    for number, length in zip(numbers, documents.lengths(numbers).tolist(), strict=True):
        inputs, targets, _ = documents.read([[number]], length)
        if length:
            yield torch.from_numpy(inputs), torch.from_numpy(targets).flatten(), 0


def alone(module: torch.nn.Module, inputs: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    for part in module.modules():
        if isinstance(part, Attention):
            part.length = inputs.shape[1]
    logits: torch.Tensor = module(inputs, first_row)
    return logits


def check(got: Trained, expected: Trained | Plain, tolerance: float) -> None:
    assert got.losses == pytest.approx(expected.losses, rel=tolerance)
    assert got.norms == pytest.approx(expected.norms, rel=tolerance)
    for name, value in expected.parameters.items():
        error = (got.parameters[name] - value).abs().max() / value.abs().max()
        assert error <= tolerance, f"{name}: {error:.3g}"


# by name: the plan of short sequences, and those of longer ones
def layouts(model: LlamaModel) -> dict[str, tuple[Plan, ...]]:
    four = replace(model, kv_heads=4)

    def plan(*degrees: Sequence[int], model: LlamaModel = model, **options: object) -> Plan:
        return plan_of(model, *degrees, **options)  # type: ignore[arg-type]

    return {
        "tp 2, then pipeline, then tp 4": (
            of_length(plan((4,), (2,), (2,), model=four), SHORT, 2),
            of_length(plan((1, 3), (1, 1), (2, 2), model=four), MIDDLE, 2),
            of_length(plan((4,), (1,), (4,), model=four, sequence_parallel=True), LONG, 1),
        ),
        "dp 4, then tp 4": (
            of_length(plan((4,), (4,), (1,), model=four), SHORT, 3),
            of_length(plan((4,), (1,), (4,), model=four), LONG, 1),
        ),
        "the same layout": (
            of_length(plan((3, 1), (2, 1), (1, 2), zero_stage=2), SHORT, 2),
            of_length(plan((3, 1), (2, 1), (1, 2)), MIDDLE, 2),
        ),
        "pipelines side by side": (
            of_length(
                several_pipelines(
                    replace(model, tied_embeddings=True),
                    ((1, 3), (1, 1), (1, 2), 2),
                    ((4,), (1,), (1,), 1),
                ),
                SHORT,
            ),
            of_length(
                plan((2, 2), (2, 1), (1, 2), model=replace(model, tied_embeddings=True)), LONG, 2
            ),
        ),
    }


CASES = list(layouts(tiny_model()))


@pytest.mark.parametrize(
    ("case", "dtype"),
    sampled(
        [
            *zip(CASES, ("float64", "float32", "float32", "float64"), strict=True),
            *zip(CASES, ("float32", "float64", "float64", "float32"), strict=True),
        ],
        6,
        everyday=1,
    ),
)
def test_a_plan_for_each_length_trains_what_each_document_alone_does(
    ranks: Ranks, data: Path, case: str, dtype: str
) -> None:
    plans = layouts(tiny_model(dtype=dtype))[case]
    model = plans[-1].model
    tokens = open_tokens(data, Path(ranks.folder.name, "cache", "hyperhetero"))
    got = ranks.train(plans[0], by_length=plans, documents=DOCUMENTS, data=data)
    check(got, plainly(model, tokens, DOCUMENTS), TOLERANCE[dtype])


@pytest.mark.long
def test_one_plan_for_all_lengths_trains_the_same(ranks: Ranks, data: Path) -> None:
    """Padding and packing differ, and what is learnt does not."""
    plans = layouts(tiny_model(dtype="float64"))["dp 4, then tp 4"]
    several = ranks.train(plans[0], by_length=plans, documents=DOCUMENTS, data=data)
    one = ranks.train(plans[1], by_length=plans[1:], documents=DOCUMENTS, data=data)
    check(several, one, TOLERANCE["float64"])
    assert several.validation_loss == pytest.approx(one.validation_loss, rel=1e-12)


def test_a_plan_without_documents_has_no_part_in_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """Some steps have long documents, and others none."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for n in range(12):
        (folder / f"{n:02}.txt").write_text("abcdefg"[: 3 + n % 5] if n else "a" * LONG)
    plans = layouts(tiny_model(dtype="float64"))["dp 4, then tp 4"]
    tokens = open_tokens(folder, Path(ranks.folder.name, "cache", "hyperhetero"))
    documents = WholeDocuments(tokens, plans[-1].model, seed=0)
    used = {bool((documents.lengths(range(n, n + 4)) > SHORT).any()) for n in range(0, 20, 4)}
    assert used == {True, False}
    got = ranks.train(plans[0], by_length=plans, documents=4, data=folder)
    check(got, plainly(plans[-1].model, tokens, 4), TOLERANCE["float64"])


def test_between_plans_that_hold_the_same_nothing_moves() -> None:
    short, middle = layouts(tiny_model())["the same layout"]
    found = table(
        short, middle, range(4), range(4), quantities=[Quantity("parameter", "float32", whole=True)]
    )
    assert not found.volume_bytes
    assert all(alike(short, middle, rank) for rank in range(4))
    assert all(d.receiver in d.senders for d in deliveries(short, middle))


def check_added_once(home: Plan, other: Plan) -> None:
    """Each rank's part goes, whole, to ranks of home that have its elements alike."""
    tensors = defaultdict(list)
    for d in deliveries(home, other):
        tensors[d.tensor].append(d)
    for sent in tensors.values():
        pieces = Counter(d.box for d in sent)
        assert len(set(pieces.values())) == 1
        covered = sum(math.prod(box.shape) for box in pieces)
        assert covered == math.prod(sent[0].whole.shape)


@pytest.mark.parametrize("case", CASES)
def test_every_part_of_a_gradient_is_added_once(case: str) -> None:
    home, *others = layouts(tiny_model())[case]
    for other in others:
        check_added_once(home, other)


# ---------------------------------------------------------------- documents


@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=30),
    length=st.integers(4, 24),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_documents_stay_whole(sizes: list[int], length: int, seed: int) -> None:
    tokens = file_of([*sizes, 2])
    documents = WholeDocuments(tokens, tiny_model(vocab=1 << 20, sequence_length=length), seed)
    numbers = range(len(sizes) + 1)  # an epoch
    lengths = documents.lengths(numbers)
    begins = [0, *tokens.ends.tolist()]
    expected = [begins[i : i + 2] for i in range(len(numbers))]
    rows = pack(numbers, lengths, length)
    assert sorted(n for row in rows for n in row) == list(numbers)
    inputs, targets, which = documents.read(rows, length)
    found = []
    for r, row in enumerate(rows):
        assert sum(lengths[n] for n in row) <= length
        for place, _ in enumerate(row):
            own = which[r] == place
            found.append((inputs[r][own].tolist(), targets[r][own].tolist()))
    assert (targets[which < 0] == NOT_COUNTED).all()
    cut = [(list(range(a, b))[: length + 1]) for a, b in expected]
    assert sorted(found) == sorted((text[:-1], text[1:]) for text in cut)


def test_an_order_without_a_seed_ends() -> None:
    documents = WholeDocuments(file_of([3, 1, 9]), tiny_model(vocab=1 << 20, sequence_length=4))
    assert documents.lengths(range(5)).tolist() == [2, 0, 4, 0, 0]
    inputs, targets, which = documents.read([[0, 1], [2], [3]], 4)
    assert inputs[:2].tolist() == [[0, 1, 0, 0], [4, 5, 6, 7]]
    assert targets[0].tolist() == [1, 2, NOT_COUNTED, NOT_COUNTED]
    assert which.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0], [-1] * 4]


def test_of_conversations_the_answers_alone_are_learnt() -> None:
    tokens = replace(file_of([6, 9]), answers=np.array([[2, 4], [5, 6], [9, 15]]))
    documents = WholeDocuments(tokens, tiny_model(vocab=1 << 20, sequence_length=5))
    _, targets, _ = documents.read([[0], [1]], 5)
    none = NOT_COUNTED
    assert targets.tolist() == [[none, 2, 3, none, 5], [none, none, 9, 10, 11]]
    assert documents.counted([0, 1]) == 6 and documents.counted([1]) == 3


def test_documents_in_which_nothing_is_learnt_are_refused() -> None:
    """Their answers begin behind what the longest sequence has of them, or they are too short."""
    late = replace(file_of([9, 8]), answers=np.array([[6, 9], [15, 17]]))
    for tokens in (late, file_of([1, 1])):
        with pytest.raises(FileError, match="has no token to learn in the first 6 tokens of any "):
            WholeDocuments(tokens, tiny_model(vocab=1 << 20, sequence_length=5))
    longer = WholeDocuments(late, tiny_model(vocab=1 << 20, sequence_length=6))
    assert longer.counted([0, 1]) == 2


def file_of(sizes: Sequence[int]) -> TokenFile:
    """Token n is the n-th of the file."""
    ends = np.cumsum(np.array(sizes, np.int64))
    return TokenFile(Path("x"), np.arange(ends[-1]), ends, "t", "t", int(ends[-1]), "t")


# ---------------------------------------------------------------- plans


def test_micro_batches_are_shared_out_as_the_plan_does() -> None:
    plan = several_pipelines(tiny_model(), ((4,), (1,), (1,), 6), ((4,), (1,), (1,), 2))
    for count in range(1, 9):
        cut = with_micro_batches(plan, count)
        validate(cut)
        assert sum(p.micro_batches for p in cut.pipelines) == max(2, count)
    assert with_micro_batches(plan, 8) == plan
    assert [p.micro_batches for p in with_micro_batches(plan, 4).pipelines] == [3, 1]
    assert passes(plan, 0) == []
    assert passes(plan, 1) == [1]
    assert passes(plan, 32) == [8]
    assert passes(plan, 69) == [8, 8, 2]


def test_plans_that_cannot_share_a_step_are_refused() -> None:
    model = tiny_model()
    short = of_length(plan_of(model, (4,), (2,), (1,)), SHORT)
    assert by_length([of_length(short, LONG), short]) == (short, of_length(short, LONG))
    for other, why in (
        (short, "two plans have sequence_length 8"),
        (of_length(plan_of(tiny_model(hidden=64), (4,), (2,), (1,)), LONG), "unlike models"),
        (of_length(plan_of(model, (4,), (3,), (1,), shares={0: (1, 1, 2)}), LONG), "2 and 3 ranks"),
        (of_length(plan_of(model, (4,), (2,), (1,), offload=True), LONG), "32 offloads"),
    ):
        with pytest.raises(PlanError, match=why):
            by_length([short, other])
    dropout = of_length(plan_of(tiny_model(dropout=0.1), (4,), (2,), (1,)), LONG)
    with pytest.raises(PlanError, match=r"dropout 0\.1"):
        by_length([dropout])


def test_what_plans_leave_standing_counts_together() -> None:
    model = tiny_model()
    short = of_length(plan_of(model, (4,), (2,), (1,)), SHORT)
    long = of_length(plan_of(model, (4,), (1,), (2,)), LONG)
    alone, (together, _) = rank_memory(short), memory_bytes([short, long])
    copies = sum(math.prod(p.boxes(2, 0)[0].shape) for p in model.parameters()) * 8
    assert all(t >= a.total + copies for t, a in zip(together, alone, strict=True))
    same = memory_bytes([short, of_length(short, MIDDLE)])[0]
    assert all(s < t for s, t in zip(same, together, strict=True))


# ---------------------------------------------------------------- the command


class Command:
    """heteropp-train on two emulated chips, with a plan for short documents and one for long."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data
        model = tiny_model(dtype="float64")
        self.plans = (
            of_length(plan_of(model, (4,), (2,), (1,)), SHORT, 2),
            of_length(plan_of(model, (4,), (1,), (2,)), LONG, 1),
        )
        self.files = [folder / "short.json", folder / "long.json"]
        for plan, file in zip(self.plans, self.files, strict=True):
            write_plan(plan, file)
        write_cluster(folder, 2)

    def arguments(self, *arguments: str, files: Sequence[Path] = ()) -> list[str]:
        buckets = [word for file in files or self.files for word in ("--bucket", str(file))]
        rate = ("--learning-rate", str(RATE["float64"]), "--gradient-clip", str(CLIP))
        return [
            *(*buckets, "--cluster", str(self.folder / "cluster.toml"), "--data", str(self.data)),
            *("--output", str(self.folder / "run"), "--documents", str(DOCUMENTS)),
            *(*rate, "--warmup-steps", str(WARMUP), "--decay-steps", str(STEPS), *arguments),
        ]

    def run(self, *arguments: str, files: Sequence[Path] = ()) -> str:
        """What it says on standard error."""
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache")}
        words = ["-m", "heteropp.cli.train", *self.arguments(*arguments, files=files)]
        code, stdout, stderr = wait(forks.start(words, environment), 150)
        assert code == 0, stdout + stderr
        return stderr

    def refusal(self, *arguments: str) -> str:
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        result = run_command(app, list(arguments))
        assert result.exit_code == 2, result.output
        return result.stderr

    @property
    def losses(self) -> list[float]:
        return [json.loads(line)["loss"] for line in (self.folder / "run/metrics.jsonl").open()]


@pytest.mark.long
def test_the_command_goes_on_from_a_checkpoint_with_other_plans(tmp_path: Path, data: Path) -> None:
    command = Command(tmp_path, data)
    said = command.run("--steps", "3")
    assert "of 97 documents" in said and "up to 8 tokens" in said and "2 are longer and cut" in said
    command.run("--steps", str(STEPS), "--resume", files=command.files[1:])
    tokens = open_tokens(data, tmp_path / "cache" / "hyperhetero")
    expected = plainly(command.plans[1].model, tokens, DOCUMENTS)
    assert command.losses == pytest.approx(expected.losses, rel=1e-12)
    trained = checkpoint_parameters(tmp_path / "run" / "checkpoints" / f"step-{STEPS:06d}")
    for name, value in expected.parameters.items():
        assert (trained[name] - value).abs().max() <= 1e-12 * value.abs().max(), name
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    documents = WholeDocuments(tokens, command.plans[1].model, seed=0)
    learnt = documents.lengths(range((STEPS - 1) * DOCUMENTS, STEPS * DOCUMENTS)).sum()
    assert metrics["tokens_per_s"] * metrics["step_s"] == pytest.approx(learnt)

    common = ("--steps", "9", "--resume", "--cluster", str(tmp_path / "cluster.toml"))
    packed = ("--data", str(data), "--output", str(tmp_path / "run"), *common)
    said = command.refusal("--plan", str(command.files[1]), *packed)
    assert "was made with" in said and "a resumed run keeps its settings" in said


def test_bad_requests_are_one_sentence(tmp_path: Path, data: Path) -> None:
    command = Command(tmp_path, data)
    short, long = map(str, command.files)
    for arguments, why in (
        (("--bucket", short), "--bucket needs --documents"),
        (("--plan", short, "--documents", "4"), "--documents is for --bucket"),
        (("--plan", short, "--bucket", long, "--documents", "4"), "give one --plan, or a --bucket"),
        ((), "give one --plan, or a --bucket"),
        (("--bucket", short, "--bucket", short, "--documents", "4"), "expected one a length"),
        (
            ("--bucket", short, "--documents", "4", "--expert-bias-update-rate", "0.001"),
            "--bucket pads documents; expected 0, as padding would count as load",
        ),
    ):
        said = command.refusal(*arguments)
        assert why in said and len(said.strip().splitlines()) == 1
    write_cluster(tmp_path, 2, capacity_bytes=200_000)
    said = command.refusal(*command.arguments())
    assert re.search(r"with what all 2 plans leave standing, the one of sequence_length \d+", said)
