"""Finds the best plan for a model on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from heteropp.api.attention import says_attention, with_usual_attention
from heteropp.api.checking import check_given
from heteropp.api.errors import InputError
from heteropp.api.given import AnyCluster, AnyModel, check_profile, the_cluster, the_model
from heteropp.cost.tracing.scores import kernel_takes_parts
from heteropp.description.hyperparameters import OptimizerName
from heteropp.description.plan import Plan, Schedule, ZeroStage
from heteropp.description.profile import Profile, measured_cluster, read_profile
from heteropp.description.schedules import SLICING
from heteropp.models.spec import LARGEST, ModelSpec
from heteropp.search.planner import MOST_PARTS, MOST_SEQUENCES, PLANNERS, Request

Sequences = Annotated[int, Field(ge=1, le=MOST_SEQUENCES)]


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """The bounds of what a planner can be asked, beside the model and the cluster."""

    global_batch: Sequences
    micro_batch_per_replica: Sequences | None
    schedule: Schedule | None
    zero_stage: Annotated[int, Field(ge=0, le=2)] | None
    optimizer: OptimizerName
    uneven_layers: bool
    stage_degrees: bool
    profile: str | None
    sequence_length: Annotated[int, Field(ge=1, le=LARGEST)] | None
    lora: str | None
    context_parallel: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None
    token_slices: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None
    expert_parallel: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None
    expert_capacity: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None
    budget_s: Annotated[float, Field(gt=0, le=86400)] | None
    trust_remote_code: bool


def plan(
    model: AnyModel,
    cluster: AnyCluster,
    *,
    global_batch: int,
    planner: str = "auto",
    micro_batch_per_replica: int | None = None,
    schedule: Schedule | None = None,
    zero_stage: ZeroStage | None = None,
    optimizer: OptimizerName = "adamw",
    uneven_layers: bool = False,
    stage_degrees: bool = False,
    sequence_length: int | None = None,
    lora: str | None = None,
    profile: Path | None = None,
    context_parallel: int | None = None,
    token_slices: int | None = None,
    expert_parallel: int | None = None,
    expert_capacity: float | None = None,
    budget_s: float | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Returns the best plan, with its prediction, as heteropp-search does.

    model: a preset's name, a model file, a Hugging Face folder, a spec, or a function at the top of
    a file that returns a ModelDefinition (also as "file.py:function").
    cluster: a preset's name, a cluster file, or a cluster.
    global_batch: sequences of an optimizer step; micro_batch_per_replica: sequences of a
    micro-batch in each replica. What is None of this, the schedule and the ZeRO stage, planner auto
    chooses; the others take 1, 1F1B and 1. uneven_layers and stage_degrees: of planner exact,
    whether stages of one chip type may hold unlike numbers of layers, and have unlike degrees.
    context_parallel: the most ranks over which planners auto and exact cut sequences; None: planner
    auto takes 8 where they are long or nothing fits without, and planner exact cuts none; other
    planners never do. token_slices: the most slices in which planner auto lets pipelines run each
    sequence; None: 16, of 1,024 tokens or more, where it also cuts sequences over ranks.
    expert_parallel: the most ranks over which these two let the experts of a layer lie; None: 1,
    but of planner auto 64 where nothing fits without. expert_capacity: how many times the even
    number of a micro-batch's rows experts that lie over ranks take at most, for which memory then
    has room; None: rows are taken to be even. budget_s: of planner auto, by the clock, on which the
    plan then depends.
    sequence_length: tokens, in place of the model's. lora: what trains beside a Hugging Face
    folder's frozen weights, such as "r=16,alpha=32,targets=q_proj+v_proj". profile: what
    heteropp-profile measured, in place of chip files. trust_remote_code: whether code in a Hugging
    Face folder, of a family that transformers lacks, may run.

    Raises FileError, InputError or SearchError, one sentence each; of these, DoesNotFitError has
    the nearest plan.
    """
    from heteropp.search.judge import ask

    if planner not in PLANNERS:
        raise InputError(f"planner is {planner}; expected one of {', '.join(PLANNERS)}")
    verdict = ask(
        planner,
        request(
            model,
            cluster,
            planner=planner,
            global_batch=global_batch,
            micro_batch_per_replica=micro_batch_per_replica,
            schedule=schedule,
            zero_stage=zero_stage,
            optimizer=optimizer,
            uneven_layers=uneven_layers,
            stage_degrees=stage_degrees,
            sequence_length=sequence_length,
            lora=lora,
            profile=profile,
            context_parallel=context_parallel,
            token_slices=token_slices,
            expert_parallel=expert_parallel,
            expert_capacity=expert_capacity,
            budget_s=budget_s,
            trust_remote_code=trust_remote_code,
        ),
    )
    if verdict.error is not None:
        raise verdict.error
    return verdict.best.plan


