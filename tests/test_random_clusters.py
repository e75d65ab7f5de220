"""planner-bench on random clusters keeps what it has found, goes on from there, and compares."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import random_clusters
import typer
from sampled import sampled

from heteropp.search.judge import Verdict, ask
from heteropp.search.planner import Request

TOOL = Path(__file__).parents[1] / "tools" / "planner-bench"
BEST_KNOWN = TOOL.parent / "best_known.jsonl"
LINES = {line["seed"]: line for line in map(json.loads, BEST_KNOWN.read_text().splitlines())}
SMALL = [seed for seed, line in LINES.items() if line["few_chips"]]
LARGE = [
    pytest.param(seed, marks=pytest.mark.exhaustive)
    for seed, line in LINES.items()
    if not line["few_chips"]
]
QUICK = 8007  # the seed of a cluster of two chips


def run(*options: str, seed: int = QUICK) -> subprocess.CompletedProcess[str]:
    command = [str(TOOL), "--no-published", "--clusters=1", f"--seed={seed}", *options, "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rows(found: subprocess.CompletedProcess[str], word: str) -> list[float]:
    assert found.returncode == 0, found.stderr
    return [row["ours"] for row in json.loads(found.stdout)["rows"] if word in row["name"]]


@pytest.mark.long
def test_a_kept_cluster_is_not_searched_again(tmp_path: Path) -> None:
    keep = tmp_path / "a folder" / "kept.jsonl"
    first = run("--longer-s=1", f"--keep={keep}")
    (line,) = keep.read_text().splitlines()
    kept = {**json.loads(line), "step_s": 0.5, "best_s": 0.4}  # which no search finds
    assert (kept["seed"], kept["longer_s"]) == (QUICK, 1.0)
    keep.write_text(json.dumps(kept) + "\n")
    again = run("--longer-s=1", f"--keep={keep}")
    behind = [rows(each, "behind") for each in (first, again)]
    assert behind == [pytest.approx([0, 0], abs=1), pytest.approx([25, 25])]
    assert len(keep.read_text().splitlines()) == 1
    run("--longer-s=1.5", f"--keep={keep}")  # another question
    assert len(keep.read_text().splitlines()) == 2


@pytest.mark.parametrize("content", ["steps: 3\n", '{"seed": 8007, "step_s": "0.5"}\n'])
def test_a_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    found = run(f"--keep={other}")
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert str(other) in sentence
    assert "--keep" in sentence
    assert other.read_text() == content


def test_a_pipe_keeps_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = run(f"--keep={tmp_path / 'pipe'}")
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert "no regular file" in sentence


# best plans that are known


def with_stage(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Returns a kept line whose plan has another first stage."""
    changed = copy.deepcopy(line)
    changed["best_plan"]["pipelines"][0]["stages"][0] |= changes
    return changed


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.long
def test_the_best_plan_known_is_simulated_in_place_of_a_longer_search(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The step that was kept beside it may be of other costs."""
    line = LINES[QUICK]
    slow = with_stage(line, recompute=True)
    known = write_lines(
        tmp_path / "known.jsonl",
        {**slow, "best_s": 3},
        {**line, "best_s": 2},
        {**slow, "best_s": 4},
    )

    def ask_worse(name: str, request: Request, simulated: int = 4) -> Verdict:
        """Only the default planner has a plan, which is its last runner-up."""
        verdict = ask(name, request, simulated)
        return replace(verdict, judged=verdict.judged[-1:] if name == "auto" else [])

    monkeypatch.setattr(random_clusters, "ask", ask_worse)
    (found,) = random_clusters.compared(random_clusters.Kept(known).since(QUICK), False, print)
    assert found.best_s == pytest.approx(line["step_s"], rel=0.03)
    assert found.behind > 0
    assert not found.beaten


def test_a_cluster_that_has_lost_its_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_clusters, "ask", lambda name, *_: Verdict(name, None, [], 0.0))
    known = random_clusters.Kept(BEST_KNOWN).since(QUICK)[:1]
    with pytest.raises(typer.BadParameter, match=f"no plan for cluster {QUICK}"):
        random_clusters.compared(known, False, print)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 3}, "with a batch of 3"),
        ({"members": ["h20-0/0", "h20-0/1"]}, "members"),
    ],
)
def test_a_plan_of_another_cluster_or_batch_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    line = copy.deepcopy(LINES[QUICK])
    line["best_plan"] |= changes
    found = run(f"--best-known={write_lines(tmp_path / 'known.jsonl', line)}")
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert f"the plan kept for cluster {QUICK}" in sentence
    assert words in sentence


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--seed=9000"], "has no cluster from seed 9000 on"),
        (["--keep=other.jsonl"], "expected one of the two"),
        (["--best-known=no.jsonl"], "does not exist"),
    ],
)
def test_what_cannot_be_compared_is_said(options: list[str], words: str) -> None:
    found = run(f"--best-known={BEST_KNOWN}", *options)
    assert found.returncode == 2
    (sentence,) = found.stderr.splitlines()
    assert words in sentence


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", sampled(SMALL, 50) + LARGE)
def test_the_default_plan_is_near_the_best_known(seed: int) -> None:
    """What ten minutes of search found is at most 3 % faster."""
    found = run(f"--best-known={BEST_KNOWN}", seed=seed)
    assert max(rows(found, "behind")) <= 3
    assert rows(found, "beaten") == [0]
