"""heteropp-profile against what chip and cluster files predict, and what is made of a profile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import cluster_of, tiny_model, write_cluster, write_model
from commands import run_command
from typer import Typer

from heteropp.cli import search
from heteropp.cli.profile import app
from heteropp.cost.planned import slowest_link
from heteropp.cost.stage_time import StageShape, Time, stage_memory, stage_time
from heteropp.description.chips import load_chip
from heteropp.description.cluster import Link, read_cluster
from heteropp.description.plan import Pipeline, Plan, Replica, Stage
from heteropp.description.profile import (
    Block,
    Measured,
    MeasuredLink,
    PairKind,
    Profile,
    ProfileError,
    chip_profile,
    decompose,
    measured_cluster,
    pair_kinds,
    read_profile,
    write_profile,
)
from heteropp.search.auto.bound import step_bound_s
from heteropp.search.auto.freedom import Freedom
from heteropp.search.judge import ask, ask_all
from heteropp.search.nearest import remedies
from heteropp.search.planner import PLANNERS, Request, SearchError, planner
from heteropp.simulator.simulate import simulate

MODEL = dict(hidden=64, heads=4, kv_heads=2, intermediate=192, vocab=256, sequence_length=64)
NONE = Link(latency_s=0.0, bytes_per_s=1e18)


def shape(layers: int, **changes) -> StageShape:
    base = dict(first=False, last=False, tp=1, dp=1, sequences=1, zero_stage=1, recompute=True)
    return StageShape(layers=layers, **{**base, **changes})


def command(folder: Path, *more: str) -> subprocess.Popen:
    files = ("--cluster", "cluster.toml", "--model", "model.toml")
    return subprocess.Popen(
        [sys.executable, "-m", "heteropp.cli.profile", *files, "--sequences", "2", *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def blocks_in(file: Path) -> list[dict]:
    return json.loads(file.read_text())["blocks"] if file.exists() else []


@pytest.mark.long
def test_a_killed_profile_goes_on_and_agrees_with_the_prediction(tmp_path: Path) -> None:
    text = load_chip("b-mini").path.read_text()
    # a link so slow that a busy host matters little beside it
    changes = {"capacity_bytes": "6_000_000", "intra_node_bytes_per_s": "2.5e7"}
    lines = [
        f"{key} = {changes[key]}" if (key := line.split("=")[0].strip()) in changes else line
        for line in text.splitlines()
    ]
    (tmp_path / "small.toml").write_text("\n".join(lines))
    write_cluster(tmp_path / "cluster.toml", ("small.toml", 2))
    model = tiny_model(9, **MODEL, dtype="bfloat16")
    write_model(tmp_path / "model.toml", model)
    file = tmp_path / "profile.json"

    process = command(tmp_path)
    deadline_s = time.monotonic() + 200
    while not blocks_in(file) and time.monotonic() < deadline_s:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    begun = json.loads(file.read_text())
    marked = begun["blocks"][0]
    marked["norm_s"] = 0.123  # which nothing would measure
    file.write_text(json.dumps(begun))

    process = command(tmp_path)
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    said = " ".join(stdout.split())
    profile = read_profile(file)
    model = profile.model  # which attends as such chips do
    assert profile.citation in said
    measured = {m.block: m for m in profile.blocks}
    (kept,) = (m for m in profile.blocks if m.norm_s == 0.123)
    assert kept.block.layers == marked["block"]["layers"]
    # 8 layers fit with two ranks, and not on one
    assert "chip small.toml has no memory for 8 layers with tp 1 and 2 sequences" in said
    sizes = {(b.tp, b.layers) for b in measured if not b.first and not b.last}
    assert sizes == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (2, 8)}

    cluster = read_cluster(tmp_path / "cluster.toml")
    chip = cluster.chip(0)
    for layers, first, last in ((5, False, False), (3, True, False), (9, True, True)):
        for tp in (1, 2):
            stage = shape(layers, first=first, last=last, tp=tp, dp=4, sequences=2)
            measured_time, traced = (
                stage_time(model, stage, chip, NONE, NONE, found)
                for found in (profile.of("small.toml"), None)
            )
            for term in ("forward", "recompute", "backward_input", "backward_weight", "update"):
                ours, theirs = (getattr(time, f"{term}_s") for time in (measured_time, traced))
                assert ours == pytest.approx(theirs, rel=0.01), (stage, term)
            for recompute in (True, False):
                ours, theirs = (
                    stage_memory(model, replace(stage, recompute=recompute), 3, 4, found).total
                    for found in (profile.of("small.toml"), None)
                )
                assert ours == pytest.approx(theirs, rel=0.02), stage
                # measured is a backward cut in two, which the model's first stage runs whole
                assert theirs >= ours or first, stage

    (link,) = profile.links
    given = cluster.link(0, 1)
    assert link.bytes_per_s == pytest.approx(given.bytes_per_s, rel=0.05)
    assert given.latency_s <= link.latency_s < 100 * given.latency_s  # the host's own time is in it


def made_up(forward_s: dict[tuple[int, bool, bool], float], chip: str = "x") -> Profile:
    """Makes a profile of a chip, tp 1 and 1 sequence, with these forward seconds.

    forward_s is by (layers, whether first, whether last) of the stage. The update takes longer with
    layers; all other times are constant.
    """
    blocks = tuple(
        Measured(
            block=Block(chip=chip, tp=1, sequences=1, layers=n, first=first, last=last),
            forward_s=seconds,
            recompute_s=0.5,
            backward_input_s=0.0,
            backward_weight_s=0.0,
            norm_s=0.0,
            # 10 launches of 1 ms, and 1 s a layer
            update_s=0.01 + n + 2.0 * first,
            kept_bytes=None,
            kept_recompute_bytes=None,
            working_bytes=None,
            update_bytes=None,
        )
        for (n, first, last), seconds in forward_s.items()
    )
    return Profile(name="made up", model=tiny_model(), blocks=blocks, links=())


def test_what_libraries_keep_is_part_of_every_ranks_memory() -> None:
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 1.0 for layers, *ends in kinds})
    kept = [replace(block, library_bytes=size) for size, block in enumerate(profile.blocks, 1000)]
    keeps = replace(profile, blocks=tuple(kept))
    ours, theirs = (
        stage_memory(tiny_model(4), shape(2), 1, 1, found.of("x")) for found in (keeps, profile)
    )
    assert ours == replace(theirs, framework=theirs.framework + 1003)


@pytest.mark.parametrize(
    "unlike",
    [
        {"token_shares": (9, 7)},
        {"tp": 2, "sequence_parallel": True},
        {"selective_recompute": True, "recompute": False},
        {"optimizer": "muon"},
    ],
)
def test_memory_that_was_measured_is_not_that_of_other_stages(unlike: dict) -> None:
    """What a rank keeps of a whole sequence says nothing of one that has a part of it."""
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 1.0 for layers, *ends in kinds})
    sizes = ("kept_bytes", "kept_recompute_bytes", "working_bytes", "update_bytes")
    measured = tuple(replace(each, **dict.fromkeys(sizes, 1 << 40)) for each in profile.blocks)
    of = replace(profile, blocks=measured).of("x")
    model = tiny_model(4)
    assert stage_memory(model, shape(2), 1, 1, of).total > 1 << 40
    stage = shape(2, **unlike)
    assert stage_memory(model, stage, 1, 1, of) == stage_memory(model, stage, 1, 1)


def test_any_number_of_layers_is_a_sum_of_blocks() -> None:
    """AutoHet, equation 5: 7 = 4 + 2 + 1; beyond the largest block it counts as often as needed."""
    assert decompose(7, [1, 2, 4]) == [4, 2, 1]
    assert decompose(13, [1, 2, 4]) == [4, 4, 4, 1]
    profile = made_up(
        {
            (1, False, False): 1.0,
            (2, False, False): 1.75,
            (4, False, False): 3.0,
            (1, True, False): 1.125,
            (1, False, True): 1.5,
        }
    )
    model, chip = tiny_model(8), load_chip("a-mini")

    def time(layers: int, **changes) -> Time:
        return stage_time(model, shape(layers, **changes), chip, NONE, NONE, profile.of("x"))

    assert time(7).forward_s == pytest.approx(3.0 + 1.75 + 1.0)
    assert time(13, first=True).forward_s == pytest.approx(9.0 + 1.0 + 0.125)
    assert time(2, first=True, last=True).forward_s == pytest.approx(1.75 + 0.125 + 0.5)
    assert time(7).recompute_s == pytest.approx(3 * 0.5)
    assert time(6).update_s == pytest.approx(0.01 + 6)
    assert time(6, first=True, dp=4).update_s == pytest.approx(0.01 + 8 / 4)
    with pytest.raises(ProfileError, match="does not have chip y with tp 1 and 1 sequences"):
        stage_time(model, shape(1), chip, NONE, NONE, profile.of("y"))


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planner_plans_by_the_profile(planner: str) -> None:
    """A layer's forward and recompute were measured in seconds, which chip files say take none."""
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 10.0 * layers for layers, *ends in kinds})
    chip = replace(load_chip("b-mini"), tp_limit=1)  # the profile has no other degree
    cluster = measured_cluster(cluster_of(("x", chip, 2)), profile)
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=2, sequences=1)
    verdict = ask(planner, request, 1)
    assert verdict.error is None
    assert verdict.best.plan.profile == profile.citation
    assert verdict.best.cost_s > 2 * 2 * 10  # of two layers, twice


