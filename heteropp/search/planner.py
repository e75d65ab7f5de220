"""What every planner takes and gives, and the planners by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heteropp.description.cluster import Cluster
    from heteropp.description.hyperparameters import OptimizerName
    from heteropp.description.plan import Plan, Schedule, ZeroStage
    from heteropp.models.spec import ModelSpec

MOST_SEQUENCES = 65536  # of a global batch
MOST_PARTS = 1024  # of a sequence, or ranks over which the experts of a layer lie
PLANNERS = ("auto", "exact", "heteroauto", "metis", "metis-oom", "autohet", "zorse", "uniform")
# what planner auto may choose where the request does not say it; other planners take the defaults
OPTIONS = ("sequences", "zero_stage", "schedule")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to plan for."""

    cluster: Cluster
    model: ModelSpec
    global_batch: int  # sequences a step
    sequences: int = 1  # of a micro-batch in each replica, for planners that do not choose it
    zero_stage: ZeroStage = 1
    optimizer: OptimizerName = "adamw"
    schedule: Schedule = "1f1b"
    uneven_layers: bool = False  # the stages of one chip type may hold unlike numbers of layers
    stage_degrees: bool = False  # and have unlike tensor- and data-parallel degrees
    open: frozenset[str] = frozenset()  # of OPTIONS: left to planner auto
    # most parts of a sequence; None: planner auto chooses, planner exact cuts none
    context_parallel: int | None = None
    token_slices: int | None = None  # most of a sequence; None: planner auto chooses
    # ranks over which experts lie at most; None: 1, but of planner auto if nothing fits
    expert_parallel: int | None = None
    # times the even number of rows that a rank's experts take at most; None: they are taken even
    expert_capacity: float | None = None
    budget_s: float | None = None  # of planner auto, by the clock; None: by problem size alone


@dataclass(frozen=True)
class Candidate:
    """A plan that a planner proposes, with its cost."""

    plan: Plan
    cost_s: float  # of a step, under the planner's own cost model


@dataclass(frozen=True)
class Result:
    """What a planner found."""

    planner: str
    best: Candidate
    runners_up: list[Candidate]  # best first
    lower_bound_s: float  # no plan of the planner's space costs less
    steps: int  # what the planner looked at, in the unit its paper counts
    notes: list[str] = field(default_factory=list)  # options or chips left out, and why: sentences

    @property
    def gap(self) -> float:
        """How far the best plan's cost may be from the optimum, as a share of the bound."""
        return self.best.cost_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0


class SearchError(ValueError):
    """No plan can be given; the message is one sentence."""


class DoesNotFitError(SearchError):
    """Every plan overruns some chip's or host's memory; `plan` is one that does so least."""

    def __init__(self, message: str, plan: Plan) -> None:
        """plan: the one that overruns memory least."""
        super().__init__(message)
        self.plan = plan


def does_not_fit(plan: Plan, cluster: Cluster) -> DoesNotFitError:
    """Returns the error for the nearest plan; it says where that overruns memory most."""
    from heteropp.cost.capacity import overrun

    return DoesNotFitError(f"no plan fits: in the nearest, {overrun(plan, cluster)}", plan)


def planner(name: str) -> Callable[[Request], Result]:
    """The planner of that name; one file each beside this one. Raises SearchError."""
    if name not in PLANNERS:
        raise SearchError(f"there is no planner {name!r}; expected one of {', '.join(PLANNERS)}")
    search: Callable[[Request], Result] = import_module(
        f"heteropp.search.{name.replace('-', '_')}"
    ).search
    return search
