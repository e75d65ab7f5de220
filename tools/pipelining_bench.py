"""heteropp's executor beside torch.distributed.pipelining: tokens per second of a training step.

The same model, stage modules, number of processes and threads, and transport; both clip by the norm
over all ranks and update with AdamW. Every contestant has processes of its own: ours as
heteropp-train sets them up, which keep the memory that a step frees, and torch's with the
allocator's defaults. In each round each takes a step, one after another; the rows compare medians
over the rounds. Beside it a layer of experts that lie over two ranks is held against a plain
program of all_to_all_single, and layers whose sequence is cut over ranks against PyTorch's
context_parallel, with whichever of its ways to pass keys and values on is the faster. The spread is
that of the middle half of a contestant's steps; the CPU is that of all its ranks together, their
waits included. With slack 1 a stage holds one micro-batch more than 1F1B's own number: the first
stages run a forward more ahead, the last puts a weight gradient off. Figures are asked of two
stages, and of two ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import typer
from evidence import Row, row
from pipelines.context_layers import MODEL as CUT_MODEL
from pipelines.context_layers import WAYS, ContextRank
from pipelines.expert_layers import ROWS, ExpertRank
from pipelines.ranks import BadInput, Failed, Ranks, chosen
from pipelines.torch_ring import NoRing, teach
from pipelines.turns import Case, report, take_turns

from dicomm.bench.quiet import Quiet
from heteropp.description.model import read_model
from heteropp.description.plan import Schedule
from heteropp.models.llama.model import LlamaModel
from hyperhetero.cli import CommandLine

STAGES = (2, 4)  # that are measured; as many ranks share a sequence
ASKED = 2  # of them, whose figures are
MODEL = LlamaModel(
    name="Llama-like",
    layers=8,
    hidden=256,
    heads=4,
    kv_heads=4,
    intermediate=704,
    vocab=2048,
    sequence_length=256,
)
MICRO_BATCHES, MICRO_BATCH = 8, 2
MINISTAGES = 2  # the most that a stage has
# name: schedule, ministages, slack
OURS: dict[str, tuple[Schedule, int, int]] = {
    "1f1b": ("1f1b", 1, 0),
    "1f1b, slack 1": ("1f1b", 1, 1),
    "zb-h1": ("zb-h1", 1, 0),
    "zb-v": ("zb-v", MINISTAGES, 0),
}
PEERS = {"torch 1F1B": "1f1b", "torch ZBV": "zb-v"}  # whose stages they have
# what is asked: the best of ours against whom, and how many times its tokens a second
BARS = {
    "1F1B": (("1f1b", "1f1b, slack 1"), "torch 1F1B", 1.10),
    "zero bubble": (("zb-h1", "zb-v"), "torch ZBV", 1.05),
}
EXPERTS = {"experts": False, "plain all_to_all_single": True}  # whether they are the peer's
EXPERT_RANKS = 2
LOSS_TOLERANCE = 1e-4  # relative: contestants take the same steps
GRADIENT_TOLERANCE = 1e-5  # relative, of the norm of each weight's

app = CommandLine()


@dataclass(frozen=True)
class Steps:
    """The steps of one contestant."""

    seconds: list[float]
    cpu_s: list[float]  # of all its ranks


Samples = dict[str, Steps]  # by contestant


class Rank:
    """A rank of one contestant: our executor or torch.distributed.pipelining."""

    def __init__(
        self, model: LlamaModel, backend: str, stages: int, name: str, rank: int, store: Any
    ) -> None:
        import torch
        from pipelines.stages import OurPipeline, even_plan, modules, tokens
        from pipelines.torch_pipelining import TorchPipelining

        from heteropp.runtime.ranks.device import open_device
        from heteropp.runtime.ranks.transport import Coordinates, connect

        if backend == "dicomm":
            import dicomm.distributed  # noqa: F401
        connect(store, rank, stages, backend)
        schedule, ministages, slack = OURS[PEERS.get(name, name)]
        plan = even_plan(model, schedule, stages, MICRO_BATCHES, MICRO_BATCH, ministages, slack)
        place, host = Coordinates.of(plan, rank), torch.device("cpu")
        held = modules(plan, place, host)
        self.contestant: TorchPipelining | OurPipeline
        if name in PEERS:
            self.contestant = TorchPipelining(plan, held, *tokens(plan, host))
        else:
            device = open_device("cpu", "", "")
            self.contestant = OurPipeline(plan, place, held, device.clock)

    def step(self, _name: str) -> tuple[float, float, float]:
        """Runs a step; returns its seconds, those that this rank computed, and its loss.

        The loss is 0 where torch's rank does not know it.
        """
        import torch.distributed as dist

        dist.barrier()
        start_s, start_cpu_s = perf_counter(), process_time()
        result = self.contestant.step()
        dist.barrier()
        return perf_counter() - start_s, process_time() - start_cpu_s, result.loss


def measure(model: LlamaModel, backend: str, stages: int, rounds: int) -> tuple[Samples, Quiet]:
    """Runs each contestant's steps, and leaves the first ones out. Raises Failed."""
    from heteropp.runtime.step.whole import STEPS

    cases = [(name,) for name in [*PEERS, *OURS]]
    with ExitStack() as stack:
        contestants = {
            (name,): stack.enter_context(Ranks(stages, partial(Rank, model, backend, stages, name)))
            for (name,) in cases
        }
        # our executor first learns which stages wait: see heteropp/runtime/step/whole.py
        what = f"training {stages} stages over {backend}"
        answers, quiet = take_turns(what, contestants, rounds, untimed=STEPS)
    return samples_of(answers), quiet


