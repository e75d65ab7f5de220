"""A model, a cluster and a plan, in every form in which a caller may give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from heteropp.api.errors import InputError
from heteropp.description.cluster import Cluster, read_cluster
from heteropp.description.model import read_model
from heteropp.description.plan import Plan, read_plan
from heteropp.description.profile import Profile, measured_cluster, read_profile
from heteropp.models.spec import ModelError, ModelSpec

if TYPE_CHECKING:
    from heteropp.models.custom.definition import ModelDefinition

AnyModel = str | Path | ModelSpec | Callable[[], "ModelDefinition"]
AnyCluster = str | Path | Cluster
AnyPlan = str | Path | Plan


def the_model(
    model: AnyModel,
    sequence_length: int | None = None,
    lora: str | None = None,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Returns the spec of a model, however it is given. Raises FileError or InputError.

    trust_remote_code: whether code that came with it may run.
    """
    if lora is not None and not isinstance(model, str | Path):
        raise InputError("LoRA is for a model given as a Hugging Face folder")
    try:
        if isinstance(model, ModelSpec):
            model.allow_code(trust_remote_code)
            if sequence_length in (None, model.sequence_length):
                return model
            if model.family == "custom":
                raise ModelError("a model of one's own decides itself how long sequences are")
            found = replace(model, sequence_length=sequence_length)
            found.validate()
            return found
        if callable(model):
            from heteropp.models.custom.source import source_of

            model = source_of(model)
    except ModelError as error:
        raise InputError(str(error)) from None
    if not isinstance(model, str | Path):
        raise InputError(
            f"model is {model!r}; expected a name, a path, a spec or a function that returns a "
            "heteropp.ModelDefinition"
        )
    return read_model(model, sequence_length, lora, trust_remote_code)


def the_cluster(cluster: AnyCluster) -> Cluster:
    """Returns a cluster, however it is given. Raises FileError or InputError."""
    if isinstance(cluster, Cluster):
        return cluster
    if not isinstance(cluster, str | Path):
        raise InputError(f"cluster is {cluster!r}; expected a name, a path or a heteropp.Cluster")
    return read_cluster(cluster)


def the_plan(plan: AnyPlan, trust_remote_code: bool = False) -> Plan:
    """Returns a plan, or reads it. Raises FileError or InputError.

    trust_remote_code: whether code that came with its model may run.
    """
    if not isinstance(plan, str | Path | Plan):
        raise InputError(f"plan is {plan!r}; expected a path or a heteropp.Plan")
    found = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    allow_code(found.model, trust_remote_code)
    return found


def measured_as(cluster: Cluster, profile: Path | None, model: ModelSpec) -> Cluster:
    """Returns a cluster with the times that were measured on it, if a profile says some.

    Raises FileError, or InputError for a profile of another model.
    """
    if profile is None:
        return cluster
    found = read_profile(Path(profile))
    check_profile(Path(profile), found, model)
    return measured_cluster(cluster, found)


def unused_profile(plan: Plan, profile: Path | None) -> str | None:
    """Returns what is to be said where a plan was made from a profile and now none is given."""
    if plan.profile is None or profile is not None:
        return None
    return (
        f"the plan was made from profile {plan.profile}; without --profile, the chips' files say "
        "how fast they are"
    )


def check_profile(path: Path, profile: Profile, model: ModelSpec) -> None:
    """Raises InputError where a profile is not of the model."""
    if model.base() is not model:
        raise InputError("a profile measures the training of all weights; plan LoRA without one")
    theirs = asdict(profile.model)
    for name, value in asdict(replace(model, name=profile.model.name)).items():
        if theirs.get(name) != value:
            raise InputError(
                f"{path} is of a model with {name} {theirs.get(name)}; this one has {value}"
            )


def allow_code(model: ModelSpec, trust_remote_code: bool) -> None:
    """Lets this process run code that came with a model, where there is some.

    Raises InputError where it is not trusted, or has changed.
    """
    try:
        model.allow_code(trust_remote_code)
    except ModelError as error:
        raise InputError(f"model {model.name}: {error}") from None