def test_what_was_not_measured_makes_nothing_possible() -> None:
    """A request that does not fit: of what would make it fit, the profile knows a part alone."""
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 1.0 * layers for layers, *ends in kinds})
    chip = replace(load_chip("b-mini"), tp_limit=1)
    small = replace(chip, memory=replace(chip.memory, capacity_bytes=20_000))
    cluster = measured_cluster(cluster_of(("x", small, 2)), profile)
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=8, sequences=1)
    with pytest.raises(SearchError):
        planner("heteroauto")(request)
    assert list(remedies(request, "heteroauto")) == []


def test_one_pair_of_ranks_for_each_kind() -> None:
    one, other = load_chip("a-mini"), load_chip("c-mini")
    cluster = cluster_of(("a", one, 2), ("a", one, 2), ("c", other, 1), ("c", other, 1))
    kinds = pair_kinds(cluster)
    assert {(kind.chips, kind.same_node): ranks for kind, ranks in kinds.items()} == {
        (("a", "a"), True): (0, 1),
        (("a", "a"), False): (0, 2),
        (("a", "c"), False): (0, 4),
        (("c", "c"), False): (4, 5),
    }
    kind = PairKind(chips=("a", "c"), places=("", ""), same_node=False)
    slow = MeasuredLink(pair=kind, latency_s=1.0, bytes_per_s=2.0)
    profile = replace(made_up({(1, False, False): 1.0}), links=(slow,))
    measured = measured_cluster(cluster, profile)
    assert measured.link(3, 5) == measured.link(5, 3) == Link(1.0, 2.0)
    assert measured.link(0, 1) == cluster.link(0, 1)
    assert chip_profile(measured, "x") is profile.of("x")
    assert chip_profile(cluster, "x") is None


