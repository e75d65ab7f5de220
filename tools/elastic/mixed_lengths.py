"""Documents of mixed lengths: a plan for each length, against packing with one plan.

The lengths are like those of Hetu v2's figure 16: 97 of 100 documents are shorter than a quarter of
the longest. The cluster is one node of four slow emulated chips, whose memory holds a longest
sequence only when all four share it. Both runs learn the same documents in each step, packed whole,
and attention keeps them apart; tokens are those learnt. Every plan is the exact planner's. A step
whose pacing fidelity is below 95% is not used.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from evidence import Row, row
from pipelines.ranks import Failed
from torch import Tensor
from trained import TrainingError, start, well_paced
from twins import Scale, write_twin

from dicomm.bench.quiet import Quiet, Watch
from heteropp.data.convert import convert
from heteropp.data.documents import Document
from heteropp.data.tokenizer import Bytes
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.plan import Plan
from heteropp.layout.boxes import Box
from heteropp.models.llama.model import LlamaModel
from heteropp.search.planner import Request, planner
from heteropp.state.checkpoint.manifest import find
from heteropp.state.checkpoint.reader import Reader
from hyperhetero.progress import Status

MODEL = LlamaModel(
    name="mixed-lengths-twin",
    layers=4,
    hidden=128,
    heads=8,
    kv_heads=4,
    intermediate=384,
    vocab=256,
    sequence_length=512,
)
SCALE = Scale(computing=4e4, memory=960, memory_bandwidth=2e3, links=6e3, nics=2e3)
CHIPS = {"d": [4]}
DOCUMENTS = 64  # of a step
# sequences that a plan is made for, by their length: as many as those documents fill of it
BY_LENGTH = {128: 28, 512: 2}
ONE_PLAN = {512: 8}
IN_ALL = 4000  # documents
EXACT = 1e-12  # in float64


def lengths(generator: random.Random) -> Iterator[int]:
    """Yields the random lengths of IN_ALL documents, in tokens that count in the loss."""
    longest = MODEL.sequence_length
    for _ in range(IN_ALL):
        if generator.random() < 0.03:
            yield generator.randint(longest // 4 + 1, longest)
        else:
            drawn = generator.lognormvariate(math.log(45), 0.55)
            yield min(max(round(drawn), 1), longest // 4)


def mixed_length_rows(steps: int = 4, seed: int = 0) -> tuple[list[Row], Quiet]:
    """`steps` of each run are measured, after one that warms up. Raises Failed."""
    watch = Watch()
    with TemporaryDirectory(prefix="elastic-bench-") as folder:
        try:
            rows = list(_rows(Path(folder), steps, seed, watch))
        except TrainingError as error:
            raise Failed(f"mixed lengths: {error}") from None
    return rows, watch.result()


def _rows(folder: Path, steps: int, seed: int, watch: Watch) -> Iterator[Row]:
    cluster_file = write_twin(folder / "cluster", CHIPS, SCALE)
    cluster, data = read_cluster(cluster_file), folder / "documents.tokens"
    _write_documents(data, random.Random(seed))
    runs = {
        name: [_plan(cluster, *each) for each in batches.items()]
        for name, batches in (("one-plan", ONE_PLAN), ("by-length", BY_LENGTH))
    }
    options = ("--documents", str(DOCUMENTS), "--data", str(data))
    tokens_per_s, gradients = [], []
    for name, plans in runs.items():
        with Status(f"mixed lengths, {name}"):
            training = start(plans, cluster_file, folder / name, steps + 1, *options)
            paced = well_paced(training.steps())
            tokens_per_s.append(statistics.median(step["tokens_per_s"] for step in paced))
            watch.spin()
            gradients.append(_gradients(folder / f"{name}-gradients", plans, options))
    peer, ours = tokens_per_s
    yield row(
        "mixed lengths, a plan for each",
        "tokens/s",
        ours,
        peer=peer,
        peer_name="packing with one plan",
        bar=float(f"{peer:.5g}"),
        better="higher",
    )
    first, second = gradients
    apart = max(
        float((first[name] - second[name]).abs().max() / first[name].abs().max()) for name in first
    )
    yield row("mixed lengths, gradients apart from one plan's", "relative", apart, bar=EXACT)


def _write_documents(path: Path, generator: random.Random) -> None:
    texts = (
        bytes(generator.choices(range(97, 123), range(26, 0, -1), k=size))
        for size in lengths(generator)
    )
    convert((Document(text, "") for text in texts), path, Bytes())


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
    """Returns each parameter's whole gradient of the first step, computed in float64 on the host.

    The gradients are clipped, and all are multiplied by the same factor.
    """
    wide = [replace(plan, model=replace(plan.model, dtype="float64")) for plan in plans]
    start(wide, None, folder, 1, "--device", "cpu", *options).finish()
    checkpoint = find(folder / "run" / "checkpoints")
    assert checkpoint is not None
    reader = Reader(checkpoint)
    return {  # AdamW's average is then the clipped gradient, times one factor
        p.name: reader.read("average", p.name, Box(tuple((0, size) for size in p.shape)))
        for p in MODEL.parameters()
    }
