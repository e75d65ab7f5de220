"""How a plan and a planner's answer look on a terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from heteropp.api.console import seconds
from heteropp.description.outline import experts_of, layers_of, outline, parts_of, together

if TYPE_CHECKING:
    from heteropp.description.cluster import Cluster
    from heteropp.description.plan import Plan
    from heteropp.search.judge import Judged, Verdict

SHOWN_STAGES = 40  # of each table


def show_plan(console: Console, plan: Plan, cluster: Cluster) -> None:
    """A table of the plan's stages; R is recompute, time one micro-batch's.

    "tp 2 s" has sequence parallelism, and layers with an o wait in host memory in between.
    """
    from heteropp.cost.capacity import fullest_host
    from heteropp.cost.planned import human_bytes, rank_memory, rank_times

    times, memory = rank_times(plan, cluster), rank_memory(plan, cluster)
    several = len(plan.pipelines) > 1
    table = Table(
        title=f"model {plan.model.name} on cluster {cluster.name}", box=None, padding=(0, 2, 0, 0)
    )
    cut, spread = plan.has_context_parallelism, plan.has_expert_parallelism
    headings = ["stage", "vendor", "chip", "ranks", "layers", "dp", "tp"]
    headings += [*["cp"] * cut, *["ep"] * spread, "R"]
    for heading in ["pipeline", *headings] if several else headings:
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [
        (p, s, stage) for p, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
    ]  # fmt: skip
    for p, s, stage in rows[:SHOWN_STAGES]:
        ranks = [rank for replica in stage.replicas for rank in replica.ranks]
        fullest = max(ranks, key=lambda r: memory[r].total / cluster.chip(r).memory.capacity_bytes)
        need, capacity = memory[fullest].total, cluster.chip(fullest).memory.capacity_bytes
        cells = [
            str(s),
            together(cluster.chip(rank).vendor for rank in ranks),
            together(stage.chips),
            ranges(ranks),
            layers_of(stage),
            str(stage.dp),
            f"{stage.tp}{' s' if stage.sequence_parallel else ''}",
            *[str(stage.cp)] * cut,
            *[str(stage.ep)] * spread,
            "yes" if stage.recompute else "attention" if stage.selective_recompute else "no",
            f"{human_bytes(need)} ({need / capacity:.0%})",
            f"{max(times[rank].micro_batch_s for rank in ranks) * 1e3:.1f} ms",
        ]
        table.add_row(*([str(p), *cells] if several else cells))
    console.print(table)
    if len(rows) > SHOWN_STAGES:
        console.print(f"... and {len(rows) - SHOWN_STAGES} stages more; --json lists all")
    if host := fullest_host(cluster, memory):
        room = f", which has {human_bytes(host.room_bytes)} for it" if host.room_bytes else ""
        where = f"host memory of node {host.node}{room}"
        say(console, f"offloading fills up to {human_bytes(host.bytes)} of the {where}")
    for p, pipeline in enumerate(plan.pipelines):
        if pipeline.token_slices:
            slices = " + ".join(map(str, pipeline.token_slices))
            where = f"pipeline {p} runs" if several else "stages run"
            say(console, f"{where} micro-batches in slices of {slices} tokens of each sequence")


def show_prediction(console: Console, verdict: Verdict) -> None:
    """The step as simulated and as the planner costs it, what bounds it, and its runners-up."""
    best, result = verdict.best, verdict.result
    assert result is not None
    plan, simulation = best.plan, best.simulation
    shares = Counter(pipeline.micro_batches for pipeline in plan.pipelines)
    micro_batches = " + ".join(f"{k} x {m}" if k > 1 else str(m) for m, k in shares.items())
    say(
        console,
        f"{micro_batches} micro-batches of {plan.micro_batch} sequences; predicted step "
        f"{seconds(simulation.step_s)}, {simulation.tokens_per_chip_per_s:,.0f} tokens per chip "
        "and second",
    )
    slack = [stage.slack for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(slack):
        say(console, f"slack, in micro-batches by stage: {', '.join(map(str, slack))}")
    stages = simulation.stage_shares
    (bubble_place, bubble) = max(stages.items(), key=lambda item: item[1].bubble)
    (sending_place, sending) = max(stages.items(), key=lambda item: item[1].communication)
    work = sum(share.work for share in stages.values()) / len(stages)
    say(
        console,
        f"of the step, stages work {work:.0%} on average; the most bubble is {bubble.bubble:.0%} "
        f"(stage {_place(bubble_place, plan)}), the most communication "
        f"{sending.communication:.0%} (stage {_place(sending_place, plan)})",
    )
    counted = "plans simulated" if verdict.planner == "auto" else "steps"
    searched = f"searched in {verdict.search_s:.2f} s, {result.steps:,} {counted}"
    say(console, f"{_proof(verdict)}; {searched}")
    for judged in verdict.judged[1:]:
        say(console, f"runner-up: {outline(judged.plan)}: {why_slower(judged, best)}")
    for note in result.notes:
        say(console, note)


def show_all(console: Console, verdicts: list[Verdict], cluster: Cluster) -> None:
    """Every planner's best plan, judged by one simulator."""
    table = Table(
        title=f"all planners on cluster {cluster.name}, under one simulator", box=box.SIMPLE_HEAD
    )
    table.add_column("planner", no_wrap=True)
    for heading in ("step", "tokens/chip/s", "own cost", "search"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("plan")
    for verdict in verdicts:
        if not verdict.judged:
            table.add_row(verdict.planner, "none", "", "", f"{verdict.search_s:.2f} s",
                          str(verdict.error))  # fmt: skip
            continue
        best = verdict.best
        table.add_row(
            verdict.planner,
            seconds(best.simulation.step_s),
            f"{best.simulation.tokens_per_chip_per_s:,.0f}",
            seconds(best.cost_s),
            f"{verdict.search_s:.2f} s",
            outline(best.plan),
        )
    console.print(table)


def show_slices(console: Console, plan: Plan, cluster: Cluster) -> None:
    """What whole sequences would be like where pipelines run them in slices."""
    from heteropp.cost.capacity import fits, overrun
    from heteropp.search.auto.slicing import whole
    from heteropp.simulator.simulate import simulate

    if not plan.has_slices:
        return
    other = whole(plan)
    if fits(other, cluster):
        why = f"with whole ones a step would take {seconds(simulate(other, cluster).step_s)}"
    else:
        why = f"with whole ones {overrun(other, cluster)}"
    say(console, f"sequences run in slices: {why}")


def show_parts(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Why the sequences of each stage with context parallelism are cut."""
    from heteropp.cost.planned import human_bytes, whole_sequences_memory

    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.cp == 1:
                continue
            memory = {
                replica.ranks[0]: whole_sequences_memory(plan, replica.ranks[0], cluster).total
                for replica in stage.replicas
            }
            capacity = {rank: cluster.chip(rank).memory.capacity_bytes for rank in memory}
            rank = max(memory, key=lambda rank: memory[rank] / capacity[rank])
            need, has = human_bytes(memory[rank]), human_bytes(capacity[rank])
            if memory[rank] > capacity[rank]:
                why = f"needs {need} with whole ones on rank {rank}, which has {has}"
            else:
                why = f"fits with whole ones, too ({need} of {has}), but was not found to be faster"
            place = _place((p, s), plan)
            say(console, f"stage {place} cuts sequences over {parts_of(stage)}: it {why}")


def show_experts(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Why the experts of each stage with expert parallelism lie over ranks."""
    from heteropp.cost.planned import human_bytes, rank_memory
    from heteropp.search.auto.changed import with_each
    from heteropp.search.auto.spreading import gathered

    if not plan.has_expert_parallelism:
        return
    memory = rank_memory(with_each(plan, gathered), cluster)
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if stage.ep == 1:
                continue
            capacity = {
                rank: cluster.chip(rank).memory.capacity_bytes
                for replica in stage.replicas
                for rank in replica.ranks
            }
            rank = max(capacity, key=lambda rank: memory[rank].total / capacity[rank])
            need, has = human_bytes(memory[rank].total), human_bytes(capacity[rank])
            if memory[rank].total > capacity[rank]:
                why = f"with all experts rank {rank} would need {need}, and has {has}"
            else:
                why = f"with all experts on each rank it would fit, too ({need} of {has})"
            say(console, f"stage {_place((p, s), plan)} has ep {experts_of(stage)}: {why}")


def show_terms(console: Console, plan: Plan, cluster: Cluster) -> None:
    """Every term of the time and memory of each stage's first rank."""
    from heteropp.cost.planned import human_bytes, rank_memory, rank_times

    model = plan.model
    total, active = model.elements(), model.active_elements()
    of_token = f", of which a token meets {active / 1e9:,.2f} billion" if active < total else ""
    say(console, f"{model.name} has {total / 1e9:,.2f} billion parameters{of_token}")
    times, memory = rank_times(plan, cluster), rank_memory(plan, cluster)
    firsts = [stage.replicas[0].ranks[0] for p in plan.pipelines for stage in p.stages]
    table = Table(title="what the prediction is made of", box=box.SIMPLE_HEAD)
    table.add_column("term")
    for rank in firsts[:SHOWN_STAGES]:
        table.add_column(f"rank {rank}", justify="right")
    for field in fields(times[0]):
        cells = (f"{getattr(times[r], field.name) * 1e3:.2f} ms" for r in firsts[:SHOWN_STAGES])
        table.add_row(_words(field.name.removesuffix("_s")), *cells)
    for field in fields(memory[0]):
        cells = (human_bytes(getattr(memory[r], field.name)) for r in firsts[:SHOWN_STAGES])
        table.add_row(f"{_words(field.name)} memory", *cells)
    console.print(table)


def as_dict(verdict: Verdict) -> dict:
    """Returns the planner's answer as the object that --json prints."""
    found: dict = {"planner": verdict.planner}
    if verdict.error is not None:
        found["error"] = str(verdict.error)
    if not verdict.judged:
        return found
    result, best = verdict.result, verdict.best
    found |= {
        "plan": asdict(best.plan),
        "step_s": best.simulation.step_s,
        "tokens_per_chip_per_s": best.simulation.tokens_per_chip_per_s,
        "search_s": verdict.search_s,
        "stages": [
            {"pipeline": p, "stage": s, **asdict(share)}
            for (p, s), share in sorted(best.simulation.stage_shares.items())
        ],
    }
    if result is None:  # the nearest plan, which does not fit
        return found
    return found | {
        "cost_s": best.cost_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "steps": result.steps,
        "runners_up": [
            {
                "step_s": judged.simulation.step_s,
                "cost_s": judged.cost_s,
                "why": why_slower(judged, best),
                "plan": asdict(judged.plan),
            }
            for judged in verdict.judged[1:]
        ],
        "left_out": result.notes,
    }


def why_slower(judged: Judged, best: Judged) -> str:
    """What makes a runner-up lose."""
    more = judged.simulation.step_s / best.simulation.step_s - 1
    if judged.cost_s == best.cost_s and abs(more) < 1e-9:
        return "as fast"
    busiest, busiest_best = _busiest_s(judged), _busiest_s(best)
    figure = f"{seconds(judged.simulation.step_s)} ({more:+.1%})"
    if busiest > busiest_best * 1.001:
        return f"{figure}, its busiest stage works {seconds(busiest)}, not {seconds(busiest_best)}"
    if more >= 0:
        return f"{figure}, more of it waiting: its pipeline is longer or less even"
    return f"{figure} simulated, but it costs {judged.cost_s / best.cost_s - 1:+.1%} more"


def say(console: Console, sentence: str) -> None:
    console.print(sentence, soft_wrap=True)


def ranges(ranks: list[int]) -> str:
    """Ranks as "0-3, 8"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _proof(verdict: Verdict) -> str:
    result = verdict.result
    assert result is not None
    best = result.best
    if verdict.planner == "auto":
        bound = f"no plan takes less than {seconds(result.lower_bound_s)}, gap {result.gap:.2%}"
        return f"the fastest plan found; {bound}"
    if verdict.planner != "exact":
        return f"{verdict.planner}'s own cost {seconds(best.cost_s)}"
    bound = f"lower bound {seconds(result.lower_bound_s)}, gap {result.gap:.2%}"
    return f"cost by the formula of section 4.3.2 {seconds(best.cost_s)}, {bound}"


def _busiest_s(judged: Judged) -> float:
    work = max(share.work for share in judged.simulation.stage_shares.values())
    return work * judged.simulation.step_s


def _place(place: tuple[int, int], plan: Plan) -> str:
    pipeline, stage = place
    return f"{stage} of pipeline {pipeline}" if len(plan.pipelines) > 1 else str(stage)


def _words(name: str) -> str:
    return name.replace("_", " ")
