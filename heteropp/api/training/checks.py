"""What heteropp-train is asked for, held against the files and the machine before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heteropp.api.errors import InputError
from heteropp.api.given import measured_as
from heteropp.api.proof import prove
from heteropp.description.files import make_folder
from heteropp.description.hyperparameters import Hyperparameters
from heteropp.description.plan import Plan
from heteropp.runtime.measuring.trackers.tracking import Tracking, TrackingError
from hyperhetero.output import LOCK, held
from hyperhetero.progress import Status

if TYPE_CHECKING:
    from heteropp.data.sequences import AttentionWithin
    from heteropp.data.token_file import TokenFile
    from heteropp.description.cluster import Cluster
    from heteropp.state.checkpoint.manifest import Checkpoint


ELASTIC_ALONE = (
    "availability",
    "node_name",
    "notice",
    "disk",
    "remote",
    "keep_memory_every",
    "keep_disk_every",
    "keep_remote_every",
)


def plan_files(plan: Path | None, buckets: list[Path] | None, documents: int | None) -> list[Path]:
    """Raises InputError unless there is one plan, or a plan for each length of sequence."""
    if (plan is None) == (not buckets):
        raise InputError("give one --plan, or a --bucket for each length of sequence")
    if buckets and documents is None:
        raise InputError("--bucket needs --documents: how many of them make a step")
    if documents is not None and not buckets:
        raise InputError("--documents is for --bucket; a --plan says itself what makes a step")
    return buckets or [plan]  # type: ignore[list-item]


def check_runs(plan: Plan, path: Path, launched: bool = True) -> None:
    """Raises InputError for a plan that this release cannot run, or on another number of ranks."""
    if problem := plan.model.training_problem():
        raise InputError(f"{path}: {problem}")
    world_size = os.environ.get("WORLD_SIZE") if launched else None
    if world_size is not None and int(world_size) != plan.world_size:
        raise InputError(f"{path} needs {plan.world_size} ranks; {world_size} were started")


def check_families(plans: Sequence[Plan], elastic: bool) -> None:
    """Holds the plans' families against transformers, where it knows them and none has done so.

    elastic: whether plans with other degrees of tensor parallelism may follow. Raises InputError.
    """
    models = []
    for plan in plans:
        stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
        degrees = {(stage.tp, stage.sequence_parallel) for stage in stages}
        models.append((plan.model, degrees | ({(1, False), (2, False)} if elastic else set())))
    with Status("holding the model's family against transformers"):
        prove(models)


def check_not_elastic(given: Collection[str]) -> None:
    """given: names of parameters on the command line. Raises InputError for those of --elastic."""
    stray = [f"--{name.replace('_', '-')}" for name in ELASTIC_ALONE if name in given]
    if stray:
        raise InputError(f"{', '.join(stray)} {'are' if len(stray) > 1 else 'is'} for --elastic")


def check_elastic(
    cluster: Path | None,
    profile: Path | None,
    bucket: list[Path] | None,
    resume_from: int | None,
    restarts: int,
    force: bool,
) -> None:
    """Raises InputError for options that an elastic job has no use for, or lacks."""
    if cluster is None:
        raise InputError("--elastic needs --cluster: it names the nodes, with --device cpu, too")
    for option, given, why in (
        ("--profile", profile is not None, "the plans that it searches are of the chips' files"),
        ("--bucket", bool(bucket), "one plan at a time changes into another"),
        ("--resume-from", resume_from is not None, "it goes on from the newest step it finds"),
        ("--restarts", restarts > 0, "it starts again by itself"),
        ("--force", force, "the plans that it searches fit"),
    ):
        if given:
            raise InputError(f"{option} is not for --elastic: {why}")


def hold(stack: ExitStack, output: Path, begun: bool) -> None:
    """Keeps other runs out of the folder, which is made, until the command ends.

    begun: a start of the same job had it before. Raises FileError or LockError.
    """
    make_folder(output)
    stack.enter_context(held(output / LOCK, str(output), own=begun))


def check_p2p(p2p: str | None, device: str) -> None:
    """Raises InputError for an unknown strategy, and for one where there are no chips."""
    if p2p not in (None, "device-direct", "cpu-mediated"):
        raise InputError(f"--p2p is {p2p}; expected device-direct or cpu-mediated")
    if p2p and device == "cpu":
        raise InputError("--p2p says how dicomm reaches chips; --device cpu has none")


def check_tracking(tracking: Tracking, here: bool) -> None:
    """Raises InputError where the figures cannot go to what is asked for.

    here: whether rank 0 will be on this machine, so that its port is looked at.
    """
    try:
        tracking.check()
        if here:
            tracking.check_port()
    except TrackingError as error:
        raise InputError(str(error)) from None


def cluster_of(
    plans: Sequence[Plan], path: Path | None, profile: Path | None, device: str, force: bool
) -> Cluster | None:
    """Reads the cluster, on which the plans must fit. Raises InputError, PlanError or FileError."""
    if device not in ("chip", "cpu"):
        raise InputError(f"--device is {device}; expected chip or cpu")
    if device == "cpu":
        if force:
            raise InputError("--force skips the check of the chips' memory; --device cpu has none")
        if profile is not None:
            raise InputError("--profile says how fast chips are; --device cpu has none")
        return None
    if path is None:
        raise InputError("--cluster is missing: it says which chips and links the plan has")
    if profile is not None and len(plans) > 1:
        raise InputError("--profile is not for --bucket: it is of one length of sequence")
    from heteropp.cost.capacity import check_memory
    from heteropp.cost.planned import check_cluster
    from heteropp.cost.tracing import cache
    from heteropp.description.cluster import read_cluster
    from heteropp.description.profile import ProfileError
    from heteropp.description.used_chips import used_cluster
    from heteropp.runtime.mixed_lengths.memory import check_together
    from heteropp.simulator.simulate import simulate

    cluster = used_cluster(plans[0], read_cluster(path))
    cluster = measured_as(cluster, profile, plans[0].model)
    for plan in plans:
        check_cluster(plan, cluster)
    if len(plans) > 1:
        if not force:
            check_together(plans, cluster)
        return cluster
    if not force:
        check_memory(plans[0], cluster)
    try:  # every rank does so: what it takes is traced here, once
        simulate(plans[0], cluster, emulated=True)
    except ProfileError as error:
        raise InputError(f"--profile: {error}") from None
    cache.flush()
    return cluster


def choose_chip(plan: Plan, cluster: Path | None, rank: int) -> None:
    """Names this rank's chip to ditorch, which opens it as it is imported."""
    if "DITORCH_VENDOR" in os.environ or rank >= plan.world_size:
        return
    chip = plan.chip(rank)
    beside = cluster is not None and chip.endswith(".toml")
    os.environ["DITORCH_CHIP"] = str(cluster.parent / chip) if beside else chip  # type: ignore[union-attr]