def samples_of(answers: Mapping[Case, list[list[Any]]]) -> Samples:
    """Returns the steps of contestants that train alike. Raises Failed where they do not."""
    for turn in zip(*answers.values(), strict=True):
        losses = [max(loss for *_, loss in ranks) for ranks in turn]
        if max(losses) - min(losses) > LOSS_TOLERANCE * min(losses):
            named = {name: loss for (name,), loss in zip(answers, losses, strict=True)}
            raise Failed(f"the contestants do not train alike: their losses are {named}")
    return {
        name: Steps(
            seconds=[max(seconds for seconds, _, _ in ranks) for ranks in steps],
            cpu_s=[sum(cpu_s for _, cpu_s, _ in ranks) for ranks in steps],
        )
        for (name,), steps in answers.items()
    }


def measure_experts(backend: str, rounds: int) -> tuple[list[Row], Quiet]:
    """Holds a layer of experts over two ranks against a plain program's. Raises Failed."""
    with ExitStack() as stack:
        contestants: dict[Case, Ranks] = {
            (name,): stack.enter_context(
                Ranks(EXPERT_RANKS, partial(ExpertRank, backend, EXPERT_RANKS, plain))
            )
            for name, plain in EXPERTS.items()
        }
        answers, quiet = take_turns(f"experts over {backend}", contestants, rounds)
    ours, plain = EXPERTS
    what = f"experts of {EXPERT_RANKS} ranks over {backend}"
    amount = EXPERT_RANKS * ROWS
    return against(what, "rows/s", amount, samples_of(answers), ours, plain, 1.0), quiet


def measure_context(backend: str, ranks: int, rounds: int) -> tuple[list[Row], Quiet]:
    """Holds layers whose sequence is cut over ranks against PyTorch's. Raises Failed."""
    with ExitStack() as stack:
        contestants: dict[Case, Ranks] = {
            (name,): stack.enter_context(
                Ranks(ranks, partial(ContextRank, CUT_MODEL, backend, ranks, name))
            )
            for name in WAYS
        }
        what = f"a sequence over {ranks} ranks over {backend}"
        answers, quiet = take_turns(what, contestants, rounds)
        gradients = {name: of.call("gradients")[0] for (name,), of in contestants.items()}
    check_gradients(gradients)
    samples = samples_of(answers)
    ours, *theirs = WAYS
    peer = min(theirs, key=lambda name: statistics.median(samples[name].seconds))
    what = f"context parallel of {ranks} ranks over {backend}"
    bar = 1.0 if ranks == ASKED else None
    return against(what, "tokens/s", CUT_MODEL.sequence_length, samples, ours, peer, bar), quiet


