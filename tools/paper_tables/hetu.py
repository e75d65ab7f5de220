"""Hetu v2: its strategies (Tables 5 and 7) as plans under our simulator, beside our own plans."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from evidence import Row, row

from heteropp.cost.capacity import check_memory
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.model import read_model
from heteropp.description.plan import Pipeline, Plan, PlanError, Replica, Stage, validate
from heteropp.models.llama.model import LlamaModel
from heteropp.search.judge import ask
from heteropp.search.planner import Request
from heteropp.simulator.simulate import simulate

GLOBAL_BATCH = 64  # sequences of 4,096 tokens (section 7.1)
PLANNERS = ("exact", "autohet", "heteroauto")


@dataclass(frozen=True)
class Strategy:
    """Pipelines that are alike, as one: (chip, tp, layers) of each stage."""

    name: str
    cluster: str
    model: str
    replicas: int
    micro_batches: int
    stages: tuple[tuple[str, int, int], ...]
    sequences: int = 1  # of a micro-batch in each replica


STRATEGIES = [
    Strategy("32B, 16 H800 + 16 H20", "hetu-16h800-16h20", "hetu-32b", 2, 32,
             (("h20", 4, 7), ("h20", 4, 7), ("h800", 4, 23), ("h800", 4, 23))),
    Strategy("32B, 16 H800 + 24 H20", "hetu-16h800-24h20", "hetu-32b", 2, 32,
             (("h20", 4, 6), ("h20", 4, 6), ("h20", 4, 6), ("h800", 4, 21), ("h800", 4, 21))),
    Strategy("32B, 16 H800 + 32 H20", "hetu-16h800-32h20", "hetu-32b", 4, 16,
             (("h20", 4, 11), ("h20", 4, 11), ("h800", 4, 38))),
    Strategy("70B, 16 H800 + 16 H20", "hetu-16h800-16h20", "hetu-70b", 1, 64,
             (("h20", 8, 11), ("h20", 8, 11), ("h800", 8, 29), ("h800", 8, 29))),
    Strategy("70B, 16 H800 + 24 H20", "hetu-16h800-24h20", "hetu-70b", 1, 64,
             (("h20", 8, 10), ("h20", 8, 10), ("h20", 8, 10), ("h800", 8, 25), ("h800", 8, 25))),
    Strategy("70B, 16 H800 + 32 H20", "hetu-16h800-32h20", "hetu-70b", 2, 32,
             (("h20", 8, 17), ("h20", 8, 17), ("h800", 8, 46))),
    Strategy("C1: 32B, 32 H20", "hetu-32h20", "hetu-32b", 2, 16,
             (("h20", 4, 15), ("h20", 4, 15), ("h20", 4, 15), ("h20", 4, 15)), 2),
    Strategy("C3: 32B, 24 H20", "hetu-24h20", "hetu-32b", 2, 32,
             (("h20", 4, 20), ("h20", 4, 20), ("h20", 4, 20))),
]  # fmt: skip

ASSUMPTIONS = [
    "the paper prints its step times only as bars: both columns are our simulator's, theirs of "
    "the strategy as listed, ours of the best of " + ", ".join(PLANNERS),
    "ZeRO-1, 1F1B, recompute in a listed strategy only where it does not fit without; chips from "
    "its Table 3 and data sheets, one compute efficiency for both",
]


def table() -> tuple[list[Row], list[str]]:
    rows = []
    for strategy in STRATEGIES:
        cluster, model = read_cluster(strategy.cluster), read_model(strategy.model)
        theirs = _fitting(strategy, cluster, model)
        theirs_s = simulate(theirs, cluster).step_s if theirs else None
        request = Request(
            cluster=cluster, model=model, global_batch=GLOBAL_BATCH, sequences=strategy.sequences
        )
        verdicts = [verdict for name in PLANNERS if (verdict := ask(name, request, 1)).judged]
        if not verdicts:
            rows.append(row(f"{strategy.name}: no plan of ours fits", "s", None))
            continue
        best = min(verdicts, key=lambda v: v.best.simulation.step_s)
        rows.append(
            row(f"{strategy.name}: step, ours by {best.planner}", "s",
                best.best.simulation.step_s, peer=theirs_s,
                peer_name="Hetu's strategy" + ("" if theirs_s else ", which does not fit"))
        )  # fmt: skip
    return rows, ASSUMPTIONS


def _fitting(strategy: Strategy, cluster: Cluster, model: LlamaModel) -> Plan | None:
    """The strategy as a plan; with recompute if it fits only so."""
    for recompute in (False, True):
        plan = _plan(strategy, cluster, model, recompute)
        try:
            check_memory(plan, cluster)
            return plan
        except PlanError:
            continue
    return None


def _plan(strategy: Strategy, cluster: Cluster, model: LlamaModel, recompute: bool) -> Plan:
    ranks = {chip: iter(cluster.ranks_of(chip)) for chip in cluster.chip_names()}
    stages, first = [], 0
    for chip, tp, layers in strategy.stages:
        replicas = tuple(
            Replica(
                ranks=tuple(itertools.islice(ranks[chip], tp)),
                chip=chip,
                batch_share=strategy.sequences,
            )
            for _ in range(strategy.replicas)
        )
        stage = Stage(layers=(first, first + layers), recompute=recompute, replicas=replicas)
        stages.append(stage)
        first += layers
    plan = Plan(
        model=model,
        global_batch=GLOBAL_BATCH,
        micro_batch=strategy.replicas * strategy.sequences,
        schedule="1f1b",
        zero_stage=1,
        pipelines=(Pipeline(micro_batches=strategy.micro_batches, stages=tuple(stages)),),
    )
    validate(plan)
    return plan
