"""The default planner cuts sequences that fit no other way, or are faster so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import cluster_of, tiny_model, write_cluster, write_model
from parity import TOLERANCE, Ranks
from sampled import sampled
from test_cli_search import command
from test_parity import check

import ditorch.chips
from ditorch.chips import load_chip
from heteropp.cost.capacity import fits
from heteropp.description.cluster import Cluster
from heteropp.description.used_chips import used_cluster
from heteropp.search.judge import ask
from heteropp.search.planner import OPTIONS, DoesNotFitError, Request

OPEN = frozenset(OPTIONS)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


def with_capacity(capacity_bytes: int, chips: int) -> Cluster:
    chip = load_chip("a-mini")
    memory = replace(chip.memory, capacity_bytes=capacity_bytes)
    return cluster_of(("a-mini", replace(chip, memory=memory), chips))


@pytest.mark.exhaustive  # it traces for minutes
def test_a_sequence_of_32768_tokens_fits_no_other_way() -> None:
    model = tiny_model(
        2,
        hidden=64,
        kv_heads=1,
        intermediate=192,
        vocab=256,
        sequence_length=32_768,
        attention="fused",
    )
    cluster = cluster_of(("a-mini", load_chip("a-mini"), 8))
    request = Request(cluster=cluster, model=model, global_batch=4, open=OPEN, context_parallel=1)
    error = ask("auto", request).error
    assert isinstance(error, DoesNotFitError)
    found = re.search(
        r"needs (\d+\.\d) MiB on rank \d \(chip a-mini\), which has 96\.0", str(error)
    )
    assert found and float(found[1]) > 96
    judged = ask("auto", replace(request, context_parallel=4), 1).best
    assert fits(judged.plan, used_cluster(judged.plan, cluster))
    assert judged.plan.has_context_parallelism
    assert judged.plan.prediction is not None
    assert 0 < judged.plan.prediction.lower_bound_s <= judged.simulation.step_s


@pytest.mark.parametrize(
    ("attention", "capacity_bytes"), sampled([("fused", 800_000), ("explicit", 1_600_000)], 2)
)
def test_a_plan_that_cuts_sequences_trains_what_one_process_does(
    ranks: Ranks, attention: str, capacity_bytes: int
) -> None:
    """Short sequences are cut where nothing fits otherwise."""
    model = tiny_model(
        2, kv_heads=1, sequence_length=128, vocab=256, dtype="float64", attention=attention
    )
    request = Request(
        cluster=with_capacity(capacity_bytes, 4), model=model, global_batch=4, open=OPEN
    )
    assert ask("auto", replace(request, context_parallel=1)).error is not None
    plan = ask("auto", request, 1).best.plan
    assert plan.has_context_parallelism
    check(ranks.train(plan), ranks.plainly(plan), TOLERANCE["float64"])


@pytest.mark.long
def test_the_command_shows_parts_and_says_why(tmp_path: Path) -> None:
    """Whole sequences do not fit on the two chips of the file, whose memory is small."""
    chip = (Path(ditorch.chips.__file__).parent / "a-mini.toml").read_text()
    (tmp_path / "small.toml").write_text(
        re.sub(r"capacity_bytes *= [\d_]+", "capacity_bytes = 900_000", chip)
    )
    cluster = write_cluster(tmp_path / "cluster.toml", ("small.toml", 2))
    model = write_model(
        tmp_path / "model.toml", tiny_model(1, kv_heads=1, vocab=256, sequence_length=128)
    )
    model.write_text(model.read_text() + 'attention = "explicit"\n')
    asked = ("search", "--cluster", cluster, "--model", model, "--global-batch", 1)
    kept = ("--schedule", "gpipe", "--zero-stage", 0, "--micro-batch-per-replica", 1)
    found = command(*asked, *kept, "--explain")
    assert found.exit_code == 0, found.stderr
    assert re.search(r"dp +tp +cp +R", found.stdout)
    why = r"it needs [\d.]+ [KM]iB with whole ones on rank 0, which has 878\.9 KiB"
    said = rf"stage 0 cuts sequences over 2 of \d+ \+ \d+ tokens: {why}"
    assert re.search(said, found.stdout), found.stdout
    whole = command(*asked, *kept, "--context-parallel", 1)
    assert whole.exit_code == 2
    assert "which has 878.9 KiB" in whole.stderr
    assert "cut sequences over up to 8 ranks (--context-parallel 8)" in whole.stderr
    uniform = command(*asked, "--planner", "uniform", "--context-parallel", 2)
    assert "for planners auto and exact; uniform cuts no sequences" in uniform.stderr
    other = ("search", "--cluster", cluster, "--model", "gpt2", "--global-batch", 1)
    refused = command(*other, "--context-parallel", 2)
    assert "sequences of family gpt2 cannot be cut over ranks" in refused.stderr
