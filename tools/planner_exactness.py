"""The exact planner against brute force on random small instances: the same optimum, or none."""

from __future__ import annotations

import json as json_
import platform
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer
from brute_force import (
    BruteForce,
    random_request,
    random_request_of_experts,
    random_request_of_parts,
)
from invented import invented_trace, made_anew
from rich.console import Console
from rich.table import Table

from heteropp.cost.tracing import cache, traces
from heteropp.description.plan import Plan
from heteropp.search import space
from heteropp.search.exact import search
from heteropp.search.planner import DoesNotFitError, Request, SearchError
from hyperhetero.cli import CommandLine
from hyperhetero.progress import Progress

# two of five may cut sequences, and two more spread experts
KINDS = (random_request, *2 * (random_request_of_parts, random_request_of_experts))

app = CommandLine()


@dataclass(frozen=True)
class Compared:
    """One instance: None where no plan fits."""

    kind: str
    ours_s: float | None
    true_s: float | None
    own_s: float | None  # brute force's cost of our plan
    gap: float
    bites: bool  # memory rules out some plan
    request: Request
    plan: Plan | None = None  # ours

    @property
    def allowed(self) -> tuple[bool, bool]:
        """Whether it may have context parallelism, and expert parallelism."""
        parts, experts = self.request.context_parallel, self.request.expert_parallel
        return (parts or 1) > 1, (experts or 1) > 1

    @property
    def equal(self) -> bool:
        if self.true_s is None or self.ours_s is None or self.own_s is None:
            return self.true_s is None and self.ours_s is None
        return all(abs(s / self.true_s - 1) < 1e-9 for s in (self.ours_s, self.own_s))


@app.command()
def main(
    instances: Annotated[int, typer.Option(min=1, help="How many that have any plan.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the random instances.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    traces.trace_stage, cache.get = invented_trace, made_anew
    with Progress() as progress:
        requests = progress.track(list(_requests(instances, seed)), description="comparing")
        found = [_compare(*request) for request in requests]
    wrong = [compared for compared in found if not compared.equal]
    plans = [compared.plan for compared in found if compared.plan is not None]
    kinds = Counter(compared.kind for compared in found)
    rows = [
        _row("instances", len(found), 500, "higher"),
        _row("unlike brute force", len(wrong), 0, "lower"),
        _row("with a gap", sum(compared.gap > 0 for compared in found), 0, "lower"),
        _row("with plans that do not fit", sum(c.bites for c in found), None, "higher"),
        _row("with cp or ep allowed", sum(any(c.allowed) for c in found), 300, "higher"),
        _row("with cp allowed", sum(c.allowed[0] for c in found), None, "higher"),
        _row("with cp chosen", sum(p.has_context_parallelism for p in plans), None, "higher"),
        _row("with ep allowed", sum(c.allowed[1] for c in found), None, "higher"),
        _row("with ep chosen", sum(p.has_expert_parallelism for p in plans), None, "higher"),
        *(_row(kind, count, None, "higher") for kind, count in sorted(kinds.items())),
    ]
    if json:
        print(json_.dumps({"tool": "planner-exactness", "machine": _machine(), "rows": rows}))
    else:
        _show(rows)
    sys.exit(1 if wrong else 0)


def _requests(instances: int, seed: int) -> Iterator[tuple[Request, BruteForce, float | None, int]]:
    """Instances with any plan, their optimum, and the groups of chips that types are cut into."""
    generator = random.Random(f"planner-exactness {seed}")
    while instances:
        subgroup = generator.choice([2, 4, 128])
        space.SUBGROUP = subgroup
        request = generator.choice(KINDS)(generator)
        brute = BruteForce(request)
        best_s = brute.best()
        if brute.plans:
            instances -= 1
            yield request, brute, best_s, subgroup


def _compare(request: Request, brute: BruteForce, true_s: float | None, subgroup: int) -> Compared:
    space.SUBGROUP = subgroup
    options = [request.schedule, f"ZeRO {request.zero_stage}"]
    options += ["uneven layers"] * request.uneven_layers
    options += ["stage degrees"] * request.stage_degrees
    kind = ", ".join(options) + ("" if true_s is not None else ": nothing fits")
    try:
        result = search(request)
    except DoesNotFitError:
        return Compared(kind, None, true_s, None, 0.0, True, request)
    except SearchError as error:
        return Compared(f"{kind}: {error}", None, true_s, None, 1.0, True, request)
    plan, ours_s = result.best.plan, result.best.cost_s
    own_s, bites = brute.plan_cost_s(plan), brute.overruns > 0
    return Compared(kind, ours_s, true_s, own_s, result.gap, bites, request, plan)


def _row(name: str, ours: int, bar: int | None, better: str) -> dict:
    return {
        **{"name": name, "unit": "instances", "ours": ours, "peer": None, "peer_name": None},
        **{"ratio": None, "bar": bar, "better": better},
    }


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"


def _show(rows: list[dict]) -> None:
    table = Table("what", "instances", "asked")
    for row in rows:
        table.add_row(row["name"], str(row["ours"]), "" if row["bar"] is None else str(row["bar"]))
    Console().print(table)


if __name__ == "__main__":
    app()
