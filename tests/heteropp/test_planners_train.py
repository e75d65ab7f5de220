"""A plan of every planner loads in heteropp-train; where the executor can, it trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from clusters import tiny_model, write_cluster
from training_run import Training

from heteropp.description.cluster import read_cluster
from heteropp.description.plan import Plan
from heteropp.search.judge import ask
from heteropp.search.planner import PLANNERS, Request

NODES = (("a-mini", 2), ("b-mini", 2))


def planned(name: str, folder: Path) -> Plan:
    """Returns the planner's best plan for four emulated chips of two vendors."""
    write_cluster(folder / "cluster.toml", *NODES)
    model = tiny_model(4, hidden=32, intermediate=64, vocab=256)
    cluster = read_cluster(folder / "cluster.toml")
    verdict = ask(name, Request(cluster=cluster, model=model, global_batch=8), simulated=1)
    assert verdict.judged, verdict.error
    return verdict.best.plan


@pytest.mark.exhaustive
def test_they_train(tmp_path: Path) -> None:
    found: dict[Plan, list[str]] = {}
    for name in PLANNERS:
        found.setdefault(replace(planned(name, tmp_path), prediction=None), []).append(name)
    assert len(found) >= 4
    for index, (plan, names) in enumerate(found.items()):
        folder = tmp_path / str(index)
        folder.mkdir()
        write_cluster(folder / "cluster.toml", *NODES)
        code, _, stderr = Training(folder, plan, "--steps", "2").wait()
        assert code == 0, f"{names}: {stderr}"
        assert len((folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2
