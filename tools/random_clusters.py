"""The default planner on random clusters of shipped chips: rows of planner-bench.

Every second cluster's NICs are redrawn from 0.3 to 32 GB/s. Beside the default planner's step stand
the steps that every other planner, the exact one with its options, and a longer search find. In
place of the longer search may stand the best plan that an earlier one found.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import typer
from evidence import Row, row
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ditorch.chips import ChipSpec, load_chip
from heteropp.cost.capacity import fits
from heteropp.cost.planned import check_cluster
from heteropp.description.cluster import Cluster, Node, in_order
from heteropp.description.model import read_model
from heteropp.description.plan import Plan, PlanError
from heteropp.description.used_chips import used_cluster
from heteropp.search.judge import Verdict, ask
from heteropp.search.planner import OPTIONS, PLANNERS, Request
from heteropp.simulator.simulate import simulate
from hyperhetero.output import write_file

CHIPS = (
    *("a", "a100", "a100-40gb", "a10g", "b", "b200", "c", "d", "gh200", "h100-nvl", "h20", "h800"),
    *("rtx-2080-ti", "rtx-3090", "t4", "titan-rtx", "v100"),
)
MODELS = (
    *("gpt2", "gpt2-xl", "autohet-bert-large", "autohet-llama-6.7b"),
    *("zorse-a-llama-7b", "zorse-b-llama-13b"),
)
SLOWEST_NIC, FASTEST_NIC = 0.3e9, 32e9  # bytes a second
FEW_CHIPS = 16  # up to which the default search also has to be quick
INFINITE = float("inf")

Steps = list[tuple[float, Plan]]  # plans, each with the seconds of its step


@dataclass(frozen=True)
class Found:
    """What was found for one request that has a plan."""

    __pydantic_config__ = ConfigDict(ser_json_inf_nan="constants")
    seed: int
    longer_s: float  # that the longer search was given
    step_s: float
    search_s: float
    gap: float  # to the bound, relative
    best_s: float  # of any search
    best_plan: Plan  # the plan whose step that is
    beaten: bool  # by another planner or a runner-up
    worse: float | None  # step with what should help, over that without; None: not searched
    few_chips: bool

    @property
    def behind(self) -> float:
        """How much longer the step is than the best found, relative."""
        return self.step_s / self.best_s - 1

    @property
    def longer_with_help(self) -> float:
        """How much longer the step is with what should help, relative; 0 where that is unknown."""
        return (self.worse or 1.0) - 1


FOUND = TypeAdapter(Found)


class Kept:
    """A file with a line for each cluster that is done, from which a later run goes on."""

    def __init__(self, file: Path) -> None:
        """Reads what earlier runs have kept, if any. Raises typer.BadParameter."""
        self._file = file
        if file.exists() and not file.is_file():
            raise typer.BadParameter(f"{file} is no regular file, as a file of results has to be")
        lines = file.read_bytes().splitlines() if file.exists() else []
        try:
            self._found = [FOUND.validate_json(line, strict=True) for line in lines]
        except ValidationError:
            problem = f"{file} is no file of results that --keep has written"
            raise typer.BadParameter(problem) from None

    def get(self, seed: int, longer_s: float, helped: bool) -> Found | None:
        """Returns what was found for a cluster with those options, or None."""
        for one in self._found:
            if (one.seed, one.longer_s) == (seed, longer_s) and (one.worse or not helped):
                return one
        return None

    def since(self, seed: int) -> list[Found]:
        """Returns the best that was found for each cluster from a seed on, by seed."""
        best: dict[int, Found] = {}
        for one in sorted(self._found, key=lambda one: (one.seed, one.best_s)):
            if one.seed >= seed:
                best.setdefault(one.seed, one)
        return list(best.values())

    def add(self, found: Found) -> None:
        """Writes one more; the file is there whole at any time."""
        self._found.append(found)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file, b"".join(FOUND.dump_json(one) + b"\n" for one in self._found))


def searched(
    count: int,
    seed: int,
    longer_s: float,
    helped: bool,
    kept: Kept | None,
    say: Callable[[str], None],
) -> list[Found]:
    """Draws clusters until so many have a plan, and searches each.

    longer_s: of the longer search on each, by the clock. helped: search also with what should help.
    kept: results that are taken from there, and go there. say: is told how far this is.
    """
    found: list[Found] = []
    for number in range(seed, seed + 4 * count):  # some have no plan
        if len(found) == count:
            break
        say(_so_far(found, count))
        one = kept.get(number, longer_s, helped) if kept else None
        if one is None:
            one = measured(number, longer_s, helped)
            if one and kept:
                kept.add(one)
        if one:
            found.append(one)
    return found


def compared(known: list[Found], helped: bool, say: Callable[[str], None]) -> list[Found]:
    """Searches clusters whose best plans are known, which stand in for longer searches.

    Raises typer.BadParameter where a plan is not one for its cluster, or a cluster has none now.
    """
    found: list[Found] = []
    for before in known:
        say(_so_far(found, len(known)))
        one = measured(before.seed, before.longer_s, helped, before.best_plan)
        if one is None:
            raise typer.BadParameter(
                f"the default planner finds no plan for cluster {before.seed}, of which one is kept"
            )
        found.append(one)
    return found


def rows(found: list[Found], seed: int, helped: bool) -> list[Row]:
    """Returns what was found in all, as evidence; seed: from which the clusters are."""
    if not found:
        return []
    behind = 100 * statistics.median(one.behind for one in found)
    last = max(found, key=lambda one: one.behind)
    gaps = [100 * one.gap for one in found]
    name = f"{len(found)} random clusters from seed {seed}"
    quick = [one.search_s for one in found if one.few_chips]
    result = [
        row(f"{name}: step behind the best found, median", "%", behind, bar=0.0),
        row(
            f"{name}: step behind the best found, worst (seed {last.seed})",
            "%",
            100 * last.behind,
            bar=3.0,
        ),
        row(f"{name}: beaten by a planner or runner-up", "", sum(f.beaten for f in found), bar=0.0),
        row(f"{name}: gap to the bound, median", "%", statistics.median(gaps), bar=5.0),
        row(f"{name}: default search, median", "s", statistics.median(f.search_s for f in found)),
    ]
    if quick:
        name_quick = f"{name}: default search of {FEW_CHIPS} chips or fewer, median"
        result.append(row(name_quick, "s", statistics.median(quick)))
    if helped:
        last = max(found, key=lambda one: one.longer_with_help)
        name_worse = f"{name}: step longer with what helps, worst (seed {last.seed})"
        result.append(row(name_worse, "%", 100 * last.longer_with_help, bar=0.5))
    return result


def _so_far(found: list[Found], count: int) -> str:
    said = f"searching: {len(found)} of {count} random clusters are done"
    if not found:
        return said
    worst = 100 * max(one.behind for one in found)
    return f"{said}, the worst step is {worst:.2f} % behind the best found"


def drawn(seed: int) -> Request:
    generator = random.Random(f"cluster {seed}")
    nodes: list[Node] = []
    for name in generator.sample(CHIPS, generator.choice([1, 2, 2, 3])):
        chip = load_chip(name)
        if seed % 2:
            speed = SLOWEST_NIC * (FASTEST_NIC / SLOWEST_NIC) ** generator.random()
            chip = replace(chip, links=replace(chip.links, nic_bytes_per_s=speed))
        size = generator.choice([n for n in (1, 2, 4, 8) if n <= chip.chips_per_node])
        nodes += [Node(name, chip, range(size))] * generator.choice([1, 1, 2, 4])
    return Request(
        cluster=Cluster(f"random {seed}", in_order(nodes)),
        model=read_model(generator.choice(MODELS)),
        global_batch=generator.choice([16, 32, 64, 128]),
        open=frozenset(OPTIONS),
    )


def measured(seed: int, longer_s: float, helped: bool, known: Plan | None = None) -> Found | None:
    """Returns None where the default planner finds no plan for the cluster drawn.

    known: a plan for it that stands in for the longer search, which found it earlier.
    """
    request = drawn(seed)
    ask("exact", request, 1)  # traces the model
    began_s = time.process_time()
    verdict = ask("auto", request)
    search_s = time.process_time() - began_s
    if not verdict.judged or verdict.result is None:
        return None
    own, *others = _steps(verdict)
    others += [step for other in _others(request) for step in _steps(other)]
    if known:
        longer = _simulated(known, seed, request)
    else:
        longer = _steps(ask("auto", replace(request, budget_s=longer_s), 1))
    own_s = own[0]
    best_s, best_plan = min([own, *longer, *others], key=itemgetter(0))
    helps: list[Callable[[Request], Request]] = list(HELPS) if helped else []
    after = [step_s(ask("auto", change(request), 1)) for change in helps]
    return Found(
        seed=seed,
        longer_s=longer_s,
        step_s=own_s,
        search_s=search_s,
        gap=own_s / verdict.result.lower_bound_s - 1,
        best_s=best_s,
        best_plan=replace(best_plan, prediction=None),
        beaten=min(others, default=own, key=itemgetter(0))[0] < own_s,
        worse=max(after) / own_s if after else None,
        few_chips=request.cluster.world_size <= FEW_CHIPS,
    )


def _simulated(known: Plan, seed: int, request: Request) -> Steps:
    """Returns a kept plan with its step as costs are now, or nothing if it no longer fits.

    Raises typer.BadParameter where it is no plan for the request.
    """
    try:
        cluster = used_cluster(known, request.cluster)
        check_cluster(known, cluster)
    except PlanError as error:
        raise typer.BadParameter(f"the plan kept for cluster {seed}: {error}") from None
    if (known.model, known.global_batch) != (request.model, request.global_batch):
        raise typer.BadParameter(
            f"the plan kept for cluster {seed} is for {known.model.name} with a batch of"
            f" {known.global_batch}; expected {request.model.name} with {request.global_batch}"
        )
    return [(simulate(known, cluster).step_s, known)] if fits(known, cluster) else []


def _steps(verdict: Verdict) -> Steps:
    return [(judged.simulation.step_s, judged.plan) for judged in verdict.judged]


def step_s(verdict: Verdict) -> float:
    return min((seconds for seconds, _ in _steps(verdict)), default=INFINITE)


def _others(request: Request) -> Iterator[Verdict]:
    for name in PLANNERS:
        if name != "auto":
            yield ask(name, request)
    for degrees in (False, True):
        yield ask("exact", replace(request, uneven_layers=True, stage_degrees=degrees))


# what should help


def _with_chips(request: Request, change: Callable[[ChipSpec], ChipSpec]) -> Request:
    return _on(request, [replace(node, chip=change(node.chip)) for node in request.cluster.nodes])


def _on(request: Request, nodes: list[Node]) -> Request:
    return replace(request, cluster=replace(request.cluster, nodes=in_order(nodes)))


def more_memory(request: Request) -> Request:
    def larger(chip: ChipSpec) -> ChipSpec:
        capacity = chip.memory.capacity_bytes * 5 // 4
        return replace(chip, memory=replace(chip.memory, capacity_bytes=capacity))

    return _with_chips(request, larger)


def faster_chips(request: Request) -> Request:
    def faster(chip: ChipSpec) -> ChipSpec:
        efficiency = min(1.0, 1.1 * chip.compute.efficiency)
        return replace(chip, compute=replace(chip.compute, efficiency=efficiency))

    return _with_chips(request, faster)


def faster_links(request: Request) -> Request:
    def faster(chip: ChipSpec) -> ChipSpec:
        speed = 2 * chip.links.nic_bytes_per_s
        return replace(chip, links=replace(chip.links, nic_bytes_per_s=speed))

    return _with_chips(request, faster)


def one_node_more(request: Request) -> Request:
    return _on(request, [*request.cluster.nodes, request.cluster.nodes[-1]])


def twice_the_nodes(request: Request) -> Request:
    return _on(request, [*request.cluster.nodes, *request.cluster.nodes])


HELPS = (more_memory, faster_chips, faster_links, one_node_more, twice_the_nodes)
