"""The improved-Metis paper's Table 1: steps, times and costs of both searches, and of ours."""

from __future__ import annotations

from evidence import Row, row

from heteropp.search.metis_table import table as table_1

LIMIT_S = 20.0

ASSUMPTIONS = [
    "profiles are our cost model's: the paper's (Metis's data, CC BY-NC) are not shipped, so steps "
    "and costs differ from the published; `tools/planner-bench --metis-data DIR` reads a checkout",
    f"the two published searches stop after {LIMIT_S:g} s each",
]


def table() -> tuple[list[Row], list[str]]:
    rows = []
    for shape, found in table_1(LIMIT_S):
        name = f"Table 1, {shape.layers} layers, {shape.chips} + {shape.chips} chips"
        for planner in ("metis", "metis-oom"):
            ours, theirs = found[planner], shape.published[planner]
            cut = "" if ours.complete else ", ours cut off"
            rows.append(
                row(f"{name}: {planner}", "steps", ours.steps, peer=theirs.steps,
                    peer_name=f"published{cut}")
            )  # fmt: skip
            rows.append(
                row(f"{name}: {planner}", "s", ours.seconds, peer=theirs.seconds,
                    peer_name=f"published{cut}")
            )  # fmt: skip
        exact, best = found["exact"], min(found["metis"].cost_s, found["metis-oom"].cost_s)
        rows.append(
            row(f"{name}: exact's search", "s", exact.seconds,
                peer=shape.published["metis-oom"].seconds, peer_name="metis-oom, published")
        )  # fmt: skip
        rows.append(
            row(f"{name}: exact's cost", "s", exact.cost_s, peer=best,
                peer_name="the better of the two here")
        )  # fmt: skip
    return rows, ASSUMPTIONS
