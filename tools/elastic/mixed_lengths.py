"""Documents of mixed lengths: a plan for each length, against packing with one plan.

The lengths are like those of Hetu v2's figure 16: 97 of 100 documents are shorter than a quarter of
the longest. The cluster is one node of four slow emulated chips, whose memory holds a longest
sequence only when all four share it, as HeteroSearch's own plan for it has them do.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from evidence import Row, row
from torch import Tensor
from trained import start, well_paced
from twins import Scale, write_twin

from heteropp.boxes import Box
from heteropp.checkpoint.manifest import find
from heteropp.checkpoint.reader import Reader
from heteropp.cluster import Cluster, read_cluster
from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.tokenizer import Bytes
from heteropp.model import Model
from heteropp.parameters import model_parameters
from heteropp.plan import Plan
from heteropp.search.planner import Request, planner

MODEL = Model(
    name="mixed-lengths-twin",
    layers=4,
    hidden=128,
    heads=8,
    kv_heads=4,
    intermediate=384,
    vocab=256,
    sequence_length=512,
)
SCALE = Scale(computing=2e4, memory=960, memory_bandwidth=1e3, links=3e3, nics=1e3)
CHIPS = {"d": [4]}
DOCUMENTS = 64  # of a step
# sequences that a plan is made for, by their length: as many as those documents fill of it
BY_LENGTH = {128: 28, 512: 2}
ONE_PLAN = {512: 8}
IN_ALL = 4000  # documents
EXACT = 1e-12  # in float64

NOTES = [
    "mixed lengths: both runs learn the same documents in each step, packed whole, and attention "
    "keeps them apart; tokens are those learnt, and plans are the exact planner's",
]


def lengths(generator: random.Random) -> Iterator[int]:
    """Of documents, in tokens that are learnt."""
    longest = MODEL.sequence_length
    for _ in range(IN_ALL):
        if generator.random() < 0.03:
            yield generator.randint(longest // 4 + 1, longest)
        else:
            drawn = generator.lognormvariate(math.log(45), 0.55)
            yield min(max(round(drawn), 1), longest // 4)


def measure(folder: Path, steps: int = 4, seed: int = 0) -> list[Row]:
    """`folder`: to be made. Raises TrainingError."""
    folder.mkdir()
    cluster_file = write_twin(folder / "cluster", CHIPS, SCALE)
    cluster = read_cluster(cluster_file)
    data = folder / "documents.tokens"
    generator = random.Random(seed)
    letters = [
        bytes(generator.choices(range(97, 123), range(26, 0, -1), k=size))
        for size in lengths(generator)
    ]
    convert([Document(text, "") for text in letters], data, Bytes())
    by_length = [_plan(cluster, *each) for each in BY_LENGTH.items()]
    one_plan = [_plan(cluster, *each) for each in ONE_PLAN.items()]
    options = ("--documents", str(DOCUMENTS), "--data", str(data))

    def tokens_per_s(name: str, plans: Sequence[Plan]) -> float:
        training = start(plans, cluster_file, folder / name, steps + 1, *options)
        return statistics.median(step["tokens_per_s"] for step in well_paced(training.steps()))

    peer, ours = tokens_per_s("one-plan", one_plan), tokens_per_s("by-length", by_length)
    first, second = (
        _gradients(folder / f"{name}-gradients", plans, options)
        for name, plans in (("one-plan", one_plan), ("by-length", by_length))
    )
    apart = max(
        float((first[name] - second[name]).abs().max() / first[name].abs().max()) for name in first
    )
    return [
        row(
            "mixed lengths, a plan for each",
            "tokens/s",
            ours,
            peer=peer,
            peer_name="packing with one plan",
            bar=float(f"{peer:.5g}"),
            better="higher",
        ),
        row("mixed lengths, gradients apart from one plan's, relative", "", apart, bar=EXACT),
    ]


def _plan(cluster: Cluster, length: int, batch: int) -> Plan:
    model = replace(MODEL, sequence_length=length)
    request = Request(
        cluster=cluster,
        model=model,
        global_batch=batch,
        sequences=1,
        zero_stage=1,
        schedule="1f1b",
        uneven_layers=True,
        stage_degrees=False,
    )
    return planner("exact")(request).best.plan


def _gradients(folder: Path, plans: Sequence[Plan], options: Sequence[str]) -> dict[str, Tensor]:
    """Those of the first step, whole, in float64 on the host."""
    wide = [replace(plan, model=replace(plan.model, dtype="float64")) for plan in plans]
    start(wide, None, folder, 1, "--device", "cpu", *options).finish()
    checkpoint = find(folder / "run" / "checkpoints")
    assert checkpoint is not None
    reader = Reader(checkpoint)
    return {  # AdamW's average is then the clipped gradient, times one factor
        p.name: reader.read("average", p.name, Box(tuple((0, size) for size in p.shape)))
        for p in model_parameters(MODEL)
    }