def test_collectives_inside_a_node_meet_the_links_that_were_measured() -> None:
    """Ranks of one node are measured as a pair; the bound takes the link to be no slower."""
    chip = load_chip("b-mini")
    slow_s = 1.0
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 1.0 * layers for layers, *ends in kinds})
    pairs = [replace(m, block=replace(m.block, tp=2)) for m in profile.blocks]  # tp 2 alone
    pair = PairKind(chips=("x", "x"), places=("", ""), same_node=True)
    link = MeasuredLink(pair=pair, latency_s=slow_s, bytes_per_s=1e12)
    profile = replace(profile, blocks=tuple(pairs), links=(link,))
    cluster = measured_cluster(cluster_of(("x", chip, 2)), profile)
    assert slowest_link(cluster, 0, (0, 1)) == Link(slow_s, 1e12)
    plan = Plan(
        model=tiny_model(4),
        global_batch=1,
        micro_batch=1,
        schedule="1f1b",
        zero_stage=0,
        pipelines=(
            Pipeline(
                micro_batches=1,
                stages=(
                    Stage(
                        layers=(0, 4),
                        recompute=False,
                        replicas=(Replica(ranks=(0, 1), chip="x", batch_share=1),),
                    ),
                ),
            ),
        ),
    )
    step_s = simulate(plan, cluster).step_s
    assert step_s > 4 * 4 * slow_s  # each layer has two sums in its forward and two in its backward
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=1, sequences=1)
    fast = replace(profile, links=(replace(link, latency_s=0.0),))
    chips = replace(chip.links, intra_node_latency_s=slow_s)  # which nobody meets
    quick = measured_cluster(cluster_of(("x", replace(chip, links=chips), 2)), fast)
    for found in (request, replace(request, cluster=quick)):
        bound_s = step_bound_s(found, Freedom(found), found.cluster)
        assert 0 < bound_s <= simulate(plan, found.cluster).step_s


