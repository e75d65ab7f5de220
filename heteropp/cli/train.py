"""heteropp-train: trains a model as a plan says, on this machine's chips or under torchrun."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from heteropp.data import VOCABULARY
from heteropp.files import FileError
from heteropp.hyperparameters import HyperparameterError, Hyperparameters
from heteropp.plan import Plan, read_plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

EXAMPLES = """\b
Examples:
  heteropp-train --plan plan.json --cluster cluster.toml --steps 60 --output runs/first
  heteropp-train --plan plan.json --cluster cluster.toml --steps 90 --output runs/first --resume
  torchrun --nnodes 2 --nproc-per-node 8 ... -m heteropp.cli.train --plan plan.json ...
"""


class InputError(ValueError):
    """What the command was given cannot be used; the message is one sentence."""


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
    learning_rate: Annotated[float | None, typer.Option(help="The highest.  [default: 1e-3]")] = (
        None
    ),
    warmup_steps: Annotated[int | None, typer.Option(help="[default: 10]")] = None,
    decay_steps: Annotated[
        int | None, typer.Option(help="Where the cosine ends.  [default: --steps]")
    ] = None,
    gradient_clip: Annotated[
        float | None, typer.Option(help="Largest global norm; 0: none.  [default: 1]")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="[default: 0.1]")] = None,
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
    try:
        content = read_plan(plan)
        if device not in ("chip", "cpu"):
            raise InputError(f"--device is {device}; expected chip or cpu")
        check_runs(content, plan, force)
        hyperparameters = _hyperparameters(output, resume, steps, settings)
        launched = "RANK" in os.environ  # by torchrun, which started every rank itself
        if not launched:
            _check_files(content, output, resume, data, hyperparameters, seed)
    except (FileError, HyperparameterError, InputError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None

    from heteropp.train import RankChip, Run, train_rank  # torch is a second's import

    run = Run(
        plan=content,
        chips=tuple(
            RankChip(_chip(content, rank), _chip(content, rank))
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
    from heteropp.launch import launch

    raise typer.Exit(launch(train_rank, run, json, labels=run.labels, logs=run.logs))


def check_runs(plan: Plan, path: Path, force: bool) -> None:
    """Raises InputError for a plan that this release, or its chips, cannot run."""
    if len(plan.pipelines) != 1:
        raise InputError(f"{path} has {len(plan.pipelines)} pipelines; this release trains one")
    if plan.model.vocab < VOCABULARY:
        raise InputError(
            f"{path}: the model's vocab is {plan.model.vocab}; bytes need {VOCABULARY}"
        )
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is not None and int(world_size) != plan.world_size:
        raise InputError(f"{path} needs {plan.world_size} ranks; torchrun started {world_size}")
    if force or plan.prediction is None:
        return
    memory = zip(plan.prediction.memory_bytes, plan.prediction.capacity_bytes, strict=True)
    for rank, (need, capacity) in enumerate(memory):
        if need > capacity:
            raise InputError(
                f"{path}: stage {plan.place(rank)[1]} needs {need / 2**20:.1f} MiB on rank {rank} "
                f"(chip {_chip(plan, rank)}), which has {capacity / 2**20:.1f} MiB; "
                "--force runs it all the same"
            )


def _chip(plan: Plan, rank: int) -> str:
    pipeline, stage, replica, _ = plan.place(rank)
    return plan.pipelines[pipeline].stages[stage].replicas[replica].chip


def _hyperparameters(
    output: Path, resume: bool, steps: int, settings: dict[str, Any]
) -> Hyperparameters:
    """What the command line says, over what the checkpoint says, over the defaults."""
    base = Hyperparameters(decay_steps=steps)
    if resume:
        from heteropp.checkpoint import latest

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
    """Checks what the ranks will read, before any of them starts. Raises InputError."""
    from heteropp import checkpoint
    from heteropp.data import DataError, open_tokens

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


def main() -> None:
    app()


if __name__ == "__main__":
    main()
