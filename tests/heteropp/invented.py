"""Traces of stages of no particular sense, in place of real ones: planners must be right anyway."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import pytest

from heteropp.cost import planned, stage_time
from heteropp.cost.tracing import cache, traces
from heteropp.cost.tracing.kind import StageKind
from heteropp.models.llama.model import LlamaModel
from heteropp.search import costs
from heteropp.search.auto import busy
from heteropp.simulator import seat_times

T, U = TypeVar("T"), TypeVar("U")
Invent = Callable[[Callable[..., stage_time.Time]], None]  # the fixture that invents seconds


@contextmanager
def invented_traces_alone() -> Iterator[None]:
    """Every stage has an invented trace, and none is known from before or remembered after."""
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.setattr(traces, "trace_stage", invented_trace)
        patch.setattr(cache, "get", made_anew)
        yield
    forget()


@dataclass(frozen=True)
class ModelOfExperts(LlamaModel):
    """A model that has experts for planners alone, who look at its invented traces."""

    experts: int = 4

    @property
    def expert_count(self) -> int:
        return self.experts

    def expert_parallel_problem(self) -> str | None:
        return None


def made_anew(model: LlamaModel, key: str, make: Callable[[], T], use: Callable[[T], U]) -> U:
    """What heteropp.cost.tracing.cache.get would give, without a file for each invented model."""
    return use(make())


def forget() -> None:
    """Lets go of all that this process has remembered of what stages cost."""
    for module in (traces, stage_time, planned, costs, seat_times, busy):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def invented_trace(model: LlamaModel, kind: StageKind, layers: int) -> traces.StageTrace:
    """What heteropp.cost.tracing.traces.trace_stage would give for a model of no particular sense.

    Tracing thousands of shapes for real takes a minute; planners must be right whatever it says.
    """
    first, last, tp = kind.first, kind.last, kind.tp
    shares, part = kind.token_shares or (model.sequence_length,), kind.cp_index
    sequences = kind.sequences * shares[part] / model.sequence_length
    of_part = f" {shares} {part}" if kind.token_shares else ""
    of_part += f" {kind.spread}" if kind.spread else ""
    generator = random.Random(f"{model.name} {tp} {first} {last}{of_part}")

    def size(fixed: float, per_layer: float, grows: bool = True) -> int:
        """Drawn around those for one rank without tensor parallelism."""
        fixed, per_layer = (x * generator.uniform(0.5, 1.5) for x in (fixed, per_layer))
        share = (0.2 + 0.8 / tp) * (0.6 if kind.spread else 1.0)  # so that it may be worth it
        return int(
            (fixed * (first + last) + per_layer * layers) * share * (sequences if grows else 1)
        )

    def piece(weight: float, grows: bool = True) -> traces.TracedPiece:
        product = (layers, True, size(0, weight * 2e6 / layers, grows), 1000)
        other = (3 * layers, False, 100, size(0, weight * 5e4 / layers, grows))
        ends = (first + last, True, size(weight * 2e6, 0, grows), 1000)
        reduces = ((layers, int(2000 * sequences)),) if tp > 1 and grows else ()
        exchanges = ()
        if kind.token_shares and grows:
            exchanges = ((2 * layers, int(generator.uniform(0, 4000) * kind.sequences)),)
        routed = ()
        if kind.spread and grows:
            routed = ((2 * layers, int(generator.uniform(0, 400) * kind.sequences)),)
        return traces.TracedPiece((product, other, ends), (), reduces, (), exchanges, (), routed)

    # beyond where collectives change their algorithm: their time is then a line over the layers
    held = 70_000 + size(4000, 10_000, grows=False)
    peak = size(8000, 9_000)
    spread, experts = kind.spread is not None, model.expert_count
    if kind.spread is not None:
        experts = kind.spread.shares[0]
    of_experts = size(0, 8_000 * experts, grows=False) if experts else 0
    everywhere = held + (0 if spread else of_experts)
    no_piece = traces.TracedPiece((), (), (), ())
    return traces.StageTrace(
        between_slices_bytes=0,
        forward=piece(1.0),
        backward_input=piece(1.0),
        backward_weight=piece(1.0),
        norm=piece(0.1, grows=False),
        update=piece(0.3, grows=False),
        orthogonal=piece(0.0, grows=False),
        orthogonal_peak_bytes=0,
        expert_norm=piece(0.05, grows=False) if spread else no_piece,
        expert_update=piece(0.2, grows=False) if spread else no_piece,
        expert_update_peak_bytes=2 * of_experts * spread,
        expert_training_bytes=of_experts * spread,
        expert_gradient_bytes=of_experts * spread,
        matrix_bytes=0,
        matrices=0,
        flat_bytes=held + of_experts,
        training_bytes=everywhere,
        gradient_bytes=everywhere,
        constant_bytes=512,
        input_bytes=0 if first else int(1024 * sequences),
        output_bytes=4 if last else int(1024 * sequences),
        kept_bytes=size(2000, 8_000),
        forward_peak_bytes=peak,
        backward_input_peak_bytes=peak + 1000,
        backward_weight_peak_bytes=peak,
        update_peak_bytes=size(8000, 20_000, grows=False),
        put_off_bytes=size(1000, 6_000),
        parts_bytes=0,
    )
