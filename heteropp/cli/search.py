"""heteropp-search: finds the best plan for a model on a cluster."""

from __future__ import annotations

import json as json_
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from heteropp.cli.errors import InputError, one_sentence
from heteropp.cluster import Cluster, read_cluster
from heteropp.model import read_model
from heteropp.plan import Plan, write_plan

if TYPE_CHECKING:
    from heteropp.search.exact import Candidate, Result

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-search --cluster cluster.toml --model model.toml --global-batch 16
  heteropp-search --cluster cluster.toml --model model.toml \\
    --global-batch 16 --output plan.json --explain
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def search(
    cluster: Annotated[Path, typer.Option(help="The cluster file (TOML).")],
    model: Annotated[Path, typer.Option(help="The model file (TOML).")],
    global_batch: Annotated[
        int, typer.Option(min=1, max=65536, help="Sequences per optimizer step.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the plan.")
    ] = None,
    micro_batch_per_replica: Annotated[
        int, typer.Option(min=1, help="Sequences of a micro-batch in each replica.")
    ] = 1,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every term of the prediction.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write the nearest plan even if it does not fit.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    console = Console(highlight=False)
    with one_sentence():
        machines, shape = read_cluster(cluster), read_model(model)
        began_s = time.perf_counter()
        with Console(stderr=True).status("searching"):
            # torch, which the cost model traces with, is a second's import
            from heteropp.search.exact import DoesNotFitError, SearchError, search

            try:
                result = search(machines, shape, global_batch, micro_batch_per_replica)
            except DoesNotFitError as error:
                if not force:
                    raise InputError(str(error)) from None
                _write_forced(error.plan, machines, output, str(error))
                return
            except SearchError as error:
                raise InputError(str(error)) from None
        search_s = time.perf_counter() - began_s
        if output:
            write_plan(result.best.plan, output)
    if json:
        print(json_.dumps(_as_dict(result, search_s), indent=2))
        return
    show_plan(console, result.best.plan, machines)
    _show_result(console, result, search_s)
    if explain:
        _explain(console, result.best.plan, machines)
    if output:
        console.print(f"written to {output}", soft_wrap=True)


def _write_forced(plan: Plan, cluster: Cluster, output: Path | None, why: str) -> None:
    if output is None:
        raise InputError("--force writes a plan that does not fit; say where with --output")
    from heteropp.search.exact import predict
    from heteropp.simulate import simulate

    step_s = simulate(plan, cluster).step_s
    write_plan(replace(plan, prediction=predict(plan, cluster, step_s, 0.0)), output)
    Console(stderr=True, highlight=False).print(
        f"{why}; written to {output} all the same", soft_wrap=True
    )


def show_plan(console: Console, plan: Plan, cluster: Cluster) -> None:
    """A table of the plan's stages; R is recompute, time one micro-batch's."""
    from heteropp.planned import human_bytes, rank_memory, rank_times

    times, memory = rank_times(plan, cluster), rank_memory(plan)
    table = Table(
        title=f"model {plan.model.name} on cluster {cluster.name}", box=None, padding=(0, 2, 0, 0)
    )
    for heading in ("stage", "vendor", "chip", "ranks", "layers", "dp", "tp", "R"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for pipeline in plan.pipelines:
        for s, stage in enumerate(pipeline.stages):
            ranks = [rank for replica in stage.replicas for rank in replica.ranks]
            chip = cluster.chip(ranks[0])
            need = max(memory[rank].total for rank in ranks)
            table.add_row(
                str(s),
                chip.vendor,
                stage.replicas[0].chip,
                _ranges(ranks),
                str(stage.layer_count),
                str(stage.dp),
                str(stage.tp),
                "yes" if stage.recompute else "no",
                f"{human_bytes(need)} ({need / chip.memory.capacity_bytes:.0%})",
                f"{times[ranks[0]].micro_batch_s * 1e3:.1f} ms",
            )
    console.print(table)


def _show_result(console: Console, result: Result, search_s: float) -> None:
    plan = result.best.plan
    assert plan.prediction is not None
    pipeline = plan.pipelines[0]
    console.print(
        f"{pipeline.micro_batches} micro-batches of {plan.micro_batch} sequences; predicted step "
        f"{result.best.step_s * 1e3:.1f} ms, "
        f"{plan.prediction.tokens_per_chip_per_s:,.0f} tokens per chip and second",
        soft_wrap=True,
    )
    console.print(
        f"lower bound {result.lower_bound_s * 1e3:.1f} ms (no plan's busiest stage is busy less); "
        f"formula of section 4.3.2: {result.best.formula_s * 1e3:.1f} ms; "
        f"searched in {search_s:.2f} s",
        soft_wrap=True,
    )
    for candidate in result.runners_up[:3]:
        console.print(
            f"runner-up: {candidate.step_s * 1e3:.1f} ms, {_outline(candidate)}", soft_wrap=True
        )


def _outline(candidate: Candidate) -> str:
    return ", ".join(
        f"{stage.replicas[0].chip} {stage.layer_count} layers dp {stage.dp} tp {stage.tp}"
        + (" recompute" if stage.recompute else "")
        for stage in candidate.plan.pipelines[0].stages
    )


def _explain(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Every term of the time and memory of each stage's first rank."""
    from heteropp.planned import human_bytes, rank_memory, rank_times

    times, memory = rank_times(plan, cluster), rank_memory(plan)
    firsts = [stage.replicas[0].ranks[0] for p in plan.pipelines for stage in p.stages]
    table = Table(title="what the prediction is made of", box=box.SIMPLE_HEAD)
    table.add_column("term")
    for rank in firsts:
        table.add_column(f"rank {rank}", justify="right")
    for name in asdict(times[0]):
        cells = (f"{getattr(times[rank], name) * 1e3:.2f} ms" for rank in firsts)
        table.add_row(name.removesuffix("_s").replace("_", " "), *cells)
    for name in asdict(memory[0]):
        table.add_row(
            f"{name} memory", *(human_bytes(getattr(memory[rank], name)) for rank in firsts)
        )
    console.print(table)


def _as_dict(result: Result, search_s: float) -> dict:
    return {
        "plan": asdict(result.best.plan),
        "step_s": result.best.step_s,
        "formula_s": result.best.formula_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.best.step_s / result.lower_bound_s - 1,
        "considered": result.considered,
        "search_s": search_s,
        "runners_up": [
            {"step_s": c.step_s, "formula_s": c.formula_s, "plan": asdict(c.plan)}
            for c in result.runners_up
        ],
    }


def _ranges(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def main() -> None:
    app()


if __name__ == "__main__":
    main()
