"""AutoHet: planning times (section V-B) and the groupings of its examples (section V-A)."""

from __future__ import annotations

import time
from collections import Counter

from evidence import Row, row

from heteropp.description.cluster import read_cluster
from heteropp.description.model import read_model
from heteropp.description.plan import Pipeline, Plan
from heteropp.search.grouping import UnitType, group_devices
from heteropp.search.judge import ask
from heteropp.search.planner import Request

PLANNING_S = {16: 1.23, 24: 5.72, 32: 16.96, 64: 159.12}
# section V-A: chips of each pipeline; for the first, tensor-parallel pairs
EXAMPLES = {
    "4 A100 + 2 H800": ("autohet-4a100-2h800", ["2 h800", "4 a100"]),
    "1 A100 + 4 H20": ("autohet-1a100-4h20", ["1 a100 + 1 h20", "3 h20"]),
}
MODEL, GLOBAL_BATCH = "autohet-llama-6.7b", 64

ASSUMPTIONS = [
    "achieved powers A100 : H800 : H20 = 2 : 4 : 1, the first as section II-D says and the second "
    "as its example needs; with data-sheet peaks and one efficiency both examples become one "
    "pipeline (presets autohet-*-data-sheet)",
    "planning times are of equation 3, for A100, H800 and H20 as 2 : 1 : 1 of all chips",
    "Megatron's plan is the best uniform one under our simulator",
]


def table() -> tuple[list[Row], list[str]]:
    rows = [_planning(chips, published_s) for chips, published_s in PLANNING_S.items()]
    for name, (preset, published) in EXAMPLES.items():
        request = Request(
            cluster=read_cluster(preset), model=read_model(MODEL), global_batch=GLOBAL_BATCH
        )
        verdict = ask("autohet", request, 1)
        if not verdict.judged:
            rows.append(row(f"{name}: {verdict.error}", "", None))
            continue
        found = _groups(verdict.best.plan)
        same = "as published" if found == published else f"published {', '.join(published)}"
        uniform = ask("uniform", request, 1)
        rows.append(
            row(f"{name}: pipelines of {' and of '.join(found)} ({same}); step", "s",
                verdict.best.simulation.step_s,
                peer=uniform.best.simulation.step_s if uniform.judged else None,
                peer_name="uniform" if uniform.judged else "no uniform plan")
        )  # fmt: skip
    return rows, ASSUMPTIONS


def _planning(chips: int, published_s: float) -> Row:
    types = [
        UnitType(chips // 2, 2.0, 80.0),
        UnitType(chips // 4, 4.0, 80.0),
        UnitType(chips - chips // 2 - chips // 4, 1.0, 96.0),
    ]
    began_s = time.perf_counter()
    group_devices(types, 150.0, 2048)
    return row(f"planning for {chips} chips", "s", time.perf_counter() - began_s,
               peer=published_s, peer_name="published, with SCIP")  # fmt: skip


def _groups(plan: Plan) -> list[str]:
    """The chips of each pipeline, and of each replica of pipelines that are alike."""
    return sorted(
        words for pipeline in plan.pipelines for words in [_chips(pipeline)] * _copies(pipeline)
    )


def _copies(pipeline: Pipeline) -> int:
    return pipeline.stages[0].dp


def _chips(pipeline: Pipeline) -> str:
    held: Counter[str] = Counter()
    for stage in pipeline.stages:
        held[stage.replicas[0].chip] += stage.tp
    return " + ".join(f"{n} {chip}" for chip, n in sorted(held.items()))