def chosen_hyperparameters(
    base: Hyperparameters | None, steps: int, settings: dict[str, Any], plan: Plan
) -> Hyperparameters:
    """What the command line says, over what the run to resume says, over the defaults.

    Raises HyperparameterError or InputError.
    """
    base = base or Hyperparameters(decay_steps=steps, optimizer=plan.optimizer)
    given = {name: value for name, value in settings.items() if value is not None}
    hyperparameters = replace(base, **given)
    hyperparameters.validate()
    model = plan.model
    hyperparameters.check_groups(
        [model.global_name(p.name) for p in model.parameters() if p.trains]
    )
    if hyperparameters.expert_bias_update_rate and not any(
        map(model.is_expert_bias, model.parameters())
    ):
        raise InputError(
            f"--expert-bias-update-rate is {hyperparameters.expert_bias_update_rate:g}, but model "
            f"{model.name} has no router with a bias that trains; expected 0, or a plan that is "
            "searched anew where this one is of an earlier version"
        )
    schedule, last = hyperparameters.learning_rate_schedule, hyperparameters.decay_steps
    if schedule == "wsd":
        last -= hyperparameters.cooldown
    if (
        given.keys() & {"warmup_steps", "cooldown_steps"}
        and schedule != "constant"
        and hyperparameters.warmup_steps > last
    ):
        what = "stable part" if schedule == "wsd" else schedule
        raise InputError(
            f"--warmup-steps is {hyperparameters.warmup_steps}, and the learning rate's {what} "
            f"ends at step {last}; expected no more, or a longer --decay-steps"
        )
    return hyperparameters


def check_unused(output: Path) -> None:
    """Raises InputError where an earlier run has left checkpoints in the output folder."""
    from heteropp.state.checkpoint.manifest import steps

    if steps(output / "checkpoints"):
        raise InputError(
            f"{output / 'checkpoints'} holds checkpoints of an earlier run; "
            "give --resume to go on from them, or another --output"
        )


def check_files(
    plan: Plan,
    by_length: Sequence[Plan],
    documents: int | None,
    output: Path,
    saved: Checkpoint | None,
    data: Path | None,
    validation: Mapping[str, Path],
    within: AttentionWithin,
    hyperparameters: Hyperparameters,
    seed: int,
) -> TokenFile:
    """Checks what the ranks will read and write to, before any of them starts; gives the data.

    Raises InputError or FileError.
    """
    from heteropp.data.source import check_data
    from heteropp.runtime.mixed_lengths.plans import what_is_learnt
    from heteropp.state.checkpoint.manifest import CheckpointError, Manifest, check_resumable

    model = by_length[-1].model if by_length else plan.model
    validated = validation.values()
    tokens = check_data(data, validated, model, within, mixed_lengths=bool(by_length))
    if saved:
        run = Manifest(
            step=0,
            **what_is_learnt(plan, by_length, documents or 0, within),
            seed=seed,
            tokens_sha256=tokens.sha256,
            hyperparameters=hyperparameters,
        )
        try:
            check_resumable(saved, run)
        except CheckpointError as error:
            raise InputError(str(error)) from None
    make_folder(output)
    if not os.access(output, os.W_OK):
        raise InputError(f"--output {output} is a folder that cannot be written to")
    return tokens