def check_gradients(gradients: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises Failed where contestants have unlike gradients of a tensor."""
    import numpy

    norm = numpy.linalg.norm
    (one, ours), *others = gradients.items()
    for other, theirs in others:
        for tensor, own in ours.items():
            apart = norm(own - theirs[tensor]) / norm(own)
            if not apart <= GRADIENT_TOLERANCE:
                raise Failed(
                    f"the contestants do not train alike: the gradients of {tensor} by {one} and "
                    f"by {other} are {apart:.1e} of their norm apart; expected at most "
                    f"{GRADIENT_TOLERANCE:.0e}"
                )


def against(
    what: str, unit: str, amount: int, samples: Samples, ours: str, peer: str, bar: float | None
) -> list[Row]:
    """Returns the rows of two contestants. amount: what a step goes through, in `unit` x s."""
    rate = {name: amount / statistics.median(samples[name].seconds) for name in (ours, peer)}
    return [
        row(what, unit, rate[ours], peer=rate[peer], peer_name=peer, better="higher"),
        row(f"{what}, against {peer}", "x", rate[ours] / rate[peer], bar=bar, better="higher"),
        row(f"{what}, spread", "%", spread(samples[ours].seconds),
            peer=spread(samples[peer].seconds), peer_name=peer),
    ]  # fmt: skip


def rows_of(model: LlamaModel, where: str, asked: bool, samples: Samples) -> list[Row]:
    """Returns the rows of one number of stages and transport, which `where` says."""
    tokens = MICRO_BATCHES * MICRO_BATCH * model.sequence_length
    rate = {name: tokens / statistics.median(steps.seconds) for name, steps in samples.items()}
    rows = []
    for what, (ours, peer, bar) in BARS.items():
        for name in ours:
            rows.append(
                row(f"{name}, {where}", "tokens/s", rate[name], peer=rate[peer],
                    peer_name=peer, better="higher")
            )  # fmt: skip
        best = max(ours, key=rate.__getitem__)
        mine, theirs = samples[best], samples[peer]
        rows += [
            row(f"{what}, {where}, best against {peer}", "x", rate[best] / rate[peer],
                bar=bar if asked else None, better="higher"),
            row(f"{what}, {where}, spread of the best", "%", spread(mine.seconds),
                peer=spread(theirs.seconds), peer_name=peer),
            row(f"{what}, {where}, CPU of the best", "s/step", statistics.median(mine.cpu_s),
                peer=statistics.median(theirs.cpu_s), peer_name=peer),
        ]  # fmt: skip
    return rows


def spread(seconds: list[float]) -> float:
    """Returns how far apart the quartiles are, in percent of the median; 0 of one sample."""
    if len(seconds) < 2:
        return 0.0
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return 100 * (high - low) / median


@app.command(
    help=__doc__,
    epilog="Examples:  tools/pipelining-bench  |  tools/pipelining-bench --transport gloo --json",
)
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each; medians count.")] = 9,
    transport: Annotated[
        list[str] | None, typer.Option(help="gloo or dicomm, repeatable; both if absent.")
    ] = None,
    stages: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Numbers of stages, repeatable; 2, then 4 if absent."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A model file; 8 layers of 256 if absent.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the evidence as JSON.")] = False,
) -> None:
    report("pipelining-bench", __doc__, parts(rounds, transport, stages, model), json)


def parts(
    rounds: int, transport: list[str] | None, stages: list[int] | None, model: Path | None
) -> Iterator[tuple[list[Row], Quiet]]:
    """Yields the rows of each number of stages and transport, and how quiet the machine was.

    Raises BadInput, FileError or Failed.
    """
    trained = read_model(model) if model else MODEL
    backends = chosen(transport)
    most = trained.layers // MINISTAGES
    for count in stages or ():
        if count > most:
            raise BadInput(
                f"--stages is {count}; expected at most {most} of a model of {trained.layers} "
                "layers, two ministages each"
            )
    for count, backend in product(stages or STAGES, backends):
        samples, quiet = measure(trained, backend, count, rounds)
        where = f"{count} stages over {backend}"
        yield rows_of(trained, where, count == ASKED, samples), quiet
    for backend in backends:
        yield measure_experts(backend, rounds)
    try:
        teach()
    except NoRing as error:
        yield [row("missing: torch's context_parallel", "", None, peer_name=str(error))], quiet
        return
    for ranks, backend in product(STAGES, backends):
        yield measure_context(backend, ranks, rounds)


if __name__ == "__main__":
    app()