def request(
    model: AnyModel,
    cluster: AnyCluster,
    *,
    planner: str,
    global_batch: int,
    micro_batch_per_replica: int | None,
    schedule: Schedule | None,
    zero_stage: ZeroStage | None,
    optimizer: OptimizerName,
    uneven_layers: bool,
    stage_degrees: bool,
    sequence_length: int | None,
    lora: str | None,
    profile: Path | None,
    context_parallel: int | None,
    token_slices: int | None,
    expert_parallel: int | None,
    expert_capacity: float | None,
    budget_s: float | None,
    trust_remote_code: bool,
) -> Request:
    """Returns what a planner, or "all" of them, is asked. Raises FileError or InputError."""
    _check_planner(
        planner,
        uneven_layers=uneven_layers,
        stage_degrees=stage_degrees,
        context_parallel=context_parallel,
        token_slices=token_slices,
        expert_parallel=expert_parallel,
        expert_capacity=expert_capacity,
        budget_s=budget_s,
    )
    check_given(
        PlanningOptions,
        {
            "global_batch": global_batch,
            "micro_batch_per_replica": micro_batch_per_replica,
            "schedule": schedule,
            "zero_stage": zero_stage,
            "optimizer": optimizer,
            "uneven_layers": uneven_layers,
            "stage_degrees": stage_degrees,
            "sequence_length": sequence_length,
            "lora": lora,
            "profile": profile,
            "context_parallel": context_parallel,
            "token_slices": token_slices,
            "expert_parallel": expert_parallel,
            "expert_capacity": expert_capacity,
            "budget_s": budget_s,
            "trust_remote_code": trust_remote_code,
        },
    )
    asked = {
        "sequences": micro_batch_per_replica,
        "zero_stage": zero_stage,
        "schedule": schedule,
    }
    spec = the_model(model, sequence_length, lora, trust_remote_code)
    machines = the_cluster(cluster)
    measured = None if profile is None else read_profile(Path(profile))
    if not says_attention(model):
        like = None if measured is None else measured.model
        spec = with_usual_attention(spec, machines, like)
    if profile is not None and measured is not None:
        check_profile(Path(profile), measured, spec)
        machines = measured_cluster(machines, measured)
    if (context_parallel or 1) > 1:
        _check_parts(spec, measured)
    if (token_slices or 1) > 1:
        _check_slices(spec, measured, schedule)
    if (expert_parallel or 1) > 1 or expert_capacity is not None:
        _check_experts(spec)
    if expert_capacity is not None and expert_parallel == 1:
        raise InputError(
            f"expert capacity is {expert_capacity:g} and expert parallelism 1, which spreads no "
            "experts; expected one of the two"
        )
    return Request(
        cluster=machines,
        model=spec,
        global_batch=global_batch,
        sequences=micro_batch_per_replica or 1,
        zero_stage=1 if zero_stage is None else zero_stage,
        optimizer=optimizer,
        schedule=schedule or "1f1b",
        uneven_layers=uneven_layers,
        stage_degrees=stage_degrees,
        open=frozenset(name for name, value in asked.items() if value is None),
        context_parallel=context_parallel,
        token_slices=token_slices,
        expert_parallel=expert_parallel,
        expert_capacity=expert_capacity,
        budget_s=budget_s,
    )


def _check_planner(
    planner: str,
    *,
    uneven_layers: bool,
    stage_degrees: bool,
    context_parallel: int | None,
    token_slices: int | None,
    expert_parallel: int | None,
    expert_capacity: float | None,
    budget_s: float | None,
) -> None:
    """Raises InputError where an option that is given is not one of the planner's."""
    for what, is_asked in (("uneven layers", uneven_layers), ("stage degrees", stage_degrees)):
        if is_asked and planner not in ("exact", "all"):
            raise InputError(f"{what} are for planner exact; {planner} takes no such option")
    if budget_s is not None and planner not in ("auto", "all"):
        raise InputError(f"a budget is for planner auto; {planner} searches until it is done")
    asked = {
        "context parallelism": (context_parallel, "cuts no sequences"),
        "expert parallelism": (expert_parallel, "spreads no experts"),
        "expert capacity": (expert_capacity, "spreads no experts"),
    }
    for what, (value, why) in asked.items():
        if value is not None and planner not in ("auto", "exact", "all"):
            raise InputError(f"{what} is for planners auto and exact; {planner} {why}")
    if token_slices is not None and planner not in ("auto", "all"):
        raise InputError(f"token slices are for planner auto; {planner} runs sequences whole")
    if planner == "exact" and expert_capacity is not None and expert_parallel is None:
        raise InputError(
            "expert capacity is for experts that lie over ranks; planner exact spreads none unless "
            "expert parallelism is given"
        )


def _check_parts(model: ModelSpec, measured: Profile | None) -> None:
    """Raises InputError where no sequence can be cut over ranks, as was asked for."""
    _check_cut("context parallelism", model.context_parallel_problem(), model, measured)


def _check_slices(model: ModelSpec, measured: Profile | None, schedule: Schedule | None) -> None:
    """Raises InputError where no sequence can run in slices, as was asked for."""
    _check_cut("token slices", model.token_slices_problem(), model, measured)
    if schedule is not None and schedule not in SLICING:
        raise InputError(
            f"token slices: schedule {schedule} runs none; expected {' or '.join(SLICING)}"
        )


def _check_cut(what: str, problem: str | None, model: ModelSpec, measured: Profile | None) -> None:
    if problem:
        raise InputError(f"{what}: {problem}")
    if measured is not None:
        raise InputError(f"{what}: profiles measure whole sequences; plan without one of the two")
    if not kernel_takes_parts(model):
        raise InputError(
            f"{what}: the model's attention is fused, through a window or with a soft "
            "cap, for which chips have no kernel of parts of sequences; expected explicit attention"
        )


def _check_experts(model: ModelSpec) -> None:
    """Raises InputError where no expert can lie elsewhere, as was asked for."""
    if problem := model.expert_parallel_problem():
        raise InputError(f"expert parallelism: {problem}")