def test_of_all_planners_some_ask_for_what_was_not_measured() -> None:
    kinds = [(1, False, False), (2, False, False), (1, True, False), (1, False, True)]
    profile = made_up({(layers, *ends): 1.0 * layers for layers, *ends in kinds})
    chips = replace(load_chip("b-mini"), tp_limit=2)
    cluster = measured_cluster(cluster_of(("x", chips, 2)), profile)
    request = Request(cluster=cluster, model=tiny_model(4), global_batch=2, sequences=1)
    with pytest.raises(ProfileError, match="heteropp-profile --tp 2"):
        ask("heteroauto", request)
    best, *others = ask_all(["heteroauto", "auto", "metis"], request)
    assert best.best.plan.profile == profile.citation
    assert "heteropp-profile --tp 2" in str(others[-1].error)


def refusal(*arguments: str, command: Typer = app) -> str:
    result = run_command(command, list(arguments))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


def test_bad_requests_are_refused_in_a_sentence(tmp_path: Path) -> None:
    cluster, model = tmp_path / "cluster.toml", tmp_path / "model.toml"
    write_cluster(cluster, ("b-mini", 2))
    write_model(model, tiny_model(4, **MODEL))
    output = tmp_path / "profile.json"
    files = ("--cluster", str(cluster), "--model", str(model), "--output", str(output))
    assert "--chip z" in refusal(*files, "--chip", "z")
    assert "--tp 3: tensor-parallel degree 3 does not divide" in refusal(*files, "--tp", "3")
    profile = made_up({(1, False, False): 1.0})
    write_profile(profile, output)
    assert "is the profile made up; give another --output" in refusal(*files)
    asked = (*files[:4], "--global-batch", "4", "--profile", str(output))
    assert "of a model with hidden 16; this one has 64" in refusal(*asked, command=search.app)
    write_profile(replace(profile, model=tiny_model(4, **MODEL)), output)
    assert "sequence_length 64; this one has 32" in refusal(
        *asked, "--sequence-length", "32", command=search.app
    )
    write_profile(replace(profile, version=2), output)
    assert "version is 2; this release reads version 1" in refusal(*files)
    text = output.read_text()
    output.write_text(text.replace('"forward_s": 1.0', '"forward_s": -1.0'))
    assert "blocks[0].forward_s" in refusal(*files)
    output.write_text(text[:50])
    assert "is not JSON" in refusal(*files)
