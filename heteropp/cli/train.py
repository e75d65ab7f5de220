"""heteropp-train: trains a model as a plan says, on this machine's chips or under torchrun."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heteropp.cli.errors import InputError, one_sentence
from heteropp.cli.tools import leave_tools_to_ranks
from heteropp.files import make_folder
from heteropp.hyperparameters import Hyperparameters
from heteropp.plan import Plan, read_plan
from heteropp.training.data import VOCABULARY

if TYPE_CHECKING:
    from heteropp.cluster import Cluster

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-train --plan plan.json --cluster cluster.toml --steps 60
  heteropp-train --plan plan.json --cluster cluster.toml --steps 90 --resume
  torchrun --nnodes 2 ... -m heteropp.cli.train --plan plan.json ...
"""


@app.command(help=__doc__, epilog=EXAMPLES)
def train(
    plan: Annotated[Path, typer.Option(help="What heteropp-search wrote.")],
    cluster: Annotated[Path | None, typer.Option(help="The cluster file of the plan.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps in all.")] = 60,
    data: Annotated[
        Path | None,
        typer.Option(help="A folder of text; the Python standard library's sources if absent."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = (
        False
    ),
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints; 0: only at the end.")
    ] = 0,
    keep: Annotated[int, typer.Option(min=1, help="How many checkpoints to keep.")] = 2,
    learning_rate: Annotated[float | None, typer.Option(help="The highest; 1e-3 if absent.")] = (
        None
    ),
    warmup_steps: Annotated[
        int | None, typer.Option(help="Of the learning rate; 10 if absent.")
    ] = None,
    decay_steps: Annotated[
        int | None, typer.Option(help="Where the cosine ends; --steps if absent.")
    ] = None,
    gradient_clip: Annotated[
        float | None, typer.Option(help="Largest global norm; 0: none; 1 if absent.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="AdamW's; 0.1 if absent.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and the batches.")] = 0,
    device: Annotated[
        str, typer.Option(help="chip, or cpu to run without chips, over gloo.")
    ] = "chip",
    force: Annotated[bool, typer.Option("--force", help="Skip the memory check.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    settings = {
        "learning_rate": learning_rate,
        "warmup_steps": warmup_steps,
        "decay_steps": decay_steps,
        "gradient_clip": gradient_clip,
        "weight_decay": weight_decay,
    }
    launched = "RANK" in os.environ  # by torchrun, which started every rank itself
    with one_sentence():
        content = read_plan(plan)
        if launched:
            _choose_chip(content, cluster, int(os.environ["RANK"]))
            if device == "chip":
                import ditorch  # noqa: F401  (autograd counts devices once, at the first backward)
        elif device == "chip":
            leave_tools_to_ranks()
        machines = _cluster(content, cluster, device, force)
        check_runs(content, plan)
        hyperparameters = _hyperparameters(output, resume, steps, settings)
        if not launched:
            _check_files(content, output, resume, data, hyperparameters, seed)

    from heteropp.training.train import RankChip, Run, train_rank  # torch is a second's import

    run = Run(
        plan=content,
        cluster=cluster if machines else None,
        chips=tuple(
            RankChip(str(machines.chip(rank).path), machines.chip(rank).chip_type)
            if machines
            else RankChip(_chip(content, rank), _chip(content, rank))
            for rank in range(content.world_size)
        ),
        steps=steps,
        output=output,
        data=data,
        resume=resume,
        checkpoint_every=checkpoint_every,
        keep=keep,
        seed=seed,
        hyperparameters=hyperparameters,
        device=device,  # type: ignore[arg-type]
    )
    if launched:
        train_rank(run, json)
        return
    from heteropp.training.launch import launch

    raise typer.Exit(launch(train_rank, run, json, labels=run.labels, logs=run.logs))


def check_runs(plan: Plan, path: Path) -> None:
    """Raises InputError for a plan that this release cannot run."""
    if len(plan.pipelines) != 1:
        raise InputError(f"{path} has {len(plan.pipelines)} pipelines; this release trains one")
    if plan.schedule != "1f1b":
        raise InputError(f"{path} has schedule {plan.schedule}; this release trains 1f1b")
    if plan.zero_stage > 1:
        raise InputError(f"{path} has ZeRO stage {plan.zero_stage}; this release trains 0 and 1")
    for s, stage in enumerate(plan.pipelines[0].stages):
        if stage.offload:
            raise InputError(f"{path}: stages[{s}] is offloaded, which this release does not train")
    if plan.model.attention != "explicit":
        raise InputError(
            f"{path}: the model's attention is {plan.model.attention}; this release trains explicit"
        )
    if plan.model.vocab < VOCABULARY:
        raise InputError(
            f"{path}: the model's vocab is {plan.model.vocab}; bytes need {VOCABULARY}"
        )
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and int(world_size) != plan.world_size:
        raise InputError(f"{path} needs {plan.world_size} ranks; torchrun started {world_size}")


def _cluster(plan: Plan, path: Path | None, device: str, force: bool) -> Cluster | None:
    """Reads the cluster, on which the plan must fit. Raises InputError, PlanError or FileError."""
    if device not in ("chip", "cpu"):
        raise InputError(f"--device is {device}; expected chip or cpu")
    if device == "cpu":
        return None
    if path is None:
        raise InputError("--cluster is missing: it says which chips and links the plan has")
    from heteropp.cluster import read_cluster
    from heteropp.planned import check_cluster, check_memory

    cluster = read_cluster(path)
    check_cluster(plan, cluster)
    if not force:
        check_memory(plan, cluster)
    return cluster


def _choose_chip(plan: Plan, cluster: Path | None, rank: int) -> None:
    """Names this rank's chip to ditorch, which opens it as it is imported."""
    if "DITORCH_VENDOR" in os.environ or rank >= plan.world_size:
        return
    chip = _chip(plan, rank)
    beside = cluster is not None and chip.endswith(".toml")
    os.environ["DITORCH_CHIP"] = str(cluster.parent / chip) if beside else chip  # type: ignore[union-attr]


def _chip(plan: Plan, rank: int) -> str:
    pipeline, stage, replica, _ = plan.place(rank)
    return plan.pipelines[pipeline].stages[stage].replicas[replica].chip


def _hyperparameters(
    output: Path, resume: bool, steps: int, settings: dict[str, Any]
) -> Hyperparameters:
    """What the command line says, over what the checkpoint says, over the defaults."""
    base = Hyperparameters(decay_steps=steps)
    if resume:
        from heteropp.training.checkpoint import latest

        found = latest(output / "checkpoints")
        if found is None:
            raise InputError(f"{output / 'checkpoints'} holds no checkpoint to resume from")
        base = found[1].hyperparameters
    given = {name: value for name, value in settings.items() if value is not None}
    hyperparameters = replace(base, **given)
    hyperparameters.validate()
    return hyperparameters


def _check_files(
    plan: Plan,
    output: Path,
    resume: bool,
    data: Path | None,
    hyperparameters: Hyperparameters,
    seed: int,
) -> None:
    """Checks what the ranks will read and write to, before any of them starts.

    Raises InputError or FileError.
    """
    from heteropp.training import checkpoint
    from heteropp.training.data import DataError, open_tokens

    found = checkpoint.latest(output / "checkpoints")
    if found and not resume:
        raise InputError(
            f"{output / 'checkpoints'} holds checkpoints of an earlier run; "
            "give --resume to go on from them, or another --output"
        )
    try:
        tokens = open_tokens(data)
        tokens.sequences(seed, 0, [0], plan.model.sequence_length)
        if found:
            path, saved = found
            run = checkpoint.Manifest(
                step=0,
                plan_sha256=checkpoint.plan_sha256(plan),
                seed=seed,
                tokens_sha256=tokens.sha256,
                hyperparameters=hyperparameters,
            )
            checkpoint.check_resumable(path, saved, run)
            checkpoint.verify(path, saved)
    except (checkpoint.CheckpointError, DataError) as error:
        raise InputError(str(error)) from None
    make_folder(output)
    if not os.access(output, os.W_OK):
        raise InputError(f"--output {output} is a folder that cannot be written to")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
